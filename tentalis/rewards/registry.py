"""The registry of environments and their scorers, and the verdict on a result.

An installed package adds a scorer (a `Verifier` or `Judge` object) with an entry point:

    [project.entry-points."tentalis.scorers"]
    "chat.politeness" = "mypackage.politeness:scorer"    # environment chat, verifier politeness
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from schemas.records import Result, Status, Task
from tentalis.rewards.environment_file import EPISODE, DeclaredEnvironment, read_environments
from tentalis.rewards.episode import ENVIRONMENT_GROUP, EpisodeScorer
from tentalis.rewards.math_verify import MathVerifyVerifier
from tentalis.rewards.mathematics import BoxedMathVerifier, Gsm8kVerifier, ReasoningGymVerifier
from tentalis.rewards.next_state_rules import NextStateRules
from tentalis.rewards.style_scorer import StyleScorer
from tentalis.rewards.verdict import (
    INFRASTRUCTURE_FAILED,
    FeedbackJudge,
    GradingJudge,
    Judge,
    Scorer,
    UnknownEnvironment,
    UnknownVerifier,
    Verdict,
)
from tentalis.rewards.votes import VoteCounts
from tentalis.service import variables

_MATHEMATICS: dict[str, Scorer] = {
    "gsm8k": Gsm8kVerifier(),
    "math": BoxedMathVerifier(),
    "math_verify": MathVerifyVerifier(),
    "reasoning_gym": ReasoningGymVerifier(),
}
ENVIRONMENTS: dict[str, dict[str, Scorer]] = {
    # The gateway's turns name next_state. Without a judge model that is these rules, as the scorer's name shows.
    "chat": {"taste": StyleScorer(), "next_state": NextStateRules()},
    "math": {**_MATHEMATICS},
    "agent": {"episode": EpisodeScorer(), **_MATHEMATICS},
    "echo": {"episode": EpisodeScorer()},
    "env-pool": {"episode": EpisodeScorer()},
    "gui": {"episode": EpisodeScorer()},
    "llm": {"episode": EpisodeScorer(), **_MATHEMATICS},
    "openenv": {"episode": EpisodeScorer()},
    "swe": {"episode": EpisodeScorer()},
    "terminal": {"episode": EpisodeScorer()},
    "toolcall": {"episode": EpisodeScorer(), **_MATHEMATICS},
    "verifiers": {"episode": EpisodeScorer()},
}
BUILT_IN = frozenset(ENVIRONMENTS)
"""The environments that are of no package and of no file."""
DECLARED: dict[str, DeclaredEnvironment] = {}
"""The environments of the file of environments, by name."""
PLUGIN_GROUP = "tentalis.scorers"
_NAME_ONLY: set[tuple[str, str]] = set()
NO_VERIFIER = "none/1"
"""Scorer name for a task that names no verifier: its reward is unknown."""


class BadPlugin(Exception):
    """A scorer that cannot be registered: its entry point is misnamed, or its name is taken."""


def register(environment: str, name: str, scorer: Scorer, *, replace: bool = False) -> None:
    """Registers a scorer in this process; creates its environment if that is new.

    Args:
        replace: the scorer may replace another of the same name.

    Raises:
        BadPlugin: the name is taken.
    """
    scorers = ENVIRONMENTS.setdefault(environment, {})
    if name in scorers and not replace:
        raise _taken(environment, name)
    scorers[name] = scorer


@cache
def load_plugins() -> None:
    """Registers the scorers of installed packages, `episode` for their environments, and the environments of the file
    that TENTALIS_ENVIRONMENT_FILE names, once.

    After an error nothing is registered, and the next call tries again. Raises BadPlugin, BadEnvironmentFile.
    """
    added: dict[str, dict[str, Scorer]] = {}
    for point in entry_points(group=ENVIRONMENT_GROUP):
        if EPISODE not in ENVIRONMENTS.get(point.name, {}):
            added[point.name] = {EPISODE: EpisodeScorer()}
    for point in entry_points(group=PLUGIN_GROUP):
        environment, _, name = point.name.partition(".")
        if not environment or not name:
            raise BadPlugin(f"the entry point {point.name!r} of {PLUGIN_GROUP} must be named environment.verifier")
        if name in added.get(environment, {}) or name in ENVIRONMENTS.get(environment, {}):
            raise _taken(environment, name)
        added.setdefault(environment, {})[name] = point.load()
    path = variables.ENVIRONMENT_FILE.read()
    declared = {} if path is None else _read(path, added)
    for environment, scorers in added.items():
        ENVIRONMENTS.setdefault(environment, {}).update(scorers)
    if path is not None:
        _declare(declared)


def use_environments(path: Path) -> None:
    """Registers the environments of a file in this process, in place of those of another one. Raises BadPlugin,
    BadEnvironmentFile."""
    load_plugins()
    _declare(_read(path, {}))


def _taken(environment: str, name: str) -> BadPlugin:
    return BadPlugin(f"the environment {environment!r} already has a verifier {name!r}: choose another name")


def _read(path: Path, added: Mapping[str, Mapping[str, Scorer]]) -> dict[str, DeclaredEnvironment]:
    """Reads a file whose bases are the registered environments with the scorers that are added to them."""
    others = {name: scorers for name, scorers in ENVIRONMENTS.items() if name not in DECLARED}
    known = {name: {**others.get(name, {}), **added.get(name, {})} for name in (*others, *added)}
    return read_environments(path, known, BUILT_IN)


def _declare(found: Mapping[str, DeclaredEnvironment]) -> None:
    """Gives each environment of a file the scorers of its base, in place of the environments of another file."""
    for name in DECLARED:
        ENVIRONMENTS.pop(name, None)
    DECLARED.clear()
    DECLARED.update(found)
    ENVIRONMENTS.update({name: dict(ENVIRONMENTS[each.base]) for name, each in found.items()})


def declared_environments() -> dict[str, DeclaredEnvironment]:
    """Returns the environments of the file of environments by name; none without a file. Raises BadPlugin,
    BadEnvironmentFile."""
    if not DECLARED and variables.ENVIRONMENT_FILE.read() is not None:
        load_plugins()
    return DECLARED


def vote_counts() -> dict[str, VoteCounts]:
    """Returns the tally of every judge that asks for votes, by the judge's name."""
    scorers = (scorer for verifiers in ENVIRONMENTS.values() for scorer in verifiers.values())
    found = {scorer.name: getattr(scorer, "vote_counts", None) for scorer in scorers}
    return {name: counts for name, counts in found.items() if isinstance(counts, VoteCounts)}


def inner_steps() -> int:
    """Returns the progress of scorers within their calls, such as starts of a function's process. It only grows."""
    scorers = {id(scorer): scorer for verifiers in ENVIRONMENTS.values() for scorer in verifiers.values()}
    return sum(int(getattr(scorer, "inner_steps", 0)) for scorer in scorers.values())


def has_grading_judge() -> bool:
    """Returns True if any scorer makes the grades of other sources parts of its reward."""
    return any(isinstance(scorer, GradingJudge) for verifiers in ENVIRONMENTS.values() for scorer in verifiers.values())


def check_environment(environment: str) -> None:
    """Raises UnknownEnvironment if no scorer is registered under the environment."""
    if environment not in ENVIRONMENTS:
        load_plugins()
    if environment not in ENVIRONMENTS:
        raise UnknownEnvironment(
            f"the environment {environment!r} is not known; the known ones are {', '.join(sorted(ENVIRONMENTS))}"
        )


def scorer_of(task: Task) -> Scorer | None:
    """Returns the task's verifier or judge, None if it names none. Raises UnknownEnvironment or UnknownVerifier."""
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


def register_name(environment: str, name: str) -> None:
    """Registers the name of a verifier that only the scoring application can run."""
    _NAME_ONLY.add((environment, name))


def check(task: Task) -> None:
    """Checks that results of the task can be verified. For a verifier registered by name only, it checks the name.

    Raises UnknownEnvironment, UnknownVerifier or BadVerifierData.
    """
    if task.verifier is not None and (task.environment, task.verifier.name) in _NAME_ONLY:
        return
    verifier = scorer_of(task)
    if verifier is not None:
        verifier.check(task)


def scorer_name(task: Task) -> str:
    """Returns the name/version of the task's scorer. Raises UnknownEnvironment or UnknownVerifier."""
    verifier = scorer_of(task)
    return NO_VERIFIER if verifier is None else verifier.name


def settled_verdict(scorer: Scorer | None, result: Result) -> Verdict | None:
    """Returns the verdict on a result that needs no scorer, None if it needs one.

    A failed result is a negative signal (-1, `failed` 1). The reward is unknown if the infrastructure failed, without a
    scorer, and for a status unknown to this version.
    """
    if result.status is Status.FAILED:
        return Verdict(-1.0, {"failed": 1.0})
    if result.status is Status.INFRA:
        return INFRASTRUCTURE_FAILED
    if scorer is None or result.status is not Status.OK:
        return Verdict.unknown()
    return None


def verify(task: Task, result: Result) -> Verdict:
    """Returns the verdict on a result of a task. Pure; unknown if the scorer is a judge.

    Raises:
        UnknownEnvironment, UnknownVerifier, BadVerifierData: the task is malformed.
    """
    scorer = scorer_of(task)
    verdict = settled_verdict(scorer, result)
    if verdict is not None:
        return verdict
    if scorer is None or isinstance(scorer, Judge | FeedbackJudge):
        return Verdict.unknown()
    return scorer.verify(task, result)


def complaint(task: Task, result: Result) -> str | None:
    """Returns the simulated user's complaint: one or two short sentences on the faults, or None if there are none.

    Raises:
        UnknownEnvironment, UnknownVerifier, BadVerifierData: the task is malformed.
    """
    verifier = scorer_of(task)
    if result.status is Status.FAILED:
        return "I got no answer at all: please answer my question."
    if verifier is None or isinstance(verifier, Judge | FeedbackJudge) or result.status is not Status.OK:
        return None
    return verifier.complaint(task, result)
