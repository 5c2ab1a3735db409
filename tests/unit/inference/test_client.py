"""Answers of a server without a log-prob for each token give a teacher no OPD half, and no crash."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from schemas import topics
from schemas.records import HintKind, sample_of
from streams.apps.hinting.processor import Hinting
from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import NotTokenExact, RequestRefused, ServerUnavailable, UnknownModel
from tentalis.opd import FixedModel, Teacher, TeacherRefused
from tests.support.stream_records import CODEC, make_feedback, make_result, on_log, read

GOOD: Any = [None, *({str(token): {"logprob": -1.0, "rank": 1}} for token in (2, 3, 10, 11, 12, 13))]


def answering(entries: Any, tokens: Any = (1, 2, 3)) -> OpenAIClient:
    """A client of a server whose prompts have these tokens, and whose log-probs are these."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": tokens})
        return httpx.Response(200, json={"choices": [{"index": 0, "prompt_logprobs": entries}]})

    client = OpenAIClient("http://teacher")
    client._http = httpx.AsyncClient(base_url=client.base_url, transport=httpx.MockTransport(answer))
    return client


def teacher(client: OpenAIClient, top: int = 0) -> Teacher:
    async def model() -> str:
        return "base"

    return Teacher(client, FixedModel(model), top)


def test_one_log_prob_for_each_token_is_an_answer() -> None:
    result = make_result()
    taught = asyncio.run(teacher(answering(GOOD)).logprobs(sample_of(result), result.task, ["Be brief, please."]))
    assert len(taught.logprobs) == 4 * 7


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize(
    "entries",
    [
        None,
        [],
        "text",
        GOOD[:-1],
        [*GOOD, GOOD[-1]],
        [None, *[None] * 6],
        [None, *[{}] * 6],
        [None, *[{"5": {"logprob": -1.0, "rank": 1}}] * 6],
        [None, *[["x"]] * 6],
        [*GOOD[:-1], {"13": {"rank": 1}}],
        [*GOOD[:-1], {"13": {"logprob": "low", "rank": 1}}],
        [*GOOD[:-1], {"13": -1.0}],
        [*GOOD[:-1], {"13": {"logprob": None, "rank": 1}}],
    ],
)
def test_anything_else_is_no_teacher_and_nothing_to_wait_for(entries: Any, top: int) -> None:
    result = make_result()
    with pytest.raises(TeacherRefused) as refused:
        asyncio.run(teacher(answering(entries), top).logprobs(sample_of(result), result.task, ["Be brief, please."]))
    assert refused.value.reason == "no_scores"
    feedback = make_feedback(result, "Too long: please answer in one sentence.")
    app = Hinting(CODEC, teacher(answering(entries), top))
    effects = asyncio.run(app.process(3, [on_log(topics.FEEDBACK, feedback)]))
    assert read(effects.outputs[0]).kind is HintKind.REJECTED and not effects.dead


@pytest.mark.parametrize("tokens", [None, "text", [1, "x"], [2**40], {}])
def test_token_ids_that_are_none_are_told(tokens: Any) -> None:
    with pytest.raises(NotTokenExact, match="no token ids"):
        asyncio.run(answering(GOOD, tokens).render("base", [{"role": "user", "content": "?"}]))


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", json.dumps({"choices": [{}]}).encode()])
def test_an_answer_that_is_no_json_object_is_a_refusal_and_not_an_exception_of_a_parser(body: bytes) -> None:
    client = OpenAIClient("http://teacher")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    client._http = httpx.AsyncClient(base_url=client.base_url, transport=transport)
    with pytest.raises(Exception, match="502"):
        asyncio.run(client.score("base", [1, 2]))


@pytest.mark.parametrize(
    ("status", "error", "by_content"),
    [
        *((status, ServerUnavailable, None) for status in (408, 429, 502, 503, 504)),
        *((status, RequestRefused, True) for status in (400, 413, 422)),
        *((status, RequestRefused, False) for status in (401, 403, 424, 500, 501)),
        (404, UnknownModel, False),
    ],
)
def test_the_status_says_if_the_request_or_the_server_is_the_reason(
    status: int, error: type[Exception], by_content: bool | None
) -> None:
    client = OpenAIClient("http://model")
    client._http = httpx.AsyncClient(
        base_url=client.base_url, transport=httpx.MockTransport(lambda request: httpx.Response(status, text="a reason"))
    )
    with pytest.raises(error, match=f"answered {status}: a reason") as raised:
        asyncio.run(client.models())
    assert type(raised.value) is error and getattr(raised.value, "by_content", None) is by_content
