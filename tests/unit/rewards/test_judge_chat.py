"""The chat client of the judges against an endpoint that hangs, fails and lies."""

import asyncio
import gzip
import logging
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from tentalis.rewards.chat import ANSWER_BYTES, ChatClient, ChatEndpoint, NoApiKey, VoteEnding
from tentalis.rewards.verdict import ScorerAway
from tests.support.judge_server import HANG, JudgeServer, Reply, judge_server, says

ASKED = [{"role": "user", "content": "Is it?"}]
KEY = "sk-very-secret"


def endpoint(server: JudgeServer, **fields: Any) -> ChatEndpoint:
    return ChatEndpoint(**({"url": server.url, "model": "judge", "time_limit_s": 20.0} | fields))


async def votes_of(replies: list[Reply], n: int, limit: float = 20.0) -> tuple[list[str | None], ChatClient]:
    async with judge_server(replies) as server, ChatClient(endpoint(server, time_limit_s=limit)) as chat:
        return await chat.ask(ASKED, n), chat


def test_every_vote_is_a_request_of_its_own_and_all_are_under_way_at_once() -> None:
    async def run() -> None:
        async with judge_server([says("yes")]) as server:
            server.together = 5
            # What the endpoint is called with or without /v1 is one address.
            async with ChatClient(
                endpoint(server, url=f"{server.url}/v1/", extra={"top_p": 0.9, "max_tokens": None})
            ) as chat:
                assert await chat.ask(ASKED, 5, temperature=0.7, max_tokens=99) == ["yes"] * 5
            assert server.asked == [{"model": "judge", "messages": ASKED, "temperature": 0.7, "top_p": 0.9}] * 5
            assert all(head.startswith("POST /v1/chat/completions ") for head in server.headers)
            assert all("authorization" not in head.lower() for head in server.headers)
            assert chat.endings[VoteEnding.ANSWERED] == 5

    asyncio.run(run())


def test_a_vote_that_hangs_is_none_and_the_others_are_asked_and_answered() -> None:
    async def run() -> None:
        answered = 0

        def script(number: int, _: dict[str, Any]) -> Reply:
            nonlocal answered
            answered += number != 0
            return HANG if number == 0 else says("fine")

        async with judge_server(script) as server, ChatClient(endpoint(server, time_limit_s=1.5)) as chat:
            votes = await chat.ask(ASKED, 3)
        assert sorted(votes, key=str) == [None, "fine", "fine"]
        assert answered == 2
        assert chat.endings[VoteEnding.TIMEOUT] == 1

    asyncio.run(run())


def test_who_has_enough_votes_waits_for_no_other_and_the_open_ones_are_cancelled() -> None:
    async def run() -> None:
        heard: list[list[str | None]] = []

        def enough(votes: Sequence[str | None]) -> bool:
            heard.append(list(votes))
            return len(votes) == 2

        def script(number: int, _: dict[str, Any]) -> Reply:
            return HANG if number % 2 else says("fine")

        # The server is not left before its connections are closed.
        async with judge_server(script) as server, ChatClient(endpoint(server, time_limit_s=60.0)) as chat:
            server.together = 4
            assert await chat.ask(ASKED, 4, enough=enough) == ["fine"] * 2
            assert {ending: count for ending, count in chat.endings.items() if count} == {VoteEnding.ANSWERED: 2}
        assert heard[-1] == ["fine"] * 2

    asyncio.run(run())


def test_votes_without_an_answer_are_never_enough() -> None:
    async def run() -> None:
        async with judge_server([Reply(500, b"")]) as server, ChatClient(endpoint(server)) as chat:
            assert await chat.ask(ASKED, 3, enough=lambda votes: True) == [None] * 3

    asyncio.run(run())


def test_votes_that_all_time_out_are_none_and_the_endpoint_counts_as_available() -> None:
    votes, chat = asyncio.run(votes_of([HANG], 3, limit=1.5))
    assert votes == [None] * 3
    assert chat.endings[VoteEnding.TIMEOUT] == 3


@pytest.mark.parametrize(
    "reply",
    [
        Reply(500, b"oops"),
        Reply(400, b"{}"),
        Reply(200, b"not json"),
        Reply(200, b"[" * 100_000),
        Reply(200, b"{}"),
        Reply(200, b'{"choices": []}'),
        Reply(200, b'{"choices": [{}]}'),
        Reply(200, b'{"choices": ["x"]}'),
        Reply(200, b'{"choices": [{"message": {"content": null}}]}'),
        Reply(200, b'{"choices": [{"message": {"content": 1}}]}'),
        Reply(200, b"x" * (ANSWER_BYTES + 1)),
        Reply(200, says("fine").body, drop=True),
        says("so the score is \\boxed{1", finish_reason="length"),
    ],
)
def test_a_vote_that_fails_or_lies_is_none(reply: Reply) -> None:
    votes, _ = asyncio.run(votes_of([reply, says("fine")], 2))
    assert sorted(votes, key=str) == [None, "fine"]


@pytest.mark.parametrize("status", [301, 401, 403, 404, 429, 502, 503, 504])
def test_an_endpoint_without_an_answered_vote_that_is_overloaded_or_refuses_is_unavailable(status: int) -> None:
    async def run() -> None:
        replies = [Reply(500, b"oops"), Reply(status, b"later")]
        async with judge_server(replies) as server, ChatClient(endpoint(server)) as chat:
            with pytest.raises(ScorerAway, match=str(status)):
                await chat.ask(ASKED, 3)
            assert chat.endings[VoteEnding.AWAY] == 2

    asyncio.run(run())


def test_one_answer_is_enough_to_go_on_with() -> None:
    votes, _ = asyncio.run(votes_of([Reply(503, b""), says("fine"), Reply(429, b"")], 3))
    assert sorted(votes, key=str) == [None, None, "fine"]


def test_a_refused_connection_counts_as_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def run() -> None:
            async with ChatClient(ChatEndpoint(url=url, model="judge")) as chat:
                with pytest.raises(ScorerAway, match="Connect"):
                    await chat.ask(ASKED, 2)

        asyncio.run(run())


def test_what_a_model_thinks_aloud_is_no_part_of_its_answer() -> None:
    votes, _ = asyncio.run(votes_of([says("<think>perhaps \\boxed{1}</think>\n no: \\boxed{-1} ")], 1))
    assert votes == ["no: \\boxed{-1}"]


def test_the_key_comes_from_the_environment_and_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def run() -> None:
        echo = Reply(400, f"bad key {KEY}".encode())
        async with judge_server([echo, Reply(200, KEY.encode()), Reply(503, KEY.encode())]) as server:
            async with ChatClient(endpoint(server, api_key_env="JUDGE_KEY"), {"JUDGE_KEY": KEY}) as chat:
                with pytest.raises(ScorerAway) as raised:
                    await chat.ask(ASKED, 3)
                assert KEY not in str(raised.value) + repr(chat) + repr(chat.endpoint)
            assert all(f"authorization: bearer {KEY}" in head.lower() for head in server.headers)

    asyncio.run(run())
    assert "status 400" in caplog.text
    assert KEY not in caplog.text


@pytest.mark.parametrize("key", [None, "", "sk-\nsecret", "sk secret", "sk-geheim-ä"])
def test_a_key_that_is_missing_or_cannot_be_one_is_refused_without_quoting_it(key: str | None) -> None:
    env = {} if key is None else {"JUDGE_KEY": key}
    with pytest.raises(NoApiKey, match="JUDGE_KEY") as raised:
        ChatClient(ChatEndpoint(url="http://judge", model="m", api_key_env="JUDGE_KEY"), env)
    assert not key or key not in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "http://user:word@judge"},
        {"url": "judge:8000"},
        {"url": "http://"},
        {"model": ""},
        {"time_limit_s": 0.0},
        {"time_limit_s": float("inf")},
        {"extra": {"stream": True}},
        {"key": "x"},
    ],
)
def test_what_is_no_endpoint_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatEndpoint(**({"url": "http://judge", "model": "m"} | fields))


def test_a_small_body_that_unpacks_to_a_large_one_is_not_read_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    packed = Reply(200, gzip.compress(b" " * (64 << 20)), headers="Content-Encoding: gzip\r\n")
    votes, _ = asyncio.run(votes_of([packed], 1))
    assert votes == [None]
    assert "more than" in caplog.text
