"""Checkpoints on disk: complete or absent, and named by the plan that produced them.

A checkpoint is a folder `<step>-<attempt>-<owner>` with the version (an adapter or, with full fine-tuning, a whole
model; float32), the optimizer's moments and state.json.
It is written to a temporary folder, flushed, and renamed; every file's sha256 is in state.json. There is no random
state to save: every step is seeded by its plan. state.json has a digest of its own content too.
"""

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from pydantic import BaseModel, ConfigDict

from schemas.ids import sha256_hex
from tentalis.service.settings import Settings
from tentalis.storage.checkpoint_state import DIGEST, digest_of, state_fields
from tentalis.storage.places import checkpoints_location
from tentalis.storage.version_files import WEIGHTS_NAMES
from trainer.model.policy import VersionFiles
from trainer.step.engine import OptimizerState

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
DAMAGED_FOLDER = "damaged"

log = logging.getLogger(__name__)


class BadCheckpoint(RuntimeError):
    """The files of a checkpoint are missing, unreadable, or do not match its state.json."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(reason)
        self.folder = folder


class CheckpointState(BaseModel):
    """state.json. `low_water` is, per partition, the first offset that no plan up to this step has considered. Together
    with the plans on the log (the consumed rollouts) it is all that reading needs to continue.

    `rollouts_topic_id` is Kafka's id of the topic that `low_water` is about; None in checkpoints of earlier versions,
    and in one of step 0 that is made again for a run that has begun. `control_topic_ids` are those of the topics with
    the run's records, by name; None likewise, and at step 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    policy: str
    step: int
    attempt: int
    plan_id: str | None
    owner: str
    manifest_digest: str
    low_water: dict[int, int]
    adapter_sha256: str
    optimizer_steps: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    files: dict[str, str] = {}
    rollouts_topic_id: str | None = None
    control_topic_ids: dict[str, str] | None = None

    @classmethod
    def parse(cls, data: bytes) -> "CheckpointState":
        """Reads the content of a state.json. Raises ValueError."""
        return cls.model_validate(state_fields(data))

    @property
    def folder_name(self) -> str:
        return f"{self.step:06d}-{self.attempt:03d}-{self.owner[:12]}"


class Checkpoint(BaseModel):
    """A checkpoint on disk."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    state: CheckpointState

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Reads the checkpoint in a folder. Raises BadCheckpoint for an invalid state.json."""
        try:
            return cls(folder=folder, state=CheckpointState.parse(_read_file(folder, STATE_FILE)))
        except ValueError as error:
            raise BadCheckpoint(folder, f"{folder / STATE_FILE}: {error}") from error

    @property
    def weights_name(self) -> str:
        """The name of the file with the weights. Raises BadCheckpoint."""
        for name in WEIGHTS_NAMES:
            if name in self.state.files:
                return name
        raise BadCheckpoint(self.folder, f"{self.folder / STATE_FILE} names no {' or '.join(WEIGHTS_NAMES)}")

    @property
    def version_files(self) -> tuple[str, ...]:
        """The names of the files that are published: all but the optimizer's."""
        return tuple(sorted(self.state.files.keys() - {OPTIMIZER_FILE}))

    def weights(self) -> bytes:
        """Returns the content of the file with the weights. Raises BadCheckpoint."""
        return self._checked(self.weights_name)

    def optimizer(self) -> OptimizerState:
        """Returns the optimizer's state. Raises BadCheckpoint."""
        from safetensors.torch import load

        return OptimizerState(load(self._checked(OPTIMIZER_FILE)), self.state.optimizer_steps)

    def verify(self) -> None:
        """Reads every file back and checks its sha256. Raises BadCheckpoint."""
        for name in self.state.files:
            self._checked(name)
        if self.state.files[self.weights_name] != self.state.adapter_sha256:
            raise BadCheckpoint(self.folder, f"{self.folder}: the weights are not those that state.json names")

    def _checked(self, name: str) -> bytes:
        data = _read_file(self.folder, name)
        if sha256_hex(data) != self.state.files[name]:
            raise BadCheckpoint(
                self.folder,
                f"{self.folder / name} has another sha256 than in state.json: the file was damaged or changed",
            )
        return data


def _read_file(folder: Path, name: str) -> bytes:
    """Returns the content of a file of a checkpoint. Raises BadCheckpoint. Raises PermissionError as it is: the file
    may be intact."""
    try:
        return (folder / name).read_bytes()
    except PermissionError:
        raise
    except OSError as error:
        raise BadCheckpoint(folder, f"{folder / name}: {error.strerror}") from error


def save_checkpoint(
    root: Path, state: CheckpointState, weights: bytes, version_files: VersionFiles, optimizer: OptimizerState
) -> Checkpoint:
    """Writes a checkpoint below `root` and returns it verified. An existing checkpoint of the same plan and content is
    kept. Raises BadCheckpoint."""
    from safetensors.torch import save as to_bytes

    moments = dict(sorted(optimizer.moments.items()))
    files = {**version_files.others, version_files.weights: weights, OPTIMIZER_FILE: to_bytes(moments)}
    state = state.model_copy(update={"files": {name: sha256_hex(data) for name, data in files.items()}})
    fields = json.loads(state.model_dump_json())
    state_bytes = json.dumps(fields | {DIGEST: digest_of(fields)}, indent=2).encode() + b"\n"
    folder = root / state.folder_name
    existing = _existing_checkpoint(folder, state)
    if existing is None:
        if folder.exists():
            remove_folder(folder)
        try:
            write_folder(folder, files | {STATE_FILE: state_bytes})
        except OSError:
            # A successor executed the same plan meanwhile: its checkpoint is not removed.
            existing = _existing_checkpoint(folder, state)
            if existing is None:
                raise
    checkpoint = existing or Checkpoint(folder=folder, state=state)
    checkpoint.verify()
    return checkpoint


def _existing_checkpoint(folder: Path, state: CheckpointState) -> Checkpoint | None:
    """Returns the checkpoint in a folder if it has these files. Raises BadCheckpoint."""
    if not (folder / STATE_FILE).exists():
        return None
    checkpoint = Checkpoint.read(folder)
    return checkpoint if checkpoint.state.files == state.files else None


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes a folder with these files atomically: written to a temporary folder, flushed to disk, renamed. Raises
    OSError if the folder exists."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        for name, data in files.items():
            with (temporary / name).open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
        _sync_folder(temporary)
        temporary.rename(folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes a folder, also while another process removes it: a trainer that has been frozen removes what it was
    writing, and its successor removes that too. Raises OSError."""

    def check(_function: object, _path: str, error: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(folder, onerror=check)


def read_checkpoints(root: Path, damaged: list[BadCheckpoint] | None = None) -> list[Checkpoint]:
    """Returns the checkpoints below `root`, newest step first. One with an invalid state.json is left out and added to
    `damaged`, or logged if that is None."""
    checkpoints = []
    for path in sorted(root.glob(f"[0-9]*/{STATE_FILE}")):
        try:
            checkpoints.append(Checkpoint.read(path.parent))
        except BadCheckpoint as error:
            if damaged is None:
                log.warning("skipped: %s", error)
            else:
                damaged.append(error)
    return sorted(checkpoints, key=lambda c: (c.state.step, c.state.attempt), reverse=True)


def set_aside(bad: BadCheckpoint) -> Path:
    """Moves a damaged checkpoint to a place where nothing reads it; returns that place."""
    place = bad.folder.parent / DAMAGED_FOLDER / f"{bad.folder.name}-{uuid.uuid4().hex[:8]}"
    place.parent.mkdir(exist_ok=True)
    return bad.folder.rename(place)


def remove_checkpoints(old: Iterable[Checkpoint]) -> None:
    """Removes checkpoints. Raises OSError."""
    for checkpoint in old:
        remove_folder(checkpoint.folder)


def remove_leftovers(root: Path) -> None:
    """Removes the remains of interrupted writes. Raises OSError."""
    for leftover in root.glob(".[0-9]*"):
        remove_folder(leftover)


def checkpoint_root(settings: Settings, run_id: str) -> Path:
    """The folder of a run's checkpoints on this machine; with an object store, of the newest ones
    (stored_checkpoints.py)."""
    folder = checkpoints_location(settings, run_id).folder
    return settings.home / "checkpoints" / run_id if folder is None else folder


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
