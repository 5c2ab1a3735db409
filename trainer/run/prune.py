"""Removes old checkpoints and adapters, on this machine and in the object store."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tentalis.policies.lineage import Lineage, Node
from tentalis.service.settings import Settings
from tentalis.storage.places import adapters_location
from trainer.config.trainer_config import TrainerConfig
from trainer.run.checkpoint import checkpoint_root, read_checkpoints, remove_checkpoints, remove_leftovers
from trainer.run.publish import prune_adapters
from trainer.run.retention import versions_to_keep
from trainer.run.stored_checkpoints import is_remote, remove_stored, stored_steps


@dataclass(frozen=True, slots=True)
class Retention:
    """The facts that decide which versions stay, as known at the end of a step. `newest`: the version of that step;
    `promoted`: versions in log order; `protected`: pinned and assigned versions; `weights`: digests by version."""

    config: TrainerConfig
    lineage: Lineage
    newest: int
    promoted: tuple[int, ...]
    protected: frozenset[int]
    weights: Mapping[int, str]

    def needed(self, present: Collection[int]) -> set[int]:
        """Returns the `present` versions that must stay, whatever their number."""
        staleness = self.config.max_staleness
        return versions_to_keep(present, self.newest, staleness, self.promoted, self.protected, self.weights)


def prune(settings: Settings, retention: Retention) -> None:
    """Removes the checkpoints and adapters that are not kept, and the remains of interrupted writes. Raises
    StorageError, OSError."""
    config, lineage = retention.config, retention.lineage
    runs = lineage.branches(config.run_id)
    local = {
        (run, checkpoint.folder.name): checkpoint
        for run in runs
        for checkpoint in read_checkpoints(checkpoint_root(settings, run))
    }
    stored = {run: stored_steps(settings, run) for run in runs}
    steps = {(run, name): step for run, found in stored.items() for name, step in found.items()}
    steps |= {place: checkpoint.state.step for place, checkpoint in local.items()}
    versions = {(run, name): lineage.version(Node(run, step)) for (run, name), step in steps.items()}
    own = sorted((version for (run, _), version in versions.items() if run == config.run_id), reverse=True)
    newest = set(own[: config.keep_checkpoints])
    kept = newest | retention.needed(set(versions.values()))
    kept_here = newest if is_remote(settings) else kept
    remove_checkpoints(checkpoint for place, checkpoint in local.items() if versions[place] not in kept_here)
    remove_leftovers(checkpoint_root(settings, config.run_id))
    for run in runs:
        old = [name for (of, name), version in versions.items() if of == run and version not in kept]
        remove_stored(settings, run, [name for name in old if name in stored[run]])
    prune_adapters(adapters_location(settings, config.policy), config.keep_adapters, retention.needed)
