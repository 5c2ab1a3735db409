"""Steps that the log has a result for, but whose checkpoint is lost: their recorded plans are trained again.

The trainer continues from the newest intact checkpoint and executes the plans that follow it, as a replay does. Each
step must give the recorded adapter. Nothing that is on the log or published is written again.
"""

from schemas.records import BatchPlan, StepResult
from schemas.wire.codec import Codec
from tentalis.service.lifecycle import Unmendable
from tentalis.service.settings import Settings
from trainer.data.fetch import find_problems
from trainer.run.run_log import RunLog

RESTORE = (
    "Restore the newest checkpoint from a backup, start the trainer on the machine that has it, or start a new run "
    "under another run_id"
)


class CannotRebuild(Unmendable):
    """A step whose checkpoint is lost cannot be trained again from the log, or gives another adapter."""


def recorded_plan(run: RunLog, step: int, manifest_digest: str) -> BatchPlan:
    """Returns the plan that a completed step was trained with. Raises CannotRebuild if the log lacks it, or if it was
    executed under another manifest than the trainer's present one."""
    result = run.winning_result(step)
    plan = None if result is None else run.plans.get((step, result.attempt))
    lost = f"step {step} of run {run.run_id} has no usable checkpoint, and cannot be trained again from the log"
    if result is None or plan is None or plan.plan_id != result.plan_id:
        raise CannotRebuild(f"{lost}: its {'result' if result is None else 'plan'} is not there. {RESTORE}")
    if plan.manifest_digest != manifest_digest:
        raise CannotRebuild(
            f"{lost} with the present configuration: it was trained under the manifest {plan.manifest_digest}, and "
            f"this start has {manifest_digest} (another configuration, source, library version, machine, "
            "number of threads or ranks). "
            f"Start the trainer once as it was for that step, then as it is now. Or: {RESTORE[0].lower()}{RESTORE[1:]}"
        )
    return plan


def check_rollouts(settings: Settings, codec: Codec, plan: BatchPlan) -> None:
    """Raises CannotRebuild if a rollout of the plan is missing, forgotten or forged."""
    problems = find_problems(settings, codec, plan.rows)
    if problems:
        raise CannotRebuild(
            f"step {plan.step} of run {plan.run_id} has no usable checkpoint, and cannot be trained again from the "
            f"log: {len(problems)} of its {len(plan.rows)} rollouts cannot be used, the first: {problems[0]}. {RESTORE}"
        )


def check_reproduced(recorded: StepResult | None, plan: BatchPlan, adapter_sha256: str) -> None:
    """Raises CannotRebuild if the log has another adapter than the one just trained. `recorded`: the result on the log
    of this attempt of the step, None if there is none."""
    if recorded is not None and recorded.adapter_sha256 != adapter_sha256:
        raise CannotRebuild(
            f"step {plan.step} of run {plan.run_id} was trained again from its plan and gave the adapter "
            f"{adapter_sha256}, but the log has {recorded.adapter_sha256}, which may be served. Nothing was written. "
            f"This machine computes other bytes than the one that trained the step. {RESTORE}"
        )
