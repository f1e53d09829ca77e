"""What `real-ray simulate` does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from real_ray.config import Config
from real_ray.config.keys import keys_by_name
from real_ray.errors import ConfigError
from real_ray.simulate.distributions import constant, parse_distribution
from real_ray.simulate.plan import PlanResult, simulate
from real_ray.simulate.report import limit, plan_name, print_results
from real_ray.simulate.timings import Timings, timings_of_run

_AXES = {"--generators": "rollout.num_generators", "--max-staleness": "rollout.max_staleness"}
"""Options with several values, each a plan of its own, and their keys."""

LoadConfig = Callable[[Sequence[tuple[str, str]]], Config]
"""The user's config with further overrides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command, None where not given."""

    like: Path | None
    generate: str | None
    score: str | None
    train: str | None
    sync: str | None
    pause: str | None
    failures: float
    one_sided: float
    groups_per_generator: int | None
    generators: str | None
    max_staleness: str | None
    json: Path | None

    @property
    def axes(self) -> dict[str, str]:
        """The options that name several plans, and their values."""
        values = {"--generators": self.generators, "--max-staleness": self.max_staleness}
        return {option: text for option, text in values.items() if text is not None}


def run(load: LoadConfig, options: Options) -> int:
    """Simulate each plan and print what came out.

    Raises:
        ConfigError: an option or the config is no plan.
        RunError: a run like this would fail.
    """
    timings = _timings(load(()), options)
    plans = [_plan(load, overrides) for overrides in _overrides(options)]
    if options.json is not None:
        _check_writable(options.json)  # before what may take minutes
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(_describe(timings), style="dim", soft_wrap=True)
    results = [_simulate(plan, timings, console) for plan in plans]
    print_results(results, console)
    if options.json is not None:
        options.json.write_text(_as_json(timings, results), encoding="utf-8")
    return 0


def _timings(config: Config, options: Options) -> Timings:
    given = {
        name: parse_distribution(text, option=f"--{name}")
        for name in ("generate", "score", "train", "sync", "pause")
        if (text := getattr(options, name)) is not None
    }
    if options.axes and options.groups_per_generator is None:
        raise ConfigError(
            f"{' and '.join(options.axes)}: give --groups-per-generator too, which is the same in "
            "all plans: the groups that one generator runs at once in the time of --generate"
        )
    if "pause" in given and "sync" not in given and options.like is None:
        raise ConfigError(
            f"--pause {options.pause}: is the first part of a weight sync, which takes 0 s unless "
            "--sync is given. Give --sync too"
        )
    if options.like is not None:
        timings = timings_of_run(options.like)
    else:
        missing = [f"--{name}" for name in ("generate", "train") if name not in given]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)}: give the seconds, as in lognormal:4,0.5, or --like RUN "
                "with the directory of a run to take the timings from"
            )
        timings = Timings(
            generate=given["generate"],
            score=given.get("score", constant(0)),
            train=given["train"],
            sync=(sync := given.get("sync", constant(0))),
            pause=given.get("pause", sync),
            groups_per_generator=-(-config.num_slots // config.rollout.num_generators),
        )
    changes: dict[str, Any] = {**given, "failures": options.failures}
    timings = dataclasses.replace(
        timings,
        **changes,
        one_sided=options.one_sided,
        groups_per_generator=options.groups_per_generator or timings.groups_per_generator,
    )
    if timings.pause.mean > timings.sync.mean:
        raise ConfigError(
            f"--pause: is the first part of a weight sync, but takes {timings.pause.mean:.3g} s "
            f"and that {timings.sync.mean:.3g} s on average. Give a shorter --pause, or a longer "
            "--sync"
        )
    return timings


def _overrides(options: Options) -> list[list[tuple[str, str]]]:
    """Of each plan: every number of generators with every bound of staleness."""
    axes = [
        [(_AXES[option], _whole_number(option, item)) for item in text.split(",")]
        for option, text in options.axes.items()
    ]
    return [list(pairs) for pairs in product(*axes)]


def _whole_number(option: str, item: str) -> str:
    try:
        int(item)
    except ValueError:
        raise ConfigError(
            f"{option}: {item!r} is no whole number (allowed {keys_by_name()[_AXES[option]].bound})"
            ". Write numbers with commas between them, as in 1,2,4"
        ) from None
    return item.strip()


def _plan(load: LoadConfig, overrides: Sequence[tuple[str, str]]) -> Config:
    try:
        config = load(overrides)
    except ConfigError as error:
        # Without these overrides it can be loaded, as `_timings` did: name what the user typed.
        message = str(error)
        for option, key in _AXES.items():
            message = message.replace(f"--{key}", option)
        raise ConfigError(message) from error
    if config.run.num_steps is None:
        raise ConfigError(
            "run.num_steps: the config leaves it to its data, which a simulation does not read. "
            "Give --run.num_steps"
        )
    # Prompts are made up, and never run out.
    return config.model_copy(update={"run": config.run.model_copy(update={"num_epochs": None})})


def _simulate(config: Config, timings: Timings, console: Console) -> PlanResult:
    plan = plan_name(config.rollout.num_generators, config.rollout.max_staleness)
    with console.status(plan) as status:  # shows nothing where there is no terminal
        return simulate(
            config,
            timings,
            progress=lambda step: status.update(f"{plan}: step {step}/{config.num_steps}"),
        )


def _describe(timings: Timings) -> str:
    parts = [
        f"{name} {(its := getattr(timings, name)).text} (mean {its.mean:.3g} s)"
        for name in ("generate", "score", "train", "sync", "pause")
    ]
    return (
        f"{', '.join(parts)}; groups at once on a generator {timings.groups_per_generator}; "
        f"failures {timings.failures:g}, one-sided {timings.one_sided:g}"
    )


def _as_json(timings: Timings, results: Sequence[PlanResult]) -> str:
    assumed = {
        field.name: getattr(value := getattr(timings, field.name), "text", value)
        for field in dataclasses.fields(timings)
    }
    plans = [dataclasses.asdict(result) | {"limit": limit(result).sentence} for result in results]
    return json.dumps({"timings": assumed, "plans": plans}, indent=1) + "\n"


def _check_writable(path: Path) -> None:
    """A new file is removed again, as the simulation may fail."""
    try:
        try:
            path.open("x").close()
        except FileExistsError:
            path.open("a").close()
        else:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from error
