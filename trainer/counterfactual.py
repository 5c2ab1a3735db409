"""The same data in the same order under another configuration: a run of its own, beside the one that was recorded.

It executes the recorded plans, from the recorded run's beginning or one of its checkpoints. Its id and its policy's
name are derived from what was changed, its manifest names its parent, and its manifests, plans and results go onto the
log when all is trained, so that it can be replayed like any run. It announces no adapter: nobody can serve it.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from schemas import topics
from schemas.codec import Codec
from schemas.records import BatchPlan, Rollout, RunManifest, StepResult
from schemas.tensors import int32_view, uint8_view
from tentalis.config import Settings
from tentalis.inference.models import resolve_model
from tentalis.kafka import Publisher, make_codec
from trainer import runtime
from trainer.compare import Distance, kl_sum, limited, update_distance
from trainer.config import ConfigError, TrainerConfig, config_text
from trainer.config_file import overridden, parse_config
from trainer.fetch import Cache, fetch
from trainer.manifest import digest_of
from trainer.model import WEIGHTS_FILE, Policy
from trainer.plan import identified
from trainer.recording import CannotReplay, Recording, checked_recording
from trainer.replay import Leg, check_device, joined, new_folder, recorded_adapter, train_again, train_legs
from trainer.replay_job import Done, adapter_folder

log = logging.getLogger(__name__)

CHANGEABLE = frozenset({"base_dtype", "device", "gradient_checkpointing", "lora", "loss", "optimizer", "seed"})
"""Settings of the step itself. The others say which plans are made, and those are given."""
KL_POSITIONS = 1024
"""Trained tokens of a step on which the two policies are compared."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One step of both runs. `kl`: mean over tokens of the step's own rollouts of KL(counterfactual || recorded), nats,
    over the whole vocabulary, at temperature 1, of the policies after the step. `distance`: between the adapters."""

    step: int
    recorded: Mapping[str, float]
    changed: Mapping[str, float]
    recorded_sha: str
    changed_sha: str
    kl: float
    distance: Distance


@dataclass(frozen=True, slots=True)
class Comparison:
    """A counterfactual run beside its parent. `changes`: setting -> (recorded, changed)."""

    run_id: str
    parent_run: str
    parent_step: int
    policy: str
    changes: Mapping[str, tuple[object, object]]
    steps: tuple[Pair, ...]
    folder: Path


def counterfactual(
    run_id: str,
    settings: Settings,
    changes: Mapping[str, str],
    *,
    from_step: int = 0,
    to_step: int | None = None,
    into: Path | None = None,
    base_model: str | None = None,
    unreadable: list[str] | None = None,
) -> Comparison:
    """Trains the counterfactual of a run, records it, and compares it step by step.

    changes: setting (dotted path or alias) -> YAML value. Raises ConfigError, CannotReplay, BadRollouts, ValueError (a
    checkpoint of another adapter shape).
    """
    codec = make_codec(settings)
    recording = checked_recording(run_id, settings, codec, from_step, to_step, False, unreadable)
    start = recording.results[0].step
    if recording.inherited:
        parent = recording.inherited[-1].run
        raise CannotReplay(
            f"run {run_id} goes on from step {recording.run.first and recording.run.first.parent_step} of run "
            f"{parent.run_id}, and no checkpoint of that is on this machine. Make one first: tentalis replay {run_id}"
        )
    if not recording.plans:
        raise CannotReplay(f"run {run_id} has no step after {start}: there is nothing to train otherwise")
    segments = list(recording.segments())
    manifests = {manifest.digest: manifest for manifest, _, _ in segments}
    arms, changed = _arms(list(manifests.values()), changes, start)
    by_digest = {arm.recorded: arm for arm in arms}
    turns = [(by_digest[manifest.digest], begin, plans) for manifest, begin, plans in segments]
    folder = into or new_folder(settings, arms[0].manifest.run_id)
    done = _train(turns, recording, settings, codec, folder / "changed", base_model)
    _record(recording, arms, done, settings, codec, start)
    before = _recorded_adapters(recording, settings, codec, folder / "recorded", base_model)
    pairs = tuple(_pairs(recording, turns, done, before, settings, codec, folder / "changed", base_model))
    return Comparison(
        run_id=arms[0].manifest.run_id,
        parent_run=run_id,
        parent_step=start,
        policy=arms[0].manifest.policy,
        changes=changed,
        steps=pairs,
        folder=folder,
    )


@dataclass(frozen=True, slots=True)
class _Arm:
    """A recorded manifest (by digest) and its configuration, and those of the counterfactual."""

    recorded: str
    was: TrainerConfig
    config: TrainerConfig
    manifest: RunManifest


Turn = tuple[_Arm, int, tuple[BatchPlan, ...]]
"""Consecutive plans of one manifest, after the step before them: a run may have come back to an earlier manifest."""


def _arms(
    manifests: Sequence[RunManifest], changes: Mapping[str, str], start: int
) -> tuple[list[_Arm], dict[str, tuple[object, object]]]:
    """The counterfactual's side of every manifest, and what is changed: setting -> (recorded, changed), as the first
    manifest that it changes has it. Raises ConfigError."""
    both = [_settings(manifest, changes) for manifest in manifests]
    changed: dict[str, tuple[object, object]] = {}
    for was, now in reversed(both):
        changed |= _differences(was.model_dump(mode="json"), now.model_dump(mode="json"))
    fixed = sorted(path for path in changed if path.partition(".")[0] not in CHANGEABLE)
    if fixed:
        raise ConfigError(
            f"--set: {', '.join(fixed)} cannot be changed: the recorded plans are executed as they stand. What can: "
            f"{', '.join(sorted(CHANGEABLE))}"
        )
    if not changed:
        raise ConfigError("--set changes nothing: the run was trained with these very settings")
    name = hashlib.sha256(f"{manifests[0].run_id}/{start}/{sorted(changed.items())}".encode()).hexdigest()[:8]
    seed = both[0][1].seed
    return [_arm(manifest, *pair, name, start, seed) for manifest, pair in zip(manifests, both, strict=True)], changed


def _settings(manifest: RunManifest, changes: Mapping[str, str]) -> tuple[TrainerConfig, TrainerConfig]:
    was = parse_config(manifest.config, f"the manifest {manifest.digest} of run {manifest.run_id}")
    return was, overridden(was, changes, "--set")


def _arm(
    manifest: RunManifest, was: TrainerConfig, config: TrainerConfig, name: str, start: int, adapter_seed: int
) -> _Arm:
    run_id, policy = f"{manifest.run_id}.cf-{name}", f"{manifest.policy}.cf-{name}"
    config = config.model_copy(update={"run_id": run_id, "policy": policy})
    # Where nobody asks for another device, nothing but what was changed is to differ.
    device = manifest.device if config.device == was.device else runtime.device_of(config)
    check_device(run_id, device, manifest.world_size)
    # The event time stays that of the recorded manifest: the same question twice is to give the same records.
    copy = manifest.model_copy(
        update={
            "run_id": run_id,
            "policy": policy,
            "config": config_text(config),
            "parent_run": manifest.run_id,
            # From where nothing was trained yet nothing is inherited, not even the first adapter, which may be of
            # another shape. A branch's first adapter is its parent's.
            "parent_step": start if start or manifest.parent_step is not None else None,
            "adapter_seed": adapter_seed,
            "device": device,
            "instruction_set": runtime.instruction_set(device),
            "versions": runtime.versions(),
        }
    )
    return _Arm(manifest.digest, was, config, copy)


def _differences(was: Mapping[str, object], now: Mapping[str, object]) -> Iterator[tuple[str, tuple[object, object]]]:
    for name in was:
        old, new = was[name], now[name]
        if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
            yield from ((f"{name}.{key}", pair) for key, pair in _differences(old, new))
        elif old != new:
            yield name, (old, new)


def _train(
    turns: Sequence[Turn], recording: Recording, settings: Settings, codec: Codec, into: Path, base_model: str | None
) -> Done:
    legs = [
        Leg(arm.manifest, arm.config, plans, begin, into, arm.manifest.world_size, keep_adapters=True)
        for arm, begin, plans in turns
    ]
    return joined(train_legs(legs, recording, settings, codec, base_model))


def _record(
    recording: Recording, arms: Sequence[_Arm], done: Done, settings: Settings, codec: Codec, start: int
) -> None:
    """Manifests, plans and results of the counterfactual, in this order. Written again they are the same records."""
    publisher = Publisher(settings, "tentalis-replay", codec)
    own: dict[str, RunManifest] = {}
    manifests: dict[str, RunManifest] = {}
    for arm in arms:
        manifest = arm.manifest.model_copy(update={"initial_adapter_sha256": done.sha256[start]})
        manifest = manifest.model_copy(update={"digest": digest_of(manifest)})
        # Manifests that differ only in what is changed become one.
        manifests[arm.recorded] = own.setdefault(manifest.digest, manifest)
    for manifest in own.values():
        publisher.send(topics.RUNS, manifest)
    publisher.flush()
    first = arms[0].manifest
    plans = {plan.step: _own_plan(plan, manifests[plan.manifest_digest]) for plan in recording.plans}
    for plan in plans.values():
        publisher.send(topics.BATCHES, plan)
    publisher.flush()
    for result in recording.results:
        step = result.step
        of_step = plans.get(step)
        publisher.send(
            topics.BATCHES,
            StepResult(
                run_id=first.run_id,
                step=step,
                attempt=of_step.attempt if of_step else 0,
                plan_id=of_step.plan_id if of_step else None,
                event_time=result.event_time,
                policy=first.policy,
                policy_version=first.first_version + step,
                adapter_sha256=done.sha256[step],
                metrics=done.metrics.get(step, {}),
                owner="counterfactual",
            ),
        )
    publisher.flush()


def _own_plan(plan: BatchPlan, manifest: RunManifest) -> BatchPlan:
    return identified(
        plan.model_copy(
            update={
                "run_id": manifest.run_id,
                "policy": manifest.policy,
                "manifest_digest": manifest.digest,
                "owner": "counterfactual",
            }
        )
    )


def _recorded_adapters(
    recording: Recording, settings: Settings, codec: Codec, into: Path, base_model: str | None
) -> dict[int, bytes]:
    """The recorded run's adapters by step: as published, or trained again where one is gone."""
    steps = {plan.step for plan in recording.plans}
    results = [result for result in recording.results if result.step in steps]
    found = {result.step: recorded_adapter(settings, result) for result in results}
    gone = sorted(step for step, data in found.items() if data is None)
    if gone:
        log.warning("the adapters of %d recorded steps are not on this machine: they are trained again", len(gone))
        train_again(recording, settings, codec, into, base_model, keep_adapters=True)
        found = {step: (adapter_folder(into, step) / WEIGHTS_FILE).read_bytes() for step in steps}
    return {step: data for step, data in found.items() if data is not None}


def _pairs(
    recording: Recording,
    turns: Sequence[Turn],
    done: Done,
    before: Mapping[int, bytes],
    settings: Settings,
    codec: Codec,
    into: Path,
    base_model: str | None,
) -> Iterator[Pair]:
    results = {result.step: result for result in recording.results}
    for arm, _, plans in turns:
        if not plans:
            continue
        folder = resolve_model(base_model or arm.config.base_model, settings.cache)
        was, now = (_policy(config, folder, arm.manifest.device) for config in (arm.was, arm.config))
        scales = (arm.was.lora.alpha / arm.was.lora.rank, arm.config.lora.alpha / arm.config.lora.rank)
        for plan in plans:
            step = plan.step
            old, new = before[step], (adapter_folder(into, step) / WEIGHTS_FILE).read_bytes()
            was.load_adapter(old)
            now.load_adapter(new)
            rollouts = fetch(settings, codec, plan.rows, Cache())
            yield Pair(
                step=step,
                recorded=results[step].metrics,
                changed=done.metrics[step],
                recorded_sha=results[step].adapter_sha256,
                changed_sha=done.sha256[step],
                kl=_kl(was, now, [rollouts[row.rollout_id] for row in plan.rows]),
                distance=update_distance(old, new, *scales),
            )


def _policy(config: TrainerConfig, folder: Path, device: str) -> Policy:
    dtype = runtime.base_dtype_of(config)
    return Policy(folder, config.base_model_name, config.lora, config.seed, device, dtype)


def _kl(was: Policy, now: Policy, rollouts: Sequence[Rollout]) -> float:
    total, positions = 0.0, 0
    head = now.lm.get_output_embeddings().weight
    for token_ids, index in limited(map(_trained, rollouts), KL_POSITIONS):
        before = index - 1
        total += kl_sum(now.hidden(token_ids)[before], was.hidden(token_ids)[before], head)
        positions += len(index)
    return total / positions if positions else 0.0


def _trained(rollout: Rollout) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(int32_view(rollout.token_ids).tolist())
    return ids, torch.tensor(uint8_view(rollout.loss_mask).tolist()).nonzero().squeeze(1)
