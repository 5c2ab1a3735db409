"""The scorer of the kind `function`: reward functions in a file, with the conventions of TRL, verl and verifiers."""

import logging
import pickle
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from schemas.ids import sha256_hex
from schemas.problems import problems
from schemas.records import Result, Task
from schemas.tensors import int32_view
from tentalis.rewards.functions.arguments import Call, missing_columns
from tentalis.rewards.functions.errors import BadFunction, FunctionError, FunctionTimeout, ProcessNotStarted
from tentalis.rewards.functions.process import FunctionProcess, ProcessSettings
from tentalis.rewards.functions.reply import Failure, FunctionInfo, FunctionValue
from tentalis.rewards.functions.source import BadSource, digest
from tentalis.rewards.functions.targets import BadFunctionName, is_file, split
from tentalis.rewards.functions.total import total
from tentalis.rewards.functions.values import Returned
from tentalis.rewards.naming import versioned
from tentalis.rewards.verdict import BadVerifierData, CallSeconds, ScorerAway, Verdict, VerifierData, data_of

log = logging.getLogger(__name__)

TIME_LIMIT_S = 10.0
MEMORY_MB = 2_048
_DIGEST_CHARS = 12
_MOST_TOLD = 100
_SHOWN_CHARS = 200

Finite = Annotated[float, Field(allow_inf_nan=False)]


class FunctionSettings(BaseModel):
    """Settings of reward functions.

    `target`: FILE.py:FUNCTION or MODULE:FUNCTION, or several. `weights`: one for each target, 1 by default. `range`:
    the lowest and highest reward, which become -1 and 1; without it rewards must lie in [-1, 1]. `time_limit_s`: of one
    call. `memory_mb`: of the process. `python_path`: folders with modules that the functions import. `completion`: the
    form of completions, messages as in a conversation or text; auto finds out from the function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["function"]
    target: str | Annotated[tuple[str, ...], Field(min_length=1)]
    weights: tuple[Finite, ...] = ()
    range: tuple[Finite, Finite] | None = None
    time_limit_s: CallSeconds = TIME_LIMIT_S
    memory_mb: Annotated[int, Field(ge=128)] = MEMORY_MB
    python_path: tuple[str, ...] = ()
    completion: Literal["auto", "text", "messages"] = "auto"

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets, also if there is one."""
        return (self.target,) if isinstance(self.target, str) else self.target

    @model_validator(mode="after")
    def _check(self) -> Self:
        for target in self.targets:
            try:
                split(target)
            except BadFunctionName as error:
                raise ValueError(f"target: {error}") from error
        if self.weights and len(self.weights) != len(self.targets):
            raise ValueError(f"weights: {len(self.weights)} for {len(self.targets)} functions: give one for each")
        if self.weights and not any(self.weights):
            raise ValueError("weights: at least one must not be 0")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("range: the first number must be less than the second")
        return self


class FunctionData(VerifierData):
    """Verifier data of reward functions: the columns of the row, without the prompt."""

    columns: dict[str, JsonValue] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """`name`: of the scorer. `source`: the digest (sha256, hex) of the functions' source. `functions`: as loaded."""

    name: str
    source: str
    functions: tuple[FunctionInfo, ...]


class FunctionScorer:
    """Scores answers by reward functions in a separate process. Thread-safe.

    Its name has a digest of the source, so that a changed function is another scorer.

    Args:
        base: the folder that relative paths start from.
        returns: what the functions return; texts are read with `values`.

    Raises:
        BadFunction: a function is missing, cannot be imported or has an unknown signature.
    """

    slow = True
    limits_itself = True
    """The process ends calls at their time limit; the wait for other calls does not count."""

    def __init__(self, settings: FunctionSettings, base: Path = Path(), returns: Returned = "reward") -> None:
        targets = tuple(_absolute(target, base) for target in settings.targets)
        folders = [Path(where).parent for where, _ in map(split, targets) if is_file(where)]
        python_path = [(base / folder).resolve() for folder in settings.python_path]
        for folder in python_path:
            if not folder.is_dir():
                raise BadFunction(f"python_path: {folder} is not a folder")
        self.time_limit_s = settings.time_limit_s
        self._range, self._memory_mb = settings.range, settings.memory_mb
        paths = tuple(dict.fromkeys([*folders, *python_path]))
        self._process = FunctionProcess(
            ProcessSettings(targets, paths, settings.completion, settings.memory_mb, returns)
        )
        # Read before the functions are: a file that changes between the two is found before the next start.
        before = {where: _digest([where], python_path) for where, _ in map(split, targets) if is_file(where)}
        self._functions = self._process.start().functions
        files = [each.file for each in self._functions if each.file is not None]
        found = _digest(files, python_path)
        if before and before != {where: _digest([where], python_path) for where in before}:
            self._process.close()
            raise BadFunction(f"{', '.join(before)}: the file changed while it was read: start again")
        self._process.check_source = partial(_check_source, files, python_path, found)
        self._weights = _weights(settings, self._functions)
        name = "+".join(f"{Path(where).name}:{function}" for where, function in map(split, settings.targets))
        identity = settings.model_copy(update={"target": name, "python_path": (), "memory_mb": MEMORY_MB})
        self.name = versioned(f"{name}/{found[:_DIGEST_CHARS]}", identity)
        self.description = RewardDescription(self.name, found, self._functions)
        self._failures: Counter[str] = Counter()
        self._changing: set[str] = set()
        self._lock = threading.Lock()

    @property
    def inner_steps(self) -> int:
        """Starts of the process and ends of calls so far."""
        return self._process.steps

    def close(self) -> None:
        """Ends the process. The next call starts it again."""
        self._process.close()

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if a function needs a column that the row does not have."""
        columns = data_of(task, FunctionData).columns
        for each in self._functions:
            missing = missing_columns(each.signature, columns)
            if missing:
                raise BadVerifierData(
                    f"{each.place}: {each.name} needs {', '.join(missing)}, and the row has no such column; it has "
                    f"{', '.join(sorted(columns)) or 'none besides the prompt'}: rename a column, or give the "
                    "parameter a default"
                )

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns the functions' verdict. Raises the errors of `values`."""
        return total(self._functions, self.values(task, result), self._weights, self._range)

    def values(self, task: Task, result: Result) -> Sequence[FunctionValue]:
        """Returns the value of each function.

        Raises:
            FunctionTimeout, FunctionError: a function failed on this answer.
            BadVerifierData: the task is malformed.
            ScorerAway: the process cannot be started again, or the source was changed.
        """
        self.check(task)
        both = any(each.convention == "tentalis" for each in self._functions)
        call = Call(
            messages=[{"role": message.role, "content": message.content} for message in task.messages],
            text=result.text,
            token_ids=int32_view(result.response_token_ids).tolist(),
            columns=dict(data_of(task, FunctionData).columns),
            environment=task.environment,
            turns=max(1, len(result.turns)),
            records=(task, result) if both else None,
        )
        try:
            reply = self._process.call(pickle.dumps(call), self.time_limit_s)
        except ProcessNotStarted as error:
            raise ScorerAway(str(error)) from error
        except FunctionError as error:
            self._count(str(error), f"{error}{_of_answer(task, result)}")
            raise
        if len(reply.values) != len(self._functions):
            raise FunctionError(f"{self.name}: its process gave {len(reply.values)} values")
        for function, value in zip(self._functions, reply.values, strict=True):
            self._report_changes(function, value)
        failed = [
            (_raised(function, value.error, self.time_limit_s, self._memory_mb), value.error.where or function.place)
            for function, value in zip(self._functions, reply.values, strict=True)
            if value.error is not None
        ]
        for failure, place in failed:
            trace = f":\n{failure.traceback}" if failure.traceback else ""
            self._count(place, f"{failure}{_of_answer(task, result)}{trace}")
        if failed:
            raise failed[0][0]
        return reply.values

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns None: a function only grades."""
        return None

    def _count(self, place: str, message: str) -> None:
        """Logs the first failure at a place, and then the number of failures whenever it has grown tenfold."""
        with self._lock:
            if place not in self._failures and len(self._failures) >= _MOST_TOLD:
                return
            self._failures[place] += 1
            count = self._failures[place]
        if count == 1:
            log.warning("%s", message)
        elif str(count).rstrip("0") == "1":
            log.warning("%d failures so far: %s", count, message.partition("\n")[0].rstrip(":"))

    def _report_changes(self, function: FunctionInfo, value: FunctionValue) -> None:
        """Logs once for each function that it changes its arguments."""
        if not value.changed or function.place in self._changing:
            return
        self._changing.add(function.place)
        log.warning(
            "%s: %s changes its arguments (%s): each call gets its own arguments, so nothing else sees the change",
            function.place,
            function.name,
            ", ".join(value.changed),
        )


def load(
    spec: str | Sequence[str],
    *,
    weights: Sequence[float] = (),
    range: tuple[float, float] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    memory_mb: int = MEMORY_MB,
    python_path: Sequence[str] = (),
    completion: Literal["auto", "text", "messages"] = "auto",
    base: Path = Path(),
) -> FunctionScorer:
    """Returns the scorer of `rewards.py:score`, or of several such names; see `FunctionSettings`.

    Raises:
        BadFunction: a function cannot be used, or a setting is not valid.
    """
    try:
        settings = FunctionSettings(
            kind="function",
            target=spec if isinstance(spec, str) else tuple(spec),
            weights=tuple(weights),
            range=range,
            time_limit_s=time_limit_s,
            memory_mb=memory_mb,
            python_path=tuple(python_path),
            completion=completion,
        )
    except ValidationError as error:
        raise BadFunction(problems(error, "reward")) from error
    return FunctionScorer(settings, base)


def describe(spec: str | Sequence[str], *, python_path: Sequence[str] = (), base: Path = Path()) -> RewardDescription:
    """Returns the functions of a name, with their conventions and the digest of their source, and ends their process.

    Raises:
        BadFunction: see `load`.
    """
    scorer = load(spec, python_path=python_path, base=base)
    scorer.close()
    return scorer.description


def _absolute(target: str, base: Path) -> str:
    where, name = split(target)
    if not is_file(where):
        return target
    path = (base / Path(where).expanduser()).resolve()
    if not path.is_file():
        raise BadFunction(f"{path}: no such file")
    return f"{path}:{name}"


def _weights(settings: FunctionSettings, functions: Sequence[FunctionInfo]) -> list[float]:
    """Returns the weight of each function; a rubric's functions share the weight of their target."""
    weights = settings.weights or (1.0,) * len(settings.targets)
    return [weights[each.target] * each.weight for each in functions]


def _digest(files: Sequence[str], python_path: Sequence[Path]) -> str:
    try:
        return sha256_hex("".join(digest(Path(file), python_path) for file in dict.fromkeys(files)).encode())
    except BadSource as error:
        raise BadFunction(str(error)) from error


def _check_source(files: Sequence[str], python_path: Sequence[Path], expected: str) -> None:
    """Raises ProcessNotStarted if the source has changed since the scorer was made."""
    try:
        unchanged = _digest(files, python_path) == expected
    except BadFunction as error:
        raise ProcessNotStarted(f"{error}; restore it, or start scoring again") from error
    if not unchanged:
        raise ProcessNotStarted(
            f"{', '.join(dict.fromkeys(files))}: the source has changed since scoring started, and a changed function "
            "is another scorer: start scoring again, or restore the file"
        )


def _raised(function: FunctionInfo, failure: Failure, limit_s: float, memory_mb: int) -> FunctionError:
    place = failure.where or function.place
    if failure.late:
        return FunctionTimeout(f"{place}: {function.name} took longer than {limit_s:g} s; raise time_limit_s")
    advice = f"; raise memory_mb, which is {memory_mb}" if failure.message.startswith("MemoryError") else ""
    return FunctionError(f"{place}: {function.name}: {failure.message}{advice}", failure.traceback)


def _of_answer(task: Task, result: Result) -> str:
    """Returns the beginning of the answer, and the row of the prompts if the task names it, for a failure's message."""
    row = f" in row {task.metadata['line']}" if "line" in task.metadata else ""
    text = result.text if len(result.text) <= _SHOWN_CHARS else f"{result.text[:_SHOWN_CHARS]}..."
    return f" (on the answer {text!r}{row})"
