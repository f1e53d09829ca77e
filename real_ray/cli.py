"""The command line. Here alone errors become messages and exit codes."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import real_ray
from real_ray.config import Config, load_config
from real_ray.config.flags import describe_keys, split_arguments, split_flags
from real_ray.errors import RunError, UserError, first_error

DEMO_CONFIG = Path(__file__).with_name("demo.yaml")
"""A runnable config of one machine, without a model."""

_AFTER_THE_DEMO = """
try next:
  real-ray demo --rollout.max_staleness 0    the same, synchronously
  real-ray demo --loss.tau 1.0               a softer loss
  real-ray train --help                      every key of a config of your own; README.md has one"""

app = typer.Typer(
    name="real-ray",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Asynchronous reinforcement learning of language models with the REAL loss, on Ray.",
    epilog="--debug, anywhere on the command line, adds the traceback to an error.",
)

# Keys of the config are flags, but not options that typer has to know.
_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}
_FLAGS_USAGE = "[--section.key VALUE]..."
_KEYS_ARE_LISTED = "Every key of the config is also a flag; real-ray train --help lists them."
_ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done; 1: the run failed; 2: bad input; 128 + the number of the signal that stopped it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = [word for word in words if word != "--debug"]
    try:
        app(args, prog_name="real-ray", obj=len(args) < len(words))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def exit_code(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command; print one message for whatever ends it, and return the exit code."""
    try:
        return command()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return 130
    except Exception as error:  # noqa: BLE001 - the last place that can make it a message
        if debug:
            traceback.print_exc()
        cause = first_error(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(cause, UserError | RunError):
            separator = "\n" if "\n" in str(cause) else " "
            typer.echo(f"error:{separator}{cause}", err=True)
            return 2 if isinstance(cause, UserError) else 1
        first_line = (str(cause).strip().splitlines() or [""])[0]
        hint = "" if debug else ". Rerun with --debug for the traceback"
        typer.echo(f"error: {type(cause).__name__}: {first_line}{hint}", err=True)
        return 1


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"real-ray {real_ray.__version__}")
        raise typer.Exit


def _print_help_with_keys(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        _print_keys()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None: ...


@app.command(context_settings=_FLAGS, options_metavar=_FLAGS_USAGE, add_help_option=False)
def train(
    context: typer.Context,
    config: _ConfigFile,
    _help: Annotated[
        bool,
        typer.Option(
            "--help",
            callback=_print_help_with_keys,
            is_eager=True,
            help="Show this message and all keys.",
        ),
    ] = False,
) -> None:
    """Train a model. Every key of the config is also a flag."""

    def command() -> int:
        settings = _load(config, context)
        _check_actors_package()
        from actors.launch import launch

        return launch(settings)

    raise typer.Exit(exit_code(command, debug=context.obj))


@app.command(context_settings=_FLAGS, options_metavar=_FLAGS_USAGE, epilog=_KEYS_ARE_LISTED)
def validate(context: typer.Context, config: _ConfigFile) -> None:
    """Check config, model, data, reward and resources, without starting anything."""

    def command() -> int:
        settings = _load(config, context)
        _check_actors_package()
        from actors.launch import check_cluster, check_start
        from real_ray.validate import validate

        for line in validate(settings, check_start=check_start, check_cluster=check_cluster):
            typer.echo(line)
        typer.echo("ok: nothing was started")
        return 0

    raise typer.Exit(exit_code(command, debug=context.obj))


@app.command(context_settings=_FLAGS, options_metavar=_FLAGS_USAGE, epilog=_KEYS_ARE_LISTED)
def demo(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_NAME",
            help="A model directory or hub name, instead of SmolLM2-135M-Instruct.",
        ),
    ] = None,
) -> None:
    """Teach a small language model to add, on this machine, in a few minutes."""

    def command() -> int:
        overrides = split_flags(context.args)
        if model is not None:
            overrides.append(("model.name_or_path", model))
        if "model.name_or_path" not in dict(overrides):
            # Wrong flags are refused before a model is fetched.
            load_config(DEMO_CONFIG, [*overrides, ("model.name_or_path", "fetched below")])
            from real_ray.demo_model import obtain

            overrides.append(("model.name_or_path", str(obtain())))
        config = load_config(DEMO_CONFIG, overrides)
        _check_actors_package()
        from actors.launch import launch

        code = launch(config)
        if code == 0:
            typer.echo(_AFTER_THE_DEMO)
        return code

    raise typer.Exit(exit_code(command, debug=context.obj))


@app.command()
def export(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint of a run, or the run's directory: its newest one.",
        ),
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to; must not exist yet, or be empty.")
    ],
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="The LoRA adapter alone, not merged into its base model."),
    ] = False,
) -> None:
    """Make a Hugging Face directory of a checkpoint, for transformers, vLLM and others."""

    def command() -> int:
        _check_actors_package()
        from actors.export import export

        done = export(checkpoint, directory, adapter=adapter)
        typer.echo(
            f"{done.directory}: {done.num_tensors} tensors in {done.dtype}, "
            f"policy version {done.policy_version}"
        )
        return 0

    raise typer.Exit(exit_code(command, debug=context.obj))


@app.command()
def status(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The directory of a run, or its name in runs/.")
    ],
) -> None:
    """Show how far a run is, where its groups are, and how to continue it."""

    def command() -> int:
        from rich.console import Console

        from real_ray.report.status import facts, find_run, ledger

        directory, found = find_run(run)
        console = Console(markup=False, highlight=False, soft_wrap=True)
        for line in facts(directory, found):
            console.print(line)
        if found.groups:
            console.print(ledger(found))
        return 0

    raise typer.Exit(exit_code(command, debug=context.obj))


@app.command()
def scale(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The directory of a run, or its name in runs/.")
    ],
    *,
    generators: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many generators the run is to have.")
    ],
) -> None:
    """Change the number of generators of a run that is under way."""

    def command() -> int:
        from real_ray.report.scale import scale_run

        typer.echo(scale_run(run, generators))
        return 0

    raise typer.Exit(exit_code(command, debug=context.obj))


def _seconds(help: str) -> Any:  # noqa: A002
    return typer.Option(metavar="SECONDS", help=help)


@app.command(context_settings=_FLAGS, options_metavar=_FLAGS_USAGE, epilog=_KEYS_ARE_LISTED)
def simulate(
    context: typer.Context,
    config: _ConfigFile,
    *,
    generate: Annotated[
        str | None,
        _seconds("Of one group: constant:4, lognormal:4,0.5 (median, sigma) or pareto:2,1.5."),
    ] = None,
    train: Annotated[str | None, _seconds("Of a step on all learner ranks, same forms.")] = None,
    score: Annotated[str | None, _seconds("Of one group on a reward worker; default 0.")] = None,
    sync: Annotated[str | None, _seconds("Of a weight sync; default 0.")] = None,
    pause: Annotated[
        str | None, _seconds("Pause of the generators at its start; default: all of it.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A run's directory: its timings, where not given here."),
    ] = None,
    failures: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that a generation fails.")
    ] = 0.0,
    one_sided: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that a group has one class only.")
    ] = 0.0,
    groups_per_generator: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Groups that it runs at once; default: its share of the slots; --like: of RUN's.",
        ),
    ] = None,
    generators: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Numbers of generators to compare.")
    ] = None,
    max_staleness: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Bounds of staleness to compare.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to this file too.")
    ] = None,
) -> None:
    """Plan a run: throughput and idle times with given timings. Starts nothing."""

    def command() -> int:
        from real_ray.simulate.command import Options, run

        return run(
            lambda overrides: _load(config, context, overrides),
            Options(
                like=like,
                generate=generate,
                score=score,
                train=train,
                sync=sync,
                pause=pause,
                failures=failures,
                one_sided=one_sided,
                groups_per_generator=groups_per_generator,
                generators=generators,
                max_staleness=max_staleness,
                json=json,
            ),
        )

    raise typer.Exit(exit_code(command, debug=context.obj))


def _load(config_file: str, context: typer.Context, more: Sequence[tuple[str, str]] = ()) -> Config:
    # With flags before CONFIG, typer takes the first flag for it.
    files, overrides = split_arguments([config_file, *context.args])
    if len(files) != 1:
        raise UserError(
            f"give one CONFIG file (got {', '.join(files) or 'none'}), as in "
            f"{context.command_path} CONFIG {_FLAGS_USAGE}"
        )
    return load_config(files[0], [*overrides, *more])


def _check_actors_package() -> None:
    """`actors` is a common name: another module of that name would hide ours.

    Raises:
        UserError: naming the file that would be imported instead.
    """
    ours = Path(__file__).resolve().parents[1] / "actors" / "__init__.py"
    spec = importlib.util.find_spec("actors")
    found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
    if found != ours:
        raise UserError(
            f"the module `actors` is {found or 'missing'}, not real-ray's {ours}. Rename the other "
            "module, or start real-ray where it is not on the Python path"
        )


def _print_keys() -> None:
    from itertools import groupby

    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for section, keys in groupby(describe_keys(), key=lambda key: key.section):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="bold cyan")
        table.add_column()
        for key in keys:
            facts = ", ".join(filter(None, (key.type, key.bound)))
            default = "required" if key.default is None else f"default {key.default}"
            table.add_row(
                f"--{key.name}", Text.assemble(key.description, (f" [{facts}; {default}]", "dim"))
            )
        console.print(Panel(table, title=section, title_align="left", border_style="dim"))
