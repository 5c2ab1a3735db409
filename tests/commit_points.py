"""The points of a training step between which a trainer can be killed or frozen, from inside the process that trains.

In the order of a step N; `commit X` is when a record lies on the broker in an open transaction, `committed X` when
everybody sees it:

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
    """From now on this process sends itself the signal when it comes to the point."""
    import trainer.loop
    import trainer.publish
    from trainer.engine import Engine
    from trainer.intake import Intake
    from trainer.publish import Ledger

    writing = [""]
    training = [0]

    def passes(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), with_signal)

    write, rename, done, backward = Ledger.write, Path.rename, Intake.done, Engine.backward
    train_step = trainer.loop.train_step

    class Producer(trainer.publish.Producer):
        def commit_transaction(self, *args: Any) -> None:
            self.flush()
            passes(f"commit {writing[0]}")
            super().commit_transaction(*args)

    def watched_write(self: Ledger, topic: str, record: Any, *more: Any) -> None:
        writing[0] = f"{type(record).__name__} {getattr(record, 'step', '')}"
        write(self, topic, record, *more)
        passes(f"committed {writing[0]}")

    def watched_rename(self: Path, target: Path) -> Path:
        folder = Path(target)
        before, after = RENAMES.get(folder.parent.parent.name, ("", ""))
        number = int(folder.name.split("-")[0].removeprefix("v")) if before else 0
        passes(f"{before} {number}")
        renamed = rename(self, target)
        passes(f"{after} {number}")
        return renamed

    def watched_step(engine: Engine, plan: Any, *more: Any) -> Any:
        training[0] = plan.step
        passes(f"step {plan.step}")
        outcome = train_step(engine, plan, *more)
        passes(f"stepped {plan.step}")
        return outcome

    def watched_backward(self: Engine, loss: Any) -> None:
        backward(self, loss)
        passes(f"gradient {training[0]}")

    def watched_done(self: Intake, low_water: Any) -> None:
        passes(f"offsets {training[0]}")
        done(self, low_water)

    for owner, name, watched in (
        (trainer.publish, "Producer", Producer),
        (Ledger, "write", watched_write),
        (Path, "rename", watched_rename),
        (trainer.loop, "train_step", watched_step),
        (Engine, "backward", watched_backward),
        (Intake, "done", watched_done),
    ):
        setattr(owner, name, watched)
