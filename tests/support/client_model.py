"""A scripted chat backend for agents of any library: calls the tools it is offered in a fixed order, then answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.support.gateway_lab import PROMPT_IDS, sse

ANSWER = "It rains in Oslo."
TOKENS = 4
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo rain"


def reply(body: dict[str, Any]) -> tuple[str, str] | None:
    """The tool to call and its arguments as JSON; None for the answer in words."""
    names = [tool["function"]["name"] for tool in body.get("tools") or ()]
    begun = any(message["role"] == "assistant" for message in body["messages"])
    if isinstance(forced := body.get("tool_choice"), dict):
        return forced["function"]["name"], '{"city": "Oslo"}'
    if "bash" in names:
        return "bash", json.dumps({"command": SUBMIT if begun else "echo rain"})
    if "weather" in names and not begun:
        return "weather", '{"city": "Oslo"}'
    return ("final_answer", json.dumps({"answer": ANSWER})) if "final_answer" in names else None


def client_model() -> FastAPI:
    """The backend. Every answer has TOKENS tokens, whose ids count from 100."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "base", "object": "model", "created": 1, "owned_by": "us"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        called = reply(body)
        call = called and {
            "id": f"call_{len(body['messages'])}",
            "type": "function",
            "function": {"name": called[0], "arguments": called[1]},
        }
        message: dict[str, Any] = {"role": "assistant", "content": None if call else ANSWER}
        message |= {"tool_calls": [call]} if call else {}
        reason = "tool_calls" if call else "stop"
        if body.get("stream"):
            return StreamingResponse(_streamed(body, message, reason), media_type="text/event-stream")
        choice = {"index": 0, "message": message, "finish_reason": reason} | _exact(body)
        return JSONResponse(_head(body, "chat.completion") | {"choices": [choice], "usage": _usage()} | _prompt(body))

    return app


async def _streamed(body: dict[str, Any], message: dict[str, Any], reason: str) -> AsyncIterator[str]:
    calls = [{"index": at} | call for at, call in enumerate(message.get("tool_calls", ()))]
    delta = message | ({"tool_calls": calls} if calls else {})
    head = _head(body, "chat.completion.chunk")
    yield sse(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None} | _exact(body)]} | _prompt(body))
    yield sse(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield sse(head | {"choices": [], "usage": _usage()})
    yield "data: [DONE]\n\n"


def _head(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-7", "object": kind, "created": 1, "model": body["model"]}


def _usage() -> dict[str, int]:
    return {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": TOKENS, "total_tokens": len(PROMPT_IDS) + TOKENS}


def _prompt(body: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT_IDS} if body.get("return_token_ids") else {}


def _exact(body: dict[str, Any]) -> dict[str, Any]:
    entry = {"token": "word", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    ids = {"token_ids": [100 + at for at in range(TOKENS)]} if body.get("return_token_ids") else {}
    return {"logprobs": {"content": [entry] * TOKENS} if body.get("logprobs") else None, **ids}
