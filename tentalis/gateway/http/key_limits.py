"""The limits of API keys: those of the gateway for every key, and those of single keys in their place. Pure."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from schemas.problems import problems


class KeyLimits(BaseModel):
    """Limits of each API key; those on the content of a request also hold where no key is required.

    `requests_per_minute`, `tokens_per_minute` (prompt and answer): a fixed window. `tokens_per_day`: a budget of a UTC
    day; None: no budget. `running`: calls and streams at the same time. `choices`: answers per call (n times prompts).
    `messages`: messages per call. `stops`: stop strings per call. `event_streams`: open streams of /v1/events.
    `feedback_per_turn`: feedback records of a task, from all sources.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Annotated[int, Field(gt=0)] = 6000
    tokens_per_minute: Annotated[int, Field(gt=0)] = 10_000_000
    tokens_per_day: Annotated[int, Field(gt=0)] | None = None
    running: Annotated[int, Field(gt=0)] = 256
    choices: Annotated[int, Field(gt=0, le=1024)] = 64
    messages: Annotated[int, Field(gt=0, le=50_000)] = 10_000
    stops: Annotated[int, Field(gt=0, le=1024)] = 64
    event_streams: Annotated[int, Field(gt=0)] = 8
    feedback_per_turn: Annotated[int, Field(gt=0)] = 100

    def replaced_by(self, overrides: Mapping[str, int | None]) -> "KeyLimits":
        """Returns these limits with those of one key in their place. `overrides`: checked values, by name."""
        return self.model_copy(update=dict(overrides)) if overrides else self


def checked_overrides(overrides: Mapping[str, int | None]) -> dict[str, int | None]:
    """Returns limits of a single key, by name. Raises ValueError for an unknown name and a value out of bounds."""
    try:
        KeyLimits.model_validate(overrides)
    except ValidationError as error:
        raise ValueError(problems(error, "the limits")) from None
    return dict(overrides)


LimitOverrides = Annotated[dict[str, int | None], AfterValidator(checked_overrides)]
"""Limits of a single key, by name, in place of those of the gateway."""
