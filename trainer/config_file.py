"""The configuration as people write it: YAML or TOML, our names or another system's, checked to the last key."""

import difflib
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tentalis.yaml_file import BadYaml, mapping_in, value_in
from trainer.aliases import ELSEWHERE, KEYS, VARIABLES, Alias
from trainer.config import ConfigError, TrainerConfig

log = logging.getLogger(__name__)


def load_config(path: Path, variables: Mapping[str, str] | None = None) -> TrainerConfig:
    """The configuration in a YAML file, or a TOML file if it is named so. `variables`: an environment, of which the
    ancestors' variables fill in what the file leaves open. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return parse_config(text, str(path), variables, toml=path.suffix.lower() == ".toml")


def parse_config(
    text: str, where: str, variables: Mapping[str, str] | None = None, *, toml: bool = False
) -> TrainerConfig:
    """The configuration in a text. Raises ConfigError with `where`, the known name nearest to an unknown one, and both
    names of what is said twice and differently."""
    try:
        data = tomllib.loads(text) if toml else mapping_in(text, where, "settings")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from error
    except BadYaml as error:
        raise ConfigError(str(error)) from error
    said = _Said(where)
    for key, value in data.items():
        if key in KEYS and key not in TrainerConfig.model_fields:
            said.alias(str(key), KEYS[key], value)
        else:
            said.own(str(key), value)
    for name, value in (variables or {}).items():
        if name in VARIABLES:
            said.alias(name, VARIABLES[name], _value(value, where, name))
        elif name in ELSEWHERE:
            log.warning("%s is set and means nothing here: %s", name, ELSEWHERE[name])
        elif name.startswith("TRAINING_"):
            near = difflib.get_close_matches(name, [*VARIABLES, *ELSEWHERE], n=1)
            log.warning("%s is set and means nothing here%s", name, f": did you mean {near[0]}?" if near else "")
    return validated(said.nested(), where, said.sources)


def overridden(config: TrainerConfig, changes: Mapping[str, str], where: str) -> TrainerConfig:
    """A configuration with some settings changed: dotted path or alias -> value as YAML has it. Raises ConfigError."""
    said = _Said(where)
    for key, text in changes.items():
        value = _value(text, where, key)
        if key in KEYS and key not in TrainerConfig.model_fields:
            said.alias(key, KEYS[key], value)
        else:
            said.own(key, value)
    data = config.model_dump(mode="json")
    for path, value in said.settled().items():
        _put(data, path, value)
    return validated(data, where, said.sources)


def _value(text: str, where: str, name: str) -> Any:
    try:
        return value_in(text, f"{where}: {name}")
    except BadYaml as error:
        raise ConfigError(str(error)) from error


def validated(data: Mapping[str, Any], where: str, sources: Mapping[str, str]) -> TrainerConfig:
    """The configuration of nested settings; `sources`: under which name a dotted path was given. Raises ConfigError."""
    try:
        return TrainerConfig.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(dict.fromkeys(_problem(item, sources) for item in error.errors()))
        raise ConfigError(f"{where}: {problems}") from error


class _Said:
    """Settings by dotted path, each with the name under which it was given."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._values: dict[str, Any] = {}
        self._implied: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def own(self, path: str, value: Any) -> None:
        """A setting under our own name, with those below it."""
        if isinstance(value, dict) and path in _sections():
            for key, inner in value.items():
                self.own(f"{path}.{key}", inner)
        elif isinstance(value, str) and f"{path}.kind" in known_names():
            # `loss: cispo` for loss.kind: cispo: what a person means.
            self.say(f"{path}.kind", value, path)
        else:
            self.say(path, value, path)

    def alias(self, name: str, alias: Alias, value: Any) -> None:
        """A setting under another name."""
        try:
            means, implied = alias.of(value), alias.implied(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._where}: {name}: {error}") from error
        for path, own in means.items():
            self.say(path, own, name)
        for path, own in implied.items():
            self._implied[path] = own
            self.sources.setdefault(path, name)

    def say(self, path: str, value: Any, name: str) -> None:
        """One setting. Raises ConfigError where it was given differently before."""
        if path in self._values and not _equal(self._values[path], value):
            before = self.sources[path]
            raise ConfigError(
                f"{self._where}: {before} and {name} contradict each other: {path} would be {self._values[path]} and "
                f"{value}. Say it once"
            )
        self._values[path] = value
        self.sources[path] = name

    def settled(self) -> dict[str, Any]:
        """By dotted path."""
        return self._implied | self._values

    def nested(self) -> dict[str, Any]:
        """As the file would have it with our names only."""
        data: dict[str, Any] = {}
        for path, value in sorted(self.settled().items(), key=lambda item: item[0].count(".")):
            _put(data, path, value)
        return data


def _equal(one: Any, other: Any) -> bool:
    """As settings: 1e-4 is a text to YAML and a number to us."""
    try:
        return one == other or float(one) == float(other)
    except (TypeError, ValueError):
        return False


def _put(data: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        inner = data.get(section)
        if not isinstance(inner, dict):
            inner = data[section] = {}
        data = inner
    data[name] = value


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The part class that a field holds, also where it may be null."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _sections(model: type[BaseModel] = TrainerConfig, before: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if (part := section_of(field.annotation)) is not None:
            yield before + name
            yield from _sections(part, f"{before}{name}.")


def known_names(model: type[BaseModel] = TrainerConfig, before: str = "") -> Iterator[str]:
    """Every setting by its dotted path."""
    for name, field in model.model_fields.items():
        yield before + name
        if (part := section_of(field.annotation)) is not None:
            yield from known_names(part, f"{before}{name}.")


def _problem(error: Any, sources: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        source = sources.get(name, name)
        problem = error["msg"].removeprefix("Value error, ") + _nearest_value(error)
        if error["type"] == "model_type":
            below = [path.removeprefix(f"{name}.") for path in known_names() if path.startswith(f"{name}.")]
            problem = f"a mapping of its settings is expected ({', '.join(below[:3])}, ...), not {error['input']!r}"
        return f"{name}: {problem}" if source == name else f"{source} ({name}): {problem}"
    near = nearest(name)
    return f"{name}: no such setting" + (f", did you mean {near}?" if near else "")


def _nearest_value(error: Any) -> str:
    """For a word that is none of the allowed ones: which of them is most like it."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    near = difflib.get_close_matches(error["input"], re.findall(r"'([^']*)'", error["ctx"]["expected"]), n=1)
    return f", did you mean {near[0]}?" if near else ""


def nearest(name: str) -> str | None:
    """The known name most like an unknown one: beside it, anywhere, or another system's; of names that are alike the
    first of these. Within a section, another system's name stands for the setting of ours that it means."""
    section, _, leaf = name.rpartition(".")
    before = f"{section}." if section else ""
    paths = list(known_names())
    beside = [path.removeprefix(before) for path in paths if path.rpartition(".")[0] == section]
    anywhere = [(path.rpartition(".")[2], path, 0.6) for path in paths]
    foreign = [(key, alias.settings[0].removeprefix(before) if section else key, 0.6) for key, alias in KEYS.items()]
    known = [*((word, word, 0.5) for word in beside), *anywhere, *foreign]
    scored = [(difflib.SequenceMatcher(None, leaf, word).ratio(), meant, least) for word, meant, least in known]
    likeness, meant, least = max(scored, key=lambda each: each[0])
    return meant if likeness >= least else None
