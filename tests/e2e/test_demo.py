"""The whole loop as a person runs it: a demo that gets garbage and Ctrl-C and goes on, replay, verify, forgery, and the
standing stack that goes on with it, by the page of the first steps on a laptop."""

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tests.e2e.lab import Home, pids_of
from tests.e2e.standing import ended, looked_at
from tests.support import ROOT
from tests.support.kafka_fixture import eventually
from tests.support.transcript import PageShell, commands_of

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

STEPS = 2
GARBAGE = (b"not avro at all", b"\x00\x00\x00\x00\x07x")
INPUTS = (topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.HALVES, topics.OUTCOMES, topics.ROLLOUTS)


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[PageShell]:
    """A shell in a folder with a name that is hard: Kafka takes a comma for the end of a path, Log4j a blank, and a JVM
    in the locale C what is not ASCII."""
    more = {"up": ["--policy-model", str(tiny_model), "--scale", "aggregation=2"]}
    with PageShell(tmp_path_factory.mktemp("e2e") / "a home, ünï" / "☃", more=more) as shell:
        yield shell


@pytest.fixture(scope="module")
def finished(laptop: PageShell, tiny_model: Path) -> tuple[Home, dict[str, object]]:
    """A home with a finished demo run in it, which got garbage on every topic and was interrupted after one step."""
    home = Home(laptop.folder / ".tentalis", tiny_model)
    home.env["TENTALIS_TRACES"] = str(home.path.parent / "traces")
    # What libraries print must not reach the stdout of `demo` and `replay`, which is parsed as JSON.
    home.env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests' / 'support' / 'noisy'}"
    interrupted(home)
    return home, home.finish(home.start_demo("--steps", str(STEPS)), timeout=400)


def interrupted(home: Home) -> None:
    """Starts the demo, puts garbage on its topics, and presses Ctrl-C after its first step."""
    demo = home.start_demo("--steps", str(STEPS))
    eventually(
        lambda: all(home.processes().get(name, {}).get("state") == "ready" for name in ("scoring", "join", "hinting")),
        200,
        message="the applications did not become ready",
    )
    settings = home.settings()
    # The manifest holds where the run begins to read: what lies before that is nobody's.
    eventually(lambda: list(read_to_end(settings, topics.RUNS)), 200, message="the trainer did not begin")
    publisher = Publisher(settings, "test", make_codec(settings))
    for name in INPUTS:
        for garbage in GARBAGE:
            publisher.send_bytes(name, b"garbage", garbage)
    publisher.flush()
    eventually(
        lambda: any((home.path / "adapters").rglob("v1/adapter_model.safetensors")), 200, message="no step was trained"
    )
    demo.send_signal(signal.SIGINT)
    began = time.monotonic()
    demo.communicate(timeout=60)
    took = time.monotonic() - began
    assert demo.returncode != 0
    # The promise is 10 s where nothing else runs. One that waits for what does not end would take a minute.
    assert took < 30, f"{took:.1f} s from Ctrl-C to the end"
    assert pids_of(home.path) == []


def test_the_demo_reports_every_version_and_leaves_nothing_running(finished: tuple[Home, dict[str, object]]) -> None:
    home, result = finished
    assert set(result) == {
        *("run_id", "steps", "reward_by_version", "first_quarter", "last_quarter", "p_value", "wall_seconds"),
        *("start_seconds", "seconds_by_phase"),
    }
    assert result["steps"] == STEPS
    rows = result["reward_by_version"]
    assert isinstance(rows, list)
    assert [row["version"] for row in rows] == list(range(STEPS + 1))
    assert all(row["n"] >= 24 for row in rows), rows
    assert set(rows[0]) >= {"version", "mean", "n", "stderr", "mean_words", "on_topic_share"}
    assert pids_of(home.path) == []
    assert [folder.name for folder in (home.path / "runs").iterdir()] == [result["run_id"]]
    reports = list((home.path / "reports").rglob("*.html"))
    assert reports and list((home.path / "reports").rglob("*.png"))


@pytest.mark.parametrize("process", ["trainer", "model"])
def test_a_process_that_loads_torch_writes_log_lines_alone(
    finished: tuple[Home, dict[str, object]], process: str
) -> None:
    home, _ = finished
    lines = (home.path / "logs" / f"{process}.log").read_text().splitlines()
    assert any("noise" in line for line in lines), "it has loaded the noisy libraries"
    of_ours = r"---|INFO:|\d{4}-\d\d-\d\d .* (INFO .*|(WARNING|ERROR) (tentalis|trainer))"
    strange = [line for line in lines if "noise" not in line and not re.match(of_ours, line)]
    assert strange == []


def replay_equal(home: Home, run_id: str) -> int:
    """Returns how many steps were equal, the initial adapter among them."""
    done = home.run("replay", run_id, "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert all(step["recorded_sha"] == step["replayed_sha"] and step["equal"] for step in steps)
    return len(steps)


def test_traces_lead_from_tasks_to_the_versions_that_learned_from_them(
    finished: tuple[Home, dict[str, object]],
) -> None:
    home, _ = finished
    spans = exported(home.path.parent / "traces")
    of_tasks = {span["traceId"] for span in spans if span["name"] == "task"}
    assert of_tasks
    names = {trace: {span["name"] for span in spans if span["traceId"] == trace} for trace in of_tasks}
    assert {"task", "generate", "score", "feedback", "hint", "join"} in names.values()
    swapped = {span["traceId"] for span in spans if span["name"] == "swap"}
    steps = {value(span, "tentalis.policy"): span for span in spans if span["name"] == "step"}
    assert {name.partition("@")[2] for name in steps} == {f"v{version}" for version in range(1, STEPS + 1)}
    for span in steps.values():
        linked = {link["traceId"] for link in span["links"]}
        assert len(span["links"]) == 32 and linked <= of_tasks
        assert span["traceId"] in swapped


def exported(folder: Path) -> list[dict[str, Any]]:
    """Every span that any process wrote."""
    return [
        span
        for file in folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def value(span: dict[str, Any], key: str) -> str:
    return str(next(item["value"]["stringValue"] for item in span["attributes"] if item["key"] == key))


PAGE = commands_of(ROOT / "docs" / "start" / "laptop.md")
LAST = next(number for number, command in enumerate(PAGE) if command.text.startswith("tentalis down"))


@pytest.fixture(scope="module")
def standing(laptop: PageShell, finished: tuple[Home, dict[str, object]]) -> Iterator[tuple[Home, str]]:
    """The standing stack of the page, in the same home; stopped in the end, with nothing left behind."""
    home, result = finished
    try:
        laptop.follow(PAGE[:LAST])
        yield home, str(result["run_id"])
    finally:
        assert home.run("down").returncode == 0
    assert pids_of(home.path) == []


def test_the_stack_of_the_page_is_ready_is_measured_and_is_operated(
    laptop: PageShell, standing: tuple[Home, str]
) -> None:
    home, _ = standing
    looked_at(home, laptop)


def test_the_standing_stack_goes_on_with_the_run_that_is_verified_and_replays_equal(
    standing: tuple[Home, str],
) -> None:
    home, run_id = standing
    # What was learned is what is served, no other run began.
    said = home.run("consume", "tentalis.policies.v1", "--from", "earliest", "--exit", "-o", "json")
    promoted = [row["value"] for row in map(json.loads, said.stdout.splitlines()) if row["type"] == "Promotion"]
    assert promoted[-1]["version"] >= STEPS
    assert [folder.name for folder in (home.path / "runs").iterdir()] == [run_id]
    verified = home.run("verify", run_id, "-o", "json")
    report = json.loads(verified.stdout)
    assert verified.returncode == 0, report
    assert (report["lost"], report["wrong"], report["duplicates"]) == (0, 0, 0)
    assert report["rollouts"] >= STEPS * 32
    # What the demo left over may have been enough for another step.
    assert replay_equal(home, run_id) > STEPS


@pytest.mark.parametrize("topic", INPUTS)
def test_garbage_is_dead_lettered_through_an_interruption(standing: tuple[Home, str], topic: str) -> None:
    home, _ = standing
    # At least once: a record that is read again after a restart is dead-lettered again.
    eventually(
        lambda: {stored.value for stored in read_to_end(home.settings(), f"{topic}.dlq")} == set(GARBAGE),
        90,
        interval=1,
    )


def test_a_forged_rollout_is_named_and_nothing_is_trained(standing: tuple[Home, str]) -> None:
    home, run_id = standing
    shown = home.run("consume", "tentalis.rollouts.v1", "--from", "earliest", "--exit", "-o", "json")
    records = map(json.loads, shown.stdout.splitlines())
    record = next(r for r in records if r["value"]["policy_spans"][0]["policy"].endswith("@v0"))
    record["value"]["reward"] = 1.0 if record["value"]["reward"] != 1.0 else -1.0
    line = json.dumps({"type": "Rollout", "value": record["value"]})
    forged = home.run("produce", "tentalis.rollouts.v1", stdin=line + "\n")
    assert forged.returncode == 0, forged.stderr
    replayed = home.run("replay", run_id, "-o", "json")
    assert replayed.returncode == 1, replayed.stdout
    report = json.loads(replayed.stdout)
    assert not report["equal"] and report["steps"] == []
    assert any(record["value"]["rollout_id"] in problem and "forged" in problem for problem in report["problems"])


def test_the_page_ends_the_stack_and_its_log_is_read_without_it(laptop: PageShell, standing: tuple[Home, str]) -> None:
    home, _ = standing
    laptop.follow(PAGE[LAST:])
    ended(home)


def test_a_stack_that_cannot_start_says_why_at_once(tmp_path: Path) -> None:
    up = Home(tmp_path / "home", tmp_path / "nothing").run(
        "up", "--detach", "--policy-model", str(tmp_path / "nothing")
    )
    assert up.returncode == 1
    assert "nothing" in up.stderr
