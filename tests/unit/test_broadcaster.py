"""Weight syncs that go wrong in every way that is known: in virtual time, numbers as models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fake_generators import (
    GROUP_S,
    PROMPT,
    SAMPLING,
    START_S,
    FakeGenerator,
    FakeSender,
    Generators,
)

from real_ray.activity import Activity
from real_ray.broadcaster import Broadcaster
from real_ray.config import SyncConfig
from real_ray.config.rollout import RolloutConfig
from real_ray.errors import LearnerLostError, SyncError
from real_ray.simulate.virtual_time import run_in_virtual_time
from real_ray.weights import HeldWeights, Probe

PROBE = Probe(token_ids=np.arange(8, dtype=np.int32), num_prompt_tokens=3)


def run(work: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(asyncio.wait_for(work, 50_000))  # polls would go on for ever


@dataclass
class Setting:
    generators: Generators
    sender: FakeSender
    broadcaster: Broadcaster
    keeping: asyncio.Task[None]

    async def train(self, version: int) -> None:
        """A step of the learner."""
        async with self.sender.lock:
            self.sender.policy_version = version
            await asyncio.sleep(10)
            self.sender.weights += 1

    @property
    def names(self) -> list[str]:
        """Of the generators that take groups."""
        return [m.name for m in self.generators.pool.members() if m.state.value == "ready"]

    def events(self, kind: str) -> list[str]:
        return [text for what, text in self.generators.tracker.events if what == kind]

    def living(self, name: str) -> FakeGenerator:
        (found,) = [g for g in self.generators.made if g.name == name and not g.stopped]
        return found


@asynccontextmanager
async def setting(num_generators: int, **settings: Any) -> AsyncIterator[Setting]:
    generators = Generators(RolloutConfig(num_generators=num_generators, **settings))
    sender = FakeSender()
    broadcaster = Broadcaster(
        generators.pool,
        sender,  # type: ignore[arg-type]
        config=SyncConfig(probe_tolerance=0.5),
        probe=PROBE,
        tracker=generators.tracker,
        activity=Activity(),
    )
    keeping = asyncio.create_task(generators.pool.run())
    bringing = asyncio.create_task(broadcaster.bring_in())
    try:
        await generators.pool.has_begun()
        yield Setting(generators, sender, broadcaster, keeping)
    finally:
        for task in (bringing, keeping):
            task.cancel()
        await asyncio.wait({bringing, keeping})


def test_one_broadcast_reaches_all_at_once_and_lets_them_sample() -> None:
    async def work() -> None:
        async with setting(3) as it:
            assert it.names == []
            report = await it.broadcaster.broadcast(policy_version=0)
            assert it.sender.sent_to == [["generator-0", "generator-1", "generator-2"]]
            assert len(it.names) == report.num_generators == 3
            assert (report.num_tensors, report.num_bytes) == (2, 8)
            assert (report.probe_difference, report.pause_seconds, report.seconds) == (0, 1, 1)
            assert not any(g.is_paused for g in it.generators.made)

    run(work())


def spoiled(**changes: Any) -> Any:
    def prepare(generator: FakeGenerator) -> None:
        generator.spoils = lambda held: replace(held, **changes)

    return prepare


def loads_wrong(generator: FakeGenerator) -> None:
    generator.loads = lambda weights: 7.0


def loads_nan(generator: FakeGenerator) -> None:
    generator.loads = lambda weights: float("nan")


WRONG = [
    (spoiled(policy_version=0), "version 0"),
    (spoiled(num_tensors=1), "1 tensors of 2"),
    (spoiled(checksums={"a": 1, "b": 3}), "not as sent: b"),
    (spoiled(checksums={"a": 1}), "missing: b"),
    (spoiled(checksums={"a": 1, "b": 2, "c": 3}), "not sent: c"),
    (spoiled(problems=("lm_head.weight is stale",)), "lm_head.weight is stale"),
    (loads_wrong, "log-probs of a fixed sequence differ by 6.000"),
    (loads_nan, "log-probs of a fixed sequence differ by nan"),
]


@pytest.mark.parametrize(("spoil", "what"), WRONG)
def test_one_that_holds_wrong_weights_is_named_tried_once_more_and_replaced(
    spoil: Any, what: str
) -> None:
    async def work() -> None:
        async with setting(2) as it:
            await it.broadcaster.broadcast(policy_version=0)
            group = asyncio.create_task(it.generators.pool.generate(PROMPT, SAMPLING))
            await asyncio.sleep(1)
            spoil(it.generators.made[0])
            it.sender.policy_version = 1
            report = await it.broadcaster.broadcast(policy_version=1)
            assert it.sender.sent_to[1:] == [["generator-0", "generator-1"], ["generator-0"]]
            assert it.names == ["generator-1"]
            assert report.num_generators == 1
            assert (await group).generator == "generator-1"
            (again,) = it.events("generation failed")  # some tokens may be of wrong weights
            assert "generator-0 was lost: it has wrong weights" in again
            (repeated,) = it.events("sync repeated")
            assert repeated.startswith(
                "weight sync of version 1: generator-0 has other weights than the learner: "
            )
            assert what in repeated
            await asyncio.sleep(START_S + 3)
            assert what in it.events("generator lost")[0]
            assert it.sender.sent_to[3:] == [["generator-0"]], "the new one, and nobody else"
            assert it.names == ["generator-0", "generator-1"]
            held = it.living("generator-0").held
            assert held is not None
            assert held.policy_version == 1

    run(work())


@pytest.mark.parametrize(("spoil", "what"), WRONG[1:])
def test_a_slip_is_healed_by_sending_once_more(spoil: Any, what: str) -> None:
    async def work() -> None:
        async with setting(2) as it:
            await it.broadcaster.broadcast(policy_version=0)
            victim = it.generators.made[0]
            spoil(victim)

            def mend(receivers: Sequence[FakeGenerator]) -> None:
                if len(it.sender.sent_to) == 3:
                    victim.spoils = victim.loads = lambda value: value

            it.sender.on_send = mend
            it.sender.policy_version = 1
            report = await it.broadcaster.broadcast(policy_version=1)
            assert report.num_generators == 2
            assert it.names == ["generator-0", "generator-1"]
            assert not it.events("generator lost")
            assert what in it.events("sync repeated")[0]

    run(work())


def engine_checksums(it: Setting, *answers: str) -> None:
    """What each generator's engine makes of its weights from now on."""
    for generator, answer in zip(it.generators.made, answers, strict=True):
        spoiled(checksums={}, engine_checksum=answer)(generator)


@pytest.mark.parametrize(
    ("answers", "suspects"),
    [
        ("aaa", []),
        ("aba", ["generator-1"]),
        ("ab", ["generator-0", "generator-1"]),
        ("abc", ["generator-0", "generator-1", "generator-2"]),
        ("b", []),
    ],
)
def test_checksums_of_engines_are_compared_with_one_another(
    answers: str, suspects: list[str]
) -> None:
    async def work() -> None:
        async with setting(len(answers)) as it:
            await it.broadcaster.broadcast(policy_version=0)
            engine_checksums(it, *answers)

            def mend(_: Sequence[FakeGenerator]) -> None:
                if len(it.sender.sent_to) == 3:
                    engine_checksums(it, *("a" * len(answers)))

            it.sender.on_send = mend
            report = await it.broadcaster.broadcast(policy_version=0)
            assert it.sender.sent_to[2:] == ([suspects] if suspects else [])
            assert report.num_generators == len(it.names) == len(answers)
            repeated = it.events("sync repeated")
            assert [name for name in suspects if any(name in text for text in repeated)] == suspects
            assert all("weights unlike those of the other generators" in t for t in repeated)
            assert len(repeated) == len(suspects)

    run(work())


def test_a_generator_that_stays_unlike_the_others_is_lost_and_so_is_a_newcomer() -> None:
    async def work() -> None:
        async with setting(3) as it:
            it.generators.prepare = lambda g, _: spoiled(checksums={}, engine_checksum="b")(g)
            engine_checksums(it, "a", "a", "b")
            report = await it.broadcaster.broadcast(policy_version=0)
            assert it.sender.sent_to[1:] == [["generator-2"]]
            assert report.num_generators == 2
            await asyncio.sleep(START_S + 5)
            assert it.sender.sent_to[2:] == [["generator-2"]] * 2, "alone, and again"
            assert it.names == ["generator-0", "generator-1"]

    run(work())


def test_when_no_generator_ever_holds_right_weights_it_is_an_error() -> None:
    async def work() -> None:
        async with setting(2) as it:
            for generator in it.generators.made:
                loads_wrong(generator)
            with pytest.raises(SyncError, match=r"version 0: generator-1 has other weights.*probe"):
                await it.broadcaster.broadcast(policy_version=0)

    run(work())


@pytest.mark.parametrize("at", ["pause", "resume", "held_weights", "logprobs"])
@pytest.mark.parametrize("how", ["fails", "dies"])
def test_one_that_is_lost_in_a_sync_does_not_keep_the_others(at: str, how: str) -> None:
    async def work() -> None:
        async with setting(3) as it:
            await it.broadcaster.broadcast(policy_version=0)
            it.sender.policy_version = 1
            victim = it.generators.made[1]
            if how == "fails":
                victim.fails_at = {at}
            elif at == "pause":
                victim.die()
            else:
                it.sender.on_send = lambda receivers: victim.die()
            report = await it.broadcaster.broadcast(policy_version=1)
            assert report.num_generators == 2
            assert it.names == ["generator-0", "generator-2"]
            assert await it.generators.generate(2) == it.names
            await asyncio.sleep(1 + START_S + 10)
            assert len(it.names) == 3
            assert it.living("generator-1").weights == it.sender.weights

    run(work())


def test_a_broken_transfer_goes_on_without_those_that_broke_it() -> None:
    async def work() -> None:
        async with setting(3) as it:
            await it.broadcaster.broadcast(policy_version=0)
            it.sender.errors = [SyncError("connection reset", ("generator-2",))]
            it.sender.policy_version = 1
            report = await it.broadcaster.broadcast(policy_version=1)
            assert it.sender.sent_to[1:] == [
                ["generator-0", "generator-1", "generator-2"],
                ["generator-0", "generator-1"],
            ]
            assert report.num_generators == 2
            assert it.events("sync repeated") == ["connection reset; without those that are lost"]

    run(work())


def test_a_broken_transfer_that_nobody_explains_is_tried_once_more_and_then_an_error() -> None:
    async def work() -> None:
        async with setting(2) as it:
            it.sender.errors = [SyncError("reset")]
            assert (await it.broadcaster.broadcast(policy_version=0)).num_generators == 2
        async with setting(2) as it:
            it.sender.errors = [SyncError("reset"), SyncError("reset again")]
            with pytest.raises(SyncError, match="reset again"):
                await it.broadcaster.broadcast(policy_version=0)

    run(work())


def test_newcomers_that_break_every_sync_are_replaced_and_the_others_go_on() -> None:
    async def work() -> None:
        async with setting(1) as it:
            await it.broadcaster.broadcast(policy_version=0)
            it.generators.pool.scale(2)
            it.sender.errors = [SyncError("reset"), SyncError("reset again")]
            await asyncio.sleep(2 * START_S + 10)
            assert it.events("generator lost") == [
                "generator-1: reset again; starting it again in 1 s (1 of at most 5)"
            ]
            assert it.names == ["generator-0", "generator-1"]

    run(work())


def test_one_that_dies_after_its_probe_and_before_the_end_of_the_sync_is_not_admitted() -> None:
    async def work() -> None:
        async with setting(2) as it:
            first, second = it.generators.made
            answers = second.logprobs

            async def slow(token_ids: Any) -> Any:
                await asyncio.sleep(1)  # the other one has answered
                first.die()
                await asyncio.sleep(60)  # the health check finds it
                return await answers(token_ids)

            second.logprobs = slow  # type: ignore[method-assign]
            report = await it.broadcaster.broadcast(policy_version=0)
            assert report.num_generators == 2, "when they were asked"
            assert it.names == ["generator-1"]
            await asyncio.sleep(3 * START_S)
            assert len(it.names) == 2
            assert len(it.events("generator lost")) == 1

    run(work())


def test_a_lost_learner_is_an_error_and_the_next_sync_lets_the_generators_go_on() -> None:
    async def work() -> None:
        async with setting(2) as it:
            await it.broadcaster.broadcast(policy_version=0)
            group = asyncio.create_task(it.generators.pool.generate(PROMPT, SAMPLING))
            await asyncio.sleep(1)
            it.sender.errors = [LearnerLostError("learner-1 has died")]
            with pytest.raises(LearnerLostError):
                await it.broadcaster.broadcast(policy_version=0)
            assert it.generators.made[0].is_paused, "its weights may be half of each version"
            assert not any(m.in_sync for m in it.generators.pool.members())
            await it.broadcaster.broadcast(policy_version=0)
            assert not it.generators.made[0].is_paused
            assert (await group).generator == "generator-0"

    run(work())


def test_with_no_generator_left_the_learner_need_not_wait() -> None:
    async def work() -> None:
        async with setting(1) as it:
            await it.broadcaster.broadcast(policy_version=0)
            it.generators.made[0].die()
            await asyncio.sleep(11)
            it.sender.policy_version = 1
            report = await it.broadcaster.broadcast(policy_version=1)
            assert (report.num_generators, report.num_bytes) == (0, 0)
            await asyncio.sleep(1 + START_S + 3)
            assert it.names == ["generator-0"]
            held = it.living("generator-0").held
            assert held == HeldWeights(policy_version=1, num_tensors=2, checksums={"a": 1, "b": 2})

    run(work())


def test_a_newcomer_gets_the_weights_while_the_others_go_on_sampling() -> None:
    async def work() -> None:
        async with setting(1) as it:
            await it.broadcaster.broadcast(policy_version=0)
            it.generators.pool.scale(2)
            await asyncio.sleep(START_S - 1)
            began = asyncio.get_running_loop().time()
            assert await it.generators.generate() == ["generator-0"]
            assert asyncio.get_running_loop().time() - began == GROUP_S
            assert it.sender.sent_to == [["generator-0"], ["generator-1"]]
            assert it.names == ["generator-0", "generator-1"]

    run(work())


def test_a_newcomer_waits_for_the_weights_that_the_learner_is_making() -> None:
    async def work() -> None:
        async with setting(1) as it:
            await it.broadcaster.broadcast(policy_version=0)
            it.generators.pool.scale(2)
            await asyncio.sleep(START_S - 5)
            await it.train(1)
            await asyncio.sleep(100)
            assert it.names == ["generator-0"], "weights of no version in the generators"
            await it.broadcaster.broadcast(policy_version=1)
            assert it.sender.sent_to == [["generator-0"], ["generator-0", "generator-1"]]
            assert it.names == ["generator-0", "generator-1"]
            assert {g.weights for g in it.generators.made} == {it.sender.weights}
            # And the next one does not wait for a broadcast when the learner is idle.
            it.generators.pool.scale(3)
            await asyncio.sleep(START_S + 2)
            assert it.sender.sent_to[2:] == [["generator-2"]]
            assert len(it.names) == 3

    run(work())


def test_a_learner_that_trains_waits_until_newcomers_have_its_weights() -> None:
    async def work() -> None:
        async with setting(1) as it:
            await it.broadcaster.broadcast(policy_version=0)
            it.generators.pool.scale(2)
            await asyncio.sleep(START_S + 0.5)
            assert it.sender.sent_to == [["generator-0"], ["generator-1"]], "just being sent"
            await it.train(1)
            held = it.generators.made[1].held
            assert held is not None
            assert held.policy_version == 0
            assert it.generators.made[1].weights == 1.0, "the weights of that version"

    run(work())


def test_a_health_check_lets_an_engine_in_a_long_sync_be() -> None:
    async def work() -> None:
        async with setting(1, stall_s=8.0) as it:
            await it.broadcaster.broadcast(policy_version=0)
            group = asyncio.create_task(it.generators.pool.generate(PROMPT, SAMPLING))
            await asyncio.sleep(1)
            engine = it.generators.made[0]

            async def slow(*_: Any) -> None:
                await asyncio.sleep(100)
                engine.is_paused = False

            engine.resume = slow  # type: ignore[method-assign]
            await it.broadcaster.broadcast(policy_version=0)
            assert (await group).generator == "generator-0"
            assert len(it.generators.made) == 1

    run(work())
