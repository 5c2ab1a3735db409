"""A counterfactual run: the same data in the same order under another configuration or with the rewards of another
verifier, as a separate run.

It executes the recorded plans, from the recorded run's beginning or one of its checkpoints. With other rewards it has
rollouts of its own, and plans that are decided again by the run's settings (rescored_run.py). Its id and its policy's
name are derived from the changes, and its manifest names its parent. Its manifests, plans and results are written to
the log when all is trained, so it can be replayed like any run. It announces no adapter, so it cannot be served.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from schemas import topics
from schemas.ids import counterfactual_name
from schemas.records import BatchPlan, Rollout, RunManifest, StepResult
from schemas.tensors import int32_view, uint8_view
from schemas.wire.codec import Codec
from tentalis.inference.models import resolve_model
from tentalis.kafka.codec import make_codec
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from trainer.config.file import override_settings, parse_config
from trainer.config.trainer_config import ConfigError, TrainerConfig, config_text
from trainer.data.candidates import REWARD_REASONS
from trainer.data.fetch import RolloutCache, fetch, look_up_rollouts
from trainer.data.plan import lay_out, with_plan_id
from trainer.distributed import runtime
from trainer.distributed.environment import CONFIG_FILE, environment
from trainer.model.make import make_policy
from trainer.model.policy import TrainedPolicy
from trainer.replay.changed_baselines import ChangedLoss, with_changed_baselines
from trainer.replay.compare import AdapterDistance, kl_sum, limit_positions, model_distance, update_distance
from trainer.replay.job import ReplayJobResult, kept_weights
from trainer.replay.recording import CannotReplay, RunRecording, read_recording
from trainer.replay.replay import (
    ReplaySegment,
    check_device,
    merge_results,
    new_replay_folder,
    recorded_adapter,
    train_again,
    train_segments,
)
from trainer.replay.rescored_plans import counted, new_drops
from trainer.replay.rescored_rewards import RescoredRewards
from trainer.replay.rescored_run import RewardSource, read_rewards, write_rollouts
from trainer.run.manifest import manifest_digest

log = logging.getLogger(__name__)

CHANGEABLE = frozenset({"base_dtype", "device", "gradient_checkpointing", "lora", "loss", "optimizer", "seed"})
"""Settings of the step itself. The other settings determine the plans, and the plans are given."""
KL_POSITIONS = 1024
"""Number of trained tokens of a step on which the two policies are compared."""


@dataclass(frozen=True, slots=True)
class CounterfactualPair:
    """One step of both runs. `kl`: mean over tokens of the step's own rollouts of KL(counterfactual || recorded), nats,
    over the whole vocabulary, at temperature 1, of the policies after the step. `distance`: between the adapters."""

    step: int
    recorded: Mapping[str, float]
    changed: Mapping[str, float]
    recorded_sha: str
    changed_sha: str
    kl: float
    distance: AdapterDistance


@dataclass(frozen=True, slots=True)
class RescoringReport:
    """Counts of a counterfactual with other rewards: rollouts of its groups with a new score, and those of them whose
    reward the verifier left open.

    `unscored`: those with a recorded reward and no new score, with the reason. `dropped`: planned rollouts that the
    new rewards leave out, by reason. `never_planned`: rollouts that the recorded rewards left out of the recorded
    plans, by reason; they stay out.
    """

    label: str
    scored: int
    unknown: int
    unscored: Mapping[str, str]
    dropped: Mapping[str, int]
    never_planned: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A counterfactual run and its parent. `changes`: setting -> (recorded, changed)."""

    run_id: str
    parent_run: str
    parent_step: int
    policy: str
    changes: Mapping[str, tuple[object, object]]
    steps: tuple[CounterfactualPair, ...]
    folder: Path
    rescoring: RescoringReport | None = None


def counterfactual(
    run_id: str,
    settings: Settings,
    changes: Mapping[str, str],
    *,
    rewards_from: RewardSource | None = None,
    from_step: int = 0,
    to_step: int | None = None,
    into: Path | None = None,
    base_model: str | None = None,
    unreadable: list[str] | None = None,
) -> RunComparison:
    """Trains the counterfactual of a run, records it, and compares it step by step.

    changes: setting (dotted path or alias) -> YAML value. rewards_from: the verifier whose scores replace the recorded
    rewards. Raises ConfigError, CannotReplay, BadRollouts, ValueError (a
    checkpoint of another adapter shape).
    """
    codec = make_codec(settings)
    recording = read_recording(run_id, settings, codec, from_step, to_step, False, unreadable)
    start = recording.results[0].step
    if recording.inherited:
        parent, first = recording.inherited[-1].run, recording.run.first_manifest
        raise CannotReplay(
            f"run {run_id} starts from step {first and first.parent_step} of run {parent.run_id}, and no "
            f"checkpoint of it is on this machine. Create one first: tentalis replay {run_id}"
        )
    if not recording.plans:
        raise CannotReplay(f"run {run_id} has no step after {start}: there is nothing to train again")
    manifests = {manifest.digest: manifest for manifest, _, _ in recording.segments()}
    rewards = None if rewards_from is None else read_rewards(rewards_from, recording.plans, settings, codec)
    variants, changed = _variants(list(manifests.values()), changes, start, rewards)
    variants = [_here(variant, manifests[variant.recorded_digest], settings, base_model) for variant in variants]
    rescored = recording if rewards is None else _rescored(recording, rewards, variants, settings, codec)
    losses = {each.recorded_digest: ChangedLoss(each.recorded_config.loss, each.config.loss) for each in variants}
    rebased = with_changed_baselines(rescored, losses, lambda rows: look_up_rollouts(settings, codec, rows))
    laid_out = _with_whole_groups(rebased, variants, settings, codec)
    recorded_segments = list(laid_out.segments())
    by_digest = {variant.recorded_digest: variant for variant in variants}
    segments = [(by_digest[manifest.digest], begin, plans) for manifest, begin, plans in recorded_segments]
    folder = into or new_replay_folder(settings, variants[0].manifest.run_id)
    result = _train(segments, recording, settings, codec, folder / "changed", base_model)
    _record(laid_out, variants, result, settings, codec, start)
    recorded_adapters = _recorded_adapters(recording, settings, codec, folder / "recorded", base_model)
    pairs = tuple(
        _compare_steps(recording, segments, result, recorded_adapters, settings, codec, folder / "changed", base_model)
    )
    return RunComparison(
        run_id=variants[0].manifest.run_id,
        parent_run=run_id,
        parent_step=start,
        policy=variants[0].manifest.policy,
        changes=changed,
        steps=pairs,
        folder=folder,
        rescoring=None if rewards is None else _rescoring_report(rewards, recording, rescored),
    )


def _rescored(
    recording: RunRecording,
    rewards: RescoredRewards,
    variants: Sequence["_Variant"],
    settings: Settings,
    codec: Codec,
) -> RunRecording:
    own = variants[0].manifest
    configs = {variant.recorded_digest: variant.recorded_config for variant in variants}
    return write_rollouts(recording, rewards, configs, own.run_id, own.policy, settings, codec)


def _rescoring_report(rewards: RescoredRewards, recorded: RunRecording, rescored: RunRecording) -> RescoringReport:
    scores = [score for score, _ in rewards.scores.values()]
    drops = (drop for plan in recorded.plans for drop in plan.drops)
    return RescoringReport(
        label=rewards.label,
        scored=len(scores),
        unknown=sum(score.reward is None for score in scores),
        unscored=rewards.unscored,
        dropped=counted(new_drops(recorded.plans, rescored.plans)),
        never_planned=counted((drop.reason, drop.count) for drop in drops if drop.reason in REWARD_REASONS),
    )


@dataclass(frozen=True, slots=True)
class _Variant:
    """A recorded manifest (by digest) and its configuration, with the counterfactual's configuration and manifest."""

    recorded_digest: str
    recorded_config: TrainerConfig
    config: TrainerConfig
    manifest: RunManifest


VariantSegment = tuple[_Variant, int, tuple[BatchPlan, ...]]
"""Consecutive plans of one manifest, after the step before them. A manifest may have several turns: a run can return to
an earlier manifest."""


def _variants(
    manifests: Sequence[RunManifest], changes: Mapping[str, str], start: int, rewards: RescoredRewards | None = None
) -> tuple[list[_Variant], dict[str, tuple[object, object]]]:
    """Returns the counterfactual's counterpart of every manifest, and the changes: setting -> (recorded, changed), with
    the values of the first manifest that a change affects. Raises ConfigError."""
    configs = [_both_configs(manifest, changes) for manifest in manifests]
    changed: dict[str, tuple[object, object]] = {}
    for recorded, altered in reversed(configs):
        changed |= _differences(recorded.model_dump(mode="json"), altered.model_dump(mode="json"))
    forbidden = sorted(path for path in changed if path.partition(".")[0] not in CHANGEABLE)
    if forbidden:
        raise ConfigError(
            f"--set: {', '.join(forbidden)} cannot be changed: the recorded plans are executed unchanged. These can: "
            f"{', '.join(sorted(CHANGEABLE))}"
        )
    if changes and not changed:
        raise ConfigError("--set changes nothing: the run was trained with exactly these settings")
    content = f"{manifests[0].run_id}/{start}/{sorted(changed.items())}"
    if rewards is not None:
        content += f"/{rewards.digest}"
        changed["verifier"] = rewards.recorded, rewards.label
    digest = hashlib.sha256(content.encode()).hexdigest()
    seed = configs[0][1].seed
    return [
        _variant(manifest, *config_pair, digest, start, seed)
        for manifest, config_pair in zip(manifests, configs, strict=True)
    ], changed


def _both_configs(manifest: RunManifest, changes: Mapping[str, str]) -> tuple[TrainerConfig, TrainerConfig]:
    recorded = parse_config(manifest.config, f"the manifest {manifest.digest} of run {manifest.run_id}")
    changed = override_settings(recorded, changes, "--set")
    if (recorded.lora is None) != (changed.lora is None):
        raise ConfigError(
            "--set: lora cannot change between an adapter and full fine-tuning: the two begin with other weights, and "
            "their updates cannot be compared. Change the shape of the adapter, or another setting"
        )
    return recorded, changed


def _variant(
    manifest: RunManifest,
    recorded_config: TrainerConfig,
    changed_config: TrainerConfig,
    digest: str,
    start: int,
    adapter_seed: int,
) -> _Variant:
    run_id, policy = (counterfactual_name(name, digest) for name in (manifest.run_id, manifest.policy))
    changed_config = changed_config.model_copy(update={"run_id": run_id, "policy": policy})
    # Without a change of the device it stays the recorded one: only the requested changes may differ.
    device = (
        manifest.device if changed_config.device == recorded_config.device else runtime.resolve_device(changed_config)
    )
    check_device(run_id, device, manifest.world_size)
    # Keeps the recorded manifest's event time, so that the same counterfactual twice gives the same records.
    changed_manifest = manifest.model_copy(
        update={
            "run_id": run_id,
            "policy": policy,
            "config": config_text(changed_config),
            "parent_run": manifest.run_id,
            # From step 0 of a run without a parent nothing is inherited, not even the first adapter, which may have
            # another shape. A branch's first adapter is its parent's.
            "parent_step": start if start or manifest.parent_step is not None else None,
            "adapter_seed": adapter_seed,
            "device": device,
            "instruction_set": runtime.instruction_set(device),
            "versions": runtime.package_versions(),
        }
    )
    return _Variant(manifest.digest, recorded_config, changed_config, changed_manifest)


def _here(variant: _Variant, recorded: RunManifest, settings: Settings, base_model: str | None) -> _Variant:
    """Returns the variant with this machine's environment in its manifest, but with the recorded config.json: it must
    be the same model."""
    folder = resolve_model(base_model or variant.config.base_model, settings.cache)
    model = {name: value for name, value in recorded.environment.items() if name == CONFIG_FILE}
    found = environment(folder, variant.manifest.device) | model
    return replace(variant, manifest=variant.manifest.model_copy(update={"environment": found}))


def _with_whole_groups(
    recording: RunRecording, variants: Sequence[_Variant], settings: Settings, codec: Codec
) -> RunRecording:
    """Returns the recording with plans laid out for losses on pairs, if only the counterfactual has one: the recorded
    micro-batches may divide a group, and would lose its pairs without a word."""
    with_pairs = {
        variant.recorded_digest: variant
        for variant in variants
        if variant.config.loss.pair.weight > 0 and variant.recorded_config.loss.pair.weight == 0
    }
    rows = [row for plan in recording.plans if plan.manifest_digest in with_pairs for row in plan.rows]
    if not rows:
        return recording
    present = look_up_rollouts(settings, codec, rows)
    plans = [
        whole_groups(plan, present, with_pairs[plan.manifest_digest].config.micro_batch_tokens)
        if plan.manifest_digest in with_pairs
        else plan
        for plan in recording.plans
    ]
    return replace(recording, plans=tuple(plans))


def whole_groups(plan: BatchPlan, present: Mapping[str, Rollout], micro_batch_tokens: int) -> BatchPlan:
    """Returns the same plan with every group in one micro-batch. `present`: its rollouts, by key."""
    groups = [present[row.rollout_id].head.task_id for row in plan.rows]
    rows = lay_out(plan.rows, groups, plan.world_size, micro_batch_tokens, whole_groups=True)
    return plan.model_copy(update={"rows": tuple(rows)})


def _differences(
    recorded: Mapping[str, object], changed: Mapping[str, object]
) -> Iterator[tuple[str, tuple[object, object]]]:
    for name in recorded:
        old, new = recorded[name], changed[name]
        if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
            yield from ((f"{name}.{key}", pair) for key, pair in _differences(old, new))
        elif old != new:
            yield name, (old, new)


def _train(
    segments: Sequence[VariantSegment],
    recording: RunRecording,
    settings: Settings,
    codec: Codec,
    into: Path,
    base_model: str | None,
) -> ReplayJobResult:
    replay_segments = [
        ReplaySegment(
            variant.manifest, variant.config, plans, begin, into, variant.manifest.world_size, keep_adapters=True
        )
        for variant, begin, plans in segments
    ]
    return merge_results(train_segments(replay_segments, recording, settings, codec, base_model))


def _record(
    recording: RunRecording,
    variants: Sequence[_Variant],
    result: ReplayJobResult,
    settings: Settings,
    codec: Codec,
    start: int,
) -> None:
    """Writes the manifests, plans and results of the counterfactual, in this order. Writing them twice gives the same
    records."""
    publisher = Publisher(settings, "tentalis-replay", codec)
    by_digest: dict[str, RunManifest] = {}
    manifests: dict[str, RunManifest] = {}
    for variant in variants:
        manifest = variant.manifest.model_copy(update={"initial_adapter_sha256": result.sha256[start]})
        manifest = manifest.model_copy(update={"digest": manifest_digest(manifest)})
        # Manifests that differ only in changed settings become one.
        manifests[variant.recorded_digest] = by_digest.setdefault(manifest.digest, manifest)
    for manifest in by_digest.values():
        publisher.send(topics.RUNS, manifest)
    publisher.flush()
    first = variants[0].manifest
    plans = {plan.step: _counterfactual_plan(plan, manifests[plan.manifest_digest]) for plan in recording.plans}
    for plan in plans.values():
        publisher.send(topics.BATCHES, plan)
    publisher.flush()
    for recorded_result in recording.results:
        step = recorded_result.step
        own_plan = plans.get(step)
        publisher.send(
            topics.BATCHES,
            StepResult(
                run_id=first.run_id,
                step=step,
                attempt=own_plan.attempt if own_plan else 0,
                plan_id=own_plan.plan_id if own_plan else None,
                event_time=recorded_result.event_time,
                policy=first.policy,
                policy_version=first.first_version + step,
                adapter_sha256=result.sha256[step],
                metrics=result.metrics.get(step, {}),
                owner="counterfactual",
            ),
        )
    publisher.flush()


def _counterfactual_plan(plan: BatchPlan, manifest: RunManifest) -> BatchPlan:
    return with_plan_id(
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
    recording: RunRecording, settings: Settings, codec: Codec, into: Path, base_model: str | None
) -> dict[int, bytes]:
    """Returns the recorded run's adapters by step: the published ones, or trained again if one is gone."""
    steps = {plan.step for plan in recording.plans}
    results = [result for result in recording.results if result.step in steps]
    adapters = {result.step: recorded_adapter(settings, result) for result in results}
    missing = sorted(step for step, data in adapters.items() if data is None)
    if missing:
        log.warning("the adapters of %d recorded steps are not on this machine: training them again", len(missing))
        train_again(recording, settings, codec, into, base_model, keep_adapters=True)
        adapters = {step: kept_weights(into, step) for step in steps}
    return {step: data for step, data in adapters.items() if data is not None}


def _compare_steps(
    recording: RunRecording,
    segments: Sequence[VariantSegment],
    trained: ReplayJobResult,
    recorded_adapters: Mapping[int, bytes],
    settings: Settings,
    codec: Codec,
    into: Path,
    base_model: str | None,
) -> Iterator[CounterfactualPair]:
    results = {result.step: result for result in recording.results}
    for variant, _, plans in segments:
        if not plans:
            continue
        folder = resolve_model(base_model or variant.config.base_model, settings.cache)
        recorded_policy, changed_policy = (
            _policy(config, folder, variant.manifest.device) for config in (variant.recorded_config, variant.config)
        )
        for plan in plans:
            step = plan.step
            recorded_weights, changed_weights = recorded_adapters[step], kept_weights(into, step)
            assert changed_weights is not None  # the job kept them
            recorded_policy.load_weights(recorded_weights)
            changed_policy.load_weights(changed_weights)
            rollouts = fetch(settings, codec, plan.rows, RolloutCache())
            yield CounterfactualPair(
                step=step,
                recorded=results[step].metrics,
                changed=trained.metrics[step],
                recorded_sha=results[step].adapter_sha256,
                changed_sha=trained.sha256[step],
                kl=_policy_kl(recorded_policy, changed_policy, [rollouts[row.rollout_id] for row in plan.rows]),
                distance=_weights_distance(variant, recorded_weights, changed_weights, folder),
            )


def _policy(config: TrainerConfig, folder: Path, device: str) -> TrainedPolicy:
    return make_policy(config, folder, device, runtime.base_dtype_of(config, device))


def _weights_distance(variant: _Variant, recorded: bytes, changed: bytes, base: Path) -> AdapterDistance:
    one, other = variant.recorded_config.lora, variant.config.lora
    if one is None or other is None:
        return model_distance(recorded, changed, base)
    return update_distance(recorded, changed, one.alpha / one.rank, other.alpha / other.rank)


def _policy_kl(recorded: TrainedPolicy, changed: TrainedPolicy, rollouts: Sequence[Rollout]) -> float:
    total, positions = 0.0, 0
    heads = [policy.lm.get_output_embeddings().weight for policy in (changed, recorded)]
    for token_ids, index in limit_positions(map(_trained_tokens, rollouts), KL_POSITIONS):
        predicting = index - 1
        total += kl_sum(
            changed.hidden_states(token_ids)[predicting], recorded.hidden_states(token_ids)[predicting], *heads
        )
        positions += len(index)
    return total / positions if positions else 0.0


def _trained_tokens(rollout: Rollout) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(int32_view(rollout.token_ids).tolist())
    return ids, torch.tensor(uint8_view(rollout.loss_mask).tolist()).nonzero().squeeze(1)
