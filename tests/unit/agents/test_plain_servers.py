"""Answers of servers that give no token ids, or log-probs of an unknown distribution: scored, and never trained on."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from schemas import topics
from schemas.records import (
    LogprobsMode,
    OutcomeKind,
    Result,
    Sampling,
    Source,
    Status,
    Terms,
    Verifier,
    not_trainable_by_ratio,
    sample_of,
)
from streams.apps.scoring.processor import Scoring
from tentalis.agents.workers.answer import Answerer
from tentalis.cli.serve.worker import OLLAMA, model_server
from tentalis.cli.shared.errors import CommandError
from tentalis.inference.client import OpenAIClient
from tentalis.policies.served import ServedVersions
from tentalis.service.exit_codes import ExitCode
from tentalis.service.variable import BadVariable
from tests.support.join_support import fold
from tests.support.loop_records import T0, ack, task
from tests.support.stream_records import CODEC, on_log, read
from tests.support.worker_lab import policy_calls
from trainer.data.candidates import offer_of

OURS = {"owned_by": "tentalis", "logprobs_mode": "processed_logprobs"}
VLLM = {"owned_by": "vllm"}
OTHER = {"owned_by": "library"}
TERMS = Terms(rl=Source.RESULT, opd=None, deadline_ms=1000)
TEXT = "Cats purr when they are content, and sometimes to soothe themselves."


class FakeServer:
    """An OpenAI-compatible server. `refuses`: names that it does not accept in a request."""

    def __init__(
        self,
        *,
        ids: bool = True,
        prompt_ids: bool = True,
        logprobs: int | None = 3,
        card: Any = OURS,
        refuses: str = "",
    ) -> None:
        self.ids, self.prompt_ids, self.logprobs, self.card, self.refuses = ids, prompt_ids, logprobs, card, refuses
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            if self.card is None:
                return httpx.Response(404, text="no such page")
            return httpx.Response(200, json={"data": [{"id": "base", **self.card}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.refuses in body:
            return httpx.Response(400, json={"error": {"message": f"unrecognized request argument: {self.refuses}"}})
        content = None if self.logprobs is None else {"content": [{"logprob": -0.5}] * self.logprobs}
        choices = [
            {"index": i, "message": {"content": TEXT}, "finish_reason": "stop"}
            | ({"token_ids": [10 + i, 11, 2]} if self.ids and "return_token_ids" in body else {})
            | ({"logprobs": content} if content and "logprobs" in body else {})
            for i in range(body["n"])
        ]
        prompt = {"prompt_token_ids": [1, 2, 3]} if self.prompt_ids and "return_token_ids" in body else {}
        return httpx.Response(200, json={"model": "assistant@v1", "choices": choices, **prompt})


def answered(
    server: FakeServer, mode: LogprobsMode | None = None, model: str | None = None, **sampling: Any
) -> list[Result]:
    """Returns a worker's results for the server's answers to a task of two samples."""
    client = OpenAIClient("http://server", logprobs_mode=mode)
    client._http = httpx.AsyncClient(base_url=client.base_url, transport=httpx.MockTransport(server))
    served = ServedVersions("local")
    served.apply(ack(1))
    of = task(terms=TERMS, sampling=Sampling(**sampling), verifier=Verifier(name="taste"))
    calls = policy_calls(served, patience_s=1.0, model=model)
    answerer = Answerer(client, calls, worker_id="w", server_id="local")
    return asyncio.run(answerer.answer(of, T0))


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (FakeServer(ids=False, prompt_ids=False, logprobs=None), "no response tokens"),
        (FakeServer(ids=False, prompt_ids=False, card=None), "no response tokens"),
        (FakeServer(refuses="return_token_ids", card=None), "no response tokens"),
        (FakeServer(prompt_ids=False), "no response tokens"),
        (FakeServer(logprobs=2), "no response tokens"),
        (FakeServer(logprobs=None), "log-probs mode none"),
        (FakeServer(card=OTHER), "log-probs mode unknown"),
        (FakeServer(card=None), "log-probs mode unknown"),
    ],
    ids=[
        *("Ollama", "log-probs alone", "strict", "no prompt ids", "ids and log-probs that do not fit", "ids alone"),
        *("an undeclared distribution", "no model cards"),
    ],
)
def test_answers_of_a_plain_server_are_scored_and_joined_but_not_trained_on(server: FakeServer, reason: str) -> None:
    results = answered(server)
    assert [(result.status, result.text, result.error) for result in results] == [(Status.OK, TEXT, None)] * 2
    effects = asyncio.run(
        Scoring(CODEC).process(3, [on_log(topics.RESULTS, each, i) for i, each in enumerate(results)])
    )
    scores = [read(output) for output in effects.outputs]
    assert [score.reward for score in scores] == [1.0, 1.0] and not effects.dead, "the verifier has read the answers"
    written = fold(*((0, score) for score in scores))
    assert not written.dead and len(written.outcomes) == len(written.rollouts) == 2
    for key, outcome in written.outcomes.items():
        rollout = written.rollouts[key]
        assert (outcome.kind, outcome.reward) == (OutcomeKind.RL, 1.0)
        assert outcome.not_trainable == reason
        assert offer_of(rollout, 0, 0, 0, 100).unfit == reason


def test_a_server_that_refuses_the_dialect_is_asked_without_it() -> None:
    server = FakeServer(refuses="return_token_ids")
    results = answered(server)
    first, second = server.bodies
    assert set(first) - set(second) == {
        *("return_token_ids", "logprobs", "top_logprobs", "top_k", "min_p", "repetition_penalty")
    }
    assert [result.status for result in results] == [Status.OK] * 2
    needed = FakeServer(refuses="top_k")
    assert [result.status for result in answered(needed, top_k=5)] == [Status.FAILED] * 2, "it would sample otherwise"


@pytest.mark.parametrize(
    ("card", "told", "sampling", "recorded"),
    [
        (OURS, None, {}, LogprobsMode.PROCESSED),
        (OURS, None, {"temperature": 0.7}, LogprobsMode.PROCESSED),
        (VLLM, None, {}, LogprobsMode.PROCESSED),
        (VLLM, None, {"temperature": 0.7}, LogprobsMode.RAW),
        (VLLM, None, {"top_p": 0.9}, LogprobsMode.RAW),
        (VLLM, LogprobsMode.PROCESSED, {"temperature": 0.7}, LogprobsMode.PROCESSED),
        (OTHER, None, {}, LogprobsMode.UNKNOWN),
        (OTHER, LogprobsMode.RAW, {}, LogprobsMode.PROCESSED),
        ({"logprobs_mode": "raw_logprobs"}, None, {"temperature": 0.7}, LogprobsMode.RAW),
        ({"logprobs_mode": "processed_logits"}, None, {}, LogprobsMode.UNKNOWN),
        ({"owned_by": "vllm", "logprobs_mode": ["x"]}, None, {}, LogprobsMode.UNKNOWN),
    ],
)
def test_the_mode_of_log_probs_is_the_servers_and_never_guessed(
    card: dict[str, str], told: LogprobsMode | None, sampling: dict[str, Any], recorded: LogprobsMode
) -> None:
    result, _ = answered(FakeServer(card=card), told, **sampling)
    assert result.logprobs_mode is recorded
    trained = not_trainable_by_ratio(sample_of(result)) is None
    assert trained == (recorded is LogprobsMode.PROCESSED and "top_p" not in sampling)


def test_a_plain_model_answers_without_any_acknowledged_version_and_is_recorded_under_its_own_name() -> None:
    server = FakeServer(ids=False)
    for result in answered(server, model="qwen2.5:1.5b"):
        assert result.status is Status.OK
        assert "gives no token ids" not in str(result.error)
        assert not_trainable_by_ratio(sample_of(result))
    assert {body["model"] for body in server.bodies if "messages" in body} == {"qwen2.5:1.5b"}


@pytest.mark.parametrize(
    ("server", "model", "environment", "asked"),
    [
        ("http://s:1", None, {}, ("http://s:1", None)),
        ("http://s:1", "m", {"INFERENCE_BASE_URL": "http://other", "VLLM_LORA_NAME": "lora"}, ("http://s:1", "m")),
        ("http://s:1", None, {"VLLM_LORA_NAME": "lora"}, ("http://s:1", None)),
        (None, None, {"INFERENCE_BASE_URL": "http://other:2/v1"}, ("http://other:2/v1", None)),
        (None, None, {"INFERENCE_BACKEND": "ollama", "VLLM_LORA_NAME": "lora"}, (OLLAMA, "lora")),
        (None, "m", {"INFERENCE_BACKEND": "ollama", "VLLM_LORA_NAME": "lora"}, (OLLAMA, "m")),
        (None, None, {"INFERENCE_BACKEND": "ollama", "INFERENCE_BASE_URL": "http://o:3"}, ("http://o:3", None)),
    ],
    ids=[
        *("an option", "options before variables", "a lora name belongs to the variables"),
        *("a url", "ollama", "ollama with a model", "ollama elsewhere"),
    ],
)
def test_server_and_model_of_a_worker(
    monkeypatch: pytest.MonkeyPatch,
    server: str | None,
    model: str | None,
    environment: dict[str, str],
    asked: tuple[str, str | None],
) -> None:
    for name in ("INFERENCE_BASE_URL", "INFERENCE_BACKEND", "VLLM_LORA_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert model_server(server, model) == asked


def test_a_worker_without_a_server_or_with_an_unknown_kind_of_one_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("INFERENCE_BASE_URL", raising=False)
    for backend in ("", "openai"):
        monkeypatch.setenv("INFERENCE_BACKEND", backend)
        with pytest.raises(CommandError, match="give --server URL, or set TENTALIS_SERVER or INFERENCE_BASE_URL") as no:
            model_server(None, "m")
        assert no.value.code == ExitCode.USAGE
    monkeypatch.setenv("INFERENCE_BACKEND", "olama")
    with pytest.raises(BadVariable, match="INFERENCE_BACKEND=olama: give ollama or openai"):
        model_server(None, None)
