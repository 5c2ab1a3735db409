"""The run's manifest: everything that determines the bytes of its adapters."""

from collections.abc import Mapping
from pathlib import Path

from schemas import topics
from schemas.digest import record_digest
from schemas.records import RunManifest
from tentalis.inference.models import model_digest, tokenizer_digest
from tentalis.kafka.offsets import end_offsets
from tentalis.policies.lineage import Node
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from trainer.config.trainer_config import ConfigError, TrainerConfig, config_text
from trainer.data.positions import offsets_of, positions_of
from trainer.distributed.environment import environment
from trainer.distributed.runtime import instruction_set, package_versions, resolve_device, threads_of
from trainer.model.full import BASE_INITIALISER
from trainer.model.model import GIVEN_ADAPTER, SEEDED_INITIALISER
from trainer.run.run_log import RunLog


def manifest_of(
    config: TrainerConfig,
    run: RunLog,
    model_folder: Path,
    initial_adapter: str,
    world_size: int,
    start: Mapping[int, int],
    parent: Node | None = None,
) -> RunManifest:
    """Returns the manifest of this process's run. Its digest excludes `event_time`, so a restart under the same
    conditions has the manifest that is already on the log. First version, start positions and initial adapter are those
    of the run's first manifest; `parent` is the step from which the run started."""
    device = resolve_device(config)
    first = run.first_manifest
    manifest = RunManifest(
        run_id=config.run_id,
        digest="-",
        event_time=now_ms(),
        policy=config.policy,
        first_version=run.highest_version + 1 if first is None else first.first_version,
        config=config_text(config),
        base_model=config.base_model_name,
        base_sha256=model_digest(model_folder),
        tokenizer_sha256=tokenizer_digest(model_folder),
        adapter_seed=config.seed if first is None else first.adapter_seed,
        adapter_initialiser=_adapter_initialiser(config) if first is None else first.adapter_initialiser,
        initial_adapter_sha256=initial_adapter,
        parent_run=None if parent is None else parent.run,
        parent_step=None if parent is None else parent.step,
        versions=package_versions(),
        threads=threads_of(config),
        instruction_set=instruction_set(device),
        device=device,
        world_size=world_size,
        start=positions_of(start),
        environment=environment(model_folder, device),
    )
    return manifest.model_copy(update={"digest": manifest_digest(manifest)})


def manifest_digest(manifest: RunManifest) -> str:
    """Returns the digest of a manifest's content: all fields except `event_time`."""
    return record_digest(manifest, {"digest", "event_time"})


def _adapter_initialiser(config: TrainerConfig) -> str:
    if config.lora is None:
        return BASE_INITIALISER
    return SEEDED_INITIALISER if config.initial_adapter is None else GIVEN_ADAPTER


def start_positions(config: TrainerConfig, run: RunLog, settings: Settings) -> dict[int, int]:
    """Returns the first offset of the run per partition: from its first manifest, else from the configuration.

    Raises ConfigError if the configuration names partitions that the topic does not have.
    """
    if run.first_manifest is not None:
        return offsets_of(run.first_manifest.start)
    ends = end_offsets(settings, topics.ROLLOUTS)
    if config.start == "latest":
        return ends
    if config.start == "earliest":
        return dict.fromkeys(ends, 0)
    unknown = sorted(set(config.start) - set(ends))
    if unknown:
        raise ConfigError(f"start: {topics.ROLLOUTS} has no partitions {unknown}, only {sorted(ends)}")
    return {partition: config.start.get(partition, 0) for partition in ends}
