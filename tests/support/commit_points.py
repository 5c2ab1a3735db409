"""The points of a training step at which a trainer can be killed or frozen from inside its process.

In the order of a step N; at `commit X` a record is on the broker in an open transaction, at `committed X` it is visible
to all consumers:

    commit BatchPlan N, committed BatchPlan N, step N, gradient N, stepped N, save N, saved N, commit StepResult N,
    committed StepResult N, publish N, published N, commit PolicyUpdate N, committed PolicyUpdate N, offsets N

`publish N` counts versions, which are steps in a policy's first run. From `save N` to `committed PolicyUpdate N` a
thread commits the step, while the training thread is at the points of step N + 1 up to `stepped N + 1`. `A until B` is
a point A at which its thread waits until the other one has reached B, such as `save 1 until gradient 2`. While a record
is at `commit X`, no other can be written.
"""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

RENAMES = {"checkpoints": ("save", "saved"), "adapters": ("publish", "published")}
PATIENCE = 60.0
"""Seconds for which a thread waits for the other one to reach its point."""


def stop_at(point: str, action: str) -> None:
    """Makes this process end or stand still when it reaches the point. `action`: the signal that it sends itself, or
    the name of the system's error that it gets, such as ENOSPC."""
    from trainer.data.rollout_reader import RolloutReader
    from trainer.run import publish, rank_loop
    from trainer.run.commit import CommittedStep
    from trainer.run.publish import TransactionalWriter
    from trainer.run.state import RunState
    from trainer.step.engine import TrainingEngine

    here = threading.local()
    current_step = [0]
    committed_steps: list[int] = []
    held_point, _, awaited_point = point.partition(" until ")
    awaited = threading.Event()

    def reach(reached: str) -> None:
        if reached == awaited_point:
            awaited.set()
        if reached == held_point:
            if awaited_point and not awaited.wait(PATIENCE):
                raise TimeoutError(f"at {held_point}: the other thread did not reach {awaited_point}")
            if action in signal.Signals.__members__:
                # To this thread: a signal to the process can reach another thread, and this one goes on meanwhile.
                signal.pthread_kill(threading.get_ident(), signal.Signals[action])
            else:
                raise OSError(number := getattr(errno, action), os.strerror(number))

    write, rename, commit_offsets, backward = (
        TransactionalWriter.write,
        Path.rename,
        RolloutReader.commit_offsets,
        TrainingEngine.backward,
    )
    train_step, apply_commit = rank_loop.train_step, RunState.apply_commit

    class Producer(publish.Producer):
        def commit_transaction(self, *args: Any) -> None:
            self.flush()
            reach(f"commit {here.record}")
            super().commit_transaction(*args)

    def watched_write(self: TransactionalWriter, topic: str, record: Any, *more: Any) -> None:
        here.record = f"{type(record).__name__} {getattr(record, 'step', '')}"
        write(self, topic, record, *more)
        reach(f"committed {here.record}")

    def watched_rename(self: Path, target: Path) -> Path:
        folder = Path(target)
        before, after = RENAMES.get(folder.parent.parent.name, ("", ""))
        number = int(folder.name.split("-")[0].removeprefix("v")) if before else 0
        reach(f"{before} {number}")
        renamed = rename(self, target)
        reach(f"{after} {number}")
        return renamed

    def watched_step(engine: TrainingEngine, plan: Any, *more: Any) -> Any:
        current_step[0] = plan.step
        reach(f"step {plan.step}")
        outcome = train_step(engine, plan, *more)
        reach(f"stepped {plan.step}")
        return outcome

    def watched_backward(self: TrainingEngine, loss: Any) -> None:
        backward(self, loss)
        reach(f"gradient {current_step[0]}")

    def watched_apply_commit(self: RunState, committed: CommittedStep) -> None:
        apply_commit(self, committed)
        committed_steps.append(committed.plan.step)

    def watched_commit_offsets(self: RolloutReader, low_water: Any) -> None:
        reach(f"offsets {committed_steps.pop(0)}")
        commit_offsets(self, low_water)

    for owner, name, replacement in (
        (publish, "Producer", Producer),
        (TransactionalWriter, "write", watched_write),
        (Path, "rename", watched_rename),
        (rank_loop, "train_step", watched_step),
        (TrainingEngine, "backward", watched_backward),
        (RunState, "apply_commit", watched_apply_commit),
        (RolloutReader, "commit_offsets", watched_commit_offsets),
    ):
        setattr(owner, name, replacement)
