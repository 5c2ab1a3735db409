"""The server over HTTP: the wire format, errors, adapters, streams, disconnects, stopping."""

import asyncio
import hashlib
import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from schemas.records import LogprobsMode
from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import ServerUnavailable, UnknownModel
from tentalis.inference.template_settings import RESERVED_SETTINGS, reserved_settings
from tentalis.storage.errors import StoreFull
from tentalis.storage.file_set import write_set
from tentalis.storage.location import Location
from tests.support.inference_lab import Lab, make_adapter, make_model, make_tokenizer, running_server, trainer_logprobs
from tests.support.object_store import DENIED, FULL, Fault, environment_of, object_store
from tests.support.stall import longest_stall

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter"), seed=1)


@pytest.fixture(scope="module")
def lab(model: Path) -> Lab:
    return Lab(model, max_batch=16)


@pytest.fixture(scope="module")
def server(lab: Lab) -> Iterator[str]:
    with running_server(lab) as url:
        yield url


def post(server: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(server + path, json=body, timeout=60)


def events(server: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server + path, json=body | {"stream": True}, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_client_is_token_exact(server: str, lab: Lab, model: Path, adapter: Path) -> None:
    async def use() -> None:
        async with OpenAIClient(server + "/v1", timeout=60) as client:
            await client.load_adapter("p@v1", str(adapter))
            cards = {card["id"]: card for card in await client.models()}
            assert cards["p@v1"]["parent"] == "tiny" and cards["p@v1"]["root"] == str(adapter)
            prompt = await client.render("p@v1", MESSAGES)
            chat, plain = await asyncio.gather(
                client.generate("p@v1", MESSAGES, n=4, temperature=0.8, max_tokens=16, seed=3),
                client.generate("p@v1", prompt.tolist(), n=4, temperature=0.8, max_tokens=16, seed=3),
            )
            for generation in (chat, plain):
                assert (generation.model, generation.logprobs_mode) == ("p@v1", LogprobsMode.PROCESSED)
                assert np.array_equal(generation.prompt_token_ids, prompt)
                assert generation.prompt_token_ids.dtype == np.int32
                assert len(generation.completions) == 4
            for one, other in zip(chat.completions, plain.completions, strict=True):
                assert np.array_equal(one.token_ids, other.token_ids) and one.text == other.text
                assert one.logprobs.dtype == np.float32
                whole = [*prompt.tolist(), *one.token_ids.tolist()]
                expected, _ = trainer_logprobs(model, adapter, whole, 0.8)
                assert np.abs(expected[len(prompt) :] - one.logprobs).max() < 1e-4
                scored = await client.score("p@v1", whole, temperature=0.8)
                assert np.isnan(scored[0]) and np.abs(expected - scored)[1:].max() < 1e-4
            assert await client.detokenize("tiny", prompt) == (
                "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
            )
            assert await client.detokenize("tiny", await client.tokenize("tiny", "fox")) == "fox"
            filled = await client.generate("tiny", prompt.tolist(), temperature=0, seed=1)
            [completion] = filled.completions
            assert completion.finish_reason == "stop" or len(prompt) + len(completion.token_ids) == 256
            await client.unload_adapter("p@v1")
            with pytest.raises(UnknownModel, match="tiny"):
                await client.generate("p@v1", MESSAGES, max_tokens=1)
            with pytest.raises(UnknownModel):
                await client.unload_adapter("p@v1")

    asyncio.run(use())


def test_chat_completion_shape(server: str) -> None:
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "n": 2,
        "max_tokens": 5,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = post(server, "/v1/chat/completions", body).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    assert answer["usage"] == {
        "prompt_tokens": len(answer["prompt_token_ids"]),
        "completion_tokens": 10,
        "total_tokens": len(answer["prompt_token_ids"]) + 10,
    }
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
        content = choice["logprobs"]["content"]
        assert len(content) == len(choice["token_ids"]) == 5
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}],
        }
    ]
    again = post(server, "/v1/chat/completions", body | {"messages": parts, "model": None}).json()
    assert again["prompt_token_ids"] == answer["prompt_token_ids"] and again["model"] == "tiny"
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in answer["choices"]]


def test_completion_shape_with_echo_and_several_prompts(server: str) -> None:
    body = {"model": "tiny", "prompt": ["fox", "The lazy dog"], "max_tokens": 3, "n": 2, "seed": 1, "ignore_eos": True}
    answer = post(server, "/v1/completions", body | {"echo": True, "logprobs": 1, "return_token_ids": True}).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, prompt in zip(answer["choices"], ["fox", "fox", "The lazy dog", "The lazy dog"], strict=True):
        assert choice["text"].startswith(prompt)
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None and all(x <= 0 for x in logprobs["token_logprobs"][1:])
        assert len(logprobs["tokens"]) == len(choice["token_ids"]) == len(choice["prompt_token_ids"]) + 3
        assert logprobs["text_offset"][0] == 0
        prompt_logprobs = choice["prompt_logprobs"]
        assert prompt_logprobs[0] is None
        for token, entry, value in zip(
            choice["prompt_token_ids"][1:], prompt_logprobs[1:], logprobs["token_logprobs"][1:], strict=False
        ):
            assert entry[str(token)]["logprob"] == pytest.approx(value)


def test_a_prompt_is_scored_without_sampling(server: str) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "prompt_logprobs": 2}
    answer = post(server, "/v1/completions", body).json()
    [choice] = answer["choices"]
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["6"]["rank"] >= 1
    assert 2 <= len(choice["prompt_logprobs"][1]) <= 3


def test_chat_stream_equals_the_whole_answer(server: str) -> None:
    body = {"messages": MESSAGES, "n": 2, "max_tokens": 20, "seed": 2, "logprobs": True, "return_token_ids": True}
    body |= {"stop": ["e"], "temperature": 0.9}
    whole = post(server, "/v1/chat/completions", body).json()
    chunks = events(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        assert [token for c in mine for token in c.get("token_ids", [])] == choice["token_ids"]
        entries = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [e["token"] for e in choice["logprobs"]["content"]]
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert [entry["logprob"] for entry in entries] == pytest.approx(values, abs=1e-5)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)


def test_completion_stream_equals_the_whole_answer(server: str) -> None:
    body = {"prompt": ["fox", "dog"], "n": 2, "max_tokens": 8, "seed": 2, "return_token_ids": True, "logprobs": 0}
    whole = post(server, "/v1/completions", body).json()
    chunks = events(server, "/v1/completions", body)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [token for c in mine for token in c["token_ids"]] == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        offsets = [offset for c in mine for offset in c["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {"model": "nope", "messages": MESSAGES}, 404, "does not exist"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": -0.1}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": MESSAGES, "top_p": 0}, 400, "top_p"),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 0}, 400, "n:"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 250}, 400, "context is 256"),
        ("/v1/chat/completions", {"messages": MESSAGES, "stop": [""]}, 400, "stop string"),
        ("/v1/chat/completions", {"messages": MESSAGES, "repetition_penalty": 1.5}, 400, "repetition_penalty"),
        ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 3}, 400, "logprobs=true"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "image_url",
        ),
        ("/v1/chat/completions", {"messages": MESSAGES, "seed": 2**63}, 400, "seed"),
        ("/v1/completions", {"prompt": [1] * 300}, 400, "the prompt has 300"),
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": [1, 99999]}, 400, "vocabulary"),
        ("/v1/completions", {"prompt": [1, -1]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400, "stream"),
        ("/v1/load_lora_adapter", {"lora_name": "x"}, 400, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/no/such/place"}, 404, "adapter_config.json"),
        ("/v1/load_lora_adapter", {"lora_name": "tiny", "lora_path": "/no/such/place"}, 400, "base model"),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}, 404, "not loaded"),
        ("/tokenize", {}, 400, "prompt or messages"),
        ("/detokenize", {"tokens": [99999]}, 400, "vocabulary"),
    ],
)
def test_errors_have_the_openai_shape(server: str, path: str, body: dict[str, Any], status: int, message: str) -> None:
    response = post(server, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert message in error["message"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b'{"model": ' + b"[" * 100_000])
def test_a_body_that_is_not_json(server: str, body: bytes) -> None:
    response = httpx.post(server + "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "not JSON" in response.json()["error"]["message"]


def asking(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Every call that tokenises a text."""
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return [
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": text}}]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["x", text]}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": messages}),
    ]


@pytest.mark.parametrize("length", [9_000, 15_000_000])
def test_what_cannot_fit_the_context_is_refused_before_it_is_tokenised(
    server: str, lab: Lab, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenised")

    for name in ("encode", "apply_chat_template"):
        monkeypatch.setattr(lab.runtime.tokenizer, name, never)
    for path, body in asking("é" * (length // 2)):
        response = post(server, path, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
        assert "context" in error["message"] and "bytes" in error["message"]


TEMPLATE = "{% for _ in range(10**9) %}{% endfor %}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("more", [{"chat_template": TEMPLATE}, {"chat_template_kwargs": {"chat_template": TEMPLATE}}])
def test_a_template_of_a_client_is_never_run(
    server: str, lab: Lab, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    """A template is a program, and this one runs for minutes."""
    render = lab.runtime.tokenizer.apply_chat_template

    def spied(*arguments: Any, **named: Any) -> Any:
        assert "chat_template" not in named
        return render(*arguments, **named)

    monkeypatch.setattr(lab.runtime.tokenizer, "apply_chat_template", spied)
    answer = post(server, path, {"messages": MESSAGES, "max_tokens": 1} | more)
    assert answer.status_code == 400 and "chat_template is not allowed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "settings",
    [
        {"padding": "max_length", "max_length": 10**9},
        {"truncation": True, "max_length": 5},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 10**9}},
        {"tokenize": False},
        {"return_tensors": "pt"},
        {"eos_token": "long"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_client_sets_no_argument_of_the_tokenizer(
    server: str, lab: Lab, monkeypatch: pytest.MonkeyPatch, path: str, settings: dict[str, Any]
) -> None:
    """Padding would fill the memory before the tokens are counted; the truncation of one would cut others' prompts."""

    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("rendered")

    monkeypatch.setattr(lab.runtime.tokenizer, "apply_chat_template", never)
    refused = post(server, path, {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": settings})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "chat_template_kwargs"), error
    assert f"chat_template_kwargs must not set {next(iter(settings))}" in error["message"]


def test_a_client_sets_the_variables_of_the_template(server: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    template = lab.runtime.tokenizer.chat_template
    shown = "{{ enable_thinking }}{{ style }}{{ documents[0]['text'] }}"
    monkeypatch.setattr(lab.runtime.tokenizer, "chat_template", template + shown)
    settings = {"enable_thinking": False, "style": "short", "documents": [{"text": "Rome"}]}
    tokens = post(server, "/tokenize", {"messages": MESSAGES, "chat_template_kwargs": settings}).json()["tokens"]
    prompt = post(server, "/detokenize", {"tokens": tokens}).json()["prompt"]
    assert prompt.endswith("FalseshortRome")


def test_the_reserved_settings_are_the_arguments_of_the_tokenizer() -> None:
    """It refuses them for backends whose tokenizers it cannot ask. The model server asks its own."""
    assert reserved_settings(make_tokenizer()) == RESERVED_SETTINGS

    class OtherTokenizer:
        def __init__(self) -> None:
            self.special_tokens_map = {"turn_token": "<turn>"}

        def apply_chat_template(self, conversation: Any, image_pixels: int = 0, **variables: Any) -> list[int]:
            return [len(conversation), image_pixels, len(variables)]

        def __call__(self, text: str, backend_option: str = "") -> list[int]:
            return [len(text), len(backend_option)]

    assert reserved_settings(OtherTokenizer()) - RESERVED_SETTINGS == {"turn_token", "image_pixels", "backend_option"}


def test_a_text_that_might_fit_is_counted_in_tokens(server: str) -> None:
    longest = max(map(len, make_tokenizer().get_vocab()))
    answer = post(server, "/v1/completions", {"prompt": "a" * 256 * (longest - 1)})
    assert answer.status_code == 400 and "tokens; the prompt has" in answer.json()["error"]["message"]


def test_a_body_of_unknown_length_is_bounded_too(server: str) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(300):
            yield b"x" * 65536
        yield b'"}'

    response = httpx.post(server + "/v1/completions", content=chunks(), timeout=60)
    assert response.status_code == 400 and "The body has 19,660,814 bytes" in response.json()["error"]["message"]


def test_a_request_with_more_messages_than_tokens_is_refused_before_its_template_runs(server: str) -> None:
    refused = post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 257})
    assert refused.status_code == 400 and "there are 257 messages" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/completions"])
def test_a_large_request_does_not_stop_the_answers_of_others(model: Path, path: str) -> None:
    """On the loop, the request would stop them for nine tenths of its time."""
    long: dict[str, Any] = {"messages": [{"role": "user", "content": "w"}] * 60_000}
    if path == "/v1/completions":
        long = {"prompt": "words " * 180_000}
    with running_server(Lab(model), max_model_len=98_304) as url:
        stalled, took = longest_stall(url, "/health", lambda: post(url, path, long))
    assert stalled < max(0.5, took / 2), f"{stalled:.2f} s of {took:.2f} s"


def test_what_is_no_text_is_refused(server: str) -> None:
    for path, body in asking("\ud800"):
        response = httpx.post(server + path, content=json.dumps(body).encode(), timeout=60)
        assert response.status_code == 400 and "lone surrogate" in response.json()["error"]["message"]


def test_loading_the_same_name_needs_load_inplace(server: str, adapter: Path, model: Path, tmp_path: Path) -> None:
    other = make_adapter(model, tmp_path / "other", seed=7)
    load = {"lora_name": "same", "lora_path": str(adapter)}
    assert post(server, "/v1/load_lora_adapter", load).status_code == 200
    assert post(server, "/v1/load_lora_adapter", load).status_code == 400
    ask = {
        "model": "same",
        "messages": MESSAGES,
        "max_tokens": 8,
        "seed": 1,
        "temperature": 0,
        "return_token_ids": True,
    }
    before = post(server, "/v1/chat/completions", ask).json()
    replaced = post(server, "/v1/load_lora_adapter", load | {"lora_path": str(other), "load_inplace": True})
    assert replaced.status_code == 200
    after = post(server, "/v1/chat/completions", ask).json()
    assert before["choices"][0]["token_ids"] != after["choices"][0]["token_ids"]
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "same"}).status_code == 200


def test_an_adapter_is_loaded_from_an_object_store_if_it_is_complete_and_the_right_one(
    server: str, adapter: Path
) -> None:
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    sha256 = hashlib.sha256((adapter / weights).read_bytes()).hexdigest()
    with object_store() as store, environment_of(store):
        place = Location.parse(store.bucket()) / "adapters" / "p" / "v1"
        load = {"lora_name": "p@v1", "lora_path": place.url, "sha256": sha256}

        def refused(words: str, **changes: str) -> None:
            response = post(server, "/v1/load_lora_adapter", load | changes)
            assert response.status_code in (400, 424) and words in response.json()["error"]["message"], response.text

        store.faults = [Fault(FULL, "PUT", "manifest.json")]
        with pytest.raises(StoreFull):
            write_set(place, adapter, [weights, config])
        store.faults.clear()
        refused("never written completely")
        write_set(place, adapter, [weights, config])
        refused("does not name", sha256="a" * 64)
        refused("must be a file:///", lora_path="https://host/adapter")
        store.faults = [Fault(DENIED, method) for method in ("GET", "HEAD")]
        refused("denies access")
        store.faults.clear()
        assert post(server, "/v1/load_lora_adapter", load).status_code == 200
        cards = {card["id"]: card for card in httpx.get(f"{server}/v1/models").json()["data"]}
        assert (cards["p@v1"]["root"], cards["p@v1"]["sha256"]) == (place.url, sha256)
        assert cards["p@v1"]["loads_urls"] is True
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "p@v1"}).status_code == 200
    here = {"lora_name": "p@v2", "lora_path": adapter.as_uri()}
    assert "have sha256" in post(server, "/v1/load_lora_adapter", here | {"sha256": "a" * 64}).text
    assert post(server, "/v1/load_lora_adapter", here | {"sha256": sha256}).status_code == 200
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "p@v2"}).status_code == 200


def test_unloading_does_not_touch_an_answer_in_flight(server: str, adapter: Path) -> None:
    load = {"lora_name": "leaving", "lora_path": str(adapter)}
    body = {"model": "leaving", "messages": MESSAGES, "max_tokens": 150, "seed": 5, "ignore_eos": True}
    body |= {"return_token_ids": True}
    post(server, "/v1/load_lora_adapter", load)
    whole = post(server, "/v1/chat/completions", body).json()
    tokens: list[int] = []
    with httpx.stream("POST", server + "/v1/chat/completions", json=body | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert chunk["model"] == "leaving"
                if not tokens and chunk["choices"][0].get("token_ids"):
                    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "leaving"}).status_code == 200
                tokens += chunk["choices"][0].get("token_ids", [])
    assert tokens == whole["choices"][0]["token_ids"]
    assert post(server, "/v1/chat/completions", body).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(server: str, lab: Lab, stream: bool) -> None:
    body = json.dumps({"prompt": "fox", "n": 16, "max_tokens": 250, "ignore_eos": True, "stream": stream}).encode()
    kind = "content-type: application/json"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    address, _, port = server.removeprefix("http://").partition(":")
    generated = lab.engine.stats.generated_tokens
    with socket.create_connection((address, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: lab.engine.stats.running == 16)
    until(lambda: lab.engine.stats.running == 0)
    assert lab.engine.stats.generated_tokens - generated < 16 * 250


def until(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def test_a_client_that_goes_away_within_its_request_is_no_error_of_the_server(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/v1/chat/completions"
    url = httpx.URL(server)
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{{".encode())
    counted = f'tentalis_inference_requests_total{{path="{path}",status="499"}} 1.0'
    until(lambda: counted in httpx.get(server + "/metrics", timeout=60).text)
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_metrics_count_what_was_done(server: str) -> None:
    def values() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in httpx.get(server + "/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    before = values()
    post(server, "/v1/completions", {"prompt": [5, 6, 7], "n": 3, "max_tokens": 4, "ignore_eos": True})
    post(server, "/v1/completions", {"prompt": [5, 6, 7], "model": "nope"})
    after = values()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["tentalis_inference_generated_tokens_total"] == 12
    assert grown["tentalis_inference_prompt_tokens_total"] == 3
    assert grown['tentalis_inference_requests_total{path="/v1/completions",status="200"}'] == 1
    assert grown['tentalis_inference_requests_total{path="/v1/completions",status="404"}'] == 1
    assert after["tentalis_inference_running"] == 0


def test_an_absent_server_is_told_from_a_refusal() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def use() -> None:
        async with OpenAIClient(f"http://127.0.0.1:{port}", timeout=5) as client:
            assert not await client.healthy()
            with pytest.raises(ServerUnavailable, match="running"):
                await client.generate("x", MESSAGES)

    asyncio.run(use())


def test_a_server_without_token_ids_does_not_pass_for_a_token_exact_one() -> None:

    def answer(request: httpx.Request) -> httpx.Response:
        choice = {"index": 0, "message": {"content": "hi"}, "logprobs": None, "finish_reason": "stop"}
        return httpx.Response(200, json={"model": "x", "choices": [choice]})

    async def use() -> None:
        async with OpenAIClient("http://somewhere") as client:
            client._http = httpx.AsyncClient(base_url="http://somewhere", transport=httpx.MockTransport(answer))
            generation = await client.generate("x", MESSAGES)
            [completion] = generation.completions
            assert (completion.text, completion.token_ids, completion.logprobs) == ("hi", None, None)
            assert (generation.prompt_token_ids, generation.logprobs_mode) == (None, LogprobsMode.NONE)

    asyncio.run(use())


def test_the_command_serves_and_sigterm_stops_it_with_requests_in_flight(model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tentalis.cli", "serve", "model", "--policy-model", str(model)]
    process = subprocess.Popen([*command, "--port", str(port), "--served-name", "tiny", "--threads", "1"])
    try:

        async def use() -> None:
            async with OpenAIClient(f"http://127.0.0.1:{port}", timeout=60) as client:
                deadline = time.monotonic() + 300
                while not await client.healthy():
                    assert process.poll() is None and time.monotonic() < deadline
                    await asyncio.sleep(0.1)
                # Longer than the test waits: 64 rows of 500 tokens, asked for many times over.
                asked = [
                    asyncio.ensure_future(client.generate("tiny", [1, 2, 3], n=64, max_tokens=500)) for _ in range(30)
                ]
                first = await client.generate("tiny", MESSAGES, max_tokens=1)
                assert first.model == "tiny"
                process.send_signal(signal.SIGTERM)
                results = await asyncio.gather(*asked, return_exceptions=True)
                assert any(isinstance(result, ServerUnavailable) for result in results)

        asyncio.run(use())
        assert process.wait(timeout=20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
