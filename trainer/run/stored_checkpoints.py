"""A run's checkpoints in an object store, as sets of files. Without one, nothing here does anything.

A checkpoint is written to the local folder first (checkpoint.py), then uploaded, before the log has its StepResult. So
a step that is on the log has its checkpoint in the store, and a trainer on another machine continues from it.
"""

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from tentalis.service.settings import Settings
from tentalis.storage import file_set, objects
from tentalis.storage.errors import StoredFileDamaged, StoredFileMissing
from tentalis.storage.places import checkpoints_location
from trainer.run.checkpoint import (
    STATE_FILE,
    BadCheckpoint,
    Checkpoint,
    CheckpointState,
    set_aside,
)

log = logging.getLogger(__name__)


def is_remote(settings: Settings) -> bool:
    """True if checkpoints are kept in an object store."""
    return checkpoints_location(settings, "any").folder is None


def upload_checkpoint(settings: Settings, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint to the object store; one that is there and intact is kept. Raises StorageError, OSError."""
    if is_remote(settings):
        place = checkpoints_location(settings, checkpoint.state.run_id) / checkpoint.folder.name
        file_set.write_set(place, checkpoint.folder, [*checkpoint.state.files, STATE_FILE])


def fetch_checkpoint(
    settings: Settings, run_id: str, is_wanted: Callable[[CheckpointState], bool], into: Path
) -> Checkpoint | None:
    """Copies the newest wanted and intact checkpoint of a run from the object store to a folder below `into`; None if
    there is none. A folder of the same name is not usable, or the caller would not ask: it is moved away. Raises
    StorageError, OSError."""
    if not is_remote(settings):
        return None
    parent = checkpoints_location(settings, run_id)
    for name in sorted(file_set.list_sets(parent).sets, reverse=True):
        place, folder = parent / name, into / name
        try:
            manifest = file_set.read_manifest(place)
            if manifest is None or not is_wanted(_state_of(file_set.read_file(place, manifest, STATE_FILE), folder)):
                continue
            if folder.exists():
                log.warning("%s is not usable; moved to %s", folder, set_aside(BadCheckpoint(folder, "not usable")))
            file_set.fetch_set(place, manifest, folder)
            checkpoint = Checkpoint.read(folder)
            checkpoint.verify()
        except (StoredFileDamaged, StoredFileMissing, BadCheckpoint) as error:
            log.warning("skipped: %s", error)
            continue
        log.info("fetched the checkpoint of step %d from %s", checkpoint.state.step, place)
        return checkpoint
    return None


def _state_of(data: bytes, folder: Path) -> CheckpointState:
    try:
        return CheckpointState.parse(data)
    except ValueError as error:
        raise BadCheckpoint(folder, f"{folder.name}/{STATE_FILE} in the object store: {error}") from error


def stored_steps(settings: Settings, run_id: str) -> dict[str, int]:
    """Returns the steps of a run's checkpoints in the object store, by their names; deletes what interrupted writes
    left there. Raises StorageError."""
    if not is_remote(settings):
        return {}
    parent = checkpoints_location(settings, run_id)
    listing = file_set.list_sets(parent)
    objects.delete_objects(parent, listing.leftovers)
    return {name: int(name.partition("-")[0]) for name in listing.sets}


def remove_stored(settings: Settings, run_id: str, names: Collection[str]) -> None:
    """Deletes checkpoints of a run from the object store. Raises StorageError."""
    for name in names:
        file_set.remove_set(checkpoints_location(settings, run_id) / name)
