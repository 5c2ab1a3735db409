"""Every route tried with what the OpenAPI page allows and forbids, in this process."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode

from tentalis.gateway.keys import Keys, Scope, create
from tests.unit.bridge_log import MemoryLog, app_over, bridge_over

EXAMPLES = int(os.environ.get("TENTALIS_API_EXAMPLES", "5"))
NOTHING_TO_GET_WRONG = ("/health", "/training/status")


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = create(path, list(Scope))
    log = MemoryLog()
    app = app_over(bridge_over(log), Keys(path), longest_poll_s=0.01, longest_watch_s=0.01)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    tried: Counter[str] = Counter()
    for mode in GenerationMode:
        for found in schema.get_all_operations():
            operation = found.ok()
            if mode is GenerationMode.NEGATIVE and operation.path in NOTHING_TO_GET_WRONG:
                continue

            @hypothesis.settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                response = case.call_and_validate(headers={"Authorization": f"Bearer {key}"})
                tried[f"{case.method} {case.path} {response.status_code // 100}"] += 1

            check()
    assert {f"{name} {code}" for name in ("POST /tasks/assign", "POST /v1/traces") for code in (2, 4)} <= set(tried)
    assert log.topics, "nothing good was ever sent"
