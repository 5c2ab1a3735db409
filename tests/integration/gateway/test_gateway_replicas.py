"""A gateway before several replicas, and before fallbacks: what fails is answered elsewhere, and recorded as it was."""

import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.records import SessionEvent, Status
from schemas.tensors import int32_view
from tentalis.inference.replicas import router
from tentalis.local.ports import free_port
from tests.support.gateway_lab import Lab, Script, ack, backend_app, chunks, lab, listening, wait_for
from tests.support.replica_process import ReplicaProcess, replicas
from tests.support.replica_server import TOKENS, version_of_tokens

NOBODY = "http://127.0.0.1:9"
OWN: dict[str, Any] = {"name": "local", "server_id": "local", "logprobs_mode": "processed"}
OTHER: dict[str, Any] = {"name": "other", "models": ["big-1"]}
POLICY: dict[str, Any] = {"name": "assistant", "backend": "local", "models": ["*"]}


def spread(ports: list[int], *urls: str) -> dict[str, Any]:
    first, *more = [*(f"http://127.0.0.1:{port}" for port in ports), *urls]
    return {"backends": [OWN | {"url": first, "replicas": more, "models": ["base"]}], "policies": [POLICY]}


@contextmanager
def two_backends(one: Script, other: Script) -> Iterator[tuple[str, str]]:
    with listening(backend_app(one)) as first, listening(backend_app(other)) as second:
        yield first, second


class Clients:
    """Clients that call the gateway until they are stopped: `answered` has the text of each complete answer by its
    event id, `broken` the streams that ended with an error after their beginning, `refused` everything else."""

    def __init__(self, gateway: Lab) -> None:
        self._gateway = gateway
        self.answered: dict[str, str] = {}
        self.broken: list[str] = []
        self.refused: list[str] = []
        self._stop = threading.Event()

    def run(self, number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=self._gateway.url, timeout=30) as http:
            while not self._stop.is_set():
                messages = [{"role": "user", "content": f"question {draw.random()}"}]
                body = {"model": "assistant", "messages": messages, "stream": draw.random() < 0.5}
                headers = {"X-Session-Id": f"s{number}-{draw.randrange(4)}"}
                with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                    self._take(response, bool(body["stream"]))

    def _take(self, response: httpx.Response, streamed: bool) -> None:
        event_id = response.headers.get("x-request-id", "")
        if response.status_code != 200:
            self.refused.append(response.read().decode())
        elif streamed:
            found = list(chunks(response))
            if found and found[-1] is None:
                texts = [each["choices"][0]["delta"].get("content", "") for each in found[:-1] if each]
                self.answered[event_id] = "".join(texts)
            else:
                self.broken.append(event_id)
        else:
            response.read()
            self.answered[event_id] = response.json()["choices"][0]["message"]["content"]

    def stop(self) -> None:
        self._stop.set()


def check_recorded(gateway: Lab, clients: Clients) -> list[SessionEvent]:
    """Every answer that a client saw to its end is on the log once, as it was shown, with the version of its tokens."""
    events = {event.session_event_id: event for event in gateway.log.events if event.status is Status.OK}
    assert len(gateway.log.events) == len({event.session_event_id for event in gateway.log.events})
    assert clients.answered.keys() <= events.keys() and clients.answered
    for event_id, text in clients.answered.items():
        event = events[event_id]
        tokens = int32_view(event.response_token_ids).tolist()
        assert (event.response, len(tokens), event.not_trainable) == (text, TOKENS, "")
        (version,) = version_of_tokens(tokens)
        assert event.model == f"assistant@v{version}"
        assert set(text.split()) == {f"v{version}"}
    return list(events.values())


def swap(gateway: Lab, servers: list[ReplicaProcess], version: int) -> None:
    """Loads a version on the replicas and acknowledges it, as the policies process does."""
    for each in servers:
        each.load(f"assistant@v{version}")
    gateway.deps.served.apply(ack("assistant", version))


def test_replicas_are_killed_and_started_again_in_traffic_and_in_a_swap_and_nothing_is_lost_or_misnamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "PROBE_INTERVAL_S", 0.2)
    ports = [free_port()]
    ports.append(free_port(ports))
    with replicas(ports) as servers, lab(tmp_path, **spread(ports)) as gateway, ThreadPoolExecutor(8) as pool:
        swap(gateway, servers, 1)
        clients = Clients(gateway)
        running = [pool.submit(clients.run, number) for number in range(6)]

        def more(calls: int) -> None:
            at_least = len(clients.answered) + calls
            wait_for(lambda: len(clients.answered) >= at_least)

        try:
            more(30)
            servers[0].end(signal.SIGKILL)
            more(30)
            # A swap while one replica is away: it is not asked for v2 when it is back, for it has no adapters yet.
            swap(gateway, servers[1:], 2)
            servers[0].start()
            more(30)
            servers[0].load("assistant@v1")
            servers[0].load("assistant@v2")
            health = gateway.deps.backends["local"].router.health
            wait_for(lambda: "assistant@v2" in (health()[servers[0].url].versions or ()))
            # One that is told to end lets its calls finish, and the other one takes what comes.
            broken = len(clients.broken)
            servers[1].end(signal.SIGTERM)
            more(30)
            assert len(clients.broken) == broken, "SIGTERM breaks no answer off"
        finally:
            clients.stop()
            for each in running:
                each.result(60)
        assert not clients.refused, "what had no token yet is answered by the other replica"
        events = check_recorded(gateway, clients)
        assert {event.model for event in events} == {"assistant@v1", "assistant@v2"}
        assert gateway.metric("tentalis_replica_repeated_calls_total", reason="failed") > 0
        assert gateway.metric("tentalis_replica_calls_total", replica=servers[0].url, outcome="ok") > 0
        assert gateway.metric("tentalis_replica_running_calls") == 0


def test_the_turns_of_a_session_go_to_one_replica(tmp_path: Path) -> None:
    one, other = Script(), Script()
    with two_backends(one, other) as (first, second), lab(tmp_path, **spread([], first, second)) as gateway:
        for script in (one, other):
            script.adapters.add("assistant@v1")
        gateway.deps.served.apply(ack("assistant", 1))
        gateway.chat("hello")
        health = gateway.deps.backends["local"].router.health
        wait_for(lambda: all(each.versions for each in health().values()), "both have listed their versions")
        for session in range(20):
            before = len(one.bodies), len(other.bodies)
            for _ in range(3):
                assert gateway.chat("hello", headers={"X-Session-Id": f"s{session}"}).status_code == 200
            assert sorted((len(one.bodies) - before[0], len(other.bodies) - before[1])) == [0, 3]
        assert one.bodies and other.bodies


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_is_repeated_only_if_its_client_has_seen_nothing_of_it(tmp_path: Path, streamed: bool) -> None:
    broken, good = Script(break_after=2), Script()
    with two_backends(broken, good) as (first, second), lab(tmp_path, **spread([], first, second)) as gateway:
        broken.adapters = good.adapters = {"assistant@v1"}
        gateway.deps.served.apply(ack("assistant", 1))
        if not streamed:
            broken.error = (500, b'{"error": {"message": "no memory"}}', "application/json")
        for session in range(10):
            headers = {"X-Session-Id": f"s{session}"}
            if not streamed:
                assert gateway.chat("hello", headers=headers).status_code == 200
                continue
            at_first = len(broken.bodies)
            found = gateway.stream("hello", headers=headers)
            assert (found[-1] is None) == (len(broken.bodies) == at_first), "two words had been shown"
        assert broken.bodies, "it was asked first"
        failed = [event for event in gateway.log.events if event.status is Status.FAILED]
        assert len(failed) == (len(broken.bodies) if streamed else 0)


def fallbacks(own: str, other: str, **policy: Any) -> dict[str, Any]:
    return {
        "backends": [OWN | {"url": own, "models": ["base"]}, OTHER | {"url": other}],
        "policies": [POLICY | {"fallback": [{"backend": "other", "model": "big-1"}]} | policy],
    }


@pytest.mark.parametrize("down", ["nobody listens", "500", "it breaks off"])
def test_a_fallback_answers_for_a_backend_that_cannot_and_is_recorded_under_its_own_name(
    tmp_path: Path, down: str, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = Script(), Script(models=("big-1",), words=("By", " another"))
    own.error = (500, b"{}", "application/json") if down == "500" else None
    with (
        two_backends(own, other) as (first, second),
        lab(tmp_path, **fallbacks(NOBODY if down == "nobody listens" else first, second)) as gateway,
    ):
        own.adapters.add("assistant@v1")
        gateway.deps.served.apply(ack("assistant", 1))
        if down == "it breaks off":
            own.break_after = 0
            answers = gateway.stream("hello")
            assert answers[-1] is not None and not other.bodies, "a piece had been shown: an error ends the stream"
            return
        answer = gateway.chat("hello")
        assert answer.json()["choices"][0]["message"]["content"] == "By another"
        assert answer.headers["x-tentalis-fallback"] == "other"
        assert "x-tentalis-task-id" not in answer.headers
        (event,) = gateway.log.events
        assert (event.model, event.policy, event.response) == ("big-1", "assistant", "By another")
        assert event.not_trainable == "the fallback other answered with big-1 instead of assistant@v1"
        assert gateway.metric("tentalis_gateway_fallbacks_total", policy="assistant", backend="other") == 1
        assert "the fallback other is asked for big-1" in caplog.text
        for _ in range(4):
            gateway.chat("hello")
        assert len(own.bodies) == (3 if down == "500" else 0), "its breaker is open: it is not waited for"
        own.error = None
        other.error = (503, b'{"error": {"message": "full"}}', "application/json")
        refused = gateway.chat("hello")
        assert refused.status_code >= 500 and "big-1" not in refused.text


def test_a_fallback_that_serves_the_same_version_is_trained_on_and_another_version_is_not(tmp_path: Path) -> None:
    spare = Script(adapters={"assistant@v1"})
    with listening(backend_app(spare)) as url:
        more = {
            "backends": [
                OWN | {"url": NOBODY, "models": ["base"]},
                OWN | {"name": "spare", "server_id": "b", "url": url},
            ],
            "policies": [POLICY | {"fallback": [{"backend": "spare"}]}],
        }
        with lab(tmp_path, **more) as gateway:
            for server in ("local", "b"):
                gateway.deps.served.apply(ack("assistant", 1, server))
            assert "x-tentalis-task-id" in gateway.chat("hello").headers
            gateway.deps.served.apply(ack("assistant", 2))
            gateway.chat("hello")
            first, second = gateway.log.events
            assert (first.model, first.not_trainable) == ("assistant@v1", "") and first.response_token_ids
            assert second.model == "assistant@v1"
            assert second.not_trainable == "the fallback spare answered with assistant@v1 instead of assistant@v2"
            pinned = gateway.chat("hello", model="assistant@v2")
            assert pinned.status_code == 502, "who names a version gets no other one"
            assert gateway.chat("hello", model="assistant@v1").status_code == 200
            spare.adapters.clear()
            assert gateway.chat("hello").status_code == 502, "the error of the policy's own backend"
            assert gateway.metric("tentalis_gateway_holds_total") == 0, "a fallback is not waited for"


def test_what_the_client_did_wrong_goes_to_no_fallback(tmp_path: Path) -> None:
    own, other = Script(error=(400, b'{"error": {"message": "too long"}}', "application/json")), Script()
    with two_backends(own, other) as (first, second), lab(tmp_path, **fallbacks(first, second)) as gateway:
        assert gateway.chat("hello").status_code == 400
        assert not other.bodies and gateway.metric("tentalis_gateway_fallbacks_total") == 0
