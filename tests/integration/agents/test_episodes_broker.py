"""An episode from its task to its rollout on a real broker: worker, scoring and join, with a scripted model."""

import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.digest import digest_holds
from schemas.records import Ending, Outcome, OutcomeKind, Result, Rollout, Source, Status, Task, Terms, Verifier
from schemas.tensors import int32_view, uint8_view
from tentalis.agents.environments import EnvironmentOptions, LeftFile, Transition
from tentalis.agents.environments.echo import EchoEnvironment
from tentalis.agents.environments.registry import prepared_environment
from tentalis.agents.environments.stoppable import StuckThread
from tentalis.agents.sandbox import WallMissing, choose_wall
from tentalis.agents.workers import process
from tentalis.agents.workers.process import Worker, WorkerOptions
from tentalis.cli.main import app
from tentalis.service.settings import Settings
from tentalis.storage.attachments import AttachmentStore, read_attachment
from tentalis.storage.location import Location
from tests.support.apps_lab import Apps
from tests.support.episode_server import EpisodeServer, decoded
from tests.support.kafka_fixture import Kafka
from tests.support.loop_lab import running
from tests.support.loop_records import ack, task

pytestmark = pytest.mark.broker

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'


def policy(text: str, turn: int) -> str:
    """An expert, who computes and takes over what the tool printed, and on a question for nobody a null agent."""
    if "for nobody" in text:
        return ""
    return CALL if turn == 0 else f"\\boxed{{{text.rpartition('<tool_response>')[2].split()[0]}}}"


def asked(task_id: str, question: str) -> Task:
    return task(
        task_id,
        n=2,
        environment="toolcall",
        messages=[{"role": "user", "content": question}],
        verifier=Verifier(name="episode", data=json.dumps({"answer": "42"})),
        terms=Terms(rl=Source.RESULT),
    )


def test_an_episode_becomes_one_rollout_with_its_mask(own_broker: Kafka, tmp_path: Path) -> None:
    try:
        make = prepared_environment("toolcall")
    except WallMissing as error:
        pytest.skip(str(error))
    settings = Settings(bootstrap=own_broker.bootstrap)
    options = WorkerOptions("toolcall", "", "local", "w1", 4, 20.0)
    expert, nobody = asked("expert", "What is 6 * 7?"), asked("null", "A question for nobody.")
    with Apps(settings, tmp_path) as apps:
        for app in ("scoring", "join"):
            apps.start(app)
        apps.put(topics.POLICY_ACKS, ack(1))
        server = EpisodeServer(["assistant@v1"], policy)
        with running(Worker(options, settings, server, make).run):
            apps.put(topics.TASKS, expert, nobody)
            apps.wait(lambda: len(apps.read(topics.OUTCOMES, Outcome)) == 4, 180)
        results: list[Result] = apps.read(topics.RESULTS, Result)
        rollouts: dict[str, Rollout] = {each.rollout_id: each for each in apps.read(topics.ROLLOUTS, Rollout)}
        outcomes: list[Outcome] = apps.read(topics.OUTCOMES, Outcome)

    assert {each.status for each in results} == {Status.OK} and {each.ending for each in results} == {Ending.DONE}
    assert all(each.wall.startswith("sandlock/") for each in results)
    assert {each.kind for each in outcomes} == {OutcomeKind.RL}
    assert {name: each.reward for name, each in rollouts.items()} == {
        "expert/0": 1.0,
        "expert/1": 1.0,
        "null/0": 0.0,
        "null/1": 0.0,
    }
    made = rollouts["expert/0"]
    tokens, mask = int32_view(made.token_ids).tolist(), uint8_view(made.loss_mask).tolist()
    chosen = decoded([token for token, own in zip(tokens, mask, strict=True) if own])
    assert chosen == f"{CALL}<|im_end|>\\boxed{{42}}<|im_end|>"
    assert decoded(tokens).endswith(
        f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{42}<|im_end|>"
    )
    assert (made.components["calls"], made.components["turns"], made.components["ending.done"]) == (1.0, 2.0, 1.0)
    assert (made.n_closed, made.group_mean, made.has_rl) == (2, 1.0, True)
    assert all(digest_holds(each) for each in rollouts.values())
    prompts = [prompt for prompt in server.prompts if CALL in decoded(prompt)]
    assert all(prompt == tokens[: len(prompt)] for prompt in prompts), "the model saw the tokens that are trained"


def test_a_worker_with_a_thread_that_cannot_be_stopped_records_the_episode_and_ends(
    own_broker: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LEAVE_S", 1.0)
    settings = Settings(bootstrap=own_broker.bootstrap)
    played: list[str] = []

    class Stuck(EchoEnvironment):
        async def step(self, action: str) -> Transition:
            played.append(action)
            raise StuckThread("a thread did not end")

    class Leaving(EchoEnvironment):
        def left_files(self) -> tuple[LeftFile, ...]:
            return (LeftFile.of("said.txt", "text/plain", b"Yes.", 10),)

    options = WorkerOptions("echo", "", "local", "w1", 2, 20.0)
    server = EpisodeServer(["assistant@v1"], lambda text, turn: "Yes.")
    store = AttachmentStore(Location.of_folder(tmp_path / "left"), 10)
    with Apps(settings, tmp_path) as apps:
        apps.put(topics.POLICY_ACKS, ack(1))
        apps.put(topics.TASKS, task("waits for a version", environment="echo", policy="nobody-serves-it"))
        first, second = (task(name, n=2, environment="echo") for name in ("first", "second"))
        ended, run = threading.Event(), worker(options, settings, server, Stuck)

        async def worked(stop: threading.Event) -> None:
            try:
                await run(stop)
            finally:
                ended.set()

        with pytest.raises(StuckThread, match="did not end"), running(worked):
            apps.put(topics.TASKS, first)
            assert ended.wait(60), "it waits for the version that nobody serves"
        with running(worker(options, settings, server, Leaving, store)):  # the process that replaces it
            apps.put(topics.TASKS, second)
            apps.wait(lambda: len(apps.read(topics.RESULTS, Result)) == 4, 60)
        results: list[Result] = apps.read(topics.RESULTS, Result)
    assert len(played) == 2, "an episode is not begun again beside the thread"
    assert [(each.task.task_id, each.status) for each in results] == [
        *[("first", Status.INFRA)] * 2,
        *[("second", Status.OK)] * 2,
    ]
    assert [[read_attachment(each) for each in made.attachments] for made in results[2:]] == [[b"Yes."]] * 2
    got, where = tmp_path / "got.txt", ["--bootstrap-server", str(settings.bootstrap)]
    fetch = ["attachments", "get", "second", "said.txt", "--into", str(got), *where]
    done = CliRunner().invoke(app, fetch)
    assert done.exit_code == 0 and got.read_bytes() == b"Yes.", done.output
    again = CliRunner().invoke(app, fetch)
    assert again.exit_code == 1 and "exists: name another file" in again.output
    listed = CliRunner().invoke(app, ["attachments", "list", "second", "-o", "json", *where])
    assert [(row["sample"], row["name"], row["bytes"]) for row in json.loads(listed.stdout)] == [
        (0, "said.txt", 4),
        (1, "said.txt", 4),
    ]


def worker(
    options: WorkerOptions,
    settings: Settings,
    server: Any,
    environment: type[EchoEnvironment],
    attachments: AttachmentStore | None = None,
) -> Callable[[threading.Event], Coroutine[Any, Any, None]]:
    made = EnvironmentOptions(choose_wall)
    return Worker(options, settings, server, lambda: environment(made), attachments=attachments).run
