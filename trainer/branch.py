"""A rollback: the run ends where it was, and a new one goes on from an earlier checkpoint of the policy.

The decision is a Promotion with mode `rollback`. It is for the run that had published last before it, and the new run's
own first version comes after it, so it is acted on once.
"""

from dataclasses import replace

from schemas.codec import Codec
from schemas.records import PolicyUpdate
from tentalis.config import Settings
from tentalis.guard import ROLLBACK
from tentalis.lineage import Node
from tentalis.service import Unmendable
from trainer.checkpoint import Checkpoint, checkpoint_root, checkpoints
from trainer.config import TrainerConfig
from trainer.runlog import RunLog, read_run


class CannotBranch(Unmendable):
    """What the new run would go on from is not there."""


def current_run(settings: Settings, codec: Codec, config: TrainerConfig) -> RunLog:
    """The run of the configuration, or the youngest branch that a rollback made of it."""
    run = read_run(settings, codec, config.run_id, config.policy)
    current = run.lineage.current(config.run_id)
    return run if current == config.run_id else read_run(settings, codec, current, config.policy)


def due_rollback(run: RunLog) -> PolicyUpdate | None:
    """The version that the run must be rolled back to, None if there is no such decision or it is done."""
    if run.first is None or not run.promotions:
        return None
    promotion, decided_at = run.promotions[-1]
    target = run.updates.get(promotion.version)
    if promotion.mode != ROLLBACK or target is None:
        return None
    # It is about the run that had published last, whichever run the version is of: another has nothing to do with it.
    before = {version: at for version, at in run.published_at.items() if at < decided_at}
    if not before or run.updates[max(before, key=before.__getitem__)].run_id != run.run_id:
        return None
    return None if run.lineage.distance(run.head, Node(target.run_id, target.step)) == 0 else target


def overtaken(run: RunLog, steps: int | None) -> PolicyUpdate | None:
    """The last version that the run has published, if another run of the policy has begun since: the numbers after it
    are that one's, so the run can only go on as a branch. None if there is none, or if the run has its `steps`."""
    if run.first is None or run.first.first_version == max(manifest.first_version for manifest in run.relatives):
        return None
    if steps is not None and run.lineage.depth(run.head) >= steps:
        return None
    own = (update for update in run.updates.values() if update.run_id == run.run_id)
    return max(own, key=lambda update: update.version, default=None)


def branched(run: RunLog, root: str) -> RunLog:
    """What the log knows of the branch that does not exist yet: what it knows of the policy."""
    name = run.lineage.branch_name(root)
    return replace(run, run_id=name, manifests={}, plans={}, results={})


def parent_of(run: RunLog) -> Node | None:
    """What the run goes on from."""
    if run.first is None or run.first.parent_run is None or run.first.parent_step is None:
        return None
    return Node(run.first.parent_run, run.first.parent_step)


def checkpoint_of(settings: Settings, run: RunLog, node: Node) -> Checkpoint:
    """The checkpoint of a published version of the policy; it holds the adapter that was published. Raises
    CannotBranch, BadCheckpoint."""
    published = next((u for u in run.updates.values() if (u.run_id, u.step) == node), None)
    root = checkpoint_root(settings, node.run)
    for checkpoint in checkpoints(root):
        state = checkpoint.state
        if state.step == node.step and published is not None and state.adapter_sha256 == published.sha256:
            return checkpoint
    raise CannotBranch(
        f"run {run.run_id} is to go on from step {node.step} of run {node.run}, but below {root} is no checkpoint "
        "of that step with the adapter that was published. Restore it, or roll back to a later version"
    )


def start_of_branch(abandoned: RunLog) -> dict[int, int]:
    """Where a branch begins to read: behind what the abandoned run has considered. What it had only planned comes
    again."""
    assert abandoned.first is not None
    start = {position.partition: position.offset for position in abandoned.first.start}
    last = abandoned.winner(abandoned.last_step)
    plan = None if last is None else abandoned.plans.get((last.step, last.attempt))
    return start | ({} if plan is None else {p.partition: p.offset for p in plan.low_water})
