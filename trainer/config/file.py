"""Reads configuration files: YAML or TOML, our names or another system's. Unknown keys are rejected."""

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tentalis.text.settings_text import settings_text
from tentalis.text.toml_file import BadToml, table_in
from tentalis.text.yaml_file import BadYaml, mapping_in, value_in
from trainer.config.aliases import (
    IGNORED_SECTION_KEYS,
    IGNORED_VARIABLES,
    KEY_ALIASES,
    SECTION_ALIASES,
    SWITCHES,
    VARIABLE_ALIASES,
    SettingAlias,
)
from trainer.config.trainer_config import ConfigError, TrainerConfig

log = logging.getLogger(__name__)


def load_config(path: Path, variables: Mapping[str, str] | None = None) -> TrainerConfig:
    """Reads the configuration in a YAML file, or a TOML file if its name ends in `.toml`. `variables`: an environment,
    whose variables of earlier systems fill in what the file leaves open. Raises ConfigError."""
    try:
        text = settings_text(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return parse_config(text, str(path), variables, toml=path.suffix.lower() == ".toml")


def parse_config(
    text: str, where: str, variables: Mapping[str, str] | None = None, *, toml: bool = False
) -> TrainerConfig:
    """Parses a configuration. Raises ConfigError with `where`, the known name nearest to an unknown one, and both names
    of a contradiction."""
    try:
        data = table_in(text, where) if toml else mapping_in(text, where, "settings")
    except (BadToml, BadYaml) as error:
        raise ConfigError(str(error)) from error
    given = _GivenSettings(where)
    for key, value in data.items():
        if key in SECTION_ALIASES and isinstance(value, dict):
            _read_section(given, str(key), value, where)
        elif key in KEY_ALIASES and key not in TrainerConfig.model_fields:
            given.add_alias(str(key), KEY_ALIASES[key], value)
        else:
            given.add_own(str(key), value)
    _read_variables(given, variables or {}, where)
    return validate_settings(given.nested(), where, given.sources)


def _read_section(given: "_GivenSettings", section: str, values: Mapping[Any, Any], where: str) -> None:
    """Adds the keys of a section of an OpenClaw-RL file. Raises ConfigError for an unknown one."""
    read, elsewhere = SECTION_ALIASES[section], IGNORED_SECTION_KEYS[section]
    for key, value in values.items():
        name = f"{section}.{key}"
        if key in read:
            given.add_alias(name, read[key], value)
        elif key in elsewhere:
            log.warning("%s: %s is set but has no effect: %s", where, name, elsewhere[key])
        else:
            near = difflib.get_close_matches(str(key), [*read, *elsewhere], n=1)
            raise ConfigError(f"{where}: {name}: no such setting" + (f", did you mean {near[0]}?" if near else ""))


def _read_variables(given: "_GivenSettings", variables: Mapping[str, str], where: str) -> None:
    """Adds the variables of earlier systems; names those that have no effect in a warning. Raises ConfigError."""
    for name, value in variables.items():
        if name in VARIABLE_ALIASES:
            alias = VARIABLE_ALIASES[name]
            if alias.switch is not None and not alias.switch.on(variables):
                log.warning("%s is set but has no effect without %s", name, alias.switch)
                continue
            read = given.add_alias(name, alias, value if name in SWITCHES else _parse_value(value, where, name))
            if not read and alias.otherwise:
                log.warning("%s is set but has no effect: %s", name, alias.otherwise)
        elif name in IGNORED_VARIABLES and value.strip():
            log.warning("%s is set but has no effect: %s", name, IGNORED_VARIABLES[name])
        elif name.startswith("TRAINING_") and name not in IGNORED_VARIABLES:
            near = difflib.get_close_matches(name, [*VARIABLE_ALIASES, *IGNORED_VARIABLES], n=1)
            log.warning("%s is set but has no effect%s", name, f": did you mean {near[0]}?" if near else "")


def check_variables(variables: Mapping[str, str]) -> None:
    """Checks the variables of earlier systems in an environment, as a trainer reads them beside a file that leaves
    everything open. Raises ConfigError."""
    required = [name for name, field in TrainerConfig.model_fields.items() if field.is_required()]
    parse_config("\n".join(f"{name}: any" for name in required), "the environment", variables)


def override_settings(config: TrainerConfig, changes: Mapping[str, str], where: str) -> TrainerConfig:
    """Returns a configuration with some settings changed: dotted path or alias -> value in YAML. Only those that were
    given before or are now count as given. Raises ConfigError."""
    given = _GivenSettings(where)
    for key, text in changes.items():
        value = _parse_value(text, where, key)
        if key in KEY_ALIASES and key not in TrainerConfig.model_fields:
            given.add_alias(key, KEY_ALIASES[key], value)
        else:
            given.add_own(key, value)
    data = config.model_dump(mode="json", exclude_unset=True)
    for path, value in given.by_path().items():
        _put_at(data, path, value)
    return validate_settings(data, where, given.sources)


def _parse_value(text: str, where: str, name: str) -> Any:
    try:
        return value_in(text, f"{where}: {name}")
    except BadYaml as error:
        raise ConfigError(str(error)) from error


def validate_settings(data: Mapping[str, Any], where: str, sources: Mapping[str, str]) -> TrainerConfig:
    """Validates nested settings; `sources`: the name under which each dotted path was given. Raises ConfigError."""
    try:
        return TrainerConfig.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(dict.fromkeys(_describe_error(item, sources) for item in error.errors()))
        raise ConfigError(f"{where}: {problems}") from error


class _GivenSettings:
    """Settings by dotted path, each with the name under which it was given."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._values: dict[str, Any] = {}
        self._implied: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def add_own(self, path: str, value: Any) -> None:
        """Adds a setting under our own name, with the settings below it."""
        if isinstance(value, dict) and path in _sections():
            for key, inner in value.items():
                self.add_own(f"{path}.{key}", inner)
        elif isinstance(value, str) and f"{path}.kind" in known_names():
            # `loss: cispo` is short for loss.kind: cispo.
            self._add(f"{path}.kind", value, path)
        else:
            self._add(path, value, path)

    def add_alias(self, name: str, alias: SettingAlias, value: Any) -> bool:
        """Adds a setting under another name. Returns False if the value gives no setting."""
        try:
            means, implied = alias.settings_for(value), alias.implied(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._where}: {name}: {error}") from error
        for path, own in means.items():
            self._add(path, own, name)
        for path, own in implied.items():
            self._implied[path] = own
            self.sources.setdefault(path, name)
        return bool(means or implied)

    def _add(self, path: str, value: Any, name: str) -> None:
        """Adds one setting. Raises ConfigError if it was given differently before."""
        if path in self._values and not _same_value(self._values[path], value):
            before = self.sources[path]
            raise ConfigError(
                f"{self._where}: {before} and {name} contradict each other: {path} would be {self._values[path]} and "
                f"{value}. Set it once"
            )
        self._values[path] = value
        self.sources[path] = name

    def by_path(self) -> dict[str, Any]:
        """Returns the settings by dotted path."""
        return self._implied | self._values

    def nested(self) -> dict[str, Any]:
        """Returns the settings as a file with only our names would have them. Raises ConfigError."""
        data: dict[str, Any] = {}
        for path, value in sorted(self.by_path().items(), key=lambda item: item[0].count(".")):
            self._check_not_below_null(path)
            _put_at(data, path, value)
        return data

    def _check_not_below_null(self, path: str) -> None:
        """Raises ConfigError for a setting of a section that is given as null."""
        section = path.rpartition(".")[0]
        if section in self._values and self._values[section] is None:
            raise ConfigError(
                f"{self._where}: {self.sources[section]} and {self.sources[path]} contradict each other: {section} "
                f"would be null and have {path}. Set one of them"
            )


def _same_value(one: Any, other: Any) -> bool:
    """Compares two values as settings: 1e-4 is a string in YAML and a number here, and a list of one item may be given
    as the item."""
    if isinstance(one, list) != isinstance(other, list):
        return _listed(one) == _listed(other)
    try:
        return one == other or float(one) == float(other)
    except (TypeError, ValueError):
        return False


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _put_at(data: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        inner = data.get(section)
        if not isinstance(inner, dict):
            inner = data[section] = {}
        data = inner
    data[name] = value


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Returns the part class of a field, also if the field may be null."""
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
    """Yields every setting by its dotted path."""
    for name, field in model.model_fields.items():
        yield before + name
        if (part := section_of(field.annotation)) is not None:
            yield from known_names(part, f"{before}{name}.")


def _describe_error(error: Any, sources: Mapping[str, str]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        source = sources.get(name, name)
        problem = error["msg"].removeprefix("Value error, ") + _nearest_value(error)
        if error["type"] == "model_type":
            below = [path.removeprefix(f"{name}.") for path in known_names() if path.startswith(f"{name}.")]
            problem = f"a mapping of its settings is expected ({', '.join(below[:3])}, ...), not {error['input']!r}"
        return f"{name}: {problem}" if source == name else f"{source} ({name}): {problem}"
    near = nearest_setting(name)
    return f"{name}: no such setting" + (f", did you mean {near}?" if near else "")


def _nearest_value(error: Any) -> str:
    """Returns a suggestion for an invalid word: the most similar allowed one."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    near = difflib.get_close_matches(error["input"], re.findall(r"'([^']*)'", error["ctx"]["expected"]), n=1)
    return f", did you mean {near[0]}?" if near else ""


def nearest_setting(name: str) -> str | None:
    """Returns the known name most similar to an unknown one: in the same section, in any section, or another system's;
    ties go to the earlier of these. Within a section, another system's name stands for our setting that it means."""
    section, _, leaf = name.rpartition(".")
    before = f"{section}." if section else ""
    paths = list(known_names())
    beside = [path.removeprefix(before) for path in paths if path.rpartition(".")[0] == section]
    anywhere = [(path.rpartition(".")[2], path, 0.6) for path in paths]
    foreign = [
        (key, alias.settings[0].removeprefix(before) if section else key, 0.6) for key, alias in KEY_ALIASES.items()
    ]
    known = [*((word, word, 0.5) for word in beside), *anywhere, *foreign]
    scored = [(difflib.SequenceMatcher(None, leaf, word).ratio(), meant, least) for word, meant, least in known]
    likeness, meant, least = max(scored, key=lambda each: each[0])
    return meant if likeness >= least else None
