"""What to write instead of a key that does not exist."""

from __future__ import annotations

from difflib import get_close_matches

from real_ray.config.foreign import FOREIGN, REFUSED, REFUSED_PREFIXES
from real_ray.config.keys import describe_keys, keys_by_name, sections

SHORTHANDS = {
    "model": "model.name_or_path",
    "data": "data.train",
    "reward": "reward.function",
    "loss": "loss.type",
}
"""Sections that people write as one value, and the key that they mean."""


def advise(name: str) -> str:
    """What to write instead of the unknown key ``name`` ("loss.tua", "lr", "trainer.lr")."""
    if name in keys_by_name():  # in a file, where a dotted name is no key
        return "Write `{0}:` and below it, indented, `{2}:`".format(*name.partition("."))
    section, _, field = name.replace("-", "_").lower().rpartition(".")
    if (reason := _refusal(field)) is not None:
        return reason
    if field in FOREIGN:
        key, _, note = FOREIGN[field].partition(" ")
        return f"Use `{key}` {note}".rstrip()
    if not section and field in sections():
        example = SHORTHANDS.get(field) or _in_section(field)[0]
        return f"`{field}` is a section. Name a key of it, as in `{example}`"
    owners = [key.name for key in describe_keys() if key.field == field]
    if owners:
        homes = _either([owner.partition(".")[0] for owner in owners])
        return f"`{field}` belongs to {homes}. Use {_either(owners)}"
    if near := _nearest(section, field):
        return f"Did you mean {_either(near)}?"
    if section in sections():
        return f"The keys of `{section}` are {', '.join(_in_section(section))}"
    return f"The sections are {', '.join(sections())}"


def _refusal(field: str) -> str | None:
    if field in REFUSED:
        return REFUSED[field]
    starts = (start for start in REFUSED_PREFIXES if field.startswith(start))
    return next((REFUSED_PREFIXES[start] for start in starts), None)


def _nearest(section: str, field: str) -> list[str]:
    pools = [
        {key.field: key.name for key in describe_keys() if key.section == section},
        {key.field: key.name for key in describe_keys()},
    ]
    if not section:
        pools[0] = {name: name for name in sections()}
    for pool in pools:
        if near := get_close_matches(field, pool, n=2, cutoff=0.65):
            return [pool[name] for name in near]
    return []


def _in_section(section: str) -> list[str]:
    return [key.name for key in describe_keys() if key.section == section]


def _either(names: list[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)
