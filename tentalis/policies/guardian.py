"""Applies the guard: tries candidates, watches the served version, and gives the reasons of each decision."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from schemas.ids import derived_id
from schemas.records import EvalResult, PolicyUpdate, Promotion, Task
from schemas.wire.codec import Codec
from tentalis.inference.protocol import Inference
from tentalis.policies.core import PolicyLog
from tentalis.policies.evaluation import PromptRefused, TrialAnswers, all_or_none, prompts_of
from tentalis.policies.guard import CANDIDATE, LIVE, ROLLBACK, GuardEvidence, GuardJudge, GuardMode
from tentalis.policies.guard_decision import TrialDecision, decide, judge, looks
from tentalis.policies.live import ServedAnswers
from tentalis.policies.trial_judge import TrialJudge, endpoint_of
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


@dataclass(frozen=True, slots=True)
class _Fall:
    """The limits that a served version breaks, and its measurements."""

    reasons: list[str]
    metrics: dict[str, float]


class Guardian:
    """Tries candidates and checks served versions.

    Once there are as many prompts as the limits ask for, they stay the same for the life of the process: all versions
    of a policy are compared on the same prompts, and none answers a prompt twice with the same seed. A prompt that the
    server refuses for its content is left out: any client can send one, and candidates would wait for ever."""

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
        self._refused: dict[str, set[str]] = defaultdict(set)
        """By policy, the ids of the tasks that the server refuses."""
        self._trials: dict[str, tuple[tuple[object, ...], TrialAnswers]] = {}
        self._judges: dict[GuardJudge, TrialJudge] = {}
        self._doubted: set[str] = set()
        """The served versions that only the answers of one user speak against."""

    async def try_candidate(self, update: PolicyUpdate) -> EvalResult | None:
        """The verdict on a candidate that the server has loaded, None while there are no prompts. Raises
        InferenceError, ScorerAway, NoVote, and NoApiKey or BadSecurity of the judge. Raises PromptRefused if the server
        refuses every prompt; the next call asks it again."""
        while (trial := await self._trial_of(update)) is not None:
            try:
                return await self._tried(update, trial)
            except PromptRefused as refusal:
                await self._leave_out(update, refusal)
        return None

    async def _tried(self, update: PolicyUpdate, trial: TrialAnswers) -> EvalResult:
        """The verdict on a candidate. Raises the errors of `TrialAnswers.evidence`."""
        policy = update.policy
        started_at = time.monotonic()
        limits = self._log.rule(update).limits
        promoted = self._log.update(self._log.promotion(policy).name) if policy in self._log.policies else None
        served = None if promoted is None or promoted.name == update.name else promoted.name
        asked = [update.base_model]
        if served is not None and promoted is not None and not self._log.equals_base(promoted):
            asked.append(served)
        trial.keep({update.name, *asked})
        for rounds in looks(trial.rounds):
            measured, base, *others = await all_or_none(
                trial.evidence(update.name, rounds, measures_kl=True),
                *(trial.evidence(model, rounds) for model in asked),
            )
            served_evidence = None if served is None else (others or [base])[0]
            decision, reasons = decide(
                measured, limits, base=base, served=served_evidence, complete=rounds == trial.rounds
            )
            if decision is not TrialDecision.MORE:
                break
        metrics = (
            measured.metrics()
            | base.metrics("base_")
            | ({} if served_evidence is None else served_evidence.metrics("served_"))
            | {"seconds": time.monotonic() - started_at}
        )
        return verdict_of(update, CANDIDATE, metrics, reasons, self._by)

    async def _leave_out(self, update: PolicyUpdate, refusal: PromptRefused) -> None:
        """Leaves a task out of this and later trials. Raises the refusal if no prompt remains: the server may be at
        fault."""
        policy, refused = update.policy, self._refused[update.policy]
        refused.add(refusal.task_id)
        log.warning("a candidate is tried without a prompt that the server refuses: %s", refusal)
        self._prompts[policy] = await self._latest_prompts(update)
        if not self._prompts[policy]:
            refused.clear()
            raise refusal

    async def _latest_prompts(self, update: PolicyUpdate) -> list[Task]:
        policy, limits = update.policy, self._log.rule(update).limits
        return await asyncio.to_thread(
            self._find_prompts, self._settings, self._codec, policy, limits, self._refused[policy]
        )

    async def _trial_of(self, update: PolicyUpdate) -> TrialAnswers | None:
        """The answers to the policy's prompts, None while there are none. They are sampled anew for other prompts and
        for other limits."""
        limits, policy = self._log.rule(update).limits, update.policy
        tasks = self._prompts.get(policy, [])
        if len(tasks) < limits.prompts + len(limits.fixture):
            tasks = self._prompts[policy] = await self._latest_prompts(update)
        if not tasks:
            return None
        identity = (update.base_model, limits, tuple(task.task_id for task in tasks))
        known, trial = self._trials.get(policy, (None, None))
        if trial is None or known != identity:
            trial = TrialAnswers(self._server, update.base_model, tasks, limits, self._judge_of(limits.judge))
            self._trials[policy] = identity, trial
        return trial

    def _judge_of(self, settings: GuardJudge) -> TrialJudge | None:
        """The configured judge. Raises NoApiKey or BadSecurity."""
        endpoint = endpoint_of(settings)
        if endpoint is None:
            return None
        if settings not in self._judges:
            self._judges[settings] = TrialJudge(endpoint)
        return self._judges[settings]

    async def close(self) -> None:
        """Closes the connections to the judges."""
        for each in self._judges.values():
            await each.close()

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
        """The verdict if a served version fell below its guard, and the rollback if one is possible; else None.

        A limit must also be broken without the answers of any one user: no key or user takes a version back alone."""
        if self._log.passed(served.name) is False:
            return None
        target = self._log.fallback(served)
        fall = self._fall(served, target, answers)
        if fall is None:
            return None
        if any(self._fall(served, target, answers, without=user) is None for user in answers.users(served.name)):
            if served.name not in self._doubted:
                self._doubted.add(served.name)
                log.warning(
                    "%s stays served: without the answers of one user or key nothing shows that it fell below its "
                    "guard (%s)",
                    served.name,
                    "; ".join(fall.reasons),
                )
            return None
        fallen_verdict = verdict_of(served, LIVE, fall.metrics, fall.reasons, self._by)
        reason = f"{served.name} fell below its guard: {fallen_verdict.details}"
        log.error("%s", reason)
        if target is None:
            log.error("there is no version to roll back to from %s", served.name)
        return fallen_verdict, None if target is None else promotion_of(target, ROLLBACK, self._by, reason)

    def _fall(
        self, served: PolicyUpdate, target: PolicyUpdate | None, answers: ServedAnswers, without: str | None = None
    ) -> _Fall | None:
        """The broken limits of a served version; None if none is, or if there are too few answers. `target`: the
        version that a rollback would return to. `without`: a user whose answers are left out."""
        limits, measured = self._log.rule(served).limits, answers.evidence(served.name, without=without)
        if measured.answers < limits.live_answers:
            return None
        verdict = self._log.verdict(served.name)
        base_evidence = None if verdict is None else GuardEvidence.of_metrics(verdict.metrics, "base_")
        target_evidence = None if target is None else answers.evidence(target.name, without=without)
        if target_evidence is not None and target_evidence.answers < limits.live_answers:
            target_evidence = None
        drop = None
        if target is not None and target_evidence is not None:
            drop = answers.evidence_of_drop(served.name, target.name, without=without)
        reasons = judge(measured, limits, base=base_evidence, served=target_evidence, drop=drop)
        metrics = measured.metrics() | (target_evidence.metrics("served_") if target_evidence else {})
        return _Fall(reasons, metrics) if reasons else None

    def promotion(self, update: PolicyUpdate, mode: GuardMode) -> Promotion:
        """The decision for a version that may be served."""
        return promotion_of(update, mode, self._by, f"step {update.step} of run {update.run_id}")
