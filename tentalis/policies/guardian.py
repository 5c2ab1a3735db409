"""Applies the guard: tries candidates, watches the served version, and gives the reasons of each decision."""

import asyncio
import logging
from collections.abc import Callable

from schemas.ids import derived_id
from schemas.records import EvalResult, PolicyUpdate, Promotion, Task
from schemas.wire.codec import Codec
from tentalis.inference.protocol import Inference
from tentalis.policies.core import PolicyLog
from tentalis.policies.evaluation import gather_evidence, prompts_of
from tentalis.policies.guard import CANDIDATE, LIVE, ROLLBACK, GuardEvidence, GuardMode, judge
from tentalis.policies.live import ServedAnswers
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)


def promotion_of(update: PolicyUpdate, mode: str, by: str, reason: str) -> Promotion:
    """The decision to serve a version."""
    return Promotion(
        policy=update.policy,
        version=update.version,
        event_time=now_ms(),
        sha256=update.sha256,
        mode=mode,
        by=by,
        reason=reason,
    )


def verdict_of(
    update: PolicyUpdate, experiment: str, metrics: dict[str, float], reasons: list[str], worker: str
) -> EvalResult:
    """The guard's verdict on a version: passed if there are no reasons against it."""
    return EvalResult(
        eval_id=derived_id(experiment, update.name, update.sha256),
        event_time=now_ms(),
        experiment=experiment,
        scenario=update.run_id,
        worker_id=worker,
        policy=update.name,
        passed=not reasons,
        metrics={name: value for name, value in metrics.items() if value == value and abs(value) != float("inf")},
        details="; ".join(reasons),
    )


class Guardian:
    """Tries candidates and checks served versions.

    Once there are as many prompts as the limits ask for, they stay the same for the life of the process: all versions
    of a policy are compared on the same prompts, and none answers them twice."""

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        server: Inference,
        log_state: PolicyLog,
        by: str,
        prompts: Callable[..., list[Task]] = prompts_of,
    ) -> None:
        self._settings, self._codec, self._server, self._log, self._by = settings, codec, server, log_state, by
        self._find_prompts = prompts
        self._prompts: dict[str, list[Task]] = {}
        self._evidence: dict[tuple[str, ...], GuardEvidence] = {}

    async def try_candidate(self, update: PolicyUpdate) -> EvalResult | None:
        """The verdict on a candidate that the server has loaded, None while there are no prompts. Raises
        InferenceError."""
        limits, policy = self._log.rule(update).limits, update.policy
        tasks = self._prompts.get(policy, [])
        if len(tasks) < limits.prompts + len(limits.fixture):
            tasks = await asyncio.to_thread(self._find_prompts, self._settings, self._codec, policy, limits)
            self._prompts[policy] = tasks
        if not tasks:
            return None

        async def evidence_of(model: str) -> GuardEvidence:
            key = (model, *(task.task_id for task in tasks))
            if key not in self._evidence:
                self._evidence[key] = await gather_evidence(self._server, model, update.base_model, tasks, limits)
            return self._evidence[key]

        served = self._log.update(self._log.promotion(policy).name) if policy in self._log.policies else None
        measured, base = await evidence_of(update.name), await evidence_of(update.base_model)
        served_evidence = None if served is None or served.name == update.name else await evidence_of(served.name)
        reasons = judge(measured, limits, base=base, served=served_evidence)
        metrics = (
            measured.metrics()
            | base.metrics("base_")
            | ({} if served_evidence is None else served_evidence.metrics("served_"))
        )
        return verdict_of(update, CANDIDATE, metrics, reasons, self._by)

    def refusal_rollback(self, update: PolicyUpdate) -> Promotion:
        """The decision after a refusal: the served version stays, and the run continues from it."""
        promoted = self._log.promotion(update.policy)
        verdict = self._log.verdict(update.name)
        details = "" if verdict is None else verdict.details
        return promoted.model_copy(
            update={
                "event_time": now_ms(),
                "mode": ROLLBACK,
                "by": self._by,
                "reason": f"{update.name} was refused: {details}",
            }
        )

    def check_served(self, served: PolicyUpdate, answers: ServedAnswers) -> tuple[EvalResult, Promotion | None] | None:
        """The verdict if a served version fell below its guard, and the rollback if one is possible; else None."""
        limits, measured = self._log.rule(served).limits, answers.evidence(served.name)
        if measured.answers < limits.live_answers or self._log.passed(served.name) is False:
            return None
        target = self._log.fallback(served)
        verdict = self._log.verdict(served.name)
        base_evidence = None if verdict is None else GuardEvidence.of_metrics(verdict.metrics, "base_")
        target_evidence = None if target is None else answers.evidence(target.name)
        if target_evidence is not None and target_evidence.answers < limits.live_answers:
            target_evidence = None
        reasons = judge(measured, limits, base=base_evidence, served=target_evidence)
        if not reasons:
            return None
        metrics = measured.metrics() | (target_evidence.metrics("served_") if target_evidence else {})
        fallen_verdict = verdict_of(served, LIVE, metrics, reasons, self._by)
        reason = f"{served.name} fell below its guard: {fallen_verdict.details}"
        log.error("%s", reason)
        if target is None:
            log.error("there is no version to roll back to from %s", served.name)
        return fallen_verdict, None if target is None else promotion_of(target, ROLLBACK, self._by, reason)

    def promotion(self, update: PolicyUpdate, mode: GuardMode) -> Promotion:
        """The decision for a version that may be served."""
        return promotion_of(update, mode, self._by, f"step {update.step} of run {update.run_id}")
