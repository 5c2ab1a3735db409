"""Rollback: the run ends where it is, and a new run starts from an earlier checkpoint of the policy.

The decision is a Promotion with mode `rollback`. It applies to the run that had published last before it. The new run's
first version comes after it, so the decision is executed only once.
"""

from dataclasses import replace

from schemas.records import PolicyUpdate
from schemas.wire.codec import Codec
from tentalis.policies.guard import ROLLBACK
from tentalis.policies.lineage import Node
from tentalis.service.lifecycle import Unmendable
from tentalis.service.settings import Settings
from trainer.config.trainer_config import TrainerConfig
from trainer.data.positions import offsets_of
from trainer.run.checkpoint import BadCheckpoint, Checkpoint, checkpoint_root, read_checkpoints
from trainer.run.position import start_after_move
from trainer.run.run_log import RunLog, read_run
from trainer.run.stored_checkpoints import fetch_checkpoint


class CannotBranch(Unmendable):
    """The new run's origin is missing, or does not fit the configuration."""


def current_run(settings: Settings, codec: Codec, config: TrainerConfig) -> RunLog:
    """Returns the run of the configuration, or the youngest branch that a rollback made of it."""
    run = read_run(settings, codec, config.run_id, config.policy)
    current = run.lineage.current(config.run_id)
    return run if current == config.run_id else read_run(settings, codec, current, config.policy)


def due_rollback(run: RunLog, at: Node | None = None) -> PolicyUpdate | None:
    """Returns the version to which the run must be rolled back, None if there is no such decision or it is done. `at`:
    the last trained step; None: the last one with a result."""
    if run.first_manifest is None or not run.promotions:
        return None
    promotion, decided_at = run.promotions[-1]
    target = run.updates.get(promotion.version)
    if promotion.mode != ROLLBACK or target is None:
        return None
    # It applies only to the run that had published last, even if the version belongs to another run.
    published_before = {version: offset for version, offset in run.published_at.items() if offset < decided_at}
    if (
        not published_before
        or run.updates[max(published_before, key=published_before.__getitem__)].run_id != run.run_id
    ):
        return None
    distance = run.lineage.distance(at or run.last_node, Node(target.run_id, target.step))
    return None if distance == 0 else target


def last_version_if_overtaken(run: RunLog, steps: int | None) -> PolicyUpdate | None:
    """Returns the last version that the run has published, if another run of the policy has begun since: the other run
    owns the following version numbers, so this run can continue only as a branch. None if no other run has begun, or if
    this run has completed its `steps`."""
    if run.first_manifest is None or run.first_manifest.first_version == max(
        manifest.first_version for manifest in run.relatives
    ):
        return None
    if steps is not None and run.lineage.own_steps(run.run_id, run.last_node) >= steps:
        return None
    own_updates = (update for update in run.updates.values() if update.run_id == run.run_id)
    return max(own_updates, key=lambda update: update.version, default=None)


def new_branch(run: RunLog, root: str) -> RunLog:
    """Returns the log of a branch that does not exist yet: the policy's records, without any of the branch's own."""
    name = run.lineage.branch_name(root)
    return replace(run, run_id=name, manifests={}, plans={}, results={})


def parent_of(run: RunLog) -> Node | None:
    """Returns the step from which the run started."""
    if run.first_manifest is None or run.first_manifest.parent_run is None or run.first_manifest.parent_step is None:
        return None
    return Node(run.first_manifest.parent_run, run.first_manifest.parent_step)


def checkpoint_of(settings: Settings, run: RunLog, node: Node) -> Checkpoint:
    """Returns the intact checkpoint of a published version of the policy; it holds the adapter that was published.
    Raises CannotBranch."""
    published = next((u for u in run.updates.values() if (u.run_id, u.step) == node), None)
    root = checkpoint_root(settings, node.run)
    damaged: list[BadCheckpoint] = []
    for checkpoint in read_checkpoints(root, damaged):
        state = checkpoint.state
        if state.step == node.step and published is not None and state.adapter_sha256 == published.sha256:
            try:
                checkpoint.verify()
            except BadCheckpoint as error:
                damaged.append(error)
                continue
            return checkpoint
    fetched = fetch_checkpoint(
        settings,
        node.run,
        lambda state: state.step == node.step and published is not None and state.adapter_sha256 == published.sha256,
        root,
    )
    if fetched is not None:
        return fetched
    found = "".join(f" ({error})" for error in damaged)
    raise CannotBranch(
        f"run {run.run_id} must start from step {node.step} of run {node.run}, but below {root} is no intact "
        f"checkpoint of that step with the published adapter{found}. Restore it, or roll back to a later version"
    )


def branch_start(settings: Settings, codec: Codec, abandoned: RunLog) -> dict[int, int]:
    """Returns the offsets where a branch begins to read: after everything that the abandoned run has considered.
    Rollouts that were only planned are read again, and all of them if the topic was moved since."""
    assert abandoned.first_manifest is not None
    last = abandoned.winning_result(abandoned.last_step)
    plan = None if last is None else abandoned.plans.get((last.step, last.attempt))
    moved = start_after_move(settings, codec, abandoned.first_manifest.event_time if plan is None else plan.event_time)
    if moved is not None:
        return moved
    return offsets_of(abandoned.first_manifest.start) | ({} if plan is None else offsets_of(plan.low_water))
