"""The file of scorers: its judges, and the verifiers of each environment (docs/concepts/judges.md)."""

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.records import Source
from tentalis.rewards import registry
from tentalis.rewards.answer_judge import AnswerJudge, AnswerJudgeSettings
from tentalis.rewards.chat import ChatClient, ChatEndpoint, NoApiKey
from tentalis.rewards.combined import CombinedScorer, CombinedSettings
from tentalis.rewards.composite import CompositeScorer, CompositeSettings
from tentalis.rewards.custom import BadTarget, CustomSettings, custom_scorer
from tentalis.rewards.functions.errors import BadFunction
from tentalis.rewards.functions.scorer import FunctionScorer, FunctionSettings
from tentalis.rewards.next_state import NextStateJudge, NextStateSettings
from tentalis.rewards.next_state_rules import NextStateRules
from tentalis.rewards.step_judge import StepJudge, StepJudgeSettings
from tentalis.rewards.steps import NoTokenizer
from tentalis.rewards.verdict import FeedbackJudge, Scorer, UnknownEnvironment
from tentalis.service.security import BadSecurity
from tentalis.signals import NAMES, SignalName
from tentalis.text.yaml_file import BadYaml, read_mapping

log = logging.getLogger(__name__)


class BadScorers(Exception):
    """A file of scorers that cannot be used; the message names the place and the reason."""


class NextStateRulesSettings(BaseModel):
    """Settings of the rule-based next-state judge. `signals`: the detectors that count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["next_state_rules"]
    signals: frozenset[SignalName] = NAMES


ScorerSettings = Annotated[
    NextStateSettings
    | NextStateRulesSettings
    | StepJudgeSettings
    | AnswerJudgeSettings
    | CombinedSettings
    | CompositeSettings
    | CustomSettings
    | FunctionSettings,
    Field(discriminator="kind"),
]
_KINDS: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model
    for model in (
        NextStateSettings,
        NextStateRulesSettings,
        StepJudgeSettings,
        AnswerJudgeSettings,
        CombinedSettings,
        CompositeSettings,
        CustomSettings,
        FunctionSettings,
    )
}
ScorerName = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class ScorerFile(BaseModel):
    """`judges`: endpoints, each under a name of the user's choice. `environments`: the verifiers of each by name; a
    verifier replaces a registered one of the same name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    judges: dict[ScorerName, ChatEndpoint] = {}
    environments: dict[ScorerName, dict[ScorerName, ScorerSettings]] = {}


def read_scorers(path: Path) -> ScorerFile:
    """Reads a file of scorers. Raises BadScorers, which suggests the nearest known name for an unknown one."""
    try:
        data = read_mapping(path, "judges and environments")
    except BadYaml as error:
        raise BadScorers(str(error)) from error
    try:
        return ScorerFile.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(dict.fromkeys(_describe_error(item) for item in error.errors(include_url=False)))
        raise BadScorers(f"{path}: {problems}") from error


def load_scorers(path: Path, env: Mapping[str, str] = os.environ) -> list[tuple[str, str, Scorer]]:
    """Registers the scorers of a file; returns (environment, verifier, scorer) of each, in the file's order.

    Raises BadScorers.
    """
    scorer_file = read_scorers(path)
    try:
        chats = {name: ChatClient(endpoint, env) for name, endpoint in scorer_file.judges.items()}
    except (NoApiKey, BadSecurity) as error:
        raise BadScorers(f"{path}: {error}") from error
    made = []
    for environment, verifiers in scorer_file.environments.items():
        for name, scorer in _make_scorers(path, environment, verifiers, chats).items():
            registry.register(environment, name, scorer, replace=True)
            log.info("verifier %s.%s is %s", environment, name, scorer.name)
            made.append((environment, name, scorer))
    return made


def name_scorers(path: Path) -> None:
    """Registers the names of a file's verifiers without loading the scorers: for a process that accepts tasks but
    does not score them, and so has no API keys, Python modules or models. Raises BadScorers."""
    for environment, verifiers in read_scorers(path).environments.items():
        for name in verifiers:
            registry.register_name(environment, name)


def _make_scorers(
    path: Path, environment: str, verifiers: Mapping[str, Any], chats: Mapping[str, ChatClient]
) -> dict[str, Scorer]:
    made: dict[str, Scorer] = {}
    try:
        registry.check_environment(environment)
    except UnknownEnvironment as error:
        # The other applications do not read this file, and would reject records of an environment that it defines.
        raise BadScorers(
            f"{path}: {error}. An installed package can add an environment (docs/concepts/scoring.md)"
        ) from error
    # Combined scorers come last: their parts may be defined in the same file.
    for name, settings in sorted(verifiers.items(), key=lambda item: item[1].kind == "combined"):
        where = f"{path}: environments.{environment}.{name}"
        try:
            scorer = made[name] = _scorer(where, environment, settings, chats, made, path.parent)
        except (BadTarget, BadFunction, NoTokenizer) as error:
            raise BadScorers(f"{where}: {error}") from error
        judges_next_state = isinstance(scorer, FeedbackJudge) and Source.NEXT_STATE in scorer.sources
        if name == "next_state" and not judges_next_state:
            raise BadScorers(
                f"{where}: the reward of a conversation's turn comes from the next message, which {settings.kind} does "
                "not judge: give this scorer another name, and make it a part of a `combined` reward named next_state"
            )
    return {name: made[name] for name in verifiers}


def _scorer(
    where: str,
    environment: str,
    settings: Any,
    chats: Mapping[str, ChatClient],
    made: Mapping[str, Scorer],
    folder: Path,
) -> Scorer:
    if isinstance(settings, NextStateSettings | StepJudgeSettings | AnswerJudgeSettings):
        if settings.judge not in chats:
            raise BadScorers(f"{where}: there is no judge {settings.judge!r}{_suggestion(settings.judge, chats)}")
        if settings.votes > 1 and settings.temperature == 0.0:
            raise BadScorers(f"{where}: at temperature 0 {settings.votes} votes are equal: raise it or set votes: 1")
        chat = chats[settings.judge]
        if isinstance(settings, AnswerJudgeSettings):
            return AnswerJudge(chat, settings)
        return NextStateJudge(chat, settings) if isinstance(settings, NextStateSettings) else StepJudge(chat, settings)
    if isinstance(settings, CombinedSettings):
        return _combined(where, environment, settings, made)
    if isinstance(settings, CompositeSettings):
        return CompositeScorer(settings)
    if isinstance(settings, CustomSettings):
        return custom_scorer(settings)
    if isinstance(settings, FunctionSettings):
        return FunctionScorer(settings, folder)
    return NextStateRules(settings.signals)


def _combined(where: str, environment: str, settings: CombinedSettings, made: Mapping[str, Scorer]) -> Scorer:
    registry.load_plugins()
    known = {**registry.ENVIRONMENTS.get(environment, {}), **made}
    for name, part in settings.parts.items():
        if part.scorer is None:
            continue
        if part.scorer not in known:
            raise BadScorers(
                f"{where}.parts.{name}: there is no scorer {part.scorer!r}{_suggestion(part.scorer, known)}"
            )
        if isinstance(known[part.scorer], CombinedScorer):
            raise BadScorers(f"{where}.parts.{name}: {part.scorer} is itself a combined scorer: name its parts here")
    return CombinedScorer(settings, known)


def _suggestion(name: str, known: Mapping[str, object]) -> str:
    closest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if closest:
        return f", did you mean {closest[0]}?"
    return f"; the known ones are {', '.join(sorted(known))}" if known else "; the file defines none"


def _describe_error(error: Any) -> str:
    # pydantic puts the kind of a discriminated union into the location, but the file has no such level.
    location = [str(part) for part in error["loc"]]
    models = list(_models_at(location))
    if len(location) > 3 and location[0] == "environments" and location[3] in _KINDS:
        del location[3]
    name = ".".join(part for part in location if part != "[key]")
    if error["type"] == "extra_forbidden":
        known = {field for model in models for field in model.model_fields}
        closest = difflib.get_close_matches(location[-1], sorted(known), n=1, cutoff=0.5)
        return f"{name}: no such setting" + (f", did you mean {closest[0]}?" if closest else "")
    if error["type"] == "union_tag_invalid":
        kind = str(error["ctx"]["tag"])
        return f"{name}: there is no kind {kind!r}{_suggestion(kind, _KINDS)}"
    if error["type"] == "union_tag_not_found":
        return f"{name}: kind is missing; it is one of {', '.join(_KINDS)}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"


def _models_at(location: list[str]) -> Iterator[type[BaseModel]]:
    """Yields the models whose fields are valid names at a place of the file."""
    from tentalis.rewards.combined import RewardPart

    if len(location) == 1:
        yield ScorerFile
    elif location[0] == "judges":
        yield ChatEndpoint
    elif len(location) > 4 and location[3] == "combined" and location[4] == "parts":
        yield RewardPart
    elif len(location) > 3 and location[3] in _KINDS:
        yield _KINDS[location[3]]
