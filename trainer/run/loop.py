"""Live training on every rank, from its start to its exit code: joins the ranks, loads the model, trains runs.

After a rollback the next run begins. One run is trained in rank_loop.py.
"""

import logging
from contextlib import nullcontext

from tentalis.dlq.limits import TooManyDead
from tentalis.inference.models import resolve_model
from tentalis.kafka.codec import make_codec
from tentalis.service import tracing
from tentalis.service.exit_codes import ExitCode
from tentalis.service.health import Health, served
from tentalis.service.settings import Settings
from tentalis.storage.errors import StorageError
from trainer.config.trainer_config import TrainerConfig
from trainer.distributed.members import AlreadyDone
from trainer.distributed.ranks import RankChannel, RankGroup, join_ranks
from trainer.distributed.runtime import base_dtype_of, configure_torch, resolve_device, threads_of
from trainer.distributed.stop import StopRequest, stop_on_signals
from trainer.model.flops import measure_peak_flops
from trainer.run.coordinator import Coordinator
from trainer.run.metrics import TrainerMetrics
from trainer.run.rank_loop import RankLoop
from trainer.run.stop_condition import FOREVER, StopCondition
from trainer.run.tracking import MetricTrackers
from trainer.step.engine import TrainingEngine

log = logging.getLogger(__name__)


def run(
    config: TrainerConfig,
    settings: Settings,
    stop: StopRequest | None = None,
    metrics_port: int | None = None,
    stop_condition: StopCondition = FOREVER,
) -> int:
    """Trains until the configured steps are done or the stop condition holds, and returns the exit code: 0, or
    NEEDS_OPERATOR if so many records are invalid that a restart will not help, or the code of a StorageError. A process
    that is asked to stop ends with STOPPED. `stop`: given by a caller that handles signals itself.

    Every rank runs it; a single rank is the whole trainer. Rank 0 serves health and metrics for all on `metrics_port`.
    Raises CannotResume, TrainerFenced, TrainingDiverged, BadRollouts, PortTaken, RankLost, BadVariable, and errors of
    Kafka that are not transient.
    """
    with stop_on_signals() if stop is None else nullcontext(stop) as stop_request:
        try:
            rank_group = join_ranks(resolve_device(config), stop_request.check_starting)
        except AlreadyDone as done:
            log.info("%s", done)
            return ExitCode.OK
        metrics = TrainerMetrics()
        tracing.configure("trainer")
        try:
            with (
                rank_group.share_end(stop_request.check_starting),
                served(Health(metrics.exporter, metrics.not_ready), metrics_port if rank_group.rank == 0 else None),
            ):
                _run(config, settings, stop_request, rank_group, metrics, stop_condition)
                rank_group.leave()
        except TooManyDead as error:
            log.critical("the trainer stops: %s", error)
            return ExitCode.NEEDS_OPERATOR
        except StorageError as error:
            log.critical("the trainer stops: %s", error)
            return error.exit_code
        finally:
            metrics.close()
    return ExitCode.OK


def _run(
    config: TrainerConfig,
    settings: Settings,
    stop: StopRequest,
    rank_group: RankGroup,
    metrics: TrainerMetrics,
    stop_condition: StopCondition,
) -> None:
    device = resolve_device(config)
    configure_torch(threads_of(config), device)
    model_folder = resolve_model(config.base_model, settings.cache)
    engine = TrainingEngine(config, model_folder, rank_group, device)
    peak_flops = _peak_flops(config, device) * rank_group.size if rank_group.rank == 0 else 0.0
    steps_done = 0
    while True:
        stop.check()
        codec, channel = make_codec(settings), RankChannel(rank_group)
        coordinator = None
        if rank_group.rank == 0:
            remaining = stop_condition.remaining(steps_done)
            coordinator = Coordinator.recover(
                settings, config, codec, engine, rank_group.size, model_folder, metrics, remaining
            )
            metrics.use_trackers(
                MetricTrackers.for_run(coordinator.state.config, config.run_id, settings.home), peak_flops
            )
        try:
            parts = config, settings, stop, rank_group, metrics, codec, engine, channel, coordinator
            rolled_back = RankLoop.begin(*parts).train()
        finally:
            if coordinator is not None:
                coordinator.commits.close()
        if coordinator is not None:
            steps_done += coordinator.steps_done
            coordinator.close()
        if not rolled_back:
            return


def _peak_flops(config: TrainerConfig, device: str) -> float:
    """Returns the peak FLOP/s of one rank's device, for MFU."""
    if config.tracking.peak_tflops is not None:
        return config.tracking.peak_tflops * 1e12
    return measure_peak_flops(base_dtype_of(config, device), device, *((8192, 8) if device == "cuda" else (768, 4)))
