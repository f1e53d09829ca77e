"""In which settings one config differs from another."""

from __future__ import annotations

from collections.abc import Iterable

from real_ray.config.keys import Key, describe_keys
from real_ray.config.schema import Config

# What comes out of a run depends on these; the rest is where, how long and how well watched it is.
_OF_THE_RESULT = ("model", "data", "rollout", "reward", "loss", "learner")


def changed_settings(before: Config, after: Config) -> list[str]:
    """What the result of a run depends on and is different now, as in ``loss.tau 0.5 -> 0.3``."""
    return [
        f"{key.name} {_value(before, key)} -> {_value(after, key)}"
        for key in _keys()
        if _value(before, key) != _value(after, key)
    ]


def _keys() -> Iterable[Key]:
    return (k for k in describe_keys() if k.section in _OF_THE_RESULT or k.name == "run.seed")


def _value(config: Config, key: Key) -> object:
    value = getattr(getattr(config, key.section), key.field)
    return "null" if value is None else value
