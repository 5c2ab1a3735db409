"""`tentalis serve model`: a small inference server with vLLM's wire format, on transformers."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tentalis.inference import metrics
from tentalis.inference.adapter_cache import DEFAULT_MODELS, AdapterCache
from tentalis.inference.api import InferenceApi
from tentalis.inference.engine import EngineStats, InferenceEngine
from tentalis.inference.runtime import ModelRuntime
from tentalis.service.health import Health
from tentalis.service.metrics import Exporter
from tentalis.service.ports import listening_sockets
from tentalis.storage.file_cache import FileCache

log = logging.getLogger(__name__)

# Seconds that open connections may last after their requests have failed.
_GRACE_SECONDS = 3
_DEFAULT_CONTEXT = 2048


class ServerMetrics:
    """The server's metrics; the engine's counters are read at each scrape."""

    def __init__(self, stats: EngineStats, adapters: Callable[[], int]) -> None:
        self.exporter = exporter = Exporter("model")
        self.requests = exporter.counter(metrics.MODEL_REQUESTS)
        self.seconds = exporter.histogram(metrics.MODEL_REQUEST_SECONDS)
        exporter.read(metrics.MODEL_RUNNING, lambda: stats.running)
        exporter.read(metrics.MODEL_WAITING, lambda: stats.waiting)
        exporter.read(metrics.MODEL_ADAPTERS, adapters)
        exporter.read(metrics.MODEL_PROMPT_TOKENS, lambda: stats.prompt_tokens)
        exporter.read(metrics.MODEL_REUSED_TOKENS, lambda: stats.reused_tokens)
        exporter.read(metrics.MODEL_GENERATED_TOKENS, lambda: stats.generated_tokens)
        exporter.read(metrics.MODEL_SCORED_TOKENS, lambda: stats.scored_tokens)
        exporter.read(metrics.MODEL_STEPS, lambda: stats.steps)
        exporter.read(metrics.MODEL_ROWS, lambda: stats.step_rows)
        exporter.read(metrics.MODEL_DRAFTED_TOKENS, lambda: stats.drafted_tokens)
        exporter.read(metrics.MODEL_ACCEPTED_TOKENS, lambda: stats.accepted_tokens)
        exporter.read(metrics.MODEL_BUSY, lambda: stats.busy_seconds)


def build_app(
    engine: InferenceEngine, adapters: AdapterCache, served_name: str, root: str, max_model_len: int
) -> FastAPI:
    """The HTTP application of a started engine; it stops the engine when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(title="tentalis inference", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    server_metrics = ServerMetrics(engine.stats, lambda: len(adapters.all()))

    def stopped() -> str | None:
        return None if engine.alive else "the engine has stopped"

    health = Health(server_metrics.exporter, stopped, stopped)

    @app.middleware("http")
    async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        started = time.perf_counter()
        response = await call_next(request)
        route = request.scope.get("route")
        path = getattr(route, "path", "other")  # never the raw path: clients can invent any number of them
        server_metrics.requests.labels(path, str(response.status_code)).inc()
        server_metrics.seconds.labels(path).observe(time.perf_counter() - started)
        return response

    @app.get("/metrics")
    @app.get("/healthz")
    @app.get("/readyz")
    async def answer(request: Request) -> Response:
        answer = health.answer(request.url.path)
        return Response(answer.body, answer.status, {"Content-Type": answer.content_type})

    InferenceApi(engine, adapters, served_name, root, max_model_len).install(app)
    return app


class ModelServer(uvicorn.Server):
    """Accepts no more requests after a stop signal, and lets those in flight finish for `drain_s` seconds. Then, and at
    a second signal, they fail."""

    def __init__(self, config: uvicorn.Config, engine: InferenceEngine, drain_s: float = 0.0) -> None:
        super().__init__(config)
        self._engine, self._drain_s = engine, drain_s
        # A connection outlasts its failed request a little.
        config.timeout_graceful_shutdown = math.ceil(drain_s) + _GRACE_SECONDS

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGTERM and SIGINT. It replaces uvicorn's handler, which raises the signal again, so that an orderly
        shutdown would look like a crash to a supervisor.
        """
        if self._drain_s and not self.should_exit:
            end = threading.Timer(self._drain_s, self._engine.stop, kwargs={"timeout": 0})
            end.daemon = True
            end.start()
        else:
            self._engine.stop(timeout=0)
        self.force_exit = self.should_exit
        self.should_exit = True


def choose_device(device: str) -> torch.device:
    """The torch device; `auto` is a GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype; `auto` is bfloat16 on a GPU and float32 on a CPU. Raises ValueError for any other name."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    if chosen is None:
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {dtype!r}.")
    return chosen


def serve(
    model_path: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_name: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    max_model_len: int | None = None,
    max_batch: int = 64,
    max_adapters: int = 64,
    *,
    prefix_mb: int = 512,
    draft_tokens: int = 0,
    draft_streams: int = 4,
    max_models: int = DEFAULT_MODELS,
    files: FileCache,
    drain_s: float = 0.0,
) -> None:
    """Serve the model in the folder `model_path` until SIGTERM or SIGINT.

    `max_model_len` (tokens) is by default the model's, but at most 2048; `max_batch` bounds the samples decoded
    together; `prefix_mb`: memory (MiB) for the keys and values of ended sequences; `draft_tokens`: tokens guessed per
    step of a sample (0: none), while at most `draft_streams` samples decode; `max_models`: most whole models that are
    loaded besides the served one; `drain_s`: seconds that requests in flight may take after the signal.
    Raises PortTaken, UnsupportedModel, ValueError, and the errors of transformers for a folder that it cannot read.
    """
    sockets = listening_sockets(host, port, "model server")  # before the model is loaded, which takes a while
    if threads is not None:
        torch.set_num_threads(threads)
    torch_device = choose_device(device)
    runtime = ModelRuntime(model_path, torch_device, choose_dtype(dtype, torch_device))
    context = max_model_len or min(runtime.max_positions, _DEFAULT_CONTEXT)
    if context > runtime.max_positions:
        raise ValueError(f"max_model_len {context} is more than the model's {runtime.max_positions} positions.")
    engine = InferenceEngine(
        runtime,
        max_batch=max_batch,
        threads=threads,
        prefix_bytes=prefix_mb << 20,
        draft_tokens=draft_tokens,
        draft_rows=draft_streams,
    )
    adapters = AdapterCache(runtime, max_adapters, files, max_models)
    app = build_app(engine, adapters, served_name or model_path.name, str(model_path), context)
    config = uvicorn.Config(app, host=host, port=port, log_level="info", access_log=False)
    engine.start()
    try:
        log.info("listening on http://%s:%d", host, port)
        ModelServer(config, engine, drain_s).run(sockets)
    finally:
        engine.stop()
