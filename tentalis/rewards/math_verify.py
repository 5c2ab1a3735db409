"""The verifier `math_verify`: the rule of `math`, and where it finds no equality, algebra by the library math-verify.

The library parses and simplifies what a model wrote, which may take any time and memory. So it runs in the process of
reward functions: a call that hangs or ends the process costs the reward of one answer.
"""

import pickle
from importlib.metadata import PackageNotFoundError, version

from schemas.records import Result, Task
from tentalis.rewards.answers import MAX_LATEX_CHARS, same_latex
from tentalis.rewards.functions.arguments import Call
from tentalis.rewards.functions.errors import FunctionError, ProcessNotStarted
from tentalis.rewards.functions.process import FunctionProcess, ProcessSettings
from tentalis.rewards.mathematics import MathData, complaint_of, latex_verdict
from tentalis.rewards.verdict import ScorerAway, Verdict, data_of
from tentalis.service.packages import require

RULE_VERSION = "math_verify/3"
TIME_LIMIT_S = 10.0
MEMORY_MB = 1_024
_TARGET = "tentalis.rewards.latex_equality:equal"
_LIBRARIES = ("math-verify", "latex2sympy2-extended", "sympy")
"""The packages on which a verdict depends; their versions are in the scorer's name."""


class MathVerifyVerifier:
    """Checks that the answer of a text (`latex_answer`) equals the reference, by algebra too. Thread-safe."""

    slow = True
    limits_itself = True
    """The process ends calls at their time limit; the wait for other calls does not count."""
    time_limit_s = TIME_LIMIT_S

    def __init__(self) -> None:
        self._process = FunctionProcess(ProcessSettings((_TARGET,), (), "text", MEMORY_MB))
        self.name = f"{RULE_VERSION}+{_installed()}"

    @property
    def inner_steps(self) -> int:
        """Starts of the process and ends of calls so far."""
        return self._process.steps

    def close(self) -> None:
        """Ends the process. The next call starts it again."""
        self._process.close()

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's data does not fit this verifier."""
        data_of(task, MathData)

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns 1 or 0; unknown if the reference has no answer.

        Raises:
            BadVerifierData: the task is malformed.
            FunctionTimeout, FunctionError: the library took too long or too much memory on this answer, or failed.
            MissingExtra, ScorerAway: the library is not installed, or its process does not start.
        """
        # Also where the rule alone decides: the name of the Score has the versions.
        require("the verifier math_verify", "math")
        return latex_verdict(task, result, self._equal)

    def _equal(self, answer: str, reference: str) -> bool:
        if same_latex(answer, reference):
            return True
        if max(len(answer), len(reference)) > MAX_LATEX_CHARS:
            return False
        call = Call(messages=[], text=answer, token_ids=[], columns={"reference": reference})
        try:
            reply = self._process.call(pickle.dumps(call), self.time_limit_s)
        except ProcessNotStarted as error:
            raise ScorerAway(str(error)) from error
        value = reply.values[0]
        if value.error is not None or value.reward is None:
            message = "no value" if value.error is None else value.error.message
            raise FunctionError(f"math-verify failed on the answer {answer!r} to {reference!r}: {message}")
        return value.reward == 1.0

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns the complaint of a user who knows the reference, or None. Raises the errors of `verify`."""
        return complaint_of(self.verify(task, result), data_of(task, MathData).reference())


def _installed() -> str:
    """Returns the versions of the libraries; `missing` if one is not installed, and then no Score has the name."""
    try:
        return "-".join(map(version, _LIBRARIES))
    except PackageNotFoundError:
        return "missing"
