"""The replies of the process of reward functions, checked: the user's code runs in it. Pure."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.problems import problems
from tentalis.rewards.functions.errors import ProcessNotStarted
from tentalis.rewards.functions.signature import Convention, Signature

Number = Annotated[float, Field(allow_inf_nan=False)]


class BadReply(Exception):
    """A reply that the process's own program does not write."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FunctionInfo(_Part):
    """A loaded function.

    `target`: the number of the target that named it. `place`: file and line of its definition. `messages`: it reads
    completions as messages. `columns`: the columns of a row that it cannot do without.
    """

    name: str
    target: int
    convention: Convention
    columns: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    everything: bool
    coroutine: bool
    messages: bool
    place: str
    weight: Number
    file: str | None

    @property
    def signature(self) -> Signature:
        """The function's signature."""
        return Signature(
            self.convention, frozenset(self.required), frozenset(self.optional), self.everything, self.coroutine
        )


class Failure(_Part):
    """An error in the user's code. `where`: file and line. `late`: the time limit."""

    where: str
    message: str
    traceback: str
    late: bool = False


class Hello(_Part):
    """The functions that the process has loaded, in the order of the targets."""

    functions: tuple[FunctionInfo, ...]


class FunctionValue(_Part):
    """The value of one function: a reward (None for unknown) with its parts, or a text (None for none), or an error.
    `changed`: arguments that it has changed."""

    reward: Number | None = None
    text: str | None = None
    parts: dict[str, Number] = {}
    changed: tuple[str, ...] = ()
    error: Failure | None = None


class Reply(_Part):
    """The values of all functions for one call."""

    number: int
    values: tuple[FunctionValue, ...]


class _NotLoaded(_Part):
    error: Failure


def read_hello(frame: bytes) -> Hello:
    """Returns the first reply. Raises ProcessNotStarted if the functions cannot be loaded, or BadReply."""
    try:
        if b'"functions"' in frame[:20]:
            return Hello.model_validate_json(frame)
        failure = _NotLoaded.model_validate_json(frame).error
    except ValidationError as error:
        raise BadReply(problems(error, "reply")) from error
    place = f"{failure.where}: " if failure.where else ""
    trace = f"\n{failure.traceback}" if failure.traceback else ""
    raise ProcessNotStarted(f"{place}{failure.message}{trace}")


def read_reply(frame: bytes) -> Reply:
    """Returns a reply to a call. Raises BadReply."""
    try:
        return Reply.model_validate_json(frame)
    except ValidationError as error:
        raise BadReply(problems(error, "reply")) from error
