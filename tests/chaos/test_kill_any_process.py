"""`kill -9` of each process, including the broker, at random moments of one run: ten kills.

The run must end by itself; then `tentalis verify`, which shares no code with the join, and the replay must succeed.
"""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.lab import Home
from tests.support.kafka_fixture import eventually

pytestmark = [pytest.mark.broker, pytest.mark.chaos, pytest.mark.timeout(1500)]

KILLS = 10
STEPS = 6


def test_a_run_survives_ten_kills_and_is_verified_and_replayed(tmp_path: Path, tiny_model: Path) -> None:
    home = Home(tmp_path / "home", tiny_model)
    seed = int(os.environ.get("TENTALIS_CHAOS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"TENTALIS_CHAOS_SEED={seed}")
    rng = random.Random(seed)
    demo = home.start_demo("--steps", str(STEPS))
    killed: list[str] = []
    eventually(
        lambda: any((home.path / "adapters").rglob("v1/adapter_model.safetensors")), 300, message="no step was trained"
    )
    deadline = time.monotonic() + 900
    # Each process once, in random order, during training.
    order = ["broker", "trainer", "join", "worker", "model", "scoring", "hinting", "manager", "policies", "aggregation"]
    rng.shuffle(order)
    while order and demo.poll() is None and time.monotonic() < deadline:
        time.sleep(rng.uniform(0.3, 2.0))
        name = order[-1]
        process = home.processes().get(name, {})
        if process.get("pid") and process["state"] in ("ready", "starting", "running"):
            os.kill(process["pid"], signal.SIGKILL)
            killed.append(name)
            order.pop()
    result = home.finish(demo, timeout=900)
    print("killed:", ", ".join(killed))
    assert len(killed) == KILLS, f"the run ended after {killed}"
    assert result["steps"] == STEPS
    verified = home.run("verify", str(result["run_id"]), "-o", "json")
    report = json.loads(verified.stdout)
    assert verified.returncode == 0, json.dumps(report, indent=1)[:4000]
    assert (report["lost"], report["wrong"], report["duplicates"]) == (0, 0, 0)
    replayed = home.run("replay", str(result["run_id"]), "-o", "json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
