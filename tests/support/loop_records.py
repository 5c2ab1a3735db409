"""Builders of records for the tests of worker, manager, policies and demo."""

from typing import Any

from schemas.ids import policy_name
from schemas.records import (
    Assignment,
    AssignmentAck,
    AssignmentScope,
    BatchPlan,
    Canary,
    Feedback,
    LogprobsMode,
    Message,
    Outcome,
    OutcomeKind,
    PlanRow,
    PolicyAck,
    PolicySpan,
    PolicyUpdate,
    Promotion,
    Result,
    RunManifest,
    Source,
    Status,
    StepResult,
    Task,
    Terms,
    result_id,
)
from schemas.tensors import float32_bytes, int32_bytes

RUN = "run-1"
T0 = 1_700_000_000_000


def task(task_id: str = "t0", *, n: int = 2, run_id: str | None = RUN, **more: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": task_id,
        "event_time": T0,
        "policy": "assistant",
        "environment": "chat",
        "messages": (Message(role="user", content="Why do cats purr?"),),
        "n_samples": n,
        "terms": Terms(rl=Source.RESULT, opd=Source.USER),
        "run_id": run_id,
    }
    return Task(**(values | more))


def result(of: Task, index: int = 0, *, version: int = 1, text: str = "Because they like it.", **more: Any) -> Result:
    spans = (PolicySpan(start=0, policy=policy_name(of.policy, version)),)
    tokens = int32_bytes([5, 6, 7 + index])
    values: dict[str, Any] = {
        "result_id": result_id(of.task_id, index, spans, tokens, text),
        "event_time": T0,
        "opened_at": T0,
        "task": of,
        "sample_index": index,
        "worker_id": "w",
        "status": Status.OK,
        "text": text,
        "prompt_token_ids": int32_bytes([1, 2]),
        "response_token_ids": tokens,
        "sampler_logprobs": float32_bytes([-1.0, -0.5, -0.1]),
        "logprobs_mode": LogprobsMode.PROCESSED,
        "policy_spans": spans,
        "finish_reason": "stop",
    }
    return Result(**(values | more))


def outcome(of: Task, index: int = 0, *, version: int = 1, reward: float | None = 1.0, **more: Any) -> Outcome:
    key = f"{of.task_id}/{index}"
    values: dict[str, Any] = {
        "outcome_id": f"o-{key}",
        "outcome_key": key,
        "event_time": T0,
        "kind": OutcomeKind.BOTH,
        "head": of.head,
        "sample_index": index,
        "policy_spans": (PolicySpan(start=2, policy=policy_name(of.policy, version)),),
        "reward": reward,
        "components": {"words": 10.0, "on_topic": 1.0},
        "has_rl": True,
        "has_opd": True,
        "rollout_id": key,
        "rollout_digest": "d",
        "n_closed": of.n_samples,
    }
    return Outcome(**(values | more))


def lost(of: Task, index: int = 0, kind: OutcomeKind = OutcomeKind.EXPIRED) -> Outcome:
    nothing = {"has_rl": False, "has_opd": False, "rollout_id": None, "rollout_digest": None}
    return outcome(of, index, reward=None, kind=kind, policy_spans=(), components={}, **nothing)


def manifest(run_id: str = RUN, *, first: int = 1, steps: int = 3, batch: int = 4, staleness: int = 0) -> RunManifest:
    return RunManifest(
        run_id=run_id,
        digest="m",
        event_time=T0,
        policy="assistant",
        first_version=first,
        config=f"steps: {steps}\nbatch_rollouts: {batch}\nmax_staleness: {staleness}\n",
        base_model="m",
        base_sha256="b",
        tokenizer_sha256="t",
        adapter_seed=0,
        adapter_initialiser="kaiming",
        initial_adapter_sha256="a",
        threads=1,
        instruction_set="",
        device="cpu",
        world_size=1,
    )


def plan(step: int, rollouts: list[str], run_id: str = RUN) -> BatchPlan:
    rows = tuple(
        PlanRow(rollout_id=r, digest="d", partition=0, offset=i, n_tokens=5, rl=True, opd=True, rank=0, micro_batch=0)
        for i, r in enumerate(rollouts)
    )
    return BatchPlan(
        run_id=run_id,
        step=step,
        attempt=1,
        plan_id=f"p{step}",
        event_time=T0,
        manifest_digest="m",
        policy="assistant",
        topic="tentalis.rollouts.v1",
        rows=rows,
        world_size=1,
        seed=0,
        owner="o",
    )


def step_result(step: int, version: int, run_id: str = RUN, **more: Any) -> StepResult:
    values: dict[str, Any] = {
        "run_id": run_id,
        "step": step,
        "attempt": 1,
        "plan_id": f"p{step}",
        "event_time": T0,
        "policy": "assistant",
        "policy_version": version,
        "adapter_sha256": "a" * 64,
        "owner": "o",
    }
    return StepResult(**(values | more))


def update(version: int, *, sha256: str = "s", location: str = "file:///nowhere", **more: Any) -> PolicyUpdate:
    values: dict[str, Any] = {
        "policy": "assistant",
        "version": version,
        "event_time": T0,
        "run_id": RUN,
        "step": max(0, version - 1),
        "sha256": sha256,
        "location": location,
        "base_model": "m",
        "base_sha256": "b",
        "rank": 16,
        "canary": Canary(token_ids=int32_bytes([1, 2, 3]), logprobs=float32_bytes([0.0, -1.0, -2.0])),
    }
    return PolicyUpdate(**(values | more))


def promotion(version: int, mode: str = "always", sha256: str = "s") -> Promotion:
    return Promotion(policy="assistant", version=version, event_time=T0, sha256=sha256, mode=mode)


def ack(version: int, *, ok: bool = True, server_id: str = "local", policy: str = "assistant") -> PolicyAck:
    return PolicyAck(
        server_id=server_id,
        policy=policy,
        version=version,
        event_time=T0,
        sha256="s",
        ok=ok,
        error=None if ok else "bad",
    )


def feedback_on(of: Result, feedback_id: str) -> Feedback:
    return Feedback(
        feedback_id=feedback_id,
        event_time=T0,
        task_id=of.task.task_id,
        sample_index=of.sample_index,
        source=Source.USER,
        result=of,
    )


def assignment(version: int | None, scope: AssignmentScope, subject: str = "", **more: Any) -> Assignment:
    """An assignment of `assistant` in place of `assistant`; `version` None: the served one."""
    values: dict[str, Any] = {"policy": "assistant", "replaces": "assistant", "event_time": T0, "active": True}
    return Assignment(scope=scope, subject=subject, version=version, **(values | more))


def assignment_ack(version: int, *, ok: bool = True, **more: Any) -> AssignmentAck:
    values: dict[str, Any] = {"server_id": "local", "policy": "assistant", "event_time": T0, "sha256": "x"}
    return AssignmentAck(version=version, ok=ok, error=None if ok else "no room", **(values | more))
