"""From a config to a finished run: placement, actors, driver, and a clean end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.checkpoint_files import newest_complete, read_facts
from actors.cluster import Cluster, address_of, connect, this_machine
from actors.node import LOOPBACK, listen
from actors.resume import Start, find_start
from real_ray.config import Config
from real_ray.config.deepspeed_json import deepspeed_config
from real_ray.data import load_prompts, load_tokenizer
from real_ray.driver import Driver
from real_ray.errors import ResourceError, RunError, first_error
from real_ray.placement import Device, check_fits, plan_placement
from real_ray.report import last_words
from real_ray.rewards import load_reward
from real_ray.run_length import with_num_steps
from real_ray.tracking import RunDirectory, Trackers, check_may_begin
from real_ray.tracking.base import Tracker
from real_ray.tracking.console import ConsoleTracker
from real_ray.tracking.jsonl import JsonlTracker
from real_ray.tracking.status import StatusTracker
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


def check_start(config: Config, train: Sequence[Prompt]) -> str:
    """Where the run would begin, in words; starts and changes nothing.

    Raises:
        UserError: as `launch`, for `checkpoint.resume`.
    """
    start = find_start(config, train)
    if not (start.continues or start.is_finished):
        check_may_begin(config)
    return start.describe(config)


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
    counted = with_num_steps(config, num_prompts=len(train))
    start = find_start(counted, train)
    if start.is_finished:
        console.print(start.describe(counted))
        return 0
    # Uncounted, so that the file can be continued with more epochs.
    with closing(
        RunDirectory(config, continued_after=start.step if start.continues else None)
    ) as run:
        console.print(start.describe(counted))
        return _Job(
            config=counted, start=start, run=run, train=train, evaluation=evaluation, out=console
        ).run_and_report()


@dataclass(kw_only=True)
class _Job:
    """One run, once all input has been checked."""

    config: Config
    start: Start
    run: RunDirectory
    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    out: Console

    def run_and_report(self) -> int:
        """Run to the end; return the exit code."""
        run, num_steps = self.run, self.config.num_steps
        summary = SummaryTracker(step=self.start.step, earlier=run.earlier)
        trackers, status = self._trackers(summary)
        try:
            with closing(trackers):
                stopped_by = self._run_on_cluster(trackers)
        except Exception as error:
            cause = first_error(error) if isinstance(error, ExceptionGroup) else error
            with suppress(RunError):  # a full disk may be what ended the run
                status.end("failed", str(cause))
            self.out.print(
                last_words.of_a_failed_run(
                    run, summary, num_steps=num_steps, checkpoint=newest_complete(run.path)
                )
            )
            if cause is not error:
                raise cause from error
            raise
        except BaseException:  # a signal before there was an event loop to catch it
            with suppress(RunError):
                status.end("stopped")
            raise
        finally:
            model = Path(self.config.model.name_or_path).name
            last_words.draw(run, summary, title=f"{self.config.run.name}: {model}")
        if stopped_by is not None:
            status.end("stopped", stopped_by.name)
            self.out.print(
                last_words.of_a_stopped_run(
                    run,
                    summary,
                    signal=stopped_by.name,
                    num_steps=num_steps,
                    checkpoint=newest_complete(run.path),
                )
            )
            return 128 + stopped_by
        status.end("finished")
        self.out.print(
            last_words.of_a_finished_run(
                run, summary, model=run.model if self.config.checkpoint.save_final else None
            )
        )
        return 0

    def _trackers(self, summary: SummaryTracker) -> tuple[Trackers, StatusTracker]:
        config, start, run = self.config, self.start, self.run
        records = JsonlTracker(
            run, samples=config.tracking.samples, elapsed_s=run.earlier.elapsed_s
        )
        console = ConsoleTracker(
            self.out, num_steps=config.num_steps, num_slots=config.num_slots, step=start.step
        )
        trackers: list[Tracker] = [records, console, summary]
        if config.tracking.wandb != "disabled":
            from real_ray.tracking.wandb import WandbTracker

            trackers.append(WandbTracker(config, run))
        if start.checkpoint is not None:
            records.event("resumed", start.origin)
        status = StatusTracker(
            run,
            num_steps=config.num_steps,
            policy_version=start.step,
            checkpoint=start.checkpoint if start.continues else None,
        )
        return Trackers([*trackers, status]), status

    def _run_on_cluster(self, trackers: Trackers) -> signal.Signals | None:
        config, checkpoint, out = self.config, self.start.checkpoint, self.out
        if checkpoint is not None:
            from actors.universal import needs_conversion, prepare

            if needs_conversion(read_facts(checkpoint), config.learner.num_ranks):
                out.print("converting the checkpoint for another number of ranks ...", style="dim")
            prepare(checkpoint, config.learner.num_ranks)
        address = address_of(config.cluster)
        out.print(f"joining Ray at {address} ..." if address else "starting Ray ...", style="dim")
        with connect(config.cluster, logs=self.run.logs) as cluster:
            # Import ray, which reads its environment then: only after `connect` has set it.
            from actors.buffered_groups import restore
            from actors.fleet import Fleet

            device = _device(config, cluster)
            placement = plan_placement(config, device)
            check_fits(placement, cluster.nodes)

            async def work() -> None:
                fleet = Fleet(config, placement, cluster, device)
                try:
                    out.print(
                        f"starting {config.rollout.num_generators} generator(s), "
                        f"{config.learner.num_ranks} learner rank(s) and "
                        f"{config.reward.num_workers} reward worker(s) on {device} ...",
                        style="dim",
                    )
                    roles = await fleet.start(
                        probe=self.train[0],
                        checkpoint=checkpoint,
                        policy_version=self.start.step,
                    )
                    driver = Driver(
                        config,
                        roles=roles,
                        train=self.train,
                        evaluation=self.evaluation,
                        tracker=trackers,
                        resume=restore(checkpoint) if checkpoint else None,
                    )
                    await driver.run()
                    if config.checkpoint.save_final:
                        await roles.learner.save(str(self.run.model))
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
