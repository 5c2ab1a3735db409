"""Slow scorers: many at a time, each call in its time, a few tries, unknown when all fail, waiting when all is away."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from schemas import topics
from schemas.records import Result, Task, Verifier
from streams.apps.scoring.judging import JudgeLimits, Judging
from streams.apps.scoring.processor import Scoring
from streams.runtime.processor import Effects, LogRecord, Retryable
from tentalis.rewards import registry
from tentalis.rewards.combined import CombinedScorer, CombinedSettings, RewardPart
from tentalis.rewards.custom import CustomSettings, custom_scorer
from tentalis.rewards.registry import ENVIRONMENTS, PLUGIN_GROUP, BadPlugin, load_plugins
from tentalis.rewards.thread_runner import Hung, verify_in_thread
from tentalis.rewards.verdict import ScoredStep, ScorerAway, UnknownVerifier, Verdict
from tentalis.service.metrics import Exporter
from tests.support import own_scorers
from tests.support.stream_records import CODEC, make_result, make_task, on_log, read

HUGE_STEP = Verdict(0.5, steps=(ScoredStep(0, 1, 3e38),))
QUICK = JudgeLimits(at_once=8, thread_s=0.2, first_s=0.001, cap_s=0.002)


class SlowJudge:
    """A judge as a test wants it; knows how many ask at once."""

    name = "slow/1"
    time_limit_s = 30.0

    def __init__(self) -> None:
        self.answer: Callable[[Result], Awaitable[Verdict]] | None = None
        self.asked: list[str] = []
        self.busy = self.busy_most = 0

    def check(self, task: Task) -> None:
        """Every task will do."""

    async def judge(self, task: Task, result: Result) -> Verdict:
        self.asked.append(result.result_id)
        self.busy += 1
        self.busy_most = max(self.busy_most, self.busy)
        try:
            await asyncio.sleep(0)
            assert self.answer is not None
            return await self.answer(result)
        finally:
            self.busy -= 1


@pytest.fixture
def judge() -> Iterator[SlowJudge]:
    made = SlowJudge()
    registry.register("chat", "slow", made)
    yield made
    del ENVIRONMENTS["chat"]["slow"]


class Hanging:
    """A slow verifier that does not come back until it is let go."""

    slow = True

    def __init__(self, name: str = "hanging/1") -> None:
        self.name = name
        self.calls = 0
        self.go = threading.Event()

    def check(self, task: Task) -> None:
        """Every task will do."""

    def verify(self, task: Task, result: Result) -> Verdict:
        self.calls += 1
        self.go.wait(30)
        return Verdict(1.0)

    def complaint(self, task: Task, result: Result) -> str | None:
        return None


def result_of(name: str = "slow", sample: int = 0) -> Result:
    return make_result(make_task(verifier=Verifier(name=name)), sample=sample, response=(10, sample))


def batch(n: int) -> list[LogRecord]:
    return [on_log(topics.RESULTS, result_of(sample=i % 8), i) for i in range(n)]


def run(records: list[LogRecord], app: Scoring) -> Effects:
    return asyncio.run(app.process(3, records))


def rewards_of(effects: Effects) -> list[float | None]:
    return [read(output).reward for output in effects.outputs]


def test_slow_verdicts_come_many_at_a_time_within_the_limit_and_in_order(judge: SlowJudge) -> None:
    async def answer(result: Result) -> Verdict:
        for _ in range(9 - result.sample_index):  # the first come last
            await asyncio.sleep(0)
        return Verdict(result.sample_index / 8)

    judge.answer = answer
    app = Scoring(CODEC, Judging(QUICK))
    before = app.steps  # those of the process's scorers, which other tests may have used
    assert rewards_of(run(batch(8), app)) == [i / 8 for i in range(8)]
    assert judge.busy_most == 8 and app.steps - before == 8
    few = Scoring(CODEC, Judging(JudgeLimits(at_once=3)))
    judge.busy_most = 0
    run(batch(8), few)
    assert judge.busy_most == 3


def test_the_event_loop_runs_while_a_verdict_takes_its_time(judge: SlowJudge) -> None:
    gate = asyncio.Event()

    async def answer(result: Result) -> Verdict:
        await gate.wait()
        return Verdict(1.0)

    async def story() -> None:
        judge.answer = answer
        app = Scoring(CODEC, Judging(QUICK))
        slow = asyncio.create_task(app.process(3, batch(4)))
        other = make_result(make_task("t2"))
        quick = await app.process(4, [on_log(topics.RESULTS, other, partition=4)])
        assert rewards_of(quick) == [1.0] and not slow.done()
        gate.set()
        assert rewards_of(await slow) == [1.0] * 4

    asyncio.run(story())


def test_a_call_over_its_time_is_tried_again_and_then_unknown(judge: SlowJudge) -> None:
    async def answer(result: Result) -> Verdict:
        await asyncio.sleep(3600)
        raise AssertionError

    judge.answer, judge.time_limit_s = answer, 0.01  # type: ignore[misc]
    (output,) = run(batch(1), Scoring(CODEC, Judging(QUICK))).outputs
    score = read(output)
    assert score.reward is None and score.scorer == "slow/1"
    assert score.components == {"unverified": 1.0, "failed_calls": 3.0, "timed_out": 3.0}
    assert len(judge.asked) == 3 and judge.busy == 0


@pytest.mark.parametrize(
    "wrong", [RuntimeError("500"), Verdict(2.0), Verdict(0.5, {"x": float("nan")}), Verdict(float("nan")), HUGE_STEP]
)
def test_a_failed_or_impossible_answer_is_tried_again_and_then_unknown(
    judge: SlowJudge, wrong: Exception | Verdict
) -> None:
    good_from = 1

    async def answer(result: Result) -> Verdict:
        if len(judge.asked) < good_from:
            if isinstance(wrong, Exception):
                raise wrong
            return wrong
        return Verdict(-0.5)

    judge.answer = answer
    good_from = 3
    assert rewards_of(run(batch(1), Scoring(CODEC, Judging(QUICK)))) == [-0.5]
    good_from = 99
    effects = run(batch(1), Scoring(CODEC, Judging(QUICK)))
    assert rewards_of(effects) == [None] and not effects.dead


def test_a_judge_that_is_away_is_waited_for_and_not_asked_again_for_what_it_said(judge: SlowJudge) -> None:
    away = True

    async def answer(result: Result) -> Verdict:
        if result.sample_index == 3 and away:
            for _ in range(20):
                await asyncio.sleep(0)
            raise ScorerAway("connection refused")
        return Verdict(1.0)

    judge.answer = answer
    app = Scoring(CODEC, Judging(QUICK))
    for _ in range(5):
        with pytest.raises(Retryable, match="slow/1 is unavailable: connection refused"):
            run(batch(4), app)
    away = False
    assert rewards_of(run(batch(4), app)) == [1.0] * 4
    first_three = {record.result_id for record in (result_of(sample=i) for i in range(3))}
    assert all(judge.asked.count(name) == 1 for name in first_three)


def test_calls_are_counted_by_how_they_ended(judge: SlowJudge) -> None:
    async def answer(result: Result) -> Verdict:
        match result.sample_index:
            case 0:
                return Verdict(1.0)
            case 1:
                raise RuntimeError("500")
            case 2:
                await asyncio.sleep(3600)
        raise ScorerAway("connection refused")

    judge.answer, judge.time_limit_s = answer, 1.0
    app = Scoring(CODEC, Judging(QUICK))
    exporter = Exporter("scoring", app=app.app_id)
    app.measure(exporter)
    run(batch(3), app)
    with pytest.raises(Retryable):
        run([on_log(topics.RESULTS, result_of(sample=3))], app)

    def calls(how: str) -> float | None:
        return exporter.registry.get_sample_value("tentalis_scoring_judge_calls_total", {"result": how})

    assert {how: calls(how) for how in ("answered", "failed", "timeout", "away")} == {
        "answered": 1,
        "failed": 3,
        "timeout": 3,
        "away": 1,
    }
    assert exporter.registry.get_sample_value("tentalis_scoring_judge_unknown_total") == 2


def test_a_retry_of_a_batch_gives_the_same_bytes(judge: SlowJudge) -> None:
    async def answer(result: Result) -> Verdict:
        return Verdict(0.5)

    judge.answer = answer
    one, two = (run(batch(5), Scoring(CODEC, Judging(QUICK))).outputs for _ in range(2))
    assert one == two


def test_a_slow_verifier_that_hangs_is_given_up_and_holds_nothing_up() -> None:
    hanging = Hanging()
    registry.register("chat", "hanging", hanging)
    try:
        record = on_log(topics.RESULTS, result_of("hanging"))
        assert rewards_of(run([record], Scoring(CODEC, Judging(QUICK)))) == [None]
        hanging.go.set()
        assert rewards_of(run([record], Scoring(CODEC, Judging(QUICK)))) == [1.0]
    finally:
        hanging.go.set()
        del ENVIRONMENTS["chat"]["hanging"]


def test_a_function_of_ones_own_that_hangs_is_given_up_after_its_own_time_limit() -> None:
    """Judging's limit for verifiers, and the reward that it is a part of, would wait for a minute."""
    settings = CustomSettings(kind="custom", target="tests.support.own_scorers:hangs", time_limit_s=0.05)
    own_scorers.LET_GO.clear()
    part = RewardPart(scorer="hangs", weight=1.0)
    combined = CombinedScorer(
        CombinedSettings(kind="combined", parts={"own": part}), {"hangs": custom_scorer(settings)}
    )
    registry.register("chat", "hangs", custom_scorer(settings))
    registry.register("chat", "combined", combined)
    began = time.monotonic()
    try:
        for name in ("hangs", "combined"):
            record = on_log(topics.RESULTS, result_of(name))
            assert rewards_of(run([record], Scoring(CODEC, Judging()))) == [None]
        assert time.monotonic() - began < 20.0
    finally:
        own_scorers.LET_GO.set()
        del ENVIRONMENTS["chat"]["hangs"], ENVIRONMENTS["chat"]["combined"]


def test_a_verifier_is_called_no_more_while_too_many_of_its_calls_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tentalis.rewards.thread_runner.MAX_HUNG", 2)
    hanging = Hanging("hanging/many")
    result = result_of()

    async def verdict() -> Verdict:
        return await verify_in_thread(hanging, result.task, result, 0.05)

    for error in (TimeoutError, TimeoutError, Hung):
        with pytest.raises(error):
            asyncio.run(verdict())
    assert hanging.calls == 2
    hanging.go.set()
    while any(thread.name == "verifier" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert asyncio.run(verdict()) == Verdict(1.0)


def test_a_scorer_of_an_installed_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "garden.weeding"

        def load(self) -> SlowJudge:
            return SlowJudge()

    monkeypatch.setattr(
        "tentalis.rewards.registry.entry_points", lambda group: [Point()] if group == PLUGIN_GROUP else []
    )
    load_plugins.cache_clear()
    task = make_task(environment="garden", verifier=Verifier(name="weeding"))
    try:
        registry.check(task)
        assert registry.scorer_name(task) == "slow/1"
        with pytest.raises(UnknownVerifier):
            registry.check(make_task(environment="garden", verifier=Verifier(name="digging")))
        with pytest.raises(BadPlugin, match="already has a verifier 'weeding'"):
            registry.register("garden", "weeding", SlowJudge())
    finally:
        del ENVIRONMENTS["garden"]
        load_plugins.cache_clear()


def test_a_verdict_that_only_a_judge_can_give_is_unknown_to_who_only_verifies(judge: SlowJudge) -> None:
    result = result_of()
    assert registry.verify(result.task, result) == Verdict.unknown()
    assert registry.complaint(result.task, result) is None
