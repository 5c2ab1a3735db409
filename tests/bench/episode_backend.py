"""A scripted model server for episodes of tools: `python -m tests.bench.episode_backend PORT`.

It answers at once, so that what is measured is the rest. `/v1/completions` and `/tokenize` have a ChatML template over
characters, with the tool calls in the text; `/v1/chat/completions` has them as OpenAI's API does.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.support.episode_server import BEGIN, END, LINE, decoded, encoded

CALLS = 3
"""Tool calls of an episode; the turn after them is the answer."""
TURNS = CALLS + 1
ANSWER = "42"
PLAIN = "print(6 * 7)"
DETACHED = (
    "import subprocess, time\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\ntime.sleep(0.3)\nprint(6 * 7)"
)
"""Code that leaves a process in a session of its own, and takes long enough to be killed in its midst."""


def code_for(text: str) -> str:
    """The code that the model calls the tool with in a conversation."""
    return DETACHED if "detached" in text else PLAIN


def prompt_of(messages: Sequence[dict[str, Any]], generation: bool) -> list[int]:
    """The tokens of a conversation."""
    ids: list[int] = []
    for message in messages:
        ids += [BEGIN, *encoded(f"{message['role']}\n{message['content']}"), END, LINE]
    return [*ids, BEGIN, *encoded("assistant\n")] if generation else ids


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of /v1/completions."""
    text = decoded(body["prompt"])
    call = json.dumps({"name": "python", "arguments": {"code": code_for(text)}})
    called = text.count("<|im_start|>assistant") - 1
    said = f"<tool_call>\n{call}\n</tool_call>" if called < CALLS else f"\\boxed{{{ANSWER}}}"
    tokens = [*encoded(said), END]
    choice = {"index": 0, "text": said, "token_ids": tokens, "finish_reason": "stop"}
    return {"model": body["model"], "choices": [choice | {"logprobs": {"token_logprobs": [-0.5] * len(tokens)}}]}


def chat(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of /v1/chat/completions."""
    messages = body["messages"]
    called = sum(message["role"] == "tool" for message in messages)
    message: dict[str, Any] = {"role": "assistant", "content": f"\\boxed{{{ANSWER}}}"}
    if called < CALLS:
        arguments = json.dumps({"code": code_for(json.dumps(messages))})
        call = {"id": f"call-{called}", "type": "function", "function": {"name": "python", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
    reason = "tool_calls" if called < CALLS else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    made = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
    return made | {"choices": [choice], "usage": usage}


def answered(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer."""
    if path == "/v1/models":
        return 200, {"object": "list", "data": [{"id": "base", "object": "model", "logprobs_mode": "raw_logprobs"}]}
    if path == "/tokenize":
        tokens = (
            encoded(body["prompt"])
            if "prompt" in body
            else prompt_of(body["messages"], body.get("add_generation_prompt", True))
        )
        return 200, {"tokens": tokens, "count": len(tokens)}
    if path == "/v1/completions" and not body.get("echo"):
        return 200, completion(body)
    if path == "/v1/chat/completions":
        return 200, chat(body)
    return (200, {}) if path == "/health" else (400, {"error": {"message": "this server does not score"}})


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one connection."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            lines = head.lower().split("\r\n")
            length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
            body = json.loads(await reader.readexactly(length) or b"{}")
            status, said = answered(head.split()[1], body)
            data = json.dumps(said).encode()
            kind = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(kind.encode() + data)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), limit=1 << 24)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
