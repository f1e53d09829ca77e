"""Job: a run from its first to its last word."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from actors.checkpoint_files import newest_complete, read_facts
from actors.cluster import Cluster, address_of, connect
from actors.restarts import Restarts
from actors.resume import Start
from actors.stopping import StopOnSignal
from real_ray.activity import Activity
from real_ray.config import Config
from real_ray.driver import Driver
from real_ray.errors import LearnerLostError, RealRayError, RunError, UserError, first_error
from real_ray.placement import Device, plan_placement
from real_ray.report import last_words
from real_ray.tracking import RunDirectory, Trackers
from real_ray.tracking.base import Tracker
from real_ray.tracking.console import ConsoleTracker
from real_ray.tracking.jsonl import JsonlTracker
from real_ray.tracking.scaling import follow_requests
from real_ray.tracking.status import StatusTracker
from real_ray.tracking.summary import SummaryTracker
from real_ray.types import Prompt
from real_ray.watchdog import Watchdog

if TYPE_CHECKING:
    from actors.fleet import Fleet


@dataclass(kw_only=True)
class Job:
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
            from actors.fleet import Fleet
            from actors.preflight import check_capacity, check_versions
            from actors.stacks import hint, stacks_on_signal

            if not cluster.is_local:
                check_versions(timeout_s=config.cluster.start_timeout_s)
            device = device_of(config, cluster)
            placement = plan_placement(config, device)
            check_capacity(
                placement,
                cluster.nodes,
                autoscaler=config.cluster.autoscaler,
                tell=partial(trackers.event, "waiting for resources"),
            )
            out.print(
                f"starting {config.rollout.num_wanted} generator(s), "
                f"{config.learner.num_ranks} learner rank(s) and "
                f"{config.reward.num_workers} reward worker(s) on {device} ...",
                style="dim",
            )
            stop = StopOnSignal(grace_s=config.run.stop_grace_s, out=out)
            is_finished = False
            activity = Activity()
            watchdog = Watchdog(activity, config.run, tracker=trackers, hint=hint())

            async def work() -> None:
                nonlocal is_finished
                fleet = Fleet(
                    config, placement, cluster, device, tracker=trackers, activity=activity
                )
                try:
                    with stacks_on_signal(table=watchdog.table, tell=out.print):
                        async with asyncio.TaskGroup() as tasks:
                            watching = tasks.create_task(watchdog.run(), name="watchdog")
                            is_finished = await self._train(fleet, trackers, activity, stop, tasks)
                            watching.cancel()
                except* RealRayError as errors:
                    raise first_error(errors) from errors
                finally:
                    await fleet.stop()

            stopped_by = stop.run(work)
            return None if is_finished else stopped_by

    async def _train(
        self,
        fleet: Fleet,
        trackers: Trackers,
        activity: Activity,
        stop: StopOnSignal,
        tasks: asyncio.TaskGroup,
    ) -> bool:
        """Drive the run to its end; when the learner is lost, again from the newest checkpoint.

        Returns:
            False: it was stopped before.
        """
        from actors.buffered_groups import restore

        config, checkpoint, step = self.config, self.start.checkpoint, self.start.step
        restarts = Restarts(config.learner.max_restarts)
        roles = await fleet.start(probe=self.train[0], checkpoint=checkpoint, policy_version=step)
        scaling = tasks.create_task(
            follow_requests(self.run.path, fleet.pool, trackers), name="scaling"
        )
        try:
            while True:
                driver = Driver(
                    config,
                    roles=roles,
                    train=self.train,
                    evaluation=self.evaluation,
                    tracker=trackers,
                    resume=restore(checkpoint) if checkpoint else None,
                    activity=activity,
                )
                try:
                    with stop.of(driver):
                        is_finished = await driver.run()
                        if is_finished and config.checkpoint.save_final:
                            await roles.learner.save(str(self.run.model))
                    return is_finished
                except LearnerLostError as error:
                    lost: RealRayError = error
                while True:
                    if stop.is_asked:  # what is left of the learner is its newest checkpoint
                        trackers.event("learner lost", f"{lost}; the run was stopping")
                        return False
                    restarts.count(lost, reached=driver.policy_version)
                    checkpoint = newest_complete(self.run.path) or self.start.checkpoint
                    step = read_facts(checkpoint).policy_version if checkpoint else 0
                    trackers.rolled_back(step)
                    trackers.event(
                        "learner lost",
                        f"{lost}; starting it again from "
                        + (f"step {step} ({checkpoint})" if checkpoint else "the beginning")
                        + f" ({restarts.in_a_row} of at most {restarts.most})",
                    )
                    try:
                        roles = await fleet.restart_learner(
                            checkpoint=checkpoint, policy_version=step
                        )
                        break
                    except (RunError, UserError) as error:
                        lost = error
                trackers.event("learner healed", f"it goes on from step {step}")
        finally:
            scaling.cancel()


def device_of(config: Config, cluster: Cluster) -> Device:
    """Where the models of a run are."""
    if config.cluster.device == "auto":
        return "cuda" if cluster.has_gpus else "cpu"
    return config.cluster.device
