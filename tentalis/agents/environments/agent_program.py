"""The command of a program that plays an episode: its words, variables, folders and limits."""

import json
import re
import shlex
import shutil
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from schemas.records import Task
from tentalis.agents.environments.protocol import ProgramAccess
from tentalis.agents.environments.terminal_shell import clean_variables
from tentalis.agents.sandbox import Limits
from tentalis.rewards.environment_file import AgentProgram

AGENT, WORKSPACE, HOME, TEMPORARY = "agent", "workspace", "home", "tmp"
"""Folders of an episode: the program's only one, and those in it."""
TASK_FILE, VARIABLES_FILE = "task.json", "variables"
OUTPUT_BYTES = 8 << 20
"""Bytes of the output of a program or a check; more ends it."""
_OPEN_FILES, _FILE_MB, _CPUS = 1024, 512, 8
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"\{(prompt|model|workspace|folder|python)\}")
_START = 'set -a; . "$0"; set +a; cd -- "$1" && shift && exec "$@"'


@dataclass(frozen=True, slots=True)
class ProgramPlace:
    """The folders of a program. `folder`: of the file of environments; `python`: the interpreter with its packages."""

    episode: Path
    folder: Path
    python: Path

    @property
    def agent(self) -> Path:
        """The only folder that the program may write to."""
        return self.episode / AGENT

    @property
    def workspace(self) -> Path:
        """The current folder of the program."""
        return self.agent / WORKSPACE

    def filled(self, text: str, prompt: str, model: str) -> str:
        """Returns a text with the words in braces replaced. What is put in is not searched for further ones."""
        values = {
            "prompt": prompt,
            "model": model,
            "workspace": str(self.workspace),
            "folder": str(self.folder),
            "python": str(self.python),
        }
        return _NAME.sub(lambda found: values[found.group(1)], text)


def python_of(python: Path | None) -> Path:
    """Returns the interpreter of a program; None: that of this process."""
    return Path(sys.executable) if python is None else python


def readable_paths(program: AgentProgram, folder: Path, python: Path) -> list[Path]:
    """Returns what a program may read: the paths of the file of environments, the packages of its interpreter with the
    Python that they are installed in, and the certificates of the system, which HTTP clients read when they begin."""
    own = [folder / each for each in program.readable]
    environment = python.parent.parent
    base = [environment] if (environment / "pyvenv.cfg").is_file() else []
    return [*own, *base, python.resolve().parent.parent, *_certificates()]


def _certificates() -> list[Path]:
    """Returns the file and the folder of certificates of authorities that exist where OpenSSL looks for them."""
    paths = ssl.get_default_verify_paths()
    return [path for each in (paths.openssl_cafile, paths.openssl_capath) if (path := Path(each).resolve()).exists()]


def make_folders(place: ProgramPlace, program: AgentProgram, name: str | None) -> None:
    """Makes the folders of an episode, with a copy of the workspace. `name`: of a folder in it, the task's own. Raises
    OSError, and ValueError for a name that leads out of the folder."""
    for each in (HOME, TEMPORARY):
        (place.agent / each).mkdir(parents=True)
    if program.workspace is None:
        if name is not None:
            raise ValueError(f"the data name the workspace {name!r}, and the program has no folder of workspaces")
        place.workspace.mkdir()
        return
    template = (place.folder / program.workspace).resolve()
    source = template if name is None else (template / name).resolve()
    if not source.is_relative_to(template) or not source.is_dir():
        raise ValueError(f"there is no workspace {name or template} in {template}")
    shutil.copytree(source, place.workspace, symlinks=True)


def write_input(place: ProgramPlace, program: AgentProgram, task: Task, access: ProgramAccess) -> None:
    """Writes the input and the variables of a program. Raises OSError."""
    messages = [{"role": each.role, "content": each.content} for each in task.messages]
    prompt = task.messages[-1].content
    content = {"task_id": task.task_id, "prompt": prompt, "messages": messages, "model": access.model}
    (place.episode / TASK_FILE).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    own = {name: place.filled(value, prompt, access.model) for name, value in program.variables.items()}
    lines = [f"{name}={shlex.quote(value)}" for name, value in {**_variables(place, access), **own}.items()]
    (place.episode / VARIABLES_FILE).write_text("\n".join([*lines, ""]), encoding="utf-8")


def _variables(place: ProgramPlace, access: ProgramAccess) -> Mapping[str, str]:
    """Returns the variables by which the common clients find their model."""
    clean = clean_variables(place.agent / HOME, place.agent / TEMPORARY)
    return {
        **clean,
        "PATH": f"{place.python.parent}:{clean['PATH']}",
        "OPENAI_BASE_URL": f"{access.url}/v1",
        "OPENAI_API_BASE": f"{access.url}/v1",
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "ANTHROPIC_BASE_URL": access.url,
        "ANTHROPIC_API_KEY": access.api_key,
        "ANTHROPIC_MODEL": access.model,
    }


def program_words(place: ProgramPlace, program: AgentProgram, task: Task, access: ProgramAccess) -> list[str]:
    """Returns the command of a program. Its variables are in a file: arguments can be seen by other users."""
    prompt = task.messages[-1].content
    words = [place.filled(word, prompt, access.model) for word in program.command]
    return started(place.episode / VARIABLES_FILE, place.workspace, words)


def started(variables: Path, folder: Path, words: Sequence[str]) -> list[str]:
    """Returns a command that runs in a folder with the variables of a file."""
    return ["/bin/sh", "-c", _START, str(variables), str(folder), *words]


def program_limits(program: AgentProgram, access: ProgramAccess) -> Limits:
    """Returns the limits of a program, which may connect to its model."""
    return _limits(program, program.seconds, (_endpoint(access.url), *program.network))


def check_limits(program: AgentProgram) -> Limits:
    """Returns the limits of a check, which has no network."""
    return _limits(program, program.check_seconds, ())


def _limits(program: AgentProgram, seconds: float, network: tuple[str, ...]) -> Limits:
    return Limits(
        time_s=seconds,
        cpu_s=int(seconds) * _CPUS + 1,
        memory_mb=program.memory_mb,
        processes=program.processes,
        open_files=_OPEN_FILES,
        file_mb=_FILE_MB,
        output_bytes=OUTPUT_BYTES,
        network=network,
    )


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or _PORTS[parts.scheme]}"
