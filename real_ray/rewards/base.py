"""What a reward function is, and where it is loaded from."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from real_ray.errors import ConfigError, shown
from real_ray.nearest import did_you_mean
from real_ray.rewards import builtin


class RewardFunction(Protocol):
    """Scores all completions of one prompt.

    All arguments are always passed; take those that you do not need as ``**kwargs``::

        def short(completions, **kwargs):
            return [1.0 if len(text) < 100 else 0.0 for text in completions]
    """

    def __call__(
        self,
        completions: Sequence[str],
        *,
        prompt: str,
        answer: str,
        columns: Mapping[str, Any],
    ) -> Sequence[float]:
        """Return one finite number per completion, in their order.

        Args:
            completions: texts of one group, without the tokens that end them.
            prompt: the prompt as the policy saw it, after the chat template.
            answer: of the dataset's answer column.
            columns: all columns of the dataset row.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function with the name that the user gave.

    Example: ``Reward(name="last_number", function=last_number)``
    """

    name: str
    function: RewardFunction


_BUILTIN: dict[str, RewardFunction] = {
    "exact_match": builtin.exact_match,
    "last_number": builtin.last_number,
}


def load_reward(spec: str) -> Reward:
    """Find a built-in reward function by name, or a user's own as ``package.module:function``.

    Modules are found where Python finds them, and in the current directory.

    Raises:
        ConfigError: no such built-in, module or attribute, or not a usable function.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        if spec not in _BUILTIN:
            raise ConfigError(
                f"reward.function: no built-in reward `{spec}`{did_you_mean(spec, _BUILTIN)}; "
                f"built in: {', '.join(_BUILTIN)}. Write your own as package.module:function"
            )
        return Reward(name=spec, function=_BUILTIN[spec])
    if not module_name or not attribute:
        raise ConfigError(f"reward.function: `{spec}` is not of the form package.module:function")
    module = _import(module_name, spec)
    function = getattr(module, attribute, None)
    if function is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"reward.function: `{spec}`: module {module_name} "
            f"({getattr(module, '__file__', None) or 'a namespace package'}) has no "
            f"`{attribute}`{did_you_mean(attribute, public)}"
        )
    if inspect.isclass(function) or not callable(function):
        raise ConfigError(
            f"reward.function: `{spec}` is not a function but {shown(function)}; give a "
            "function or a callable object"
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"reward.function: `{spec}` is an async function, which is not supported; make it a "
            "plain one"
        )
    return Reward(name=spec, function=function)


def _import(module_name: str, spec: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        # At the end: a file here must not shadow a library that is imported later.
        sys.path.append(directory)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises at import
        raise ConfigError(
            f"reward.function: `{spec}`: module {module_name} cannot be imported: "
            f"{type(error).__name__}: {error} (searched sys.path and {directory})"
        ) from error
