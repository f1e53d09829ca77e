"""Every configuration key as a command-line flag: ``--section.key value``."""

from __future__ import annotations

from collections.abc import Sequence

from real_ray.config.hints import advise
from real_ray.config.keys import Key, describe_keys, keys_by_name
from real_ray.errors import ConfigError

__all__ = ["Key", "describe_keys", "split_arguments", "split_flags"]

_BOOLEAN_WORDS = frozenset({"true", "false", "on", "off", "yes", "no", "y", "n", "1", "0"})


def split_flags(args: Sequence[str]) -> list[tuple[str, str]]:
    """Split ``["--loss.tau", "0.3"]`` into ``[("loss.tau", "0.3")]``.

    ``--section.key=value`` works too, and a boolean flag without a value means true.

    Raises:
        ConfigError: one line for each unknown flag, missing value and leftover argument.
    """
    positionals, flags = split_arguments(args)
    if positionals:
        raise ConfigError(
            "\n".join(
                f"{word}: unexpected argument. Write flags as --section.key VALUE"
                for word in positionals
            )
        )
    return flags


def split_arguments(args: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Like `split_flags`, and returns the arguments that are no flags first.

    Raises:
        ConfigError: one line for each unknown flag and missing value.
    """
    positionals: list[str] = []
    flags: list[tuple[str, str]] = []
    problems: list[str] = []
    rest = list(reversed(args))
    while rest:
        word = rest.pop()
        if not word.startswith("--"):
            positionals.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        key = keys_by_name().get(name)
        if not equals and rest and _is_value(rest[-1], key):
            equals, value = "=", rest.pop()
        if key is None:
            problems.append(f"--{name}: unknown flag. {advise(name)}")
        elif not equals and key.kind != "boolean":
            problems.append(
                f"--{name}: needs a value: {key.type}. Write --{name}=VALUE if it starts with --"
            )
        else:
            flags.append((name, value if equals else "true"))
    if problems:
        raise ConfigError("\n".join(problems))
    return positionals, flags


def _is_value(word: str, key: Key | None) -> bool:
    """Whether ``word`` is the value of the flag before it (a bare boolean has none)."""
    if key is not None and key.kind == "boolean":
        return word.lower() in _BOOLEAN_WORDS
    return not word.startswith("--")
