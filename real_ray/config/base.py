"""What all configuration sections share."""

from __future__ import annotations

from typing import Annotated

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict

Word = Annotated[str, MinLen(1)]
"""An item of a list of texts."""


class Section(BaseModel):
    """One section of a run config: strict types, no unknown keys, immutable once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
