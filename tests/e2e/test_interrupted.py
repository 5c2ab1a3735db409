"""A run that gets garbage on every topic and Ctrl-C, and goes on: nothing is lost, and what is bad is set aside."""

import signal
import time
from pathlib import Path

import pytest

from schemas import topics
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tests.e2e.lab import Home, pids_of
from tests.support.kafka_fixture import eventually

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

GARBAGE = (b"not avro at all", b"\x00\x00\x00\x00\x07x")
STEPS = "5"
INPUTS = (topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.HALVES, topics.OUTCOMES, topics.ROLLOUTS)


def test_garbage_is_dead_lettered_and_ctrl_c_stops_within_ten_seconds_and_the_next_start_resumes(
    tmp_path: Path, tiny_model: Path
) -> None:
    home = Home(tmp_path / "home", tiny_model)
    demo = home.start_demo("--steps", STEPS)
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
    run_ids = [folder.name for folder in (home.path / "runs").iterdir()]
    demo.send_signal(signal.SIGINT)
    began = time.monotonic()
    demo.communicate(timeout=60)
    took = time.monotonic() - began
    assert demo.returncode != 0
    # The promise is 10 s where nothing else runs. One that waits for what does not end would take a minute.
    assert took < 30, f"{took:.1f} s from Ctrl-C to the end"
    assert pids_of(home.path) == []

    again = home.start_demo("--steps", STEPS, "--keep")
    eventually(lambda: again.poll() is not None or any((home.path / "reports").rglob("*.html")), 400, interval=0.5)
    try:  # on the stack that stays
        for name in INPUTS:

            def letters(topic: str = f"{name}.dlq") -> bool:
                # At least once: a record that is read again after a restart is dead-lettered again.
                return {stored.value for stored in read_to_end(settings, topic)} == set(GARBAGE)

            eventually(letters, 90, interval=1, message=f"the garbage on {name} was not dead-lettered")
        assert home.run("verify", run_ids[0]).returncode == 0
        assert home.run("replay", run_ids[0]).returncode == 0
    finally:
        again.send_signal(signal.SIGINT)
        result = home.finish(again, timeout=60)
    assert [result["run_id"]] == run_ids
    assert pids_of(home.path) == []
