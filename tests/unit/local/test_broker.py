"""The embedded broker without a JVM: its configuration, its storage folder, its ports."""

import socket
from pathlib import Path

import pytest

from tentalis.local.broker import BrokerError, EmbeddedBroker, metadata_ready, new_cluster_id
from tentalis.local.ports import free_port, port_is_free
from tentalis.service.ports import listener_of


def test_a_cluster_id_is_never_taken_for_an_option() -> None:
    ids = {new_cluster_id() for _ in range(2000)}
    assert len(ids) == 2000
    assert all(len(identity) == 22 and not identity.startswith("-") for identity in ids)


def test_the_broker_listens_on_loopback_only_and_shares_the_record_limit(tmp_path: Path) -> None:
    values = EmbeddedBroker(tmp_path, 11111, 11112).properties()
    for key in ("listeners", "advertised.listeners"):
        assert all("127.0.0.1" in listener for listener in values[key].split(","))
    assert values["auto.create.topics.enable"] == "false"
    assert int(values["message.max.bytes"]) == 16 * 2**20
    assert int(values["fetch.max.bytes"]) > int(values["message.max.bytes"])


def test_settings_win(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path, 1, 2, record_limit=1000, settings={"num.io.threads": "1"})
    assert broker.properties()["message.max.bytes"] == "1000"
    assert broker.properties()["num.io.threads"] == "1"


def test_no_path_that_kafka_could_misread_reaches_the_jvm(tmp_path: Path) -> None:
    folder = tmp_path / "a, b" / "ünï"
    broker = EmbeddedBroker(folder, 1, 2)
    broker._jars = []
    assert [text for text in [*broker.command(), *broker.properties().values()] if "ünï" in text] == []
    assert broker.environment()["LC_ALL"] == "C.UTF-8"


def test_a_free_port_is_outside_the_range_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(50)}
    assert all(port_is_free(port) for port in ports)
    if lowest > 12_000:
        assert all(port < lowest for port in ports)
    assert free_port(avoid=ports) not in ports


def test_a_taken_port_is_explained(tmp_path: Path) -> None:
    with socket.socket() as server:
        port = free_port()
        server.bind(("127.0.0.1", port))
        server.listen()
        assert not port_is_free(port)
        assert "process" in listener_of(port)
        with pytest.raises(BrokerError, match=f"port {port} .* is taken by process"):
            EmbeddedBroker(tmp_path, free_port(avoid=(port,)), port).check_ports()


def test_nothing_answers_on_a_closed_port() -> None:
    assert metadata_ready(f"127.0.0.1:{free_port()}", timeout=0.3) is False
