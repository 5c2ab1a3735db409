"""Replay: a recorded run trained again from its topics, compared step by step.

Everything is read and verified (recording.py) before anything is trained. Steps that share a manifest are trained by
one world of the size that the manifest names, from the run's beginning or from a checkpoint that the log vouches for;
nothing is published.
"""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from schemas.codec import Codec
from schemas.records import BatchPlan, RunManifest, StepResult
from tentalis.config import Settings
from tentalis.inference.models import model_digest, resolve_model
from tentalis.kafka import make_codec
from trainer import runtime
from trainer.compare import update_distance
from trainer.config import TrainerConfig
from trainer.config_file import parse_config
from trainer.model import WEIGHTS_FILE, adapter_sha256
from trainer.publish import published_folder
from trainer.recording import CannotReplay, Recording, checked_recording
from trainer.replay_job import Done, Job, adapter_folder, execute, relaid

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""What is promised of a replay with another number of ranks: the distance of each adapter from the recorded one, over
the recorded one's norm (docs/replay.md has the measurement)."""


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One step of a replayed run. When nothing was trained (verify_only) `replayed_sha` is empty and `equal` None.

    `left_out` says which of its rollouts were not there. From the first such step on another thing was trained than the
    run trained, and `equal` is None. So it is with another number of ranks; `distance` is then that of the adapter from
    the recorded one, over its norm, where the recorded one is still on this machine.
    """

    step: int
    recorded_sha: str
    replayed_sha: str
    equal: bool | None
    left_out: tuple[str, ...] = ()
    distance: float | None = None

    @property
    def holds(self) -> bool:
        """Whether what was promised of the step held, as far as it could be compared."""
        return self.equal is not False and (self.distance is None or self.distance <= TOLERANCE)


def replay(
    run_id: str,
    settings: Settings,
    *,
    from_step: int = 0,
    to_step: int | None = None,
    into: Path | None = None,
    verify_only: bool = False,
    base_model: str | None = None,
    allow_missing: bool = False,
    unreadable: list[str] | None = None,
    ranks: int | None = None,
) -> list[ReplayStep]:
    """Trains the steps of a run again up to `to_step` (default: the last), and compares those from `from_step`.

    Training begins at the newest checkpoint before `from_step` that is on this machine and is the recorded one, else
    where the run began; only what is trained is checked. `into` is the replay's folder (default: a new one below
    STATE/replays); `base_model` says where the base model is if not where the run's configuration says. With
    `verify_only` the rollouts are checked and nothing is trained. With `allow_missing` the steps are trained without
    the rollouts that are missing or forgotten. `ranks`: a world of another size than the recorded one. What lies on
    the topics and is no record is passed over and added to `unreadable`, with its place and the reason.
    Raises CannotReplay, and BadRollouts with every missing, forgotten and forged rollout by name.
    """
    codec = make_codec(settings)
    recording = checked_recording(
        run_id, settings, codec, from_step, to_step, allow_missing, unreadable, train=not verify_only
    )
    left_out = recording.left_out
    shown = [result for result in recording.results if result.step >= from_step]
    if verify_only:
        return [ReplayStep(r.step, r.adapter_sha256, "", None, left_out.get(r.step, ())) for r in shown]
    sizes = {manifest.world_size for manifest, _, plans in recording.segments() if plans}
    same_world = ranks is None or sizes <= {ranks}
    if not same_world:
        _check_comparable(settings, recording, shown)
    folder = into or new_folder(settings, run_id)
    done = train_again(
        recording, settings, codec, folder, base_model, ranks=ranks, keep_adapters=into is not None or not same_world
    )
    steps = []
    for r in shown:
        equal = done.sha256[r.step] == r.adapter_sha256
        comparable = r.step < recording.same_until
        distance = None
        if comparable and not same_world and not equal:
            distance = _distance(settings, r, folder)
        verdict = equal if comparable and (same_world or equal) else None
        steps.append(
            ReplayStep(r.step, r.adapter_sha256, done.sha256[r.step], verdict, left_out.get(r.step, ()), distance)
        )
    return steps


def _check_comparable(settings: Settings, recording: Recording, shown: Sequence[StepResult]) -> None:
    """Raises CannotReplay where no adapter that is trained in another number of ranks could be held against the
    recorded one."""
    trained = [r for r in shown if recording.results[0].step < r.step < recording.same_until]
    if trained and all(recorded_adapter(settings, result) is None for result in trained):
        raise CannotReplay(
            "with another number of ranks than recorded the adapters themselves are compared, and of steps "
            f"{trained[0].step} to {trained[-1].step} none is on this machine, below "
            f"{published_folder(settings.home, trained[0].policy, 0).parent}. Without --ranks their sha256 on the log "
            "are enough"
        )


def new_folder(settings: Settings, run_id: str) -> Path:
    """A folder for a replay."""
    (settings.home / "replays").mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=settings.home / "replays"))


def train_again(
    recording: Recording,
    settings: Settings,
    codec: Codec,
    into: Path,
    base_model: str | None,
    *,
    ranks: int | None = None,
    keep_adapters: bool = False,
) -> Done:
    """Executes the plans of a recording. Raises as `train_legs` does."""
    run_id = recording.run.run_id
    legs = [
        Leg(
            manifest=manifest,
            config=parse_config(manifest.config, f"the manifest {manifest.digest} of run {manifest.run_id}"),
            plans=plans,
            start=start,
            into=into if manifest.run_id == run_id else into / manifest.run_id,
            world_size=manifest.world_size if ranks is None else ranks,
            keep_adapters=keep_adapters and manifest.run_id == run_id,
        )
        for manifest, start, plans in recording.segments()
    ]
    done = train_legs(legs, recording, settings, codec, base_model)
    own = [each for leg, each in zip(legs, done, strict=True) if leg.manifest.run_id == run_id]
    if own:
        return joined(own)
    # A run without a step of its own ends with what it inherited.
    last = done[-1]
    return Done(
        sha256={recording.results[0].step: last.sha256[max(last.sha256)]}, metrics={}, checkpoint=last.checkpoint
    )


@dataclass(frozen=True, slots=True)
class Leg:
    """Consecutive plans of one manifest, and under which configuration they are trained; see Job for the fields."""

    manifest: RunManifest
    config: TrainerConfig
    plans: Sequence[BatchPlan]
    start: int
    into: Path
    world_size: int
    keep_adapters: bool


def train_legs(
    legs: Sequence[Leg], recording: Recording, settings: Settings, codec: Codec, base_model: str | None
) -> list[Done]:
    """Trains one leg after the other, each from the checkpoint of the one before, the first from where the recording
    begins. Raises CannotReplay for another base model or a device that is not here, and what `execute` raises."""
    for leg in legs:
        check_device(leg.manifest.run_id, leg.manifest.device, leg.world_size)
    found: list[Done] = []
    checkpoint = None if recording.beginning is None else recording.beginning.folder
    for leg in legs:
        folder = resolve_model(base_model or leg.config.base_model, settings.cache)
        warn_of_differences(leg.manifest, folder)
        job = Job(
            manifest=leg.manifest,
            config=leg.config if checkpoint is not None else _from_the_record(leg.config, recording, settings),
            model_folder=folder,
            plans=tuple(relaid(plan, leg.world_size) for plan in leg.plans),
            start=leg.start,
            checkpoint=checkpoint,
            into=leg.into,
            world_size=leg.world_size,
            keep_adapters=leg.keep_adapters,
        )
        found.append(execute(job, settings, codec))
        checkpoint = found[-1].checkpoint
    return found


def joined(legs: Sequence[Done]) -> Done:
    """What all of them came to."""
    return Done(
        sha256={step: sha256 for leg in legs for step, sha256 in leg.sha256.items()},
        metrics={step: metrics for leg in legs for step, metrics in leg.metrics.items()},
        checkpoint=legs[-1].checkpoint,
    )


def check_device(run_id: str, device: str, ranks: int) -> None:
    """Raises CannotReplay if the device that a run's manifest names is not on this machine: on another one the bytes
    would be others."""
    if device == "cuda" and (gpus := torch.cuda.device_count()) < ranks:
        raise CannotReplay(
            f"run {run_id} is trained on GPUs, {ranks} of them, and torch finds {gpus} on this machine. Replay it "
            "where they are; --verify-only checks its rollouts here, and --set device=cpu trains on a CPU, as a run of "
            "its own"
        )


def warn_of_differences(manifest: RunManifest, model_folder: Path) -> None:
    """Raises CannotReplay for another base model; everything else that differs may still give the same bytes."""
    digest = model_digest(model_folder)
    if digest != manifest.base_sha256:
        raise CannotReplay(
            f"the base model in {model_folder} has sha256 {digest}, the run was trained on {manifest.base_sha256}. "
            "Name the right one with --base-model"
        )
    here = runtime.versions(manifest.versions) | {"instruction set": runtime.instruction_set(manifest.device)}
    then = manifest.versions | {"instruction set": manifest.instruction_set}
    for name, value in then.items():
        if here[name] != value:
            log.warning("%s differs: the run had %s, here it is %s; the bytes may differ", name, value, here[name])


def _from_the_record(config: TrainerConfig, recording: Recording, settings: Settings) -> TrainerConfig:
    """The configuration with the initial adapter as the run published it in place of the folder that it was given in,
    which may be gone."""
    first = recording.first
    if config.initial_adapter is None or first is None:
        return config
    folder = published_folder(settings.home, first.policy, first.first_version)
    if _unaltered(folder, first.initial_adapter_sha256) is None:
        return config
    return config.model_copy(update={"initial_adapter": str(folder)})


def recorded_adapter(settings: Settings, result: StepResult) -> bytes | None:
    """The adapter of a step as the run published it, None where it is no longer on this machine unaltered."""
    return _unaltered(published_folder(settings.home, result.policy, result.policy_version), result.adapter_sha256)


def _unaltered(folder: Path, sha256: str) -> bytes | None:
    path = folder / WEIGHTS_FILE
    data = path.read_bytes() if path.is_file() else None
    return data if data is not None and adapter_sha256(data) == sha256 else None


def _distance(settings: Settings, result: StepResult, folder: Path) -> float | None:
    before = recorded_adapter(settings, result)
    path = adapter_folder(folder, result.step) / WEIGHTS_FILE
    return None if before is None or not path.is_file() else update_distance(before, path.read_bytes()).relative
