"""The metrics of each step to TensorBoard or Weights & Biases, by setting.

A tracker is told what happened and can change nothing: it runs on a thread of its own, behind a queue that never makes
the trainer wait, and whatever fails in it is said once and ends it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainer.config import Tracking, TrainerConfig

log = logging.getLogger(__name__)

QUEUE_STEPS = 256
CLOSE_SECONDS = 10.0


class Sink(Protocol):
    """Where metrics go. Everything may raise anything."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One step."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class TensorBoard:
    """Event files, without torch or TensorFlow."""

    def __init__(self, folder: Path) -> None:
        """Raises ModuleNotFoundError, OSError."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.add_event(Event(step=step, summary=summary, wall_time=time.time()))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run; offline it is a folder, which `wandb sync` uploads."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Any], options: Tracking) -> None:
        """Raises what wandb raises."""
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=options.wandb_project,
            mode=options.wandb_mode,
            dir=str(folder),
            id=run_id,
            name=run_id,
            resume="allow" if options.wandb_mode == "online" else None,
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Tracker:
    """One sink behind a queue. Nothing here raises or waits."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        """`make` opens the sink; it is called on the tracker's thread."""
        self._name = name
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_STEPS)
        self._failed = False
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"track-{name}", daemon=True)
        self._thread.start()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Hands a step over."""
        if self._failed:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._fail(f"{QUEUE_STEPS} steps wait for it")

    def close(self) -> None:
        """Lets it finish what it has, for a few seconds at most."""
        if not self._failed:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                self._fail(f"{QUEUE_STEPS} steps wait for it")
                return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {CLOSE_SECONDS:g} s")

    def _run(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
            while (item := self._queue.get()) is not None and not self._failed:
                sink.write(*item)
            sink.close()
        except Exception as error:  # noqa: BLE001 - of whatever kind: training does not depend on it
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            log.error("tracking with %s ends here, training goes on: %s", self._name, why)


class Trackers:
    """All that a configuration asks for."""

    def __init__(self, options: Tracking, run_id: str, settings: Mapping[str, Any], home: Path) -> None:
        folder = Path(options.folder) if options.folder else home / "tracking" / run_id
        makers: dict[str, Callable[[], Sink]] = {
            "tensorboard": lambda: TensorBoard(folder / "tensorboard"),
            "wandb": lambda: WeightsAndBiases(folder, run_id, settings, options),
        }
        self._trackers = [Tracker(name, makers[name]) for name in dict.fromkeys(options.to)]

    @classmethod
    def of(cls, config: TrainerConfig, root: str, home: Path) -> "Trackers":
        """Those of a run. A branch of `root`, the run that the file names, counts its steps from 1 again, so its curves
        are its own: in a folder of its name, below the one that the file gives."""
        options = config.tracking
        if options.folder is not None and config.run_id != root:
            options = options.model_copy(update={"folder": str(Path(options.folder) / config.run_id)})
        return cls(options, config.run_id, config.model_dump(mode="json"), home)

    def step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """A step is complete: `train/<metric>` and `seconds/<phase>`."""
        if self._trackers:
            values = {f"train/{name}": value for name, value in metrics.items()}
            values |= {f"seconds/{phase}": spent for phase, spent in seconds.items()}
            total = sum(seconds.values())
            if total and "tokens" in metrics:
                values["train/tokens_per_second"] = metrics["tokens"] / total
            for tracker in self._trackers:
                tracker.step(step, values)

    def close(self) -> None:
        """The run ends."""
        for tracker in self._trackers:
            tracker.close()
