"""From a config to a finished run: placement, actors, driver, and a clean end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.cluster import Cluster, address_of, connect, this_machine
from actors.node import LOOPBACK, listen
from real_ray.config import Config
from real_ray.config.deepspeed_json import deepspeed_config
from real_ray.data import load_prompts, load_tokenizer
from real_ray.driver import Driver
from real_ray.errors import ResourceError, first_error
from real_ray.placement import Device, check_fits, plan_placement
from real_ray.report import last_words
from real_ray.rewards import load_reward
from real_ray.tracking import RunDirectory, Trackers
from real_ray.tracking.base import Tracker
from real_ray.tracking.console import ConsoleTracker
from real_ray.tracking.jsonl import JsonlTracker
from real_ray.tracking.summary import SummaryTracker
from real_ray.types import Prompt


def check_cluster(config: Config) -> str | None:
    """What the cluster of `cluster.address` has, if one is up; starts nothing.

    Raises:
        ResourceError: the run does not fit on it or on this machine, nothing answers at a given
            address, or a port is in use.
    """
    if address_of(config.cluster) is None:
        _check_this_machine(config)
        return None
    with connect(config.cluster, logs=None) as cluster:
        device = _device(config, cluster)
        check_fits(plan_placement(config, device), cluster.nodes)
        total = {name: sum(n.get(name, 0) for n in cluster.nodes) for name in ("CPU", "GPU")}
        return f"{len(cluster.nodes)} node(s), {total['CPU']:g} CPUs, {total['GPU']:g} GPUs"


def launch(config: Config) -> int:
    """Run the whole job and print how it went.

    Returns:
        The exit code: 0, or 128 + the signal that ended the run.

    Raises:
        UserError: bad input, before anything was started.
        RunError: the run could not go on; nothing of it is left running.
    """
    console = Console(markup=False, highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(config.model)
    train = load_prompts(config.data, tokenizer, split="train", seed=config.run.seed)
    evaluation = (
        load_prompts(config.data, tokenizer, split="eval", seed=config.run.seed)
        if config.data.eval
        else []
    )
    load_reward(config.reward.function)
    deepspeed_config(config.learner)
    if address_of(config.cluster) is None:
        _check_this_machine(config)
    run = RunDirectory(config)
    summary = SummaryTracker()
    trackers = _trackers(config, run, console, summary)
    console.print(f"run {config.run.name} in {run.path}")
    num_steps = config.run.num_steps
    try:
        with closing(trackers):
            stopped_by = _run_on_cluster(
                config, run, train=train, evaluation=evaluation, trackers=trackers, console=console
            )
    except Exception as error:
        console.print(last_words.of_a_failed_run(run, summary, num_steps=num_steps))
        if isinstance(error, ExceptionGroup):
            raise first_error(error) from error
        raise
    finally:
        last_words.draw(
            run, summary, title=f"{config.run.name}: {Path(config.model.name_or_path).name}"
        )
    if stopped_by is not None:
        console.print(
            last_words.of_a_stopped_run(run, summary, signal=stopped_by.name, num_steps=num_steps)
        )
        return 128 + stopped_by
    model = run.model if config.checkpoint.save_final else None
    console.print(last_words.of_a_finished_run(run, summary, model=model))
    return 0


def _run_on_cluster(
    config: Config,
    run: RunDirectory,
    *,
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt],
    trackers: Trackers,
    console: Console,
) -> signal.Signals | None:
    address = address_of(config.cluster)
    console.print(f"joining Ray at {address} ..." if address else "starting Ray ...", style="dim")
    with connect(config.cluster, logs=run.logs) as cluster:
        # Imports ray, which reads its environment then: only after `connect` has set it.
        from actors.fleet import Fleet

        device = _device(config, cluster)
        placement = plan_placement(config, device)
        check_fits(placement, cluster.nodes)

        async def work() -> None:
            fleet = Fleet(config, placement, cluster, device)
            try:
                console.print(
                    f"starting {config.rollout.num_generators} generator(s), "
                    f"{config.learner.num_ranks} learner rank(s) and {config.reward.num_workers} "
                    f"reward worker(s) on {device} ...",
                    style="dim",
                )
                roles = await fleet.start(probe=train[0])
                driver = Driver(
                    config, roles=roles, train=train, evaluation=evaluation, tracker=trackers
                )
                await driver.run()
                if config.checkpoint.save_final:
                    await roles.learner.save(str(run.model))
            finally:
                await fleet.stop()

        return _run_until_signal(work)


def _check_this_machine(config: Config) -> None:
    """Refuse at once what a Ray on this machine could never place, and ports that are taken."""
    machine = this_machine(config.cluster)
    try:
        check_fits(plan_placement(config, "cpu"), [machine])  # GPUs: Ray counts
    except ResourceError as error:
        raise ResourceError(
            f"Ray on this machine (cluster.num_cpus {machine['CPU']:g}): {error}"
        ) from error
    for key, port in (("learner.port", config.learner.port), ("sync.port", config.sync.port)):
        try:
            if port:
                listen(LOOPBACK, port).close()
        except ResourceError as error:
            raise ResourceError(f"{key}: {error}") from error


def _run_until_signal(work: Callable[[], Coroutine[Any, Any, None]]) -> signal.Signals | None:
    """Run to the end, or until SIGINT or SIGTERM asks for an orderly one."""
    stopped_by: list[signal.Signals] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work())

        def stop(signum: signal.Signals) -> None:
            stopped_by.append(signum)
            loop.remove_signal_handler(signum)  # the next one ends the process at once
            task.cancel()

        # ray.init has put its own handlers in place by now.
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop, signum)
        try:
            await task
        except asyncio.CancelledError:
            if not stopped_by:
                raise

    asyncio.run(main())
    return stopped_by[0] if stopped_by else None


def _device(config: Config, cluster: Cluster) -> Device:
    if config.cluster.device == "auto":
        return "cuda" if cluster.has_gpus else "cpu"
    return config.cluster.device


def _trackers(
    config: Config, run: RunDirectory, console: Console, summary: SummaryTracker
) -> Trackers:
    trackers: list[Tracker] = [
        JsonlTracker(run, samples=config.tracking.samples),
        ConsoleTracker(console, num_steps=config.run.num_steps, num_slots=config.num_slots),
        summary,
    ]
    if config.tracking.wandb != "disabled":
        from real_ray.tracking.wandb import WandbTracker

        trackers.append(WandbTracker(config, run))
    return Trackers(trackers)
