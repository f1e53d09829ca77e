"""A run config from a YAML file and command-line flags, and back to YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from real_ray.config.hints import advise
from real_ray.config.keys import Key, keys_by_name, sections
from real_ray.config.problems import Origin, explain
from real_ray.config.schema import Config
from real_ray.config.yaml_file import Document, Dumper, parse_value, read_yaml
from real_ray.errors import ConfigError

Overrides = Mapping[str, str] | Sequence[tuple[str, str]]


def load_config(path: str | Path | None, overrides: Overrides = ()) -> Config:
    """Read a YAML file, apply flags over it, and check the result.

    Args:
        path: the file; None: flags only.
        overrides: dotted key and text, as in ``{"loss.tau": "0.3"}``; of a repeated key the last
            counts. The text is YAML, except for keys that hold text: they take it as it is.

    Raises:
        ConfigError: with one line for each problem, each naming its place (file and line, or
            flag), key, value, bound and fix.
    """
    document = Document() if path is None else read_yaml(Path(path))
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides
    applied, problems = _apply(pairs, document.values)
    problems = [*document.problems, *problems]
    for section in sections():  # so that the keys missing in an absent section have their names
        document.values.setdefault(section, {})
    origin = Origin(
        file=None if path is None else str(path),
        lines=document.lines,
        flags=applied,
    )
    try:
        config = Config.model_validate(document.values)
    except ValidationError as error:
        problems += explain(error, origin)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def dump_config(config: Config) -> str:
    """All keys with their values as YAML, in the order of the schema, for `load_config`."""
    return yaml.dump(config.model_dump(), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _apply(pairs: Iterable[tuple[str, str]], values: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Write flags over the values of the file; return their names, and what is wrong with them."""
    applied, problems = set(), []
    for name, text in pairs:
        key = keys_by_name().get(name)
        if key is None:
            problems.append(f"--{name}: unknown key. {advise(name)}")
            continue
        try:
            value = _parse(key, text)
        except ConfigError as error:
            problems.append(str(error))
            continue
        section = values.setdefault(key.section, {})
        if isinstance(section, dict):  # else the section itself is reported
            section[key.field] = value
            applied.add(name)
    return applied, problems


def _parse(key: Key, text: str) -> Any:
    if key.kind == "string":
        return None if key.nullable and text in ("null", "~") else text
    return parse_value(text, flag=f"--{key.name}", as_text=key.kind == "array")
