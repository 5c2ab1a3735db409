"""A run that gets garbage on every topic and Ctrl-C, and goes on: nothing is lost, and what is bad is set aside."""

import base64
import json
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.lab import Home, pids_of
from tests.kafka_fixture import eventually

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

GARBAGE = ("not avro at all", "\x00\x00\x00\x00\x07x")
INPUTS = ("tasks", "results", "feedback", "halves", "outcomes", "rollouts")


def test_garbage_is_dead_lettered_and_ctrl_c_stops_within_ten_seconds_and_the_next_start_resumes(
    tmp_path: Path, tiny_model: Path
) -> None:
    home = Home(tmp_path / "home", tiny_model)
    demo = home.start_demo("--steps", "5")
    eventually(
        lambda: all(home.processes().get(name, {}).get("state") == "ready" for name in ("scoring", "join", "hinting")),
        200,
        message="the applications did not become ready",
    )
    for name in sorted(INPUTS, key="rollouts".__eq__):
        if name == "rollouts":
            # The manifest holds where the run begins to read: what lies before that is nobody's.
            eventually(
                lambda: home.run("consume", "tentalis.runs.v1", "--from", "earliest", "--exit", "-o", "json").stdout,
                200,
                message="the trainer did not begin",
            )
        for garbage in GARBAGE:
            done = home.run("produce", f"tentalis.{name}.v1", "--raw", "--key", "garbage", stdin=garbage)
            assert done.returncode == 0, done.stderr
    eventually(
        lambda: any((home.path / "adapters").rglob("v1/adapter_model.safetensors")), 200, message="no step was trained"
    )
    run_ids = [folder.name for folder in (home.path / "runs").iterdir()]
    demo.send_signal(signal.SIGINT)
    began = time.monotonic()
    demo.communicate(timeout=60)
    took = time.monotonic() - began
    assert demo.returncode != 0
    # The promise is 10 s where nothing else runs. One that waits for what does not end would take a minute.
    assert took < 30, f"{took:.1f} s from Ctrl-C to the end"
    assert pids_of(home.path) == []

    again = home.start_demo("--steps", "5", "--keep")
    eventually(lambda: again.poll() is not None or any((home.path / "reports").rglob("*.html")), 400, interval=0.5)
    try:  # on the stack that stays
        for name in INPUTS:

            def letters(topic: str = f"tentalis.{name}.v1.dlq") -> bool:
                shown = home.run("consume", topic, "--from", "earliest", "--exit", "-o", "json")
                # At least once: a record that is read again after a restart is dead-lettered again.
                found = {
                    row["dlq"]["original-offset"]: base64.b64decode(row["value_base64"])
                    for row in map(json.loads, shown.stdout.splitlines())
                }
                return sorted(found.values()) == sorted(map(str.encode, GARBAGE))

            eventually(letters, 90, interval=1, message=f"the garbage on {name} was not dead-lettered")
        assert home.run("verify", run_ids[0]).returncode == 0
        assert home.run("replay", run_ids[0]).returncode == 0
    finally:
        again.send_signal(signal.SIGINT)
        result = home.finish(again, timeout=60)
    assert [result["run_id"]] == run_ids
    assert pids_of(home.path) == []
