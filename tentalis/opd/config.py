"""The settings file of hinters and teacher: `tentalis serve hinting --hinters FILE` (docs/concepts/hints.md)."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.problems import problems
from tentalis.opd.select import Selection
from tentalis.rewards.chat import ChatEndpoint
from tentalis.service.lifecycle import Unmendable
from tentalis.text.yaml_file import BadYaml, read_mapping

ANY_ENVIRONMENT = "*"
"""Stands for every environment without an entry."""
MAX_VOTES = 16
MAX_LESSON_TOKENS = 2048
MAX_TOP_TOKENS = 20
"""The most top tokens that servers list per position (vLLM's default)."""


class BadHinters(Unmendable):
    """The file is invalid; the message says where."""


class _StrictSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RuleHinterSettings(_StrictSettings):
    """The feedback's own request is the hint; needs no model."""

    kind: Literal["rule"]


class GivenHinterSettings(_StrictSettings):
    """The text of the feedback is the hint, as it is: for feedback that a function wrote, not a person or a tool."""

    kind: Literal["given"]


class NoHinterSettings(_StrictSettings):
    """No hints; the halves record that there are none."""

    kind: Literal["none"]


class JudgeHinterSettings(_StrictSettings):
    """A judge model that gives `votes` answers concurrently; `select` chooses which of their hints are used. `name` is
    the first part of the hinter's name; the rest is derived from the request."""

    kind: Literal["judge"]
    endpoint: ChatEndpoint
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")] = "judge"
    votes: Annotated[int, Field(ge=1, le=MAX_VOTES)] = 3
    select: Selection = "longest"
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 0.6
    max_tokens: Annotated[int, Field(ge=1)] = 4096


class LessonSettings(_StrictSettings):
    """The model that extracts the lesson of a whole session (`tentalis serve experience`). `most_tokens` bounds the
    lesson, counted with the student's tokenizer."""

    endpoint: ChatEndpoint
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")] = "experience"
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 0.6
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    most_tokens: Annotated[int, Field(ge=1, le=MAX_LESSON_TOKENS)] = MAX_LESSON_TOKENS


class TeacherSettings(_StrictSettings):
    """The model that scores the student's tokens under the hint.

    `model`: its name on the server; by default the base model, or with `same_weights` the adapter that sampled each
    answer. `url`: a server other than the student's, with the same tokenizer; its key is in the environment variable
    `api_key_env`. `top`: number of most likely tokens requested per token.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    same_weights: bool = False
    url: str | None = None
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    top: Annotated[int, Field(ge=0, le=MAX_TOP_TOKENS)] = 0

    @model_validator(mode="after")
    def _check_consistent(self) -> "TeacherSettings":
        if self.same_weights and (self.model is not None or self.url is not None):
            raise ValueError("same_weights is the adapter that sampled, on the student's server: remove model and url")
        if self.url is not None and self.model is None:
            raise ValueError("a teacher with a url needs model: its name on that server")
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env needs url: it names the key of that server")
        if self.url is not None:
            ChatEndpoint(url=self.url, model="-")  # the same rules: http or https, without a user
        return self


class Hinters(_StrictSettings):
    """The whole file: a hinter per environment (`*`: all others), the teacher, and the model that extracts lessons."""

    hinters: dict[
        str,
        Annotated[
            RuleHinterSettings | GivenHinterSettings | NoHinterSettings | JudgeHinterSettings,
            Field(discriminator="kind"),
        ],
    ] = {ANY_ENVIRONMENT: RuleHinterSettings(kind="rule")}
    teacher: TeacherSettings = TeacherSettings()
    lesson: LessonSettings | None = None

    @model_validator(mode="after")
    def _check_teacher_top(self) -> "Hinters":
        if ANY_ENVIRONMENT not in self.hinters:
            raise ValueError(
                f"hinters: add an entry for all other environments, such as `'{ANY_ENVIRONMENT}': {{kind: none}}`"
            )
        for environment, hinter in self.hinters.items():
            if isinstance(hinter, JudgeHinterSettings) and hinter.select == "all" and not self.teacher.top:
                raise ValueError(
                    f"hinters.{environment}: select: all gives the trainer's top-K loss several hints to choose from "
                    "and needs teacher.top above 0; otherwise use select: longest"
                )
        return self


def load_hinters(path: Path) -> Hinters:
    """Reads the settings from a YAML file. Raises BadHinters."""
    try:
        data = read_mapping(path, "hinters and teacher")
    except BadYaml as error:
        raise BadHinters(str(error)) from error
    try:
        return Hinters.model_validate(data)
    except ValidationError as error:
        raise BadHinters(f"{path}: {problems(error, 'file', unsaid=('judge', 'rule', 'given', 'none'))}") from error
