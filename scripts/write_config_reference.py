"""Writes docs/configuration.md from the schema of the configuration."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from real_ray.config import Config
from real_ray.config.flags import Key, describe_keys

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD = """\
# Configuration

<!-- Written by scripts/write_config_reference.py from real_ray/config/. Do not edit. -->

A run is described by a YAML file of sections, and every key is also a flag that overrides the file:
`real-ray train CONFIG --loss.tau 0.3`. `real-ray train --help` prints the keys below. The file of a
finished or running run, with all keys and the flags applied, is `config.yaml` in its run directory.

- Unknown keys, repeated keys, wrong types and values out of bounds are refused, each with its file
  and line or flag, the bound, and what to write instead. `real-ray validate CONFIG` checks a file,
  and the model, data, reward function and resources that it names, and starts nothing.
- The file is read as YAML 1.2: `2e-6` is a number, `on` and `no` are text.
- A flag of a text key takes its value as it is; the value of any other flag is YAML. A flag for a
  boolean may stand alone: `--run.overwrite`. Of a repeated flag the last one counts.
- Required are `model.name_or_path` and `data.train`.
"""


def config_reference() -> str:
    """The text of docs/configuration.md."""
    parts = [_HEAD]
    for section, keys in groupby(describe_keys(), key=lambda key: key.section):
        rows = "\n".join(_row(key) for key in keys)
        parts.append(
            f"## {section}\n\n{_purpose(section)}\n\n"
            f"| key | value | default | meaning |\n|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def _purpose(section: str) -> str:
    """What the section's module says of it: "Section `run`: name and place of the run."."""
    model = Config.model_fields[section].annotation
    assert model is not None
    text = (sys.modules[model.__module__].__doc__ or "").partition(": ")[2].splitlines()[0]
    return text[:1].upper() + text[1:]


def _row(key: Key) -> str:
    value = ", ".join(filter(None, (key.type, key.bound)))
    if key.choices:
        value = " or ".join(f"`{choice}`" for choice in key.choices)
    default = "required" if key.default is None else f"`{key.default}`"
    cells = (f"`{key.name}`", value, default, key.description)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    TARGET.write_text(config_reference(), encoding="utf-8")
