"""The sync of several replicas: a version is acknowledged once all that answer have it, and a late one gets it."""

import asyncio
import hashlib
from pathlib import Path

import pytest

from schemas.records import PolicyUpdate
from tentalis.inference.protocol import ServerUnavailable
from tentalis.policies import replica as replica_module
from tentalis.policies.core import PolicyLog
from tentalis.policies.replica import AdapterRejected
from tentalis.policies.sync import AdapterSync, ServerAck
from tentalis.storage.file_cache import FileCache
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support.loop_records import promotion, update
from tests.support.loop_server import LoopServer

A, B = "http://a:1", "http://b:1"
SHA256 = hashlib.sha256(b"weights").hexdigest()


class Replicas:
    """Two replicas of one server, and the sync of both. `order`: the loaded versions, by replica."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = {A: LoopServer(), B: LoopServer()}
        self.log = PolicyLog("local")
        self.acks: list[tuple[int, bool]] = []
        self.at_ack: list[dict[str, list[str]]] = []
        self.errors: list[str | None] = []
        self.sync = self.restarted()

    def restarted(self) -> AdapterSync:
        return AdapterSync(self.servers, self.log, "local", self._acknowledge, FileCache(self.folder / "cache", 2**20))

    def _acknowledge(self, ack: ServerAck) -> None:
        self.acks.append((ack.version, ack.ok))
        self.errors.append(ack.error)
        self.at_ack.append({url: sorted(server.loaded) for url, server in self.servers.items()})
        self.log.apply(ack, 0)

    def promote(self, version: int) -> PolicyUpdate:
        folder = self.folder / f"v{version}"
        folder.mkdir(exist_ok=True)
        (folder / ADAPTER_WEIGHTS).write_bytes(b"weights")
        published = update(version, sha256=SHA256, location=folder.as_uri())
        self.log.apply(published, 2 * version)
        self.log.apply(promotion(version, sha256=SHA256), 2 * version + 1)
        return published

    def round(self) -> None:
        asyncio.run(self.sync.round())

    def loaded(self, url: str) -> list[str]:
        return sorted(self.servers[url].loaded)


@pytest.fixture
def two(tmp_path: Path) -> Replicas:
    return Replicas(tmp_path)


def test_a_version_is_acknowledged_once_when_every_replica_has_it(two: Replicas) -> None:
    for version in (1, 2):
        two.promote(version)
        two.round()
        two.round()
    assert two.acks == [(1, True), (2, True)]
    assert two.at_ack[1] == {A: ["assistant@v1", "assistant@v2"], B: ["assistant@v1", "assistant@v2"]}
    assert two.sync.problem == ""


def test_a_replica_that_is_away_holds_nothing_up_and_is_brought_up_to_date_without_another_word(two: Replicas) -> None:
    two.promote(1)
    two.round()
    two.servers[B].away = ServerUnavailable("connection refused")
    two.promote(2)
    two.round()
    assert two.acks == [(1, True), (2, True)] and two.at_ack[1][B] == ["assistant@v1"]
    assert two.sync.problem == "the replica http://b:1 does not answer: connection refused"
    two.servers[B].away = None
    two.servers[B].loaded.clear()
    two.round()
    assert two.loaded(B) == ["assistant@v2"] and two.sync.problem == ""
    assert two.acks == [(1, True), (2, True)], "the server serves v2 all the time"
    two.servers[A].away = two.servers[B].away = ServerUnavailable("gone")
    with pytest.raises(ServerUnavailable, match="gone; gone"):
        two.round()


def test_a_replica_with_another_base_model_lacks_the_version_and_is_named(
    two: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.servers[B].scores = (float("nan"), -1.0, -3.0)
    two.promote(1)
    two.round()
    two.round()
    assert two.acks == [(1, True)] and (two.loaded(A), two.loaded(B)) == (["assistant@v1"], [])
    assert two.sync.problem.startswith("the replica http://b:1 has no assistant@v1: the canary's log-probs differ")
    two.servers[B].scores = two.servers[A].scores
    monkeypatch.setattr(replica_module.time, "monotonic", lambda: 1e9)
    two.round()
    assert two.loaded(B) == ["assistant@v1"] and two.sync.problem == "" and two.acks == [(1, True)]


def test_a_version_that_every_replica_refuses_is_refused_once(two: Replicas) -> None:
    two.promote(1)
    two.round()
    for server in two.servers.values():
        server.refuse_load = "no free slot"
    two.promote(2)
    two.round()
    two.round()
    assert two.acks == [(1, True), (2, False), (1, True)]
    assert "no free slot" in str(two.errors[1])
    assert two.sync.problem.startswith("assistant@v2 is not served, assistant@v1 is served instead: ")
    assert two.sync.problem.count("no free slot") == 1


def test_our_own_restart_checks_the_canary_of_each_replica_again(two: Replicas) -> None:
    two.promote(1)
    two.round()
    two.sync = two.restarted()
    two.servers[B].scores = (float("nan"), -1.0, -3.0)
    two.round()
    assert (two.loaded(A), two.loaded(B)) == (["assistant@v1"], [])
    assert two.acks == [(1, True)], "one replica serves it as before"


def test_old_versions_are_unloaded_from_each_replica(two: Replicas) -> None:
    for version in range(1, 5):
        two.promote(version)
        two.round()
    kept = ["assistant@v2", "assistant@v3", "assistant@v4"]
    assert (two.loaded(A), two.loaded(B)) == (kept, kept)


def test_a_replica_that_goes_while_it_unloads_leaves_the_others_alone(
    two: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(name: str) -> None:
        raise ServerUnavailable("reset by peer")

    for version in range(1, 4):
        two.promote(version)
        two.round()
    monkeypatch.setattr(two.servers[A], "unload_adapter", gone)
    two.promote(4)
    two.round()
    assert len(two.loaded(A)) == 4 and two.loaded(B) == ["assistant@v2", "assistant@v3", "assistant@v4"]
    monkeypatch.undo()
    two.round()
    assert two.loaded(A) == two.loaded(B)


def test_a_candidate_is_tried_where_it_can_be_loaded(two: Replicas) -> None:
    candidate = two.promote(1)
    two.servers[A].refuse_load = "no free slot"
    asyncio.run(two.sync.load(candidate))
    assert (two.loaded(A), two.loaded(B), two.acks) == ([], ["assistant@v1"], [])
    two.servers[B].refuse_load = "no free slot"
    two.servers[B].loaded.clear()
    with pytest.raises(AdapterRejected, match="no free slot"):
        asyncio.run(two.sync.load(candidate))
    assert two.acks == [(1, False)]
