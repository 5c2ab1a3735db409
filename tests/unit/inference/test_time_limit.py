"""Work with a time limit: a model's chat template that never ends."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tentalis.inference import api, wire
from tentalis.inference.time_limit import within

ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "time limit"]


def test_the_value_and_the_error_of_the_work_come_through() -> None:
    assert asyncio.run(within(60, lambda: "text")) == "text"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(within(60, lambda: 1 // 0))


def test_a_template_that_never_ends_is_interrupted_while_others_are_served() -> None:
    template = ImmutableSandboxedEnvironment().from_string(ENDLESS)

    async def beside() -> int:
        ticks, ends = 0, asyncio.get_running_loop().create_task(within(0.1, template.render))
        while not ends.done():
            await asyncio.sleep(0.005)
            ticks += 1
        with pytest.raises(TimeoutError):
            ends.result()
        return ticks

    assert asyncio.run(beside()) >= 3
    for thread in threads():
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("route", ["chat", "tokenize"])
def test_the_model_server_refuses_a_request_whose_template_takes_too_long(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ImmutableSandboxedEnvironment().from_string(ENDLESS)
    monkeypatch.setattr(api, "TEMPLATE_LIMIT_S", 0.05)
    server: Any = object.__new__(api.InferenceApi)
    server._parse = lambda request, kind: asyncio.sleep(0, kind.model_validate({"messages": [{"role": "user"}]}))
    server._resolve = lambda model: ("tiny", None)
    server._render = lambda messages, body: template.render()
    request: Any = SimpleNamespace(state=SimpleNamespace(large=False))
    began = time.monotonic()
    with pytest.raises(wire.InvalidRequest, match=r"takes longer than 0\.05 s"):
        asyncio.run(getattr(server, route)(request))
    assert time.monotonic() - began < 30
