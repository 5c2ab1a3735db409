"""`tentalis sessions` and `tentalis runs` on a real broker: what they read from the topics, and what they write."""

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import Feedback, Polarity, Promotion, Source, sample_of
from streams.fold.session_turns import result_of
from tentalis.cli.main import app
from tentalis.ops.sessions.follow import follow_learning
from tests.support.join_support import hint
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.loop_lab import Lab
from tests.support.loop_records import manifest, outcome, plan, step_result, update
from tests.support.sessions_support import side, turn

pytestmark = pytest.mark.broker
runner = CliRunner()


@pytest.fixture
def lab(kafka: Kafka, unique: str) -> Lab:
    return Lab(kafka.bootstrap, unique)


def run(lab: Lab, *arguments: str) -> Any:
    return runner.invoke(app, [*arguments, "--bootstrap-server", lab.settings.require_bootstrap()])


def read(lab: Lab, *arguments: str) -> Any:
    done = run(lab, *arguments, "-o", "json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def trained(lab: Lab, rollout: str) -> str:
    """A run with one step that trained this rollout."""
    run_id = f"run-{lab.name}"
    made = plan(1, [rollout], run_id).model_copy(update={"policy": lab.name, "plan_id": f"plan-{lab.name}"})
    lab.put(topics.RUNS, manifest(run_id, first=0).model_copy(update={"policy": lab.name, "digest": lab.name}))
    lab.put(topics.BATCHES, made)
    result = step_result(
        1, 1, run_id, policy=lab.name, plan_id=f"plan-{lab.name}", metrics={"reward_mean": 0.5, "rl_loss": 0.25}
    )
    lab.put(topics.BATCHES, result)
    lab.put(topics.POLICIES, update(1, policy=lab.name, run_id=run_id, step=1))
    return run_id


def test_a_conversation_is_shown_with_where_it_was_trained_and_labelled_once(lab: Lab) -> None:
    session = f"ann/{lab.name}"
    events = [
        turn(f"{lab.name}-a", "why?", session=session, policy=lab.name),
        side(f"{lab.name}-title", session=session, policy=lab.name),
        turn(f"{lab.name}-b", "why?", "because", "shorter", session=session, policy=lab.name),
    ]
    lab.put(topics.SESSIONS, *events)
    task = result_of(events[0], 0, 0).task
    lab.put(topics.RESULTS, result_of(events[0], 0, 0))
    signal = Feedback(
        feedback_id=f"{lab.name}-s",
        event_time=1,
        task_id=task.task_id,
        source=Source.ENVIRONMENT,
        author="signal:correction",
        polarity=Polarity.NEGATIVE,
    )
    lab.put(topics.FEEDBACK, signal)
    asked = Feedback(
        feedback_id=f"{lab.name}-n",
        event_time=1,
        task_id=task.task_id,
        source=Source.NEXT_STATE,
        author="user",
        text="shorter",
    )
    lab.put(topics.FEEDBACK, asked)
    sample = sample_of(result_of(events[0], 0, 0))
    made = hint(sample, id=f"{lab.name}-h").model_copy(update={"feedback_id": asked.feedback_id})
    lab.put(topics.HALVES, made, made)
    lab.put(topics.OUTCOMES, outcome(task))
    run_id = trained(lab, f"{task.task_id}/0")

    (row,) = [row for row in read(lab, "sessions", "list", "-n", "1000") if row["session"] == session]
    assert (row["main"], row["side"], row["tasks"]) == (2, 1, 2)
    shown = read(lab, "sessions", "show", session)
    assert [(t["turn"], t["kind"]) for t in shown["turns"]] == [(0, "main"), (None, "side"), (1, "main")]
    assert shown["turns"][0]["signals"] == {"correction": 1}
    assert shown["turns"][0]["trained"] == [
        {"rollout": f"{task.task_id}/0", "run": run_id, "step": 1, "version": f"{lab.name}@v1"}
    ]
    assert shown["turns"][2]["trained"] == []
    (hinted,) = shown["turns"][0]["hints"]
    assert (hinted["hints"], hinted["made_by"]) == (["Be brief."], "rule/1")
    assert hinted["said"] == {"source": "next_state", "author": "user", "text": "shorter"}
    table = run(lab, "sessions", "show", session).stdout
    assert '"Be brief." from next_state user by rule/1' in table

    label = ("sessions", "label", session, "0", "--thumb", "down", "--comment", "shorter")

    def mine(record: Any) -> bool:
        return isinstance(record, Feedback) and record.author.startswith("cli/") and record.task_id == task.task_id

    assert "would write" in run(lab, *label, "--dry-run").stderr
    assert lab.records(topics.FEEDBACK, mine) == []
    for _ in range(2):
        assert run(lab, *label, "--yes").exit_code == 0
    one, two = lab.records(topics.FEEDBACK, mine)
    assert one.feedback_id == two.feedback_id
    assert (one.source, one.polarity, one.text) == (Source.USER, Polarity.NEGATIVE, "shorter")
    assert one.result is not None and one.result.task.task_id == turn_task_id(session, f"{lab.name}-a")
    (_, said) = read(lab, "sessions", "show", session)["turns"][0]["feedback"]
    assert (said["verdict"], said["text"]) == ("negative", "shorter")
    done = run(lab, "sessions", "label", session, "7", "--thumb", "up", "--yes")
    assert done.exit_code == 1 and "has 2 main turns" in done.stderr
    assert run(lab, "sessions", "label", session, "0").exit_code == 2
    assert run(lab, "sessions", "show", "nobody/nothing").exit_code == 1


def test_the_tail_of_a_gateway_is_live_and_in_the_order_of_the_log(lab: Lab) -> None:
    session = f"ann/{lab.name}"
    first = turn(f"{lab.name}-a", "why?", session=session, policy=lab.name)
    result = result_of(first, 0, 0)
    reaction = Feedback(
        feedback_id=f"{lab.name}-n",
        event_time=1,
        task_id=result.task.task_id,
        source=Source.NEXT_STATE,
        author="user",
        text="shorter",
        result=result,
    )
    made = hint(sample_of(result), id=f"{lab.name}-h").model_copy(update={"feedback_id": reaction.feedback_id})

    heard: list[str] = []
    leaving = threading.Event()

    def listen() -> None:
        with closing(follow_learning(lab.settings, None, stop_at_end=False)) as entries:
            for entry in entries:
                heard.append(entry.event)
                if leaving.is_set():
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()

    def listens() -> bool:
        lab.put(topics.SESSIONS, side(f"{lab.name}-title", session=session, policy=lab.name))
        return bool(heard)

    eventually(listens, 30)
    for topic, record in (
        (topics.SESSIONS, first),
        (topics.FEEDBACK, reaction),
        (topics.HALVES, made),
        (topics.OUTCOMES, outcome(result.task)),
    ):
        lab.put(topic, record)
    run_id = trained(lab, f"{result.task.task_id}/0")
    eventually(lambda: "trained" in heard, 30)
    assert [event for event in heard if event != "turn"] == ["feedback", "hint", "outcome", "plan", "trained"]
    leaving.set()
    lab.put(topics.SESSIONS, side(f"{lab.name}-last", session=session, policy=lab.name))
    listener.join(30)
    assert not listener.is_alive()

    done = run(lab, "gateway", "tail", "--session", session, "--since", "1h", "--exit", "-o", "json")
    assert done.exit_code == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["turn", "turn", "feedback", "hint", "outcome", "trained", "turn"]
    assert [line["turn"] for line in lines] == [None, None, 0, 0, 0, 0, None]
    assert lines[3]["said"] == {"source": "next_state", "author": "user", "text": "shorter"}
    assert (lines[5]["run"], lines[5]["version"]) == (run_id, f"{lab.name}@v1")
    assert len(run(lab, "gateway", "tail", "--user", "nobody", "--since", "1h", "--exit").stdout.splitlines()) == 1


def test_a_run_is_listed_compared_and_its_files_deleted(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path))
    run_id = trained(lab, f"{lab.name}/0")
    (row,) = read(lab, "runs", "list", lab.name)
    assert (row["run"], row["steps"], row["rollouts"], row["reward"]) == (run_id, 1, 1, 0.5)
    assert yaml.safe_load(run(lab, "runs", "list", lab.name, "-o", "yaml").stdout) == [row]
    assert read(lab, "runs", "show", run_id)["steps_trained"][0]["metrics"] == {"reward_mean": 0.5, "rl_loss": 0.25}
    assert "STEP" in run(lab, "runs", "show", run_id).stdout
    assert read(lab, "runs", "compare", run_id, run_id)["digests"] == {
        "compared": 1,
        "equal": 1,
        "first_difference": None,
    }
    assert "steps with the same adapter: 1 of 1" in run(lab, "runs", "compare", run_id, run_id).stdout

    checkpoint = tmp_path / "checkpoints" / run_id / "000000-001-me"
    newest = tmp_path / "checkpoints" / run_id / "000001-001-me"
    reports = tmp_path / "reports" / run_id
    for folder in (checkpoint, newest, reports):
        folder.mkdir(parents=True)
        (folder / "file").write_text("content")
    for version in (10, 11, 12):  # v12 is served, the others are targets of a rollback
        lab.put(topics.POLICIES, Promotion(policy=lab.name, version=version, event_time=1, sha256="s", mode="always"))
    delete = ("runs", "delete", run_id)
    shown = read(lab, *delete)
    assert {Path(row["path"]).name: row["action"].partition(":")[0] for row in shown["folders"]} == {
        "000000-001-me": "delete",
        "000001-001-me": "keep",
        run_id: "delete",
    }
    assert checkpoint.is_dir(), "without --yes nothing is deleted"
    assert run(lab, *delete, "--yes").exit_code == 0
    assert not checkpoint.exists() and not reports.exists() and newest.is_dir()
    done = run(lab, "runs", "show", "no-such-run")
    assert done.exit_code == 1 and run_id in done.stderr
