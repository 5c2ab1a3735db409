"""One run on one rank: read and offer rollouts, take the next command, fetch its rollouts, train, repeat.

Rank 0 also plans and publishes (coordinator.py, state.py): it sends every rank, itself too, the next plan, the progress
of commits, and the end. Live training is the replayer with a planner in front.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.ids import policy_name
from schemas.records import BatchPlan
from schemas.wire.codec import Codec
from tentalis.kafka import topology
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topic_watch import TopicWatch
from tentalis.service import tracing
from tentalis.service.settings import Settings
from tentalis.service.tracing import TraceSpan
from trainer.config.loss import LossConfig
from trainer.config.trainer_config import TrainerConfig
from trainer.data.fetch import RolloutCache, fetch
from trainer.data.rollout_reader import RolloutReader
from trainer.distributed.ranks import START_SECONDS, RankChannel, RankGroup
from trainer.distributed.stop import StopRequest
from trainer.run.checkpoint import Checkpoint
from trainer.run.commit import step_trace_name
from trainer.run.coordinator import Coordinator
from trainer.run.metrics import TrainerMetrics
from trainer.run.rollouts_topic import WAYS_ON
from trainer.step.culprits import find_culprits
from trainer.step.engine import StepNotFinite, TrainingEngine
from trainer.step.step import train_step

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


@dataclass(slots=True)
class RankLoop:
    """This rank's part in a run, from its current position to its end. `coordinator`: on rank 0."""

    settings: Settings
    codec: Codec
    loss: LossConfig
    engine: TrainingEngine
    rank_group: RankGroup
    channel: RankChannel
    reader: RolloutReader
    cache: RolloutCache
    topic_watch: TopicWatch
    metrics: TrainerMetrics
    stop: StopRequest
    first_version: int
    coordinator: Coordinator | None

    @classmethod
    def begin(
        cls,
        config: TrainerConfig,
        settings: Settings,
        stop: StopRequest,
        rank_group: RankGroup,
        metrics: TrainerMetrics,
        codec: Codec,
        engine: TrainingEngine,
        channel: RankChannel,
        coordinator: Coordinator | None,
    ) -> "RankLoop":
        """Takes the run's position and weights from rank 0, and begins to read. A collective. Raises StopRequested,
        RankLost."""
        if coordinator is not None:
            state = coordinator.state
            start = {"first_version": state.manifest.first_version}
            channel.send_command(start | {"low_water": coordinator.planner.low_water})
        start = channel.wait_for_command(stop.check, "recovered the run")
        checkpoint = None if coordinator is None else coordinator.state.checkpoint
        _share_checkpoint(rank_group, channel, engine, checkpoint, stop)
        cache = RolloutCache()
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
        return cls(
            settings,
            codec,
            config.loss,
            engine,
            rank_group,
            channel,
            reader,
            cache,
            TopicWatch(settings, topology.named("trainer").used_topics, WAYS_ON),
            metrics,
            stop,
            start["first_version"],
            coordinator,
        )

    def train(self) -> bool:
        """Trains the run to its end. Returns True if it was rolled back. Raises StopRequested, RankLost, and the errors
        of reading, training and committing."""
        has_command = False
        while True:
            self.stop.check()
            self.topic_watch.check()
            self.metrics.record_turn()
            self._read(0.0 if has_command else POLL_SECONDS)
            command = self.channel.next_command()
            # One command is often followed by the next: a wait for records would delay it.
            has_command = command is not None
            match command:
                case None:
                    has_command = self._coordinate()
                case {"plan": text}:
                    self._train_plan(BatchPlan.model_validate_json(text))
                case {"done": low_water}:
                    self.reader.commit_offsets(_by_partition(low_water))
                case {"hold": paused}:
                    self.reader.pause_reading(paused)
                case {"finish": rolled_back}:
                    self.topic_watch.close()
                    self.reader.close()
                    return bool(rolled_back)

    def _read(self, seconds: float) -> None:
        """Reads for up to so many seconds, and reports to rank 0 what it read."""
        segments = self.reader.poll(seconds)
        if segments:
            reader = self.reader
            counts = {"lag": reader.lag(), "dead": reader.n_dead, "without_topk": reader.n_without_topk}
            read = [segment.to_json() for segment in segments]
            self.channel.send_report({"rank": self.rank_group.rank, "segments": read, **counts})

    def _coordinate(self) -> bool:
        """On rank 0, takes the reports and sends the commands that follow. Returns True if there are any but a pause of
        reading."""
        if self.coordinator is None:
            return False
        self.coordinator.add_reports(self.channel.receive_reports())
        committed = self.coordinator.take_commit()
        _send_committed(committed, self.channel)
        return _send_next_command(self.coordinator, self.channel, self.stop) or bool(committed)

    def _train_plan(self, plan: BatchPlan) -> None:
        """Fetches this rank's rollouts of a plan, trains the step with the other ranks, and begins its commit on rank
        0. If the step is not finite, rank 0 writes the plan's next attempt instead."""
        version = self.first_version + plan.step - 1
        with self._step_span(plan, version) as span:
            started_at = time.perf_counter()
            own_rows = [row for row in plan.rows if row.rank == self.rank_group.rank]
            rollouts = fetch(self.settings, self.codec, own_rows, self.cache)
            fetch_seconds = time.perf_counter() - started_at
            span.link([self.cache.traces.pop(key, None) for key in rollouts])
            # A rank that still waits for Kafka must not block the others in a collective.
            self.channel.barrier(f"ready/{plan.step}/{plan.attempt}", "read its rollouts", self.stop.check)
            arguments = (self.engine, plan, version, rollouts, self.loss, self.rank_group, self.stop)
            try:
                output = train_step(*arguments)
            except StepNotFinite as error:
                log.warning("%s", error)
                culprits = find_culprits(*arguments)
                if self.coordinator is not None:
                    _send_committed(self.coordinator.wait_for_commit(self.stop.check), self.channel)
                    self.coordinator.drop_culprits(plan, culprits)
                return
            if self.coordinator is not None:
                committed = self.coordinator.commit_step(plan, output, fetch_seconds, self.stop.check)
                _send_committed(committed, self.channel)

    def _step_span(self, plan: BatchPlan, version: int) -> TraceSpan:
        """Opens the step's trace span: rank 0's is the root, the other ranks' are its children."""
        name = step_trace_name(plan.run_id, plan.step, plan.attempt)
        policy = policy_name(plan.policy, version + 1)
        if self.rank_group.rank == 0:
            return tracing.span("step", root=name, run_id=plan.run_id, step=plan.step, policy=policy)
        return tracing.span("rank", parent=tracing.derived(name), rank=self.rank_group.rank, step=plan.step)


def _share_checkpoint(
    rank_group: RankGroup,
    channel: RankChannel,
    engine: TrainingEngine,
    checkpoint: Checkpoint | None,
    stop: StopRequest,
) -> None:
    """Gives every rank the checkpoint from which rank 0 continues. Other ranks may be on machines without its files. A
    collective. Raises StopRequested, RankLost."""
    if rank_group.size == 1:
        return
    channel.barrier("checkpoint", "asked for the checkpoint", stop.check, START_SECONDS)
    own = None if checkpoint is None else (checkpoint.weights(), checkpoint.optimizer())
    adapter, optimizer = rank_group.broadcast(own)
    if checkpoint is None:
        engine.restore(adapter, optimizer)


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
