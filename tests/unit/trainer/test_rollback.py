"""When a decision makes a branch, where the branch begins, what stays on disk, and when a start by hand is done."""

from dataclasses import replace
from pathlib import Path

import pytest

from schemas.records import PolicyUpdate, Position, Promotion
from tentalis.kafka.codec import make_codec
from tentalis.policies.lineage import Node
from tentalis.service.settings import Settings
from tentalis.storage.location import Location
from tests.support.loop_records import T0, manifest, plan, step_result, update
from trainer.run import rollback
from trainer.run.publish import prune_adapters
from trainer.run.retention import versions_to_keep
from trainer.run.rollback import branch_start, due_rollback, last_version_if_overtaken, new_branch, parent_of
from trainer.run.run_log import RunLog
from trainer.run.stop_condition import FOREVER, StopCondition


def run_log(steps: int = 3) -> RunLog:
    """run-1, trained and published up to `steps` as v0.. at the offsets 0.., begun at 10."""
    first = manifest(first=0).model_copy(update={"start": (Position(topic="r", partition=0, offset=10),)})
    run = RunLog("run-1", "assistant", {"m": first}, relatives=(first,))
    for step in range(steps + 1):
        run.results[step, min(step, 1)] = step_result(step, step, attempt=min(step, 1))
        if step:
            low = (Position(topic="r", partition=0, offset=10 + step),)
            run.plans[step, 1] = plan(step, [f"t{step}/0"]).model_copy(update={"low_water": low})
        run.add_record(update(step, step=step, sha256=f"s{step}"), step)
    return run


def decide(run: RunLog, version: int, mode: str, offset: int) -> PolicyUpdate | None:
    record = Promotion(policy="assistant", version=version, event_time=T0, sha256="s", mode=mode)
    run.add_record(record, offset)
    return due_rollback(run)


def test_only_a_rollback_to_an_earlier_version_branches() -> None:
    assert decide(run_log(), 1, "manual", 9) is None
    assert decide(run_log(), 3, "rollback", 9) is None, "that is where it is"
    assert decide(run_log(), 7, "rollback", 9) is None, "there is no such version"
    target = decide(run_log(), 1, "rollback", 9)
    assert target is not None and target.name == "assistant@v1"
    assert due_rollback(RunLog("run-1", "assistant")) is None


def test_a_rollback_to_the_last_committed_step_counts_while_the_next_one_is_being_committed() -> None:
    run = run_log()
    assert decide(run, 3, "rollback", 9) is None
    target = due_rollback(run, Node("run-1", 4))
    assert target is not None and target.name == "assistant@v3"


def test_the_last_decision_counts_and_is_acted_on_once() -> None:
    run = run_log()
    assert decide(run, 1, "rollback", 9) is not None
    branch = new_branch(run, "run-1")
    assert (branch.run_id, branch.first_manifest, branch.plans, branch.highest_version) == ("run-1.1", None, {}, 3)
    begun = manifest("run-1.1", first=4).model_copy(update={"parent_run": "run-1", "parent_step": 1})
    branch.manifests["b"], branch.relatives = begun, (*branch.relatives, begun)
    assert parent_of(branch) == ("run-1", 1)
    assert due_rollback(branch) is None, "killed before it published anything, it is still the branch"
    branch.add_record(update(4, run_id="run-1.1", step=0, sha256="s1"), 11)
    assert due_rollback(branch) is None
    branch.results[0, 0] = step_result(0, 4, "run-1.1", attempt=0)
    branch.results[1, 1] = step_result(1, 5, "run-1.1")
    again = decide(branch, 4, "rollback", 12)
    assert again is not None and (again.run_id, again.step) == ("run-1.1", 0)
    assert decide(branch, 5, "always", 13) is None


def test_a_rollback_is_for_the_run_that_published_last_whichever_run_the_version_is_of() -> None:
    run = run_log()
    other = manifest("other", first=7)
    run.relatives = (*run.relatives, other)
    run.add_record(update(7, run_id="other", step=0), 8)
    target = decide(replace(run, run_id="other", manifests={"o": other}, results={}), 1, "rollback", 9)
    assert target is not None and (target.run_id, target.step) == ("run-1", 1)
    assert decide(run, 7, "rollback", 10) is None, "it is for the other run, and says where that one is"
    assert due_rollback(run) is None


def test_a_run_whose_numbers_another_one_took_is_overtaken() -> None:
    run = run_log()
    assert last_version_if_overtaken(run, None) is None
    run.relatives = (*run.relatives, manifest("other", first=4))
    run.add_record(update(4, run_id="other", step=0), 8)
    assert last_version_if_overtaken(run, 3) is None, "a run that is at its end stays there, whoever starts it again"
    last = last_version_if_overtaken(run, 4)
    assert last is not None and last.name == "assistant@v3"
    assert last_version_if_overtaken(RunLog("run-1", "assistant"), None) is None
    # Its branch begins at step 7 of another run: the steps of that one are not its own.
    branch = manifest("run-1.1", first=5).model_copy(update={"parent_run": "other", "parent_step": 7})
    run = replace(run_log(), run_id="run-1.1", manifests={"b": branch})
    run.relatives = (*run.relatives, manifest("other", first=4), branch, manifest("third", first=13))
    run.add_record(update(8, run_id="run-1.1", step=3), 9)
    last = last_version_if_overtaken(run, 4)
    assert last is not None and last.step == 3
    assert last_version_if_overtaken(run, 3) is None


def test_a_branch_reads_on_behind_what_was_trained_not_behind_what_was_only_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: dict[int, int] | None = None
    monkeypatch.setattr(rollback, "start_after_move", lambda *_: moved)
    settings = Settings(bootstrap="127.0.0.1:1")
    codec = make_codec(settings)
    run = run_log(steps=2)
    run.plans[3, 1] = plan(3, ["t3/0"]).model_copy(update={"low_water": (Position(topic="r", partition=0, offset=99),)})
    assert branch_start(settings, codec, run) == {0: 12}
    assert branch_start(settings, codec, run_log(steps=0)) == {0: 10}
    moved = {0: 0, 1: 0}
    assert branch_start(settings, codec, run) == moved


def test_what_can_still_be_needed_stays() -> None:
    present = range(20)
    # v15 is served, v12 and v9 were before; v16..v19 wait for a decision; v3 is pinned; the window reaches back to v17.
    assert versions_to_keep(present, 19, 2, [7, 9, 12, 15], {3}, {}) == {3, 9, 12, 15, 16, 17, 18, 19}
    assert versions_to_keep(present, 19, 8, [12, 15], set(), {}) == set(range(11, 20)), "the staleness window"
    # After a rollback from v15 to v12 it may go back to what came before v12.
    assert versions_to_keep(present, 19, 0, [9, 15, 12], set(), {}) == {9, *range(12, 20)}
    # The log tells of one promotion only: what may have been served before stays, and that may be any version that an
    # earlier process has kept. The two newest are not enough: v9 and v12 were served, v13 and v14 never.
    assert versions_to_keep([9, 12, 13, 14, 15, 16], 16, 0, [15], set(), {}) == {9, 12, 13, 14, 15, 16}
    assert versions_to_keep(present, 19, 0, [], set(), {}) == set(present), "nothing is decided yet"


def test_versions_with_the_same_weights_count_once_for_a_rollback() -> None:
    # v12 was refused: v13 begins a branch with the weights of v11. v15 is served, v13 and v9 were before.
    promoted, weights = [7, 9, 11, 13, 15], {7: "a", 9: "b", 11: "c", 12: "d", 13: "c", 15: "e"}
    assert versions_to_keep(range(16), 15, 0, promoted, set(), weights) == {9, 13, 15}
    # A rollback went from v13 to v11, so v13 is taken back; v14 has the weights of v11.
    promoted, weights = [7, 9, 11, 13, 11, 14, 15], {11: "c", 14: "c"}
    assert versions_to_keep(range(16), 15, 0, promoted, set(), weights) == {9, 14, 15}
    # The branch of the served version's own weights.
    assert versions_to_keep(range(12), 11, 0, [7, 9, 11], set(), {9: "c", 11: "c"}) == {7, 11}


def test_adapters_are_pruned_by_number_but_for_those_that_are_needed(tmp_path: Path) -> None:
    folder = tmp_path / "adapters" / "assistant"
    for name in [*(f"v{version}" for version in range(12)), "vnotes", ".v12.half"]:
        (folder / name).mkdir(parents=True)
    prune_adapters(Location.of_folder(folder), 3, lambda present: {1, 99} & set(present))
    left = {path.name for path in folder.iterdir()}
    assert left == {"v1", "v9", "v10", "v11", "vnotes", ".v12.half"}
    prune_adapters(Location.of_folder(tmp_path / "nobody"), 3, set)


def test_a_start_by_hand_ends_when_what_was_asked_for_is_done() -> None:
    assert not FOREVER.ignores_training_hours and not FOREVER.reached(10**6)
    goal = StopCondition(3)
    assert goal.ignores_training_hours and [goal.reached(n) for n in (2, 3)] == [False, True]
    assert goal.remaining(2).reached(1) and FOREVER.remaining(5) == FOREVER, (
        "a rollback on the way does not begin it anew"
    )
    assert StopCondition(1, caught_up=True).arguments() == ["--steps", "1", "--until-caught-up"]
