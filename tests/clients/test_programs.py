"""Programs of ten client libraries, unchanged but for base URL and key, through the gateway to a scripted model.

`make test-clients` runs them with the libraries' own environment, whose interpreter TENTALIS_CLIENTS names. Each test
holds what the program prints and what lands on the log, trainable or not, against what it should be.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.records import LogprobsMode, SessionEvent, Status
from schemas.tensors import int32_view
from tentalis.gateway.http.keys import Scope, create
from tests.support.client_model import TOKENS, client_model
from tests.support.gateway_lab import PROMPT_IDS, Lab, lab, listening

pytestmark = pytest.mark.clients
PROGRAMS = Path(__file__).with_name("programs")
PROCESSED = LogprobsMode.PROCESSED
"""The backend's log-probs are those of the sampling, so a library's own temperature does not end the training."""
QUESTION = "How is the weather in Oslo?"


@pytest.fixture
def python() -> str:
    found = os.environ.get("TENTALIS_CLIENTS")
    if not found:
        pytest.fail("TENTALIS_CLIENTS does not name the interpreter with the client libraries: use make test-clients")
    return found


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Lab, str]]:
    key = create(tmp_path / "keys.json", [Scope.CHAT], user="ana")
    with (
        listening(client_model()) as model,
        lab(
            tmp_path, keys=tmp_path / "keys.json", secret="of-the-backend", backend_url=model, logprobs_mode=PROCESSED
        ) as made,
    ):
        made.serve(3)
        yield made, key


def run(python: str, service: tuple[Lab, str], name: str, folder: Path) -> tuple[str, list[SessionEvent]]:
    """Runs a program to its end; returns what it printed last, and what is on the log."""
    made, key = service
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENAI_BASE_URL": f"{made.url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": made.url,
        "ANTHROPIC_API_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [python, str(PROGRAMS / f"{name}.py")],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1], made.log.events


def trainable(event: SessionEvent) -> None:
    """A turn as training needs it: the tokens as they were sampled, by the version that sampled them, of this user."""
    assert (event.status, event.not_trainable, event.turn_type) == (Status.OK, "", "main")
    assert (event.policy, event.model, event.user_id) == ("assistant", "assistant@v3", "ana")
    assert int32_view(event.prompt_token_ids).tolist() == PROMPT_IDS
    assert int32_view(event.response_token_ids).tolist() == [100 + at for at in range(TOKENS)]
    assert len(event.sampler_logprobs) == 4 * TOKENS


def test_openai(python: str, service: tuple[Lab, str], tmp_path: Path) -> None:
    said, events = run(python, service, "openai_chat", tmp_path)
    assert said == "It rains in Oslo."
    first, second = events
    trainable(first)
    trainable(second)
    assert first.session_id == second.session_id
    assert second.messages[-1].content == "Thanks, that helped!"


@pytest.mark.parametrize(
    "name",
    ["anthropic_tools", "langgraph_agent", "openai_agents", "pydantic_agent", "llama_index_agent"],
)
def test_agents_call_a_tool_and_answer(python: str, service: tuple[Lab, str], tmp_path: Path, name: str) -> None:
    """Two turns of one session: a tool call, then the answer, which follows on the tool's result."""
    said, events = run(python, service, name, tmp_path)
    assert said == "It rains in Oslo."
    first, second = events
    trainable(first)
    trainable(second)
    assert first.session_id == second.session_id
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("weather", '{"city": "Oslo"}')]
    assert QUESTION in [message.content for message in first.messages]
    assert (second.messages[-1].role, second.messages[-1].content) == ("tool", "rain")
    assert second.response == "It rains in Oslo."


def test_litellm(python: str, service: tuple[Lab, str], tmp_path: Path) -> None:
    said, events = run(python, service, "litellm_call", tmp_path)
    assert said == "It rains in Oslo."
    [event] = events
    trainable(event)


def test_instructor(python: str, service: tuple[Lab, str], tmp_path: Path) -> None:
    """A forced tool is answered and recorded, and never trained on: its tokens are not the policy's own choice."""
    said, events = run(python, service, "instructor_extract", tmp_path)
    assert said == "Oslo"
    [event] = events
    assert event.status is Status.OK and "constrained" in event.not_trainable
    assert [call.arguments for call in event.tool_calls] == ['{"city": "Oslo"}']


def test_smolagents(python: str, service: tuple[Lab, str], tmp_path: Path) -> None:
    """Its tool-calling agent asks for `tool_choice: required`: recorded as one session, and never trained on."""
    said, events = run(python, service, "smolagents_agent", tmp_path)
    assert said == "It rains in Oslo."
    first, second = events
    assert all(event.status is Status.OK and "forced tool" in event.not_trainable for event in events)
    assert first.session_id == second.session_id
    assert [call.name for event in events for call in event.tool_calls] == ["weather", "final_answer"]


def test_mini_swe_agent(python: str, service: tuple[Lab, str], tmp_path: Path) -> None:
    said, events = run(python, service, "mini_swe_agent", tmp_path)
    assert "rain" in said
    first, second = events
    trainable(first)
    trainable(second)
    assert first.session_id == second.session_id
    assert [call.name for event in events for call in event.tool_calls] == ["bash", "bash"]
    assert second.messages[-1].role == "tool" and "rain" in second.messages[-1].content
