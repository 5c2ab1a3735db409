"""A backend with negligible cost, so that only the proxy in front of it is measured:
`python -m tests.bench.gateway_backend PORT TOKENS PAUSE_MS`."""

import asyncio
import json
import sys
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"


class Backend:
    """Serves OpenAI chat completions over a plain socket: `tokens` tokens, `pause_s` before each."""

    def __init__(self, tokens: int, pause_s: float) -> None:
        self._tokens, self._pause_s = tokens, pause_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length")
                    ),
                    0,
                )
                body = json.loads(await reader.readexactly(length) or b"{}")
                if head.startswith(b"GET"):
                    self._whole(writer, {"object": "list", "data": [{"id": "base", "object": "model"}]})
                elif body.get("stream"):
                    await self._stream(writer, body)
                else:
                    await asyncio.sleep(self._pause_s)
                    self._whole(writer, self._answer(body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _whole(self, writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        writer.write(_HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(data) + data)

    def _choice(self, body: dict[str, Any], begin: int, count: int, last: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"index": 0, "finish_reason": "stop" if last else None, "logprobs": None}
        if body.get("logprobs"):
            entry = {"token": " word", "logprob": -0.5, "bytes": None, "top_logprobs": []}
            found["logprobs"] = {"content": [entry] * count}
        if body.get("return_token_ids"):
            found["token_ids"] = list(range(begin, begin + count))
        return found

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": " word" * self._tokens}
        usage = {"prompt_tokens": 3, "completion_tokens": self._tokens, "total_tokens": 3 + self._tokens}
        choice = {"message": message} | self._choice(body, 0, self._tokens, True)
        exact = {"prompt_token_ids": [1, 2, 3]} if body.get("return_token_ids") else {}
        return {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]} | {
            "choices": [choice],
            "usage": usage,
            **exact,
        }

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        writer.write(_HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")

        def piece(data: bytes) -> None:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))

        for at in range(self._tokens):
            await asyncio.sleep(self._pause_s)
            choice = {"delta": {"content": " word"}} | self._choice(body, at, 1, at + 1 == self._tokens)
            exact = {"prompt_token_ids": [1, 2, 3]} if at == 0 and body.get("return_token_ids") else {}
            piece(b"data: " + json.dumps(head | {"choices": [choice], **exact}).encode() + b"\n\n")
            await writer.drain()
        piece(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


async def main(port: int, tokens: int, pause_ms: float) -> None:
    server = await asyncio.start_server(Backend(tokens, pause_ms / 1000).serve, "127.0.0.1", port, limit=2**20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
