"""The API formats of requests and answers. Internally, a call is an OpenAI chat (or plain) completion."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from tentalis.gateway.http.errors import APIError, openai_error

dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


class StreamFormat(Protocol):
    """One answer as server-sent events."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """The bytes for the client of one backend chunk; may be empty."""
        ...

    def end(self) -> bytes:
        """The last bytes of a complete answer."""
        ...

    def error(self, status: int, kind: str, message: str) -> bytes:
        """The last bytes of an answer that cannot be completed."""
        ...


class ClientProtocol(Protocol):
    """An API format. `path`: the backend's path; `chat`: takes messages, not a plain prompt; `native_errors`: a
    backend's error bodies are passed on unchanged."""

    path: str
    chat: bool
    native_errors: bool

    def body(self, request_body: dict[str, Any]) -> dict[str, Any]:
        """Converts a request body to the backend's API. Raises APIError (400)."""
        ...

    def messages(self, body: Mapping[str, Any]) -> Any:
        """The request as chat messages, unchecked."""
        ...

    def answer(self, answer: dict[str, Any], event_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a whole answer to the client's format. `event_id`: the turn's id on the log; `body`: what `body`
        returned."""
        ...

    def stream(self, event_id: str, body: Mapping[str, Any]) -> StreamFormat:
        """The stream format of one answer. `event_id` and `body` as in `answer`."""
        ...

    def error(self, status: int, kind: str, message: str) -> dict[str, object]:
        """The body of an error."""
        ...


class OpenAIStream:
    """Passes chunks on unchanged, then sends [DONE]."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """See StreamFormat."""
        return b"data: " + dumps(chunk).encode() + b"\n\n"

    def end(self) -> bytes:
        """See StreamFormat."""
        return b"data: [DONE]\n\n"

    def error(self, status: int, kind: str, message: str) -> bytes:
        """See StreamFormat."""
        return b"data: " + dumps(openai_error(status, kind, message)).encode() + b"\n\n"


class ChatProtocol:
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    chat = True
    native_errors = True

    def body(self, request_body: dict[str, Any]) -> dict[str, Any]:
        """See ClientProtocol."""
        return request_body

    def messages(self, body: Mapping[str, Any]) -> Any:
        """See ClientProtocol."""
        return body.get("messages")

    def answer(self, answer: dict[str, Any], event_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """See ClientProtocol."""
        return answer

    def stream(self, event_id: str, body: Mapping[str, Any]) -> StreamFormat:
        """See ClientProtocol."""
        return OpenAIStream()

    def error(self, status: int, kind: str, message: str) -> dict[str, object]:
        """See ClientProtocol."""
        return openai_error(status, kind, message)


class CompletionProtocol(ChatProtocol):
    """POST /v1/completions: recorded as one user message, also with several prompts (these cannot be trained on)."""

    path = "/v1/completions"
    chat = False

    def messages(self, body: Mapping[str, Any]) -> Any:
        """See ClientProtocol. Token ids are not decoded to text."""
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt:
            if len(prompt) == 1 and isinstance(prompt[0], str):
                return [{"role": "user", "content": prompt[0]}]
            return [{"role": "user", "content": f"[{len(prompt)} prompts or token ids]"}]
        raise APIError(400, "prompt must be a string, or a list of strings or token ids")
