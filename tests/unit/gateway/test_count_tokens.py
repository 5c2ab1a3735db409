"""Anthropic's count_tokens: asked of the backend that would answer, limited as other requests, and never recorded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tentalis.gateway.http.keys import Scope, create
from tests.support.gateway_lab import Lab, Script, lab

ASK: dict[str, Any] = {"model": "assistant", "system": "Be brief.", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("count"), Script(tokenize=(200, {"count": 7}))) as made:
        made.serve(3)
        yield made


def count(gateway: Lab, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return gateway.http.post("/v1/messages/count_tokens", json=ASK | more, headers=headers)


def test_the_tokenizer_sees_the_prompt_of_the_version_that_would_answer(gateway: Lab) -> None:
    answer = count(gateway, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024}, temperature=0.1)
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 7})
    asked = gateway.script.bodies[-1]
    assert asked["model"] == "assistant@v3"
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert asked["tools"][0]["function"]["name"] == "add"
    assert asked["chat_template_kwargs"]["enable_thinking"] is True
    assert set(asked) == {"model", "messages", "tools", "chat_template_kwargs"}, "nothing of the sampling"
    assert gateway.log.events == []
    assert gateway.metric("tentalis_gateway_key_tokens_total") == 0


def test_no_template_of_a_client_reaches_the_tokenizer(gateway: Lab) -> None:
    asked = len(gateway.script.bodies)
    for more in (
        {"chat_template": "{% for _ in range(10**9) %}{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    ):
        assert count(gateway, **more).status_code == 200, "a field that Anthropic's API does not have"
    assert len(gateway.script.bodies) == asked + 2
    assert "chat_template" not in str(gateway.script.bodies[asked:])


@pytest.mark.parametrize(
    ("tokenize", "status", "why"),
    [
        (None, 501, "does not count tokens"),
        ((405, {"detail": "no"}), 501, "does not count tokens"),
        ((200, {"tokens": [1]}), 502, "without a count"),
        ((200, [7]), 502, "without a count"),
        ((400, {"error": {"message": "the prompt is too long"}}), 400, "the prompt is too long"),
        ((500, {"error": {"message": "out of memory"}}), 500, "out of memory"),
    ],
)
def test_what_a_tokenizer_answers_else_is_an_error_in_anthropic_s_form(
    gateway: Lab, monkeypatch: pytest.MonkeyPatch, tokenize: Any, status: int, why: str
) -> None:
    monkeypatch.setattr(gateway.script, "tokenize", tokenize)
    answer = count(gateway)
    assert (answer.status_code, answer.json()["type"]) == (status, "error")
    assert why in answer.json()["error"]["message"]


def test_what_is_no_prompt_is_refused_before_a_backend_is_asked(gateway: Lab) -> None:
    asked = len(gateway.script.bodies)
    for body in ({"model": "assistant"}, ASK | {"messages": "hi"}, ASK | {"model": 7}):
        assert gateway.http.post("/v1/messages/count_tokens", json=body).status_code == 400, body
    assert len(gateway.script.bodies) == asked


def test_the_number_of_messages_is_limited_as_in_a_call(tmp_path: Path) -> None:
    with lab(tmp_path, Script(tokenize=(200, {"count": 7})), limits={"messages": 3}) as gateway:
        gateway.serve(1)
        turns = [{"role": ("user", "assistant")[at % 2], "content": "x"} for at in range(5)]
        answer = count(gateway, messages=turns)
        assert answer.status_code == 400 and "the limit is 3" in answer.json()["error"]["message"]
        assert gateway.script.bodies == []


def test_a_count_is_a_request_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ann = create(path, [Scope.CHAT], "ann", limits={"requests_per_minute": 2})
    reader = create(path, [Scope.EVENTS])
    with lab(tmp_path, Script(tokenize=(200, {"count": 7})), keys=path) as gateway:
        gateway.serve(1)
        heads = {"x-api-key": ann}
        assert [count(gateway, heads).status_code for _ in range(3)] == [200, 200, 429]
        assert count(gateway, {"x-api-key": reader}).status_code == 403
        assert count(gateway).status_code == 401
        refused = count(gateway, heads)
        assert refused.json()["error"]["type"] == "rate_limit_error" and int(refused.headers["Retry-After"]) > 0
