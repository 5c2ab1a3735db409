"""Seconds per step that a trainer saves because it commits a step while it computes the next one.

Two runs over the same rollouts on their own broker: in the first one the trainer waits for each commit, in the second
it does not. Both must give the same adapters. SmolLM2-135M (BENCH_MODEL) with a large adapter (BENCH_RANK, 256:
299 MiB, and 3 times that in a checkpoint), BENCH_STEPS (4) steps of 8 rollouts of BENCH_TOKENS (48) tokens.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from schemas import topics
from schemas.keyed_partitions import VARIABLE
from schemas.records import Rollout, StepResult
from tentalis.kafka.codec import make_codec
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tests.bench.lab import log, own_kafka, report
from tests.support.trainer_lab import config, rollout
from trainer.run import coordinator
from trainer.run.commit import CommittedStep
from trainer.run.commit_thread import CommitThread
from trainer.run.run_log import read_run

BATCH, GROUP = 8, 4


def make_rollouts(policy: str, vocab: int, steps: int, tokens: int) -> list[Rollout]:
    """Groups of random answers with rewards."""
    draw, made = np.random.default_rng(0), list[Rollout]()
    for group in range(steps * BATCH // GROUP):
        prompt, rewards = draw.integers(1, vocab, 16).tolist(), draw.random(GROUP).round(3).tolist()
        for index, reward in enumerate(rewards):
            response = draw.integers(1, vocab, tokens - 16).tolist()
            made.append(
                rollout(
                    f"{policy}-{group}",
                    index,
                    policy=policy,
                    prompt=prompt,
                    response=response,
                    sampler=[-9.0] * len(response),
                    reward=reward,
                    rewards=rewards,
                    n=GROUP,
                )
            )
    return made


@contextmanager
def watched(waiting: bool) -> Iterator[list[float]]:
    """Yields the seconds of each commit. With `waiting` a commit ends before the training thread continues."""
    begin, commit = CommitThread.begin, coordinator.commit_step
    seconds: list[float] = []

    def waiting_begin(self: CommitThread[Any], work: Callable[[], Any]) -> None:
        begin(self, work)
        self._executor.submit(lambda: None).result()

    def timed_commit(*arguments: Any) -> CommittedStep:
        committed = commit(*arguments)
        seconds.append(committed.seconds["publish"])
        return committed

    patched: Any = coordinator
    patched.commit_step = timed_commit
    if waiting:
        CommitThread.begin = waiting_begin  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        patched.commit_step = commit
        CommitThread.begin = begin  # type: ignore[method-assign]


def train(settings: Settings, model: str, vocab: int, waiting: bool) -> tuple[list[StepResult], list[float]]:
    """Trains a run; returns its results and the seconds of its commits."""
    from trainer.run.loop import run

    steps, tokens = int(os.environ.get("BENCH_STEPS", "4")), int(os.environ.get("BENCH_TOKENS", "48"))
    rank, name = int(os.environ.get("BENCH_RANK", "256")), "waiting" if waiting else "overlapped"
    codec = make_codec(settings)
    publisher = Publisher(settings, "bench", codec)
    for each in make_rollouts(name, vocab, steps, tokens):
        publisher.send(topics.ROLLOUTS, each)
    publisher.flush()
    run_config = config(
        model,  # type: ignore[arg-type]
        policy=name,
        run_id=name,
        start="earliest",
        batch_rollouts=BATCH,
        micro_batch_tokens=4096,
        max_rollout_tokens=tokens,
        steps=steps,
        threads=os.cpu_count(),
        lora={"rank": rank, "alpha": rank},
        optimizer={"lr": 1e-5},
    )
    with watched(waiting) as commits:
        code = run(run_config, settings)
    assert code == 0, f"the trainer ended with {code}"
    found = read_run(settings, codec, name)
    results = [result for _, result in sorted(found.results.items())]
    for folder in ("checkpoints", "adapters"):
        shutil.rmtree(settings.home / folder)
    return results, commits


def period(results: list[StepResult]) -> float:
    """Seconds from one StepResult to the next, from the second step on: the first one reads the topic."""
    times = [result.event_time for result in results[2:]]
    return (times[-1] - times[0]) / 1000 / (len(times) - 1)


def main() -> None:
    if os.environ.get(VARIABLE) != "1":
        # With one partition both runs read their rollouts in the same order, and so plan the same steps.
        os.execve(sys.executable, [sys.executable, "-m", "tests.bench.bench_commit"], os.environ | {VARIABLE: "1"})
    from transformers import AutoConfig

    from tentalis.inference.models import resolve_model

    model = resolve_model(os.environ.get("BENCH_MODEL"), Settings.from_env().cache)
    vocab = AutoConfig.from_pretrained(model).vocab_size
    with own_kafka() as settings:
        found = {name: train(settings, str(model), vocab, name == "waiting") for name in ("waiting", "overlapped")}
    digests = {name: [result.adapter_sha256 for result in results] for name, (results, _) in found.items()}
    assert digests["waiting"] == digests["overlapped"], digests
    for name, (results, commits) in found.items():
        log(f"{name}: commits {commits}, phases {[result.seconds for result in results[1:]]}")
    waiting, overlapped = (period(found[name][0]) for name in ("waiting", "overlapped"))
    report(
        rank=int(os.environ.get("BENCH_RANK", "256")),
        commit_seconds=float(np.median(found["waiting"][1])),
        overlapped_commit_seconds=float(np.median(found["overlapped"][1])),
        waiting_step_seconds=waiting,
        overlapped_step_seconds=overlapped,
        saved_seconds=waiting - overlapped,
        equal=True,
        threads=os.cpu_count(),
    )


if __name__ == "__main__":
    main()
