"""The shapes in which clients ask and are answered. Inside, a call is an OpenAI chat (or plain) completion."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from tentalis.gateway.failure import Refused, openai_error

dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


class StreamShape(Protocol):
    """One answer as server-sent events."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """What the client is sent for a chunk of the backend's; may be nothing."""
        ...

    def end(self) -> bytes:
        """The last of a complete answer."""
        ...

    def error(self, status: int, kind: str, message: str) -> bytes:
        """What an answer ends with that cannot be completed."""
        ...


class Shape(Protocol):
    """One way to ask. `path`: where the backend is asked; `chat`: for messages, not for a plain prompt;
    `native_errors`: a backend's error bodies are passed on as they came."""

    path: str
    chat: bool
    native_errors: bool

    def body(self, given: dict[str, Any]) -> dict[str, Any]:
        """The body as the backend's API has it. Raises Refused (400)."""
        ...

    def messages(self, body: Mapping[str, Any]) -> Any:
        """What is said, as chat messages; still to be checked."""
        ...

    def answer(self, answer: dict[str, Any], event_id: str) -> dict[str, Any]:
        """A whole answer as the client knows it. `event_id`: of the turn on the log."""
        ...

    def stream(self, event_id: str) -> StreamShape:
        """For one answer, whose turn has that id on the log."""
        ...

    def error(self, status: int, kind: str, message: str) -> dict[str, object]:
        """The body of an error."""
        ...


class OpenAIStream:
    """Chunks as they are, then [DONE]."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """See StreamShape."""
        return b"data: " + dumps(chunk).encode() + b"\n\n"

    def end(self) -> bytes:
        """See StreamShape."""
        return b"data: [DONE]\n\n"

    def error(self, status: int, kind: str, message: str) -> bytes:
        """See StreamShape."""
        return b"data: " + dumps(openai_error(status, kind, message)).encode() + b"\n\n"


class ChatShape:
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    chat = True
    native_errors = True

    def body(self, given: dict[str, Any]) -> dict[str, Any]:
        """See Shape."""
        return given

    def messages(self, body: Mapping[str, Any]) -> Any:
        """See Shape."""
        return body.get("messages")

    def answer(self, answer: dict[str, Any], event_id: str) -> dict[str, Any]:
        """See Shape."""
        return answer

    def stream(self, event_id: str) -> StreamShape:
        """See Shape."""
        return OpenAIStream()

    def error(self, status: int, kind: str, message: str) -> dict[str, object]:
        """See Shape."""
        return openai_error(status, kind, message)


class CompletionShape(ChatShape):
    """POST /v1/completions: recorded as one message of a user; several prompts as one, which cannot be trained on."""

    path = "/v1/completions"
    chat = False

    def messages(self, body: Mapping[str, Any]) -> Any:
        """See Shape. Token ids are not turned into text."""
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt:
            if len(prompt) == 1 and isinstance(prompt[0], str):
                return [{"role": "user", "content": prompt[0]}]
            return [{"role": "user", "content": f"[{len(prompt)} prompts or token ids]"}]
        raise Refused(400, "prompt must be a text, or a list of texts or token ids")
