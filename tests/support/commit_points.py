"""The points of a training step at which a trainer can be killed or frozen from inside its process.

In the order of a step N; at `commit X` a record is on the broker in an open transaction, at `committed X` it is visible
to all consumers:

    commit BatchPlan N, committed BatchPlan N, step N, gradient N, stepped N, save N, saved N, commit StepResult N,
    committed StepResult N, publish N, published N, commit PolicyUpdate N, committed PolicyUpdate N, offsets N

`publish N` counts versions, which are steps in a policy's first run.
"""

import os
import signal
from pathlib import Path
from typing import Any

RENAMES = {"checkpoints": ("save", "saved"), "adapters": ("publish", "published")}


def stop_at(point: str, with_signal: signal.Signals) -> None:
    """Makes this process send itself the signal when it reaches the point."""
    from trainer.data.rollout_reader import RolloutReader
    from trainer.run import loop, publish
    from trainer.run.publish import TransactionalWriter
    from trainer.step.engine import TrainingEngine

    current_record = [""]
    current_step = [0]

    def reach(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), with_signal)

    write, rename, commit_offsets, backward = (
        TransactionalWriter.write,
        Path.rename,
        RolloutReader.commit_offsets,
        TrainingEngine.backward,
    )
    train_step = loop.train_step

    class Producer(publish.Producer):
        def commit_transaction(self, *args: Any) -> None:
            self.flush()
            reach(f"commit {current_record[0]}")
            super().commit_transaction(*args)

    def watched_write(self: TransactionalWriter, topic: str, record: Any, *more: Any) -> None:
        current_record[0] = f"{type(record).__name__} {getattr(record, 'step', '')}"
        write(self, topic, record, *more)
        reach(f"committed {current_record[0]}")

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

    def watched_commit_offsets(self: RolloutReader, low_water: Any) -> None:
        reach(f"offsets {current_step[0]}")
        commit_offsets(self, low_water)

    for owner, name, replacement in (
        (publish, "Producer", Producer),
        (TransactionalWriter, "write", watched_write),
        (Path, "rename", watched_rename),
        (loop, "train_step", watched_step),
        (TrainingEngine, "backward", watched_backward),
        (RolloutReader, "commit_offsets", watched_commit_offsets),
    ):
        setattr(owner, name, replacement)
