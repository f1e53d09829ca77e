"""What all configuration sections share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints


def _with_a_home(text: str) -> str:
    try:
        Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise ValueError(f"`{user}` has no home directory here. Write the path out") from None
    return text


Place = Annotated[str, StringConstraints(min_length=1), AfterValidator(_with_a_home)]
"""A path, or a name that stands for one."""

Word = Annotated[str, StringConstraints(min_length=1)]
"""An item of a list of texts."""


class Section(BaseModel):
    """One section of a run config: strict types, no unknown keys, immutable once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
