"""Instances of the environment swe: files of SWE-bench and of SWE-smith, and the repositories that they name.

A folder of instances has `*.jsonl` or `*.json` files, `repos/` with a repository or a bundle per `repo`, and settings
in `swe.yaml`, if they differ from the defaults.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from schemas.problems import problems
from tentalis.agents.environments.terminal_task import BadTasks, TaskRefused
from tentalis.text.yaml_file import BadYaml, read_mapping

SETTINGS_FILE, REPOSITORIES = "swe.yaml", "repos"
STEPS, COMMAND_S, TESTS_S, MEMORY_MB = 50, 60.0, 300.0, 4096
_TEST_ID = re.compile(r"(?!/)[^\s:]+\.py(::\S.*)?\Z")
_REPO = r"^[\w.-]+(/[\w.-]+)?$"
_COMMIT = re.compile(r"[0-9a-f]{7,64}\Z")


class SweRepository(BaseModel):
    """Settings of one repository. `source`: a folder with the repository, bare or not, or a bundle; relative names are
    in the folder of instances. `python`: a virtual environment with pytest and what the repository needs. `paths`:
    folders of the repository from which tests import, where they exist."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Path | None = None
    python: Path | None = None
    paths: tuple[str, ...] = ("src", ".")


class SweSettings(BaseModel):
    """The content of swe.yaml. `steps`: turns of the policy. `command_s`, `tests_s`: seconds of one command and of the
    hidden tests. `python`: for repositories that name none; None: the Python that runs the worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=STEPS, ge=1, le=1000)
    command_s: float = Field(default=COMMAND_S, gt=0.0, le=600.0)
    tests_s: float = Field(default=TESTS_S, gt=0.0, le=3600.0)
    memory_mb: int = Field(default=MEMORY_MB, ge=64)
    python: Path | None = None
    repositories: dict[str, SweRepository] = {}


class SweInstance(BaseModel):
    """An instance as its file has it. `patch` and other fields are not read. Without `base_commit` it is one of
    SWE-smith: the branch named `instance_id` has the defect, and lacks the tests, which its parent has."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str = Field(pattern=r"^[\w.-]+$")
    repo: str = Field(pattern=_REPO)
    problem_statement: str = Field(min_length=1)
    base_commit: str | None = None
    test_patch: str = ""
    FAIL_TO_PASS: tuple[str, ...] = Field(min_length=1)
    PASS_TO_PASS: tuple[str, ...] = ()

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="before")
    @classmethod
    def _read_list(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value  # SWE-bench has lists as texts

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS")
    @classmethod
    def _check_ids(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        foreign = [each for each in value if not _TEST_ID.match(each) or ".." in each.split("::")[0].split("/")]
        if foreign:
            raise ValueError(f"tests must be named as pytest does, and {foreign[0]!r} is not")
        return value

    @field_validator("base_commit")
    @classmethod
    def _check_commit(cls, value: str | None) -> str | None:
        if value is not None and not _COMMIT.match(value):
            raise ValueError("must be a commit")
        return value


@dataclass(frozen=True, slots=True)
class SweTask:
    """An instance that can be played. `source`: its repository. `python`: the folder of its virtual environment, or
    None."""

    instance: SweInstance
    source: Path
    python: Path | None
    paths: tuple[str, ...]
    settings: SweSettings

    @property
    def digest(self) -> str:
        """SHA-256 of the instance and the settings of its tests."""
        values = [self.instance.model_dump(mode="json"), self.settings.tests_s, list(self.paths)]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files of the tests that are graded."""
        ids = (*self.instance.FAIL_TO_PASS, *self.instance.PASS_TO_PASS)
        return tuple(dict.fromkeys(each.partition("::")[0] for each in ids))


class SweFolder:
    """A folder of instances. Raises BadTasks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve()
        self.settings = _settings(self.path)
        self._rows: dict[str, dict[str, Any]] = {}
        files = sorted(each for each in self.path.glob("*.json*") if each.suffix in (".json", ".jsonl"))
        for file in files:
            for row in _rows(file, file.stat().st_mtime_ns, file.stat().st_size):
                name = str(row.get("instance_id"))
                if name in self._rows:
                    raise BadTasks(f"{file}: the instance {name} is there twice")
                self._rows[name] = row
        if not self._rows:
            raise BadTasks(f"the folder {folder} has no instances: *.jsonl or *.json of SWE-bench or SWE-smith")

    @property
    def names(self) -> list[str]:
        """The instances by their ids."""
        return sorted(self._rows)

    @property
    def pythons(self) -> set[Path]:
        """The virtual environments of all repositories."""
        return {(self.path / each).absolute() for each in _pythons(self.settings)}

    @property
    def sources(self) -> list[Path]:
        """The repositories that the instances name, where they are there."""
        repos = {repo for row in self._rows.values() if isinstance(repo := row.get("repo"), str)}
        places = (self._place(repo) for repo in sorted(repos) if re.match(_REPO, repo))
        return [place for place in places if place is not None]

    def task(self, name: str) -> SweTask:
        """Returns the task of an instance. Raises TaskRefused."""
        row = self._rows.get(name)
        if row is None:
            raise TaskRefused(f"no instance {name!r} in {self.path}: `tentalis env tasks FOLDER` lists them")
        try:
            instance = SweInstance.model_validate(row)
        except ValidationError as error:
            raise TaskRefused(f"the instance {name} cannot be played: {problems(error, 'instance')}") from error
        if instance.repo.partition("/")[2] == "pytest":
            raise TaskRefused(f"the instance {name} cannot be played: pytest would test itself with its installed copy")
        own = self.settings.repositories.get(instance.repo, SweRepository())
        python = own.python or self.settings.python
        return SweTask(
            instance,
            self._source(instance, own),
            None if python is None else (self.path / python).absolute(),
            own.paths,
            self.settings,
        )

    def _source(self, instance: SweInstance, own: SweRepository) -> Path:
        found = self._place(instance.repo)
        if found is not None:
            return found
        if own.source is not None:
            where = self.path / own.source
            raise TaskRefused(f"{SETTINGS_FILE}: the repository {where} of {instance.repo} does not exist")
        name = instance.repo.replace("/", "__")
        raise TaskRefused(
            f"the repository {instance.repo} of the instance {instance.instance_id} is missing: put a clone or a "
            f"bundle at {REPOSITORIES}/{name} or {REPOSITORIES}/{name}.bundle in {self.path}"
        )

    def _place(self, repo: str) -> Path | None:
        """Returns the place of a repository, or None if nothing is there."""
        own = self.settings.repositories.get(repo)
        if own is not None and own.source is not None:
            places = [self.path / own.source]
        else:
            stems = dict.fromkeys((repo.replace("/", "__"), repo.rpartition("/")[2]))
            folder = self.path / REPOSITORIES
            places = [folder / f"{stem}{suffix}" for stem in stems for suffix in ("", ".git", ".bundle")]
        return next((place for place in places if place.exists()), None)


def is_swe_folder(folder: Path) -> bool:
    """Returns True if a folder looks like one of instances."""
    return (folder / SETTINGS_FILE).is_file() or any(folder.glob("*.json")) or any(folder.glob("*.jsonl"))


def _settings(folder: Path) -> SweSettings:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return SweSettings()
    try:
        settings = SweSettings.model_validate(read_mapping(path, "the settings of instances"))
    except (BadYaml, ValidationError) as error:
        reason = problems(error, "file") if isinstance(error, ValidationError) else error
        raise BadTasks(f"{path}: {reason}") from error
    for each in _pythons(settings):
        if not (folder / each / "bin/python").exists():
            raise BadTasks(f"{path}: {folder / each} is not a virtual environment: it has no bin/python")
    return settings


def _pythons(settings: SweSettings) -> list[Path]:
    named = [settings.python, *(each.python for each in settings.repositories.values())]
    return [each for each in named if each is not None]


@lru_cache(maxsize=64)
def _rows(path: Path, mtime_ns: int, size: int) -> list[dict[str, Any]]:
    """Returns the instances of a file; `mtime_ns` and `size` tell whether it has changed. Raises BadTasks."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = list(_json_lines(text)) if path.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError) as error:
        raise BadTasks(f"{path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.get("instance_id") for row in rows):
        raise BadTasks(f"{path} is not a list of instances with `instance_id`")
    return rows


def _json_lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
