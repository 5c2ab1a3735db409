"""Writes the choices of a chat answer, whole or as chunks of a stream, with the model's tool calls in OpenAI's form."""

from typing import Any

from tentalis.inference.jobs import GeneratedChunk
from tentalis.inference.tool_calls import AnswerPart, ToolCallStream, answer_parts
from tentalis.inference.wire import ChatBody, TokenTexts, chat_logprobs, choice_end


class ChatAnswer:
    """The choices of the answer to one request. `texts`: the texts of single tokens."""

    def __init__(self, body: ChatBody, texts: TokenTexts) -> None:
        self._body, self._texts = body, texts
        self._untagged = body.untagged_tools
        self._streams: dict[int, ToolCallStream] = {}
        self._calls: dict[int, int] = {}  # choice index -> tool calls so far

    def choice(self, chunk: GeneratedChunk, text: str) -> dict[str, Any]:
        """Returns a whole choice. `text`: its text."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._body.may_call:
            content, calls = answer_parts(text, self._untagged)
            message["content"] = content if content or not calls else None
            message |= {"tool_calls": calls} if calls else {}
            self._calls[chunk.index] = len(calls)
        return {"index": chunk.index, "message": message} | self._end(chunk)

    def chunk(self, chunk: GeneratedChunk) -> dict[str, Any]:
        """Returns the choice of a stream's next chunk."""
        delta: dict[str, Any] = {"content": chunk.text or ""}
        if self._body.may_call:
            stream = self._streams.setdefault(chunk.index, ToolCallStream(self._untagged))
            parts = stream.push(chunk.text or "")
            parts += stream.finish() if chunk.finish_reason is not None else []
            delta = self._delta(chunk.index, parts)
        return {"index": chunk.index, "delta": delta} | self._end(chunk)

    def _delta(self, index: int, parts: list[AnswerPart]) -> dict[str, Any]:
        before = self._calls.get(index, 0)
        calls = [part.call for part in parts if part.call is not None]
        self._calls[index] = before + len(calls)
        delta: dict[str, Any] = {"content": "".join(part.text for part in parts)}
        numbered = [{"index": before + at, **call} for at, call in enumerate(calls)]
        return delta | ({"tool_calls": numbered} if numbered else {})

    def _end(self, chunk: GeneratedChunk) -> dict[str, Any]:
        body = self._body
        logprobs = chat_logprobs(chunk, self._texts, body.return_tokens_as_token_ids) if body.logprobs else None
        end = {"logprobs": logprobs} | choice_end(chunk, body)
        # A call of a tool that the request named ends with "stop", as in OpenAI's API.
        if end["finish_reason"] == "stop" and self._calls.get(chunk.index) and not isinstance(body.tool_choice, dict):
            end["finish_reason"] = "tool_calls"
        return end
