"""The part of a Dockerfile that needs no container: its folder, files, variables, and commands. Pure.

What needs the image, packages or the network is in `needs`: a task with needs is refused.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_PLAIN_IMAGES = re.compile(
    r"^(?:docker\.io/|library/|ghcr\.io/laude-institute/t-bench/)*"
    r"(?:ubuntu|debian|python|bash|busybox|scratch)(?:[-:@].*)?$"
)
"""Images with nothing but a distribution or Python, for which this machine's own programs stand in."""
_COMMAND = re.compile(r"[^|;&]+")
_INSTALLERS = (
    (
        re.compile(r"\b(?:apt|apt-get|aptitude|apk|yum|dnf|pacman|brew|snap)\b"),
        re.compile(r"\b(?:install|add)\b|(?<!\S)-S"),
    ),
    (
        re.compile(r"\b(?:uv|pip|pip3|pipx|npm|yarn|pnpm|gem|cargo|go|conda|mamba|poetry)\b"),
        re.compile(r"\b(?:install|add|sync|ci|get)\b"),
    ),
    (re.compile(r"\b(?:curl|wget)\b"), re.compile(r"://")),
)
"""Programs that install or fetch, and what follows them in the same command if they do. Two patterns, because one for
both tries each program with the whole rest of the line."""
_ALWAYS_INSTALL = re.compile(r"\b(?:uvx|npx)\b|\bgit\s+clone\b")
_APT_INSTALL = re.compile(r"^(?:sudo\s+)?(?:apt|apt-get)\s+(?:-\S+\s+)*install\b(?P<rest>.*)$")
_APT_UPKEEP = re.compile(
    r"^(?:sudo\s+)?(?:(?:apt|apt-get)\s+(?:-\S+\s+)*(?:update|clean|autoclean|autoremove)\b.*|rm\s+-rf\s+/var/lib/apt\S*)$"
)
LONGEST_TEXT = 1 << 16
"""Characters of a line with the values of its variables."""
MOST_VARIABLES = 256
LONGEST_VARIABLES = 1 << 17
"""Bytes of the names and values of all variables together."""
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)\}|(?P<plain>\w+))")


@dataclass(frozen=True, slots=True)
class CopiedFiles:
    """`COPY`: files of the context, and the absolute path that they go to. `into`: that path is a folder."""

    sources: tuple[str, ...]
    target: str
    into: bool


@dataclass(frozen=True, slots=True)
class SetupCommand:
    """`RUN`: a command for /bin/sh in a folder."""

    command: str
    folder: str


@dataclass(slots=True)
class DockerfileSteps:
    """The steps of a Dockerfile in order, the last working folder, and the variables of the container. `packages`: of
    Debian. `needs`: everything that only a container can give."""

    workdir: str
    steps: list[CopiedFiles | SetupCommand] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    packages: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def parsed_dockerfile(text: str, workdir: str) -> DockerfileSteps:
    """Returns the steps of a Dockerfile; `workdir` is its working folder if it names none.

    Raises ValueError if its words are not quoted well, or if its variables are over LONGEST_TEXT, MOST_VARIABLES or
    LONGEST_VARIABLES.
    """
    found = DockerfileSteps(workdir)
    images = 0
    for name, rest in _instructions(text):
        match name:
            case "FROM":
                images += 1
                image = next((word for word in rest.split() if not word.startswith("--")), "")
                if not _PLAIN_IMAGES.match(image):
                    found.needs.append(f"the image {image}")
            case "WORKDIR":
                found.workdir = posixpath.normpath(posixpath.join(found.workdir, _expanded(rest, found.variables)))
            case "ENV" | "ARG":
                found.variables = _assigned(rest, found.variables)
            case "COPY" | "ADD":
                _copy(name, rest, found)
            case "RUN":
                _run(rest, found)
            case "CMD" | "ENTRYPOINT" | "LABEL" | "MAINTAINER" | "EXPOSE" | "SHELL" | "STOPSIGNAL":
                continue
            case "USER" if rest in ("root", "0"):
                continue
            case _:
                found.needs.append(f"{name} {rest}".strip())
    if images > 1:
        found.needs.append("a build of several stages")
    return found


def installation(line: str) -> str | None:
    """Returns the part of a shell line that installs or fetches software, or None."""
    if line.lstrip().startswith("#"):
        return None
    installs = _ALWAYS_INSTALL.search(line) or any(_installs(command[0]) for command in _COMMAND.finditer(line))
    return line.strip() if installs else None


def _installs(command: str) -> bool:
    return any(
        (found := program.search(command)) is not None and what.search(command, found.end()) is not None
        for program, what in _INSTALLERS
    )


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name:
            yield name.upper(), rest.strip()


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Returns a text with the values of its variables.

    Raises ValueError if it gets longer than LONGEST_TEXT: each line of `ENV A=$A$A` doubles a value.
    """
    values = (variables.get(found["braced"] or found["plain"], "") for found in _VARIABLE.finditer(text))
    length = len(text) + sum(map(len, values))
    if length > LONGEST_TEXT:
        raise ValueError(f"a line of the Dockerfile has {length} characters with its variables, over {LONGEST_TEXT}")
    return _VARIABLE.sub(lambda found: variables.get(found["braced"] or found["plain"], found[0]), text)


def _assigned(rest: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with those of one instruction, whose values may name the former ones.

    Raises ValueError if they are more than MOST_VARIABLES or larger than LONGEST_VARIABLES.
    """
    found, size = dict(variables), sum(_bytes(*each) for each in variables.items())
    for name, text in _assignments(rest):
        value = _expanded(text, variables)
        size += _bytes(name, value) - (_bytes(name, found[name]) if name in found else 0)
        found[name] = value
        if len(found) > MOST_VARIABLES:
            raise ValueError(f"the Dockerfile sets more than {MOST_VARIABLES} variables")
        if size > LONGEST_VARIABLES:
            raise ValueError(f"the variables of the Dockerfile have {size} bytes, over {LONGEST_VARIABLES}")
    return found


def _bytes(name: str, value: str) -> int:
    return len(name.encode()) + len(value.encode())


def _assignments(rest: str) -> list[tuple[str, str]]:
    words = shlex.split(rest)
    if not words:
        return []
    if "=" not in words[0]:  # the old form, ENV NAME VALUE; or ARG NAME, which has no value here
        return [(words[0], " ".join(words[1:]))] if len(words) > 1 else []
    pairs = (word.partition("=") for word in words if "=" in word)
    return [(name, value) for name, _, value in pairs]


def _exec_form(rest: str) -> list[str] | None:
    """Returns the words of an instruction that is a JSON array of strings; None for every other text, which Docker
    takes as words or as a line of the shell."""
    try:
        words = json.loads(rest) if rest.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _copy(name: str, rest: str, found: DockerfileSteps) -> None:
    given = _exec_form(rest)
    words = shlex.split(rest) if given is None else given
    options = [word for word in words if word.startswith("--")]
    *sources, target = [_expanded(word, found.variables) for word in words if not word.startswith("--")] or [""]
    if not sources or any(word.startswith("--from") for word in options):
        found.needs.append(f"{name} {rest}")
        return
    if any("://" in source or source.startswith(("..", "<<")) for source in sources):
        found.needs.append(f"{name} {rest}")
        return
    absolute = posixpath.normpath(posixpath.join(found.workdir, target))
    into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    found.steps.append(CopiedFiles(tuple(sources), absolute, into))


def _run(rest: str, found: DockerfileSteps) -> None:
    given = _exec_form(rest)
    if given is not None:
        rest = shlex.join(given)
    kept = []
    for part in (part.strip() for part in rest.split("&&")):
        apt = _APT_INSTALL.match(part)
        if apt is not None:
            found.packages += [word for word in shlex.split(apt["rest"]) if not word.startswith("-")]
        elif installation(part) is not None:
            found.needs.append(f"RUN {part}")
        elif not _APT_UPKEEP.match(part):
            kept.append(part)
    if kept:
        found.steps.append(SetupCommand(" && ".join(kept), found.workdir))
