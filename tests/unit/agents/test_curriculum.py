"""The curriculum: pools by solve rate, the order of the choice, and that all of it comes from the log."""

import math
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import Record, Task
from tentalis.agents.manager.core import ROUND, ManagerState, task_id_of
from tentalis.agents.manager.curriculum import (
    POOL,
    PROMPT,
    RULE,
    SOLVE_RATE,
    BadCurriculum,
    Choice,
    Curriculum,
    Pool,
    SolveRateRule,
)
from tentalis.agents.manager.process import Manager, ManagerOptions
from tentalis.agents.scenarios import make_scenario
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tests.support.loop_records import RUN, ack, lost, manifest, outcome, plan, task
from tests.unit.agents.conftest import Log

RULE_OF_TESTS = SolveRateRule()


def curriculum(count: int = 100, **rule: float) -> Curriculum:
    return Curriculum(RUN, count, SolveRateRule(**rule))


def group(of: Curriculum, prompt: int, index: int, rewards: Sequence[float]) -> None:
    of.asked(prompt, index)
    of.closed(prompt, index, rewards, equal=len(set(rewards)) == 1)


@pytest.mark.parametrize(
    ("groups", "pool", "rate"),
    [
        ([[1.0, 1.0, 1.0, 1.0]], Pool.EASY, 1.0),
        ([[0.0, 0.0, 0.0, 0.0]], Pool.HARD, 0.0),
        ([[-1.0, 0.0, 0.0, 0.0]], Pool.HARD, 0.0),
        ([[1.0, 0.0, 0.0, 0.0]], Pool.LEARNABLE, 0.25),
        ([[0.5, 0.5, 0.5, 0.5]], Pool.EQUAL, 0.5),
        ([[]], Pool.UNSCORED, None),
        # The last two groups count, and one of them with an advantage is enough.
        ([[0.0, 0.0], [1.0, 0.0]], Pool.LEARNABLE, 0.25),
        ([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], Pool.HARD, 0.0),
        ([[1.0, 0.0], []], Pool.LEARNABLE, 0.5),
    ],
)
def test_the_pool_of_a_prompt(groups: list[list[float]], pool: Pool, rate: float | None) -> None:
    of = curriculum(1)
    for index, rewards in enumerate(groups):
        group(of, 0, index, rewards)
    assert of.choose(len(groups), 1) == Choice(0, pool, rate)
    assert of.pools()[pool] == 1 and sum(of.pools().values()) == 1


@pytest.mark.parametrize(
    ("lowest", "rewards", "pool", "rate"),
    [
        (-1.0, [0.0, 0.2, -0.2, 0.0], Pool.LEARNABLE, 0.5),  # half of each, as a function with a range gives it
        (-1.0, [-1.0, -1.0, 1.0, 1.0], Pool.LEARNABLE, 0.5),
        (-1.0, [-0.9, -1.0, -0.9, -1.0], Pool.HARD, 0.025),
        (0.0, [0.0, 0.2, -0.2, 0.0], Pool.HARD, 0.05),
        (0.5, [0.5, 0.75, 0.0, 1.0], Pool.LEARNABLE, 0.375),
    ],
)
def test_the_scale_of_rewards_is_a_setting(lowest: float, rewards: list[float], pool: Pool, rate: float) -> None:
    of = curriculum(1, lowest=lowest)
    group(of, 0, 0, rewards)
    assert of.choose(1, 1) == Choice(0, pool, pytest.approx(rate))


def test_a_task_takes_the_pools_in_the_shares_of_the_rule() -> None:
    of = curriculum(10_000, probe=0.3, revisit=0.1)
    for prompt in range(300):
        group(of, prompt, prompt, [1.0, 1.0] if prompt % 2 else [1.0, 0.0])
    draws = Counter(of.choose(index, 1).pool for index in range(1000, 5000))
    assert draws[Pool.UNSEEN] / 4000 == pytest.approx(0.3, abs=0.03)
    assert draws[Pool.EASY] / 4000 == pytest.approx(0.1, abs=0.02)
    assert draws[Pool.LEARNABLE] / 4000 == pytest.approx(0.6, abs=0.04)


def test_without_learnable_prompts_new_ones_are_asked_before_those_set_aside() -> None:
    of = curriculum(8, probe=0.0, revisit=0.0)
    for index in range(8):
        choice = of.choose(index, 1)
        assert (choice.prompt, choice.pool) == (index, Pool.UNSEEN)
        group(of, choice.prompt, index, [0.0, 0.0])
    assert of.choose(8, 1) == Choice(0, Pool.HARD, 0.0), "the one that was asked the longest ago"


Step = tuple[int, list[float]]
steps = st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=3)), max_size=60)


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(1, 12), st.integers(1, 10), st.integers(0, 10**6))
def test_prompts_rest_and_are_asked_again_only_when_their_group_is_closed(
    played: list[Step], count: int, rest: int, seed: int
) -> None:
    """Each step chooses a prompt, and then closes up to three of the open groups."""
    of = Curriculum(str(seed), count, RULE_OF_TESTS)
    open_tasks: deque[tuple[int, int]] = deque()
    last: dict[int, int] = {}
    for index, (closing, rewards) in enumerate(played):
        choice = of.choose(index, rest)
        assert 0 <= choice.prompt < count
        assert (choice.pool is Pool.UNSEEN) == (choice.prompt not in last)
        asked = {prompt for _, prompt in open_tasks}
        assert choice.prompt not in asked or len(asked) == count
        rested = [prompt for prompt, at in last.items() if prompt not in asked and index - at >= rest]
        if rested or len(last) < count:
            assert choice.prompt not in last or index - last[choice.prompt] >= rest
        of.asked(choice.prompt, index)
        last[choice.prompt] = index
        open_tasks.append((index, choice.prompt))
        for _ in range(min(closing, len(open_tasks))):
            at, prompt = open_tasks.popleft()
            of.closed(prompt, at, rewards, equal=len(set(rewards)) == 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(4, 20))
def test_a_manager_that_reads_the_log_again_chooses_the_same(seed: int, tasks: int, count: int) -> None:
    rng = random.Random(seed)
    log: list[Record] = []
    state = ManagerState(RUN, owes_feedback=False, curriculum=curriculum(count))

    def put(record: Record) -> None:
        log.append(record)
        state.apply(record)

    put(manifest(batch=4))
    put(ack(1))
    open_samples = []
    for index in range(tasks):
        choice = state.choose(2)
        assert choice is not None
        issued = task(task_id_of(RUN, index), metadata={ROUND: "0", **choice.metadata(RULE_OF_TESTS)})
        put(issued)
        open_samples += [(issued, 0), (issued, 1)]
        rng.shuffle(open_samples)
        while open_samples and rng.random() < 0.6:
            of, sample = open_samples.pop()
            rare = rng.random() < 0.1
            put(lost(of, sample) if rare else outcome(of, sample, reward=float(rng.random() < 0.5)))
    rng.shuffle(log)  # partitions and topics are read in any order
    again = ManagerState(RUN, owes_feedback=False, curriculum=curriculum(count))
    for record in log:
        again.apply(record)
        if rng.random() < 0.1:
            again.apply(record)  # delivered twice
    assert again.choose(2) == state.choose(2)
    assert again.curriculum is not None and state.curriculum is not None
    assert again.curriculum.pools() == state.curriculum.pools()
    for index in range(1000, 1020):
        assert again.curriculum.choose(index, 3) == state.curriculum.choose(index, 3)


def test_tasks_from_before_the_curriculum_count_and_prompts_that_no_longer_exist_do_not() -> None:
    state = ManagerState(RUN, owes_feedback=False, curriculum=curriculum(3, probe=0.0, revisit=1.0))
    before = task(task_id_of(RUN, 0), metadata={ROUND: "0"})
    removed = task(task_id_of(RUN, 1), metadata={ROUND: "0", PROMPT: "7"})
    for of in (before, removed):
        state.apply(of)
        for sample in range(2):
            state.apply(outcome(of, sample, reward=1.0))
    assert state.choose(2) == Choice(0, Pool.EASY, 1.0)
    assert state.curriculum is not None and state.curriculum.pools()[Pool.UNSEEN] == 2


def test_a_batch_does_not_ask_a_prompt_twice() -> None:
    state = ManagerState(RUN, owes_feedback=False, curriculum=curriculum(50, probe=0.0))
    state.apply(manifest(batch=8, staleness=1))
    asked = []
    for index in range(40):
        choice = state.choose(2)
        assert choice is not None
        asked.append(choice.prompt)
        of = task(task_id_of(RUN, index), metadata=dict(choice.metadata(RULE_OF_TESTS)))
        state.apply(of)
        for sample in range(2):
            state.apply(outcome(of, sample, reward=float(sample)))
    # Two batches of eight samples may be sampled at once: eight tasks of two samples.
    assert all(len(set(asked[at : at + 8])) == 8 for at in range(33))
    assert len(set(asked)) < 20, "learnable prompts are preferred"


def test_a_task_explains_why_its_prompt_was_chosen() -> None:
    assert Choice(4, Pool.LEARNABLE, 1 / 3).metadata(SolveRateRule()) == {
        PROMPT: "4",
        RULE: "solve-rate/1 low=0.1 high=0.9 probe=0.25 revisit=0.05 lowest=0.0",
        POOL: "learnable",
        SOLVE_RATE: "0.3333",
    }
    assert SOLVE_RATE not in Choice(4, Pool.UNSEEN, None).metadata(SolveRateRule())


def test_the_manager_asks_the_chosen_prompt_again(manager_log: Log) -> None:
    scenario, rule = make_scenario("assistant"), SolveRateRule(probe=0.0)
    manager = Manager(ManagerOptions(RUN, "assistant", n_samples=4, curriculum=rule), Settings(), scenario)
    manager_log.read = [manifest(steps=1, batch=8), ack(1)]
    manager.step()
    first, second = (record for record in manager_log.written if isinstance(record, Task))
    assert [first.metadata[PROMPT], second.metadata[PROMPT]] == ["0", "1"]
    assert first.metadata[RULE] == str(rule) and first.metadata[POOL] == "unseen"
    rewards = {first.task_id: (0.0, 1.0, 1.0, 1.0), second.task_id: (0.0, 0.0, 0.0, 0.0)}
    outcomes = [outcome(of, i, reward=r) for of in (first, second) for i, r in enumerate(rewards[of.task_id])]
    manager_log.read = [*outcomes, plan(1, [each.outcome_key for each in outcomes]), ack(2)]
    manager.step()
    again = manager_log.written[-2]
    assert isinstance(again, Task) and again.task_id == task_id_of(RUN, 2)
    assert again.messages == first.messages != second.messages
    assert (again.metadata[PROMPT], again.metadata[POOL], again.metadata[SOLVE_RATE]) == ("0", "learnable", "0.7500")
    assert b'tentalis_manager_prompts{pool="hard"} 1.0' in manager.metrics.exporter.exposition()


@pytest.mark.parametrize(
    "wrong", [{"low": 0.95}, {"high": 1.5}, {"low": math.nan}, {"probe": 0.98}, {"revisit": -0.1}, {"lowest": 1.0}]
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadCurriculum, match=str(next(iter(wrong.values())))):
        SolveRateRule(**wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--probe 0.5", "add `--curriculum solve-rate`"),
        ("--lowest-reward -1", "add `--curriculum solve-rate`"),
        ("--curriculum solve-rate --lowest-reward 1", "lowest reward 1.0"),
        ("--curriculum solve-rate --hard-below 0.95", "solve rates from 0.95 to 0.9"),
    ],
)
def test_options_of_a_curriculum_are_checked_before_anything_starts(options: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tentalis.cli", "manager", "--run", RUN, *options.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.USAGE and message in done.stderr


PROMPTS, TASKS, SAMPLES, IN_FLIGHT = 500, 800, 8, 16


def share_with_signal(seed: int, *, chosen: bool) -> float:
    """Plays a run on prompts of very different difficulty, with a policy that improves steadily.

    The logit of solving a prompt is skill minus difficulty; the skill rises from -2 to 2 during the run. Returns the
    share of groups with both right and wrong samples.
    """
    rng = random.Random(seed)
    difficulties = [rng.gauss(0.0, 4.0) for _ in range(PROMPTS)]
    of = Curriculum(f"run-{seed}", PROMPTS, RULE_OF_TESTS)
    in_flight: deque[tuple[int, int, list[float]]] = deque()
    with_signal = 0
    for index in range(TASKS):
        prompt = of.choose(index, IN_FLIGHT).prompt if chosen else index % PROMPTS
        solves = 1.0 / (1.0 + math.exp(difficulties[prompt] + 2.0 - 4.0 * index / TASKS))
        rewards = [float(rng.random() < solves) for _ in range(SAMPLES)]
        with_signal += len(set(rewards)) > 1
        of.asked(prompt, index)
        in_flight.append((prompt, index, rewards))
        if len(in_flight) == IN_FLIGHT:
            done, at, given_rewards = in_flight.popleft()
            of.closed(done, at, given_rewards, equal=len(set(given_rewards)) == 1)
    return with_signal / TASKS


def test_more_groups_have_a_signal_than_without_the_curriculum() -> None:
    """The numbers of docs/concepts/curriculum.md."""
    without = [share_with_signal(seed, chosen=False) for seed in range(5)]
    with_it = [share_with_signal(seed, chosen=True) for seed in range(5)]
    assert min(with_it) > max(without) + 0.15, (without, with_it)
