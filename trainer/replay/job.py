"""The training of a replay: plans of one manifest, executed by a world of ranks. Nothing is published."""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from schemas.records import BatchPlan, RunManifest
from schemas.wire.codec import Codec
from tentalis.kafka.codec import make_codec
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tentalis.storage.version_files import read_weights
from trainer.config.trainer_config import TrainerConfig
from trainer.data.fetch import RolloutCache, fetch
from trainer.distributed import runtime
from trainer.distributed.rank_place import rank_place
from trainer.run.checkpoint import Checkpoint, CheckpointState, save_checkpoint, write_folder

log = logging.getLogger(__name__)


class RanksFailed(RuntimeError):
    """The processes of a multi-rank replay ended with an error; their messages came before."""


class ReplayJob(BaseModel):
    """The plans that the ranks of a replay train, from a checkpoint or, without one, from the initial adapter.

    `start`: the step before the first plan, as this run counts steps; the checkpoint's run may count differently.
    `keep_adapters`: also keep the version after each step, in `into`/adapters/<step>.
    """

    model_config = ConfigDict(frozen=True)

    manifest: RunManifest
    config: TrainerConfig
    model_folder: Path
    plans: tuple[BatchPlan, ...]
    start: int
    checkpoint: Path | None
    into: Path
    world_size: int
    keep_adapters: bool = False


class ReplayJobResult(BaseModel):
    """The result of a job: sha256 and metrics after each step, and the checkpoint after the last."""

    sha256: dict[int, str]
    metrics: dict[int, dict[str, float]]
    checkpoint: Path


def redistribute(plan: BatchPlan, world_size: int) -> BatchPlan:
    """Returns the plan for a world of another size: the same micro-batches, distributed round-robin."""
    if plan.world_size == world_size:
        return plan
    batches = sorted({(row.micro_batch, row.rank) for row in plan.rows})
    places = {batch: (k % world_size, k // world_size) for k, batch in enumerate(batches)}
    rows = []
    for row in plan.rows:
        rank, micro_batch = places[row.micro_batch, row.rank]
        rows.append(row.model_copy(update={"rank": rank, "micro_batch": micro_batch}))
    return plan.model_copy(update={"rows": tuple(rows), "world_size": world_size})


def adapter_folder(into: Path, step: int) -> Path:
    """The folder of the version that a job keeps after a step."""
    return into / "adapters" / f"{step:06d}"


def kept_weights(into: Path, step: int) -> bytes | None:
    """The weights that a job has kept after a step, None if there are none."""
    return read_weights(adapter_folder(into, step))


def run_job(job: ReplayJob, settings: Settings, codec: Codec) -> ReplayJobResult:
    """Trains the job, in this process or in child processes, on the device of its manifest. Raises RanksFailed,
    BadRollouts, BadVariable, ValueError (a checkpoint of another adapter shape), TrainingDiverged."""
    # In the environment of a live run's rank, this process must not join that run's ranks.
    if job.world_size == 1 and not rank_place().given and runtime.device_is_usable(job.manifest.device):
        return _train_rank(job, settings, codec)
    from trainer.run.launch import spawn

    job.into.mkdir(parents=True, exist_ok=True)
    spec = job.into / f"job-{job.plans[0].step if job.plans else 0}.json"
    spec.write_text(job.model_dump_json(), encoding="utf-8")
    code = spawn(["replay-rank", "--spec", str(spec)], job.world_size, settings)
    if code:
        raise RanksFailed(f"the replay's ranks ended with exit code {code}; their messages are above")
    return ReplayJobResult.model_validate_json(_result_path(spec).read_bytes())


def replay_rank(spec: Path) -> int:
    """Runs one rank of a multi-process replay; rank 0 writes the results beside `spec`."""
    settings = Settings.from_env()
    result = _train_rank(ReplayJob.model_validate_json(spec.read_bytes()), settings, make_codec(settings))
    from trainer.distributed.ranks import join_ranks

    rank_group = join_ranks()
    if rank_group.rank == 0:
        _result_path(spec).write_text(result.model_dump_json(), encoding="utf-8")
    rank_group.leave()
    return ExitCode.OK


def _result_path(spec: Path) -> Path:
    return spec.with_suffix(".done.json")


def _train_rank(job: ReplayJob, settings: Settings, codec: Codec) -> ReplayJobResult:
    """Runs one rank of the replay's world. Only rank 0 writes."""
    from trainer.distributed.ranks import RankChannel, join_ranks
    from trainer.distributed.stop import stop_on_signals
    from trainer.model.policy import adapter_sha256
    from trainer.step.engine import TrainingEngine
    from trainer.step.step import train_step

    rank_group, manifest = join_ranks(job.manifest.device), job.manifest
    runtime.configure_torch(manifest.threads, manifest.device)
    engine = TrainingEngine(job.config, job.model_folder, rank_group, manifest.device)
    channel = RankChannel(rank_group)
    sha256: dict[int, str] = {}
    metrics: dict[int, dict[str, float]] = {}
    if job.checkpoint is None:
        engine.load_initial_weights()
    else:
        checkpoint = Checkpoint.read(job.checkpoint)
        engine.restore(checkpoint.weights(), checkpoint.optimizer())
    weights = engine.policy.weights_bytes()
    sha256[job.start] = adapter_sha256(weights)
    with stop_on_signals(then="a replay does not continue: the next one begins anew, in a new or empty folder") as stop:
        for plan in job.plans:
            rollouts = fetch(settings, codec, [row for row in plan.rows if row.rank == rank_group.rank], RolloutCache())
            channel.barrier(f"ready/{plan.step}", "read its rollouts", stop.check)
            version = manifest.first_version + plan.step - 1
            output = train_step(engine, plan, version, rollouts, job.config.loss, rank_group, stop)
            weights = engine.policy.weights_bytes()
            sha256[plan.step], metrics[plan.step] = adapter_sha256(weights), output.metrics
            log.info("step %d: %s", plan.step, sha256[plan.step])
            if job.keep_adapters and rank_group.rank == 0:
                files = engine.policy.files()
                write_folder(adapter_folder(job.into, plan.step), {**files.others, files.weights: weights})
    last_step = job.plans[-1].step if job.plans else job.start
    state = _final_state(job, last_step, sha256[last_step], engine.optimizer_state().steps)
    folder = job.into / state.folder_name
    if rank_group.rank == 0:
        folder = save_checkpoint(job.into, state, weights, engine.policy.files(), engine.optimizer_state()).folder
    return ReplayJobResult(sha256=sha256, metrics=metrics, checkpoint=folder)


def _final_state(job: ReplayJob, step: int, sha256: str, optimizer_steps: int) -> CheckpointState:
    plan = job.plans[-1] if job.plans else None
    return CheckpointState(
        run_id=job.manifest.run_id,
        policy=job.manifest.policy,
        step=step,
        attempt=plan.attempt if plan else 0,
        plan_id=plan.plan_id if plan else None,
        owner="replay",
        manifest_digest=job.manifest.digest,
        low_water={},
        adapter_sha256=sha256,
        optimizer_steps=optimizer_steps,
        metrics={},
        seconds={},
    )
