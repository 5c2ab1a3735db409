"""A gateway over HTTP in this process: a scripted OpenAI-compatible backend before it, a log in memory behind it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from confluent_kafka import KafkaError
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import LogprobsMode, PolicyAck, Record, SessionEvent
from schemas.wire.codec import Codec
from tentalis.gateway.app import GatewayDependencies, RouteInstaller, build_app
from tentalis.gateway.backends.backend import BackendClients
from tentalis.gateway.backends.served import ServedView
from tentalis.gateway.http.keys import Keys
from tentalis.gateway.http.limits import stall_timeout_protocol
from tentalis.gateway.http.usage_store import FILE_NAME, UsageStore
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.recording.event_log import EventLog
from tentalis.gateway.recording.recorder import TurnRecorder
from tentalis.gateway.recording.spool import RecordSpool, SpooledRecord
from tentalis.gateway.settings import GatewaySettings
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import eventually

CODEC = Codec()
Became = Callable[[KafkaError | RecordPlace], None]
PROMPT_IDS = [11, 12, 13]
WORDS = ("Good", " day", ", friend", "!")


class MemoryLog(EventLog):
    """EventLog without a broker: `away` while none answers. What it took lies in `taken`, in order."""

    def __init__(self, codec: Codec = CODEC) -> None:
        self.fatal_error = None
        self.taken: list[SpooledRecord] = []
        self.away = False
        self._codec, self._source = codec, "tentalis/gateway/test"
        self._waiting: list[tuple[SpooledRecord, Became]] = []
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._prepare_schemas()

    def send(self, record: SpooledRecord, done: Became) -> None:
        with self._mutex:
            if self.away:
                self._waiting.append((record, done))
                return
            self.taken.append(record)
        done(RecordPlace(record.topic, 0, len(self.taken) - 1))

    def back(self, *, lost: bool = False) -> None:
        """The broker is there again: takes what waited, or the client had given up on it."""
        with self._mutex:
            waiting, self._waiting, self.away = self._waiting, [], False
            if not lost:
                self.taken += [record for record, _ in waiting]
        for at, (record, done) in enumerate(waiting):
            done(KafkaError(KafkaError._MSG_TIMED_OUT) if lost else RecordPlace(record.topic, 0, at))

    def ids_on_log(self, topic: str, since: int, event_ids: Any) -> set[str]:
        if self.away:
            raise TimeoutError("the broker is away")
        return {record.event_id for record in self.taken} & set(event_ids)

    def close(self, timeout: float = 0.0) -> None:
        self._stop.set()

    @property
    def events(self) -> list[SessionEvent]:
        """The session events, decoded as any reader would."""
        found = (decoded(record, self._codec) for record in list(self.taken))
        return [event for event in found if isinstance(event, SessionEvent)]


def decoded(record: SpooledRecord, codec: Codec = CODEC) -> Record:
    expected = topics.table().records_of(record.topic)
    return codec.decode(record.value, topic=record.topic, partition=0, offset=0, expected=expected)


@dataclass
class Script:
    """The behaviour of the backend, and the requests that it got: `bodies`, each with its headers in `heads`."""

    words: tuple[str, ...] = WORDS
    token_ids: bool = True
    finish_reason: str = "stop"
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    error: tuple[int, bytes, str] | None = None
    models: tuple[str, ...] = ("base",)
    adapters: set[str] = field(default_factory=set)
    refuses: str | None = None  # a field that it does not know
    tokenize: tuple[int, Any] | None = None  # status and body of its tokenizer; None: it has none
    vectors: tuple[int, Any] | None = None  # the same of /v1/embeddings and /v1/rerank
    break_after: int | None = None
    gate: threading.Event | None = None  # before the second word
    pause_s: float = 0.0  # before each word of a stream
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)


def backend_app(script: Script) -> FastAPI:
    """A server that answers every chat with the script's words, one token each."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        cards = [{"id": name, "parent": None} for name in script.models]
        return {"data": cards + [{"id": name, "parent": script.models[0]} for name in sorted(script.adapters)]}

    def refusal(body: dict[str, Any]) -> Response | None:
        if script.error is not None:
            status, content, kind = script.error
            return Response(content, status, {"content-type": kind, "retry-after": "7"})
        if script.refuses is not None and script.refuses in body:
            message = f"Unrecognized request argument supplied: {script.refuses}"
            return JSONResponse({"error": {"message": message}}, 400)
        if body["model"] not in (*script.models, *script.adapters):
            return JSONResponse({"error": {"message": f"The model {body['model']!r} does not exist."}}, 404)
        return None

    def choice(body: dict[str, Any], index: int, words: tuple[str, ...], begin: int, last: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "finish_reason": script.finish_reason if last else None}
        entries = [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in words]
        found["logprobs"] = {"content": entries} if body.get("logprobs") and script.token_ids else None
        if body.get("return_token_ids") and script.token_ids:
            found["token_ids"] = [100 + begin + at for at in range(len(words))]
        return found

    def head(body: dict[str, Any], kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": body["model"]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        script.bodies.append(body)
        script.heads.append(dict(request.headers))
        if (refused := refusal(body)) is not None:
            return refused
        exact = bool(body.get("return_token_ids")) and script.token_ids
        if body.get("stream"):
            return StreamingResponse(stream(body, exact), media_type="text/event-stream")
        if script.gate is not None:
            await until(script.gate, request)
        said: dict[str, Any] = {"role": "assistant", "content": "".join(script.words)}
        if script.tool_calls:
            said |= {"content": None, "tool_calls": script.tool_calls}
        choices = [
            {"message": said} | choice(body, index, script.words, 0, True) for index in range(body.get("n") or 1)
        ]
        usage = {"prompt_tokens": 3, "completion_tokens": len(script.words), "total_tokens": 3 + len(script.words)}
        answer = head(body, "chat.completion") | {"choices": choices, "usage": usage}
        return JSONResponse(answer | ({"prompt_token_ids": PROMPT_IDS} if exact else {}))

    async def until(gate: threading.Event, request: Request | None = None) -> None:
        try:
            while not gate.is_set():
                if request is not None and await request.is_disconnected():
                    script.cancelled.set()
                    return
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            script.cancelled.set()
            raise

    async def stream(body: dict[str, Any], exact: bool) -> AsyncIterator[str]:
        start = head(body, "chat.completion.chunk")
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield sse(start | {"choices": [first]} | ({"prompt_token_ids": PROMPT_IDS} if exact else {}))
        for at, word in enumerate(script.words):
            if at == 1 and script.gate is not None:
                await until(script.gate)
            if script.pause_s:
                await asyncio.sleep(script.pause_s)
            if at == script.break_after:
                raise RuntimeError("the backend breaks off, as the script says")
            delta: dict[str, Any] = {"content": word}
            last = at + 1 == len(script.words)
            if last and script.tool_calls:
                delta = {"tool_calls": [{"index": i, **call} for i, call in enumerate(script.tool_calls)]}
            yield sse(start | {"choices": [{"delta": delta} | choice(body, 0, (word,), at, last)]})
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 3, "completion_tokens": len(script.words), "total_tokens": 3 + len(script.words)}
            yield sse(start | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        if script.tokenize is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        script.bodies.append(await request.json())
        status, content = script.tokenize
        return JSONResponse(content, status)

    @app.post("/v1/embeddings")
    @app.post("/v1/rerank")
    async def vectors(request: Request) -> Response:
        if script.vectors is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        script.bodies.append(await request.json())
        script.heads.append(dict(request.headers))
        if script.gate is not None:
            await until(script.gate, request)
        status, content = script.vectors
        return JSONResponse(content, status)

    async def plain_stream(body: dict[str, Any]) -> AsyncIterator[str]:
        """Each prompt by itself; `gate`: before the second piece of the second."""
        for index in range(len(body["prompt"]) if isinstance(body["prompt"], list) else 1):
            for at, word in enumerate(script.words):
                if (index, at) == (1, 1) and script.gate is not None:
                    await until(script.gate)
                last = "length" if at + 1 == len(script.words) else None
                choice = {"index": index, "text": word, "finish_reason": last, "logprobs": None}
                yield sse(head(body, "text_completion") | {"choices": [choice]})
        yield "data: [DONE]\n\n"

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        script.bodies.append(body)
        if (refused := refusal(body)) is not None:
            return refused
        if body.get("stream"):
            return StreamingResponse(plain_stream(body), media_type="text/event-stream")
        found = {"index": 0, "text": "".join(script.words), "finish_reason": "length", "logprobs": None}
        if body.get("logprobs") is not None:
            found["logprobs"] = {"tokens": list(script.words), "token_logprobs": [-0.5] * len(script.words)}
        if body.get("return_token_ids"):
            found |= {"token_ids": [100 + at for at in range(len(script.words))], "prompt_token_ids": PROMPT_IDS}
        return JSONResponse(head(body, "text_completion") | {"choices": [found]})

    return app


def sse(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def listening(app: Any, **more: Any) -> Iterator[str]:
    """The application on a free port of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, timeout_graceful_shutdown=1, ws="none", **({"http": "h11"} | more)
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, 60, message="the server does not start")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@dataclass
class Lab:
    """A gateway at `url`, with what is before and behind it."""

    url: str
    script: Script
    log: MemoryLog
    deps: GatewayDependencies
    http: httpx.Client

    def chat(self, *texts: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        """A whole chat completion; texts alternate between user and assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
        body = {"model": "assistant", "messages": messages} | more
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    def stream(self, *texts: str, headers: dict[str, str] | None = None, **more: Any) -> list[dict[str, Any] | None]:
        """The chunks of a streamed one, None for [DONE]."""
        with self.streaming(*texts, headers=headers, **more) as response:
            return list(chunks(response))

    def streaming(self, *texts: str, headers: dict[str, str] | None = None, **more: Any) -> Any:
        messages = [{"role": "user", "content": text} for text in texts]
        body = {"model": "assistant", "messages": messages, "stream": True} | more
        return self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers)

    def serve(self, version: int, policy: str = "assistant") -> None:
        """The backend has the version, and its acknowledgement is read."""
        self.script.adapters.add(f"{policy}@v{version}")
        self.deps.served.apply(ack(policy, version))

    def metric(self, name: str, **labels: str) -> float:
        """Summed over the labels that are not given."""
        samples = [sample for family in self.deps.metrics.exporter.registry.collect() for sample in family.samples]
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def chunks(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield None if line == "data: [DONE]" else json.loads(line[6:])


def ack(policy: str, version: int, server_id: str = "local") -> PolicyAck:
    return PolicyAck(server_id=server_id, policy=policy, version=version, event_time=1, sha256="0" * 64, ok=True)


def settings_for(
    url: str, server_id: str = "local", logprobs_mode: LogprobsMode | None = None, **more: Any
) -> GatewaySettings:
    """One backend and one policy, which answers to every model's name."""
    mode = {} if logprobs_mode is None else {"logprobs_mode": logprobs_mode}
    simple = GatewaySettings.simple(url, server_id=server_id, policy="assistant", gateway_id="gw-1", **mode)
    return GatewaySettings.model_validate(simple.model_dump() | {"ack_s": 0.3} | more)


@contextmanager
def lab(
    folder: Path,
    script: Script | None = None,
    *,
    keys: Path | None = None,
    secret: str | None = None,
    episode_secret: bytes | None = None,
    extensions: tuple[RouteInstaller, ...] = (),
    backend_url: str | None = None,
    events: EventLog | None = None,
    server_id: str = "local",
    kafka: Settings | None = None,
    **more: Any,
) -> Iterator[Lab]:
    """`more` goes into the gateway's settings; `secret` is the backend's own key; `episode_secret`
    signs keys of episodes; `kafka` names the broker that
    extensions read."""
    script = script or Script()
    with listening(backend_app(script)) as own:
        url = backend_url or own
        settings = settings_for(url, server_id, **more)
        log, spool = MemoryLog(), RecordSpool(folder / "spool", settings.spool_bytes)
        behind = log if events is None else events
        backends = BackendClients(settings.backends, {"local": secret})
        gateway_metrics = GatewayMetrics(lambda: len(spool), routers=backends.routers)
        deps = GatewayDependencies(
            settings=settings,
            kafka=kafka or Settings(),
            codec=CODEC,
            keys=Keys(keys, None if episode_secret is None else lambda: episode_secret),
            event_log=behind,
            recorder=TurnRecorder(behind, spool, settings.ack_s, gateway_metrics.recorded),
            served=ServedView(),
            backends=backends,
            usage_store=UsageStore(spool.folder / FILE_NAME),
            metrics=gateway_metrics,
            local=keys is None,
        )
        deps.served.caught_up = True
        app = build_app(deps, extensions)
        protocol = stall_timeout_protocol(settings.header_s, settings.stall_s)
        with listening(app, http=protocol) as at, httpx.Client(base_url=at, timeout=60) as http:
            made = Lab(at, script, log, deps, http)
            eventually(lambda: http.get("/readyz").status_code == 200, 60, message="the gateway is not ready")
            script.bodies.clear()  # without what the gateway has measured
            try:
                yield made
            finally:
                if script.gate is not None:
                    script.gate.set()
        spool.close()


def wait_for(check: Callable[[], Any], message: str = "") -> Any:
    return eventually(check, 60, message=message)


__all__ = [
    "Lab",
    "MemoryLog",
    "Script",
    "ack",
    "chunks",
    "decoded",
    "lab",
    "listening",
    "settings_for",
    "time",
    "wait_for",
]
