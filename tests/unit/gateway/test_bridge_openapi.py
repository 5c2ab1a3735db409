"""Every route tried with what the OpenAPI page allows and forbids, in this process."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode

from tentalis.gateway.api.routes import router
from tentalis.gateway.app import GatewayDependencies
from tentalis.gateway.http.keys import Scope, create
from tests.support.bridge_log import MemoryLog, bridge_over
from tests.support.gateway_lab import lab

EXAMPLES = int(os.environ.get("TENTALIS_API_EXAMPLES", "5"))
NOTHING_TO_GET_WRONG = ("/health", "/training/status", "/v1/models", "/v1/models/{name}")


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = create(path, list(Scope))
    log = MemoryLog()

    def bridge(app: FastAPI, deps: GatewayDependencies) -> None:
        routes = router(
            bridge_over(log), deps.keys, body_bytes=2**20, body_s=30.0, longest_poll_s=0.01, longest_watch_s=0.01
        )
        app.include_router(routes)

    with lab(tmp_path, keys=path, extensions=(bridge,)) as gateway:
        tried = try_all(f"{gateway.url}/openapi.json", key)
        ended = gateway.log.events
    assert {f"{name} {code}" for name in ("POST /tasks/assign", "POST /v1/traces") for code in (2, 4)} <= set(tried)
    assert log.topics and ended, "nothing good was ever sent"


def try_all(page: str, key: str) -> Counter[str]:
    """Every route of a page; how often each was answered with which hundred."""
    schema = schemathesis.openapi.from_url(page)
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
    return tried
