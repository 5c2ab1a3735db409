"""One client of a gateway cannot take what the others need: limits per key and per request, and templates."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tentalis.gateway.api.events import LiveEvents
from tentalis.gateway.api.groups import halted
from tentalis.gateway.api.training import GroupAnswer
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import Caller, Scope, create
from tentalis.gateway.http.usage import KeyUsage
from tests.support.gateway_lab import Lab, lab


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, dict[str, str], dict[str, str]]]:
    """A gateway with small limits, and the headers of two keys."""
    folder = tmp_path_factory.mktemp("limits")
    heads = [{"Authorization": f"Bearer {create(folder / 'keys.json', [Scope.CHAT], user)}"} for user in ("ann", "bob")]
    limits = {"requests_per_minute": 8, "messages": 5, "choices": 3, "stops": 2}
    with lab(folder, keys=folder / "keys.json", limits=limits) as made:
        made.serve(1)
        yield made, heads[0], heads[1]


def test_what_a_request_may_ask_for_is_bounded(keyed: tuple[Lab, dict[str, str], dict[str, str]]) -> None:
    gateway, ann, _ = keyed
    asked = len(gateway.script.bodies)
    for more, why in (
        ({"n": 100_000_000}, "100,000,000 answers are asked for"),
        ({"stop": ["a", "b", "c"]}, "stop has 3 strings"),
        ({"chat_template": "{% for _ in range(10**9) %}{% endfor %}"}, "chat_template is not allowed here"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template is not allowed here"),
        ({"chat_template_kwargs": {"padding": "max_length", "max_length": 10**9}}, "must not set padding"),
        ({"chat_template_kwargs": {"truncation": True, "max_length": 5}}, "must not set truncation"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object"),
    ):
        answer = gateway.chat("hi", headers=ann, **more)
        assert (answer.status_code, why in answer.text) == (400, True), (more, answer.text)
    many = gateway.chat(*["x"] * 6, headers=ann)
    assert many.status_code == 400 and "there are 6 messages; the limit is 5" in many.text
    assert len(gateway.script.bodies) == asked


def test_a_key_that_asks_too_often_waits_and_the_others_do_not(
    keyed: tuple[Lab, dict[str, str], dict[str, str]],
) -> None:
    gateway, ann, bob = keyed
    answers = [gateway.chat("hi", headers=ann) for _ in range(9)]
    refused = answers[-1]
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert gateway.chat("hi", headers=bob).status_code == 200
    assert gateway.metric("tentalis_gateway_key_requests_total", result="refused") > 0
    assert gateway.metric("tentalis_gateway_key_tokens_total") > 0


def test_an_operator_can_allow_templates(tmp_path: Path) -> None:
    with lab(tmp_path, client_templates=True) as gateway:
        gateway.serve(1)
        assert gateway.chat("hi", chat_template="{{ messages }}").status_code == 200
        variables = {"chat_template": "{{ style }}", "style": "short"}
        assert gateway.chat("hi", chat_template_kwargs=variables).status_code == 200
        assert gateway.script.bodies[-1]["chat_template_kwargs"] == variables
        refused = gateway.chat("hi", chat_template_kwargs=variables | {"tokenizer_kwargs": {"padding": "max_length"}})
        assert refused.status_code == 400 and "must not set tokenizer_kwargs" in refused.text


def test_tokens_and_running_calls_are_limited_and_the_window_moves_on() -> None:
    now = [0.0]
    usage = KeyUsage(KeyLimits(tokens_per_minute=10, running=1), lambda: now[0])
    k, other = Caller(key_id="k"), Caller(key_id="other")
    usage.admit(k)
    usage.spend(k, 10)
    with pytest.raises(APIError, match="10 tokens per minute") as error:
        usage.admit(k)
    assert (error.value.status, error.value.retry_after_s) == (429, 60)
    now[0] = 60.0
    usage.admit(k)
    with usage.running(k):
        with pytest.raises(APIError, match="1 calls at the same time"), usage.running(k):
            pass
        with usage.running(other):
            pass
    with usage.running(k):
        pass
    for _ in range(20_000):
        usage.admit(Caller())
    assert {key: (use.requests, use.refused) for key, use in usage.by_key().items()} == {
        "k": (2, 2),
        "other": (0, 0),
        "": (20_000, 0),
    }


def test_one_key_cannot_take_every_event_stream() -> None:
    async def scenario() -> None:
        events, names = LiveEvents(), frozenset({"task"})
        streams = [events.watch(names, "ann", 60, key_id="k", max_of_key=2) for _ in range(3)]
        first = [await anext(stream) for stream in streams]
        assert [b"watching" in piece for piece in first] == [True, True, False]
        with pytest.raises(APIError, match="2 open event streams") as error:
            events.watch(names, "ann", 60, key_id="k", max_of_key=2)
        assert error.value.status == 429
        other = events.watch(names, "bob", 60, key_id="l", max_of_key=2)
        assert b"watching" in await anext(other)
        for stream in (*streams, other):
            await stream.aclose()

    asyncio.run(scenario())


def test_only_an_admin_s_key_without_a_user_sees_everybody() -> None:
    assert Caller().sees_everybody
    assert Caller(key_id="a", scopes=frozenset({Scope.ADMIN})).sees_everybody
    assert not Caller(key_id="a", scopes=frozenset({Scope.TASKS, Scope.EVENTS})).sees_everybody
    assert not Caller(key_id="a", scopes=frozenset({Scope.ADMIN}), user="ann").sees_everybody


def test_health_names_an_application_without_a_process() -> None:
    groups = {
        "tentalis-sessions": GroupAnswer(state="inactive", members=0, lag=7),
        "tentalis-join": GroupAnswer(state="active", members=1, lag=0),
        "tentalis-trainer-p": GroupAnswer(state="inactive", members=0, lag=0),
    }
    assert halted(groups) == ["sessions"]
