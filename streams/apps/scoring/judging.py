"""Verdicts on results: quick ones immediately, slow ones concurrently, each call with a time limit and a few tries.

An unknown reward stays unknown: if every call fails or times out, the verdict is unknown, never a middling value. A
result waits only while an external service is unavailable (`ScorerAway`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from schemas.records import Feedback, Result, Source
from streams.runtime.call_cache import CallSlots
from streams.runtime.processor import Retryable
from tentalis.rewards import registry
from tentalis.rewards.call import call_scorer
from tentalis.rewards.thread_runner import THREAD_S
from tentalis.rewards.verdict import (
    FeedbackJudge,
    GradingJudge,
    Judge,
    RewardError,
    Scorer,
    ScorerAway,
    Verdict,
    checked_verdict,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgeLimits:
    """Limits of slow scoring, times in seconds.

    at_once: calls in flight, over all partitions. thread_s: time limit of a slow verifier that sets none. tries: calls
    per result. first_s, cap_s: pause before the second try, doubled for each further one up to the cap.
    """

    at_once: int = 32
    thread_s: float = THREAD_S
    tries: int = 3
    first_s: float = 0.5
    cap_s: float = 8.0


class Judging:
    """Judges results by the scorers of their tasks."""

    def __init__(self, limits: JudgeLimits | None = None) -> None:
        self.limits = limits or JudgeLimits()
        self.ended = dict.fromkeys(("answered", "failed", "timeout", "away"), 0)
        """Slow calls by how they ended."""
        self.unknown = 0
        """Slow verdicts without a reward."""

    def at_once(self, result: Result) -> Verdict | None:
        """Returns the verdict if that needs no slow call, else None. Raises RewardError for a malformed task."""
        scorer = registry.scorer_of(result.task)
        verdict = registry.settled_verdict(scorer, result)
        if verdict is not None or scorer is None:
            return verdict
        if isinstance(scorer, Judge | FeedbackJudge) or scorer.slow:
            return None
        try:
            return checked_verdict(scorer.verify(result.task, result))
        except RewardError:
            raise
        except Exception:
            log.exception("%s failed on result %s: its reward is unknown", scorer.name, result.result_id)
            return Verdict.unknown(failed_calls=1.0)

    async def slowly(
        self,
        result: Result,
        turns: CallSlots,
        feedback: Feedback | None = None,
        grades: Mapping[Source, float] | None = None,
    ) -> Verdict:
        """Returns the verdict of a judge or a slow verifier. If `feedback` is given, the scorer must be a FeedbackJudge
        and judges by it. `grades`: grades from other sources, for a GradingJudge.

        Raises:
            RewardError: the task is malformed.
            Retryable: an external service is unavailable.
        """
        scorer = registry.scorer_of(result.task)
        assert scorer is not None
        settled = None if feedback is None else registry.settled_verdict(scorer, result)
        if settled is not None:
            return settled
        try:
            verdict = await self._tried(
                scorer, result, partial(self._call, scorer, result, turns, feedback, grades or {})
            )
        except ScorerAway as away:
            raise Retryable(f"{scorer.name} is unavailable: {away}") from away
        self.unknown += verdict.reward is None
        return verdict

    async def _tried(self, scorer: Scorer, result: Result, call: Callable[[], Awaitable[Verdict]]) -> Verdict:
        limits = self.limits
        # A verifier is pure: a call that fails once fails again.
        tries = limits.tries if isinstance(scorer, Judge | FeedbackJudge) else 1
        late = 0
        for number in range(tries):
            if number:
                await asyncio.sleep(min(limits.cap_s, limits.first_s * 2.0 ** (number - 1)))
            try:
                verdict = await call()
            except Retryable:
                raise
            except (RewardError, ScorerAway) as error:
                self.ended["away" if isinstance(error, ScorerAway) else "failed"] += 1
                raise
            except TimeoutError as error:
                self.ended["timeout"] += 1
                late += 1
                reason = str(error) or "the call timed out"
            except Exception as error:  # noqa: BLE001 - a scorer may fail in any way; it is logged and counted below
                self.ended["failed"] += 1
                reason = repr(error)
            else:
                self.ended["answered"] += 1
                return verdict
            log.warning("%s, call %d of %d for result %s: %s", scorer.name, number + 1, tries, result.result_id, reason)
        return Verdict.unknown(failed_calls=float(tries), timed_out=float(late))

    async def _call(
        self,
        scorer: Scorer,
        result: Result,
        turns: CallSlots,
        feedback: Feedback | None,
        grades: Mapping[Source, float],
    ) -> Verdict:
        # The time limit is for the call alone: waiting for a slot does not count.
        async with turns:
            if feedback is not None:
                assert isinstance(scorer, FeedbackJudge)
                async with asyncio.timeout(scorer.time_limit_s):
                    if isinstance(scorer, GradingJudge):
                        return checked_verdict(await scorer.judge_grades(result.task, result, feedback, grades))
                    return checked_verdict(await scorer.judge_feedback(result.task, result, feedback))
            assert not isinstance(scorer, FeedbackJudge), "its check refuses tasks whose reward comes from the result"
            return checked_verdict(await call_scorer(scorer, result.task, result, self.limits.thread_s))
