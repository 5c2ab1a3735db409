"""A run that an earlier version of the code recorded replays to the same bytes.

`tests/golden/run` was exported before every module moved: three steps of the tests' tiny model on one thread. In the
environment of `tests/golden/trajectory.json`, where it was recorded, every adapter has the recorded sha256; elsewhere
the bytes are not compared. In between, the broker's volume is lost and restored as docs/operations/backup.md says.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tentalis.local.broker import EmbeddedBroker
from tests.support import ROOT, forked
from tests.support.kafka_fixture import started_broker
from tests.support.trainer_lab import tiny_model
from tests.support.transcript import PageShell, commands_of
from tests.unit.trainer.test_golden_trajectory import GOLDEN, environment

pytestmark = pytest.mark.broker


RUN = "recorded-before-the-move"


@pytest.fixture
def broker_at_home(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker whose volume is in the home of the commands, where they find it while it is stopped."""
    broker = started_broker(tmp_path / "kafka")
    yield broker
    broker.kill()


def test_a_run_recorded_before_the_move_replays_to_the_same_bytes_from_a_restored_volume(
    broker_at_home: EmbeddedBroker, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model")
    variables = os.environ | {
        "TENTALIS_BOOTSTRAP": broker_at_home.bootstrap,
        "TENTALIS_HOME": str(tmp_path),
        "TENTALIS_CACHE": str(tmp_path / "cache"),
    }

    def run(*wanted: list[str]) -> list[Any]:
        """The exit code, output and log of each command."""
        out, err = tmp_path / "commands.json", tmp_path / "commands.log"
        out.unlink(missing_ok=True)
        process = forked.start(forked.commands, json.dumps(wanted), variables, out, err)
        try:
            process.join(240)
            return [json.loads(line) for line in out.read_text().splitlines()]
        finally:
            forked.end(process)

    _, imported = run(["topics", "apply", "--yes"], ["import", str(ROOT / "tests" / "golden" / "run"), "-o", "json"])
    assert imported[0] == 0 and json.loads(imported[1])["written"]["Rollout"] == 24, imported
    broker_at_home.stop()
    with PageShell(tmp_path / "operator", {"TENTALIS_HOME": str(tmp_path), "RUN": RUN}) as operator:
        operator.follow(commands_of(ROOT / "docs" / "operations" / "backup.md"))
    broker_at_home.start()
    broker_at_home.wait_ready()
    (replayed,) = run(["replay", RUN, "--base-model", str(model), "-o", "json"])
    report = json.loads(replayed[1])
    assert len(report["steps"]) == 4, report
    assert report["problems"] == [], report
    recorded, here = json.loads(GOLDEN.read_text())["environment"], environment()
    if here != recorded:
        pytest.skip(f"replayed, but not compared to the byte: recorded in {recorded}, this is {here}")
    assert (replayed[0], report["equal"]) == (0, True), report
