"""Checks the control topics against the checkpoints of a run: plans, results and versions that a checkpoint was made of
must still be on the log. Without this, a run whose plans were lost would train its steps a second time."""

import logging
from collections.abc import Iterable, Mapping

from schemas import topics
from tentalis.kafka import topology
from tentalis.kafka.identity import TopicLost
from tentalis.kafka.topic_client import TopicClient
from tentalis.kafka.topic_id_log import check_recorded
from tentalis.service.settings import Settings
from trainer.run.checkpoint import CheckpointState
from trainer.run.run_log import RunLog

log = logging.getLogger(__name__)

RECORDED = (topics.RUNS, topics.BATCHES, topics.POLICIES)
"""The topics with the records of a run: manifests, plans and results, versions."""


def control_topic_ids(settings: Settings) -> dict[str, str]:
    """Returns Kafka's ids of the control topics that exist, for the next checkpoints. Raises Forbidden,
    KafkaException."""
    found = TopicClient(settings).known_identities(RECORDED)
    return {name: identity.topic_id for name, identity in found.items()}


def check_without_checkpoint(settings: Settings) -> None:
    """Compares the topics of the trainer with the record of all topics. A run has no other record if no checkpoint has
    the id of its topic: at its very start, on another machine, or with a checkpoint of an earlier version. Raises
    TopicLost, unless `accept_loss` is set; NoTopicIds."""
    try:
        check_recorded(settings, topology.named("trainer").used_topics)
    except TopicLost as lost:
        if not settings.accept_loss:
            raise
        log.warning("continuing, as --accept-loss asks, although a topic was lost: %s", lost)


def check_control_topics(run: RunLog, states: Iterable[CheckpointState], ids: Mapping[str, str]) -> None:
    """Compares the newest checkpoint with the log of its run.

    A topic with another id is accepted if the log has the records of the checkpoint and the plan of each step before
    it, as after an import. The newest plan alone may have been written after the topic was created again.

    Args:
        states: the run's checkpoints on this machine, newest step first.
        ids: of the control topics as they are now.
    Raises:
        TopicLost: records of the checkpoint's run are gone.
    """
    state = next((each for each in states if each.step > 0), None)
    if state is None:
        return
    changed = [name for name, then in sorted((state.control_topic_ids or {}).items()) if ids.get(name) != then]
    lost_plan = next((step for step in range(1, state.step + 1) if run.latest_plan(step) is None), None)
    if _on_log(run, state) and not (changed and lost_plan is not None):
        return
    # One more step than the log has may be of a transaction that was aborted.
    if not changed and state.step <= run.last_step + 1:
        return
    cause = f"{', '.join(changed)} deleted or created again" if changed else "records are missing from the log"
    raise TopicLost(
        f"{cause}: run {state.run_id} has a checkpoint of step {state.step}, but the log ends at "
        f"{f'step {run.last_step}' if run.first_manifest is not None else 'no manifest of it'}"
        f"{'' if lost_plan is None else f' without the plan of step {lost_plan}'}. Continuing would train "
        f"up to {state.step} steps twice. What to do: bring the records back with `tentalis import` of the run's "
        "export or from a backup of the topics; or begin a new run under another run_id with the checkpoint's folder "
        "as initial_adapter (docs/operations/lost-topics.md)"
    )


def _on_log(run: RunLog, state: CheckpointState) -> bool:
    plan = run.latest_plan(state.step)
    first = run.first_manifest
    return (
        first is not None
        and plan is not None
        and (plan.attempt, plan.owner, plan.plan_id) == (state.attempt, state.owner, state.plan_id)
        and (first.first_version + state.step in run.updates or run.last_step < state.step)
    )
