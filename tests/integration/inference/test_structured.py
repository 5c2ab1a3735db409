"""Answers with a form: JSON schemas, forced tools, penalties, over HTTP and in a batch with plain requests."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel, Field

from tentalis.inference import grammar as grammar_module
from tentalis.inference.grammar import Grammar, GrammarCompiler
from tentalis.inference.response_format import answer_grammar
from tests.support.inference_lab import Lab, make_model, running_server, trainer_logprobs
from tests.support.stall import longest_stall

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo"]},
        "count": {"type": "integer", "minimum": -5, "maximum": 99},
        "note": {"$ref": "#/$defs/note"},
        "sure": {"type": ["boolean", "null"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "count", "note", "sure", "tags"],
    "additionalProperties": False,
    "$defs": {"note": {"type": "string", "maxLength": 6}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"$ref": "#/$defs/n"}},
                "required": ["n"],
                "$defs": {"n": {"enum": numbers}},
            },
        },
    }
    for name, numbers in (("add", [1, 2]), ("take", [3, 4]))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lab(model: Path) -> Lab:
    return Lab(model, max_batch=32)


@pytest.fixture(scope="module")
def server(lab: Lab) -> Iterator[str]:
    with running_server(lab, max_model_len=512) as url:
        yield url


def chat(server: str, **body: Any) -> httpx.Response:
    return httpx.post(server + "/v1/chat/completions", json={"messages": MESSAGES, "seed": 1} | body, timeout=120)


def answered(server: str, **asked: Any) -> dict[str, Any]:
    response = chat(server, **asked)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(server: str, **body: Any) -> list[dict[str, Any]]:
    """The choices of the chunks."""
    asked = {"messages": MESSAGES, "seed": 1, "stream": True} | body
    with httpx.stream("POST", server + "/v1/chat/completions", json=asked, timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def grammar(lab: Lab, response_format: Any = FORMAT) -> Grammar:
    source = answer_grammar(response_format)
    assert source is not None
    runtime = lab.runtime
    return asyncio.run(GrammarCompiler(runtime.tokenizer, runtime.vocab_size, runtime.eos_token_ids).compile(source))


def test_sampled_answers_are_valid_and_differ(server: str) -> None:
    """The tiny model has random weights: without a grammar it never writes JSON."""
    answer = answered(server, n=20, response_format=FORMAT, temperature=1.0)
    assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 10
    [plain] = answered(server, max_tokens=40)["choices"]
    with pytest.raises(ValueError):
        json.loads(plain["message"]["content"])


def test_a_stream_and_a_plain_completion_have_the_form_too(server: str) -> None:
    text = "".join(choice["delta"]["content"] for choice in streamed(server, response_format=FORMAT))
    jsonschema.validate(json.loads(text), SCHEMA)
    body = {"prompt": ["fox", "dog"], "max_tokens": 200, "response_format": FORMAT, "seed": 1}
    for choice in httpx.post(server + "/v1/completions", json=body, timeout=120).json()["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_a_json_object(server: str) -> None:
    answer = answered(server, n=8, response_format={"type": "json_object"}, max_tokens=60)
    for choice in answer["choices"]:
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


class Tag(BaseModel):
    text: Literal["old", "new"]


class Place(BaseModel):
    """What a client of the library declares."""

    city: str = Field(max_length=5)
    level: int = Field(ge=0, le=9)
    tags: list[Tag] = Field(max_length=2)
    state: Tag | None


def test_openais_client_parses_what_it_asked_for(server: str) -> None:
    client = openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Place, seed=2)  # type: ignore[arg-type]
    assert isinstance(answer.choices[0].message.parsed, Place)
    tools = [openai.pydantic_function_tool(Tag, name="tag")]
    asked = {"model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": "required", "seed": 2}
    with client.chat.completions.stream(**asked) as stream:  # type: ignore[arg-type]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1
    call = calls[0]
    assert call.function.name == "tag" and isinstance(call.function.parsed_arguments, Tag)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_allowed_tokens(lab: Lab, server: str, model: Path, temperature: float) -> None:
    answer = answered(
        server, n=3, response_format=FORMAT, temperature=temperature, logprobs=True, return_token_ids=True
    )
    prompt, found = answer["prompt_token_ids"], grammar(lab)
    for choice in answer["choices"]:
        tokens = choice["token_ids"]
        _, rows = trainer_logprobs(model, None, prompt + tokens, temperature)
        matcher = found.matcher()
        for at, token in enumerate(tokens):
            allowed = torch.from_numpy(matcher.allowed())
            expected = rows[len(prompt) + at - 1].masked_fill(~allowed, -torch.inf).log_softmax(-1)[token]
            assert abs(float(expected) - choice["logprobs"]["content"][at]["logprob"]) < 1e-4
            matcher.advance(token)


def test_log_probs_are_those_of_the_penalised_distribution(server: str, model: Path) -> None:
    sampling = {"presence_penalty": 0.8, "frequency_penalty": 1.1, "temperature": 0.5}
    body = {"max_tokens": 40, "logprobs": True, "return_token_ids": True, "ignore_eos": True}
    answer, plain = answered(server, **body, **sampling), answered(server, **body, temperature=0.5)
    [choice], prompt = answer["choices"], answer["prompt_token_ids"]
    tokens = choice["token_ids"]
    _, rows = trainer_logprobs(model, None, prompt + tokens)
    for at, token in enumerate(tokens):
        row = rows[len(prompt) + at - 1].clone()
        for earlier in set(tokens[:at]):
            row[earlier] -= 0.8 + 1.1 * tokens[:at].count(earlier)
        expected = (row / 0.5).log_softmax(-1)[token]
        assert abs(float(expected) - choice["logprobs"]["content"][at]["logprob"]) < 1e-4
    assert len(set(tokens)) > len(set(plain["choices"][0]["token_ids"]))


def test_requests_in_the_same_batch_are_unaffected_bit_for_bit(model: Path) -> None:
    """The batch has the same rows either way, so the arithmetic of the others must not change by a bit."""
    lab = Lab(model, max_batch=8)
    lab.engine.start()
    try:
        prompts = [list(lab.runtime.tokenizer.encode(text)) for text in ("fox", "What is", "The quick brown")]
        long = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 400}}}
        held = {"temperature": 0.8, "max_tokens": 48, "seed": 3}

        def mates(**first: Any) -> list[tuple[list[int], list[float]]]:
            others = {"ignore_eos": True}
            found = lab.generate_each(prompts, [held | first, held | others, held | others | {"top_k": 20}])
            assert all(len(chunk.token_ids) == 48 for [chunk] in found)
            return [(chunk.token_ids, chunk.logprobs) for [chunk] in found]

        plain = mates(ignore_eos=True)
        for restricted in (
            mates(grammar=grammar(lab, long)),
            mates(ignore_eos=True, presence_penalty=1.5, frequency_penalty=1.0),
        ):
            assert restricted[0] != plain[0]
            assert restricted[1:] == plain[1:]
    finally:
        lab.engine.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_with_valid_arguments(server: str, stream: bool) -> None:
    body = {"tools": TOOLS, "tool_choice": "required", "n": 12}
    if stream:
        choices = streamed(server, **body)
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ""
        assert {choice["finish_reason"] for choice in choices} == {None, "tool_calls"}
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert all(call["index"] == 0 for call in calls)
    else:
        choices = answered(server, **body)["choices"]
        assert all(choice["message"]["content"] is None for choice in choices)
        assert {choice["finish_reason"] for choice in choices} == {"tool_calls"}
        calls = [call for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(calls) == 12 and len({call["id"] for call in calls}) == 12
    made = {(call["function"]["name"], json.loads(call["function"]["arguments"])["n"]) for call in calls}
    assert made <= {("add", 1), ("add", 2), ("take", 3), ("take", 4)} and len(made) > 1


def test_a_named_tool_is_called(server: str) -> None:
    choice = {"type": "function", "function": {"name": "take"}}
    for made in answered(server, tools=TOOLS, tool_choice=choice, n=4)["choices"]:
        [call] = made["message"]["tool_calls"]
        assert call["function"]["name"] == "take" and made["finish_reason"] == "stop"


def test_with_a_format_and_tools_the_answer_is_one_of_both(server: str) -> None:
    yes = {"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}}
    kinds = set()
    for made in answered(server, tools=TOOLS, response_format=yes, n=24, temperature=20)["choices"]:
        message = made["message"]
        kinds.add("call" if message.get("tool_calls") else "answer")
        assert message.get("tool_calls") or message["content"] == '"yes"'
    assert kinds == {"call", "answer"}
    forbidden = answered(server, tools=TOOLS, response_format=yes, tool_choice="none", n=4)
    assert {made["message"]["content"] for made in forbidden["choices"]} == {'"yes"'}


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": FORMAT | {"json_schema": {"schema": {"type": "objekt"}}}}, "response_format", "objekt"),
        ({"response_format": FORMAT | {"json_schema": {"schema": {"if": {}}}}}, "response_format", "if"),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "add, take"),
        ({"presence_penalty": 2.5}, "presence_penalty", "2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-2"),
    ],
)
def test_a_form_that_cannot_be_served_is_refused(server: str, more: dict[str, Any], param: str, message: str) -> None:
    response = chat(server, **more)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "BadRequestError")
    assert message in error["message"]


# The first needs many states for each token; the other, compiled without a limit, takes more than a minute.
HOSTILE = [{"type": "string", "pattern": "^(.*a.{400}|.*b.{400}|.*c.{400})$"}] * 10 + [
    {"allOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in range(60, 100)]}
] * 2


def test_hostile_schemas_stall_no_other_client(server: str) -> None:
    """Twelve of them, each another one, while one client asks for /health again and again, and one reads a stream."""

    def hostile(number: int) -> int:
        schema = HOSTILE[number] | {"description": str(number)}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        return chat(server, response_format=form, max_tokens=20).status_code

    def longest_gap() -> float:
        asked = {"messages": MESSAGES, "stream": True, "max_tokens": 400, "ignore_eos": True}
        with httpx.stream("POST", server + "/v1/chat/completions", json=asked, timeout=120) as response:
            arrived = [time.monotonic() for line in response.iter_lines() if line]
        return max(after - before for before, after in pairwise(arrived))

    def work() -> None:
        with ThreadPoolExecutor(12) as pool:
            assert set(pool.map(hostile, range(12))) <= {200, 400, 503}

    with ThreadPoolExecutor(1) as reader:
        gap = reader.submit(longest_gap)
        stalled, _ = longest_stall(server, "/health", work)
        assert stalled < 5 and gap.result() < 5, (stalled, gap.result())
    assert answered(server, response_format=FORMAT)["choices"][0]["finish_reason"] == "stop"


def test_a_sample_that_its_grammar_fails_is_refused_and_the_rest_goes_on(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 100}}}
    assert chat(server, response_format=form, max_tokens=5).status_code == 200
    monkeypatch.setattr(grammar_module, "_CPU_S", 0.0)
    monkeypatch.setattr(grammar_module, "_CPU_S_PER_TOKEN", 0.0)
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(chat, server, max_tokens=200, ignore_eos=True)
        failed = pool.submit(chat, server, response_format=form, max_tokens=200, n=3).result()
    assert failed.status_code == 400 and "CPU time" in failed.json()["error"]["message"]
    assert plain.result().json()["usage"]["completion_tokens"] == 200


def test_a_conversation_with_tools_is_rendered(server: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "two"},
    ]
    tokens = httpx.post(server + "/tokenize", json={"messages": messages, "tools": TOOLS}, timeout=60).json()["tokens"]
    prompt = httpx.post(server + "/detokenize", json={"tokens": tokens}, timeout=60).json()["prompt"]
    assert '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>' in prompt
    assert prompt.endswith("user\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    answer = answered(server, messages=messages, tools=TOOLS, max_tokens=8, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens


def test_greedy_decoding_takes_the_likeliest_allowed_token(server: str) -> None:
    first, second = (answered(server, response_format=FORMAT, temperature=0, seed=seed) for seed in (1, 2))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    jsonschema.validate(json.loads(first["choices"][0]["message"]["content"]), SCHEMA)
