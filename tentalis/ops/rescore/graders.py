"""The scorers of a rescoring: a registered verifier or judge, or the checks of an environment."""

from dataclasses import replace
from typing import Protocol

from schemas.records import Ending, Result, Verifier
from tentalis.agents.environments import EnvironmentFault, EnvironmentOptions
from tentalis.ops.rescore.core import BadScorerLabel, ScorerLabel
from tentalis.rewards import registry
from tentalis.rewards.call import call_scorer
from tentalis.rewards.episode import REWARD, EpisodeScorer
from tentalis.rewards.verdict import (
    BadVerdict,
    FeedbackJudge,
    Judge,
    ResultVerifier,
    RewardError,
    Scorer,
    Verdict,
    checked_verdict,
)
from tentalis.service.packages import require

EPISODE_GRADERS = frozenset({("swe", "tests"), ("terminal", "checks"), ("toolcall", "answer")})
"""The keys of `tentalis.agents.environments.regrading.REGRADERS`, whose packages are an extra."""


class LeftOut(Exception):
    """An answer that cannot be scored again; the message is the reason."""


class Grader(Protocol):
    """Scores recorded answers."""

    @property
    def label(self) -> ScorerLabel:
        """The name of the scores, with a version."""
        ...

    async def verdict(self, result: Result) -> Verdict:
        """Returns the verdict on an answer. Raises LeftOut, ScorerAway, StorageError, MissingExtra."""
        ...


def grader_of(label: ScorerLabel, options: EnvironmentOptions) -> Grader:
    """Returns the grader of a label.

    Raises BadScorerLabel, MissingExtra, and the errors of the environment's options: BadTasks, WallMissing.
    """
    registry.load_plugins()
    declared = registry.declared_environments().get(label.environment)
    base = label.environment if declared is None else declared.base
    if (base, label.name) in EPISODE_GRADERS:
        return EpisodeGrader(label, base, options)
    scorers = registry.ENVIRONMENTS.get(label.environment, {})
    scorer = scorers.get(label.name)
    if scorer is None or isinstance(scorer, FeedbackJudge):
        known = sorted(f"{label.environment}/{name}" for name, each in scorers.items() if _by_result(each))
        known += sorted(f"{label.environment}/{name}" for environment, name in EPISODE_GRADERS if environment == base)
        why = "has no such scorer" if scorer is None else "judges by feedback, which a result does not have"
        raise BadScorerLabel(f"{label}: {label.environment} {why}; it has {', '.join(known) or 'none'}")
    version = scorer.name.rpartition("/")[2]
    if label.version not in (None, version):
        raise BadScorerLabel(
            f"{label}: this installation has version {version}. Name {label.environment}/{label.name}@{version}, or "
            f"run the installation that has version {label.version}"
        )
    return RuleGrader(replace(label, version=version), scorer)


def _by_result(scorer: Scorer) -> bool:
    return not isinstance(scorer, FeedbackJudge)


class RuleGrader:
    """Scores with a registered verifier or judge, whatever verifier the task names; it must be able to read the data of
    the task."""

    def __init__(self, label: ScorerLabel, scorer: ResultVerifier | Judge) -> None:
        self.label = label
        self._scorer = scorer

    async def verdict(self, result: Result) -> Verdict:
        """See Grader.verdict."""
        scorer = self._scorer
        settled = registry.settled_verdict(scorer, result)
        if settled is not None:
            return settled
        if result.task.verifier is None:
            raise LeftOut("its task has no data for a verifier")
        verifier = Verifier(name=self.label.name, data=result.task.verifier.data)
        task = result.task.model_copy(update={"verifier": verifier})
        try:
            scorer.check(task)
            return checked_verdict(await call_scorer(scorer, task, result))
        except (RewardError, BadVerdict) as error:
            raise LeftOut(str(error)) from error
        except TimeoutError as error:
            raise LeftOut(f"{scorer.name} took too long") from error


class EpisodeGrader:
    """Scores episodes with the checks, tests or rule of their environment. `base`: the built-in one that played them.

    Raises BadScorerLabel, BadTasks, MissingExtra or WallMissing.
    """

    def __init__(self, label: ScorerLabel, base: str, options: EnvironmentOptions) -> None:
        if label.version is None:
            raise BadScorerLabel(
                f"{label}: name a version, such as {label}@2. It stands for the checks as they are now, so choose a "
                "new one whenever they change"
            )
        require(f"{label.environment}/{label.name}", "environments")
        from tentalis.agents.environments import regrading

        self.label = label
        self._cannot = regrading.CannotRegrade
        self._regrader = regrading.REGRADERS[base, label.name](options)

    async def verdict(self, result: Result) -> Verdict:
        """See Grader.verdict."""
        scorer = EpisodeScorer()
        settled = registry.settled_verdict(scorer, result)
        if settled is not None:
            return settled
        if result.ending in (Ending.NONE, Ending.UNKNOWN):
            raise LeftOut("it is not an episode")
        try:
            parts = dict(await self._regrader.parts(result))
            reward = parts.get(REWARD)
            if reward is not None and not -1.0 <= reward <= 1.0:  # NaN too; the scorer would make it unknown
                raise LeftOut(f"its new reward would be {reward}, which is not in [-1, 1]")
            return checked_verdict(scorer.verify(result.task, result.model_copy(update={"rewards": parts})))
        except (self._cannot, EnvironmentFault, RewardError, BadVerdict) as error:
            raise LeftOut(str(error)) from error
