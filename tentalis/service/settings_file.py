"""The settings file: values of variables for people who do not want to export them, with profiles for several clusters.

    profile: staging                  # the profile that is used unless another one is named
    log: INFO                         # every profile
    profiles:
      staging:
        bootstrap: kafka.staging:9092

A key is a variable's name without TENTALIS_, in small letters. The values become environment variables where none is
set, so an option and the environment take precedence, and the processes that a command starts inherit them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tentalis.service import variables
from tentalis.service.variable import FILE, PATH, BadVariable, Variable
from tentalis.text.settings_text import settings_text
from tentalis.text.toml_file import table_in

WORKING_FILE = Path("tentalis.yaml")
PROFILE_KEY, PROFILES_KEY = "profile", "profiles"
_APART = {variables.PROFILE.name, variables.CONFIG.name}


class BadSettingsFile(ValueError):
    """A settings file that cannot be used. The message names the file, the key, and what to do; it has no secret."""


def key_of(variable: Variable[Any]) -> str:
    """The key of a variable in a settings file."""
    return variable.name.removeprefix(variables.PREFIX).lower()


KEYS: Mapping[str, Variable[Any]] = {
    key_of(each): each for each in variables.VARIABLES if not each.internal and each.name not in _APART
}
"""The variables by their keys."""


@dataclass(frozen=True)
class SettingsFile:
    """The content of a settings file.

    Attributes:
        path: its absolute path.
        common: texts of variables by name, for every profile.
        profiles: texts of variables by name, by profile.
        default: the profile that is used unless another one is named.
    """

    path: Path
    common: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, dict[str, str]] = field(default_factory=dict)
    default: str | None = None

    def chosen(self, profile: str | None) -> str | None:
        """Returns the name of the profile to use: `profile` if it is given, else the default one. Raises
        BadSettingsFile if the file has no such profile."""
        name = profile or self.default
        if name is not None and name not in self.profiles:
            known = f"the profiles are {', '.join(self.profiles)}" if self.profiles else "it has no profiles"
            raise BadSettingsFile(f"there is no profile {name} in {self.path}: {known}.{_meant(name, self.profiles)}")
        return name

    def values(self, profile: str | None) -> dict[str, tuple[str, str]]:
        """Returns the text of each variable with its origin. Raises BadSettingsFile if there is no such profile."""
        found = {name: (text, str(self.path)) for name, text in self.common.items()}
        if chosen := self.chosen(profile):
            origin = f"{self.path}, profile {chosen}"
            found |= {name: (text, origin) for name, text in self.profiles[chosen].items()}
        return found


@dataclass(frozen=True)
class AppliedSettings:
    """The settings file of a command: the file (None: there is none), its profile, the origins of the variables that
    come from it, and warnings for the user."""

    file: SettingsFile | None = None
    profile: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def origin(self, name: str, env: Mapping[str, str] = os.environ) -> str:
        """The place that a variable's value comes from."""
        return self.origins.get(name) or ("environment" if env.get(name) else "default")


def user_file(env: Mapping[str, str] = os.environ) -> Path:
    """The settings file of the user."""
    folder = env.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path("~/.config").expanduser()) / "tentalis" / "config.toml"


def no_file(env: Mapping[str, str] = os.environ) -> str:
    """Returns the message that there is no settings file: the places that were searched, and what to do."""
    places = f"neither {WORKING_FILE} in this folder nor {user_file(env)}"
    return f"there is no settings file, {places}. `tentalis init` writes one"


def find(env: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the settings file: that of TENTALIS_CONFIG, else that of the working folder, else that of the user.

    Raises BadVariable if the named one does not exist.
    """
    named = variables.CONFIG.read(env)
    if named is not None:
        return named.absolute()
    return next((path.absolute() for path in (WORKING_FILE, user_file(env)) if path.is_file()), None)


def load(path: Path) -> SettingsFile:
    """Reads and checks a settings file, YAML or TOML by its name. Raises BadSettingsFile."""
    try:
        text = settings_text(path)
    except ValueError as error:
        raise BadSettingsFile(str(error)) from error
    return parse(text, path)


def parse(text: str, path: Path) -> SettingsFile:
    """Reads a text as the settings file at `path`. Raises BadSettingsFile."""
    data = _mapping(text, path)
    profiles, default = data.pop(PROFILES_KEY, None), data.pop(PROFILE_KEY, None)
    if not isinstance(profiles, dict | None):
        raise BadSettingsFile(f"{path}: {PROFILES_KEY}: give a name and the settings of each profile")
    if not isinstance(default, str | None):
        raise BadSettingsFile(f"{path}: {PROFILE_KEY}: give the name of a profile")
    found = {}
    for name, values in (profiles or {}).items():
        if not isinstance(name, str) or re.fullmatch(r"[\w.-]+", name) is None:
            raise BadSettingsFile(f"{path}: {PROFILES_KEY}.{name}: a profile's name is letters, digits, dots, hyphens")
        if not isinstance(values, dict | None):
            raise BadSettingsFile(f"{path}: {PROFILES_KEY}.{name}: give settings, such as bootstrap: host:port")
        found[name] = _texts(values or {}, path, f"{PROFILES_KEY}.{name}.")
    file = SettingsFile(path, _texts(data, path, ""), found, default)
    file.chosen(None)
    return file


@contextmanager
def applied(profile: str | None, env: MutableMapping[str, str] = os.environ) -> Iterator[AppliedSettings]:
    """Sets the variables of the settings file that are not set, and takes them back at the end.

    `profile`: the one that was named on the command line. Raises BadSettingsFile, BadVariable.
    """
    if profile == "":  # the empty variable of a script must not choose another cluster
        raise BadSettingsFile("--profile is empty: give the name of a profile")
    # A supervisor gives its processes every value, and a file may change while they run.
    if variables.SUPERVISED.read(env):
        yield AppliedSettings()
        return
    env_file, env_profile = variables.CONFIG.read(env), variables.PROFILE.read(env)
    path, named = find(env), profile or env_profile
    if path is None:
        if named:
            raise BadSettingsFile(f"there is no profile {named}: {no_file(env)}")
        yield AppliedSettings()
        return
    file = load(path)
    chosen = file.chosen(named)
    values = file.values(chosen)
    given = {name: text for name, (text, _) in values.items() if not env.get(name)}
    # Those who inherit the values read the same file: a child may have another working folder.
    added = given | {variables.CONFIG.name: str(path)} | ({variables.PROFILE.name: chosen} if chosen else {})
    before = {name: env.get(name) for name in added}
    env.update(added)
    try:
        origins = {name: origin for name, (_, origin) in values.items() if name in given}
        if not env_file:
            origins[variables.CONFIG.name] = "found"
        if chosen and (profile or not env_profile):
            origins[variables.PROFILE.name] = "--profile" if profile else str(path)
        overrides = _overrides(values, env) if profile else ()
        yield AppliedSettings(file, chosen, origins, (*overrides, *_readable_secrets(file)))
    finally:
        for name, text in before.items():
            if text is None:
                del env[name]
            else:
                env[name] = text


def with_default_profile(text: str, path: Path, profile: str) -> str:
    """Returns the text of a settings file with another default profile; comments stay. Raises BadSettingsFile."""
    toml = path.suffix == ".toml"
    line = f'{PROFILE_KEY} = "{profile}"' if toml else f"{PROFILE_KEY}: {profile}"
    head, table, rest = text.partition("\n[") if toml else (text, "", "")
    if toml and text.startswith("["):
        head, table, rest = "", "", text
    changed, count = re.subn(rf"(?m)^{PROFILE_KEY}\s*[:=].*$", line, head, count=1)
    if not count:
        start = re.match(r"(?:%.*\n)*---.*\n", head) if not toml else None
        cut = start.end() if start else 0
        changed = f"{head[:cut]}{line}\n{head[cut:]}"
    changed += table + rest
    if parse(changed, path).default != profile:
        raise BadSettingsFile(f"{path}: cannot change {PROFILE_KEY} in this file: write `{line}` by hand")
    return changed


def write(path: Path, text: str) -> None:
    """Writes a settings file atomically. It keeps its mode; a new one is its owner's alone. Raises OSError, which
    names `path`."""
    target = path.resolve()
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def _overrides(values: Mapping[str, tuple[str, str]], env: Mapping[str, str]) -> Iterator[str]:
    """Yields a warning for each variable that takes precedence over a profile that was named on the command line."""
    for name, (text, origin) in values.items():
        if env.get(name) and env[name] != text:
            yield f"{name} of the environment takes precedence over {origin}"


def _readable_secrets(file: SettingsFile) -> Iterator[str]:
    """Yields a warning if the file holds a secret and others than its owner may read it."""
    names = [name for values in (file.common, *file.profiles.values()) for name in values]
    if any(variables.named(name).secret for name in names) and file.path.stat().st_mode & 0o077:
        yield f"{file.path} holds secrets and others may read it: chmod 600 {file.path}"


def _mapping(text: str, path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".toml":
            return table_in(text, str(path))
        from tentalis.text.yaml_file import value_in

        found = value_in(text, str(path))
    except ValueError as error:  # BadYaml and BadToml
        raise BadSettingsFile(str(error)) from error
    if not isinstance(found, dict | None):
        raise BadSettingsFile(f"{path}: give settings, such as bootstrap: host:port, not {type(found).__name__}")
    return found or {}


def _texts(values: Mapping[Any, Any], path: Path, at: str) -> dict[str, str]:
    """Returns the variables' texts. Raises BadSettingsFile for an unknown key and a value that is not allowed."""
    found = {}
    for key, value in values.items():
        variable = KEYS.get(key)
        if variable is None:
            raise BadSettingsFile(
                f"{path}: unknown key {at}{key}.{_meant(key, KEYS)} `tentalis config list` shows every setting"
            )
        if value is None:
            continue
        if isinstance(value, bool):
            value = str(value).lower()
        if not isinstance(value, str | int | float):
            raise BadSettingsFile(f"{path}: {at}{key}: give {variable.kind.allowed}, not a {type(value).__name__}")
        found[variable.name] = _text(variable, str(value), path, at)
    return found


def _text(variable: Variable[Any], text: str, path: Path, at: str) -> str:
    """Returns a value as the variable's text: a path in the file is relative to the file's folder."""
    if variable.kind in (PATH, FILE):  # files are looked at by the commands that use them
        try:
            return str(path.parent / Path(text).expanduser())
        except RuntimeError as error:  # ~NAME of a user that does not exist
            raise BadSettingsFile(f"{path}: {at}{key_of(variable)}: {text}: {error}") from error
    try:
        variable.parse(text)
    except BadVariable as error:
        said = str(error).removeprefix(f"{variable.name}=")
        raise BadSettingsFile(f"{path}: {at}{key_of(variable)}: {said}") from error
    return text


def _meant(word: Any, known: Mapping[str, object]) -> str:
    # Somebody may write the variable's whole name.
    text = str(word).lower().removeprefix(variables.PREFIX.lower()).replace("-", "_")
    near = [text] if text in known else difflib.get_close_matches(text, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
