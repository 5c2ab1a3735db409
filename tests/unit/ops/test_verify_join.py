"""The verifier accepts the join's output for any halves log: the same rules, written twice."""

import asyncio
import random
from typing import Any

import pytest

from schemas import topics
from schemas.ids import derived_id
from schemas.records import (
    Feedback,
    Hint,
    HintKind,
    Open,
    Opens,
    Outcome,
    Record,
    Result,
    Rollout,
    Score,
    Source,
    Status,
    Task,
    Terms,
    Tick,
    sample_of,
)
from schemas.tensors import float32_bytes
from schemas.wire.codec import Codec
from streams.apps.join.core import JoinLimits
from streams.apps.join.processor import JoinProcessor
from streams.runtime.processor import LogRecord
from tentalis.ops.verify import Log, LoggedRecord, check
from tentalis.ops.verify.index import says_something
from tests.support.verify_run import PARTITION, Writer, altered

DEADLINE_MS, WINDOW_MS, MARKER_MS = 4_000, 1_000, 20_000


class Day:
    """One drawn history: tasks, results, feedback, and the halves that scoring and hinting owe, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.writer = Writer()
        self.log = self.writer.log
        self.halves: list[tuple[int, Record]] = []
        self.now = self.writer.clock
        self.far: set[str] = set()

    def at(self, after: int, spread: int, task: Task | None = None) -> int:
        """A time from `after` on, mostly soon, sometimes past the deadline, rarely past the memory of the join.

        That last once per task: to which result the join binds a sample that it has forgotten depends on what comes
        then alone.
        """
        late = self.rng.random()
        if late < 0.03 and task is not None and task.task_id not in self.far:
            self.far.add(task.task_id)
            return after + self.rng.randrange(3 * MARKER_MS)
        return after + self.rng.randrange(2 * DEADLINE_MS if late < 0.15 else spread)

    def half(self, when: int, record: Record) -> None:
        self.halves.append((when, record))
        if self.rng.random() < 0.15:
            # A redelivered input: the same half again, while the join remembers it.
            self.halves.append((when + self.rng.randrange(2 * DEADLINE_MS), record))

    def task(self, number: int) -> None:
        rl = self.rng.choice([Source.RESULT, Source.RESULT, Source.USER, None])
        opd = self.rng.choice([Source.USER, None]) if rl is not None else Source.USER
        opens = Opens.FIRST_FEEDBACK if rl is not Source.RESULT and self.rng.random() < 0.5 else Opens.AT_ONCE
        terms = Terms(rl=rl, opd=opd, opens=opens, deadline_ms=DEADLINE_MS, opd_window_ms=WINDOW_MS)
        self.writer.clock = self.now = self.now + self.rng.randrange(300)
        task = self.writer.task(str(number), self.rng.randint(1, 3), terms)
        if opens is Opens.AT_ONCE:
            opened = self.log.opens.pop()  # the join decides where it lies
            self.half(self.at(self.now, 200, task), self.opened(task, self.now, opened.record.open_id))
        for index in range(task.n_samples):
            for answer in range(self.rng.choices([0, 1, 2], [0.1, 0.75, 0.15])[0]):
                self.result(task, index, answer)

    def opened(self, task: Task, opened_at: int, identity: str) -> Open:
        return Open(open_id=identity, event_time=1, opened_at=opened_at, head=task.head, task_at=self.now)

    def result(self, task: Task, index: int, answer: int) -> None:
        status = Status.FAILED if self.rng.random() < 0.1 else Status.OK
        tokens = [7 + answer] * self.rng.randint(1, 4)
        result = self.writer.result(task, index, tokens, status)
        when = self.at(self.now, 400, task)
        if task.terms.rl is Source.RESULT:
            self.half(self.at(when, 400, task), self.score(result, Source.RESULT, None, self.now))
        for source in (Source.USER, Source.MANAGER):
            if self.rng.random() < (0.8 if source is Source.USER else 0.2):
                self.feedback(result, source, when)

    def feedback(self, result: Result, source: Source, when: int) -> None:
        feedback = Feedback(
            feedback_id=derived_id("feedback", source.value, result.result_id),
            event_time=1,
            task_id=result.task.task_id,
            sample_index=result.sample_index,
            source=source,
            result=result,
        )
        self.writer.put(self.log.feedback, topics.FEEDBACK, feedback)
        task, terms = result.task, result.task.terms
        opened_at = self.now
        if terms.opens is Opens.FIRST_FEEDBACK:
            opened_at = when
            identity = derived_id("open", task.task_id, feedback.feedback_id)
            self.half(self.at(when, 400, task), self.opened(task, when, identity))
        if terms.rl is source or self.rng.random() < 0.1:
            self.half(self.at(when, 400, task), self.score(result, source, feedback, opened_at))
        if terms.opd is source or self.rng.random() < 0.1:
            self.half(self.at(when, 600, task), self.hint(result, feedback, opened_at))

    def score(self, result: Result, source: Source, feedback: Feedback | None, opened_at: int) -> Score:
        reward = self.rng.choice([None, -1.0, 0.0, 0.1, 0.7, 1.0])
        sample = sample_of(result)
        return Score(
            score_id=derived_id("score", result.result_id, feedback and feedback.feedback_id),
            event_time=1,
            opened_at=opened_at,
            sample=sample.without_tokens() if reward is None else sample,
            source=source,
            reward=reward,
            components={} if reward is None else {"words": 3.0},
            scorer="rule/1",
            feedback_id=feedback.feedback_id if feedback else None,
            task_at=self.now,
        )

    def hint(self, result: Result, feedback: Feedback, opened_at: int) -> Hint:
        sample = sample_of(result)
        accepted = self.rng.random() < 0.6
        return Hint(
            hint_id=derived_id("hint", result.result_id, feedback.feedback_id),
            event_time=1,
            opened_at=opened_at,
            sample=sample if accepted else sample.without_tokens(),
            source=feedback.source,
            kind=HintKind.ACCEPTED if accepted else HintKind.NONE,
            teacher_logprobs=float32_bytes([-0.5] * (len(sample.token_ids) // 4)) if accepted else None,
            hinter="rule/1",
            feedback_id=feedback.feedback_id,
            task_at=self.now,
        )


def joined(day: Day) -> Log:
    """Folds the drawn halves with the real join and puts what it emits, and dead-letters, into the log."""
    codec, log = Codec(), day.log
    log.clock[PARTITION] = 0
    join = JoinProcessor(codec, JoinLimits(marker_ttl_ms=MARKER_MS))
    join.restore(PARTITION, {})
    last = max((when for when, _ in day.halves), default=day.now)
    history: list[tuple[int, Record]] = sorted(day.halves, key=lambda item: item[0])
    # Two ticks: the first gives up what is overdue, whatever its deadline.
    history += [(last + extra, Tick(event_time=1, partition=PARTITION)) for extra in (DEADLINE_MS + 1, 2 * DEADLINE_MS)]
    targets: dict[str, list[LoggedRecord[Any]]] = {"Open": log.opens, "Score": log.scores, "Hint": log.hints}  # type: ignore[dict-item]
    for offset, (when, record) in enumerate(history):
        log.clock[PARTITION] = max(log.clock[PARTITION], when)
        if type(record).__name__ in targets:
            targets[type(record).__name__].append(LoggedRecord(record, topics.HALVES, PARTITION, offset, when))
        value = codec.encode(topics.HALVES, record)
        raw = LogRecord(topics.HALVES, PARTITION, offset, when, record.key, value)
        effects = asyncio.run(join.process(PARTITION, [raw]))
        log.dead |= {(dead.record.topic, dead.record.partition, dead.record.offset) for dead in effects.dead}
        for number, output in enumerate(effects.outputs):
            emitted = codec.decode(output.value, topic=output.topic, partition=PARTITION, offset=number)
            into: list[LoggedRecord[Any]] = log.outcomes if isinstance(emitted, Outcome) else log.rollouts  # type: ignore[assignment]
            assert isinstance(emitted, Outcome | Rollout)
            into.append(LoggedRecord(emitted, output.topic, PARTITION, len(into), when))
    return log


def drawn(seed: int, tasks: int) -> Log:
    """Returns the join's output for this number of tasks of one day."""
    day = Day(seed)
    for number in range(tasks):
        day.task(number)
    return joined(day)


@pytest.mark.parametrize("block", range(10))
def test_the_verifier_finds_nothing_in_what_the_join_does(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        report = check(drawn(seed, 4))
        assert report.problems == [], f"seed {seed}: " + "\n".join(map(str, report.problems))


def test_the_drawn_histories_have_every_kind_of_outcome() -> None:
    kinds: set[str] = set()
    for seed in range(60):
        kinds |= set(check(drawn(seed, 4)).outcomes)
    assert kinds == {"rl", "opd", "both", "empty", "expired", "failed", "superseded", "late"}


def hinted(*again: int) -> Log:
    """A task with both halves, and the hint once more so many milliseconds after it closed."""
    day = Day(0)
    task = day.writer.task("hinted", 1, Terms(opd=Source.USER, deadline_ms=DEADLINE_MS, opd_window_ms=WINDOW_MS))
    result = day.writer.result(task, 0, [7, 8])
    opened = day.log.opens.pop().record
    hint = day.writer.hint(result, "Be short.").record
    day.log.hints.clear()
    score = day.score(result, Source.RESULT, None, day.now)
    hint = hint.model_copy(update={"opened_at": day.now, "task_at": day.now})
    opened = opened.model_copy(update={"opened_at": day.now, "task_at": day.now})
    day.halves = [(day.now + 1, opened), (day.now + 2, score), (day.now + 3, hint)]
    day.halves += [(day.now + 3 + after, hint) for after in again]
    return joined(day)


def test_a_hint_that_is_written_again_when_its_task_is_forgotten_is_found_in_both_rollouts() -> None:
    assert check(hinted()).problems == check(hinted(MARKER_MS)).problems == []
    log = hinted(MARKER_MS + 1)
    (problem,) = check(log).problems
    keys = [seen.record.rollout_id for seen in log.rollouts]
    hint = log.hints[0].record
    assert keys == [f"{hint.key}/0", f"{hint.key}/0/opd/{hint.hint_id}"]
    assert (problem.rule, problem.where) == ("half-in-two-rollouts", hint.hint_id)
    assert problem.message.startswith(" and ".join(keys))


def test_a_number_of_rewards_that_is_left_out_is_missed() -> None:
    """None says that as many rewards are known as samples closed."""
    left_out = 0
    for seed in range(40):
        log = drawn(seed, 3)
        for index, seen in enumerate(log.rollouts):
            if seen.record.n_rewarded is not None:
                altered(log.rollouts, index, n_rewarded=None)
                assert "group-statistics" in {problem.rule for problem in check(log).problems}
                log.rollouts[index] = seen
                left_out += 1
    assert left_out > 10


def test_an_emission_that_is_taken_away_is_missed() -> None:
    missed = 0
    for seed in range(25):
        log = drawn(seed, 3)
        halves: list[Any] = [seen.record for seen in (*log.scores, *log.hints)]
        silent = {half.event_id for half in halves if not says_something(half)}
        silent |= {seen.record.open_id for seen in log.opens}
        for records in (log.outcomes, log.rollouts):
            for index in range(len(records)):
                seen: Any = records[index]
                if getattr(seen.record, "half_id", None) in silent:
                    continue  # a half that says nothing, or an announcement, that came late: nothing is lost with that
                records.pop(index)
                assert check(log).problems, f"seed {seed}: {seen.record.key} is not missed"
                records.insert(index, seen)
                missed += 1
    assert missed > 200
