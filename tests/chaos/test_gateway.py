"""Twenty seconds of kills around the gateway (`make chaos-gateway` runs five minutes): completed calls are recorded."""

import json
import random
from pathlib import Path

import pytest

from tests.chaos.gateway import GATEWAYS, run

pytestmark = [pytest.mark.broker, pytest.mark.chaos, pytest.mark.timeout(900)]


def test_what_clients_saw_completed_is_on_the_log_once_whatever_is_killed(tmp_path: Path) -> None:
    report = run(tmp_path, seconds=20, streams=8, seed=random.SystemRandom().randrange(2**32))
    print(json.dumps(report))
    assert (report["lost"], report["twice"], report["wrong"], report["foreign"]) == (0, 0, 0, 0), report
    assert report["completed"] > 0 and report["kills"].keys() >= {*GATEWAYS, "broker", "backend"}
