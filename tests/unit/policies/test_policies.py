"""Promotion and the sync of one server, against a server in memory."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.records import PolicyUpdate
from tentalis.inference.protocol import ServerUnavailable
from tentalis.policies import sync as sync_module
from tentalis.policies.core import PolicyLog, surplus
from tentalis.policies.guard import ROLLBACK
from tentalis.policies.replica import AdapterRejected, adapter_place, canary_difference, check_weights
from tentalis.policies.sync import AdapterSync, ServerAck
from tentalis.storage.file_cache import FileCache
from tentalis.storage.file_set import write_set
from tentalis.storage.location import Location
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support.loop_records import ack, manifest, promotion, update
from tests.support.loop_server import LoopServer
from tests.support.object_store import environment_of, object_store


class Bench:
    """A log, a server, and the sync between them."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.server = LoopServer()
        self.log = PolicyLog("local")
        self.acks: list[ServerAck] = []
        self.offset = 0
        self.sync = self.restarted()

    def restarted(self, dtype: str | None = None) -> AdapterSync:
        files = FileCache(self.folder / "cache", 2**20)
        return AdapterSync({"local": self.server}, self.log, "local", self._acknowledge, files, dtype=dtype)

    def _acknowledge(self, record: ServerAck) -> None:
        self.acks.append(record)
        self.log.apply(record, 0)

    def put(self, record: Any) -> None:
        self.log.apply(record, self.offset)
        self.offset += 1

    def publish(self, version: int, promote: bool = True, weights: bytes = b"weights") -> PolicyUpdate:
        folder = self.folder / f"v {version}"
        folder.mkdir(exist_ok=True)
        (folder / ADAPTER_WEIGHTS).write_bytes(weights)
        sha256 = hashlib.sha256(b"weights").hexdigest()
        published = update(version, sha256=sha256, location=folder.as_uri())
        self.put(published)
        if promote:
            self.put(promotion(version, sha256=sha256))
        return published

    def round(self) -> None:
        asyncio.run(self.sync.round())

    def said(self) -> list[tuple[int, bool]]:
        return [(each.version, each.ok) for each in self.acks]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(sync_module.time, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def test_a_promoted_version_is_loaded_checked_and_acknowledged_once(bench: Bench) -> None:
    published = bench.publish(1)
    bench.round()
    bench.round()
    assert bench.server.loaded == {"assistant@v1": str(bench.folder / "v 1")}
    assert bench.said() == [(1, True)]
    assert bench.acks[0].sha256 == published.sha256
    assert bench.acks[0].canary_max_diff == 0.0


def test_what_is_published_but_not_promoted_stays_out(bench: Bench) -> None:
    bench.publish(1)
    bench.publish(2, promote=False)
    bench.round()
    assert list(bench.server.loaded) == ["assistant@v1"]


def test_a_restarted_server_gets_its_adapter_back(bench: Bench) -> None:
    bench.publish(1)
    bench.round()
    bench.server.loaded.clear()
    bench.round()
    assert list(bench.server.loaded) == ["assistant@v1"]
    assert bench.said() == [(1, True), (1, True)]


def test_our_own_restart_checks_again_only_what_was_not_acknowledged(bench: Bench) -> None:
    bench.publish(1)
    bench.round()
    bench.sync = bench.restarted()
    bench.round()
    assert bench.said() == [(1, True)]
    # Killed between loading and acknowledging: the adapter is there, its acknowledgement is not.
    bench.publish(2)
    bench.server.loaded["assistant@v2"] = "x"
    bench.round()
    assert bench.said() == [(1, True), (2, True)]


def test_altered_weights_are_refused_and_the_old_version_goes_on(bench: Bench) -> None:
    bench.publish(1)
    bench.round()
    bench.publish(2, weights=b"altered")
    bench.round()
    assert bench.said() == [(1, True), (2, False), (1, True)], "the last word is what is served"
    assert "sha256" in (bench.acks[1].error or "")
    assert list(bench.server.loaded) == ["assistant@v1"]
    bench.round()
    assert len(bench.acks) == 3, "said once"
    # The log as it is after compaction: the last word only; and the server restarts.
    bench.server.loaded.clear()
    bench.sync = bench.restarted()
    bench.round()
    assert list(bench.server.loaded) == ["assistant@v1"]


def test_what_is_not_served_is_named_with_the_file_and_the_remedy_until_it_is(
    bench: Bench, clock: Callable[[float], None]
) -> None:
    bench.publish(1)
    bench.round()
    assert bench.sync.problem == ""
    bench.publish(2, weights=b"altered")
    bench.round()
    bench.round()
    said = bench.sync.problem
    assert said.startswith("assistant@v2 is not served, assistant@v1 is served instead: ")
    assert str(bench.folder / "v 2" / ADAPTER_WEIGHTS) in said and "move the folder away" in said
    (bench.folder / "v 2" / ADAPTER_WEIGHTS).unlink()
    clock(60.0)
    bench.round()
    assert "cannot be read" in bench.sync.problem
    (bench.folder / "v 2" / ADAPTER_WEIGHTS).write_bytes(b"weights")
    clock(120.0)
    bench.round()
    assert bench.sync.problem == ""


def test_a_canary_that_disagrees_is_unloaded_again(bench: Bench) -> None:
    bench.publish(1)
    bench.server.scores = (float("nan"), -1.0, -2.01)
    bench.round()
    assert bench.said() == [(1, False)]
    assert bench.acks[0].canary_max_diff == pytest.approx(0.01, abs=1e-5)
    assert not bench.server.loaded


@pytest.mark.parametrize(
    ("declared", "told", "difference", "served"),
    [
        (None, None, 0.01, False),
        (None, "bfloat16", 0.01, True),
        (None, "bfloat16", 0.03, False),
        ("bfloat16", None, 0.01, True),
        ("float16", None, 0.01, True),
        ("float32", None, 0.01, False),
        ("float32", None, 0.0005, True),
        ("bfloat16", "float32", 0.01, False),
        ("int4", None, 0.01, False),
    ],
)
def test_the_canarys_tolerance_is_that_of_the_servers_precision(
    bench: Bench, declared: str | None, told: str | None, difference: float, served: bool
) -> None:
    bench.publish(1)
    bench.server.card, bench.sync = {"dtype": declared}, bench.restarted(told)
    bench.server.scores = (float("nan"), -1.0, -2.0 - difference)
    bench.round()
    assert bench.said() == [(1, served)]


def test_adapters_in_an_object_store_are_fetched_by_the_server_or_for_it(bench: Bench, tmp_path: Path) -> None:
    weights = tmp_path / "made"
    weights.mkdir()
    (weights / ADAPTER_WEIGHTS).write_bytes(b"weights")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    with object_store() as store, environment_of(store):
        url = store.bucket()
        for version in (1, 2, 3):
            bench.put(update(version, sha256=sha256, location=f"{url}/v{version}"))
            bench.put(promotion(version, sha256=sha256))
            if version < 3:
                write_set(Location.parse(f"{url}/v{version}"), weights, [ADAPTER_WEIGHTS])
            # Our own server fetches; for another one, such as vLLM, the policies process does.
            bench.server.card = {"loads_urls": True} if version == 1 else {}
            bench.round()
            if version == 1:
                assert bench.server.loaded == {"assistant@v1": f"{url}/v1"} and bench.server.sha256 == sha256
        loaded = Path(bench.server.loaded["assistant@v2"])
        assert loaded.is_relative_to(tmp_path / "cache") and (loaded / ADAPTER_WEIGHTS).read_bytes() == b"weights"
    assert bench.said() == [(1, True), (2, True), (3, False), (2, True)], "v3 was never written: v2 stays"
    assert "never written completely" in bench.sync.problem and "assistant@v3" not in bench.server.loaded


def test_a_refused_version_is_tried_again_after_a_while(bench: Bench, clock: Callable[[float], None]) -> None:
    bench.publish(1)
    bench.server.refuse_load = "not for this base model"
    bench.round()
    bench.server.refuse_load = None
    bench.round()
    assert bench.said() == [(1, False)]
    assert "not for this base model" in (bench.acks[0].error or "")
    clock(60.0)
    bench.round()
    assert bench.said() == [(1, False), (1, True)]


def test_a_whole_model_is_loaded_only_by_a_server_that_takes_them(
    bench: Bench, tmp_path: Path, clock: Callable[[float], None]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    bench.put(update(1, sha256=sha256, location=tmp_path.as_uri(), rank=0))
    bench.put(promotion(1, sha256=sha256))
    bench.round()
    assert bench.said() == [(1, False)] and "p@v1" not in bench.server.loaded
    assert "is a whole model (its run has lora: null), and the server loads adapters only" in (
        bench.acks[0].error or ""
    )
    bench.server.card = {"loads_models": True}
    clock(60.0)
    bench.round()
    assert bench.said() == [(1, False), (1, True)]


def test_an_unreachable_server_causes_no_decision(bench: Bench) -> None:
    bench.publish(1)
    bench.server.away = ServerUnavailable("restarting")
    with pytest.raises(ServerUnavailable):
        bench.round()
    assert bench.acks == []
    bench.server.away = None
    bench.round()
    assert bench.said() == [(1, True)]


def test_a_promotion_of_what_was_never_published_is_refused(bench: Bench) -> None:
    bench.put(promotion(9))
    bench.round()
    assert bench.said() == [(9, False)]
    assert "never published" in (bench.acks[0].error or "")


def test_a_promotion_with_another_sha256_is_refused(bench: Bench) -> None:
    bench.publish(1, promote=False)
    bench.put(promotion(1, sha256="other"))
    bench.round()
    assert "promoted with sha256 other" in (bench.acks[0].error or "")


def test_a_rollback_is_served_and_acknowledged(bench: Bench) -> None:
    for version in (1, 2):
        bench.publish(version)
        bench.round()
    bench.put(promotion(1, mode="manual", sha256=hashlib.sha256(b"weights").hexdigest()))
    bench.round()
    assert bench.said() == [(1, True), (2, True), (1, True)]


def test_old_versions_are_unloaded_but_never_the_served_one(bench: Bench) -> None:
    for version in range(1, 6):
        bench.publish(version)
        bench.round()
    assert sorted(bench.server.loaded) == ["assistant@v3", "assistant@v4", "assistant@v5"]
    loaded = ["base", "x@v1", *(f"a@v{v}" for v in range(1, 12))]
    assert surplus(loaded, ["a@v2"]) == [f"a@v{v}" for v in (8, 7, 6, 5, 4, 3, 1)]


def test_versions_in_the_staleness_window_stay_loaded(bench: Bench) -> None:
    bench.put(manifest(staleness=4))
    for version in range(1, 8):
        bench.publish(version)
        bench.round()
    assert sorted(bench.server.loaded) == [f"assistant@v{version}" for version in (3, 4, 5, 6, 7)]


def test_several_policies_do_not_hinder_each_other(bench: Bench) -> None:
    bench.put(update(1, policy="math", location="https://example.org/a"))
    bench.put(promotion(1).model_copy(update={"policy": "math"}))
    bench.publish(1)
    bench.round()
    assert [(a.policy, a.ok) for a in bench.acks] == [("assistant", True), ("math", False)]
    assert list(bench.server.loaded) == ["assistant@v1"]


# The guard.


def test_the_guard_promotes_the_newest_unpromoted_update() -> None:
    log = PolicyLog("local")
    assert log.due_promotions(always=True) == []
    for offset, version in enumerate((1, 3, 2)):
        log.apply(update(version), offset)
    assert [u.version for u in log.due_promotions(always=True)] == [3]
    log.apply(promotion(3), 3)
    assert log.due_promotions(always=True) == []
    log.apply(update(4), 4)
    assert [u.version for u in log.due_promotions(always=True)] == [4]


def test_the_guard_does_not_undo_a_rollback_but_goes_on_with_what_comes_after() -> None:
    log = PolicyLog("local")
    log.apply(update(1), 0)
    log.apply(update(2), 1)
    log.apply(promotion(1, mode="manual"), 5)  # as compaction leaves it: the promotion of 2 is gone
    assert log.due_promotions(always=True) == []
    log.apply(update(3), 6)
    assert [u.version for u in log.due_promotions(always=True)] == [3]


def test_what_was_under_way_when_its_run_was_rolled_back_is_not_promoted() -> None:
    """The trainer hears of the decision between two steps, and publishes the one that it is in: were that served, the
    last decision would be no rollback any more, and the run would go on as if nobody had decided anything."""
    log = PolicyLog("local")
    log.apply(manifest(first=0), 0)
    for version in range(3):
        log.apply(update(version, step=version, sha256=f"s{version}"), version)
    log.apply(promotion(1, ROLLBACK, "s1"), 3)
    log.apply(update(3, step=3, sha256="s3"), 4)
    assert log.due_promotions() == log.due_promotions(always=True) == []
    log.apply(manifest("run-1.1", first=4), 1)
    log.apply(update(4, run_id="run-1.1", step=0, sha256="s1"), 5)
    assert [u.version for u in log.due_promotions()] == [4]
    # Whoever serves another version of the run by hand before its trainer has heard of it takes the rollback back.
    again = PolicyLog("local")
    for offset, record in enumerate((manifest(first=0), update(1), update(2, sha256="s2"))):
        again.apply(record, offset)
    for offset, record in ((3, promotion(1, ROLLBACK)), (4, promotion(2, "manual", "s2")), (5, update(3, sha256="s3"))):
        again.apply(record, offset)
    assert [u.version for u in again.due_promotions()] == [3]
    # A rollback to where the run is ends nothing.
    log.apply(promotion(4, ROLLBACK, "s1"), 6)
    log.apply(update(5, run_id="run-1.1", step=1, sha256="s5"), 7)
    assert [u.version for u in log.due_promotions()] == [5]


def test_acknowledgements_of_other_servers_are_not_ours() -> None:
    log = PolicyLog("local")
    log.apply(ack(1, server_id="other"), 0)
    assert not log.acknowledged("assistant@v1")


# The checks.


def test_an_adapters_location_is_a_folder_or_an_object_store(tmp_path: Path) -> None:
    folder = tmp_path / "an adapter"
    assert adapter_place(folder.as_uri()).folder == adapter_place(str(folder)).folder == folder
    assert adapter_place("s3://bucket/a").folder is None
    for elsewhere in ("https://example.org/a", "file://host/a", "relative/path"):
        with pytest.raises(AdapterRejected, match="must be a file:"):
            adapter_place(elsewhere)


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected, match="cannot be read"):
        check_weights(tmp_path, update(0))


def test_canary_difference() -> None:
    import numpy as np

    a = np.array([0.0, -1.0, -2.0], dtype=np.float32)
    assert canary_difference(a, np.array([np.nan, -1.0, -2.5], dtype=np.float32)) == pytest.approx(0.5)
    assert canary_difference(a, a[:2]) == float("inf")
    assert canary_difference(a, np.array([0, np.nan, -2.0], dtype=np.float32)) == float("inf")
    assert canary_difference(a[:1], a[:1]) == 0.0
