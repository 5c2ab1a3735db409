"""`tentalis status --watch` shows the phases of the last steps of a run on a real log, and follows it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from tentalis.demo.stats import PHASES
from tentalis.text.timestamps import now_ms
from tests.support.kafka_fixture import Kafka
from tests.support.loop_lab import Lab
from tests.support.loop_records import ack, manifest, outcome, plan, result, step_result, task, update

pytestmark = pytest.mark.broker

SAMPLING_S = 0.5
# A shell lets the processes that it starts with & ignore SIGINT, and they pass that on.
HEARS_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def put_step(lab: Lab, step: int) -> None:
    name, named = lab.name, {"policy": lab.name}
    of = task(f"{name}-{step}", run_id=name, metadata={"round": str(step - 1)}, **named)
    lab.put(topics.TASKS, of)
    time.sleep(SAMPLING_S)
    for index in range(of.n_samples):
        lab.put(topics.RESULTS, result(of, index, version=step))
        lab.put(topics.OUTCOMES, outcome(of, index, version=step))
    lab.put(topics.BATCHES, plan(step, [], name), step_result(step, step + 1, name))
    lab.put(topics.POLICIES, update(step + 1, run_id=name, **named))
    lab.put(topics.POLICY_ACKS, ack(step + 1, policy=name))


def shown_until(watch: "subprocess.Popen[str]", enough: Callable[[dict[str, Any]], bool], name: str) -> dict[str, Any]:
    """The row of a run, once it is as it should be."""
    assert watch.stdout is not None
    deadline = time.monotonic() + 60
    for line in watch.stdout:
        found = json.loads(line)
        for row in found["step_times"] or ():
            if row["run"] == name and enough(row):
                assert found["step_times_unknown"] is None
                return dict(row)
        assert time.monotonic() < deadline, line
    raise AssertionError("the watch ended")


def test_a_watch_reads_the_last_steps_and_follows_the_run(kafka: Kafka, unique: str, tmp_path: Path) -> None:
    lab = Lab(kafka.bootstrap, unique)
    begun = manifest(unique, steps=2).model_copy(update={"policy": unique, "event_time": now_ms()})
    lab.put(topics.RUNS, begun)
    put_step(lab, 1)
    watch = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HEARS_SIGINT,
            "-m",
            "tentalis.cli",
            "status",
            "--watch",
            "-o",
            "json",
            "--bootstrap-server",
            kafka.bootstrap,
        ],
        env=os.environ | {"TENTALIS_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        row = shown_until(watch, lambda row: None not in row["seconds_by_phase"].values(), unique)
        assert (row["policy"], row["step"], row["steps"]) == (unique, 1, 1)
        assert list(row["seconds_by_phase"]) == [*PHASES]
        assert SAMPLING_S - 0.1 < row["seconds_by_phase"]["sampling"] < 20
        put_step(lab, 2)
        row = shown_until(watch, lambda row: row["steps"] == 2, unique)
        assert row["step"] == 2
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=20)  # it cannot end while what it has printed fills the pipe
        assert watch.returncode == 130
    finally:
        watch.kill()
        watch.communicate()
