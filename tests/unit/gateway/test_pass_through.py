"""Embeddings and rerankings: passed to the backend that serves the model, limited as calls are, and never recorded."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tentalis.gateway.calls.pass_through import PATHS
from tentalis.gateway.http.keys import Scope, create
from tests.support.gateway_lab import Lab, Script, lab, wait_for

VECTOR = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}
EMBEDDED = {"object": "list", "model": "embed", "data": [VECTOR], "usage": {"prompt_tokens": 4, "total_tokens": 4}}
RANKED = {"id": "r", "model": "embed", "results": [{"index": 1, "relevance_score": 0.9}], "usage": {"total_tokens": 9}}
ASK = {"model": "embed", "input": "hi"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    script = Script(models=("base", "embed"), vectors=(200, EMBEDDED))
    with lab(tmp_path_factory.mktemp("vectors"), script, secret="sk-backend") as made:
        made.serve(1)
        yield made


def test_openai_s_client_gets_its_vectors_and_nothing_is_recorded(gateway: Lab) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0)
    answer = client.embeddings.create(model="embed", input=["hi"], encoding_format="float")
    assert answer.data[0].embedding == [0.5, -0.25] and answer.usage.total_tokens == 4
    assert gateway.script.bodies[-1] == {"model": "embed", "input": ["hi"], "encoding_format": "float"}
    assert gateway.script.heads[-1]["authorization"] == "Bearer sk-backend"
    assert gateway.log.events == []
    assert gateway.metric("tentalis_gateway_calls_total", path="/v1/embeddings", status="200") == 1
    assert gateway.metric("tentalis_gateway_key_tokens_total") == 4


def test_a_reranking_is_passed_on(gateway: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.script, "vectors", (200, RANKED))
    body = {"model": "embed", "query": "q", "documents": ["a", "b"], "session_id": "ours"}
    answer = gateway.http.post("/v1/rerank", json=body)
    assert (answer.status_code, answer.json()) == (200, RANKED)
    assert "session_id" not in gateway.script.bodies[-1], "a field of the gateway"


@pytest.mark.parametrize(
    ("vectors", "status", "why"),
    [
        (None, 501, "the backend local has no /v1/embeddings"),
        ((400, {"error": {"message": "too long for sk-backend"}}), 400, "too long for [key]"),
        ((503, {"error": {"message": "loading"}}), 503, "loading"),
    ],
)
def test_errors_of_the_backend_are_passed_on(
    gateway: Lab, monkeypatch: pytest.MonkeyPatch, vectors: Any, status: int, why: str
) -> None:
    monkeypatch.setattr(gateway.script, "vectors", vectors)
    answer = gateway.http.post("/v1/embeddings", json=ASK)
    assert answer.status_code == status and why in answer.json()["error"]["message"]


def test_only_a_base_model_makes_vectors(gateway: Lab) -> None:
    """The patterns of a policy would send any name to the policy."""
    asked = len(gateway.script.bodies)
    for model, status in (("assistant", 404), ("text-embedding-3-small", 404), (None, 400), (7, 400)):
        answer = gateway.http.post("/v1/embeddings", json={"model": model, "input": "hi"})
        assert answer.status_code == status, (model, answer.text)
    assert "base, embed" in gateway.http.post("/v1/embeddings", json=ASK | {"model": "x"}).json()["error"]["message"]
    assert len(gateway.script.bodies) == asked


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "brought", [{"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}]
)
def test_a_client_s_chat_template_does_not_reach_the_backend(gateway: Lab, path: str, brought: dict[str, Any]) -> None:
    asked = len(gateway.script.bodies)
    answer = gateway.http.post(path, json=ASK | brought)
    assert answer.status_code == 400 and "chat_template is not allowed here" in answer.json()["error"]["message"]
    assert len(gateway.script.bodies) == asked


def test_an_operator_may_allow_chat_templates(tmp_path: Path) -> None:
    script = Script(models=("base", "embed"), vectors=(200, EMBEDDED))
    with lab(tmp_path, script, client_templates=True) as gateway:
        gateway.serve(1)
        assert gateway.http.post("/v1/embeddings", json=ASK | {"chat_template": "{{ 1 }}"}).status_code == 200
        assert script.bodies[-1]["chat_template"] == "{{ 1 }}"


def test_a_key_needs_the_scope_and_has_its_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ann = create(path, [Scope.CHAT], "ann", limits={"tokens_per_day": 5, "running": 1})
    reader = create(path, [Scope.EVENTS])
    script = Script(models=("base", "embed"), vectors=(200, EMBEDDED))
    with lab(tmp_path, script, keys=path) as gateway:
        gateway.serve(1)

        def ask(key: str | None) -> httpx.Response:
            return gateway.http.post("/v1/embeddings", json=ASK, headers={"x-api-key": key} if key else None)

        assert [ask(key).status_code for key in (None, reader, ann)] == [401, 403, 200]
        script.gate, status = threading.Event(), []
        waiting = threading.Thread(target=lambda: status.append(ask(ann).status_code))
        waiting.start()
        wait_for(lambda: len(script.bodies) == 2, "the second call is at the backend")
        assert "1 calls at the same time" in ask(ann).text
        script.gate.set()
        waiting.join(60)
        assert status == [200]
        assert ask(ann).json()["error"]["type"] == "insufficient_quota", "the budget of 5 tokens is spent"


def test_a_client_that_hangs_up_frees_the_backend(gateway: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.script, "gate", threading.Event())
    gateway.script.cancelled.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gateway.url}/v1/embeddings", json=ASK, timeout=0.5)
    wait_for(gateway.script.cancelled.is_set, "the backend's call is cancelled")
