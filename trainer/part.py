"""What the parts of a run's configuration have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]


class Part(BaseModel):
    """A mapping of settings: immutable, every key known, every docstring shown."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
