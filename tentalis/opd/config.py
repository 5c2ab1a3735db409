"""The file that says who makes hints and who teaches: `tentalis serve hinting --hinters FILE` (docs/hints.md)."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.problems import problems
from tentalis.opd.select import Selection
from tentalis.rewards.chat import Endpoint
from tentalis.service import Unmendable
from tentalis.yaml_file import BadYaml, read_mapping

ANY = "*"
"""Stands for every environment that is not named."""
MOST_VOTES = 16
MOST_LESSON_TOKENS = 2048
MOST_TOP = 20
"""Likeliest tokens that servers list at most for a token (vLLM's default)."""


class BadHinters(Unmendable):
    """The file cannot be used. The message says where it is wrong."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rule(_Settings):
    """The feedback's own request: needs no model."""

    kind: Literal["rule"]


class Off(_Settings):
    """No hints, but the halves that say so."""

    kind: Literal["none"]


class Judge(_Settings):
    """A judge model: `votes` answers at once, and which of their hints are used. `name` is the first part of the
    hinter's name, the rest is made of what is asked."""

    kind: Literal["judge"]
    endpoint: Endpoint
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")] = "judge"
    votes: Annotated[int, Field(ge=1, le=MOST_VOTES)] = 3
    select: Selection = "longest"
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 0.6
    max_tokens: Annotated[int, Field(ge=1)] = 4096


class LessonSettings(_Settings):
    """Who extracts the lesson of a whole session (`tentalis serve experience`), and its most tokens, by the student's
    tokenizer."""

    endpoint: Endpoint
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")] = "experience"
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 0.6
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    most_tokens: Annotated[int, Field(ge=1, le=MOST_LESSON_TOKENS)] = MOST_LESSON_TOKENS


class TeacherSettings(_Settings):
    """Who scores the student's tokens under the hint.

    `model`: a name on the server; without one its base model, or with `same_weights` the adapter that sampled each
    answer. `url`: another server than the student's, with the same tokenizer, its key in the environment variable
    `api_key_env`. `top`: likeliest tokens per token that it is asked for.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    same_weights: bool = False
    url: str | None = None
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    top: Annotated[int, Field(ge=0, le=MOST_TOP)] = 0

    @model_validator(mode="after")
    def _says_one_thing(self) -> "TeacherSettings":
        if self.same_weights and (self.model is not None or self.url is not None):
            raise ValueError("same_weights is the adapter that sampled, on the student's server: without model and url")
        if self.url is not None and self.model is None:
            raise ValueError("a teacher at another url needs the model's name there")
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env is the key of the teacher's own url")
        if self.url is not None:
            Endpoint(url=self.url, model="-")  # the same rules: no user in it, http or https
        return self


class Hinters(_Settings):
    """The whole file: a hinter per environment (`*`: the rest), the teacher, and who extracts lessons of sessions."""

    hinters: dict[str, Annotated[Rule | Off | Judge, Field(discriminator="kind")]] = {ANY: Rule(kind="rule")}
    teacher: TeacherSettings = TeacherSettings()
    lesson: LessonSettings | None = None

    @model_validator(mode="after")
    def _uses_what_it_asks_for(self) -> "Hinters":
        if ANY not in self.hinters:
            raise ValueError(f"hinters: say what is done in all other environments: `'{ANY}': {{kind: none}}`")
        for environment, hinter in self.hinters.items():
            if isinstance(hinter, Judge) and hinter.select == "all" and not self.teacher.top:
                raise ValueError(
                    f"hinters.{environment}: select: all gives the trainer's top-K loss hints to choose from, and "
                    "needs teacher.top above 0; else use select: longest"
                )
        return self


def load_hinters(path: Path) -> Hinters:
    """The settings in a YAML file. Raises BadHinters."""
    try:
        data = read_mapping(path, "hinters and teacher")
    except BadYaml as error:
        raise BadHinters(str(error)) from error
    try:
        return Hinters.model_validate(data)
    except ValidationError as error:
        raise BadHinters(f"{path}: {problems(error, 'file', unsaid=('judge', 'rule', 'none'))}") from error
