"""A second join, written to be obviously right and nothing else: it imports nothing of the first.

For every record it looks at every task, keeps whole records, and derives what is over from the times at which things
came. What it returns are (key, record) of each outcome and rollout in the order in which they are written, whole and
with their digests, and the offsets of the dead letters.
"""

import functools
import math
import operator
from dataclasses import dataclass, field
from typing import Any

from schemas import topics
from schemas.digest import with_digest
from schemas.ids import derived_id
from schemas.records import (
    Forget,
    Hint,
    HintKind,
    Open,
    Outcome,
    OutcomeKind,
    Provenance,
    Record,
    Rollout,
    Sample,
    Score,
    Status,
    TaskHead,
    not_trainable_by_ratio,
)

Came = tuple[int, int, Any]
"""offset, stream time, Score or Hint"""


@dataclass
class Known:
    """All that is remembered of one task."""

    first_heard: int
    head: TaskHead | None = None
    opened: int = 0
    closed_at: int | None = None
    forgotten: bool = False
    answer: dict[int, tuple[str, str]] = field(default_factory=dict)
    score: dict[int, Came] = field(default_factory=dict)
    hint: dict[int, Came] = field(default_factory=dict)
    events: set[str] = field(default_factory=set)
    others: set[tuple[int, str]] = field(default_factory=set)
    trained_hint: set[int] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return self.head is not None and self.closed_at is None


def usable(hint: Hint) -> bool:
    return hint.kind == HintKind.ACCEPTED and hint.sample.status == Status.OK and len(hint.sample.token_ids) > 0


def speaking(halves: list[Came]) -> Sample:
    """Of the halves of one result, the sample that has the tokens."""
    samples: list[Sample] = [half[2].sample for half in halves]
    return next((sample for sample in samples if sample.token_ids), samples[0])


def expected(half: Score | Hint) -> bool:
    terms = half.sample.head.terms
    return half.source == (terms.rl if type(half) is Score else terms.opd)


class Oracle:
    def __init__(self, partition: int, ttl: int, most: int, forget_ttl: int = 31 * 24 * 3600 * 1000) -> None:
        self.forget_ttl = forget_ttl
        self.gone: list[tuple[int, Forget]] = []
        self.partition, self.ttl, self.most = partition, ttl, most
        self.tasks: dict[str, Known] = {}
        self.now = -(10**18)
        self.written: list[tuple[str, Outcome | Rollout]] = []
        self.dead: list[int] = []

    def fold(self, log: list[tuple[int, int, Record | None]]) -> None:
        for offset, stamp, record in log:
            self.now = max(self.now, stamp)
            for name, task in list(self.tasks.items()):
                remembered_from = task.closed_at if task.head is not None else task.first_heard
                if remembered_from is not None and remembered_from + self.ttl < self.now:
                    del self.tasks[name]
            for _, name in sorted(
                (due, name) for name, task in self.tasks.items() if (due := self.over(task)) is not None
            ):
                self.close(name)
            self.gone = [(at, request) for at, request in self.gone if at + self.forget_ttl >= self.now]
            if record is None or self.contradicts(record):
                self.dead.append(offset)
            else:
                self.take(offset, record)

    def slot_over(self, task: Known, index: int) -> tuple[bool, int]:
        """Returns True if a sample waits for nothing more, and the latest time since then (0: since a half came)."""
        assert task.head is not None
        terms = task.head.terms
        got_score, got_hint = index in task.score, index in task.hint
        if (got_score or terms.rl is None) and (got_hint or terms.opd is None):
            return True, 0
        if got_score:
            end = task.score[index][1] + terms.opd_window_ms
            return end < self.now, end
        return False, 0

    def over(self, task: Known) -> int | None:
        """When an open task ended, if it has."""
        if not task.is_open or task.head is None:
            return None
        deadline = task.opened + task.head.terms.deadline_ms
        slots = [self.slot_over(task, index) for index in range(task.head.n_samples)]
        if all(done for done, _ in slots):
            return min(deadline, max(end for _, end in slots))
        return deadline if deadline < self.now else None

    def contradicts(self, record: Record) -> bool:
        if not isinstance(record, Open | Score | Hint):
            return False
        head = record.head if isinstance(record, Open) else record.sample.head
        task = self.tasks.get(head.task_id)
        if isinstance(record, Open):
            if task is not None and task.closed_at is not None:
                return False
        elif task is not None and record.event_id in task.events:
            return False
        if head.n_samples > self.most or head.terms.deadline_ms >= self.ttl:
            return True
        if task is None:
            return False
        if task.head is not None:
            if task.head.n_samples != head.n_samples:
                return True
            if task.is_open and (task.head.terms.rl, task.head.terms.opd) != (head.terms.rl, head.terms.opd):
                return True
        if isinstance(record, Open):
            return False
        index, (result, digest) = record.sample.sample_index, (record.sample.result_id, record.sample.response_digest)
        if index in task.answer and task.answer[index][0] == result:
            if task.answer[index][1] != digest:
                return True
            partner = (task.hint if type(record) is Score else task.score).get(index)
            if partner is not None and task.is_open:
                both = {partner[2].sample.token_ids, record.sample.token_ids} - {b""}
                return len(both) > 1
        return False

    def take(self, offset: int, record: Record) -> None:
        if isinstance(record, Open):
            self.announced(record)
        elif isinstance(record, Score | Hint):
            self.half(offset, record)
        elif isinstance(record, Forget):
            asked = {"session_id": record.session_id, "user_id": record.user_id}
            narrowed = {**asked, "policy": record.policy}
            for name in sorted(self.tasks):
                task = self.tasks[name]
                if not task.is_open or task.head is None or not (any(asked.values()) or record.before is not None):
                    continue
                fits = all(value is None or getattr(task.head, field) == value for field, value in narrowed.items())
                if fits and (record.before is None or task.opened < record.before):
                    task.score, task.hint, task.forgotten = {}, {}, True
                    self.close(name)
            if any(asked.values()) or record.before is not None:
                self.gone.append((self.now, record))

    def left(self, head: TaskHead, opened_at: int) -> bool:
        """Returns True if a remembered request is about a task that opened at this time."""
        for _, request in self.gone:
            same = all(
                wanted is None or wanted == had
                for wanted, had in (
                    (request.session_id, head.session_id),
                    (request.user_id, head.user_id),
                    (request.policy, head.policy),
                )
            )
            if same and not (request.before is not None and min(opened_at, self.now) >= request.before):
                return True
        return False

    def youth(self, record: Open | Score | Hint) -> bool:
        """Returns True if the age of a record's task is within the time for which a closed task is remembered."""
        times = [record.opened_at] if record.task_at is None else [record.opened_at, record.task_at]
        return all(time >= self.now - self.ttl for time in times)

    def open(self, head: TaskHead, opened_at: int) -> Known:
        task = self.tasks.setdefault(head.task_id, Known(self.now))
        task.head, task.opened = head, min(opened_at, self.now)
        if task.opened + head.terms.deadline_ms < self.now:
            self.close(head.task_id)
        return task

    def announced(self, record: Open) -> None:
        task = self.tasks.get(record.head.task_id)
        if task is not None and task.head is not None:
            return
        if self.youth(record) and not self.left(record.head, record.opened_at):
            self.open(record.head, record.opened_at)
            return
        task = self.tasks.setdefault(record.head.task_id, Known(self.now))
        if record.event_id not in task.events:
            task.events.add(record.event_id)
            for index in range(record.head.n_samples):
                key = f"{record.key}/{index}/late/{record.event_id}"
                self.outcome(key, "late", record.head, index, None, half_id=record.event_id)

    def half(self, offset: int, half: Score | Hint) -> None:
        sample, name = half.sample, half.sample.head.task_id
        index, result = sample.sample_index, sample.result_id
        task = self.tasks.get(name)
        if task is not None and half.event_id in task.events:
            return
        left = self.left(sample.head, half.opened_at)
        welcome = expected(half) and self.youth(half) and not left
        if (task is None or task.head is None) and welcome:
            task = self.open(sample.head, half.opened_at)
        if task is None:
            task = self.tasks[name] = Known(self.now)
        score = half if isinstance(half, Score) else None
        if task.answer.setdefault(index, (result, sample.response_digest))[0] != result:
            if (index, result) not in task.others:
                task.others.add((index, result))
                key = f"{name}/{index}/superseded/{result}"
                self.outcome(key, "superseded", sample.head, index, sample, score, half_id=half.event_id)
            return
        task.events.add(half.event_id)
        mine: dict[int, Any] = task.score if isinstance(half, Score) else task.hint
        fits = task.is_open and not left and expected(half) and index not in mine
        if fits and not self.slot_over(task, index)[0]:
            mine[index] = (offset, self.now, half)
            if isinstance(half, Hint) and usable(half):
                task.trained_hint.add(index)
            assert task.head is not None
            if all(self.slot_over(task, i)[0] for i in range(task.head.n_samples)):
                self.close(name)
            return
        rollout = None
        if isinstance(half, Hint) and usable(half) and index not in task.trained_hint and not (task.forgotten or left):
            task.trained_hint.add(index)
            rollout = self.rollout(f"{name}/{index}/opd/{half.event_id}", sample.head, None, (offset, self.now, half))
        scored = task.closed_at is not None or index in task.score
        grade = score is not None and "explicit" in score.components and not expected(half)
        answer = sample.head.n_samples == 1 and sample.status == Status.OK and len(sample.token_ids) > 0
        if score is not None and grade and scored and answer and not (task.forgotten or left):
            alone = {"n_closed": 1, "group_mean": score.reward, "group_std": 0.0}
            place = (offset, self.now, half)
            rollout = self.rollout(f"{name}/{index}/grade/{half.event_id}", sample.head, place, None, **alone)
        key = f"{name}/{index}/late/{half.event_id}"
        self.outcome(key, "late", sample.head, index, sample, score, rollout, half_id=half.event_id)

    def close(self, name: str) -> None:
        task = self.tasks[name]
        assert task.head is not None
        n = task.head.n_samples
        closed = [i for i in range(n) if i in task.score or i in task.hint]
        known = [task.score[i][2].reward for i in closed if i in task.score]
        rewards = [reward for reward in known if reward is not None]
        mean, std = None, None
        if rewards:
            middle = functools.reduce(operator.add, rewards, 0.0) / len(rewards)
            squares = functools.reduce(operator.add, [(r - middle) * (r - middle) for r in rewards], 0.0)
            mean, std = middle, math.sqrt(squares / len(rewards))
        group: dict[str, Any] = {"n_closed": len(closed), "group_mean": mean, "group_std": std}
        if len(rewards) < len(closed):
            group["n_rewarded"] = len(rewards)
        for i in range(n):
            if i not in closed:
                self.outcome(f"{name}/{i}", "expired", task.head, i, None, n_closed=len(closed))
                continue
            score, hint = task.score.get(i), task.hint.get(i)
            reward = score[2].reward if score is not None else None
            sample = speaking([half for half in (score, hint) if half is not None])
            trains_hint = hint is not None and usable(hint[2])
            kind = {(True, True): "both", (True, False): "rl", (False, True): "opd", (False, False): "empty"}[
                reward is not None, trains_hint
            ]
            rollout = None
            if reward is not None or trains_hint:
                rollout = self.rollout(f"{name}/{i}", task.head, score, hint, **group)
            self.outcome(
                f"{name}/{i}",
                "failed" if sample.status == Status.FAILED else kind,
                task.head,
                i,
                sample,
                score[2] if score is not None else None,
                rollout,
                n_closed=len(closed),
            )
        task.closed_at = self.now
        task.score, task.hint = {}, {}

    def outcome(
        self,
        key: str,
        kind: str,
        head: TaskHead,
        index: int,
        sample: Sample | None,
        score: Score | None = None,
        rollout: Rollout | None = None,
        **facts: Any,
    ) -> None:
        if sample is not None:
            facts |= {"result_id": sample.result_id, "worker_id": sample.worker_id, "policy_spans": sample.policy_spans}
        if score is not None:
            facts |= {"reward": score.reward, "components": score.components}
        if rollout is not None and sample is not None:
            facts |= {"has_rl": rollout.has_rl, "has_opd": rollout.has_opd, "rollout_id": rollout.rollout_id}
            facts |= {"rollout_digest": rollout.digest, "not_trainable": not_trainable_by_ratio(sample)}
        made = Outcome(
            outcome_id=derived_id("outcome", key),
            outcome_key=key,
            event_time=self.now,
            kind=OutcomeKind(kind),
            head=head,
            sample_index=index,
            **facts,
        )
        self.written.append((key, made))

    def rollout(self, key: str, head: TaskHead, score: Came | None, hint: Came | None, **group: Any) -> Rollout:
        halves = {name: half for name, half in (("score", score), ("hint", hint)) if half is not None}
        sample = speaking(list(halves.values()))
        facts: dict[str, Any] = {"result_id": sample.result_id, "worker_id": sample.worker_id}
        facts |= {"logprobs_mode": sample.logprobs_mode, "sampling": sample.sampling}
        facts |= {"policy_spans": sample.policy_spans, "sample_index": sample.sample_index}
        if sample.status == Status.OK:
            facts |= {"token_ids": sample.token_ids, "loss_mask": sample.loss_mask}
            facts |= {"sampler_logprobs": sample.sampler_logprobs}
        if score is not None:
            facts |= {"reward": score[2].reward, "components": score[2].components}
            facts |= {"step_scores": score[2].step_scores, "step_spans": score[2].step_spans}
            facts["has_rl"] = score[2].reward is not None
        if hint is not None and usable(hint[2]):
            said = ("hints", "teacher_policy", "teacher_logprobs", "topk", "topk_ids", "topk_logprobs")
            facts |= {"has_opd": True} | {name: getattr(hint[2], name) for name in said}
        made = with_digest(
            Rollout(
                rollout_id=key,
                rollout_event_id=derived_id("rollout", key),
                event_time=self.now,
                head=head,
                n_requested=head.n_samples,
                provenance=tuple(
                    Provenance(
                        half=name,
                        half_id=half[2].event_id,
                        topic=topics.HALVES,
                        partition=self.partition,
                        offset=half[0],
                    )
                    for name, half in halves.items()
                ),
                digest="pending",
                **group,
                **facts,
            )
        )
        self.written.append((key, made))
        return made
