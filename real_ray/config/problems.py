"""From what pydantic found wrong to what a user can act on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from real_ray.config.hints import SHORTHANDS, advise
from real_ray.config.keys import Key, keys_by_name
from real_ray.config.yaml_file import Location

_OUT_OF_BOUND = {
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "string_too_short": "is too short",
    "too_short": "is too short",
    "string_too_long": "is too long",
    "string_pattern_mismatch": "has characters that are not allowed",
    "literal_error": "is not one of the choices",
    "finite_number": "is not a finite number",
}
_BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "on", "yes", "y", "1"), "true"),
    **dict.fromkeys(("false", "off", "no", "n", "0"), "false"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the values of a configuration were written."""

    file: str | None
    lines: Mapping[Location, int]
    flags: Set[str]  # dotted names

    def wrote(self, location: Location) -> bool:
        """Whether the user gave this value."""
        return location in self.lines or ".".join(map(str, location)) in self.flags

    def place(self, location: Location) -> str:
        """The start of a message: ``run.yaml:3: loss.tau``, or ``--loss.tau``."""
        name = ".".join(str(part) for part in location[:2])
        name += "".join(f"[{index}]" for index in location[2:])
        if self.file is None or ".".join(str(part) for part in location[:2]) in self.flags:
            return f"--{name}" if name else "flags"
        known = (self.lines.get(location[:end]) for end in range(len(location), 0, -1))
        line = next((found for found in known if found is not None), None)
        place = self.file if line is None else f"{self.file}:{line}"
        return f"{place}: {name}" if name else place


def explain(error: ValidationError, origin: Origin) -> list[str]:
    """One line for each thing that is wrong."""
    return [_line(details, origin) for details in error.errors(include_url=False)]


def _line(details: ErrorDetails, origin: Origin) -> str:
    location, value = details["loc"], details["input"]
    name = ".".join(str(part) for part in location[:2])
    key = keys_by_name().get(name)
    if details["type"] == "value_error":
        message = str(details["ctx"]["error"])
        return f"{origin.place(_named_in(message, location, origin))}: {message}"
    place = origin.place(location)
    if details["type"] == "extra_forbidden":
        return f"{place}: unknown key. {advise(name)}"
    if key is None:
        return f"{place}: must be a section with keys below it (got {show(value)}). " + (
            f"Write the value as `{SHORTHANDS[name]}`"
            if isinstance(value, str) and name in SHORTHANDS
            else "Give it keys, or remove the line"
        )
    allowed = key.bound or key.type
    if details["type"] == "missing":
        return f"{place}: is missing and has no default (allowed {allowed}). Add it"
    what = _OUT_OF_BOUND.get(details["type"], f"must be {key.type}")
    if len(location) > 2:  # an item of a list
        if details["type"] == "string_too_short":
            return f"{place}: is empty. Write text, or remove the item"
        return f"{place}: must be text (got {show(value)}). Put it in quotes"
    return f"{place}: {what} (got {show(value)}; allowed {allowed}). {_fix(key, value)}"


def _fix(key: Key, value: Any) -> str:
    otherwise = "" if key.default is None else f", or remove it for the default {key.default}"
    if value is None:
        return f"Give a value{otherwise}"
    if key.kind == "string" and isinstance(value, bool | int | float):
        return "Put it in quotes"
    if key.kind == "boolean" and str(value).lower() in _BOOLEAN_WORDS:
        return f"Write {_BOOLEAN_WORDS[str(value).lower()]}"
    if key.kind in ("integer", "number") and (number := _number(key, value)) is not None:
        return f"Write {number}" + (" (no quotes or underscores)" if isinstance(value, str) else "")
    if near := get_close_matches(str(value).lower(), key.choices, n=1):
        return f"Did you mean {near[0]}?"
    if key.kind == "array":
        return f"Write a list, as in [a, b]{otherwise}"
    return f"Give an allowed value{otherwise}"


def _number(key: Key, value: Any) -> int | float | None:
    """The number that was meant by "0.3", 1_000 or 20.0, if the value itself has another type."""
    if isinstance(value, bool | int) or (isinstance(value, float) and key.kind == "number"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if number.is_integer() and (key.kind == "integer" or "." not in str(value)):
        return int(number)
    return number if key.kind == "number" and math.isfinite(number) else None


def _named_in(message: str, location: Location, origin: Origin) -> Location:
    """The first key of a message about several keys that the user wrote."""
    for word in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)?", message):
        candidate = (*location, word) if location else tuple(word.split("."))
        if len(candidate) == 2 and origin.wrote(candidate):
            return candidate
    return location


def show(value: Any) -> str:
    """A value as it would be written in YAML, cut to a readable length."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "keys and values"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
