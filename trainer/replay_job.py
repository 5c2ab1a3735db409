"""The training of a replay: plans of one manifest, executed by a world of ranks. Nothing is published."""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from schemas.codec import Codec
from schemas.records import BatchPlan, RunManifest
from tentalis.config import Settings
from tentalis.kafka import make_codec
from trainer import runtime
from trainer.checkpoint import Checkpoint, CheckpointState, save, write_folder
from trainer.config import TrainerConfig
from trainer.fetch import Cache, fetch

log = logging.getLogger(__name__)


class RanksFailed(RuntimeError):
    """The processes of a replay in several ranks ended with an error; their messages came before."""


class Job(BaseModel):
    """What the ranks of a replay do: the plans, from a checkpoint or (None) from the initial adapter.

    `start`: the step before the first plan's, in the numbers of this run, whatever the checkpoint's are.
    `keep_adapters`: the adapter after each step is kept too, in `into`/adapters/<step>.
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


class Done(BaseModel):
    """What they return: sha256 and metrics after each step, and the checkpoint after the last."""

    sha256: dict[int, str]
    metrics: dict[int, dict[str, float]]
    checkpoint: Path


def relaid(plan: BatchPlan, world_size: int) -> BatchPlan:
    """The plan for a world of another size: the same micro-batches, dealt out in turn."""
    if plan.world_size == world_size:
        return plan
    batches = sorted({(row.micro_batch, row.rank) for row in plan.rows})
    place = {batch: (k % world_size, k // world_size) for k, batch in enumerate(batches)}
    rows = []
    for row in plan.rows:
        rank, micro_batch = place[row.micro_batch, row.rank]
        rows.append(row.model_copy(update={"rank": rank, "micro_batch": micro_batch}))
    return plan.model_copy(update={"rows": tuple(rows), "world_size": world_size})


def adapter_folder(into: Path, step: int) -> Path:
    """Where a job keeps the adapter after a step."""
    return into / "adapters" / f"{step:06d}"


def execute(job: Job, settings: Settings, codec: Codec) -> Done:
    """Trains the job, here or in processes of its own, on the device that its manifest names. Raises RanksFailed,
    BadRollouts, ValueError (a checkpoint of another adapter shape), Diverged."""
    if job.world_size == 1 and runtime.usable(job.manifest.device):
        return _train(job, settings, codec)
    from trainer.launch import spawn

    job.into.mkdir(parents=True, exist_ok=True)
    spec = job.into / f"job-{job.plans[0].step if job.plans else 0}.json"
    spec.write_text(job.model_dump_json(), encoding="utf-8")
    code = spawn(["replay-rank", "--spec", str(spec)], job.world_size, settings, exit_code=1)
    if code:
        raise RanksFailed(f"the replay's ranks ended with exit code {code}; their messages are above")
    return Done.model_validate_json(_done_path(spec).read_bytes())


def replay_rank(spec: Path) -> int:
    """One rank of a replay in several processes; rank 0 leaves the results beside `spec`."""
    settings = Settings.from_env()
    done = _train(Job.model_validate_json(spec.read_bytes()), settings, make_codec(settings))
    from trainer import world

    if world.join().rank == 0:
        _done_path(spec).write_text(done.model_dump_json(), encoding="utf-8")
    return 0


def _done_path(spec: Path) -> Path:
    return spec.with_suffix(".done.json")


def _train(job: Job, settings: Settings, codec: Codec) -> Done:
    """Every rank of the replay's world. Only rank 0 writes."""
    from trainer import world as worlds
    from trainer.engine import Engine
    from trainer.model import CONFIG_FILE, WEIGHTS_FILE, adapter_sha256
    from trainer.step import train_step
    from trainer.stop import stop_on_signals
    from trainer.world import Channel

    world, manifest = worlds.join(), job.manifest
    runtime.prepare(manifest.threads, manifest.device)
    engine = Engine(job.config, job.model_folder, world, manifest.device)
    channel = Channel(world)
    sha256: dict[int, str] = {}
    metrics: dict[int, dict[str, float]] = {}
    if job.checkpoint is None:
        engine.begin()
    else:
        checkpoint = Checkpoint.read(job.checkpoint)
        engine.load(checkpoint.adapter(), checkpoint.optimizer())
    adapter = engine.policy.adapter_bytes()
    sha256[job.start] = adapter_sha256(adapter)
    with stop_on_signals(exit_code=1) as stop:
        for plan in job.plans:
            rollouts = fetch(settings, codec, [row for row in plan.rows if row.rank == world.rank], Cache())
            channel.gather(f"ready/{plan.step}", stop.check)
            version = manifest.first_version + plan.step - 1
            outcome = train_step(engine, plan, version, rollouts, job.config.loss, world, stop)
            adapter = engine.policy.adapter_bytes()
            sha256[plan.step], metrics[plan.step] = adapter_sha256(adapter), outcome.metrics
            log.info("step %d: %s", plan.step, sha256[plan.step])
            if job.keep_adapters and world.rank == 0:
                files = {WEIGHTS_FILE: adapter, CONFIG_FILE: engine.policy.adapter_config()}
                write_folder(adapter_folder(job.into, plan.step), files)
    last = job.plans[-1].step if job.plans else job.start
    state = _state(job, last, sha256[last], engine.optimizer_state().steps)
    folder = job.into / state.folder_name
    if world.rank == 0:
        folder = save(job.into, state, adapter, engine.policy.adapter_config(), engine.optimizer_state()).folder
    return Done(sha256=sha256, metrics=metrics, checkpoint=folder)


def _state(job: Job, step: int, sha256: str, optimizer_steps: int) -> CheckpointState:
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
