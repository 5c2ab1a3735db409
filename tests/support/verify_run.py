"""A small run made by hand, with everything in it that may happen, and consistent: what the verifier's tests alter."""

from collections.abc import Iterable
from typing import Any, TypeVar

from schemas import topics
from schemas.digest import record_digest, with_digest
from schemas.ids import derived_id, sha256_hex
from schemas.records import (
    BatchPlan,
    Canary,
    Drop,
    Feedback,
    Hint,
    HintKind,
    LogprobsMode,
    Open,
    Outcome,
    OutcomeKind,
    PlanRow,
    Polarity,
    PolicySpan,
    PolicyUpdate,
    Position,
    Provenance,
    Record,
    Result,
    Rollout,
    RunManifest,
    Score,
    Source,
    Status,
    StepResult,
    Task,
    Terms,
    TokenSpan,
    not_trainable_by_ratio,
    result_id,
    sample_of,
)
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.ops.verify.model import Log, LoggedRecord

R = TypeVar("R", bound=Record)
RUN = "run-1"
T0 = 1_000_000
PARTITION = 3
POLICY = "assistant"


class Writer:
    """Appends records to the lists of a log, each topic with offsets of its own."""

    def __init__(self) -> None:
        self.log = Log(RUN)
        self.offsets: dict[str, int] = {}
        self.clock = T0

    def put(self, into: list[LoggedRecord[R]], topic: str, record: R, partition: int = PARTITION) -> LoggedRecord[R]:
        offset = self.offsets.get(topic, 0)
        self.offsets[topic] = offset + 1
        self.clock += 10
        seen = LoggedRecord(record, topic, partition, offset, self.clock)
        into.append(seen)
        self.log.clock[PARTITION] = self.clock
        return seen

    def task(self, name: str, n_samples: int, terms: Terms) -> Task:
        task = Task(
            task_id=derived_id("task", RUN, name),
            event_time=T0,
            policy=POLICY,
            environment="chat",
            messages=({"role": "user", "content": "why is the sky blue?"},),  # type: ignore[arg-type]
            n_samples=n_samples,
            terms=terms,
            run_id=RUN,
            user_id=f"user of {name}",
        )
        self.put(self.log.tasks, topics.TASKS, task)
        if terms.opens.value == "at_once":
            self.put(
                self.log.opens,
                topics.HALVES,
                Open(open_id=derived_id("open", task.task_id), event_time=T0, opened_at=T0, head=task.head),
            )
        return task

    def result(self, task: Task, index: int, tokens: Iterable[int], status: Status = Status.OK) -> Result:
        ids = int32_bytes(list(tokens)) if status is Status.OK else b""
        spans = (PolicySpan(start=0, policy=f"{POLICY}@v1"),)
        result = Result(
            result_id=result_id(task.task_id, index, spans, ids, ""),
            event_time=T0,
            opened_at=T0,
            task=task,
            sample_index=index,
            worker_id="worker",
            status=status,
            prompt_token_ids=int32_bytes([1, 2]) if ids else b"",
            response_token_ids=ids,
            sampler_logprobs=float32_bytes([-0.5] * (len(ids) // 4)),
            logprobs_mode=LogprobsMode.PROCESSED,
            policy_spans=spans,
        )
        self.put(self.log.results, topics.RESULTS, result)
        return result

    def score(self, result: Result, reward: float | None) -> LoggedRecord[Score]:
        score = Score(
            score_id=derived_id("score", result.result_id),
            event_time=T0,
            opened_at=T0,
            sample=sample_of(result),
            source=Source.RESULT,
            reward=reward,
            components={} if reward is None else {"words": 7.0},
            step_scores=float32_bytes([0.5]),
            step_spans=(TokenSpan(start=0, end=1),),
            scorer="rule/1",
        )
        return self.put(self.log.scores, topics.HALVES, score)

    def feedback(self, result: Result, text: str) -> Feedback:
        feedback = Feedback(
            feedback_id=derived_id("feedback", result.result_id),
            event_time=T0,
            task_id=result.task.task_id,
            sample_index=result.sample_index,
            source=Source.USER,
            polarity=Polarity.NEGATIVE if text else Polarity.NONE,
            text=text,
            result=result,
        )
        self.put(self.log.feedback, topics.FEEDBACK, feedback)
        return feedback

    def hint(self, result: Result, text: str) -> LoggedRecord[Hint]:
        sample = sample_of(result)
        feedback = self.feedback(result, text)
        hint = Hint(
            hint_id=derived_id("hint", result.result_id),
            event_time=T0,
            opened_at=T0,
            sample=sample if text else sample.without_tokens(),
            source=Source.USER,
            kind=HintKind.ACCEPTED if text else HintKind.NONE,
            hints=(text,) if text else (),
            teacher_policy="base" if text else None,
            teacher_logprobs=float32_bytes([-0.25] * (len(sample.token_ids) // 4)) if text else None,
            hinter="rule/1",
            feedback_id=feedback.feedback_id,
        )
        return self.put(self.log.hints, topics.HALVES, hint)

    def rollout(
        self,
        key: str,
        result: Result,
        score: LoggedRecord[Score] | None,
        hint: LoggedRecord[Hint] | None,
        group: tuple[int, float | None, float | None],
    ) -> Rollout:
        sample = sample_of(result)
        halves = [("score", score, score and score.record.score_id), ("hint", hint, hint and hint.record.hint_id)]
        rollout = with_digest(
            Rollout(
                rollout_id=key,
                rollout_event_id=derived_id("rollout", key),
                event_time=T0,
                head=result.task.head,
                sample_index=result.sample_index,
                result_id=result.result_id,
                worker_id=result.worker_id,
                token_ids=sample.token_ids,
                loss_mask=sample.loss_mask,
                sampler_logprobs=sample.sampler_logprobs,
                logprobs_mode=sample.logprobs_mode,
                policy_spans=sample.policy_spans,
                reward=score.record.reward if score else None,
                components=score.record.components if score else {},
                n_requested=result.task.n_samples,
                n_closed=group[0],
                group_mean=group[1],
                group_std=group[2],
                has_rl=score is not None,
                has_opd=hint is not None,
                step_scores=score.record.step_scores if score else b"",
                step_spans=score.record.step_spans if score else (),
                hints=hint.record.hints if hint else (),
                teacher_policy=hint.record.teacher_policy if hint else None,
                teacher_logprobs=hint.record.teacher_logprobs if hint else None,
                provenance=tuple(
                    Provenance(half=name, half_id=str(identity), topic=s.topic, partition=s.partition, offset=s.offset)
                    for name, s, identity in halves
                    if s is not None
                ),
                digest="pending",
            )
        )
        self.put(self.log.rollouts, topics.ROLLOUTS, rollout)
        return rollout

    def outcome(
        self,
        task: Task,
        index: int,
        kind: OutcomeKind,
        *,
        result: Result | None = None,
        rollout: Rollout | None = None,
        reward: float | None = None,
        suffix: str = "",
        half: str | None = None,
        n_closed: int = 0,
    ) -> None:
        key = f"{task.task_id}/{index}{suffix}"
        outcome = Outcome(
            outcome_id=derived_id("outcome", key),
            outcome_key=key,
            event_time=T0,
            kind=kind,
            head=task.head,
            sample_index=index,
            result_id=result.result_id if result else None,
            reward=reward,
            components={} if reward is None else {"words": 7.0},
            has_rl=rollout is not None and rollout.has_rl,
            has_opd=rollout is not None and rollout.has_opd,
            rollout_id=rollout.rollout_id if rollout else None,
            rollout_digest=rollout.digest if rollout else None,
            not_trainable=not_trainable_by_ratio(sample_of(result)) if rollout and result else None,
            half_id=half,
            n_closed=n_closed,
        )
        self.put(self.log.outcomes, topics.OUTCOMES, outcome)

    def step(self, number: int, version: int, plan: BatchPlan | None) -> None:
        """The result of a step, and the adapter published with it."""
        sha = sha256_hex(f"adapter {number}".encode())
        result = StepResult(
            run_id=RUN,
            step=number,
            attempt=plan.attempt if plan else 0,
            plan_id=plan.plan_id if plan else None,
            event_time=T0,
            policy=POLICY,
            policy_version=version,
            adapter_sha256=sha,
            owner="owner",
        )
        self.put(self.log.steps, topics.BATCHES, result, 0)
        update = PolicyUpdate(
            policy=POLICY,
            version=version,
            event_time=T0,
            run_id=RUN,
            step=number,
            sha256=sha,
            location="file:///adapter",
            base_model="model",
            base_sha256="base",
            rank=8,
            canary=Canary(token_ids=b"", logprobs=b""),
        )
        self.put(self.log.updates, topics.POLICIES, update, 0)

    def plan(
        self, step: int, attempt: int, rollouts: list[Rollout], drops: tuple[Drop, ...], low_water: int
    ) -> BatchPlan:
        offsets = {seen.record.rollout_id: seen.offset for seen in self.log.rollouts}
        draft = BatchPlan(
            run_id=RUN,
            step=step,
            attempt=attempt,
            plan_id="pending",
            event_time=T0,
            manifest_digest=self.log.manifests[0].record.digest,
            policy=POLICY,
            topic=topics.ROLLOUTS,
            rows=tuple(
                PlanRow(
                    rollout_id=rollout.rollout_id,
                    digest=rollout.digest,
                    partition=PARTITION,
                    offset=offsets[rollout.rollout_id],
                    n_tokens=rollout.n_tokens,
                    rl=rollout.has_rl,
                    opd=rollout.has_opd,
                    rank=0,
                    micro_batch=0,
                )
                for rollout in rollouts
            ),
            drops=drops,
            low_water=(Position(topic=topics.ROLLOUTS, partition=PARTITION, offset=low_water),),
            world_size=1,
            seed=1,
            owner="owner",
        )
        plan = signed(draft)
        self.put(self.log.plans, topics.BATCHES, plan, 0)
        return plan

    def manifest(self) -> None:
        draft = RunManifest(
            run_id=RUN,
            digest="pending",
            event_time=T0,
            policy=POLICY,
            first_version=1,
            config="steps: 2",
            base_model="model",
            base_sha256="base",
            tokenizer_sha256="tokenizer",
            adapter_seed=0,
            adapter_initialiser="peft",
            initial_adapter_sha256=sha256_hex(b"adapter 0"),
            threads=1,
            instruction_set="AVX2",
            device="cpu",
            world_size=1,
        )
        digest = record_digest(draft, {"digest", "event_time"})
        self.put(self.log.manifests, topics.RUNS, draft.model_copy(update={"digest": digest}), 0)


def signed(plan: BatchPlan) -> BatchPlan:
    """The plan under the id of its content."""
    return plan.model_copy(update={"plan_id": record_digest(plan, {"plan_id", "event_time", "owner"})})


def consistent() -> Log:
    """Five tasks: `a` with both halves, one silent hint, one superseded result; `b` with a late hint that trains by
    itself and an expired sample; `c` failed; `d` opens with feedback that never came; `e` was announced too late to be
    opened. Two steps, the second at its second attempt; a dropped rollout, and one that is not reached yet."""
    w = Writer()
    w.manifest()
    w.step(0, 1, None)
    both = Terms(opd=Source.USER)

    a = w.task("a", 2, both)
    a0, a1, other = w.result(a, 0, [5, 6]), w.result(a, 1, [7]), w.result(a, 1, [8])
    score_a0, score_a1 = w.score(a0, 1.0), w.score(a1, 0.0)
    w.score(other, 1.0)
    hint_a0 = w.hint(a0, "Be short.")
    w.hint(a1, "")
    group = (2, 0.5, 0.5)
    rollout_a0 = w.rollout(f"{a.task_id}/0", a0, score_a0, hint_a0, group)
    rollout_a1 = w.rollout(f"{a.task_id}/1", a1, score_a1, None, group)
    w.outcome(a, 0, OutcomeKind.BOTH, result=a0, rollout=rollout_a0, reward=1.0, n_closed=2)
    w.outcome(a, 1, OutcomeKind.RL, result=a1, rollout=rollout_a1, reward=0.0, n_closed=2)
    w.outcome(
        a,
        1,
        OutcomeKind.SUPERSEDED,
        result=other,
        reward=1.0,
        suffix=f"/superseded/{other.result_id}",
        half=derived_id("score", other.result_id),
    )

    b = w.task("b", 2, both)
    b0 = w.result(b, 0, [9])
    score_b0 = w.score(b0, 0.5)
    rollout_b0 = w.rollout(f"{b.task_id}/0", b0, score_b0, None, (1, 0.5, 0.0))
    w.outcome(b, 0, OutcomeKind.RL, result=b0, rollout=rollout_b0, reward=0.5, n_closed=1)
    w.outcome(b, 1, OutcomeKind.EXPIRED, n_closed=1)
    late = w.hint(b0, "Say why.")
    late_id = late.record.hint_id
    late_rollout = w.rollout(f"{b.task_id}/0/opd/{late_id}", b0, None, late, (0, None, None))
    w.outcome(b, 0, OutcomeKind.LATE, result=b0, rollout=late_rollout, suffix=f"/late/{late_id}", half=late_id)

    w.plan(1, 1, [rollout_a0, rollout_a1], (), 2)
    w.step(1, 2, w.log.plans[0].record)
    w.plan(2, 1, [late_rollout], (), 2)
    drop = Drop(partition=PARTITION, first_offset=3, last_offset=3, count=1, reason="stale")
    w.step(2, 3, w.plan(2, 2, [rollout_b0], (drop,), 4))

    c = w.task("c", 1, Terms())
    c0 = w.result(c, 0, [], Status.FAILED)
    score_c0 = w.score(c0, -1.0)
    rollout_c0 = w.rollout(f"{c.task_id}/0", c0, score_c0, None, (1, -1.0, 0.0))
    w.outcome(c, 0, OutcomeKind.FAILED, result=c0, rollout=rollout_c0, reward=-1.0, n_closed=1)

    w.task("d", 1, Terms(rl=Source.USER, opens="first_feedback"))  # type: ignore[arg-type]

    e = w.task("e", 1, Terms())
    too_late = derived_id("open", e.task_id)
    w.outcome(e, 0, OutcomeKind.LATE, suffix=f"/late/{too_late}", half=too_late)
    return w.log


def altered(seen: list[LoggedRecord[Any]], index: int, **changes: Any) -> None:
    """Replaces a record by a copy with other fields, where it lies."""
    old = seen[index]
    record = old.record.model_copy(update=changes)
    seen[index] = LoggedRecord(record, old.topic, old.partition, old.offset, old.timestamp)


def repeated(seen: list[LoggedRecord[Any]], index: int, **changes: Any) -> None:
    """Appends a copy of a record, perhaps with other fields."""
    old = seen[index]
    record = old.record.model_copy(update=changes)
    seen.append(LoggedRecord(record, old.topic, old.partition, old.offset + 1000, old.timestamp))
