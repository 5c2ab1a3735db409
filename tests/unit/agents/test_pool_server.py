"""The pool of environments over real HTTP: its leases, and our client against it."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from schemas.records import Ending, Message, Result, Status, Task, Verifier
from tentalis.agents.environments import Environment, EnvironmentFault, EnvironmentOptions, Observation, Transition
from tentalis.agents.environments.echo import EchoEnvironment
from tentalis.agents.environments.env_pool import EnvPoolEnvironment
from tentalis.agents.environments.folders import PREFIX
from tentalis.agents.environments.stoppable import StuckThread, run_stoppable
from tentalis.agents.environments.terminal import TerminalEnvironment
from tentalis.agents.environments.toolcall import ToolcallEnvironment
from tentalis.agents.pool.app import build_app
from tentalis.agents.pool.leases import LeasePool, PoolLimits
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.cli.main import app
from tentalis.cli.shared.metrics_page import catalogue
from tentalis.policies.served import ServedVersions
from tentalis.rewards.environment_file import EnvironmentServer
from tentalis.service import variables
from tests.support.episode_server import EpisodeServer
from tests.support.gateway_lab import listening
from tests.support.kafka_fixture import eventually
from tests.support.loop_records import T0, ack, task
from tests.support.walls import available_wall
from tests.support.worker_lab import policy_calls


class Waiter:
    """Waits in a step until it is stopped, or for `seconds`; a step `fail` is a fault."""

    wall = "glass/1"

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.runs, self.closed = seconds, threading.Event(), threading.Event()
        self.stopped = threading.Event()

    async def reset(self, of: Task) -> Observation:
        return Observation((Message(role="system", content="Wait."), *of.messages))

    async def step(self, action: str) -> Transition:
        if action == "fail":
            raise EnvironmentFault("no sandbox")
        if action == "stuck":
            self.runs.set()
            try:
                await asyncio.sleep(30)
            finally:
                raise StuckThread("a step did not end")
        stop = threading.Event()
        self.runs.set()

        def wait() -> None:
            if stop.wait(self.seconds):
                self.stopped.set()

        await run_stoppable(wait, stop.set)
        return Transition(Observation((Message(role="user", content=f"waited {action}"),)), {"turn": 0.5})

    async def score(self) -> Mapping[str, float]:
        return {"reward": 0.25}

    async def close(self) -> None:
        assert not self.closed.is_set(), "closed once"
        self.closed.set()


class SlowEnding(Waiter):
    """Needs time for its score, whose limit it names, and for its close."""

    score_s = 5.0

    async def score(self) -> Mapping[str, float]:
        await asyncio.sleep(0.4)
        return {"reward": float("nan")} if self.stopped.is_set() else {"reward": 0.5}

    async def close(self) -> None:
        self.runs.set()
        await asyncio.sleep(0.3)
        await super().close()


@dataclass
class Pool:
    """A pool on a port. `made`: its environments, in the order of their resets."""

    url: str
    leases: LeasePool
    made: list[Any]
    http: httpx.Client

    def call(self, path: str, key: str | None = None, **body: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.http.post(f"{self.url}/{path}", json=body, headers=headers, timeout=10)

    def lease(self, request_id: str | None = None, **body: Any) -> str:
        answer = self.call("allocate", task_key="t", request_id=request_id, **body).json()
        assert answer["ok"]
        return str(answer["lease_id"])

    def begun(self, request_id: str | None = None) -> dict[str, Any]:
        """Allocates and resets; returns what later calls name."""
        given = self.call("allocate", task_key="t", request_id=request_id).json()
        begun = {"lease_id": given["lease_id"], "holder": given["holder"]}
        answer = self.call("reset", **begun, task_meta={"instruction": "wait"}).json()
        assert answer["ok"], answer
        return begun

    def turn(self, begun: dict[str, Any], text: str) -> httpx.Response:
        return self.call("exec_tool", **begun, tool_call={"name": "turn", "arguments": {"text": text}})


@contextmanager
def pool_of(
    make: Callable[[], Environment] = Waiter, environment: str = "echo", key: str | None = None, **limits: Any
) -> Iterator[Pool]:
    made: list[Environment] = []

    def making() -> Environment:
        made.append(make())
        return made[-1]

    leases = LeasePool(making, PoolLimits(**limits))
    with httpx.Client() as http, listening(build_app(leases, environment, key)) as url:
        yield Pool(url, leases, made, http)


def test_a_request_has_one_lease_and_a_full_pool_answers_429() -> None:
    with pool_of(places=2) as pool:
        first = pool.call("allocate", task_key="t", request_id="a").json()
        again = pool.call("allocate", task_key="t", request_id="a").json()
        assert (first["reused"], again["reused"]) == (False, True) and first["lease_id"] == again["lease_id"]
        assert first["lease_s"] == 120.0
        other = pool.lease()
        full = pool.call("allocate", task_key="t", request_id="b")
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert full.json() == {
            "ok": False,
            "error": "all 2 places of the pool are taken",
            "code": "PLACES_EXHAUSTED",
        }
        assert pool.call("close", lease_id=other).json() == {"ok": True, "found": True}
        assert pool.call("close", lease_id=other).json() == {"ok": True, "found": False}
        assert pool.lease("b") != other
        assert pool.leases.counts.allocations == {"new": 3, "reused": 1, "full": 1}


def test_a_lease_without_a_heartbeat_is_closed_and_one_with_heartbeats_stays() -> None:
    with pool_of(lease_s=3.0) as pool:
        lost, kept = pool.begun("a"), pool.begun("b")
        (first, second), began = pool.leases._leases.values(), time.monotonic()
        assert pool.call("heartbeat", **kept).json() == {"ok": True} and second.seen >= began
        first.seen -= 10.0
        assert pool.made[0].closed.wait(5)
        assert pool.leases.counts.expired == 1 and not pool.made[1].closed.is_set()
        refused = pool.turn(lost, "1")
        assert refused.status_code == 404 and refused.json()["code"] == "UNKNOWN_LEASE"
        assert pool.turn(kept, "1").json()["observation"] == "waited 1"
        assert pool.lease("a") != lost["lease_id"], "a new lease for the same request"


def test_only_the_newest_holder_of_a_lease_acts() -> None:
    with pool_of() as pool:
        killed = pool.begun("a")
        lease, holder = killed["lease_id"], pool.call("allocate", task_key="t", request_id="a").json()["holder"]
        successor = {"lease_id": lease, "holder": holder}
        assert holder != killed["holder"]
        for path in ("heartbeat", "evaluate"):
            assert pool.call(path, **killed).json()["code"] == "OTHER_HOLDER"
        again = pool.call("reset", **killed, task_meta={"instruction": "wait"})
        assert (pool.turn(killed, "1").status_code, again.status_code) == (409, 409)
        assert pool.call("close", **killed).json()["found"] is False, "before the successor has begun its episode"
        assert pool.call("reset", **successor, task_meta={"instruction": "wait"}).json()["ok"] is True
        assert pool.made[0].closed.is_set() and not pool.made[1].closed.is_set()
        assert pool.call("evaluate", **successor).json() == {"ok": True, "score": 0.25, "rewards": {}}
        assert pool.call("evaluate", **successor).json()["score"] == 0.25, "once more"


def test_a_close_is_not_interrupted_and_a_score_has_its_own_limit() -> None:
    with pool_of(SlowEnding, call_s=0.2) as pool:
        begun = pool.begun()
        assert pool.call("evaluate", **begun).json()["score"] == 0.5, "longer than a call may take"
        resetting = threading.Thread(
            target=lambda: pool.call("reset", **begun, task_meta={"instruction": "interrupted"})
        )
        resetting.start()
        assert pool.made[0].runs.wait(5)
        answer = pool.call("close", **begun).json()
        resetting.join(5)
        assert answer["found"] is True and pool.made[0].closed.is_set(), "although its reset was cancelled meanwhile"


def test_an_answer_that_is_no_json_is_a_fault_and_texts_that_are_no_unicode_are_refused() -> None:
    with pool_of(SlowEnding) as pool:
        begun = pool.begun()
        assert pool.call("heartbeat", lease_id="lost").status_code == 404
        data = json.dumps({**begun, "tool_call": {"name": "turn", "arguments": {"text": "\ud800"}}})
        odd = pool.http.post(f"{pool.url}/exec_tool", content=data.encode()).json()
        assert odd["ok"] is True and "error: the call is not JSON" in odd["observation"]
        unknown = pool.http.post(f"{pool.url}/heartbeat", content=json.dumps({"lease_id": "\ud800"}).encode())
        assert unknown.json()["code"] == "UNKNOWN_LEASE"
        pool.made[0].stopped.set()
        fault = pool.call("evaluate", **begun)
        assert fault.status_code == 500 and "the environment's answer is not JSON" in fault.json()["error"]


def test_a_call_ends_when_its_caller_is_gone_or_its_lease_is_closed() -> None:
    with pool_of(lambda: Waiter(30)) as pool:
        begun = pool.begun()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{pool.url}/exec_tool",
                json={**begun, "tool_call": {"name": "turn", "arguments": {"text": "1"}}},
                timeout=0.3,
            )
        assert pool.made[0].stopped.wait(5)
        assert pool.call("evaluate", **begun).json()["score"] == 0.25, "as after a time limit of the worker"
        other = pool.begun()
        answers: list[httpx.Response] = []
        calling = threading.Thread(target=lambda: answers.append(pool.turn(other, "1")))
        calling.start()
        assert pool.made[1].runs.wait(5)
        assert pool.call("close", **other).json()["found"] is True
        calling.join(5)
        assert pool.made[1].stopped.is_set() and pool.made[1].closed.is_set()
        assert answers[0].json()["code"] == "UNKNOWN_LEASE"


def test_a_call_has_a_time_limit_after_which_the_episode_is_over() -> None:
    with pool_of(lambda: Waiter(30), call_s=0.2) as pool:
        begun = pool.begun()
        assert "took over 0.2 s" in pool.turn(begun, "1").json()["error"] and pool.made[0].stopped.is_set()
        assert "reset the lease" in pool.call("evaluate", **begun).json()["error"]


def test_a_fault_of_the_environment_is_no_score() -> None:
    with pool_of() as pool:
        begun = pool.begun()
        fault = pool.turn(begun, "fail")
        assert fault.status_code == 500 and fault.json()["error"] == "no sandbox"
        assert pool.call("evaluate", **begun).status_code == 409
        assert pool.call("reset", lease_id=begun["lease_id"], task_meta={"instruction": "wait"}).json()["ok"] is True
        assert pool.call("evaluate", **begun).json()["score"] == 0.25


def test_a_call_that_cannot_be_stopped_makes_the_pool_unhealthy_and_keeps_its_folder() -> None:
    with pool_of() as pool:
        begun = pool.begun()
        calling = threading.Thread(target=lambda: pool.turn(begun, "stuck"))
        calling.start()
        assert pool.made[0].runs.wait(5)
        assert pool.call("close", **begun).json()["found"] is True
        calling.join(5)
        assert pool.http.get(f"{pool.url}/healthz").status_code == 503 and pool.leases.must_end.is_set()
    assert not pool.made[0].closed.is_set(), "its thread may still change what `close` would free"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("allocate", {}, "task_key is missing"),
        ("reset", {"lease_id": "LEASE"}, "task_meta is missing"),
        ("reset", {"lease_id": "LEASE", "task_meta": {}}, "instruction is missing"),
        ("reset", {"lease_id": "LEASE", "task_meta": {"instruction": "x", "data": {"no": 1}}}, "data of echo are"),
        ("exec_tool", {"lease_id": "LEASE", "tool_call": {}}, "name is missing"),
        ("evaluate", {"lease_id": "LEASE", "answer": 1}, "answer is no text"),
        ("evaluate", {"lease_id": "LEASE", "holder": "1"}, "holder is no whole number"),
    ],
)
def test_a_wrong_call_is_refused_with_the_reason(path: str, body: dict[str, Any], said: str) -> None:
    with pool_of() as pool:
        lease = pool.lease()
        answer = pool.call(path, **{name: lease if value == "LEASE" else value for name, value in body.items()})
        assert answer.status_code == 400 and answer.json()["ok"] is False and said in answer.json()["error"]


def test_the_key_is_required_and_pages_of_browsers_are_refused_without_one() -> None:
    with pool_of(key="secret") as pool:
        for key in (None, "other"):
            assert pool.call("allocate", key, task_key="t").status_code == 401
            assert (
                pool.http.get(f"{pool.url}/metrics").status_code
                == pool.http.get(f"{pool.url}/status").status_code
                == 401
            )
        assert pool.call("allocate", "secret", task_key="t").json()["ok"] is True
        assert pool.http.get(f"{pool.url}/healthz").status_code == 200
    with pool_of() as pool:
        page = pool.http.post(f"{pool.url}/allocate", json={"task_key": "t"}, headers={"origin": "http://evil.example"})
        assert page.status_code == 403 and pool.leases.held == 0


def test_the_metrics_are_those_of_the_page() -> None:
    with pool_of() as pool:
        pool.begun()
        status = {"environment": "echo", "places": 16, "leases": 1, "ending": 0}
        assert pool.http.get(f"{pool.url}/status").json() == {"ok": True, "pool": status}
        found = {each.name: each for each in text_string_to_metric_families(pool.http.get(f"{pool.url}/metrics").text)}
    wanted = {each.name.removesuffix("_total") for each in catalogue() if "env-pool" in each.by}
    assert wanted and wanted <= set(found)
    assert [sample.value for sample in found["tentalis_env_pool_leases"].samples] == [1.0]


# --- our client -------------------------------------------------------------------------------------------------------


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(
    url: str,
    *turns: str | Callable[[], str],
    key_env: str | None = None,
    limits: EpisodeLimits | None = None,
    **data: Any,
) -> tuple[Result, list[str]]:
    """Plays one episode on a pool as the worker does. Returns the result, and the prompts of its turns."""
    served = ServedVersions("local")
    served.apply(ack(1))
    prompts: list[str] = []

    def turn(conversation: str, number: int) -> str:
        prompts.append(conversation)
        said = turns[number]
        return said if isinstance(said, str) else said()

    def no_wall() -> Any:
        raise AssertionError("no action runs on this machine")

    model: Any = EpisodeServer(["assistant@v1"], turn)
    options = EnvironmentOptions(no_wall, server=EnvironmentServer(url=url, key_env=key_env))
    player = EpisodePlayer(
        model,
        policy_calls(served, patience_s=0.1),
        lambda: EnvPoolEnvironment(options),
        limits or EpisodeLimits(attempts=1),
        worker_id="w",
        server_id="local",
    )
    of = task(environment="env-pool", n=1, verifier=Verifier(name="episode", data=json.dumps(data)))
    (result,) = asyncio.run(asyncio.wait_for(player.answer(of, T0), 60))
    return result, prompts


def test_toolcall_on_a_pool_gives_what_it_gives_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOL_KEY", "secret")
    make = lambda: ToolcallEnvironment(EnvironmentOptions(available_wall))  # noqa: E731
    with pool_of(make, "toolcall", key="secret") as pool:
        result, prompts = play(
            pool.url, called("python", code="print(6 * 7)"), "\\boxed{42}", key_env="POOL_KEY", answer="42"
        )
        assert result.rewards == {"answer": 1.0, "calls": 1.0, "refused_calls": 0.0, "score": 1.0, "reward": 1.0}
        assert (result.ending, result.wall) == (Ending.DONE, available_wall().name)
        assert result.tool_calls[0].result == "42" and "<tool_response>\n42\n</tool_response>" in prompts[1]
        assert prompts[0].count("# Tools") == 1, "the tools are listed once"
        assert play(pool.url, "\\boxed{41}", key_env="POOL_KEY", answer="42")[0].rewards["reward"] == 0.0
        assert play(pool.url, "\\boxed{41}", answer="42")[0].status is Status.INFRA, "without the key"
        assert pool.leases.held == pool.leases.ending == 0
        folders = [getattr(each, "_folder") for each in pool.made]  # noqa: B009
    assert folders == [None, None], f"no {PREFIX} is left"


def test_echo_on_a_pool_is_played_with_the_tool_turn() -> None:
    with pool_of(lambda: EchoEnvironment(EnvironmentOptions(available_wall)), "echo") as pool:
        said = task(environment="echo", n=1).messages[-1].content
        result, _ = play(pool.url, called("turn", text=said), called("turn", text="b"), then=["b"])
        assert result.rewards["reward"] == 1.0 and result.ending is Ending.DONE
        assert [dict(step.parts) for step in result.step_rewards] == [{"reward": 1.0}, {"reward": 1.0}]


def test_a_terminal_task_on_a_pool(tmp_path: Path) -> None:
    folder = Path("tests/support/terminal_tasks").resolve()
    name = sorted(each.name for each in folder.iterdir() if each.is_dir())[0]
    options = EnvironmentOptions(available_wall, tasks=folder)
    with pool_of(lambda: TerminalEnvironment(options), "terminal") as pool:
        result, prompts = play(pool.url, called("bash", command="echo here; pwd"), "Done.", task=name)
        assert result.status is Status.OK and result.rewards["commands"] == 1.0 and result.rewards["reward"] == 0.0
        assert "here" in prompts[1] and "```bash" not in prompts[0], "the rules of texts are not shown"


def test_a_step_over_the_time_limit_is_stopped_in_the_pool_and_scored() -> None:
    with pool_of(lambda: Waiter(30)) as pool:
        limits = EpisodeLimits(attempts=1, environment_s=1.0)
        result, _ = play(pool.url, called("turn", text="1"), limits=limits)
        assert (result.ending, result.rewards["reward"]) == (Ending.TIMED_OUT, 0.25)
        assert pool.made[0].stopped.is_set() and pool.made[0].closed.is_set()


def test_a_pool_that_dies_in_the_middle_is_infra() -> None:
    with pool_of() as pool:
        gone = threading.Event()

        def die() -> str:
            gone.set()
            eventually(lambda: pool.leases.held == 0, 10, message="the pool is up")
            return called("turn", text="2")

        def played() -> None:
            results.append(play(pool.url, called("turn", text="1"), die)[0])

        results: list[Result] = []
        playing = threading.Thread(target=played)
        playing.start()
        assert gone.wait(10)
    playing.join(20)
    (result,) = results
    assert result.status is Status.INFRA and result.rewards == {} and result.error is not None


def test_an_open_pool_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variables.ENV_POOL_KEY.name, raising=False)
    refused = CliRunner().invoke(app, ["serve", "env-pool", "--host", "0.0.0.0"])
    assert refused.exit_code == 2 and "set a key in TENTALIS_ENV_POOL_KEY" in refused.output
    refused = CliRunner().invoke(app, ["serve", "env-pool", "--environment", "env-pool"])
    assert refused.exit_code == 2 and "is itself played on another pool" in refused.output
    refused = CliRunner().invoke(app, ["serve", "env-pool", "--environment", "chat"])
    assert refused.exit_code == 2 and "with episodes" in refused.output
