"""The file of scorers: which judges there are, and what the verifiers of each environment are (docs/judges.md)."""

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.records import Source
from tentalis.rewards import registry
from tentalis.rewards.chat import Chat, Endpoint, NoApiKey
from tentalis.rewards.combined import Combined, CombinedSettings
from tentalis.rewards.composite import CompositeScorer, CompositeSettings
from tentalis.rewards.custom import BadTarget, CustomSettings, custom
from tentalis.rewards.next_state import NextStateJudge, NextStateSettings
from tentalis.rewards.next_state_rules import NextStateRules
from tentalis.rewards.step_judge import StepJudge, StepSettings
from tentalis.rewards.steps import NoTokenizer
from tentalis.rewards.verdict import FeedbackJudge, Scorer, UnknownEnvironment
from tentalis.security import BadSecurity
from tentalis.signals import NAMES, SignalName
from tentalis.yaml_file import BadYaml, read_mapping

log = logging.getLogger(__name__)


class BadScorers(Exception):
    """A file of scorers that cannot be used; the message says where and why."""


class RulesSettings(BaseModel):
    """The next-state judge by rules. `signals`: the detectors that count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["next_state_rules"]
    signals: frozenset[SignalName] = NAMES


Settings = Annotated[
    NextStateSettings | RulesSettings | StepSettings | CombinedSettings | CompositeSettings | CustomSettings,
    Field(discriminator="kind"),
]
_KINDS: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model
    for model in (NextStateSettings, RulesSettings, StepSettings, CombinedSettings, CompositeSettings, CustomSettings)
}
Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class ScorerFile(BaseModel):
    """`judges`: endpoints by a name of one's own. `environments`: of each the verifiers by name; one that there is
    already is replaced."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    judges: dict[Name, Endpoint] = {}
    environments: dict[Name, dict[Name, Settings]] = {}


def read_scorers(path: Path) -> ScorerFile:
    """What a file says. Raises BadScorers, with the known name nearest to an unknown one."""
    try:
        data = read_mapping(path, "judges and environments")
    except BadYaml as error:
        raise BadScorers(str(error)) from error
    try:
        return ScorerFile.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(dict.fromkeys(_problem(item) for item in error.errors(include_url=False)))
        raise BadScorers(f"{path}: {problems}") from error


def load_scorers(path: Path, env: Mapping[str, str] = os.environ) -> list[tuple[str, str, Scorer]]:
    """Makes the scorers of a file known in this process: (environment, verifier, scorer) of each, in the file's order.

    Raises BadScorers.
    """
    said = read_scorers(path)
    try:
        chats = {name: Chat(endpoint, env) for name, endpoint in said.judges.items()}
    except (NoApiKey, BadSecurity) as error:
        raise BadScorers(f"{path}: {error}") from error
    made = []
    for environment, verifiers in said.environments.items():
        for name, scorer in _made(path, environment, verifiers, chats).items():
            registry.register(environment, name, scorer, instead=True)
            log.info("%s.%s is judged by %s", environment, name, scorer.name)
            made.append((environment, name, scorer))
    return made


def name_scorers(path: Path) -> None:
    """Makes the verifiers of a file known by name, for a process that takes tasks and scores none: it needs no keys, no
    modules and no models. Raises BadScorers.
    """
    for environment, verifiers in read_scorers(path).environments.items():
        for name in verifiers:
            registry.made_elsewhere(environment, name)


def _made(path: Path, environment: str, verifiers: Mapping[str, Any], chats: Mapping[str, Chat]) -> dict[str, Scorer]:
    made: dict[str, Scorer] = {}
    try:
        registry.check_environment(environment)
    except UnknownEnvironment as error:
        # The other applications do not read this file, and would refuse its records.
        raise BadScorers(f"{path}: {error}. A new one comes with an installed package (docs/scoring.md)") from error
    # What is combined comes last: its parts may be of the file too.
    for name, settings in sorted(verifiers.items(), key=lambda item: item[1].kind == "combined"):
        where = f"{path}: environments.{environment}.{name}"
        try:
            scorer = made[name] = _scorer(where, environment, settings, chats, made)
        except (BadTarget, NoTokenizer) as error:
            raise BadScorers(f"{where}: {error}") from error
        hears = isinstance(scorer, FeedbackJudge) and Source.NEXT_STATE in scorer.sources
        if name == "next_state" and not hears:
            raise BadScorers(
                f"{where}: the reward of a conversation's turn answers to what came next, and {settings.kind} is not "
                "asked about that: give it another name, and make it one part of a `combined` reward of this name"
            )
    return {name: made[name] for name in verifiers}


def _scorer(
    where: str, environment: str, settings: Any, chats: Mapping[str, Chat], made: Mapping[str, Scorer]
) -> Scorer:
    if isinstance(settings, NextStateSettings | StepSettings):
        if settings.judge not in chats:
            raise BadScorers(f"{where}: there is no judge {settings.judge!r}{_near(settings.judge, chats)}")
        if settings.votes > 1 and settings.temperature == 0.0:
            raise BadScorers(f"{where}: {settings.votes} votes at temperature 0 are one vote: raise it, or ask for one")
        chat = chats[settings.judge]
        return NextStateJudge(chat, settings) if isinstance(settings, NextStateSettings) else StepJudge(chat, settings)
    if isinstance(settings, CombinedSettings):
        return _combined(where, environment, settings, made)
    if isinstance(settings, CompositeSettings):
        return CompositeScorer(settings)
    if isinstance(settings, CustomSettings):
        return custom(settings)
    return NextStateRules(settings.signals)


def _combined(where: str, environment: str, settings: CombinedSettings, made: Mapping[str, Scorer]) -> Scorer:
    registry.load_plugins()
    known = {**registry.ENVIRONMENTS.get(environment, {}), **made}
    for name, part in settings.parts.items():
        if part.scorer is None:
            continue
        if part.scorer not in known:
            raise BadScorers(f"{where}.parts.{name}: there is no scorer {part.scorer!r}{_near(part.scorer, known)}")
        if isinstance(known[part.scorer], Combined):
            raise BadScorers(f"{where}.parts.{name}: {part.scorer} is combined itself: name its parts here")
    return Combined(settings, known)


def _near(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if near:
        return f", did you mean {near[0]}?"
    return f"; there are {', '.join(sorted(known))}" if known else ": the file names none"


def _problem(error: Any) -> str:
    # The kind that decided which settings are meant is a part of the place, but not of the file.
    place = [str(part) for part in error["loc"]]
    models = list(_models(place))
    if len(place) > 3 and place[0] == "environments" and place[3] in _KINDS:
        del place[3]
    name = ".".join(part for part in place if part != "[key]")
    if error["type"] == "extra_forbidden":
        known = {field for model in models for field in model.model_fields}
        near = difflib.get_close_matches(place[-1], sorted(known), n=1, cutoff=0.5)
        return f"{name}: no such setting" + (f", did you mean {near[0]}?" if near else "")
    if error["type"] == "union_tag_invalid":
        kind = str(error["ctx"]["tag"])
        return f"{name}: no such kind as {kind!r}{_near(kind, _KINDS)}"
    if error["type"] == "union_tag_not_found":
        return f"{name}: kind is missing: one of {', '.join(_KINDS)}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"


def _models(place: list[str]) -> Iterator[type[BaseModel]]:
    """The settings among which the name at a place was looked for."""
    from tentalis.rewards.combined import Part

    if len(place) == 1:
        yield ScorerFile
    elif place[0] == "judges":
        yield Endpoint
    elif len(place) > 4 and place[3] == "combined" and place[4] == "parts":
        yield Part
    elif len(place) > 3 and place[3] in _KINDS:
        yield _KINDS[place[3]]
