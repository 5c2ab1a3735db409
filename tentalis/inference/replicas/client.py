"""An inference client over several replicas: asks the one that the router chooses, and another if that one fails.

A call that is repeated has given nothing to anybody yet: answers are returned whole. The answer names the version that
sampled it, so a repeated call is as true as a first one.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar

from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import (
    Float32,
    Generation,
    InferenceError,
    Int32,
    Message,
    NotTokenExact,
    RequestRefused,
    ServerUnavailable,
    UnknownModel,
)
from tentalis.inference.replicas.probe import ReplicaProbes, log_change
from tentalis.inference.replicas.router import (
    FAILURES_PER_CALL,
    CallOutcome,
    RepeatReason,
    ReplicaLease,
    ReplicaRouter,
    is_version,
)

log = logging.getLogger(__name__)

_KEY_TOKENS = 256
_prefix_key: ContextVar[str] = ContextVar("prefix_key", default="")
T = TypeVar("T")


@contextmanager
def prefix_key(key: str) -> Iterator[None]:
    """Calls in this context belong together: their prompts share a prefix, so one replica is preferred for all."""
    token = _prefix_key.set(key)
    try:
        yield
    finally:
        _prefix_key.reset(token)


def key_of_prompt(prompt: Sequence[Message] | Sequence[int]) -> str:
    """The key of a call outside `prefix_key`: the messages up to the first of a user, or the first 256 token ids."""
    if prompt and isinstance(prompt[0], dict):
        roles = [message.get("role") if isinstance(message, dict) else None for message in prompt]
        return json.dumps(list(prompt[: roles.index("user") + 1 if "user" in roles else 1]), sort_keys=True)
    return " ".join(str(token) for token in prompt[:_KEY_TOKENS])


def outcome_of(error: BaseException, model: str) -> CallOutcome:
    """The outcome of a call at a replica that ended with `error`."""
    match error:
        case UnknownModel():
            return CallOutcome.MISSING if is_version(model) else CallOutcome.OK
        case NotTokenExact():
            return CallOutcome.OK
        case RequestRefused():
            return CallOutcome.FAILED if error.status >= 500 else CallOutcome.OK
        case ServerUnavailable():
            return CallOutcome.FAILED
        case _:
            return CallOutcome.GIVEN_UP


class ReplicatedClient:
    """An `Inference` over several replicas of one server. Close it, or use it as `async with`.

    `clients`: one client per replica, which it closes. `hedge_after_s`: a sampling call that has no answer after so
    many seconds is also sent to a second replica, and the first answer counts; None: never. Errors are those of
    `Inference`; UnknownModel also if no replica lists the version.
    """

    def __init__(
        self,
        clients: Sequence[OpenAIClient],
        hedge_after_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = {client.base_url: client for client in clients}
        self._hedge_after_s = hedge_after_s
        self.router = ReplicaRouter([client.base_url for client in clients], clock, log_change)
        self.base_url = ",".join(self._clients)
        self._probes = ReplicaProbes(self.router, lambda url: self._clients[url].probe())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the probes and closes the connections."""
        await self._probes.close()
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    async def generate(
        self,
        model: str,
        prompt: Sequence[Message] | Sequence[int],
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """See Inference.generate."""

        def ask(client: OpenAIClient) -> Awaitable[Generation]:
            return client.generate(model, prompt, n, temperature, top_p, top_k, max_tokens, seed, stop)

        return await self._call(model, ask, key_of_prompt(prompt), hedge=True)

    async def score(self, model: str, token_ids: Sequence[int], temperature: float = 1.0) -> Float32:
        """See Inference.score."""
        return await self._call(
            model, lambda client: client.score(model, token_ids, temperature), key_of_prompt(token_ids)
        )

    async def score_top(
        self, model: str, token_ids: Sequence[int], temperature: float = 1.0, k: int = 1
    ) -> tuple[Float32, Int32, Float32]:
        """See Inference.score_top."""
        return await self._call(
            model, lambda client: client.score_top(model, token_ids, temperature, k), key_of_prompt(token_ids)
        )

    async def render(
        self,
        model: str,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> Int32:
        """See Inference.render."""
        return await self._call(model, lambda client: client.render(model, messages, add_generation_prompt, template))

    async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Int32:
        """Token ids of plain text, int32 [n]."""
        return await self._call(model, lambda client: client.tokenize(model, text, add_special_tokens))

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out."""
        return await self._call(model, lambda client: client.detokenize(model, token_ids))

    @property
    def replicas(self) -> Mapping[str, OpenAIClient]:
        """The client of each replica, by its URL."""
        return self._clients

    async def models(self) -> list[dict[str, Any]]:
        """The model cards of one replica."""
        return await self._call("", lambda client: client.models())

    async def _call(
        self, model: str, ask: Callable[[OpenAIClient], Awaitable[T]], key: str = "", *, hedge: bool = False
    ) -> T:
        """Returns the answer of the chosen replica, or of the next one if that one fails or has lost the version."""
        await self._probes.before_call(model)
        key = _prefix_key.get() or key
        without: list[str] = []
        failures, error = 0, None
        while failures < FAILURES_PER_CALL:
            lease = self.router.pick(key, model, without=without, any_state=True)
            if lease is None:
                break
            if error is not None:
                reason = RepeatReason.MISSING if isinstance(error, UnknownModel) else RepeatReason.FAILED
                self.router.repeats[reason] += 1
                log.warning("%s; asking the replica %s", error, lease.url)
            try:
                if hedge and self._hedge_after_s is not None:
                    return await self._hedged(lease, key, ask, without)
                return await self._ask(lease, ask, without)
            except InferenceError as problem:
                if outcome_of(problem, model) is CallOutcome.OK:
                    raise
                error = problem
                failures += not isinstance(problem, UnknownModel)
        raise error or UnknownModel(404, f"No replica of {self.base_url} lists {model}.")

    async def _ask(self, lease: ReplicaLease, ask: Callable[[OpenAIClient], Awaitable[T]], without: list[str]) -> T:
        """Asks the replica of a lease and ends the lease; a replica that could not answer is added to `without`."""
        outcome = CallOutcome.GIVEN_UP
        try:
            answer = await ask(self._clients[lease.url])
            outcome = CallOutcome.OK
            return answer
        except BaseException as error:
            outcome = outcome_of(error, lease.model or "")
            if outcome in (CallOutcome.FAILED, CallOutcome.MISSING):
                without.append(lease.url)
            raise
        finally:
            self.router.finish(lease, outcome)

    async def _hedged(
        self, lease: ReplicaLease, key: str, ask: Callable[[OpenAIClient], Awaitable[T]], without: list[str]
    ) -> T:
        """Asks a replica, and a second one if the first takes long. Returns the first answer and cancels the other
        call. Raises the last error if both fail, and an error of the request at once."""
        leases, calls = [lease], {asyncio.ensure_future(self._ask(lease, ask, without))}
        try:
            done, running = await asyncio.wait(calls, timeout=self._hedge_after_s)
            if not done and (second := self.router.pick(key, lease.model, without=[*without, lease.url])) is not None:
                self.router.repeats[RepeatReason.HEDGE] += 1
                log.info("no answer of %s after %g s; asking %s as well", lease.url, self._hedge_after_s, second.url)
                leases.append(second)
                calls.add(asyncio.ensure_future(self._ask(second, ask, without)))
            running = set(calls)
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    error = call.exception()
                    if error is None or outcome_of(error, lease.model or "") is CallOutcome.OK:
                        return call.result()
                if not running:
                    return done.pop().result()
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            for each in leases:
                self.router.finish(each, CallOutcome.GIVEN_UP)  # of a call that was cancelled before it began


def routers_of(client: object) -> list[ReplicaRouter]:
    """The router of a client of several replicas; none for another client."""
    return [client.router] if isinstance(client, ReplicatedClient) else []


def inference_client(
    urls: str, make: Callable[[str], OpenAIClient] = OpenAIClient, hedge_after_s: float | None = None
) -> OpenAIClient | ReplicatedClient:
    """The client of a model server: of one replica, or of several (`urls`: separated by commas). `make`: makes the
    client of one URL. A single replica has no breaker: there is nothing else to ask. Raises ValueError for a URL that
    is given twice."""
    clients = [make(url.strip()) for url in urls.split(",")]
    return clients[0] if len(clients) == 1 else ReplicatedClient(clients, hedge_after_s)
