"""Which environments there are, which verifiers each has, and the verdict on a result."""

from schemas.records import Result, Status, Task
from tentalis.rewards.mathematics import BoxedMath, Gsm8k, ReasoningGym
from tentalis.rewards.taste import Taste
from tentalis.rewards.verdict import UnknownEnvironment, UnknownVerifier, Verdict, Verifier

ENVIRONMENTS: dict[str, dict[str, Verifier]] = {
    "chat": {"taste": Taste()},
    "math": {"gsm8k": Gsm8k(), "math": BoxedMath(), "reasoning_gym": ReasoningGym()},
}
NO_VERIFIER = "none/1"
"""Scorer name for a task that names no verifier: its reward is unknown."""


def check_environment(environment: str) -> None:
    """Raises UnknownEnvironment."""
    if environment not in ENVIRONMENTS:
        raise UnknownEnvironment(
            f"the environment {environment!r} is not known; there are {', '.join(sorted(ENVIRONMENTS))}"
        )


def verifier_of(task: Task) -> Verifier | None:
    """The task's verifier, None if it names none. Raises UnknownEnvironment or UnknownVerifier."""
    check_environment(task.environment)
    if task.verifier is None:
        return None
    verifiers = ENVIRONMENTS[task.environment]
    if task.verifier.name not in verifiers:
        raise UnknownVerifier(
            f"the environment {task.environment!r} has no verifier {task.verifier.name!r}; "
            f"it has {', '.join(sorted(verifiers))}"
        )
    return verifiers[task.verifier.name]


def check(task: Task) -> None:
    """Whether results of the task can be verified. Raises UnknownEnvironment, UnknownVerifier or BadVerifierData."""
    verifier = verifier_of(task)
    if verifier is not None:
        verifier.check(task)


def scorer_name(task: Task) -> str:
    """Name/version of what `verify` judges by. Raises UnknownEnvironment or UnknownVerifier."""
    verifier = verifier_of(task)
    return NO_VERIFIER if verifier is None else verifier.name


def verify(task: Task, result: Result) -> Verdict:
    """The verdict on a result of a task. Pure.

    A failed result is a negative signal (-1, `failed` 1). Without a verifier, and for a status that this version does
    not know, the reward is unknown.

    Raises:
        UnknownEnvironment, UnknownVerifier, BadVerifierData: the task is malformed.
    """
    verifier = verifier_of(task)
    if result.status is Status.FAILED:
        return Verdict(-1.0, {"failed": 1.0})
    if verifier is None or result.status is not Status.OK:
        return Verdict.unknown()
    return verifier.verify(task, result)


def complaint(task: Task, result: Result) -> str | None:
    """What the simulated user says about a result: one or two short sentences naming what is wrong, or None if content.

    Raises:
        UnknownEnvironment, UnknownVerifier, BadVerifierData: the task is malformed.
    """
    verifier = verifier_of(task)
    if result.status is Status.FAILED:
        return "I got no answer at all: please answer my question."
    if verifier is None or result.status is not Status.OK:
        return None
    return verifier.complaint(task, result)
