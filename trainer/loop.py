"""The training loop, as every rank runs it: read and offer, take the next plan, fetch its rollouts, step, go on.

Rank 0 plans and publishes on the side (lead.py, head.py). Live training is the replayer with a planner in front.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from schemas.codec import Codec
from schemas.ids import policy_name
from schemas.records import BatchPlan
from tentalis import tracing
from tentalis.config import Settings
from tentalis.dlq.limits import EXIT_TOO_MANY_DEAD, TooManyDead
from tentalis.health import Health, served
from tentalis.inference.models import resolve_model
from tentalis.kafka import Publisher, make_codec
from tentalis.tracing import Span
from trainer import world as worlds
from trainer.checkpoint import Checkpoint
from trainer.config import TrainerConfig
from trainer.engine import Engine
from trainer.fetch import Cache, fetch
from trainer.flops import matmul_peak
from trainer.goal import FOREVER, Goal
from trainer.head import step_name
from trainer.intake import Intake
from trainer.lead import Lead
from trainer.metrics import TrainerMetrics
from trainer.runtime import base_dtype_of, device_of, prepare, threads_of
from trainer.step import train_step
from trainer.stop import Stop, stop_on_signals
from trainer.tracking import Trackers
from trainer.world import Channel, World

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


def run(
    config: TrainerConfig,
    settings: Settings,
    stop: Stop | None = None,
    metrics_port: int | None = None,
    goal: Goal = FOREVER,
) -> int:
    """Trains until the configured steps are done, or the goal of whoever started it is reached, and returns the exit
    code: 0, or EXIT_TOO_MANY_DEAD where so many records are no rollouts that starting again will not help. Asked to
    stop, the process ends with STOPPED. `stop`: given by a caller that listens to signals itself.

    Every rank runs it; alone it is the whole trainer. Rank 0 answers for all on `metrics_port`. Raises CannotResume,
    Fenced, Diverged, BadRollouts, PortTaken, and Kafka's errors that do not pass by themselves.
    """
    with stop_on_signals() if stop is None else nullcontext(stop) as asked:
        world, metrics = worlds.join(), TrainerMetrics()
        tracing.configure("trainer")
        try:
            with served(Health(metrics.exporter, metrics.not_ready), metrics_port if world.rank == 0 else None):
                _run(config, settings, asked, world, metrics, goal)
        except TooManyDead as error:
            log.critical("the trainer stops: %s", error)
            return EXIT_TOO_MANY_DEAD
        finally:
            metrics.close()
    return 0


def _run(
    config: TrainerConfig, settings: Settings, stop: Stop, world: World, metrics: TrainerMetrics, goal: Goal
) -> None:
    device = device_of(config)
    prepare(threads_of(config, world.size), device)
    model_folder = resolve_model(config.base_model, settings.cache)
    engine = Engine(config, model_folder, world, device)
    peak = _peak(config, device) * world.size if world.rank == 0 else 0.0
    done = 0
    while True:
        stop.check()
        codec, channel = make_codec(settings), Channel(world)
        lead = None
        if world.rank == 0:
            left = goal.after(done)
            lead = Lead.recover(settings, config, codec, engine, world.size, model_folder, metrics, left)
            metrics.track(Trackers.of(lead.head.config, config.run_id, settings.home), peak)
        rolled_back = _train(config, settings, stop, world, metrics, codec, engine, channel, lead)
        if lead is not None:
            done += lead.done
            lead.close()
        if not rolled_back:
            return


def _peak(config: TrainerConfig, device: str) -> float:
    """FLOP/s of one rank's device at most, for MFU."""
    if config.tracking.peak_tflops is not None:
        return config.tracking.peak_tflops * 1e12
    return matmul_peak(base_dtype_of(config), device, *((8192, 8) if device == "cuda" else (768, 4)))


def _train(
    config: TrainerConfig,
    settings: Settings,
    stop: Stop,
    world: World,
    metrics: TrainerMetrics,
    codec: Codec,
    engine: Engine,
    channel: Channel,
    lead: Lead | None,
) -> bool:
    """One run, from where it is to its end; True if it ends because it was rolled back."""
    cache = Cache()
    if lead is not None:
        head = lead.head
        begin = {"checkpoint": str(head.checkpoint.folder), "first_version": head.manifest.first_version}
        channel.command(begin | {"low_water": lead.planner.low_water})
    begin = channel.wait_command(stop.check)
    if lead is None:
        checkpoint = Checkpoint.read(Path(begin["checkpoint"]))
        engine.load(checkpoint.adapter(), checkpoint.optimizer())
    intake = Intake(
        settings,
        codec,
        Publisher(settings, "tentalis-trainer", codec),
        cache,
        policy=config.policy,
        rank=world.rank,
        vocab_size=engine.policy.vocab_size,
        max_tokens=config.max_rollout_tokens,
        loss=config.loss,
        low_water=_by_partition(begin["low_water"]),
    )
    while True:
        stop.check()
        metrics.turned()
        segments = intake.poll(POLL_SECONDS)
        if segments:
            offered = [segment.to_json() for segment in segments]
            found = {"lag": intake.lag(), "dead": intake.dead, "without_topk": intake.without_topk}
            channel.report({"rank": world.rank, "segments": offered, **found})
        match channel.next_command():
            case None:
                if lead is not None:
                    lead.take(channel.reports())
                    _decide(lead, channel)
            case {"plan": text}:
                plan = BatchPlan.model_validate_json(text)
                version = begin["first_version"] + plan.step - 1
                with _step_span(plan, world, version) as span:
                    began = time.perf_counter()
                    mine = [row for row in plan.rows if row.rank == world.rank]
                    rollouts = fetch(settings, codec, mine, cache)
                    fetching = time.perf_counter() - began
                    span.link([cache.traces.pop(key, None) for key in rollouts])
                    # A rank that still waits for Kafka must not keep the others waiting in a collective.
                    channel.gather(f"ready/{plan.step}/{plan.attempt}", stop.check)
                    outcome = train_step(engine, plan, version, rollouts, config.loss, world, stop)
                    if lead is not None:
                        lead.complete(plan, outcome, fetching)
                        channel.command({"done": lead.planner.low_water})
            case {"done": low_water}:
                intake.done(_by_partition(low_water))
            case {"hold": held}:
                intake.hold(held)
            case {"finish": rolled_back}:
                intake.close()
                return bool(rolled_back)


def _step_span(plan: BatchPlan, world: World, version: int) -> Span:
    """Rank 0's is the root of the step's trace, the others' are below it."""
    name = step_name(plan.run_id, plan.step, plan.attempt)
    policy = policy_name(plan.policy, version + 1)
    if world.rank == 0:
        return tracing.span("step", root=name, run_id=plan.run_id, step=plan.step, policy=policy)
    return tracing.span("rank", parent=tracing.derived(name), rank=world.rank, step=plan.step)


def _decide(lead: Lead, channel: Channel) -> None:
    lead.press()
    if lead.rolled_back:
        channel.command({"finish": True})
    elif (why := lead.finished) is not None:
        log.info("%s", why)
        channel.command({"finish": False})
    elif (plan := lead.next_plan()) is not None:
        channel.command({"plan": plan.model_dump_json()})
    if lead.held != lead.holds:
        lead.held = lead.holds
        channel.command({"hold": lead.held})


def _by_partition(offsets: Mapping[str, int]) -> dict[int, int]:
    """JSON's keys are strings."""
    return {int(partition): offset for partition, offset in offsets.items()}
