"""A broker that does not answer: what a process says of it, and when it ends."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tentalis.kafka import preflight
from tentalis.kafka.errors import Unreachable
from tentalis.kafka.preflight import SilentPort, connect, diagnosis
from tentalis.service.security import Security
from tentalis.service.settings import Settings

AWAY = ("closed", "silent", "unresolved")


@pytest.fixture
def addresses() -> Iterator[dict[str, str]]:
    """A port on which nothing listens, one that accepts connections and sends nothing, a name that no host has."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent, closing(socket.socket()) as closed:
        closed.bind(("127.0.0.1", 0))
        ports = {"closed": closed, "silent": silent}
        found = {name: f"127.0.0.1:{each.getsockname()[1]}" for name, each in ports.items()}
        yield found | {"unresolved": "no-such-host.invalid:9092"}


SAID = {"closed": "Connection refused", "silent": "accepts connections and sends nothing", "unresolved": "resolve"}


@pytest.mark.parametrize("kind", AWAY)
def test_a_broker_that_does_not_answer_is_named_while_it_is_tried_and_at_the_end(
    kind: str, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "DIAGNOSE_AFTER_S", 0.3)
    monkeypatch.setattr(preflight, "PROBE_S", 0.3)
    at = addresses[kind]
    with caplog.at_level(logging.INFO, preflight.log.name), pytest.raises(Unreachable) as ended:
        connect(Settings(bootstrap=at), 2.0)
    lines = [record.message for record in caplog.records if record.name == preflight.log.name]
    assert len(lines) == 1 and lines[0].startswith(f"no Kafka answers on {at} yet") and "trying for" in lines[0]
    assert f"no Kafka answers on {at} within 2 s" in str(ended.value) and "TENTALIS_BOOTSTRAP" in str(ended.value)
    if kind != "unresolved":  # a name server that does not answer either gives no reason in this time
        assert SAID[kind] in lines[0] and SAID[kind] in str(ended.value)


def test_a_port_that_sends_nothing_is_probed_once_in_a_short_time(
    addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[float] = []

    def silent(_: Settings) -> None:
        probed.append(time.monotonic())
        raise SilentPort

    monkeypatch.setattr(preflight, "DIAGNOSE_AFTER_S", 0.1)
    monkeypatch.setattr(preflight, "diagnosis", silent)
    with pytest.raises(Unreachable, match="sends nothing"):
        connect(Settings(bootstrap=addresses["silent"]), 1.0)
    assert len(probed) == 1


def test_a_port_that_sends_nothing_is_not_said_to_lack_tls(
    addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "PROBE_S", 0.2)
    for security in (Security(), Security(protocol="SSL")):
        with pytest.raises(SilentPort):
            diagnosis(Settings(bootstrap=addresses["silent"], security=security))
