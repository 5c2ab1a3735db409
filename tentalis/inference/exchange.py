"""The bridge between the event loop of the HTTP server and the engine's thread."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tentalis.inference.engine import Engine
from tentalis.inference.jobs import Chunk, EngineError, GenerateJob, ScoreJob
from tentalis.inference.lora import Adapter
from tentalis.inference.sampling import SamplingParams
from tentalis.inference.scoring import ScoredTokens

_Result = TypeVar("_Result")


class Disconnected(Exception):
    """The client has gone; nobody reads the answer."""


class Exchange:
    """The engine jobs of one HTTP request, and their results in the event loop. Leaving it cancels what still runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[tuple[int, Chunk | ScoredTokens | EngineError]] = asyncio.Queue()
        self._jobs: list[GenerateJob | ScoreJob] = []
        self._open = 0

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            for job in self._jobs:
                self._engine.cancel(job)

    def generate(
        self, place: int, prompt: list[int], params: SamplingParams, n: int, adapter: Adapter | None, stream: bool
    ) -> None:
        """Start sampling; the results carry `place`."""
        self._submit(GenerateJob(prompt, params, n, adapter, stream, partial(self._sink, place)), n)

    def score(self, place: int, tokens: list[int], temperature: float, top: int, adapter: Adapter | None) -> None:
        """Start scoring; the result carries `place`."""
        self._submit(ScoreJob(tokens, temperature, top, adapter, partial(self._sink, place)), 1)

    async def results(self) -> AsyncIterator[tuple[int, Chunk | ScoredTokens]]:
        """All results of all jobs as they come. Raises EngineError."""
        while self._open:
            place, result = await self._results.get()
            if isinstance(result, EngineError):
                raise result
            if isinstance(result, ScoredTokens) or result.finish_reason is not None:
                self._open -= 1
            yield place, result

    def _submit(self, job: GenerateJob | ScoreJob, results: int) -> None:
        self._engine.submit(job)
        self._jobs.append(job)
        self._open += results

    def _sink(self, place: int, result: Chunk | ScoredTokens | EngineError) -> None:
        self._loop.call_soon_threadsafe(self._results.put_nowait, (place, result))


async def collect(exchange: Exchange, places: int) -> tuple[list[list[Chunk]], dict[int, ScoredTokens]]:
    """The finished samples of each place in order of their index, and the scores by place, of jobs that do not
    stream."""
    chunks: list[list[Chunk]] = [[] for _ in range(places)]
    scores: dict[int, ScoredTokens] = {}
    async for place, result in exchange.results():
        if isinstance(result, ScoredTokens):
            scores[place] = result
        else:
            chunks[place].append(result)
    for samples in chunks:
        samples.sort(key=lambda chunk: chunk.index)
    return chunks, scores


async def unless_disconnected(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of `work`. Raises Disconnected, and cancels `work`, when the client goes first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ExchangeStream(StreamingResponse):
    """Server-sent events of an exchange, which is left (and its jobs cancelled) however the response ends."""

    def __init__(self, exchange: Exchange, events: AsyncIterator[Any]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The response as an ASGI application."""
        with self._exchange:
            await super().__call__(scope, receive, send)
