"""Which environments there are, which scorers each has, and the verdict on a result.

A scorer of one's own is an object (`Verifier` or `Judge`) that an installed package names in its entry points:

    [project.entry-points."tentalis.scorers"]
    "chat.politeness" = "mypackage.politeness:scorer"    # environment chat, verifier politeness
"""

from functools import cache
from importlib.metadata import entry_points

from schemas.records import Result, Status, Task
from tentalis.rewards.mathematics import BoxedMath, Gsm8k, ReasoningGym
from tentalis.rewards.next_state_rules import NextStateRules
from tentalis.rewards.taste import Taste
from tentalis.rewards.verdict import (
    FeedbackJudge,
    GradingJudge,
    Judge,
    Scorer,
    UnknownEnvironment,
    UnknownVerifier,
    Verdict,
)
from tentalis.rewards.votes import Tally

ENVIRONMENTS: dict[str, dict[str, Scorer]] = {
    # The gateway's turns name next_state: without a judge model it is these rules, and their name says so.
    "chat": {"taste": Taste(), "next_state": NextStateRules()},
    "math": {"gsm8k": Gsm8k(), "math": BoxedMath(), "reasoning_gym": ReasoningGym()},
}
PLUGINS = "tentalis.scorers"
_ELSEWHERE: set[tuple[str, str]] = set()
NO_VERIFIER = "none/1"
"""Scorer name for a task that names no verifier: its reward is unknown."""


class BadPlugin(Exception):
    """An entry point that is no scorer."""


def register(environment: str, name: str, scorer: Scorer, *, instead: bool = False) -> None:
    """Makes a scorer known in this process; a new environment comes into being with its first.

    Args:
        instead: it may take the place of another.

    Raises:
        BadPlugin: the name is taken.
    """
    scorers = ENVIRONMENTS.setdefault(environment, {})
    if name in scorers and not instead:
        raise BadPlugin(f"the environment {environment!r} has a verifier {name!r} already: give the other another name")
    scorers[name] = scorer


@cache
def load_plugins() -> None:
    """Registers the scorers of installed packages, once. Raises BadPlugin."""
    for point in entry_points(group=PLUGINS):
        environment, _, name = point.name.partition(".")
        if not environment or not name:
            raise BadPlugin(f"the entry point {point.name!r} of {PLUGINS} must be named environment.verifier")
        register(environment, name, point.load())


def tallies() -> dict[str, Tally]:
    """The votes so far of every judge that asks for votes, by its name."""
    scorers = (scorer for verifiers in ENVIRONMENTS.values() for scorer in verifiers.values())
    found = {scorer.name: getattr(scorer, "tally", None) for scorer in scorers}
    return {name: tally for name, tally in found.items() if isinstance(tally, Tally)}


def grading() -> bool:
    """Whether any scorer makes the grades of others parts of its reward."""
    return any(isinstance(scorer, GradingJudge) for verifiers in ENVIRONMENTS.values() for scorer in verifiers.values())


def check_environment(environment: str) -> None:
    """Raises UnknownEnvironment."""
    if environment not in ENVIRONMENTS:
        load_plugins()
    if environment not in ENVIRONMENTS:
        raise UnknownEnvironment(
            f"the environment {environment!r} is not known; there are {', '.join(sorted(ENVIRONMENTS))}"
        )


def scorer_of(task: Task) -> Scorer | None:
    """The task's verifier or judge, None if it names none. Raises UnknownEnvironment or UnknownVerifier."""
    check_environment(task.environment)
    if task.verifier is None:
        return None
    verifiers = ENVIRONMENTS[task.environment]
    if task.verifier.name not in verifiers:
        load_plugins()
    if task.verifier.name not in verifiers:
        raise UnknownVerifier(
            f"the environment {task.environment!r} has no verifier {task.verifier.name!r}; "
            f"it has {', '.join(sorted(verifiers))}"
        )
    return verifiers[task.verifier.name]


def made_elsewhere(environment: str, name: str) -> None:
    """A verifier that scoring has, and this process only the name of."""
    _ELSEWHERE.add((environment, name))


def check(task: Task) -> None:
    """Whether results of the task can be verified; of a verifier that is made elsewhere only its name is known here.

    Raises UnknownEnvironment, UnknownVerifier or BadVerifierData.
    """
    if task.verifier is not None and (task.environment, task.verifier.name) in _ELSEWHERE:
        return
    verifier = scorer_of(task)
    if verifier is not None:
        verifier.check(task)


def scorer_name(task: Task) -> str:
    """Name/version of what the task's results are judged by. Raises UnknownEnvironment or UnknownVerifier."""
    verifier = scorer_of(task)
    return NO_VERIFIER if verifier is None else verifier.name


def settled(scorer: Scorer | None, result: Result) -> Verdict | None:
    """The verdict on a result that needs no scorer, None if it does.

    A failed result is a negative signal (-1, `failed` 1). Without a scorer, and for a status that this version does not
    know, the reward is unknown.
    """
    if result.status is Status.FAILED:
        return Verdict(-1.0, {"failed": 1.0})
    if scorer is None or result.status is not Status.OK:
        return Verdict.unknown()
    return None


def verify(task: Task, result: Result) -> Verdict:
    """The verdict on a result of a task. Pure; for a judge's it is unknown.

    Raises:
        UnknownEnvironment, UnknownVerifier, BadVerifierData: the task is malformed.
    """
    scorer = scorer_of(task)
    verdict = settled(scorer, result)
    if verdict is not None:
        return verdict
    if scorer is None or isinstance(scorer, Judge | FeedbackJudge):
        return Verdict.unknown()
    return scorer.verify(task, result)


def complaint(task: Task, result: Result) -> str | None:
    """What the simulated user says about a result: one or two short sentences naming what is wrong, or None if content.

    Raises:
        UnknownEnvironment, UnknownVerifier, BadVerifierData: the task is malformed.
    """
    verifier = scorer_of(task)
    if result.status is Status.FAILED:
        return "I got no answer at all: please answer my question."
    if verifier is None or isinstance(verifier, Judge | FeedbackJudge) or result.status is not Status.OK:
        return None
    return verifier.complaint(task, result)
