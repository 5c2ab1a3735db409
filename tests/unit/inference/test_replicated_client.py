"""A client of several replicas: repeats only what failed, asks each only for what it has, and hedges if told to."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import RequestRefused, ServerUnavailable, UnknownModel
from tentalis.inference.replicas.breaker import BreakerState
from tentalis.inference.replicas.client import ReplicatedClient, inference_client, key_of_prompt, prefix_key
from tentalis.inference.replicas.router import CallOutcome, RepeatReason

T = TypeVar("T")
HELLO = [{"role": "user", "content": "Hello."}]
V1 = "assistant@v1"


class Replica:
    """A model server. `fault`: an exception or a status of its answers; `gate`: they wait for it."""

    def __init__(self, versions: set[str] | None = None) -> None:
        self.versions = {V1} if versions is None else versions
        self.fault: Exception | int | None = None
        self.silent = False
        self.gate: asyncio.Event | None = None
        self.asked: list[str] = []
        self.given_up = 0
        self.called = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.silent:
            raise httpx.ConnectError("refused")
        if request.url.path == "/health":
            return httpx.Response(200)
        if request.url.path == "/v1/models":
            cards = [{"id": "base", "owned_by": "tentalis", "logprobs_mode": "processed_logprobs"}]
            return httpx.Response(200, json={"data": cards + [{"id": each} for each in sorted(self.versions)]})
        body = json.loads(request.content)
        self.asked.append(body["model"])
        self.called.set()
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is not None:
            return httpx.Response(self.fault, json={"error": {"message": f"fault {self.fault}"}})
        if body["model"] not in {"base", *self.versions}:
            return httpx.Response(404, json={"error": {"message": "no such model"}})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1, 2, 3]})
        choice = {"index": 0, "message": {"content": "Hi."}, "finish_reason": "stop", "token_ids": [5, 2]}
        choice["logprobs"] = {"content": [{"logprob": -0.5}] * 2}
        return httpx.Response(200, json={"model": body["model"], "choices": [choice], "prompt_token_ids": [1]})


def client_of(*replicas: Replica, hedge_after_s: float | None = None) -> ReplicatedClient:
    clients = []
    for at, replica in enumerate(replicas):
        clients.append(OpenAIClient(f"http://replica-{at}"))
        clients[-1]._http = httpx.AsyncClient(
            base_url=clients[-1].base_url, transport=httpx.MockTransport(replica), timeout=5.0
        )
    return ReplicatedClient(clients, hedge_after_s)


def running(made: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(asyncio.wait_for(made(), 30))


async def preferred_first(client: ReplicatedClient, *replicas: Replica, key: str = "k") -> list[Replica]:
    """The replicas in the order in which `key` prefers them."""
    with prefix_key(key):
        await client.generate(V1, HELLO)
    first = next(each for each in replicas if each.asked)
    first.asked.clear()
    return [first, *(each for each in replicas if each is not first)]


@pytest.mark.parametrize("fault", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), 503, 500, 502])
def test_a_failed_call_is_repeated_at_another_replica_and_the_answer_names_its_version(fault: Exception | int) -> None:
    async def made() -> None:
        one, other = Replica(), Replica()
        async with client_of(one, other) as client:
            first, second = await preferred_first(client, one, other)
            first.fault = fault
            with prefix_key("k"):
                generation = await client.generate(V1, HELLO)
            assert (generation.model, first.asked, second.asked) == (V1, [V1], [V1])
            assert client.router.repeats == {RepeatReason.FAILED: 1}

    running(made)


def test_what_the_request_caused_is_neither_repeated_nor_counted_against_the_replica() -> None:
    async def made() -> None:
        one, other = Replica(), Replica()
        one.fault = other.fault = 400
        async with client_of(one, other) as client:
            for _ in range(5):
                with pytest.raises(RequestRefused, match="fault 400"):
                    await client.generate(V1, HELLO)
            assert sorted([len(one.asked), len(other.asked)]) == [0, 5]
            assert {health.state for health in client.router.health().values()} == {BreakerState.CLOSED}

    running(made)


def test_a_request_that_kills_servers_kills_two_of_three() -> None:
    async def made() -> None:
        replicas = Replica(), Replica(), Replica()
        async with client_of(*replicas) as client:
            await client.generate(V1, HELLO)
            for each in replicas:
                each.asked.clear()
                each.fault = httpx.RemoteProtocolError("died")
            with pytest.raises(ServerUnavailable):
                await client.generate(V1, HELLO)
            assert sorted(len(each.asked) for each in replicas) == [0, 1, 1]

    running(made)


def test_a_dead_replica_is_asked_three_times_and_then_left_alone_until_a_probe_is_answered() -> None:
    async def made() -> None:
        one, other = Replica(), Replica()
        async with client_of(one, other) as client:
            first, second = await preferred_first(client, one, other)
            first.fault = httpx.ConnectError("refused")
            with prefix_key("k"):
                for _ in range(10):
                    await client.generate(V1, HELLO)
                assert (len(first.asked), len(second.asked)) == (3, 10)
                first.fault = None
                client.router.probed(f"http://replica-{int(first is other)}", [V1])
                await client.generate(V1, HELLO)
            assert len(first.asked) == 4, "its prefix is its own again"

    running(made)


def test_a_replica_without_the_version_is_not_asked_and_one_that_lost_it_is_asked_once() -> None:
    async def made() -> None:
        one, other = Replica(), Replica({"assistant@v2"})
        async with client_of(one, other) as client:
            for at in range(10):
                with prefix_key(f"{at}"):
                    assert (await client.generate(V1, HELLO)).model == V1
            assert (len(one.asked), len(other.asked)) == (10, 0)
            other.versions, one.versions = {V1}, set()
            with pytest.raises(UnknownModel):
                await client.generate(V1, HELLO)
            assert (await client.generate(V1, HELLO)).model == V1, "the next call has probed again"
            assert len(one.asked) == 11
            with pytest.raises(UnknownModel, match=r"No replica of http://replica-0,http.* lists assistant@v9"):
                await client.generate("assistant@v9", HELLO)
            assert "assistant@v9" not in one.asked + other.asked
            assert (await client.render("base", HELLO)).tolist() == [1, 2, 3], "any replica has the base model"

    running(made)


def test_with_every_breaker_open_one_replica_is_still_asked() -> None:
    async def made() -> None:
        one, other = Replica(), Replica()
        async with client_of(one, other) as client:
            await client.generate(V1, HELLO)
            one.fault = other.fault = httpx.ConnectError("refused")
            for _ in range(5):
                with pytest.raises(ServerUnavailable):
                    await client.generate(V1, HELLO)
            assert {health.state for health in client.router.health().values()} == {BreakerState.OPEN}
            one.fault = other.fault = None
            assert (await client.generate(V1, HELLO)).model == V1

    running(made)


def test_a_hedge_asks_a_second_replica_and_gives_the_slow_call_up() -> None:
    async def made() -> None:
        one, other = Replica(), Replica()
        async with client_of(one, other, hedge_after_s=0.05) as client:
            first, second = await preferred_first(client, one, other)
            first.gate = asyncio.Event()
            with prefix_key("k"):
                assert (await client.generate(V1, HELLO)).model == V1
            assert (len(first.asked), len(second.asked), first.given_up) == (1, 1, 1)
            assert client.router.repeats == {RepeatReason.HEDGE: 1}
            outcomes: Counter[CallOutcome] = Counter()
            for (_, outcome), count in client.router.outcomes.items():
                outcomes[outcome] += count
            assert outcomes == {CallOutcome.OK: 2, CallOutcome.GIVEN_UP: 1}
            assert all(health.in_flight == 0 for health in client.router.health().values())
            assert all(health.state is BreakerState.CLOSED for health in client.router.health().values())

    running(made)


def test_a_hedged_call_fails_only_if_both_fail_and_leaves_nothing_in_flight_if_it_is_cancelled() -> None:
    async def made() -> None:
        one, other = Replica(), Replica()
        async with client_of(one, other, hedge_after_s=0.05) as client:
            first, second = await preferred_first(client, one, other)
            first.gate, second.fault = asyncio.Event(), 503
            with prefix_key("k"):
                call = asyncio.create_task(client.generate(V1, HELLO))
                await second.called.wait()
                first.gate.set()
                assert (await call).model == V1, "the slow one answers after all"
                first.gate, second.fault, second.gate = asyncio.Event(), None, asyncio.Event()
                second.called.clear()
                call = asyncio.create_task(client.generate(V1, HELLO))
                await second.called.wait()
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            assert all(health.in_flight == 0 for health in client.router.health().values())

    running(made)


def test_without_hedging_a_slow_replica_is_waited_for() -> None:
    async def made() -> None:
        one, other = Replica(), Replica()
        async with client_of(one, other) as client:
            first, second = await preferred_first(client, one, other)
            first.gate = asyncio.Event()
            with prefix_key("k"):
                call = asyncio.create_task(client.generate(V1, HELLO))
                await asyncio.sleep(0.2)
                first.gate.set()
                await call
            assert not second.asked

    running(made)


def test_keys_of_prompts_and_one_url_is_a_plain_client() -> None:
    system = {"role": "system", "content": "Be brief."}
    later = [system, *HELLO, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And?"}]
    assert key_of_prompt([system, *HELLO]) == key_of_prompt(later) != key_of_prompt(HELLO)
    assert key_of_prompt(range(256)) == key_of_prompt(range(300)) != key_of_prompt([1])
    assert isinstance(inference_client("http://a:1"), OpenAIClient)
    two = inference_client("http://a:1/v1, http://b:1/")
    assert isinstance(two, ReplicatedClient) and two.router.urls == ("http://a:1", "http://b:1")
    with pytest.raises(ValueError, match="give the URL of each replica once: http://a:1, http://a:1"):
        inference_client("http://a:1,http://a:1/v1")
