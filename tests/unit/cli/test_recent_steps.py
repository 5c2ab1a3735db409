"""The phases of the last steps of the runs in training, folded from the newest records."""

import random
from collections.abc import Iterator

import pytest

from schemas.records import BatchPlan, Outcome, Record, Result, Task
from tentalis.demo.recent_steps import MOST_MS, STEPS, RecentSteps, StepTimes, StepWindow, window_of
from tentalis.demo.stats import PHASES
from tests.support.loop_records import RUN, T0, ack, manifest, outcome, plan, result, step_result, task, update

STEP_MS = 60_000
UNKNOWN = dict.fromkeys(PHASES)
TIMES = {"sampling": 20.0, "judging": 5.0, "planning": 2.0, "training": 10.0, "publishing": 1.0, "serving": 3.0}


def step_of(step: int, run: str = RUN) -> Iterator[tuple[Record, int]]:
    """The records of a step, which takes TIMES. Its version is one more than its number."""
    at = T0 + step * STEP_MS
    of = task(f"{run}-{step}", run_id=run, metadata={"round": str(step - 1)})
    yield of, at
    for index in range(of.n_samples):
        yield result(of, index, version=step), at + 20_000
        yield outcome(of, index, version=step), at + 25_000
    yield plan(step, [], run), at + 27_000
    yield step_result(step, step + 1, run), at + 37_000
    yield update(step + 1, run_id=run, step=step), at + 38_000
    yield ack(step + 1), at + 41_000


def run_of(steps: int) -> list[tuple[Record, int]]:
    return [(manifest(), T0), *(pair for step in range(1, steps + 1) for pair in step_of(step))]


def read_from_the_log(log: list[tuple[Record, int]], now: int) -> list[StepTimes]:
    """What a reader does: all manifests, the newest plans, then what is in their window."""
    manifests = [manifest()]
    window = window_of(manifests, [(each, at) for each, at in log if isinstance(each, BatchPlan)], now)
    steps = RecentSteps(manifests, window)
    for record, at in log:
        if at >= window.since:
            steps.apply(record, at)
    return steps.rows()


@pytest.mark.parametrize("steps", [1, 3, STEPS, 3 * STEPS])
def test_the_last_steps_have_all_their_records_in_the_window(steps: int) -> None:
    log = run_of(steps)
    random.Random(0).shuffle(log)
    log.sort(key=lambda pair: isinstance(pair[0], BatchPlan) and pair[1])  # the plans alone are read in their order
    assert read_from_the_log(log, T0 + (steps + 1) * STEP_MS) == [
        StepTimes(RUN, "assistant", steps, min(steps, STEPS), TIMES)
    ]


def test_a_step_of_which_records_are_missing_does_not_count() -> None:
    now = T0 + 20 * STEP_MS + MOST_MS  # steps 20 and earlier are not looked at
    log = run_of(22)
    slow = [(record, at + 5_000 if isinstance(record, BatchPlan) else at) for record, at in log]
    (row,) = read_from_the_log(slow, now)
    # Step 20's plan is in the window and its tasks are not: step 21 is the first whole one.
    assert (row.step, row.steps) == (22, 2)
    assert row.seconds_by_phase == TIMES | {"planning": 7.0, "training": 5.0}
    assert read_from_the_log(log, T0 + 23 * STEP_MS + MOST_MS) == []


def test_a_phase_is_unknown_until_a_step_has_had_it() -> None:
    steps = RecentSteps([], StepWindow(T0, ()))
    assert steps.rows() == []
    steps.apply(manifest(), T0)
    assert steps.rows() == [StepTimes(RUN, "assistant", None, 0, UNKNOWN)]
    seen: list[dict[str, float | None]] = []
    for record, at in step_of(1):
        steps.apply(record, at)
        (row,) = steps.rows()
        seen.append({**row.seconds_by_phase})
    assert seen[:5] == [UNKNOWN] * 5, "a step that is not planned yet is still being sampled"
    before = UNKNOWN | {"sampling": 20.0, "judging": 5.0, "planning": 2.0}
    assert seen[5:] == [
        before,
        before | {"training": 10.0},
        before | {"training": 10.0, "publishing": 1.0},
        TIMES,
    ]


def test_turns_of_people_have_no_sampling_and_the_rest_of_the_step_is_shown() -> None:
    log = [(record, at) for record, at in run_of(3) if not isinstance(record, Task | Result | Outcome)]
    (row,) = read_from_the_log(log, T0 + 4 * STEP_MS)
    assert row.seconds_by_phase == TIMES | {"sampling": None, "judging": None, "planning": None}


def test_each_run_has_its_row_and_a_branch_belongs_to_its_run() -> None:
    branch = manifest(f"{RUN}.1", first=10).model_copy(update={"parent_run": RUN, "parent_step": 2})
    other = manifest("other").model_copy(update={"policy": "math"})
    steps = RecentSteps([manifest(), other], StepWindow(T0, (RUN, "other")))
    for record, at in [*run_of(2), (branch, T0 + 3 * STEP_MS), *step_of(1, "other")]:
        steps.apply(record, at)
    # The branch's first step is the third one of the run.
    steps.apply(plan(1, [], f"{RUN}.1"), T0 + 4 * STEP_MS)
    steps.apply(step_result(1, 11, f"{RUN}.1"), T0 + 4 * STEP_MS + 30_000)
    assert [(row.run, row.policy, row.step, row.steps) for row in steps.rows()] == [
        (RUN, "assistant", 3, 3),
        ("other", "math", 1, 1),
    ]
