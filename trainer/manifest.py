"""The run's manifest: everything that the bytes of its adapters depend on."""

from collections.abc import Mapping
from pathlib import Path

from schemas import topics
from schemas.digest import record_digest
from schemas.records import Position, RunManifest
from tentalis.config import Settings
from tentalis.inference.models import model_digest, tokenizer_digest
from tentalis.kafka import end_offsets, now_ms
from tentalis.lineage import Node
from trainer.config import ConfigError, TrainerConfig, config_text
from trainer.model import GIVEN, INITIALISER
from trainer.runlog import RunLog
from trainer.runtime import device_of, instruction_set, threads_of, versions


def manifest_of(
    config: TrainerConfig,
    run: RunLog,
    model_folder: Path,
    initial_adapter: str,
    world_size: int,
    start: Mapping[int, int],
    parent: Node | None = None,
) -> RunManifest:
    """The manifest of this process's run. Its digest does not cover `event_time`, so a restart under the same
    conditions has the manifest that is on the log already. First version, start positions and what is said of the
    initial adapter are those of the run's first one; `parent` is what it goes on from.
    """
    device = device_of(config)
    first = run.first
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
        adapter_initialiser=_initialiser(config) if first is None else first.adapter_initialiser,
        initial_adapter_sha256=initial_adapter,
        parent_run=None if parent is None else parent.run,
        parent_step=None if parent is None else parent.step,
        versions=versions(),
        threads=threads_of(config, world_size),
        instruction_set=instruction_set(device),
        device=device,
        world_size=world_size,
        start=tuple(Position(topic=topics.ROLLOUTS, partition=p, offset=offset) for p, offset in sorted(start.items())),
    )
    return manifest.model_copy(update={"digest": digest_of(manifest)})


def digest_of(manifest: RunManifest) -> str:
    """The digest that a manifest's content gives it: of all but `event_time`."""
    return record_digest(manifest, {"digest", "event_time"})


def _initialiser(config: TrainerConfig) -> str:
    return INITIALISER if config.initial_adapter is None else GIVEN


def start_positions(config: TrainerConfig, run: RunLog, settings: Settings) -> dict[int, int]:
    """Per partition the first offset of the run: as its first manifest says, or as the configuration asks for.

    Raises ConfigError if the configuration names other partitions than the topic has.
    """
    if run.first is not None:
        return {position.partition: position.offset for position in run.first.start}
    ends = end_offsets(settings, topics.ROLLOUTS)
    if config.start == "latest":
        return ends
    if config.start == "earliest":
        return dict.fromkeys(ends, 0)
    unknown = sorted(set(config.start) - set(ends))
    if unknown:
        raise ConfigError(f"start: {topics.ROLLOUTS} has no partitions {unknown}, only {sorted(ends)}")
    return {partition: config.start.get(partition, 0) for partition in ends}
