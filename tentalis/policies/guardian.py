"""The guard at work: tries candidates, watches what is served, and says what it decided, each with its reasons."""

import asyncio
import logging
from collections.abc import Callable

from schemas.codec import Codec
from schemas.ids import derived_id
from schemas.records import EvalResult, PolicyUpdate, Promotion, Task
from tentalis.config import Settings
from tentalis.guard import CANDIDATE, LIVE, ROLLBACK, Evidence, Mode, judge
from tentalis.inference.protocol import Inference
from tentalis.kafka import now_ms
from tentalis.policies.core import PolicyLog
from tentalis.policies.evaluation import evidence, prompts_of
from tentalis.policies.live import Answers

log = logging.getLogger(__name__)


def promotion_of(update: PolicyUpdate, mode: str, by: str, reason: str) -> Promotion:
    """The decision that a version is to be served."""
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
    """The guard's word on a version: passed if nothing speaks against it."""
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
    """As soon as there are as many prompts as the limits ask for, they stay the same as long as the process lives: the
    versions of a policy are compared on the same, and none answers them twice."""

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
        self._known: dict[tuple[str, ...], Evidence] = {}

    async def tried(self, update: PolicyUpdate) -> EvalResult | None:
        """The verdict on a candidate that the server has loaded, None while there is nothing to try it on. Raises
        InferenceError."""
        limits, policy = self._log.rule(update).limits, update.policy
        tasks = self._prompts.get(policy, [])
        if len(tasks) < limits.prompts + len(limits.fixture):
            tasks = await asyncio.to_thread(self._find_prompts, self._settings, self._codec, policy, limits)
            self._prompts[policy] = tasks
        if not tasks:
            return None

        async def seen_of(model: str) -> Evidence:
            key = (model, *(task.task_id for task in tasks))
            if key not in self._known:
                self._known[key] = await evidence(self._server, model, update.base_model, tasks, limits)
            return self._known[key]

        served = self._log.update(self._log.promotion(policy).name) if policy in self._log.policies else None
        seen, base = await seen_of(update.name), await seen_of(update.base_model)
        before = None if served is None or served.name == update.name else await seen_of(served.name)
        reasons = judge(seen, limits, base=base, served=before)
        metrics = seen.metrics() | base.metrics("base_") | ({} if before is None else before.metrics("served_"))
        return verdict_of(update, CANDIDATE, metrics, reasons, self._by)

    def decision(self, update: PolicyUpdate) -> Promotion:
        """What follows from a refusal: what is served stays, and the run goes on from there."""
        promoted = self._log.promotion(update.policy)
        verdict = self._log.verdict(update.name)
        why = "" if verdict is None else verdict.details
        return promoted.model_copy(
            update={
                "event_time": now_ms(),
                "mode": ROLLBACK,
                "by": self._by,
                "reason": f"{update.name} was refused: {why}",
            }
        )

    def fallen(self, served: PolicyUpdate, answers: Answers) -> tuple[EvalResult, Promotion | None] | None:
        """What follows if a served version fell below its guard: the verdict, and the way back if there is one."""
        limits, seen = self._log.rule(served).limits, answers.evidence(served.name)
        if seen.answers < limits.live_answers or self._log.passed(served.name) is False:
            return None
        back = self._log.fallback(served)
        verdict = self._log.verdict(served.name)
        tried = None if verdict is None else Evidence.of_metrics(verdict.metrics, "base_")
        before = None if back is None else answers.evidence(back.name)
        if before is not None and before.answers < limits.live_answers:
            before = None
        reasons = judge(seen, limits, base=tried, served=before)
        if not reasons:
            return None
        metrics = seen.metrics() | (before.metrics("served_") if before else {})
        said = verdict_of(served, LIVE, metrics, reasons, self._by)
        why = f"{served.name} fell below its guard: {said.details}"
        log.error("%s", why)
        if back is None:
            log.error("there is nothing to go back to from %s", served.name)
        return said, None if back is None else promotion_of(back, ROLLBACK, self._by, why)

    def promoted(self, update: PolicyUpdate, mode: Mode) -> Promotion:
        """The decision for a version that may be served."""
        return promotion_of(update, mode, self._by, f"step {update.step} of run {update.run_id}")
