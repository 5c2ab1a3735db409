"""Tasks of the environment gui: folders with pages, a goal and checks, and the pages of MiniWoB.

A task folder has `gui.yaml` and the folder `pages`. A name that begins with `miniwob/` is a page of the package
miniwob.
"""

import hashlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.problems import problems
from tentalis.agents.environments.terminal_task import BadTasks, TaskRefused, task_digest
from tentalis.service.packages import how_to_install
from tentalis.text.yaml_file import BadYaml, read_mapping

FILE = "gui.yaml"
PAGES = "pages"
MINIWOB = "miniwob/"
"""The beginning of the names of MiniWoB's tasks."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
_Text = Annotated[str, Field(min_length=1)]


class _GuiModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FormCheck(_GuiModel):
    """A form that a page must have sent: the page that received it, its method, and fields with their values. Other
    fields may have any value. A form of GET is an address, which the policy may write itself."""

    page: _Text
    method: Literal["GET", "POST"] = "POST"
    fields: Mapping[str, str]


class GuiCheck(_GuiModel):
    """The conditions of a solved task, all of which must hold when the episode ends.

    Attributes:
        page: the page that is shown, as its path in the folder.
        form: a form that was received.
        most_forms: the most forms that may have been received, whatever they hold.
        answer: the answer of `done`; compared without regard to case and to spaces around it.
        expression: JavaScript that is true on the page; it runs in a world of its own, which scripts of the page cannot
            reach.
    """

    page: str | None = None
    form: FormCheck | None = None
    most_forms: int | None = Field(default=None, ge=0)
    answer: str | None = None
    expression: str | None = None

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if (self.page, self.form, self.answer, self.expression) == (None,) * 4:
            raise ValueError("must have at least one of page, form, answer, expression")
        return self


class GuiTaskFile(_GuiModel):
    """The content of `gui.yaml`. `start`: the first page. `steps`: turns of the policy. `action_s`: seconds of one
    action. `memory_mb`: of the browser with all its processes; with less than 1024 it does not start."""

    goal: _Text
    start: str = "index.html"
    check: GuiCheck
    steps: int = Field(default=20, ge=1, le=200)
    action_s: float = Field(default=10.0, gt=0.0, le=120.0)
    memory_mb: int = Field(default=2048, ge=1024)


@dataclass(frozen=True, slots=True)
class GuiTask:
    """A task that can be played. `settings`: None for a page of MiniWoB, which has its goal and its reward in itself.
    `pages`: the folder that the browser gets files from."""

    name: str
    digest: str
    pages: Path
    start: str
    settings: GuiTaskFile | None = None
    steps: int = 20
    action_s: float = 10.0
    memory_mb: int = 2048


def is_gui_folder(tasks: Path) -> bool:
    """Returns True if a folder of tasks has one of this environment."""
    return tasks.is_dir() and any((each / FILE).is_file() for each in tasks.iterdir())


def gui_task_names(tasks: Path) -> list[str]:
    """Returns the names of the task folders in a folder. Raises BadTasks."""
    try:
        found = sorted(each.name for each in tasks.iterdir() if (each / FILE).is_file())
    except OSError as error:
        raise BadTasks(f"the folder of tasks {tasks} cannot be read: {error.strerror}") from error
    if not found:
        raise BadTasks(f"the folder of tasks {tasks} has no task: each task is a folder in it with {FILE}")
    return found


def load_gui_task(tasks: Path | None, name: str) -> GuiTask:
    """Loads a task by its name. `tasks`: the folder of task folders; None: there are those of MiniWoB alone. Raises
    TaskRefused."""
    if name.startswith(MINIWOB):
        return _miniwob_task(name)
    if tasks is None:
        raise TaskRefused(f"no task {name!r}: without --tasks FOLDER the tasks are {MINIWOB}PAGE, the pages of MiniWoB")
    folder = tasks / name
    if not _NAME.match(name) or not (folder / FILE).is_file():
        raise TaskRefused(f"no task {name!r} in {tasks}: `tentalis env tasks FOLDER` lists them")
    try:
        read = GuiTaskFile.model_validate(read_mapping(folder / FILE, "the task"))
        digest = task_digest(folder)
    except ValidationError as error:
        raise TaskRefused(f"the task {name} is not valid: {problems(error, FILE)}") from error
    except (BadYaml, OSError) as error:
        raise TaskRefused(f"the task {name} cannot be read: {error}") from error
    if not (folder / PAGES / read.start.partition("?")[0]).is_file():
        raise TaskRefused(f"the task {name} has no page {PAGES}/{read.start}, its start")
    return GuiTask(name, digest, folder / PAGES, read.start, read, read.steps, read.action_s, read.memory_mb)


def miniwob_names() -> list[str]:
    """Returns the names of the tasks of MiniWoB. Raises TaskRefused if the package is not installed."""
    return sorted(f"{MINIWOB}{each.stem}" for each in (_miniwob() / "miniwob").glob("*.html"))


def _miniwob_task(name: str) -> GuiTask:
    pages, page = _miniwob(), name.removeprefix(MINIWOB)
    if not _NAME.match(page) or not (pages / "miniwob" / f"{page}.html").is_file():
        raise TaskRefused(f"MiniWoB has no page {page!r}; it has, for example, click-test, enter-text and login-user")
    return GuiTask(name, _miniwob_digest(pages, page), pages, f"miniwob/{page}.html")


def _miniwob() -> Path:
    """Returns the folder of MiniWoB's pages. The package is not imported: only its files are used."""
    found = importlib.util.find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise TaskRefused(f"the pages of MiniWoB are not installed: {how_to_install('gui')}")
    return Path(found.submodule_search_locations[0]) / "html"


@cache
def _miniwob_digest(pages: Path, page: str) -> str:
    """Returns the SHA-256 of a page of MiniWoB and of the scripts that all pages share."""
    digest = hashlib.sha256((pages / "miniwob" / f"{page}.html").read_bytes())
    digest.update(task_digest(pages / "core").encode())
    return digest.hexdigest()
