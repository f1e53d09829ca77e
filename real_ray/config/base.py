"""What all configuration sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

Word = Annotated[str, StringConstraints(min_length=1)]
"""An item of a list of texts."""


class Section(BaseModel):
    """One section of a run config: strict types, no unknown keys, immutable once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
