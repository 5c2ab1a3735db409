"""Replay: trains a recorded run again from its topics, and compares it step by step.

Everything is read and verified (recording.py) before anything is trained. Steps that share a manifest are trained by
one world of the size in the manifest, from the run's beginning or from a checkpoint that the log confirms. Nothing is
published.
"""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from schemas.records import BatchPlan, RunManifest, StepResult
from schemas.wire.codec import Codec
from tentalis.inference.models import model_digest, resolve_model
from tentalis.kafka.codec import make_codec
from tentalis.policies.lineage import Lineage
from tentalis.service.settings import Settings
from tentalis.storage.file_set import fetch_set, is_complete, read_file, read_manifest
from tentalis.storage.location import Location
from tentalis.storage.places import adapter_location, adapters_location
from tentalis.storage.version_files import WEIGHTS_NAMES, read_weights
from trainer.config.file import parse_config
from trainer.config.trainer_config import TrainerConfig
from trainer.distributed import runtime
from trainer.distributed.environment import CONFIG_FILE, differences, environment
from trainer.model.policy import adapter_sha256
from trainer.replay.compare import model_distance, update_distance
from trainer.replay.job import ReplayJob, ReplayJobResult, kept_weights, redistribute, run_job
from trainer.replay.recording import CannotReplay, RunRecording, read_recording

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Promised bound for a replay with another number of ranks: the distance of each adapter from the recorded one, over
the recorded one's norm (docs/concepts/replay.md has the measurement)."""


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One step of a replayed run. If nothing was trained (verify_only), `replayed_sha` is empty and `equal` None.

    `left_out` names the rollouts of the step that are missing. From the first such step on, the replay trains something
    else than the run did, and `equal` is None. `equal` is also None with another number of ranks; `distance` is then
    the distance of the adapter from the recorded one, over its norm, if the recorded one is still on this machine.
    """

    step: int
    recorded_sha: str
    replayed_sha: str
    equal: bool | None
    left_out: tuple[str, ...] = ()
    distance: float | None = None

    @property
    def meets_promise(self) -> bool:
        """True unless a comparison failed: bytes that are not equal, or a distance over the tolerance."""
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

    Training begins at the newest checkpoint before `from_step` that is on this machine and matches the recorded one,
    else where the run began; only steps that are trained are checked. `into`: the replay's folder (default: a new one
    below STATE/replays). `base_model`: path of the base model, if it is not where the run's configuration says.
    `verify_only`: checks the rollouts and trains nothing. `allow_missing`: trains without the rollouts that are missing
    or forgotten. `ranks`: a world of another size than the recorded one. Invalid records on the topics are skipped and
    added to `unreadable`, with place and reason.

    Raises CannotReplay, and BadRollouts with every missing, forgotten and forged rollout by name.
    """
    codec = make_codec(settings)
    recording = read_recording(
        run_id, settings, codec, from_step, to_step, allow_missing, unreadable, train=not verify_only
    )
    if branches := later_branches(recording.run.lineage, run_id):
        log.info("run %s was rolled back; what followed is not part of it: %s", run_id, ", ".join(branches))
    left_out = recording.left_out
    compared = [result for result in recording.results if result.step >= from_step]
    if verify_only:
        return [
            ReplayStep(result.step, result.adapter_sha256, "", None, left_out.get(result.step, ()))
            for result in compared
        ]
    sizes = {manifest.world_size for manifest, _, plans in recording.segments() if plans}
    same_size = ranks is None or sizes <= {ranks}
    if not same_size:
        _check_comparable(settings, recording, compared)
    folder = into or new_replay_folder(settings, run_id)
    trained = train_again(
        recording, settings, codec, folder, base_model, ranks=ranks, keep_adapters=into is not None or not same_size
    )
    steps = []
    for result in compared:
        equal = trained.sha256[result.step] == result.adapter_sha256
        comparable = result.step < recording.comparable_until
        distance = None
        if comparable and not same_size and not equal:
            distance = _distance(settings, recording, result, folder, base_model)
        verdict = equal if comparable and (same_size or equal) else None
        steps.append(
            ReplayStep(
                result.step,
                result.adapter_sha256,
                trained.sha256[result.step],
                verdict,
                left_out.get(result.step, ()),
                distance,
            )
        )
    return steps


def later_branches(lineage: Lineage, run_id: str) -> list[str]:
    """Returns the branches that rollbacks made after this run, of it or of its stem; oldest first."""
    branches = lineage.branches(run_id)
    return branches[branches.index(run_id) + 1 :]


def _check_comparable(settings: Settings, recording: RunRecording, compared: Sequence[StepResult]) -> None:
    """Raises CannotReplay if none of the adapters trained in another number of ranks can be compared with a recorded
    one."""
    trained = [result for result in compared if recording.results[0].step < result.step < recording.comparable_until]
    if trained and all(recorded_adapter(settings, result) is None for result in trained):
        raise CannotReplay(
            "a replay with another number of ranks compares the adapters themselves, but of steps "
            f"{trained[0].step} to {trained[-1].step} none is below "
            f"{adapters_location(settings, trained[0].policy)}. Replay without --ranks: it needs only "
            "their sha256 on the log"
        )


def new_replay_folder(settings: Settings, run_id: str) -> Path:
    """Creates a folder for a replay."""
    (settings.home / "replays").mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=settings.home / "replays"))


def train_again(
    recording: RunRecording,
    settings: Settings,
    codec: Codec,
    into: Path,
    base_model: str | None,
    *,
    ranks: int | None = None,
    keep_adapters: bool = False,
) -> ReplayJobResult:
    """Executes the plans of a recording. Raises the errors of `train_segments`."""
    run_id = recording.run.run_id
    segments = [
        ReplaySegment(
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
    results = train_segments(segments, recording, settings, codec, base_model)
    own_results = [
        result for segment, result in zip(segments, results, strict=True) if segment.manifest.run_id == run_id
    ]
    if own_results:
        return merge_results(own_results)
    # A run that has trained no step itself ends with the adapter that it inherited.
    last = results[-1]
    return ReplayJobResult(
        sha256={recording.results[0].step: last.sha256[max(last.sha256)]}, metrics={}, checkpoint=last.checkpoint
    )


@dataclass(frozen=True, slots=True)
class ReplaySegment:
    """Consecutive plans of one manifest, and the configuration that trains them; see ReplayJob for the fields."""

    manifest: RunManifest
    config: TrainerConfig
    plans: Sequence[BatchPlan]
    start: int
    into: Path
    world_size: int
    keep_adapters: bool


def train_segments(
    segments: Sequence[ReplaySegment], recording: RunRecording, settings: Settings, codec: Codec, base_model: str | None
) -> list[ReplayJobResult]:
    """Trains the segments in order, each from the checkpoint of the previous one, the first from the recording's
    beginning. Raises CannotReplay for another base model or a missing device, and the errors of `run_job`."""
    for segment in segments:
        check_device(segment.manifest.run_id, segment.manifest.device, segment.world_size)
    results: list[ReplayJobResult] = []
    checkpoint = None if recording.beginning is None else recording.beginning.folder
    for segment in segments:
        folder = resolve_model(base_model or segment.config.base_model, settings.cache)
        check_environment(segment.manifest, folder)
        job = ReplayJob(
            manifest=segment.manifest,
            config=segment.config
            if checkpoint is not None
            else _with_published_adapter(segment.config, recording, settings),
            model_folder=folder,
            plans=tuple(redistribute(plan, segment.world_size) for plan in segment.plans),
            start=segment.start,
            checkpoint=checkpoint,
            into=segment.into,
            world_size=segment.world_size,
            keep_adapters=segment.keep_adapters,
        )
        results.append(run_job(job, settings, codec))
        checkpoint = results[-1].checkpoint
    return results


def merge_results(results: Sequence[ReplayJobResult]) -> ReplayJobResult:
    """Merges the results of all segments."""
    return ReplayJobResult(
        sha256={step: sha256 for result in results for step, sha256 in result.sha256.items()},
        metrics={step: metrics for result in results for step, metrics in result.metrics.items()},
        checkpoint=results[-1].checkpoint,
    )


def check_device(run_id: str, device: str, ranks: int) -> None:
    """Raises CannotReplay if this machine lacks the device that the run's manifest names: another device would give
    other bytes."""
    if device == "cuda" and (gpus := torch.cuda.device_count()) < ranks:
        raise CannotReplay(
            f"run {run_id} is trained on GPUs, {ranks} of them, and torch finds {gpus} on this machine. Replay it "
            "on a machine that has them. Here, --verify-only checks its rollouts, and --set device=cpu trains it on a "
            "CPU, as a separate run"
        )


def check_environment(manifest: RunManifest, model_folder: Path) -> None:
    """Raises CannotReplay for another base model or another config.json of it. Logs a warning for every other
    difference: it may still give the same bytes."""
    digest = model_digest(model_folder)
    if digest != manifest.base_sha256:
        raise CannotReplay(
            f"the base model in {model_folder} has sha256 {digest}, the run was trained on {manifest.base_sha256}. "
            "Name the right one with --base-model"
        )
    differing = differences(manifest.environment, environment(model_folder, manifest.device))
    if CONFIG_FILE in differing:
        raise CannotReplay(
            f"{model_folder / CONFIG_FILE} has other settings than that of the run's base model: the digest is "
            f"{differing[CONFIG_FILE][1]}, recorded is {differing[CONFIG_FILE][0]}. The same weights would give "
            "another policy. Name the right model with --base-model"
        )
    for name, (value, now) in differing.items():
        log.warning("%s differs: the run had %s, here it is %s; the bytes may differ", name, value, now)
    here = runtime.package_versions(manifest.versions) | {"instruction set": runtime.instruction_set(manifest.device)}
    recorded = manifest.versions | {"instruction set": manifest.instruction_set}
    for name, value in recorded.items():
        if here[name] != value:
            log.warning("%s differs: the run had %s, here it is %s; the bytes may differ", name, value, here[name])


def _with_published_adapter(config: TrainerConfig, recording: RunRecording, settings: Settings) -> TrainerConfig:
    """Returns the configuration with the published copy of the initial adapter instead of the configured folder, which
    may be gone."""
    first = recording.first_manifest
    if config.initial_adapter is None or first is None:
        return config
    place = adapter_location(settings, first.policy, first.first_version)
    if _read_unaltered(place, first.initial_adapter_sha256) is None:
        return config
    folder = place.folder
    if folder is None:
        manifest = read_manifest(place)
        assert manifest is not None
        folder = settings.home / "replays" / "initial-adapters" / manifest.digest
        if not (folder.exists() and is_complete(folder, manifest)):
            fetch_set(place, manifest, folder)
    return config.model_copy(update={"initial_adapter": str(folder)})


def recorded_adapter(settings: Settings, result: StepResult) -> bytes | None:
    """Returns the adapter of a step as the run published it; None if it is gone or altered. Raises StorageError."""
    return _read_unaltered(adapter_location(settings, result.policy, result.policy_version), result.adapter_sha256)


def _read_unaltered(place: Location, sha256: str) -> bytes | None:
    data = None
    if place.folder is not None:
        data = read_weights(place.folder)
    elif (manifest := read_manifest(place)) is not None:
        data = next((read_file(place, manifest, name) for name in WEIGHTS_NAMES if name in manifest.files), None)
    return data if data is not None and adapter_sha256(data) == sha256 else None


def _distance(
    settings: Settings, recording: RunRecording, result: StepResult, folder: Path, base_model: str | None
) -> float | None:
    recorded, replayed = recorded_adapter(settings, result), kept_weights(folder, result.step)
    if recorded is None or replayed is None:
        return None
    manifest = recording.run.first_manifest
    assert manifest is not None  # a run with results has one
    config = parse_config(manifest.config, f"the manifest {manifest.digest} of run {manifest.run_id}")
    if config.lora is None:
        base = resolve_model(base_model or config.base_model, settings.cache)
        return model_distance(recorded, replayed, base).relative
    return update_distance(recorded, replayed).relative
