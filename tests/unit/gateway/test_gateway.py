"""The pure parts of the gateway: which session, which turn, which backend; what is taken in, taken out and kept."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.tensors import float32_view, int32_view
from tentalis.gateway.backends.routing import route
from tentalis.gateway.calls.backend_request import backend_request, refuses_token_ids
from tentalis.gateway.calls.capture import AnswerCapture, RequestedFields, strip_unrequested
from tentalis.gateway.calls.housekeeping import side_sign
from tentalis.gateway.calls.session_id import READ_CHARS, call_session, derived_session_id, recorded
from tentalis.gateway.http.bodies import parse_object
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.keys import Caller
from tentalis.gateway.http.sse import EventParser
from tentalis.gateway.protocols.messages import checked
from tentalis.gateway.settings import BadGateway, GatewaySettings
from tentalis.inference.chat_messages import normalised, text_of

texts = st.text(st.characters(codec="utf-8"), max_size=40)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
contents = st.one_of(
    st.none(),
    texts,
    st.lists(
        st.one_of(
            texts,
            st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
            st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": texts})}),
        ),
        max_size=3,
    ),
)
histories = st.lists(st.fixed_dictionaries({"role": roles, "content": contents}), min_size=1, max_size=6)


def _user(*said: str, system: str | None = None) -> tuple[Any, ...]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return normalised(head + [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)])


# Sessions and turns


@given(histories, histories)
def test_a_conversation_that_goes_on_stays_one_session_for_one_owner(begin: list[Any], more: list[Any]) -> None:
    first = [{"role": "user", "content": "it begins"}, *begin]
    whole = [*first, *more]
    # A later system message of a history that began without one makes another beginning: clients do not send that.
    if not any(m["role"] in ("system", "developer") for m in whole):
        assert derived_session_id("k", "u", normalised(first)) == derived_session_id("k", "u", normalised(whole))
    assert derived_session_id("k", "u", normalised(first)) != derived_session_id("other", "u", normalised(first))
    assert derived_session_id("k", "u", normalised(first)) != derived_session_id("k", "other", normalised(first))


@pytest.mark.parametrize(
    ("one", "later"),
    [
        ("It is Sunday, 30 November 2026, 11:59 PM.", "It is Monday, 1 December 2026, 12:02 AM."),
        ("build=2.1.37; cch=fa690;\nYou are terse.", "build=2.1.38; cch=0be71;\nYou are terse."),
        ("Today: 2026-11-22T14:03:11Z  (Sun)", "Today: 2026-11-22T14:04:57Z (Sun)"),
    ],
)
def test_the_time_in_a_system_message_makes_no_new_session(one: str, later: str) -> None:
    def session(system: str, *said: str) -> str:
        return derived_session_id("k", "u", _user(*said, system=system))

    assert session(one, "hi") == session(later, "hi", "hello", "and now?")
    assert session(one, "hi") != session(one, "hello") and session(one, "hi") != session(f"{one} Be rude.", "hi")


LONG = " ".join("".join(chr(97 + int(digit)) for digit in str(at)) for at in range(30_000))  # words without digits


def test_a_guessed_session_reads_the_beginning_of_a_long_text() -> None:
    def session(system: str, said: str = "hi") -> str:
        return derived_session_id("k", "u", _user(said, system=system))

    def cpu_s(texts: int) -> float:
        text, began = LONG * texts, time.process_time()
        session(text)
        return time.process_time() - began

    assert len(LONG) > 2 * READ_CHARS
    times = [min(cpu_s(texts) for _ in range(3)) for texts in (1, 100)]
    assert times[1] < 5 * times[0], times
    assert session(f"It is Sunday, 9:59 PM. {LONG}") == session(f"It is Wednesday, 10:02 AM. {LONG}")
    assert session(LONG) != session(f"Be rude. {LONG}")
    assert session("", LONG) not in (session("", LONG[:-1]), session("", "x" + LONG[1:]))


def test_the_guessed_session_of_a_text_of_the_usual_length_stays_the_same() -> None:
    """A release in the middle of a conversation."""
    system = ("It is Sunday, 2:03 PM. Be brief. " + "é word " * 20_000)[:READ_CHARS]
    guessed = derived_session_id("owner", "ann", _user("x" * READ_CHARS, system=system))
    assert guessed == "auto-5f114845-d3f5-5554-bd06-cde432e9370c"


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        (
            "Read HEARTBEAT.md if it exists (workspace context). If nothing needs attention, reply HEARTBEAT_OK.",
            "heartbeat",
        ),
        (
            "Pre-compaction memory flush. Store durable memories now. If nothing to store, reply with NO_REPLY.",
            "memory",
        ),
        ("Your task is to create a detailed summary of the conversation so far", "memory"),
        (
            "### Task:\nGenerate a concise, 3-5 word title with an emoji of the chat history.\n### Chat History:",
            "title",
        ),
        ("Please write a 5-10 word title for the following conversation:\nUser: hi", "title"),
        ("### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history", "tags"),
        ("### Task:\nSuggest 3-5 relevant follow-up questions or prompts", "tags"),
        ("Analyze if this message indicates a new conversation topic.", "tags"),
    ],
)
def test_housekeeping_is_told_by_what_it_looks_like(text: str, sign: str) -> None:
    assert side_sign(_user(text), {}) == sign


@pytest.mark.parametrize(
    "text",
    [
        "Write a title for my blog post about cats",
        "What is a heartbeat?",
        "Summarize this article about memory",
        "Suggest a good title for a talk",
        "Generate some tags for my photo of Paris",
        "How do I flush the DNS cache, and what is memory pressure?",
        "What is the heart rate of a mouse?",
        "Give me a summary of the French Revolution",
        "Create a chat server in Python",
    ],
)
def test_what_people_ask_is_a_main_turn(text: str) -> None:
    assert side_sign(_user(text), {}) is None
    assert side_sign(_user(text, system="You are a helpful assistant."), {}) is None
    assert side_sign(_user("hi", "hello", text), {}) is None


def test_a_title_generator_and_a_probe_are_side_turns() -> None:
    system = "You are a title generator. You output ONLY a thread title. Nothing else."
    assert side_sign(_user("How do I cook rice?", system=system), {}) == "title"
    assert side_sign(_user("quota"), {"max_tokens": 1}) == "probe"


def _turn(headers: dict[str, str], body: dict[str, Any], default: str = "guess", namespace: str = "") -> Any:
    return call_session(headers, body, _user("hi"), namespace=namespace, owner="", user_id="", default=default)


@given(
    st.sampled_from([None, "main", "side"]), st.sampled_from([None, "main", "side"]), st.sampled_from(["main", "side"])
)
def test_the_header_decides_before_the_body_and_that_before_the_default(
    header: str | None, body: str | None, default: str
) -> None:
    turn = _turn({"x-turn-type": header} if header else {}, {"turn_type": body} if body else {}, default)
    assert turn.turn_type == (header or body or default)
    assert turn.decided_by == ("header" if header else "body" if body else "default")


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_no_two_users_share_a_session(one: str, other: str, first: str, second: str) -> None:
    def session(user: str, shown: str) -> str | None:
        caller = Caller(key_id="k", user=user or None)
        try:
            return str(_turn({"x-session-id": shown}, {}, namespace=caller.namespace(caller.user_id(None))).session_id)
        except APIError:
            return None

    a, b = session(one, first), session(other, second)
    if a is not None and a == b:
        assert one == other


@pytest.mark.parametrize("shown", ["a b", "a\r\nb", "é", "x" * 201, "\x00"])
def test_a_session_id_that_cannot_stand_in_a_header_is_refused(shown: str) -> None:
    with pytest.raises(APIError):
        _turn({}, {"session_id": shown})


def test_only_the_value_off_opts_out_of_recording() -> None:
    assert recorded({}) and recorded({"x-tentalis-record": "ON"}) and not recorded({"x-tentalis-record": " Off "})
    with pytest.raises(APIError):
        recorded({"x-tentalis-record": "no"})


# Messages and bodies


@given(histories)
def test_normalised_messages_are_texts_in_the_same_order(history: list[dict[str, Any]]) -> None:
    found = normalised(checked(history, 100))
    assert len(found) == len(history)
    for was, now in zip(history, found, strict=True):
        assert now.role == ("system" if was["role"] == "developer" else was["role"])
        assert now.content == text_of(was["content"])
        if isinstance(was["content"], str):
            assert now.content == was["content"]


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_are_refused(data: bytes) -> None:
    try:
        body = parse_object(data)
    except APIError as error:
        assert error.status == 400
    else:
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("depth", [100, 101])
@pytest.mark.parametrize("begin,end", [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_is_bounded(depth: int, begin: bytes, end: bytes) -> None:
    data = b'{"x":' + begin * (depth - 1) + b"1" + end * (depth - 1) + b"}"
    if depth <= 100:
        assert json.loads(data) == parse_object(data)
        return
    with pytest.raises(APIError, match="nested deeper than 100") as refused:
        parse_object(data)
    assert refused.value.status == 400


# Streams


@given(st.lists(texts.filter(lambda t: "\n" not in t and "\r" not in t), max_size=6), st.data(), st.booleans())
def test_events_are_the_same_however_their_bytes_are_cut(said: list[str], data: Any, windows: bool) -> None:
    end = "\r\n" if windows else "\n"
    whole = "".join(f": ping{end}event: x{end}data: {text}{end}{end}" for text in said).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    events, found = EventParser(), []
    for begin, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += events.feed(whole[begin:stop])
    assert [each.decode() for each in found + events.close()] == said


@given(st.lists(st.tuples(texts, st.integers(0, 2**31 - 1), st.floats(-50, 0, width=32)), min_size=1, max_size=8))
def test_a_stream_and_a_whole_answer_are_taken_in_alike(tokens: list[tuple[str, int, float]]) -> None:
    def choice(part: list[tuple[str, int, float]], kind: str, last: bool) -> dict[str, Any]:
        return {
            "index": 0,
            kind: {"content": "".join(text for text, _, _ in part)},
            "token_ids": [token for _, token, _ in part],
            "logprobs": {"content": [{"logprob": value} for _, _, value in part]},
            "finish_reason": "stop" if last else None,
        }

    whole, streamed = AnswerCapture(), AnswerCapture()
    whole.add({"model": "m", "prompt_token_ids": [1, 2], "choices": [choice(tokens, "message", True)]})
    streamed.add({"model": "m", "prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"content": ""}}]})
    for at, token in enumerate(tokens):
        assert not streamed.finished
        streamed.add({"model": "m", "choices": [choice([token], "delta", at + 1 == len(tokens))]})
    assert streamed.finished and whole.finished
    assert (whole.text, whole.encoded_tokens(), whole.finish_reason) == (
        streamed.text,
        streamed.encoded_tokens(),
        "stop",
    )
    found = whole.encoded_tokens()
    assert found is not None
    assert int32_view(found[1]).tolist() == [token for _, token, _ in tokens]
    assert float32_view(found[2]).tolist() == [value for _, _, value in tokens]


json_values: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "message",
                    "index",
                    "token_ids",
                    "logprobs",
                    "content",
                    "tool_calls",
                    "function",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["choices", "model", "usage", "prompt_token_ids"]), json_values, max_size=4))
def test_no_answer_of_a_backend_breaks_the_taking_in(answer: dict[str, Any]) -> None:
    capture = AnswerCapture()
    capture.add(answer)
    assert isinstance(capture.text, str) and isinstance(capture.tool_calls, tuple)
    capture.encoded_tokens()
    strip_unrequested(answer, RequestedFields())


def test_choices_without_a_number_are_counted_as_they_stand() -> None:
    capture = AnswerCapture(2)
    capture.add({"choices": [{"message": {"content": text}, "finish_reason": "stop"} for text in ("one", "two")]})
    assert (capture.text, capture.finished) == ("one", True)


def test_tokens_that_do_not_fit_together_are_none() -> None:
    capture = AnswerCapture()
    capture.add(
        {"prompt_token_ids": [1], "choices": [{"token_ids": [1, 2], "logprobs": {"content": [{"logprob": 0.0}]}}]}
    )
    assert capture.has_token_ids and capture.encoded_tokens() is None


# Routing


def _settings(**policy: Any) -> GatewaySettings:
    return GatewaySettings.model_validate(
        {
            "backends": [
                {"name": "a", "url": "http://a:1/v1", "server_id": "sa"},
                {"name": "b", "url": "https://b:2"},
            ],
            "policies": [{"name": "assistant", "backend": "a", "models": ["gpt-*"]} | policy],
        }
    )


def _routed(
    settings: GatewaySettings,
    model: str | None,
    *served: str,
    user: str = "",
    worker: str = "",
    assigned: dict[str, str] | None = None,
) -> Any:
    assigned = assigned or {}
    versions = dict(name.rsplit("@v", 1) for name in served)
    return route(
        settings,
        model,
        user_id=user,
        worker_id=worker,
        served=lambda server, policy: (
            f"{policy}@v{versions[policy]}" if policy in versions and server == "sa" else None
        ),
        assigned=lambda server, policy: assigned.get(policy) if server == "sa" else None,
        base_models={"a": ("base",), "b": ("big", "small")},
    )


def test_a_model_is_a_version_a_policy_a_base_model_or_a_pattern() -> None:
    settings = _settings()
    for model, backend, sent in (
        ("assistant", "a", "assistant@v3"),
        ("gpt-4o-mini", "a", "assistant@v3"),
        (None, "a", "assistant@v3"),
        ("assistant@v1", "a", "assistant@v1"),
        ("base", "a", "base"),
        ("small", "b", "small"),
    ):
        found = _routed(settings, model, "assistant@v3")
        assert (found.backend.name, found.model) == (backend, sent), model
    with pytest.raises(APIError) as refused:
        _routed(settings, "claude", "assistant@v3")
    assert refused.value.status == 404 and "assistant" in str(refused.value)
    unserved = _routed(settings, "assistant")
    assert (unserved.model, unserved.unserved) == ("base", True)


def test_an_assignment_chooses_the_version_of_a_policy_and_of_no_version_that_the_client_named() -> None:
    settings, chosen = _settings(workers={"w": "own"}), {"assistant": "terse@v7"}
    found = _routed(settings, "assistant", "assistant@v3", assigned=chosen)
    assert (found.model, found.policy, found.assigned, found.pinned) == ("terse@v7", "terse", True, False)
    pinned = _routed(settings, "assistant@v1", "assistant@v3", assigned=chosen)
    assert (pinned.model, pinned.assigned) == ("assistant@v1", False)
    assert _routed(settings, "base", "assistant@v3", assigned=chosen).model == "base"
    personal = _routed(settings, "assistant", "assistant@v3", "own@v2", worker="w", assigned=chosen)
    assert personal.model == "own@v2", "tasks of the personal policy have assignments by its own name"


def test_users_and_workers_have_adapters_of_their_own_once_they_are_served() -> None:
    settings = _settings(users={"ann": "for-ann"}, workers={"w": "for-w"})
    assert _routed(settings, "assistant", "assistant@v3", user="ann").model == "assistant@v3"
    assert _routed(settings, "assistant", "assistant@v3", "for-ann@v1", user="ann").policy == "for-ann"
    assert _routed(settings, "assistant", "assistant@v3", "for-ann@v1", user="bob").model == "assistant@v3"
    assert _routed(settings, "assistant", "assistant@v3", "for-w@v2", worker="w").model == "for-w@v2"
    assert _routed(settings, "for-ann@v1", "for-ann@v1", user="ann").pinned
    with pytest.raises(APIError):  # somebody else's
        _routed(settings, "for-ann@v1", "for-ann@v1", user="bob")
    shared = _settings(users={"ann": "for-two", "bob": "for-two", "cem": "assistant"})
    assert shared.policy_owners == {"for-two": frozenset({"ann", "bob"})}, "what is everybody's is nobody's own"


def test_only_sampling_parameters_that_the_client_left_out_are_set() -> None:
    to = _routed(_settings(), "assistant", "assistant@v1")
    sent = backend_request({"temperature": 0.3, "session_id": "s"}, to, chat=True, tokens=True).body
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["model"]) == (0.3, 1.0, 0, "assistant@v1")
    assert sent["logprobs"] is True and sent["return_token_ids"] is True and "session_id" not in sent
    plain = backend_request({"temperature": 0.3}, to, chat=True, tokens=False).body
    assert plain == {"temperature": 0.3, "model": "assistant@v1"}
    assert refuses_token_ids(400, "unknown field return_token_ids") and not refuses_token_ids(400, "too long")


def test_settings_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    for text, said in (
        ("[", "not YAML"),
        ("backends: [{name: a, url: 'http://h', url: 'http://i'}]", "url: duplicate key"),
        ("backends: []", "backends"),
        ("backends: [{name: a, url: nowhere}]", "http://"),
        ("backends: [{name: a, url: 'http://u:p@h'}]", "key_env or key_file"),
        ("backends: [{name: a, url: 'http://h'}]\npolicies: [{name: p, backend: b}]", "'b'"),
        ("backends: [{name: a, url: 'http://h'}]\npolicies: [{name: p, backend: a}]", "server_id"),
        ("backends: [{name: a, url: 'http://h'}]\nspeed: 3", "speed"),
        ("backends: [{name: a, url: 'http://h'}]\ngateway_id: ../..", "gateway_id"),
        (
            "backends: [{name: a, url: 'http://h', server_id: s}]\npolicies: [{name: a b, backend: a}]",
            "policies.0.name",
        ),
    ):
        path.write_text(text)
        with pytest.raises(BadGateway, match=said):
            GatewaySettings.from_file(path)


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "", "a b"])
def test_a_gateways_name_is_no_path(name: str) -> None:
    with pytest.raises(BadGateway, match=r"^gateway_id: "):
        GatewaySettings.simple("http://h", server_id="s", policy=None, gateway_id=name)
