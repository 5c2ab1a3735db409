"""Runs as the log records them: rows, comparisons, and what may be deleted of one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Drop
from tentalis.ops.runs.core import RunsView, UnknownRunId
from tentalis.ops.runs.deletion import DeletionRow, StoredPart, consequences, plan_deletion
from tentalis.ops.runs.process import delete, is_newest, stored_parts
from tentalis.service.settings import Settings
from tentalis.storage.file_set import fetch_set, read_manifest, write_set
from tentalis.storage.location import Location
from tests.support.loop_records import manifest, plan, step_result, update
from tests.support.object_store import environment_of, object_store


def planned(step: int, run: str, *rollouts: str, dropped: int = 0, **more: Any) -> Any:
    drops = (Drop(partition=0, first_offset=0, last_offset=9, count=dropped, reason="stale"),) if dropped else ()
    made = plan(step, list(rollouts), run)
    return made.model_copy(update={"plan_id": f"{run}-{step}", "drops": drops} | more)


def stepped(step: int, version: int, run: str, sha: str, **metrics: float) -> Any:
    return step_result(
        step, version, run, plan_id=f"{run}-{step}" if step else None, adapter_sha256=sha, metrics=metrics
    )


def view() -> RunsView:
    """Run `a` with steps 0 to 2, a branch `a.1` from its step 1, and a counterfactual `what-if` of it."""
    made = RunsView()
    branch = {"parent_run": "a", "parent_step": 1, "event_time": manifest().event_time + 1, "digest": "n"}
    settings = {"config": "steps: 3\noptimizer: {lr: 0.5}\nmax_staleness: 0\n", "threads": 2}
    for record in (
        manifest("a", first=0),
        manifest("a.1", first=3).model_copy(update=branch | settings),
        manifest("what-if", first=0).model_copy(update=branch | {"policy": "what-if", "parent_step": 0, "digest": "o"}),
        planned(1, "a", "t1/0", "t1/1", dropped=3),
        planned(2, "a", "t2/0", "lost/0"),
        planned(2, "a", "t2/0", attempt=2, plan_id="a-2-2"),
        planned(1, "a.1", "t2/0", "t3/0"),
        stepped(0, 0, "a", "s0"),
        stepped(1, 1, "a", "s1", reward_mean=0.25, rl_loss=3.0),
        step_result(2, 2, "a", attempt=2, plan_id="a-2-2", adapter_sha256="s2", metrics={"reward_mean": 0.75}),
        stepped(0, 3, "a.1", "s1"),
        stepped(1, 4, "a.1", "other", reward_mean=0.5),
        *(update(version, run_id="a", step=version) for version in range(3)),
        update(4, run_id="a.1", step=1),
    ):
        made.apply(record)
    return made


def test_a_row_counts_what_was_really_trained() -> None:
    of = view()
    row = of.row(of.find("a"))
    assert (row["steps"], row["versions"], row["rollouts"], row["dropped"], row["reward"]) == (2, "v0-v2", 3, 3, 0.75)
    assert of.find("a").drops() == {"stale": 3}
    assert set(of.find("a").trained_rollouts()) == {"t1/0", "t1/1", "t2/0"}, "the attempt that was lost does not count"
    assert {run.run_id: of.row(run)["parent"] for run in of.runs} == {"a": None, "a.1": "a@1", "what-if": "a@0"}
    assert of.is_counterfactual(of.find("what-if")) and not of.is_counterfactual(of.find("a.1"))
    assert of.children(of.find("a")) == {"a.1": 1, "what-if": 0}


def test_details_name_every_step_with_its_digest() -> None:
    of = view()
    details = of.details(of.find("a"))
    assert [(s["step"], s["version"], s["rollouts"], s["sha256"]) for s in details["steps_trained"]] == [
        (0, 0, 0, "s0"),
        (1, 1, 2, "s1"),
        (2, 2, 1, "s2"),
    ]
    assert details["continued_by"] == {"a.1": "from step 1", "what-if": "from step 0"}
    assert details["settings"]["batch_rollouts"] == 4
    assert [version["version"] for version in details["published"]] == [f"assistant@v{n}" for n in range(3)]


def test_a_comparison_shows_what_differs_and_the_ends_of_the_curves() -> None:
    of = view()
    found = of.compare(of.find("a"), of.find("a.1"))
    assert found["settings"] == {"batch_rollouts": [4, None], "optimizer.lr": [None, 0.5]}
    assert found["environment"] == {"threads": [1, 2]}
    assert found["curves"]["reward_mean"] == {"first": [0.25, 0.5], "last": [0.75, 0.5], "mean_of_last_5": [0.5, 0.5]}
    assert found["curves"]["rl_loss"]["last"] == [3.0, None]
    assert found["rollouts"] == {"both": 1, "only": [2, 1], "other_content": 0}
    assert found["digests"] == {"compared": 2, "equal": 0, "first_difference": 0}


def test_a_run_compared_with_itself_does_not_differ() -> None:
    of = view()
    found = of.compare(of.find("a"), of.find("a"))
    assert (found["settings"], found["environment"]) == ({}, {})
    assert found["digests"] == {"compared": 3, "equal": 3, "first_difference": None}


def test_an_unknown_run_names_those_there_are() -> None:
    with pytest.raises(UnknownRunId, match=r"runs: .*a\.1"):
        view().find("b")


# --- delete -----------------------------------------------------------------------------------------------------------


def stored(home: Path) -> None:
    for step in range(3):
        folder = home / "checkpoints" / "a" / f"{step:06d}-001-owner"
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(b"x" * 10)
        adapter = home / "adapters" / "assistant" / f"v{step}"
        adapter.mkdir(parents=True)
        (adapter / "adapter_model.safetensors").write_bytes(b"y" * 5)
    (home / "adapters" / "assistant" / "v4").mkdir()
    (home / "tracking" / "a").mkdir(parents=True)


def kept(rows: list[DeletionRow]) -> dict[tuple[str, int | None], str]:
    return {(row.part.kind, row.part.version): row.keep for row in rows}


def test_what_is_needed_stays_and_only_the_rest_is_deleted(tmp_path: Path) -> None:
    stored(tmp_path)
    of = view()
    run = of.find("a")
    parts = stored_parts(Settings(home=tmp_path), of, run)
    assert [(p.kind, p.version, p.bytes) for p in parts] == [
        *(("checkpoint", n, 10) for n in range(3)),
        *(("adapter", n, 5) for n in range(3)),
        ("tracking", None, 0),
    ], "the branch's v4 is not this run's"
    rows = plan_deletion(parts, {2}, {"a.1": 1}, resumable=False)
    found = kept(rows)
    assert {what for what, why in found.items() if not why} == {
        ("checkpoint", 0),
        ("adapter", 0),
        ("adapter", 1),
        ("tracking", None),
    }
    assert found["checkpoint", 1] == "a.1 continues from this step" and "v2 is served" in found["checkpoint", 2]
    said = " ".join(consequences(rows, "a"))
    assert "v0, v1 can no longer be promoted" in said and "tentalis replay a" in said
    assert delete(rows) == 20
    assert sorted(path.name for path in (tmp_path / "adapters" / "assistant").iterdir()) == ["v2", "v4"]
    assert len(list((tmp_path / "checkpoints" / "a").iterdir())) == 2
    shutil.rmtree(tmp_path)


def test_the_sets_of_a_store_and_what_was_written_before_it_are_deleted_together(tmp_path: Path) -> None:
    home, old = tmp_path / "home", tmp_path / "home" / "adapters" / "assistant" / "v0"
    (home / "files").mkdir(parents=True)
    (home / "files" / "weights").write_bytes(b"weights")
    old.mkdir(parents=True)
    (old / "adapter_model.safetensors").write_bytes(b"y" * 5)
    with object_store() as server, environment_of(server):
        bucket = server.bucket()
        store = Location.parse(bucket)
        written = (
            store / "checkpoints" / "a" / "000000-001-owner",
            store / "checkpoints" / "a" / "000001-001-owner",
            store / "adapters" / "assistant" / "v1",
            store / "adapters" / "assistant" / "v4",
        )
        for place in written:
            write_set(place, home / "files", ["weights"])
        of = view()
        parts = stored_parts(Settings(home=home, store=bucket), of, of.find("a"))
        assert [(part.kind, part.version, part.place) for part in parts] == [
            ("checkpoint", 0, written[0]),
            ("checkpoint", 1, written[1]),
            ("adapter", 1, written[2]),
            ("adapter", 0, Location.of_folder(old)),
        ], "the branch's v4 is not this run's"
        assert all(part.bytes >= 5 for part in parts)
        rows = plan_deletion(parts, (), {"a.1": 1}, resumable=False)
        assert delete(rows) == sum(part.bytes for part in parts) - parts[1].bytes
        assert not old.exists()
        assert not any("000000-001-owner/" in key or "/v1/" in key for key in server.keys(bucket))
        manifest_left = read_manifest(written[1])
        assert manifest_left is not None and read_manifest(written[3]) is not None
        fetch_set(written[1], manifest_left, tmp_path / "fetched")
        assert (tmp_path / "fetched" / "weights").read_bytes() == b"weights"


def test_the_checkpoint_that_a_trainer_continues_from_stays() -> None:
    parts = [StoredPart("checkpoint", Location(f"s3://b/{step}"), 1, 10 + step, step) for step in range(3)]
    assert [row.keep for row in plan_deletion(parts, (), {}, resumable=True)] == [
        "",
        "",
        "a trainer that starts continues from it",
    ]
    assert not any(row.keep for row in plan_deletion(parts, (), {}, resumable=False))
    of = view()
    assert is_newest(of, of.find("a.1")) and not is_newest(of, of.find("a"))


@given(st.sets(st.integers(0, 9)), st.dictionaries(st.text("abc", min_size=1), st.integers(0, 9)), st.booleans())
def test_nothing_that_is_needed_is_ever_deleted(needed: set[int], children: dict[str, int], resumable: bool) -> None:
    kinds = ("checkpoint", "adapter")
    parts = [StoredPart(kind, Location(f"s3://b/{kind}{n}"), 1, n, n) for n in range(10) for kind in kinds]
    gone = [row.part for row in plan_deletion(parts, needed, children, resumable) if not row.keep]
    assert not any(part.version in needed for part in gone)
    checkpoints = {part.step for part in gone if part.kind == "checkpoint"}
    assert not checkpoints & {*children.values()} and not (resumable and 9 in checkpoints)
