"""Sends the metrics of each step to TensorBoard or Weights & Biases, if configured.

A tracker only receives data and cannot affect training: it runs on its own thread, behind a queue that never blocks the
trainer, and its first failure is logged once and ends it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainer.config.trainer_config import TrackingConfig, TrainerConfig

log = logging.getLogger(__name__)

QUEUE_STEPS = 256
CLOSE_SECONDS = 10.0


class TrackingBackend(Protocol):
    """A receiver of metrics. Every method may raise any exception."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one step."""
        ...

    def close(self) -> None:
        """Ends the output."""
        ...


class TensorBoard:
    """Writes event files, without torch or TensorFlow."""

    def __init__(self, folder: Path) -> None:
        """Opens the folder. Raises ModuleNotFoundError (tensorboard is not installed), OSError (the folder)."""
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

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Any], options: TrackingConfig) -> None:
        """Raises the errors of wandb."""
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


class QueuedTracker:
    """One sink behind a queue. Its methods neither raise nor block."""

    def __init__(self, name: str, open_backend: Callable[[], TrackingBackend]) -> None:
        """`open_backend` opens the sink; it is called on the tracker's thread."""
        self._name = name
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_STEPS)
        self._failed = False
        self._thread = threading.Thread(target=self._run, args=(open_backend,), name=f"track-{name}", daemon=True)
        self._thread.start()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Queues a step."""
        if self._failed:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._fail(f"its queue of {QUEUE_STEPS} steps is full")

    def close(self) -> None:
        """Waits until the queue is written, for at most CLOSE_SECONDS."""
        if not self._failed:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                self._fail(f"its queue of {QUEUE_STEPS} steps is full")
                return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {CLOSE_SECONDS:g} s")

    def _run(self, open_backend: Callable[[], TrackingBackend]) -> None:
        try:
            backend = open_backend()
            while (entry := self._queue.get()) is not None and not self._failed:
                backend.write(*entry)
            backend.close()
        except Exception as error:  # noqa: BLE001 - any kind: training must not depend on it
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            log.error("tracking with %s stopped, training continues: %s", self._name, reason)


def token_rate(tokens: float, seconds: Mapping[str, float]) -> float:
    """Returns a step's tokens per second, 0 for a step that took no time. Its commit (the phase `publish`) does not
    count, because the next step is computed meanwhile; waiting for the commit before it (`commit_wait`) does."""
    computing = sum(duration for phase, duration in seconds.items() if phase != "publish")
    return tokens / computing if computing else 0.0


class MetricTrackers:
    """All configured trackers."""

    def __init__(self, options: TrackingConfig, run_id: str, settings: Mapping[str, Any], home: Path) -> None:
        folder = Path(options.folder) if options.folder else home / "tracking" / run_id
        openers: dict[str, Callable[[], TrackingBackend]] = {
            "tensorboard": lambda: TensorBoard(folder / "tensorboard"),
            "wandb": lambda: WeightsAndBiases(folder, run_id, settings, options),
        }
        self._trackers = [QueuedTracker(name, openers[name]) for name in dict.fromkeys(options.to)]

    @classmethod
    def for_run(cls, config: TrainerConfig, root: str, home: Path) -> "MetricTrackers":
        """Returns the trackers of a run. A branch of `root` (the run in the configuration file) counts its steps from 1
        again, so it gets its own curves, in a subfolder of the configured folder with the branch's name."""
        options = config.tracking
        if options.folder is not None and config.run_id != root:
            options = options.model_copy(update={"folder": str(Path(options.folder) / config.run_id)})
        return cls(options, config.run_id, config.model_dump(mode="json"), home)

    def step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Records a complete step as `train/<metric>` and `seconds/<phase>`."""
        if self._trackers:
            values = {f"train/{name}": value for name, value in metrics.items()}
            values |= {f"seconds/{phase}": duration for phase, duration in seconds.items()}
            if "tokens" in metrics:
                values["train/tokens_per_second"] = token_rate(metrics["tokens"], seconds)
            for tracker in self._trackers:
                tracker.step(step, values)

    def close(self) -> None:
        """Closes all trackers at the end of the run."""
        for tracker in self._trackers:
            tracker.close()
