"""The bridge between the event loop of the HTTP server and the engine's thread."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tentalis.inference.engine import InferenceEngine
from tentalis.inference.jobs import EngineError, GeneratedChunk, GenerateJob, ScoreJob
from tentalis.inference.sampling import SamplingParams
from tentalis.inference.scoring import ScoredTokens
from tentalis.inference.whole_model import ServedVersion

_Result = TypeVar("_Result")


class Disconnected(Exception):
    """The client has disconnected before the response."""


class EngineBridge:
    """The engine jobs of one HTTP request, and their results in the event loop. Exiting it cancels unfinished jobs."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[tuple[int, GeneratedChunk | ScoredTokens | EngineError]] = asyncio.Queue()
        self._jobs: list[GenerateJob | ScoreJob] = []
        self._unfinished = 0

    def __enter__(self) -> "EngineBridge":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unfinished:
            for job in self._jobs:
                self._engine.cancel(job)

    def generate(
        self,
        prompt_index: int,
        prompt: list[int],
        params: SamplingParams,
        n: int,
        adapter: ServedVersion | None,
        stream: bool,
    ) -> None:
        """Start sampling; the results carry `prompt_index`."""
        self._submit(GenerateJob(prompt, params, n, adapter, stream, partial(self._sink, prompt_index)), n)

    def score(
        self, prompt_index: int, tokens: list[int], temperature: float, top: int, adapter: ServedVersion | None
    ) -> None:
        """Start scoring; the result carries `prompt_index`."""
        self._submit(ScoreJob(tokens, temperature, top, adapter, partial(self._sink, prompt_index)), 1)

    async def results(self) -> AsyncIterator[tuple[int, GeneratedChunk | ScoredTokens]]:
        """Yields the results of all jobs as they arrive. Raises EngineError."""
        while self._unfinished:
            prompt_index, result = await self._results.get()
            if isinstance(result, EngineError):
                raise result
            if isinstance(result, ScoredTokens) or result.finish_reason is not None:
                self._unfinished -= 1
            yield prompt_index, result

    def _submit(self, job: GenerateJob | ScoreJob, results: int) -> None:
        self._engine.submit(job)
        self._jobs.append(job)
        self._unfinished += results

    def _sink(self, prompt_index: int, result: GeneratedChunk | ScoredTokens | EngineError) -> None:
        self._loop.call_soon_threadsafe(self._results.put_nowait, (prompt_index, result))


async def collect(bridge: EngineBridge, prompts: int) -> tuple[list[list[GeneratedChunk]], dict[int, ScoredTokens]]:
    """The results of jobs that do not stream: the finished samples of each place, ordered by index, and the scores by
    place."""
    chunks: list[list[GeneratedChunk]] = [[] for _ in range(prompts)]
    scores: dict[int, ScoredTokens] = {}
    async for prompt_index, result in bridge.results():
        if isinstance(result, ScoredTokens):
            scores[prompt_index] = result
        else:
            chunks[prompt_index].append(result)
    for samples in chunks:
        samples.sort(key=lambda chunk: chunk.index)
    return chunks, scores


async def unless_disconnected(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of `work`. Cancels `work` and raises Disconnected if the client disconnects first."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for future in (task, disconnected):
            future.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EngineStream(StreamingResponse):
    """Server-sent events of an engine bridge. The bridge is exited, and its jobs cancelled, however the response
    ends."""

    def __init__(self, bridge: EngineBridge, events: AsyncIterator[Any]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._bridge = bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The response as an ASGI application."""
        with self._bridge:
            await super().__call__(scope, receive, send)
