"""The teacher's prompt of a turn with tools, against a real chat template: the student's own, with the hint in it."""

import asyncio
from typing import Any

import numpy as np
import pytest

from schemas.records import LogprobsMode, Result, SessionEvent, sample_of
from schemas.tensors import float32_bytes, float32_view, int32_bytes
from streams.fold.session_turns import result_of
from tentalis.inference.chat_messages import normalised, unspoken
from tentalis.inference.client import OpenAIClient
from tentalis.opd import HINT_TAG, FixedModel, Teacher, TeacherRefused
from tentalis.text.timestamps import rfc3339_ms
from tests.support.inference_lab import CHAT_TEMPLATE, Lab, make_model, make_tokenizer, running_server

pytestmark = pytest.mark.model

HINT = "Answer in one line."
TEMPLATE = (
    "{% if dated %}{{ date_string or strftime_now('%d %b %Y') }}{% endif %}"
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ style or '' }}"
    "<|im_end|>\n{% endif %}"
    + CHAT_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message['content'] or '' }}{% for call in message.tool_calls or [] %}{{ call.function.arguments }}"
        "{% endfor %}",
    )
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Rome"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "And in "}, {"type": "text", "text": "Rome?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "Sunny.", "tool_call_id": "c1"},
]
REQUEST = {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {"style": "short"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_model(tmp_path_factory.mktemp("lab") / "model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with running_server(Lab(folder)) as url:
        yield url


def rendered(messages: list[dict[str, Any]], **settings: Any) -> list[int]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    joined = [
        each | {"content": "".join(part["text"] for part in each["content"])}
        if isinstance(each["content"], list)
        else each
        for each in messages
    ]
    # The server gives the template a call's arguments as an object.
    call = CALL | {"function": {"name": "weather", "arguments": {"at": "Rome"}}}
    joined = [each | {"tool_calls": [call]} if "tool_calls" in each else each for each in joined]
    return list(
        tokenizer.apply_chat_template(
            joined, tools=TOOLS, style="short", add_generation_prompt=True, return_dict=False, **settings
        )
    )


async def turn(client: OpenAIClient, request: dict[str, Any]) -> Result:
    """Makes a call through the gateway and returns its result, as `sessions` makes it of the record."""
    while not await client.healthy():  # noqa: ASYNC110 - it is another process, as far as this one can tell
        await asyncio.sleep(0.05)
    body = request | {"model": "tiny", "max_tokens": 5, "seed": 1, "logprobs": True, "return_token_ids": True}
    answer = await client._post("/v1/chat/completions", body)
    choice = answer["choices"][0]
    event = SessionEvent(
        session_event_id="e",
        event_time=1,
        session_id="s",
        policy="tiny",
        model="tiny@v1",
        messages=normalised(request["messages"]),
        request=unspoken(request, request["messages"]),
        response=choice["message"]["content"],
        prompt_token_ids=int32_bytes(answer["prompt_token_ids"]),
        response_token_ids=int32_bytes(choice["token_ids"]),
        sampler_logprobs=float32_bytes([entry["logprob"] for entry in choice["logprobs"]["content"]]),
        logprobs_mode=LogprobsMode.PROCESSED,
    )
    return result_of(event, 0, 1)


def teacher(client: OpenAIClient) -> Teacher:
    async def model() -> str:
        return "tiny"

    return Teacher(client, FixedModel(model))


def test_the_teacher_of_a_turn_with_tools_reads_the_students_prompt_and_the_hint(server: str) -> None:
    async def story() -> None:
        async with OpenAIClient(server) as client:
            result = await turn(client, REQUEST)
            sample = sample_of(result)
            assert result.prompt_token_ids == int32_bytes(rendered(MESSAGES))
            taught = await teacher(client).logprobs(sample, result.task, [HINT])
            hinted = [MESSAGES[0], MESSAGES[1] | {"content": f"And in Rome?\n\n{HINT_TAG}\n{HINT}"}, *MESSAGES[2:]]
            prefix = rendered(hinted)
            n = len(result.response_token_ids) // 4
            whole = [*prefix, *np.frombuffer(result.response_token_ids, "<i4").tolist()]
            expected = (await client.score("tiny", whole))[len(prefix) :]
            np.testing.assert_array_equal(float32_view(taught.logprobs)[-n:], expected)

    asyncio.run(story())


def test_the_teacher_of_a_turn_of_another_day_reads_the_date_of_that_day(server: str) -> None:
    async def story() -> None:
        async with OpenAIClient(server) as client:
            today = await turn(client, REQUEST | {"chat_template_kwargs": {"style": "short", "dated": True}})
            then = rendered(MESSAGES, dated=True, date_string="01 Mar 2020")
            at = rfc3339_ms("2020-03-01T12:00:00Z")
            task = today.task.model_copy(update={"event_time": at})
            result = today.model_copy(update={"task": task, "prompt_token_ids": int32_bytes(then)})
            assert today.prompt_token_ids != result.prompt_token_ids
            taught = await teacher(client).logprobs(sample_of(result), task, [HINT])
            hinted = [MESSAGES[0], MESSAGES[1] | {"content": f"And in Rome?\n\n{HINT_TAG}\n{HINT}"}, *MESSAGES[2:]]
            prefix = rendered(hinted, dated=True, date_string="01 Mar 2020")
            response = np.frombuffer(result.response_token_ids, "<i4").tolist()
            expected = (await client.score("tiny", [*prefix, *response]))[len(prefix) :]
            np.testing.assert_array_equal(float32_view(taught.logprobs)[-len(response) :], expected)

    asyncio.run(story())


def test_a_prompt_that_cannot_be_made_again_has_no_teacher(server: str) -> None:
    async def story() -> None:
        async with OpenAIClient(server) as client:
            result = await turn(client, REQUEST)
            forgetful = result.task.model_copy(update={"metadata": {}})
            with pytest.raises(TeacherRefused, match="other tokens") as refused:
                await teacher(client).logprobs(sample_of(result), forgetful, [HINT])
            assert refused.value.reason == "other_prompt"

    asyncio.run(story())
