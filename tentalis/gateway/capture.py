"""What a backend answers, taken in as it passes: text, tool calls, token ids and log-probs of the first choice. Pure.

The gateway asks for token ids and log-probs itself; `strip` takes out again what the client did not ask for.
"""

from dataclasses import dataclass, field
from typing import Any

from schemas.records import ToolCall
from schemas.tensors import float32_bytes, int32_bytes


@dataclass(frozen=True, slots=True)
class Wants:
    """What the client asked for itself."""

    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False


@dataclass(slots=True)
class _Call:
    identifier: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Capture:
    """One answer, whole or in chunks, of chat or plain completions. `n`: choices asked for.

    Raises nothing for answers of an unexpected shape: what is not there is not there, and `finished` stays False.
    """

    def __init__(self, n: int = 1) -> None:
        self._n = n
        self._text: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._response: list[int] = []
        self._logprobs: list[float] = []
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self.model = ""
        self.finish_reason = ""
        self.prompt_token_ids: list[int] | None = None
        self.has_token_ids = False
        self.has_logprobs = False
        self.usage: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has told why it ended."""
        return len(self._ended) >= self._n

    @property
    def as_it_came(self) -> bool:
        """Whether there is a choice, and every one has told why it ended: some backends give fewer than are asked
        for."""
        return bool(self._ended) and self._begun == self._ended

    @property
    def text(self) -> str:
        """The text, without what is no text in UTF-8."""
        return _clean("".join(self._text))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that have a name."""
        return tuple(
            ToolCall(name=_clean(call.name), arguments=_clean("".join(call.arguments)) or "{}")
            for _, call in sorted(self._calls.items())
            if call.name
        )

    def tokens(self) -> tuple[bytes, bytes, bytes] | None:
        """Prompt ids, response ids and log-probs as the log keeps them; None where they are not all there and equally
        long, or are no such numbers."""
        ids, logprobs = self._response, self._logprobs
        if self.prompt_token_ids is None or not ids or len(ids) != len(logprobs):
            return None
        try:
            return int32_bytes(self.prompt_token_ids), int32_bytes(ids), float32_bytes(logprobs)
        except (ValueError, TypeError, OverflowError):
            return None

    def take(self, answer: dict[str, Any]) -> None:
        """Takes in a whole answer or one chunk of a stream."""
        if isinstance(model := answer.get("model"), str) and model:
            self.model = _clean(model)
        if isinstance(usage := answer.get("usage"), dict):
            self.usage = usage
        self._prompt(answer.get("prompt_token_ids"))
        choices = answer.get("choices")
        for at, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                self._choice(at, choice)

    def _choice(self, at: int, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        index = index if isinstance(index, int) else at
        self._begun.add(index)
        if choice.get("finish_reason") is not None:
            self._ended.add(index)
        if index != 0:
            return
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = _clean(reason)
        self._prompt(choice.get("prompt_token_ids"))
        said = choice.get("delta") or choice.get("message") or choice
        if isinstance(said, dict):
            for name in ("content", "text"):
                if isinstance(text := said.get(name), str):
                    self._text.append(text)
            calls = said.get("tool_calls")
            for at, call in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(call, dict):
                    self._call(at, call)
        if isinstance(ids := choice.get("token_ids"), list):
            self.has_token_ids = True
            self._response += ids
        if isinstance(logprobs := choice.get("logprobs"), dict):
            self._take_logprobs(logprobs)

    def _call(self, at: int, call: dict[str, Any]) -> None:
        index = call.get("index", at)
        kept = self._calls.setdefault(index if isinstance(index, int) else at, _Call())
        function = call.get("function")
        if isinstance(function, dict):
            if isinstance(name := function.get("name"), str):
                kept.name += name
            if isinstance(arguments := function.get("arguments"), str):
                kept.arguments.append(arguments)

    def _take_logprobs(self, logprobs: dict[str, Any]) -> None:
        if isinstance(content := logprobs.get("content"), list):
            values: list[Any] = [entry.get("logprob") for entry in content if isinstance(entry, dict)]
        elif isinstance(content := logprobs.get("token_logprobs"), list):
            values = content
        else:
            return
        self.has_logprobs = True
        self._logprobs += values

    def _prompt(self, ids: Any) -> None:
        if isinstance(ids, list) and self.prompt_token_ids is None:
            self.prompt_token_ids = ids


def _clean(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def strip(answer: dict[str, Any], wants: Wants) -> None:
    """Takes out of an answer or chunk, in place, what the client did not ask for."""
    choices = answer.get("choices")
    if not wants.token_ids:
        answer.pop("prompt_token_ids", None)
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        if not wants.token_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        if not wants.logprobs and choice.get("logprobs") is not None:
            choice["logprobs"] = None
