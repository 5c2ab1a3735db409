"""A model server for whole processes, over HTTP: the scripted backend of gateway_lab, and beside it what the teacher,
the guard and the policies ask for, and a judge that finds a lesson in every conversation. Every prompt without a hint
has the tokens PROMPT_IDS."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request

from tentalis.opd import HINT_TAG
from tentalis.opd.lesson import END, START
from tests.support.gateway_lab import PROMPT_IDS, Script, backend_app, listening

LESSON = "Do: answer in one short sentence."
JUDGE = "/judge"
"""Below the server's URL."""


class WholeServer:
    """Its address, its script, and the conversations that its judge was shown."""

    def __init__(self) -> None:
        self.url = ""
        self.script = Script()
        self.shown: list[str] = []

    def hinters(self) -> str:
        """The settings of hinting and experience that ask it, as YAML."""
        return f"lesson: {{endpoint: {{url: '{self.url}{JUDGE}', model: judge}}}}\n"

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ok"}

        @app.post("/v1/load_lora_adapter")
        async def load(request: Request) -> dict[str, str]:
            self.script.adapters.add((await request.json())["lora_name"])
            return {"status": "loaded"}

        @app.post("/v1/unload_lora_adapter")
        async def unload(request: Request) -> dict[str, str]:
            self.script.adapters.discard((await request.json())["lora_name"])
            return {"status": "unloaded"}

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, list[int]]:
            body = await request.json()
            said = body.get("prompt") or "".join(message["content"] for message in body["messages"])
            plain = "messages" in body and HINT_TAG not in said
            return {"tokens": PROMPT_IDS if plain else [ord(char) for char in said]}

        @app.post("/v1/completions")
        async def score(request: Request) -> dict[str, Any]:
            body = await request.json()
            entries = [None, *({str(token): {"logprob": _logprob(token), "rank": 1}} for token in body["prompt"][1:])]
            choice = {"index": 0, "prompt_logprobs": entries, "text": "", "finish_reason": "length"}
            asked = {"prompt_logprobs_temperature": body["prompt_logprobs_temperature"]}
            return {"model": body["model"], "choices": [choice | asked]}

        @app.post(f"{JUDGE}/v1/chat/completions")
        async def judge(request: Request) -> dict[str, Any]:
            self.shown.append((await request.json())["messages"][-1]["content"])
            message = {"role": "assistant", "content": f"{START}\n{LESSON}\n{END} \\boxed{{1}}"}
            return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

        app.mount("/", backend_app(self.script))
        return app


def _logprob(token: int) -> float:
    """As the canary of tests/support/loop_records.py has it: 2 and 3 have -1 and -2."""
    return 1.0 - token if token < 4 else -0.5


@contextmanager
def whole_server() -> Iterator[WholeServer]:
    """On a free port, until the block ends."""
    server = WholeServer()
    with listening(server.app()) as server.url:
        yield server
