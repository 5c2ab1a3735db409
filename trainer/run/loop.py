"""The training loop of every rank: read and offer rollouts, take the next plan, fetch its rollouts, train, repeat.

Rank 0 also plans and publishes (coordinator.py, state.py). Live training is the replayer with a planner in front.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

from schemas.ids import policy_name
from schemas.records import BatchPlan
from schemas.wire.codec import Codec
from tentalis.dlq.limits import TooManyDead
from tentalis.inference.models import resolve_model
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topic_watch import TopicWatch
from tentalis.service import tracing
from tentalis.service.exit_codes import ExitCode
from tentalis.service.health import Health, served
from tentalis.service.settings import Settings
from tentalis.service.tracing import TraceSpan
from tentalis.storage.errors import StorageError
from trainer.config.trainer_config import TrainerConfig
from trainer.data.candidates import ReadSegment
from trainer.data.fetch import RolloutCache, fetch
from trainer.data.rollout_reader import RolloutReader
from trainer.distributed.ranks import RankChannel, RankGroup, join_ranks
from trainer.distributed.runtime import base_dtype_of, configure_torch, resolve_device, threads_of
from trainer.distributed.stop import StopRequest, stop_on_signals
from trainer.model.flops import measure_peak_flops
from trainer.run.checkpoint import Checkpoint
from trainer.run.commit import step_trace_name
from trainer.run.coordinator import Coordinator
from trainer.run.metrics import TrainerMetrics
from trainer.run.rollouts_topic import WAYS_ON
from trainer.run.stop_condition import FOREVER, StopCondition
from trainer.run.tracking import MetricTrackers
from trainer.step.culprits import find_culprits
from trainer.step.engine import StepNotFinite, TrainingEngine
from trainer.step.step import train_step

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


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
        rank_group, metrics = join_ranks(resolve_device(config)), TrainerMetrics()
        tracing.configure("trainer")
        try:
            with served(Health(metrics.exporter, metrics.not_ready), metrics_port if rank_group.rank == 0 else None):
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
            rolled_back = _train_run(config, settings, stop, rank_group, metrics, codec, engine, channel, coordinator)
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


def _train_run(
    config: TrainerConfig,
    settings: Settings,
    stop: StopRequest,
    rank_group: RankGroup,
    metrics: TrainerMetrics,
    codec: Codec,
    engine: TrainingEngine,
    channel: RankChannel,
    coordinator: Coordinator | None,
) -> bool:
    """Trains one run from its current position to its end. Returns True if the run was rolled back."""
    cache = RolloutCache()
    if coordinator is not None:
        state = coordinator.state
        start = {"first_version": state.manifest.first_version}
        channel.send_command(start | {"low_water": coordinator.planner.low_water})
    start = channel.wait_for_command(stop.check)
    _share_checkpoint(rank_group, channel, engine, None if coordinator is None else coordinator.state.checkpoint, stop)
    reader = RolloutReader(
        settings,
        codec,
        Publisher(settings, "tentalis-trainer", codec),
        cache,
        policy=config.policy,
        rank=rank_group.rank,
        vocab_size=engine.policy.vocab_size,
        max_tokens=config.max_rollout_tokens,
        loss=config.loss,
        low_water=_by_partition(start["low_water"]),
    )
    topic_watch = TopicWatch(settings, topology.named("trainer").used_topics, WAYS_ON)
    has_command = False
    while True:
        stop.check()
        topic_watch.check()
        metrics.record_turn()
        segments = reader.poll(0.0 if has_command else POLL_SECONDS)
        if segments:
            _report(segments, reader, channel, rank_group)
        command = channel.next_command()
        # One command is often followed by the next: a wait for records would delay it.
        has_command = command is not None
        match command:
            case None:
                if coordinator is not None:
                    coordinator.add_reports(channel.receive_reports())
                    committed = coordinator.take_commit()
                    _send_committed(committed, channel)
                    has_command = _send_next_command(coordinator, channel, stop) or bool(committed)
            case {"plan": text}:
                plan = BatchPlan.model_validate_json(text)
                version = start["first_version"] + plan.step - 1
                with _step_span(plan, rank_group, version) as span:
                    started_at = time.perf_counter()
                    own_rows = [row for row in plan.rows if row.rank == rank_group.rank]
                    rollouts = fetch(settings, codec, own_rows, cache)
                    fetch_seconds = time.perf_counter() - started_at
                    span.link([cache.traces.pop(key, None) for key in rollouts])
                    # A rank that still waits for Kafka must not block the others in a collective.
                    channel.barrier(f"ready/{plan.step}/{plan.attempt}", stop.check)
                    arguments = (engine, plan, version, rollouts, config.loss, rank_group, stop)
                    try:
                        output = train_step(*arguments)
                    except StepNotFinite as error:
                        log.warning("%s", error)
                        culprits = find_culprits(*arguments)
                        if coordinator is not None:
                            _send_committed(coordinator.wait_for_commit(stop.check), channel)
                            coordinator.drop_culprits(plan, culprits)
                        continue
                    if coordinator is not None:
                        committed = coordinator.commit_step(plan, output, fetch_seconds, stop.check)
                        _send_committed(committed, channel)
            case {"done": low_water}:
                reader.commit_offsets(_by_partition(low_water))
            case {"hold": paused}:
                reader.pause_reading(paused)
            case {"finish": rolled_back}:
                topic_watch.close()
                reader.close()
                return bool(rolled_back)


def _share_checkpoint(
    rank_group: RankGroup,
    channel: RankChannel,
    engine: TrainingEngine,
    checkpoint: Checkpoint | None,
    stop: StopRequest,
) -> None:
    """Gives every rank the checkpoint from which rank 0 continues. Other ranks may be on machines without its files."""
    if rank_group.size == 1:
        return
    channel.barrier("checkpoint", stop.check)
    own = None if checkpoint is None else (checkpoint.weights(), checkpoint.optimizer())
    adapter, optimizer = rank_group.broadcast(own)
    if checkpoint is None:
        engine.restore(adapter, optimizer)


def _step_span(plan: BatchPlan, rank_group: RankGroup, version: int) -> TraceSpan:
    """Opens the step's trace span: rank 0's is the root, the other ranks' are its children."""
    name = step_trace_name(plan.run_id, plan.step, plan.attempt)
    policy = policy_name(plan.policy, version + 1)
    if rank_group.rank == 0:
        return tracing.span("step", root=name, run_id=plan.run_id, step=plan.step, policy=policy)
    return tracing.span("rank", parent=tracing.derived(name), rank=rank_group.rank, step=plan.step)


def _report(
    segments: Iterable[ReadSegment], reader: RolloutReader, channel: RankChannel, rank_group: RankGroup
) -> None:
    counts = {"lag": reader.lag(), "dead": reader.n_dead, "without_topk": reader.n_without_topk}
    segment_dicts = [segment.to_json() for segment in segments]
    channel.send_report({"rank": rank_group.rank, "segments": segment_dicts, **counts})


def _send_committed(low_waters: Iterable[Mapping[int, int]], channel: RankChannel) -> None:
    for low_water in low_waters:
        channel.send_command({"done": low_water})


def _send_next_command(coordinator: Coordinator, channel: RankChannel, stop: StopRequest) -> bool:
    """Sends the finish, the next plan, or nothing, and whether reading is paused; returns True if it sent the first
    or the second."""
    sent = True
    coordinator.update_backpressure()
    if coordinator.rolled_back or coordinator.end_reason is not None:
        _send_committed(coordinator.wait_for_commit(stop.check), channel)
    if coordinator.rolled_back:
        channel.send_command({"finish": True})
    elif (reason := coordinator.end_reason) is not None:
        log.info("%s", reason)
        channel.send_command({"finish": False})
    elif (plan := coordinator.next_plan()) is not None:
        channel.send_command({"plan": plan.model_dump_json()})
    else:
        sent = False
    if coordinator.reading_paused != coordinator.should_pause_reading:
        coordinator.reading_paused = coordinator.should_pause_reading
        channel.send_command({"hold": coordinator.reading_paused})
    return sent


def _by_partition(offsets: Mapping[str, int]) -> dict[int, int]:
    """Converts the keys to int: JSON keys are strings."""
    return {int(partition): offset for partition, offset in offsets.items()}
