"""Common base of the parts of a run's configuration."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]


class ConfigModel(BaseModel):
    """Base class of the parts of the configuration: immutable, rejects unknown keys, and takes the descriptions of
    its fields from their docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
