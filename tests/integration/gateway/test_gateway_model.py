"""The gateway before our own inference server, with a tiny model and an adapter: what is recorded can be trained on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.tensors import float32_view, int32_view
from tests.support import inference_lab
from tests.support.gateway_lab import Lab, lab

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model = inference_lab.make_model(tmp_path_factory.mktemp("model") / "tiny")
    return model, inference_lab.make_adapter(model, tmp_path_factory.mktemp("adapter"), seed=5)


@pytest.fixture(scope="module")
def gateway(places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    model, adapter = places
    server = inference_lab.Lab(model)
    server.adapters.load("assistant@v1", str(adapter))
    with (
        inference_lab.running_server(server, max_model_len=512) as url,
        lab(tmp_path_factory.mktemp("gateway"), backend_url=url) as made,
    ):
        made.serve(1)
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_recorded_tokens_have_the_log_probs_that_the_trainer_computes(
    gateway: Lab, places: tuple[Path, Path], stream: bool
) -> None:
    gateway.log.taken.clear()
    answer = gateway.chat("What is the capital of France?", max_tokens=12, stream=stream)
    assert answer.status_code == 200 and "token_ids" not in answer.text
    [event] = gateway.log.events
    assert (event.model, event.not_trainable) == ("assistant@v1", "")
    prompt, response = int32_view(event.prompt_token_ids).tolist(), int32_view(event.response_token_ids).tolist()
    assert 0 < len(response) <= 12
    computed, _ = inference_lab.trainer_logprobs(*places, prompt + response)
    np.testing.assert_allclose(float32_view(event.sampler_logprobs), computed[len(prompt) :], atol=1e-3)


def test_what_the_server_refuses_comes_back_as_it_says_it(gateway: Lab) -> None:
    refused = gateway.chat("word " * 2000)
    assert refused.status_code == 400 and "context" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"response_format": FORMAT}, "grammar"),
        ({"tools": TOOLS, "tool_choice": "required"}, "forced tool"),
        ({"presence_penalty": 0.5, "max_tokens": 8}, "penalties"),
    ],
)
def test_an_answer_that_had_to_have_a_form_is_recorded_and_not_trained_on(
    gateway: Lab, more: dict[str, Any], reason: str, stream: bool
) -> None:
    gateway.log.taken.clear()
    if stream:
        gateway.stream("Where is the Eiffel Tower?", **more)
    else:
        assert gateway.chat("Where is the Eiffel Tower?", **more).status_code == 200
    [event] = gateway.log.events
    assert reason in event.not_trainable and event.response_token_ids and event.sampler_logprobs
    if "response_format" in more:
        assert json.loads(event.response)["city"] in ("Paris", "Oslo")
    if "tools" in more:
        [call] = event.tool_calls
        assert (call.name, json.loads(call.arguments)["city"] in ("Paris", "Oslo")) == ("look_up", True)
        assert event.response == "" and event.finish_reason == "tool_calls"


def test_a_bad_schema_comes_back_as_the_server_says_it(gateway: Lab) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "place", "schema": {"type": "objekt"}}}
    refused = gateway.chat("x", response_format=bad)
    assert refused.status_code == 400 and "objekt" in refused.json()["error"]["message"]
