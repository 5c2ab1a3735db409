"""Checks the rollouts topic against a checkpoint: its offsets mean nothing on a topic that was created again."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from schemas import topics
from schemas.wire.codec import Codec
from tentalis.kafka.audit_log import not_given_up
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.identity import PartitionLoss, TopicIdentity, TopicLost, described, position_losses
from tentalis.kafka.loss_audit import loss_audit
from tentalis.kafka.moved_topics import moves, was_moved
from tentalis.kafka.topic_client import TopicClient
from tentalis.service.settings import Settings
from trainer.run.checkpoint import checkpoint_root, read_checkpoints
from trainer.run.position import start_after_move
from trainer.run.state import RunState

log = logging.getLogger(__name__)

WAYS_ON = (
    "What to do: `tentalis import` of the run's export brings back what a replay needs. `tentalis train --accept-loss` "
    "(of a local stack: `tentalis down`, then `tentalis up --accept-loss`) continues with the rollouts of the new "
    "topic, without those that the run has trained, and writes what is given up to tentalis.audit.v1. It is needed "
    "after an import too, because the rollouts get other offsets"
)


@dataclass(frozen=True, slots=True)
class TopicPosition:
    """The first offset to read of each partition. `anew`: the topic is another one than that of the checkpoint, so
    the offsets in the checkpoint and its plans are meaningless."""

    low_water: dict[int, int]
    anew: bool = False


def start_topic_id(settings: Settings, abandoned: str | None) -> str | None:
    """Returns Kafka's id of the topic that the first offsets of a run are about, for its checkpoint of step 0; None if
    the topic does not exist.

    Args:
        abandoned: the run that a rollback ends. Its branch continues from its offsets, so the topic is the one in its
            newest checkpoint.
    """
    if abandoned is not None:
        for checkpoint in read_checkpoints(checkpoint_root(settings, abandoned), []):
            if checkpoint.state.rollouts_topic_id is not None:
                return checkpoint.state.rollouts_topic_id
    there = TopicClient(settings).known_identities([topics.ROLLOUTS])
    return there[topics.ROLLOUTS].topic_id if topics.ROLLOUTS in there else None


def take_topic(state: RunState, codec: Codec, low_water: Mapping[int, int], n_trained: int) -> TopicPosition:
    """Checks the rollouts topic at the start of a trainer and notes its id for the next checkpoints.

    A topic that was moved to more partitions is read from the beginning: the plans on the log tell which rollouts were
    trained.

    Args:
        low_water: the first offset to read, per partition.
        n_trained: the rollouts that the run has trained.
    Returns:
        The position; offset 0 in partitions with a loss that `accept_loss` gives up.
    Raises:
        TopicLost: something is lost, and neither was it given up before nor is `accept_loss` set; or the topic does
            not exist any more.
        NoSuchTopic: the topic does not exist, and nothing is lost with it. KafkaException.
    """
    settings = state.settings
    there = TopicClient(settings).known_identities([topics.ROLLOUTS])
    before = state.checkpoint.state.rollouts_topic_id
    if topics.ROLLOUTS in there:
        now = there[topics.ROLLOUTS]
        state.rollouts_topic_id = now.topic_id
        if _moved(state, codec, before, now.topic_id):
            log.info("%s was moved to %d partitions: reading it from the beginning", topics.ROLLOUTS, now.partitions)
            return TopicPosition(dict.fromkeys(range(now.partitions), 0), anew=True)
    losses = rollout_losses(settings, before, low_water, there)
    # Until the next step, the newest checkpoint is about the lost topic, also after an acceptance.
    refused = not_given_up(settings, codec, losses, state.run.run_id) if there else losses
    if refused and not (settings.accept_loss and there):
        raise refuse(refused, n_trained)
    if not there:
        raise NoSuchTopic(f"the broker has no topic {topics.ROLLOUTS}: `tentalis topics apply` creates it")
    for loss in refused:
        state.writer.write(topics.AUDIT, loss_audit(loss, "tentalis-trainer", state.run.run_id))
    if refused:
        log.warning("%s: given up, as --accept-loss asks", described(refused))
    return TopicPosition(dict(low_water) | dict.fromkeys((loss.partition for loss in losses), 0), anew=bool(losses))


def _moved(state: RunState, codec: Codec, before: str | None, now: str) -> bool:
    """True if the positions of the checkpoint are those of the topic before it was moved to more partitions."""
    if before is None:  # its positions are those of the run's manifest
        first = state.run.first_manifest
        return first is not None and start_after_move(state.settings, codec, first.event_time) is not None
    return before != now and was_moved(moves(state.settings, codec, topics.ROLLOUTS), before, now)


def rollout_losses(
    settings: Settings, topic_id: str | None, low_water: Mapping[int, int], identities: Mapping[str, TopicIdentity]
) -> list[PartitionLoss]:
    """Compares the rollouts topic with the id and the positions of a checkpoint; returns what is lost.

    Args:
        topic_id: None in checkpoints of earlier versions.
        low_water: the first offset to read, per partition.
        identities: the topic as it is now; empty if it does not exist.
    """
    client = TopicClient(settings)
    there = identities[topics.ROLLOUTS].partitions if topics.ROLLOUTS in identities else 0
    ranges = client.ranges((topics.ROLLOUTS, partition) for partition in low_water if partition < there)
    return position_losses(topics.ROLLOUTS, topic_id, low_water, identities, ranges)


def refuse(losses: list[PartitionLoss], n_trained: int) -> TopicLost:
    """The error for losses that are not accepted; `n_trained`: rollouts of the run's steps so far."""
    return TopicLost(
        f"{described(losses)}. A replay of the {n_trained:,} rollouts that this run has trained needs the lost topic. "
        f"{WAYS_ON}"
    )
