"""`tentalis learn` as a person runs it: check, Ctrl-C after a step, the same command again, replay."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.ids import sha256_hex
from tentalis.demo.stats import PHASES
from tentalis.local.broker import EmbeddedBroker
from tests.e2e.lab import CLI, Home, pids_of
from tests.support import ROOT
from tests.support.examples import NAMES, learn_arguments
from tests.support.judge_server import judge_in_thread, says
from tests.support.kafka_fixture import eventually

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

STEPS = 2
REWARD = '''
def score(completions, letter, **columns):
    """The share of a letter in the answer, which differs between random answers."""
    texts = [completion[0]["content"] for completion in completions]
    return [text.count(one) / max(1, len(text)) for text, one in zip(texts, letter)]
'''


def command(home: Home, folder: Path, *more: str) -> list[str]:
    """The command line, with a reward function and prompts of which one line is bad."""
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    rows = [json.dumps({"question": f"Write number {number}.", "letter": "e"}) for number in range(20)]
    (folder / "prompts.jsonl").write_text("\n".join([*rows[:3], "no row", *rows[3:]]), encoding="utf-8")
    arguments = [
        str(folder / "prompts.jsonl"),
        "--reward",
        f"{folder / 'rewards.py'}:score",
        "--model",
        str(home.model),
    ]
    arguments += ["--column", "question=prompt", "--steps", str(STEPS), "--group", "4", "--max-tokens", "8"]
    return [*CLI, "learn", *arguments, "--set", "lora.rank=4", "-o", "json", *more]


def started(home: Home, arguments: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        arguments,
        env=home.env,
        stdout=subprocess.PIPE,
        stderr=home.errors.open("ab"),
        stdin=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.long  # the ordinary suite has its parts: the check below, the manager over prompts, the samples
def test_a_run_on_own_prompts_is_interrupted_continued_and_replayed(tmp_path: Path, tiny_model: Path) -> None:
    home = Home(tmp_path / "home", tiny_model)
    assert "hinting" not in interrupted_after_a_step(home, started(home, command(home, tmp_path)))

    result = home.finish(started(home, command(home, tmp_path)), timeout=300)
    said = home.errors.read_text()
    assert f"{tmp_path / 'prompts.jsonl'}: 1 of 21 rows cannot be used:\n  line 4: not JSON" in said
    assert "18 prompts to train on; a tenth is held out (2 prompts)" in said
    assert re.findall(r"(beginning|continuing) run (\S+)", said) == [
        ("beginning", result["run_id"]),
        ("continuing", result["run_id"]),
    ]
    check_result(home, result)
    check_tasks(home)
    replayed = home.run("replay", str(result["run_id"]), "-o", "json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert [step["equal"] for step in json.loads(replayed.stdout)["steps"]] == [True] * (STEPS + 1)


def interrupted_after_a_step(home: Home, learning: "subprocess.Popen[str]") -> set[str]:
    """Presses Ctrl-C after the first step; returns the names of the processes that ran."""
    eventually(
        lambda: any((home.path / "adapters").rglob("v1/adapter_model.safetensors")), 200, message="no step was trained"
    )
    ran = {*home.processes()}
    learning.send_signal(signal.SIGINT)
    learning.communicate(timeout=60)
    assert learning.returncode == 130 and pids_of(home.path) == []
    return ran


HINT = """
def hint(completions, letter, **columns):
    print("a hint for", letter[0])
    return [f"Use the letter {letter[0]} often."] * len(completions)
"""


@pytest.mark.long  # tests/unit has its parts: the function in the manager, the loss; tests/integration the teacher
def test_a_run_on_hints_alone_is_distilled_on_a_given_kafka_and_replayed(
    own_broker: EmbeddedBroker, tmp_path: Path, tiny_model: Path
) -> None:
    home = Home(tmp_path / "home", tiny_model)
    home.env["TENTALIS_BOOTSTRAP"] = own_broker.bootstrap
    (tmp_path / "hints.py").write_text(HINT, encoding="utf-8")
    arguments = command(home, tmp_path, "--hint", f"{tmp_path / 'hints.py'}:hint", "--loss", "opd")
    ran = interrupted_after_a_step(home, started(home, arguments))
    assert "hinting" in ran and "broker" not in ran
    learning = started(home, arguments)
    with watched(home) as shown:
        result = home.finish(learning, timeout=400)
    check_step_times(shown, result)
    assert f"continuing run {result['run_id']}" in home.errors.read_text()
    begun_on = json.loads((home.path / "runs" / result["run_id"] / "kafka.json").read_text(encoding="utf-8"))
    assert begun_on["bootstrap"] == own_broker.bootstrap and not any((home.path / "kafka").iterdir())
    assert result["policy"] == f"learn@v{STEPS}" and result["held_out"]["unknown"] == 0
    given = [record["text"] for record in values_of(home, "tentalis.feedback.v1")]
    assert len(given) >= 16 * (STEPS + 1) and {*given} == {"Use the letter e often."}
    steps = [record["metrics"] for record in values_of(home, "tentalis.batches.v1") if record.get("metrics")]
    trained = [step for step in steps if step.get("opd_tokens")]
    assert len(trained) == STEPS
    assert all(step["opd_advantage_abs"] > 0 and step["opd_loss"] != 0 and step["rl_loss"] == 0 for step in trained)
    replayed = home.run("replay", str(result["run_id"]), "-o", "json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert [step["equal"] for step in json.loads(replayed.stdout)["steps"]] == [True] * (STEPS + 1)


@contextmanager
def watched(home: Home) -> Iterator[list[dict[str, Any]]]:
    """What `tentalis status --watch` shows meanwhile."""
    shown: list[dict[str, Any]] = []
    watch = subprocess.Popen(
        [*CLI, "status", "--watch", "-o", "json"],
        env=home.env,
        stdout=subprocess.PIPE,
        stderr=home.errors.open("ab"),
        text=True,
    )
    try:
        yield shown
    finally:
        watch.send_signal(signal.SIGINT)
        shown += [json.loads(line) for line in watch.communicate(timeout=60)[0].splitlines()]


def check_step_times(shown: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """The watch ends with the phases of the run's report."""
    newest = [found["step_times"] for found in shown if found["step_times"]][-1]
    (row,) = newest
    assert (row["run"], row["policy"], row["step"], row["steps"]) == (result["run_id"], "learn", STEPS, STEPS)
    assert all(seconds is not None for seconds in row["seconds_by_phase"].values())
    # The report has one round more, which the last version answered.
    for phase in ("planning", "training", "publishing"):
        assert row["seconds_by_phase"][phase] == pytest.approx(result["seconds_by_phase"][phase], abs=0.001)


def values_of(home: Home, topic: str) -> list[dict[str, Any]]:
    """The values of a topic's records."""
    shown = home.run("consume", topic, "--from", "earliest", "--exit", "-o", "json")
    return [json.loads(line)["value"] for line in shown.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_trained_and_replayed_equal(name: str, tmp_path: Path, tiny_model: Path) -> None:
    with judge_in_thread(lambda number, _: says(f"so \\boxed{{{number % 11}}}")) as judge:
        play_example(Home(tmp_path / "home", tiny_model), name, judge.url)


def play_example(home: Home, name: str, judge: str) -> None:
    given = [word.replace("examples/", f"{ROOT}/examples/", 1) for word in learn_arguments(name)]
    if "--judge" in given:
        given[given.index("--judge") + 1] = judge
        given += ["--judge-model", "judge"]
    # A tiny model earns equal rewards, and dynamic sampling would give such a run up.
    smaller = ["--model", str(home.model), "--steps", str(STEPS), "--group", "4", "--max-tokens", "8"]
    smaller += ["--set", "lora.rank=4", "--set", "loss.dynamic_sampling=false"]
    result = home.finish(started(home, [*CLI, "learn", *given, *smaller, "-o", "json"]), timeout=300)
    assert result["policy"] == f"learn@v{STEPS}" and result["held_out"]["unknown"] == 0
    replayed = home.run("replay", str(result["run_id"]), "-o", "json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert [step["equal"] for step in json.loads(replayed.stdout)["steps"]] == [True] * (STEPS + 1)


@pytest.mark.long  # tests/integration has its parts: the trainer, and the server of whole models
def test_a_whole_model_is_trained_served_and_replayed(tmp_path: Path, tiny_model: Path) -> None:
    home = Home(tmp_path / "home", tiny_model)
    arguments = [word for word in command(home, tmp_path) if word not in ("--set", "lora.rank=4")]
    whole = ["--set", "lora=null", "--set", "optimizer.lr=1e-3"]
    result = home.finish(started(home, [*arguments, *whole]), timeout=400)
    # Each version answered the tasks of the next step, and the newest one the held-out prompts.
    assert [row["version"] for row in result["reward_by_version"]] == list(range(STEPS + 1))
    assert result["policy"] == f"learn@v{STEPS}" and result["held_out"]["unknown"] == 0
    weights = {
        folder.parent.name: folder.read_bytes() for folder in (home.path / "adapters").rglob("model.safetensors")
    }
    assert len({*weights.values()}) == len(weights) == STEPS + 1
    exported = tmp_path / "exported"
    done = home.run("policy", "export", f"learn@v{STEPS}", "--format", "safetensors", "--to", str(exported))
    assert done.returncode == 0, done.stderr
    assert (exported / "model.safetensors").read_bytes() == weights[f"v{STEPS}"]
    replayed = home.run("replay", str(result["run_id"]), "-o", "json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert [step["equal"] for step in json.loads(replayed.stdout)["steps"]] == [True] * (STEPS + 1)
    up = home.run("up", "--detach")
    try:
        assert up.returncode == 0, up.stderr
        served_by_the_standing_stack(home, f"learn@v{STEPS}", sha256_hex(weights[f"v{STEPS}"]))
    finally:
        home.run("down")


def served_by_the_standing_stack(home: Home, version: str, sha256: str) -> None:
    """Waits until the model server of `tentalis up` has a version, and asks it."""
    port = json.loads((home.path / "ports.json").read_text())["model"]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

        def found() -> dict[str, Any]:
            return {card["id"]: card.get("sha256") for card in client.get("/v1/models").json()["data"]}

        eventually(lambda: version in found(), 120, 0.5, lambda: f"{found()}\n{home.tail()}")
        assert found()[version] == sha256
        body = {"model": version, "messages": [{"role": "user", "content": "Write number 1."}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0, answer.text


SCRIPT = """
import json, sys
import tentalis

LETTER = "e"

def score(completions, **columns):
    return [text.count(LETTER) / max(1, len(text)) for text in completions]

rows = [{{"prompt": f"Write number {{number}}."}} for number in range(20)]
options = {{"settings": {{"lora.rank": 4}}, "steps": {steps}, "group": 4, "max_tokens": 8}}
run = tentalis.learn(rows, score, model={model!r}, **options)
replayed = run.replay()
rewards = list(run.to_dataset()["reward"])
print(json.dumps([run.curve, run.adapter, replayed.equal, len(replayed.steps), rewards]))
"""


@pytest.mark.long
def test_a_script_learns_replays_and_reads_its_answers(tmp_path: Path, tiny_model: Path) -> None:
    home = Home(tmp_path / "home", tiny_model)
    script = tmp_path / "train.py"  # without a guard of `__main__`: its functions are not loaded from it
    script.write_text(SCRIPT.format(steps=STEPS, model=str(tiny_model)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=home.env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    curve, adapter, equal, steps, rewards = json.loads(done.stdout)
    assert len(curve) == STEPS + 1 and (Path(adapter) / "adapter_model.safetensors").exists()
    assert equal is True and steps == STEPS + 1
    assert len(rewards) >= 16 * (STEPS + 1) and all(reward is not None for reward in rewards)
    assert f"{STEPS}/{STEPS}" in done.stderr and pids_of(home.path) == []


@pytest.mark.long
def test_a_run_with_nothing_to_learn_ends_with_the_reason(tmp_path: Path, tiny_model: Path) -> None:
    home = Home(tmp_path / "home", tiny_model)
    arguments = command(home, tmp_path, "--set", "loss.max_equal_batches=2")
    (tmp_path / "rewards.py").write_text(
        "def score(completions, **columns):\n    return [0.5] * len(completions)\n", encoding="utf-8"
    )
    done = subprocess.run(arguments, env=home.env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "batches of version 0 had equal rewards for all answers to a prompt" in done.stderr
    assert "answers of its newest version are in groups whose rewards are all equal" in done.stderr
    assert pids_of(home.path) == []


def check_result(home: Home, result: dict[str, Any]) -> None:
    assert [row["version"] for row in result["reward_by_version"]] == list(range(STEPS + 1))
    assert result["policy"] == f"learn@v{STEPS}"
    assert (Path(result["adapter"]) / "adapter_model.safetensors").exists()
    assert result["held_out"]["prompts"] == 2 and result["held_out"]["unknown"] == 0
    for moment in ("before", "after", "difference"):
        found = result["held_out"][moment]
        assert found["low"] <= found["mean"] <= found["high"]
    assert result["start_seconds"] > 0 and {*result["seconds_by_phase"]} == {*PHASES}
    assert len(result["samples"]) == 2 and result["samples"][0]["question"].startswith("Write number")
    assert result["next"][0] == f"tentalis replay {result['run_id']}"
    assert "held-out prompts" in Path(result["report"]).read_text(encoding="utf-8")
    assert pids_of(home.path) == []


def check_tasks(home: Home) -> None:
    """Every task carries its row, no held-out prompt was asked, and every outcome has the function's reward."""
    tasks = values_of(home, "tentalis.tasks.v1")
    (prompts,) = (home.path / "runs").glob("learn-*/prompts")
    described = json.loads((prompts / "set.json").read_text(encoding="utf-8"))
    assert {task["metadata"]["prompts"] for task in tasks} == {described["sha256"]}
    lines = [int(task["metadata"]["line"]) for task in tasks]
    assert len({*lines}) == min(len(lines), 18) and 4 not in lines
    for task in tasks:
        # Line 4 is the bad one.
        number = int(task["metadata"]["line"]) - 1
        assert task["messages"][0]["content"] == f"Write number {number if number < 3 else number - 1}."
        assert json.loads(task["verifier"]["data"]) == {"columns": {"letter": "e"}}


def test_the_check_shows_sixteen_answers_and_starts_no_broker(tmp_path: Path, tiny_model: Path) -> None:
    home = Home(tmp_path / "home", tiny_model)
    arguments = command(home, tmp_path, "--check")
    (tmp_path / "rewards.py").write_text(REWARD.replace("    return", "    print(letter)\n    return"))
    done = subprocess.run(arguments, env=home.env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rewards.py:score prints: ['e']") >= 15  # the process may end before its last line is read
    found = json.loads(done.stdout)
    assert found["useful"] is True
    assert [len(prompt["answers"]) for prompt in found["prompts"]] == [4] * 4
    assert all(answer["reward"] is not None for prompt in found["prompts"] for answer in prompt["answers"])
    assert found["solve_rate"] == 0.0 and any("No answer reaches 0.5" in remark for remark in found["remarks"])
    assert not (home.path / "logs" / "broker.log").exists() and [*(home.path / "runs").iterdir()] == []
    assert pids_of(home.path) == []
