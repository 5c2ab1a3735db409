"""Seconds from the last rollout of a batch to a served, acknowledged adapter, without the training step: plan,
checkpoint, publication, swap.

Runs the demo on a tiny model and reads its topics: for each step the time from the append of the last rollout of its
batch to the acknowledgement of the version trained on it, minus the seconds of the step itself. `from_feedback_p95` is
the same from the last feedback that the batch needed, with scoring, hinting and the join in between. BENCH_STEPS sets
the number of steps (default 48: a p95 needs at least 40).
"""

import os
import tempfile
from pathlib import Path

import numpy as np

from schemas import topics
from schemas.records import BatchPlan, Feedback, PolicyAck, Rollout, RunManifest, StepResult
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.local.attach import broker_alone
from tentalis.service.settings import Settings
from tests.bench.lab import log, report
from tests.e2e.lab import Home
from tests.support.inference_lab import make_model


def records(settings: Settings, topic: str) -> list[tuple[Stored, object]]:
    """The records of a topic."""
    codec = make_codec(settings)
    return [(stored, stored.decode(codec)) for stored in read_to_end(settings, topic) if stored.value is not None]


def seconds_per_step(settings: Settings) -> dict[str, list[float]]:
    """The seconds of each step of the only run on the log, counted from its last rollout and from its last feedback."""
    said = {
        (record.result.result_id): stored.timestamp
        for stored, record in records(settings, topics.FEEDBACK)
        if isinstance(record, Feedback) and record.result is not None
    }
    rollouts = {
        record.rollout_id: (stored.timestamp, record.result_id)
        for stored, record in records(settings, topics.ROLLOUTS)
        if isinstance(record, Rollout)
    }
    served: dict[int, int] = {}
    for stored, record in records(settings, topics.POLICY_ACKS):
        if isinstance(record, PolicyAck) and record.ok:
            served.setdefault(record.version, stored.timestamp)
    batches = [record for _, record in records(settings, topics.BATCHES)]
    first = next(m.first_version for _, m in records(settings, topics.RUNS) if isinstance(m, RunManifest))
    plans = {plan.step: plan for plan in batches if isinstance(plan, BatchPlan)}
    found: dict[str, list[float]] = {"rollout": [], "feedback": []}
    for result in batches:
        if isinstance(result, StepResult) and result.step > 0 and first + result.step in served:
            trained = [rollouts[row.rollout_id] for row in plans[result.step].rows]
            # A rollout whose user said nothing has no feedback.
            begun = {"rollout": max(at for at, _ in trained), "feedback": max(said.get(by, at) for at, by in trained)}
            step = sum(result.seconds.get(name, 0.0) for name in ("pack", "forward_backward", "optimizer"))
            for name, at in begun.items():
                found[name].append((served[first + result.step] - at) / 1000 - step)
    return found


def main() -> None:
    steps = int(os.environ.get("BENCH_STEPS", "48"))
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home", make_model(Path(folder) / "tiny-llama"))
        log(f"a demo of {steps} steps on a tiny model")
        home.finish(home.start_demo("--steps", str(steps)), timeout=3000)
        with broker_alone(Settings.from_env().model_copy(update={"home": home.path, "bootstrap": None})) as settings:
            found = seconds_per_step(settings)
    ours = found["rollout"]
    report(
        ours=float(np.percentile(ours, 95)),
        p50=float(np.percentile(ours, 50)),
        max=max(ours),
        from_feedback_p95=float(np.percentile(found["feedback"], 95)),
        swaps=len(ours),
        unit="seconds",
    )


if __name__ == "__main__":
    main()
