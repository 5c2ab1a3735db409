"""Collects a backend's answer as it passes: text, tool calls, token ids and log-probs of the first choice. Pure.

The gateway itself asks for token ids and log-probs; `strip_unrequested` removes them if the client did not ask for
them.
"""

from dataclasses import dataclass, field
from typing import Any

from schemas.bounds import logprobs_in_bounds
from schemas.records import ToolCall
from schemas.tensors import float32_bytes, int32_bytes

_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class RequestedFields:
    """The optional fields that the client itself asked for."""

    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False


@dataclass(slots=True)
class _PartialToolCall:
    identifier: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class AnswerCapture:
    """One answer, whole or in chunks, of chat or plain completions. `n`: number of requested choices.

    Raises nothing for answers of an unexpected shape: missing parts stay empty, and `finished` stays False.
    """

    def __init__(self, n: int = 1) -> None:
        self._n = n
        self._text: list[str] = []
        self._calls: dict[int, _PartialToolCall] = {}
        self._response: list[int] = []
        self._logprobs: list[float] = []
        self._started_choices: set[int] = set()
        self._ended_choices: set[int] = set()
        self.model = ""
        self.finish_reason = ""
        self.prompt_token_ids: list[int] | None = None
        self.has_token_ids = False
        self.has_logprobs = False
        self.usage: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """True if every requested choice has a finish reason."""
        return len(self._ended_choices) >= self._n

    @property
    def received_choices_finished(self) -> bool:
        """True if there is a choice and every received choice has a finish reason: some backends give fewer than
        requested."""
        return bool(self._ended_choices) and self._started_choices == self._ended_choices

    @property
    def text(self) -> str:
        """The text, with lone surrogates replaced."""
        return _clean("".join(self._text))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that have a name."""
        return tuple(
            ToolCall(name=_clean(call.name), arguments=_clean("".join(call.arguments)) or "{}")
            for _, call in sorted(self._calls.items())
            if call.name
        )

    @property
    def call_ids(self) -> tuple[str, ...]:
        """The backend's ids of `tool_calls`, "" for one without."""
        return tuple(_clean(call.identifier) for _, call in sorted(self._calls.items()) if call.name)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer: as the backend reports them, else counted, else a quarter of the characters."""
        total = (self.usage or {}).get("total_tokens")
        if isinstance(total, int) and not isinstance(total, bool):
            return max(0, total)
        counted = len(self.prompt_token_ids or ()) + len(self._response)
        return counted or sum(map(len, self._text)) // _CHARS_PER_TOKEN

    def encoded_tokens(self) -> tuple[bytes, bytes, bytes] | None:
        """Prompt ids, response ids and log-probs in the log's encoding. None if one is missing or invalid, if there is
        not one log-prob per response id, or if a log-prob is out of bounds."""
        ids, logprobs = self._response, self._logprobs
        if self.prompt_token_ids is None or not ids or len(ids) != len(logprobs):
            return None
        try:
            encoded = int32_bytes(self.prompt_token_ids), int32_bytes(ids), float32_bytes(logprobs)
        except (ValueError, TypeError, OverflowError):
            return None
        return encoded if logprobs_in_bounds(encoded[2]) else None

    def add(self, answer: dict[str, Any]) -> None:
        """Adds a whole answer or one chunk of a stream."""
        if isinstance(model := answer.get("model"), str) and model:
            self.model = _clean(model)
        if isinstance(usage := answer.get("usage"), dict):
            self.usage = usage
        self._set_prompt(answer.get("prompt_token_ids"))
        choices = answer.get("choices")
        for position, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                self._add_choice(position, choice)

    def _add_choice(self, position: int, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        index = index if isinstance(index, int) else position
        self._started_choices.add(index)
        if choice.get("finish_reason") is not None:
            self._ended_choices.add(index)
        if index != 0:
            return
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = _clean(reason)
        self._set_prompt(choice.get("prompt_token_ids"))
        message = choice.get("delta") or choice.get("message") or choice
        if isinstance(message, dict):
            for name in ("content", "text"):
                if isinstance(text := message.get(name), str):
                    self._text.append(text)
            calls = message.get("tool_calls")
            for position, call in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(call, dict):
                    self._add_tool_call(position, call)
        if isinstance(ids := choice.get("token_ids"), list):
            self.has_token_ids = True
            self._response += ids
        if isinstance(logprobs := choice.get("logprobs"), dict):
            self._add_logprobs(logprobs)

    def _add_tool_call(self, position: int, call: dict[str, Any]) -> None:
        index = call.get("index", position)
        tool_call = self._calls.setdefault(index if isinstance(index, int) else position, _PartialToolCall())
        if isinstance(identifier := call.get("id"), str):
            tool_call.identifier = tool_call.identifier or identifier
        function = call.get("function")
        if isinstance(function, dict):
            if isinstance(name := function.get("name"), str):
                tool_call.name += name
            if isinstance(arguments := function.get("arguments"), str):
                tool_call.arguments.append(arguments)

    def _add_logprobs(self, logprobs: dict[str, Any]) -> None:
        if isinstance(content := logprobs.get("content"), list):
            values: list[Any] = [entry.get("logprob") for entry in content if isinstance(entry, dict)]
        elif isinstance(content := logprobs.get("token_logprobs"), list):
            values = content
        else:
            return
        self.has_logprobs = True
        self._logprobs += values

    def _set_prompt(self, ids: Any) -> None:
        if isinstance(ids, list) and self.prompt_token_ids is None:
            self.prompt_token_ids = ids


def _clean(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def strip_unrequested(answer: dict[str, Any], requested: RequestedFields) -> None:
    """Removes from an answer or chunk, in place, the fields that the client did not ask for."""
    choices = answer.get("choices")
    if not requested.token_ids:
        answer.pop("prompt_token_ids", None)
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        if not requested.token_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        if not requested.logprobs and choice.get("logprobs") is not None:
            choice["logprobs"] = None
