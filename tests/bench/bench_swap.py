"""Seconds from feedback to a served adapter, without the training step: hint, join, plan, checkpoint, publication,
swap.

Runs the demo on a tiny model and reads its topics: per step, from the append time of the last feedback that a batch
needed to the append time of the acknowledgement of the version trained on it, less the seconds of the step itself.
BENCH_STEPS sets the number of steps (default 8).
"""

import os
import tempfile
from pathlib import Path

import numpy as np

from schemas import topics
from schemas.records import BatchPlan, Feedback, PolicyAck, Rollout, RunManifest, StepResult
from tentalis.config import Settings
from tentalis.kafka import Stored, make_codec, read_to_end
from tentalis.local.attach import broker_alone
from tests.bench.lab import log, report
from tests.e2e.lab import Home
from tests.integration.inference_lab import make_model


def records(settings: Settings, topic: str) -> list[tuple[Stored, object]]:
    """What a topic holds."""
    codec = make_codec(settings)
    return [(stored, stored.decode(codec)) for stored in read_to_end(settings, topic) if stored.value is not None]


def seconds_per_step(settings: Settings) -> list[float]:
    """One figure per step of the only run on the log."""
    said = {
        (record.result.result_id): stored.timestamp
        for stored, record in records(settings, topics.FEEDBACK)
        if isinstance(record, Feedback) and record.result is not None
    }
    answered = {
        record.rollout_id: record.result_id
        for _, record in records(settings, topics.ROLLOUTS)
        if isinstance(record, Rollout)
    }
    served: dict[int, int] = {}
    for stored, record in records(settings, topics.POLICY_ACKS):
        if isinstance(record, PolicyAck) and record.ok:
            served.setdefault(record.version, stored.timestamp)
    batches = [record for _, record in records(settings, topics.BATCHES)]
    first = next(m.first_version for _, m in records(settings, topics.RUNS) if isinstance(m, RunManifest))
    plans = {plan.step: plan for plan in batches if isinstance(plan, BatchPlan)}
    found = []
    for result in batches:
        if isinstance(result, StepResult) and result.step > 0 and first + result.step in served:
            needed = max(said[answered[row.rollout_id]] for row in plans[result.step].rows)
            whole = (served[first + result.step] - needed) / 1000
            found.append(
                whole - sum(result.seconds.get(name, 0.0) for name in ("pack", "forward_backward", "optimizer"))
            )
    return found


def main() -> None:
    steps = int(os.environ.get("BENCH_STEPS", "8"))
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home", make_model(Path(folder) / "tiny-llama"))
        log(f"a demo of {steps} steps on a tiny model")
        home.finish(home.start_demo("--steps", str(steps)), timeout=900)
        with broker_alone(Settings.from_env().model_copy(update={"home": home.path, "bootstrap": None})) as settings:
            found = seconds_per_step(settings)
    report(
        steps=len(found),
        p50_seconds=float(np.percentile(found, 50)),
        p95_seconds=float(np.percentile(found, 95)),
        max_seconds=max(found),
    )


if __name__ == "__main__":
    main()
