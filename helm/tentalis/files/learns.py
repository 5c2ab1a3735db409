"""`helm test`: sends tasks, waits for the rollouts of one, and for the adapter that learned from it.

It sends as many tasks as fill a batch of the run, because the trainer makes no step for fewer. If rollouts came too
late for a step (simulated users may ask at the same time), it sends another batch, until the time is over.
"""

import argparse
import sys
import time
import uuid
from collections.abc import Iterator, Sequence

import yaml

from schemas import topics
from schemas.records import (
    BatchPlan,
    Message,
    Outcome,
    PolicyAck,
    PolicyUpdate,
    RunManifest,
    Sampling,
    StepResult,
    Task,
    Terms,
    Verifier,
)
from tentalis.kafka.codec import make_codec
from tentalis.kafka.preflight import connect
from tentalis.kafka.producer import Publisher
from tentalis.kafka.reader import Reader
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

QUESTIONS = {
    "chat": ("How do I boil an egg?", Verifier(name="taste")),
    "math": ("What is 17 + 25? Put the answer into \\boxed{}.", Verifier(name="math", data='{"answer": "42"}')),
}
SAMPLES, MAX_TOKENS = 8, 32
AGAIN_S = 300.0


class Progress:
    """What the log says of the tasks that were sent."""

    def __init__(self, run: str, policy: str) -> None:
        self.run, self.policy = run, policy
        self.batch_rollouts: int | None = None
        self.rollouts: set[str] = set()
        self.planned: dict[tuple[str, int], str] = {}
        self.updates: dict[tuple[str, int], PolicyUpdate] = {}
        self.steps: set[tuple[str, int]] = set()
        self.served: set[int] = set()

    def apply(self, record: object) -> None:
        """Takes one record of the log."""
        match record:
            case RunManifest() if self._ours(record.run_id):
                self.batch_rollouts = int((yaml.safe_load(record.config) or {}).get("batch_rollouts", 32))
            case Outcome() if record.head.task_id.startswith(PREFIX) and record.rollout_id is not None:
                self.rollouts.add(record.rollout_id)
            case BatchPlan() if self._ours(record.run_id):
                # The key of a rollout is TASK/SAMPLE. The plan may be read before the outcome that names the rollout.
                for row in record.rows:
                    if row.rollout_id.startswith(PREFIX):
                        self.planned[record.run_id, record.step] = row.rollout_id
            case StepResult() if self._ours(record.run_id):
                self.steps.add((record.run_id, record.step))
            case PolicyUpdate() if record.policy == self.policy:
                self.updates[record.run_id, record.step] = record
            case PolicyAck() if record.policy == self.policy and record.ok:
                self.served.add(record.version)

    def _ours(self, run_id: str) -> bool:
        return run_id == self.run or run_id.rpartition(".")[0] == self.run

    def learned(self) -> Iterator[tuple[str, PolicyUpdate]]:
        """Yields each rollout of ours that a step trained on, with the adapter of that step."""
        for place, rollout in self.planned.items():
            if place in self.steps and place in self.updates:
                yield rollout, self.updates[place]


PREFIX = f"helm-test-{uuid.uuid4().hex[:8]}-"


def task(number: int, policy: str, environment: str) -> Task:
    """Returns the task of this number."""
    question, verifier = QUESTIONS[environment]
    return Task(
        task_id=f"{PREFIX}{number}",
        event_time=now_ms(),
        policy=policy,
        environment=environment,
        messages=(Message(role="user", content=question),),
        n_samples=SAMPLES,
        sampling=Sampling(max_tokens=MAX_TOKENS),
        verifier=verifier,
        terms=Terms(deadline_ms=600_000),
        manager_id="helm-test",
    )


def arguments(command: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments. `environment` is the first of those given for which there is a question."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--environment", required=True, action="append", help="Repeatable.")
    parser.add_argument("--timeout", type=float, default=1800.0)
    given = parser.parse_args(command)
    known = [each for each in given.environment if each in QUESTIONS]
    if not known:
        asked, here = " or ".join(QUESTIONS), ", ".join(given.environment)
        parser.error(f"worker.environments has {here}, and this test asks in {asked}: add one, or send a task yourself")
    given.environment = known[0]
    return given


def main() -> int:
    """Runs the test; returns 0 if the run learned from a task of ours."""
    given = arguments()
    settings = Settings.from_env()
    connect(settings, 60.0)
    codec = make_codec(settings)
    names = [topics.RUNS, topics.OUTCOMES, topics.BATCHES, topics.POLICIES, topics.POLICY_ACKS]
    reader, publisher = Reader(settings, names, codec), Publisher(settings, "tentalis-helm-test", codec)
    progress, sent, sent_at = Progress(given.run, given.policy), 0, 0.0
    began = time.monotonic()
    said = ""
    while time.monotonic() - began < given.timeout:
        for _, record in reader.poll(1.0):
            progress.apply(record)
        for rollout, update in progress.learned():
            served = " and is served" if update.version in progress.served else ""
            print(f"learned: {update.policy}@v{update.version} (sha256 {update.sha256}) from {rollout}{served}")
            return 0
        if progress.batch_rollouts and progress.served and time.monotonic() - sent_at > AGAIN_S * bool(sent):
            for _ in range(-(-progress.batch_rollouts // SAMPLES)):
                publisher.send(topics.TASKS, task(sent, given.policy, given.environment))
                sent += 1
            publisher.flush()
            sent_at = time.monotonic()
        state = f"{sent} tasks sent, {len(progress.rollouts)} rollouts, {len(progress.planned)} steps planned with them"
        if not progress.batch_rollouts:
            state = f"the run {given.run} has not begun: is the trainer ready?"
        elif not progress.served:
            state = f"no version of {given.policy} is served: are policies and the model server ready?"
        if state != said:
            print(f"{time.monotonic() - began:.0f} s: {state}", flush=True)
            said = state
    print(f"no adapter learned from our tasks within {given.timeout:g} s; last: {said}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
