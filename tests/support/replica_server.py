"""A small model server: `python -m tests.support.replica_server PORT`; `replica_process` starts and kills it.

Its answers say which version sampled them: token i of `policy@vN` is 1000 N + i, and the text repeats `vN`.
The log-prob of token i of a prompt is -i.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS, TOKEN_S = 8, 0.005
BASE_VERSION = 0
PROMPT_IDS = [1, 2, 3]


def version_of_tokens(token_ids: list[int]) -> set[int]:
    """The versions that have sampled these tokens."""
    return {token // 1000 for token in token_ids}


def replica_app() -> Starlette:
    """The application. Adapters are names alone."""
    adapters: set[str] = set()

    def version_of(model: str) -> int:
        return BASE_VERSION if model == "base" else int(model.rpartition("@v")[2])

    async def models(request: Request) -> Response:
        common = {"owned_by": "tentalis", "logprobs_mode": "processed_logprobs"}
        cards = [{"id": "base", "parent": None}, *({"id": name, "parent": "base"} for name in sorted(adapters))]
        return JSONResponse({"data": [card | common for card in cards]})

    async def health(request: Request) -> Response:
        return Response()

    async def load(request: Request) -> Response:
        adapters.add((await request.json())["lora_name"])
        return Response()

    async def unload(request: Request) -> Response:
        adapters.discard((await request.json())["lora_name"])
        return Response()

    async def chat(request: Request) -> Response:
        body = await request.json()
        model = body["model"]
        if model != "base" and model not in adapters:
            return JSONResponse({"error": {"message": f"no {model}"}}, 404)
        ids = [1000 * version_of(model) + at for at in range(TOKENS)]
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": model}
        if body.get("stream"):
            return StreamingResponse(pieces(head, ids), media_type="text/event-stream")
        await asyncio.sleep(TOKENS * TOKEN_S)
        choices = [
            {"index": index, "message": {"role": "assistant", "content": text(ids)}, "finish_reason": "stop"}
            | {"token_ids": ids, "logprobs": {"content": [{"token": "t", "logprob": -0.5}] * len(ids)}}
            for index in range(body.get("n") or 1)
        ]
        return JSONResponse(head | {"choices": choices, "prompt_token_ids": PROMPT_IDS})

    async def score(request: Request) -> Response:
        body = await request.json()
        if body["model"] != "base" and body["model"] not in adapters:
            return JSONResponse({"error": {"message": f"no {body['model']}"}}, 404)
        scores = [{str(token): {"logprob": -float(at), "rank": 1}} for at, token in enumerate(body["prompt"])]
        choice = {"index": 0, "text": "", "prompt_logprobs": [None, *scores[1:]], "finish_reason": "length"}
        return JSONResponse({"model": body["model"], "choices": [choice]})

    def text(ids: list[int]) -> str:
        return "".join(f"v{token // 1000} " for token in ids)

    async def pieces(head: dict[str, Any], ids: list[int]) -> AsyncIterator[str]:
        for at, token in enumerate(ids):
            await asyncio.sleep(TOKEN_S)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text([token])}, "token_ids": [token]}
            choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5}]}
            choice["finish_reason"] = "stop" if at + 1 == len(ids) else None
            yield f"data: {json.dumps(head | {'choices': [choice], 'prompt_token_ids': PROMPT_IDS})}\n\n"
        yield "data: [DONE]\n\n"

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/load_lora_adapter", load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", score, methods=["POST"]),
        ]
    )


if __name__ == "__main__":
    uvicorn.run(replica_app(), port=int(sys.argv[1]), log_level="critical", timeout_graceful_shutdown=10)
