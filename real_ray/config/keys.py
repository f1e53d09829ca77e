"""What is known of each configuration key, read from the pydantic schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from real_ray.config.schema import Config

Kind = Literal["integer", "number", "boolean", "string", "array"]

_TYPE_WORDS: Mapping[Kind, str] = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "array": "a list of texts",
}
_PATTERN_WORDS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits and . _ -, starting with a letter or digit"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key.

    Example: ``Key(name="loss.tau", kind="number", nullable=False, default="0.5",
    bound="> 0, <= 100", choices=(), description="Temperature of the classification.")``
    """

    name: str  # "section.field"
    kind: Kind
    nullable: bool
    default: str | None  # as YAML; None: the key is required
    bound: str  # in words; "": none
    choices: tuple[str, ...]
    description: str

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def field(self) -> str:
        return self.name.partition(".")[2]

    @property
    def type(self) -> str:
        """The type in words."""
        return _TYPE_WORDS[self.kind] + (" or null" if self.nullable else "")


@cache
def describe_keys() -> tuple[Key, ...]:
    """Every key, in the order of the schema."""
    schema = Config.model_json_schema()
    found = []
    for section, reference in schema["properties"].items():
        model = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        required = model.get("required", [])
        for field, value in model["properties"].items():
            found.append(_key(f"{section}.{field}", value, required=field in required))
    return tuple(found)


@cache
def keys_by_name() -> Mapping[str, Key]:
    """Every key by its dotted name."""
    return {key.name: key for key in describe_keys()}


@cache
def sections() -> tuple[str, ...]:
    """The sections, in the order of the schema."""
    return tuple(Config.model_fields)


def _key(name: str, schema: dict[str, Any], *, required: bool) -> Key:
    variants = schema.get("anyOf", [schema])
    value = next(variant for variant in variants if variant["type"] != "null")
    choices = tuple(value.get("enum", [value["const"]] if "const" in value else []))
    default = schema.get("default")
    return Key(
        name=name,
        kind=value["type"],
        nullable=len(variants) > 1,
        default=None if required else default if isinstance(default, str) else json.dumps(default),
        bound=_bound(value, choices),
        choices=choices,
        description=schema.get("description", ""),
    )


def _bound(schema: Mapping[str, Any], choices: tuple[str, ...]) -> str:
    if choices:
        return f"one of {', '.join(choices)}" if len(choices) > 1 else f"only {choices[0]}"
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    words = [f"{sign} {schema[name]}" for name, sign in signs.items() if name in schema]
    if "pattern" in schema:
        words.append(_PATTERN_WORDS.get(schema["pattern"], f"matching {schema['pattern']}"))
    elif schema.get("minLength") or schema.get("minItems"):
        words.append("not empty")
    if "maxLength" in schema:
        words.append(f"at most {schema['maxLength']} characters")
    return ", ".join(words)
