"""Checks the control topics against the checkpoints of a run: plans, results and versions that a checkpoint was made of
must still be on the log. Without this, a run whose plans were lost would train its steps a second time."""

from collections.abc import Iterable, Mapping

from schemas import topics
from tentalis.kafka.identity import TopicLost
from tentalis.kafka.topic_client import TopicClient
from tentalis.service.settings import Settings
from trainer.run.checkpoint import CheckpointState
from trainer.run.run_log import RunLog

RECORDED = (topics.RUNS, topics.BATCHES, topics.POLICIES)
"""The topics with the records of a run: manifests, plans and results, versions."""


def control_topic_ids(settings: Settings) -> dict[str, str]:
    """Returns Kafka's ids of the control topics that exist, for the next checkpoints. Raises Forbidden,
    KafkaException."""
    found = TopicClient(settings).known_identities(RECORDED)
    return {name: identity.topic_id for name, identity in found.items()}


def check_control_topics(run: RunLog, states: Iterable[CheckpointState], ids: Mapping[str, str]) -> None:
    """Compares the newest checkpoint with the log of its run.

    A topic with another id is accepted if the log has the records of the checkpoint, as after an import.

    Args:
        states: the run's checkpoints on this machine, newest step first.
        ids: of the control topics as they are now.
    Raises:
        TopicLost: records of the checkpoint's run are gone.
    """
    state = next((each for each in states if each.step > 0), None)
    if state is None or _on_log(run, state):
        return
    changed = [name for name, then in sorted((state.control_topic_ids or {}).items()) if ids.get(name) != then]
    # One more step than the log has may be of a transaction that was aborted.
    if not changed and state.step <= run.last_step + 1:
        return
    cause = f"{', '.join(changed)} deleted or created again" if changed else "records are missing from the log"
    raise TopicLost(
        f"{cause}: run {state.run_id} has a checkpoint of step {state.step}, but the log ends at "
        f"{f'step {run.last_step}' if run.first_manifest is not None else 'no manifest of it'}. Continuing would train "
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
