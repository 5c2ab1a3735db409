"""An unchanged program as an episode on a real broker: gateway, worker, scoring and join, with a scripted model."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.digest import digest_holds
from schemas.records import (
    EPISODE_TURN,
    Ending,
    Outcome,
    OutcomeKind,
    Result,
    Rollout,
    SessionEvent,
    Source,
    Status,
    Task,
    Terms,
    Verifier,
)
from schemas.tensors import float32_view, int32_view, uint8_view
from tentalis.agents.environments.registry import prepared_environment
from tentalis.agents.sandbox import WallMissing
from tentalis.agents.workers import EpisodeLimits, episodes
from tentalis.agents.workers.process import Worker, WorkerOptions
from tentalis.gateway.recording.event_log import EventLog
from tentalis.inference.episode_secret import FILE_NAME
from tentalis.kafka.codec import make_codec
from tentalis.rewards import registry
from tentalis.service.settings import Settings
from tests.support.apps_lab import Apps
from tests.support.asking_program import ASK
from tests.support.chat_backend import ChatScript, chat_backend
from tests.support.environment_pages import forget_environments
from tests.support.episode_server import EpisodeServer, decoded
from tests.support.gateway_lab import Lab, listening
from tests.support.gateway_lab import lab as gateway_lab
from tests.support.kafka_fixture import Kafka
from tests.support.loop_lab import running
from tests.support.loop_records import ack, task

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]

SECRET = "a secret of sixteen and more"
PROGRAM = (
    ASK
    + """
# It knows nothing of Tentalis: it plays ping-pong with any OpenAI-compatible model.
prompt = json.load(sys.stdin)["prompt"]
ask([{"role": "user", "content": "Give this a title: " + prompt}])
messages = [{"role": "user", "content": prompt}]
for turn in range(2):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "Sure?"})
messages.append(ask(messages))
pathlib.Path("answer.txt").write_text(messages[-1]["content"])
sys.exit(3 if "Fail" in prompt else 0)
"""
)
CHECK = """
    import json, pathlib, sys
    episode = json.load(sys.stdin)
    answer = pathlib.Path(episode["workspace"], "answer.txt").read_text()
    print(json.dumps({"reward": float(answer == episode["data"]["answer"]), "length": len(answer)}))
"""
FILE = """
    environments:
      pong:
        base: agent
        program:
          command: ["{python}", "{folder}/agent/pong.py"]
          readable: [agent]
          check: ["{python}", "{folder}/check.py"]
          seconds: 120
        limits: {attempts: 2}
"""


@pytest.fixture
def pong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "environments"
    (folder / "agent").mkdir(parents=True)
    (folder / "agent/pong.py").write_text(PROGRAM)
    (folder / "check.py").write_text(textwrap.dedent(CHECK))
    file = folder / "environments.yaml"
    file.write_text(textwrap.dedent(FILE))
    monkeypatch.setenv("TENTALIS_ENVIRONMENT_FILE", str(file))
    monkeypatch.setattr(episodes, "FIRST_PAUSE_S", 0.0)
    registry.use_environments(file)
    try:
        prepared_environment("pong")
    except WallMissing as error:
        pytest.skip(str(error))
    yield file
    forget_environments()


def speaker(messages: Sequence[dict[str, Any]]) -> str:
    """A model that is asked three times and changes its mind once; its titles are long."""
    if "title" in messages[0]["content"]:
        return "A long title of a short question"
    return ("41", "42", "42")[len(messages) // 2]


def asked(task_id: str, question: str, n: int) -> Task:
    return task(
        task_id,
        n=n,
        environment="pong",
        messages=[{"role": "user", "content": question}],
        verifier=Verifier(name="episode", data=json.dumps({"answer": "42"})),
        terms=Terms(rl=Source.RESULT),
    )


def test_an_unchanged_program_becomes_a_rollout_with_the_tokens_of_its_conversation(
    own_broker: Kafka, pong: Path, tmp_path: Path
) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path / "home")
    (settings.home).mkdir()
    (settings.home / FILE_NAME).write_text(SECRET)
    script = ChatScript(speaker)
    with (
        Apps(settings, tmp_path) as apps,
        listening(chat_backend(script)) as backend,
        episode_gateway(settings, backend, tmp_path) as gateway,
    ):
        for app in ("sessions", "scoring", "join"):
            apps.start(app)
        apps.put(topics.POLICY_ACKS, ack(1))
        gateway.deps.served.apply(ack(1))
        script.bodies.clear()
        options = WorkerOptions("pong", "", "local", "w1", 4, 20.0, gateway=gateway.url)
        server = EpisodeServer(["assistant@v1"], lambda text, turn: "")
        with running(Worker(options, settings, server, prepared_environment("pong")).run):
            apps.put(topics.TASKS, asked("good", "6 * 7?", 2), asked("bad", "Fail: 6 * 7?", 1))
            apps.wait(lambda: len(apps.read(topics.OUTCOMES, Outcome)) == 3, 180)
        results: list[Result] = apps.read(topics.RESULTS, Result)
        rollouts = {each.rollout_id: each for each in apps.read(topics.ROLLOUTS, Rollout)}
        outcomes: list[Outcome] = apps.read(topics.OUTCOMES, Outcome)
        turns: list[SessionEvent] = apps.read(topics.SESSIONS, SessionEvent)
        tasks: list[Task] = apps.read(topics.TASKS, Task)
    assert {each.task_id for each in tasks} == {"good", "bad"}, "no turn became a conversation"
    assert {each.turn_type for each in turns} == {EPISODE_TURN} and len(turns) == 12
    assert len({each.session_id for each in turns}) == 3
    assert {each["model"] for each in script.bodies} == {"assistant@v1"}, "the program named another model"
    assert {each["temperature"] for each in script.bodies} == {1.0} and not any(
        "seed" in each for each in script.bodies
    )
    assert {each.kind for each in outcomes} == {OutcomeKind.RL}
    endings = sorted((each.task.task_id, each.status, each.ending, each.error) for each in results)
    assert endings == [
        ("bad", Status.OK, Ending.FAILED, None),
        ("good", Status.OK, Ending.DONE, None),
        ("good", Status.OK, Ending.DONE, None),
    ]
    assert {name: each.reward for name, each in rollouts.items()} == {"good/0": 1.0, "good/1": 1.0, "bad/0": 1.0}
    made = rollouts["good/0"]
    tokens, mask = int32_view(made.token_ids).tolist(), uint8_view(made.loss_mask).tolist()
    ends = "<|im_end|>"
    assert decoded([token for token, own in zip(tokens, mask, strict=True) if own]) == f"41{ends}42{ends}42{ends}"
    between = f"{ends}\n<|im_start|>user\nSure?{ends}\n<|im_start|>assistant\n"
    assert decoded(tokens) == f"<|im_start|>user\n6 * 7?{ends}\n<|im_start|>assistant\n41{between}42{between}42{ends}"
    assert (made.components["turns_left_out"], made.components["check.length"]) == (1.0, 2.0)
    assert all(digest_holds(each) for each in rollouts.values())
    result = next(each for each in results if each.task.task_id == "good")
    chosen = result.response_mask
    assert [bool(own) for own in chosen] == [value == -0.5 for value in float32_view(result.sampler_logprobs).tolist()]
    assert [span.policy for span in result.policy_spans] == ["assistant@v1"] and result.wall.startswith("sandlock/")
    assert [call.name for call in result.tool_calls] == ["program", "check"]


def episode_gateway(settings: Settings, backend: str, folder: Path) -> Any:
    events = EventLog(settings, "tentalis/gateway/test", make_codec(settings, patience=0.0))
    return gateway_lab(folder, events=events, backend_url=backend, episode_secret=SECRET.encode(), kafka=settings)


def test_a_backend_that_fails_is_no_failure_of_the_policy(own_broker: Kafka, pong: Path, tmp_path: Path) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path / "home")
    script = ChatScript(speaker)
    with (
        Apps(settings, tmp_path) as apps,
        listening(chat_backend(script)) as backend,
    ):
        settings.home.mkdir()
        (settings.home / FILE_NAME).write_text(SECRET)
        with episode_gateway(settings, backend, tmp_path) as gateway:
            gateway.deps.served.apply(ack(1))
            apps.put(topics.POLICY_ACKS, ack(1))
            script.failures = [500]
            results = _played(apps, settings, gateway, "pong", asked("once", "6 * 7?", 1))
            assert [(each.status, each.attempts, each.rewards["reward"]) for each in results] == [(Status.OK, 2, 1.0)]
            script.failures = [500] * 2
            results = _played(apps, settings, gateway, "pong", asked("always", "6 * 7?", 1))
            assert [(each.status, each.ending) for each in results] == [(Status.INFRA, Ending.INFRA)]
            assert "failed in the gateway or behind it" in str(results[0].error)


def _played(apps: Apps, settings: Settings, gateway: Lab, environment: str, of: Task) -> list[Result]:
    before = len(apps.read(topics.RESULTS, Result))
    limits = EpisodeLimits.of(environment)
    options = WorkerOptions(environment, "", "local", "w1", 4, 20.0, limits=limits, gateway=gateway.url)
    server = EpisodeServer(["assistant@v1"], lambda text, turn: "")
    with running(Worker(options, settings, server, prepared_environment(environment)).run):
        apps.put(topics.TASKS, of)
        apps.wait(lambda: len(apps.read(topics.RESULTS, Result)) == before + of.n_samples, 120)
    return [each for each in apps.read(topics.RESULTS, Result) if each.task.task_id == of.task_id]
