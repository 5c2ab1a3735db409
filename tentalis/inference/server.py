"""`tentalis serve model`: a small inference server with vLLM's wire format, on transformers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tentalis import metrics
from tentalis.health import Health
from tentalis.inference.api import Api
from tentalis.inference.engine import Engine, EngineStats
from tentalis.inference.runtime import Runtime
from tentalis.inference.shelf import Adapters
from tentalis.metrics import Exporter

log = logging.getLogger(__name__)

# How long open connections may last after a stop signal, in seconds; their requests have been failed by then.
_GRACE_SECONDS = 3
_DEFAULT_CONTEXT = 2048


class ServerMetrics:
    """What the server exports; the engine's counters are read when the page is asked for."""

    def __init__(self, stats: EngineStats, adapters: Callable[[], int]) -> None:
        self.exporter = exporter = Exporter("model")
        self.requests = exporter.counter(metrics.MODEL_REQUESTS)
        self.seconds = exporter.histogram(metrics.MODEL_REQUEST_SECONDS)
        exporter.read(metrics.MODEL_RUNNING, lambda: stats.running)
        exporter.read(metrics.MODEL_WAITING, lambda: stats.waiting)
        exporter.read(metrics.MODEL_ADAPTERS, adapters)
        exporter.read(metrics.MODEL_PROMPT_TOKENS, lambda: stats.prompt_tokens)
        exporter.read(metrics.MODEL_GENERATED_TOKENS, lambda: stats.generated_tokens)
        exporter.read(metrics.MODEL_SCORED_TOKENS, lambda: stats.scored_tokens)
        exporter.read(metrics.MODEL_STEPS, lambda: stats.steps)
        exporter.read(metrics.MODEL_ROWS, lambda: stats.step_rows)
        exporter.read(metrics.MODEL_BUSY, lambda: stats.busy_seconds)


def build_app(engine: Engine, adapters: Adapters, served_name: str, root: str, max_model_len: int) -> FastAPI:
    """The HTTP application over a started engine; it stops the engine when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(title="tentalis inference", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    measured = ServerMetrics(engine.stats, lambda: len(adapters.all()))

    def stopped() -> str | None:
        return None if engine.alive else "the engine has stopped"

    health = Health(measured.exporter, stopped, stopped)

    @app.middleware("http")
    async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        started = time.perf_counter()
        response = await call_next(request)
        route = request.scope.get("route")
        path = getattr(route, "path", "other")  # never the raw path: anyone can invent those
        measured.requests.labels(path, str(response.status_code)).inc()
        measured.seconds.labels(path).observe(time.perf_counter() - started)
        return response

    @app.get("/metrics")
    @app.get("/healthz")
    @app.get("/readyz")
    async def answer(request: Request) -> Response:
        answer = health.answer(request.url.path)
        return Response(answer.body, answer.status, {"Content-Type": answer.content_type})

    Api(engine, adapters, served_name, root, max_model_len).install(app)
    return app


class _Server(uvicorn.Server):
    """Fails the requests in flight as soon as the signal comes: uvicorn alone would wait for them to finish."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT. Not uvicorn's own handler, which raises the signal again: an orderly end would look like a
        crash to whoever supervises the process.
        """
        self._engine.stop(timeout=0)
        self.force_exit = self.should_exit
        self.should_exit = True


def choose_device(device: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU. Raises ValueError for a name that is no such dtype."""
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
) -> None:
    """Serve the model in the folder `model_path` until a signal comes.

    `max_model_len` (tokens) is by default the model's, but at most 2048; `max_batch` bounds the samples decoded
    together.
    Raises UnsupportedModel and what transformers raises for a folder it cannot read.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    where = choose_device(device)
    runtime = Runtime(model_path, where, choose_dtype(dtype, where))
    context = max_model_len or min(runtime.max_positions, _DEFAULT_CONTEXT)
    if context > runtime.max_positions:
        raise ValueError(f"max_model_len {context} is more than the model's {runtime.max_positions} positions.")
    engine = Engine(runtime, max_batch=max_batch, threads=threads)
    adapters = Adapters(runtime, max_adapters)
    app = build_app(engine, adapters, served_name or model_path.name, str(model_path), context)
    config = uvicorn.Config(
        app, host=host, port=port, log_level="info", access_log=False, timeout_graceful_shutdown=_GRACE_SECONDS
    )
    engine.start()
    try:
        _Server(config, engine).run()
    finally:
        engine.stop()
