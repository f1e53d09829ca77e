"""The asynchronous REAL step.

::

    data -> admit -> generate -> score -> GroupBuffer -> take -> train -> broadcast -> release
            needs a slot                                 the oldest            frees the slots
            _admit_groups    _roll_out (a task a group)  _train_steps

Two loops, one task a group and now and then an evaluation run at once:

==================  =============================  ====================================
who                 waits for                      is woken by
==================  =============================  ====================================
``_admit_groups``   a free slot                    ``release`` after a sync, ``drop``
``_roll_out``       a generator, a reward worker   their replies (each has a deadline)
``_train_steps``    the oldest groups to be ready  ``push``, ``drop``, ``end``, ``stop``
``_train_steps``    the learner, the broadcaster   their replies (each has a deadline)
``_train_steps``    the evaluation of the weights  its end: only then they are replaced
``_wind_up``        the groups under way           their end, or the time that ``stop`` gives
==================  =============================  ====================================

The driver moves tickets: metadata and references. Token arrays go from actor to actor. Each group
that is drawn is in the `Ledger` until it has left the pipeline, and the two are compared after
each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from real_ray.activity import Activity
from real_ray.buffer import GroupBuffer, GroupState
from real_ray.checkpoint import BufferedGroup, DriverState, SavedGroups, check_fits_data
from real_ray.config import Config
from real_ray.data import Draw, PromptCursor
from real_ray.errors import (
    GenerationError,
    GeneratorsLostError,
    RealRayError,
    RewardError,
    RunError,
    first_error,
)
from real_ray.evaluation import Evaluator
from real_ray.filtering import is_two_sided
from real_ray.ledger import Ledger, Outcome
from real_ray.metrics import StepTimes, step_metrics
from real_ray.roles import Roles
from real_ray.rollout import Rollouts
from real_ray.tracking import Tracker
from real_ray.types import Prompt, RolloutTicket, Sampling, TrainResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    grace_s: float
    error: RunError | None


class Driver:
    """Directs one run from the first prompt to the last step.

    Example: ``await Driver(config, roles=roles, train=train, evaluation=[], tracker=t).run()``

    Args:
        config: with `run.num_steps` counted (`real_ray.num_steps`).
        resume: of the checkpoint that the learner was loaded from, with references to the buffered
            groups; None: a new run.
        activity: where the driver notes what it does, for the watchdog.

    Raises:
        CheckpointError: ``resume`` belongs to other prompts, or to other steps in their epochs.
    """

    def __init__(
        self,
        config: Config,
        *,
        roles: Roles,
        train: Sequence[Prompt],
        evaluation: Sequence[Prompt],
        tracker: Tracker,
        resume: DriverState | None = None,
        activity: Activity | None = None,
    ) -> None:
        self._config = config
        self._roles = roles
        self._tracker = tracker
        self._rollouts = Rollouts(config, roles=roles, tracker=tracker)
        self._evaluator = Evaluator(config, evaluation, rollouts=self._rollouts, tracker=tracker)
        self.policy_version = resume.policy_version if resume else 0  # of the last step
        self._ledger = Ledger(resume.ledger if resume else None)
        self._cursor = PromptCursor(
            train,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            num_epochs=config.num_epochs,
            skip=self._ledger.is_closed,
        )
        self._fingerprint = self._cursor.fingerprint()
        if resume:
            check_fits_data(resume, config, prompts=self._fingerprint)
        groups_per_step = config.learner.prompts_per_step
        times = config.rollout.max_resample_times
        self._max_resampled = max(1, round(times * groups_per_step))
        self._buffer = GroupBuffer(
            num_slots=config.num_slots,
            groups_per_step=groups_per_step,
            num_groups=max(0, config.num_steps - self.policy_version) * groups_per_step,
            num_generations=config.rollout.num_generations,
            max_staleness=config.rollout.max_staleness,
            keeps=self._teaches if config.rollout.dynamic_sampling else None,
            max_resampled=self._max_resampled,
            num_resampled=resume.num_resampled if resume else 0,
        )
        self._sampling = Sampling(
            n=config.rollout.num_generations,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_completion_length,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop=tuple(config.rollout.stop),
        )
        self._saved_groups = SavedGroups(
            resume,
            config,
            sampling=self._sampling,
            tell=partial(tracker.event, "buffered group drawn again"),
        )
        self._failures_in_a_row = 0
        self._activity = activity or Activity()
        self._rolling_out: set[asyncio.Task[None]] = set()
        self._stop: _Stop | None = None
        self._saved_version: int | None = None

    async def run(self) -> bool:
        """Train until `run.num_steps` or the end of the data, evaluating when it is due.

        Returns:
            False: it was stopped before.

        Raises:
            RunError: the run cannot go on. All tasks of the driver have ended by then.
            LearnerLostError: it can, with another driver from the newest checkpoint.
        """
        try:
            await self._roles.broadcaster.broadcast(policy_version=self.policy_version)
            async with asyncio.TaskGroup() as tasks:
                watching = [
                    tasks.create_task(self._roles.broadcaster.bring_in(), name="newcomers"),
                    tasks.create_task(self._watch_generators(), name="generators"),
                ]
                if self._evaluator.is_due(self.policy_version) and self._stop is None:
                    self._evaluator.start(self.policy_version, tasks)
                admission = tasks.create_task(self._admit_groups(tasks), name="admission")
                is_finished = await self._train_steps(tasks)
                admission.cancel()
                if not is_finished:
                    await self._wind_up()
                for task in watching:
                    task.cancel()
        except* RealRayError as errors:
            raise first_error(errors) from errors
        if not is_finished and self._stop and self._stop.error:
            raise self._stop.error
        return is_finished

    def stop(self, *, grace_s: float, error: RunError | None = None) -> None:
        """End after the step under way, with a checkpoint.

        Args:
            grace_s: time for groups under way after that; the others are drawn again on resume.
            error: why; `run` raises it in the end.
        """
        if self._stop is None:
            self._stop = _Stop(grace_s=grace_s, error=error)
            self._buffer.stop()
            self._evaluator.cancel()

    async def _admit_groups(self, tasks: asyncio.TaskGroup) -> None:
        for draw in self._cursor:
            await self._buffer.slot()
            self._ledger.draw(draw.number, draw.prompt.uid)
            saved = self._saved_groups.take(draw.number, in_step=self._next_step)
            if saved is not None:
                self._account(self._buffer.restore(saved.group, accepted=saved.accepted))
            else:
                self._buffer.admit(draw.prompt.uid)
                task = tasks.create_task(self._roll_out(draw), name=f"roll out {draw.prompt.uid}")
                self._rolling_out.add(task)
                task.add_done_callback(self._rolling_out.discard)
            self._tell_of_the_pipeline()
        self._buffer.end()

    async def _watch_generators(self) -> None:
        try:
            await self._roles.generators.watch()
        except GeneratorsLostError as error:  # the learner is well, and so are complete groups
            self.stop(grace_s=0.0, error=error)

    async def _wind_up(self) -> None:
        """After a stop: let groups under way finish, give the others back, save a checkpoint."""
        assert self._stop is not None
        rolling_out = set(self._rolling_out)
        if rolling_out:
            self._activity.set("driver", f"stops: waits for {len(rolling_out)} groups under way")
            await asyncio.wait(rolling_out, timeout=self._stop.grace_s)
            for task in rolling_out:
                task.cancel()
            await asyncio.wait(rolling_out)
        self._check_ledger()
        if self.policy_version not in (0, self._saved_version):
            await self._save_checkpoint()

    async def _roll_out(self, draw: Draw) -> None:
        rollout, uid = self._config.rollout, draw.prompt.uid
        late_s = rollout.straggler_s
        late = f"group {uid}: not scored {late_s:g} s after its start (rollout.straggler_s)"
        evicts = rollout.straggler == "evict"
        notice = asyncio.get_running_loop().call_later(
            late_s, self._tracker.event, "straggler", f"{late}, {rollout.straggler}"
        )
        try:
            async with asyncio.timeout(late_s if evicts else None) as deadline:
                group = await self._rollouts.sample_and_score(
                    draw.prompt,
                    self._sampling,
                    on_sampled=self._buffer.generated,
                    on_lost=self._buffer.lost,
                )
        except TimeoutError:
            if not deadline.expired():
                raise
            self._drop(uid, Outcome.EVICTED, RunError(late))
            return
        except (GenerationError, RewardError) as error:
            if isinstance(error, RewardError) and self._config.reward.on_error == "stop":
                self.stop(grace_s=0.0, error=error)  # the group is drawn again when the run goes on
                return
            self._drop(uid, Outcome.FAILED, error)
            return
        finally:
            notice.cancel()
        self._failures_in_a_row = 0
        self._account(self._buffer.push(group))
        self._tell_of_the_pipeline()

    def _drop(self, uid: str, outcome: Outcome, error: RunError) -> None:
        """Account for a group that did not come; another prompt takes its place."""
        self._tracker.event(f"group {outcome.value}", str(error))
        self._ledger.close(uid, outcome)
        self._account(self._buffer.drop(uid))
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._config.run.max_consecutive_failures:
            reason = (
                f"{self._failures_in_a_row} groups in a row failed "
                f"(run.max_consecutive_failures); the last one: {error}"
            )
            self.stop(grace_s=0.0, error=RunError(reason))

    @property
    def _next_step(self) -> int:
        """The step that the next group which is admitted will be trained on in."""
        waiting = sum(self._buffer.counts().values())
        return self.policy_version + waiting // self._config.learner.prompts_per_step + 1

    def _account(self, filtered: Sequence[RolloutTicket]) -> None:
        for group in filtered:
            self._ledger.close(group.uid, Outcome.FILTERED)

    async def _train_steps(self, tasks: asyncio.TaskGroup) -> bool:
        """False: there would have been more of them."""
        clock = asyncio.get_running_loop().time
        ended = clock()
        for step in range(self.policy_version + 1, self._config.num_steps + 1):
            times = StepTimes(began=ended, saved=clock())
            self._activity.set("driver", f"waits for the groups of step {step}")
            batch = await self._buffer.take(
                policy_version=self.policy_version, drop_last=self._config.data.drop_last
            )
            if not batch:
                if self._stop is not None:
                    return False
                self._tell_of_the_end()
                break
            times.taken = clock()
            self._activity.set("driver", f"waits for the learner to train step {step}")
            self._activity.set("learner", f"trains step {step}")
            result = await self._roles.learner.train(batch, policy_version=step)
            self._activity.remove("learner")
            times.trained = clock()
            self._activity.set("driver", f"waits for an evaluation before the sync of step {step}")
            await self._evaluator.finish()  # its weights stay in the generators until then
            times.evaluated = clock()
            self._activity.set("driver", f"waits for the weight sync of step {step}")
            sync = await self._roles.broadcaster.broadcast(policy_version=step)
            self._release(batch)
            times.ended = ended = clock()
            self._tell_of_the_step(result, batch)
            self._tracker.step(
                step_metrics(
                    step=step,
                    batch=batch,
                    trained_version=self.policy_version,
                    result=result,
                    sync=sync,
                    ready=self._buffer.counts()[GroupState.READY],
                    left={outcome: self._ledger.count(outcome) for outcome in Outcome},
                    times=times,
                ),
                result.samples,
            )
            self.policy_version = step
            self._check_ledger()
            if self._evaluator.is_due(step) and self._stop is None:
                self._evaluator.start(step, tasks)
            every = self._config.checkpoint.save_steps
            if every is not None and step % every == 0:
                await self._save_checkpoint()
        self._activity.set("driver", "waits for the last evaluation")
        await self._evaluator.finish()
        if self._config.eval.at_end and self._stop is None:
            self._evaluator.start(self.policy_version, tasks)
            await self._evaluator.finish()
        self._check_ledger()
        return True

    def _release(self, batch: Sequence[RolloutTicket]) -> None:
        for group in batch:
            self._ledger.close(group.uid, Outcome.TRAINED)
        self._buffer.release(batch)

    def _check_ledger(self) -> None:
        self._ledger.check(self._buffer.uids())
        counts = self._buffer.counts()
        groups = self._ledger.summary(
            buffered=counts[GroupState.READY],
            training=counts[GroupState.TRAINING],
            in_flight=counts[GroupState.GENERATING] + counts[GroupState.SCORING],
        )
        self._tracker.ledger(groups, policy_version=self.policy_version)

    def _tell_of_the_pipeline(self) -> None:
        counts = self._buffer.counts()
        self._tracker.pipeline(counts)
        taken = sum(counts.values())
        self._activity.set("slots", f"{taken} of {self._config.num_slots} taken")
        self._activity.set("buffer", ", ".join(f"{n} {s.value}" for s, n in counts.items() if n))

    def _tell_of_the_step(self, result: TrainResult, batch: Sequence[RolloutTicket]) -> None:
        for warning in result.warnings:
            self._tracker.event("step skipped", warning)
        if self._config.rollout.dynamic_sampling:
            one_sided = sum(not self._teaches(group) for group in batch)
            if one_sided:
                self._tracker.event(
                    "dynamic sampling",
                    f"step {result.policy_version} trained on {one_sided} one-sided of "
                    f"{len(batch)} groups: {self._max_resampled} were replaced "
                    "(rollout.max_resample_times)",
                )

    def _tell_of_the_end(self) -> None:
        left = self._buffer.counts()[GroupState.READY]
        self._tracker.event(
            "end of the data",
            f"after step {self.policy_version} of at most {self._config.num_steps}"
            + (f"; {left} groups do not fill a step (data.drop_last)" if left else ""),
        )

    def _teaches(self, group: RolloutTicket) -> bool:
        return is_two_sided(group, self._config.loss)

    async def _save_checkpoint(self) -> None:
        directory = str(self._config.run.checkpoint(self.policy_version))
        self._activity.set("driver", f"waits for the checkpoint of step {self.policy_version}")
        await self._roles.learner.save_checkpoint(directory, self._state())
        self._saved_version = self.policy_version
        self._tracker.event("checkpoint saved", directory)

    def _state(self) -> DriverState:
        return DriverState(
            policy_version=self.policy_version,
            prompts=self._fingerprint,
            prompts_per_step=self._config.learner.prompts_per_step,
            sampling=self._sampling,
            reward_function=self._config.reward.function,
            ledger=self._ledger.state(),
            num_resampled=self._buffer.num_resampled,
            buffered=(
                *(
                    BufferedGroup(number=self._ledger.number(g.uid), accepted=accepted, group=g)
                    for g, accepted in self._buffer.complete_groups()
                ),
                *self._saved_groups.left(),
            ),
        )
