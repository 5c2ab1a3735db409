"""Checkpoints on disk: complete or not there, and named by the plan whose result they are.

A checkpoint is a folder `<step>-<attempt>-<owner>` with the adapter (float32), the optimizer's moments and state.json.
It is written beside its place, flushed, and renamed; every file's sha256 is in state.json. There is no random state to
keep: every step is seeded by its plan.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from schemas.ids import sha256_hex
from tentalis.config import Settings
from trainer.engine import OptimizerState
from trainer.model import CONFIG_FILE, WEIGHTS_FILE

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"


class BadCheckpoint(RuntimeError):
    """A checkpoint whose files are not what its state.json says."""


class CheckpointState(BaseModel):
    """state.json. `low_water` is, per partition, the first offset that no plan up to this step has considered; it and
    the plans on the log (the rollouts that are used up) are all that reading needs to go on."""

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

    @property
    def folder_name(self) -> str:
        return f"{self.step:06d}-{self.attempt:03d}-{self.owner[:12]}"


class Checkpoint(BaseModel):
    """A checkpoint that is on disk."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    state: CheckpointState

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """The checkpoint in a folder. Raises BadCheckpoint for a state.json that is no such."""
        path = folder / STATE_FILE
        try:
            return cls(folder=folder, state=CheckpointState.model_validate(json.loads(path.read_bytes())))
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{path}: {error}") from error

    def adapter(self) -> bytes:
        """The content of adapter_model.safetensors. Raises BadCheckpoint."""
        return self._checked(WEIGHTS_FILE)

    def optimizer(self) -> OptimizerState:
        """The optimizer's state. Raises BadCheckpoint."""
        from safetensors.torch import load

        return OptimizerState(load(self._checked(OPTIMIZER_FILE)), self.state.optimizer_steps)

    def verify(self) -> None:
        """Reads every file back. Raises BadCheckpoint."""
        for name in self.state.files:
            self._checked(name)
        if self.state.files[WEIGHTS_FILE] != self.state.adapter_sha256:
            raise BadCheckpoint(f"{self.folder}: the adapter is not the one that state.json names")

    def _checked(self, name: str) -> bytes:
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise BadCheckpoint(f"{self.folder / name}: {error.strerror}") from error
        if sha256_hex(data) != self.state.files[name]:
            raise BadCheckpoint(
                f"{self.folder / name} has another sha256 than state.json says: the disk or someone changed it"
            )
        return data


def save(
    root: Path, state: CheckpointState, adapter: bytes, adapter_config: bytes, optimizer: OptimizerState
) -> Checkpoint:
    """Writes a checkpoint below `root` and returns it verified. One of the same plan and content that is there already
    stays as it is. Raises BadCheckpoint."""
    from safetensors.torch import save as to_bytes

    moments = dict(sorted(optimizer.moments.items()))
    files = {CONFIG_FILE: adapter_config, WEIGHTS_FILE: adapter, OPTIMIZER_FILE: to_bytes(moments)}
    state = state.model_copy(update={"files": {name: sha256_hex(data) for name, data in files.items()}})
    written = state.model_dump_json(indent=2).encode() + b"\n"
    folder = root / state.folder_name
    present = _present(folder, state)
    if present is None:
        if folder.exists():
            shutil.rmtree(folder)
        try:
            write_folder(folder, files | {STATE_FILE: written})
        except OSError:
            # A successor executed the same plan meanwhile: what it stands on is not taken away.
            present = _present(folder, state)
            if present is None:
                raise
    checkpoint = present or Checkpoint(folder=folder, state=state)
    checkpoint.verify()
    return checkpoint


def _present(folder: Path, state: CheckpointState) -> Checkpoint | None:
    """The checkpoint in a folder if it has these files. Raises BadCheckpoint."""
    if not (folder / STATE_FILE).exists():
        return None
    found = Checkpoint.read(folder)
    return found if found.state.files == state.files else None


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """A folder with these files, whole or not at all: written beside, flushed to disk, renamed. Raises OSError if the
    folder is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    work.mkdir()
    try:
        for name, data in files.items():
            with (work / name).open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
        _flush(work)
        work.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def checkpoints(root: Path) -> list[Checkpoint]:
    """The complete checkpoints below `root`, newest step first. Raises BadCheckpoint for a state.json that is no
    such."""
    found = [Checkpoint.read(path.parent) for path in root.glob(f"[0-9]*/{STATE_FILE}")]
    return sorted(found, key=lambda c: (c.state.step, c.state.attempt), reverse=True)


def prune(old: Iterable[Checkpoint]) -> None:
    """Removes checkpoints."""
    for checkpoint in old:
        shutil.rmtree(checkpoint.folder)


def sweep(root: Path) -> None:
    """Removes what interrupted writes left."""
    for leftover in root.glob(".[0-9]*"):
        shutil.rmtree(leftover)


def checkpoint_root(settings: Settings, run_id: str) -> Path:
    """Where a run's checkpoints are."""
    return settings.home / "checkpoints" / run_id


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
