"""A scripted chat backend with exact tokens: a ChatML template over characters, and a function that is the policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tests.support.episode_server import BEGIN, END, LINE, encoded

Speaker = Callable[[Sequence[dict[str, Any]]], str]
"""The messages of a call -> the text of the answer."""


@dataclass
class ChatScript:
    """The behaviour of the backend, and the bodies that it got. `failures`: statuses of the next answers."""

    speaker: Speaker
    models: tuple[str, ...] = ("base", "assistant@v1")
    failures: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)


def chat_backend(script: ChatScript) -> FastAPI:
    """The server. Each token has the log-prob -0.5; an answer ends with the end token."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        root = script.models[0]
        return {"data": [{"id": name, "parent": None if name == root else root} for name in script.models]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        if body["model"] not in script.models:
            return JSONResponse({"error": {"message": f"The model {body['model']!r} does not exist."}}, 404)
        script.bodies.append(body)
        if script.failures:
            return JSONResponse({"error": {"message": "the backend fails, as the script says"}}, script.failures.pop(0))
        text = script.speaker(body["messages"])
        tokens = [*encoded(text), END]
        entries = [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in tokens]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "logprobs": {"content": entries} if body.get("logprobs") else None,
        }
        exact = bool(body.get("return_token_ids"))
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        answer |= {"choices": [choice | ({"token_ids": tokens} if exact else {})]}
        return JSONResponse(answer | ({"prompt_token_ids": rendered(body["messages"])} if exact else {}))

    return app


def rendered(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The tokens of a conversation, up to the beginning of the next answer."""
    ids: list[int] = []
    for message in messages:
        ids += [BEGIN, *encoded(f"{message['role']}\n{message['content']}"), END, LINE]
    return [*ids, BEGIN, *encoded("assistant\n")]
