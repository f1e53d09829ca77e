"""GroupBuffer: slots, order, wholeness, staleness."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from fakes import rollout_ticket, sampled_ticket
from hypothesis import given
from hypothesis import strategies as st

from real_ray.buffer import GroupBuffer, GroupState
from real_ray.errors import GroupError, StalenessError
from real_ray.types import RolloutTicket


def make_buffer(**changes: Any) -> GroupBuffer:
    arguments: dict[str, Any] = {
        "num_slots": 4,
        "groups_per_step": 2,
        "num_groups": 100,
        "num_generations": 2,
        "max_staleness": 1,
        **changes,
    }
    return GroupBuffer(**arguments)


def make_ready(buffer: GroupBuffer, uid: str, *, oldest: int = 0) -> list[str]:
    """Complete a group; returns what was filtered then."""
    buffer.generated(uid)
    return uids_of(buffer.push(rollout_ticket(uid, oldest=oldest)))


def uids_of(groups: Iterable[RolloutTicket]) -> list[str]:
    return [group.uid for group in groups]


def is_waiting(task: asyncio.Task[object]) -> bool:
    return not task.done()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_batches_come_in_the_order_of_admission_whatever_finishes_first() -> None:
    buffer = make_buffer()
    for uid in "abcd":
        buffer.admit(uid)
    for uid in "dcb":
        make_ready(buffer, uid)
    taking = asyncio.create_task(buffer.take(policy_version=0))
    await settle()
    assert is_waiting(taking), "the oldest group is not ready"
    make_ready(buffer, "a")
    assert [group.uid for group in await taking] == ["a", "b"]
    assert [group.uid for group in await buffer.take(policy_version=0)] == ["c", "d"]


async def test_a_slot_is_free_only_after_release() -> None:
    buffer = make_buffer(num_slots=2, groups_per_step=1)
    for uid in "ab":
        await buffer.slot()
        buffer.admit(uid)
        make_ready(buffer, uid)
    waiting = asyncio.create_task(buffer.slot())
    batch = await buffer.take(policy_version=0)
    await settle()
    assert is_waiting(waiting), "trained on, but its weights are not in the generators"
    buffer.release(batch)
    await waiting
    assert list(buffer.uids()) == ["b"]


async def test_a_failed_group_frees_its_slot_and_leaves_the_order() -> None:
    buffer = make_buffer(num_slots=2, groups_per_step=1)
    for uid in "ab":
        buffer.admit(uid)
    make_ready(buffer, "b")
    waiting = asyncio.create_task(buffer.slot())
    taking = asyncio.create_task(buffer.take(policy_version=0))
    await settle()
    assert is_waiting(waiting)
    assert is_waiting(taking)
    buffer.drop("a")
    await waiting
    assert [group.uid for group in await taking] == ["b"]
    assert list(buffer.uids()) == ["b"]


async def test_no_more_groups_are_admitted_than_the_run_trains_on() -> None:
    buffer = make_buffer(num_slots=4, num_groups=3)
    for uid in "abc":
        await buffer.slot()
        buffer.admit(uid)
    waiting = asyncio.create_task(buffer.slot())
    await settle()
    assert is_waiting(waiting), "a fourth group would be sampled for nothing"
    buffer.drop("b")
    await waiting


@pytest.mark.parametrize("members", [1, 3])
async def test_a_fragment_or_a_merged_group_is_refused_by_name(members: int) -> None:
    buffer = make_buffer(num_generations=2)
    buffer.admit("p:7@0")
    buffer.generated("p:7@0")
    with pytest.raises(GroupError, match=r"p:7@0.*not whole.*0 to 1.*got " + str(members)):
        buffer.push(rollout_ticket("p:7@0", members=members))


async def test_a_group_with_a_reward_for_each_member_but_too_many_members_is_refused() -> None:
    buffer = make_buffer()
    buffer.admit("p:7@0")
    buffer.generated("p:7@0")
    group = rollout_ticket("p:7@0")
    with pytest.raises(GroupError, match=r"p:7@0.*not whole.*got 3"):
        buffer.push(replace(group, sampled=sampled_ticket("p:7@0", members=3)))


async def test_a_group_is_pushed_once_and_only_after_it_was_admitted() -> None:
    buffer = make_buffer()
    with pytest.raises(GroupError, match=r"p:1.*not in the pipeline"):
        buffer.push(rollout_ticket("p:1"))
    buffer.admit("p:1")
    with pytest.raises(GroupError, match=r"p:1.*already in the pipeline"):
        buffer.admit("p:1")
    with pytest.raises(GroupError, match=r"p:1.*generating, not scoring"):
        buffer.push(rollout_ticket("p:1"))
    make_ready(buffer, "p:1")
    with pytest.raises(GroupError, match="p:1"):
        buffer.push(rollout_ticket("p:1"))
    with pytest.raises(GroupError, match=r"p:1.*ready"):
        buffer.drop("p:1")
    with pytest.raises(GroupError, match=r"p:1.*not taken"):
        buffer.release([rollout_ticket("p:1")])


@pytest.mark.parametrize(("oldest", "version"), [(0, 2), (3, 2)])
async def test_staleness_out_of_bounds_is_refused_when_the_batch_is_taken(
    oldest: int, version: int
) -> None:
    buffer = make_buffer(max_staleness=1, groups_per_step=1)
    buffer.admit("p:1")
    make_ready(buffer, "p:1", oldest=oldest)
    with pytest.raises(StalenessError, match=r"p:1.*version 2 trains.*allowed 0 to 1"):
        await buffer.take(policy_version=version)


def filters(buffer_uids: str, **changes: Any) -> GroupBuffer:
    """A buffer that keeps only the groups whose uid is upper case, with some admitted."""
    buffer = make_buffer(num_slots=20, keeps=lambda group: group.uid.isupper(), **changes)
    for uid in buffer_uids:
        buffer.admit(uid)
    return buffer


async def test_filtered_groups_are_decided_on_in_the_order_of_admission() -> None:
    buffer = filters("AbcD", max_resampled=5)
    assert make_ready(buffer, "b") == []
    assert make_ready(buffer, "D") == []
    assert list(buffer.uids()) == ["A", "b", "c", "D"], "an older group may still change it"
    assert make_ready(buffer, "A") == ["b"]
    assert make_ready(buffer, "c") == ["c"]
    assert uids_of(await buffer.take(policy_version=0)) == ["A", "D"]


async def test_at_the_bound_a_step_takes_what_it_has_and_the_next_starts_anew() -> None:
    buffer = filters("abcDefG", max_resampled=2)
    filtered = [uid for uid in "abcDefG" for uid in make_ready(buffer, uid)]
    assert filtered == ["a", "b", "e", "f"]
    assert uids_of(await buffer.take(policy_version=0)) == ["c", "D"]
    assert buffer.num_resampled == 2
    assert list(buffer.uids()) == ["c", "D", "G"], "surplus stays queued"


async def test_a_dropped_group_lets_the_ones_behind_it_be_decided_on() -> None:
    buffer = filters("abC", max_resampled=5)
    make_ready(buffer, "b")
    make_ready(buffer, "C")
    assert uids_of(buffer.drop("a")) == ["b"]
    assert [group.uid for group, accepted in buffer.complete_groups() if accepted] == ["C"]


async def test_complete_groups_come_back_with_the_decisions_on_them() -> None:
    first = filters("abcDefgH", max_resampled=2)
    for uid in "abcDeg":  # c and D make a step; e is filtered for the next; f is not complete
        make_ready(first, uid)
    saved = first.complete_groups()
    assert [(group.uid, accepted) for group, accepted in saved] == [
        *[("c", True), ("D", True)],
        ("g", False),
    ]
    assert first.num_resampled == 1
    second = filters("", max_resampled=2, num_resampled=first.num_resampled)
    for group, accepted in saved[:2]:
        assert second.restore(group, accepted=accepted) == []
    second.admit("f")
    assert second.restore(saved[2][0], accepted=False) == []
    second.admit("H")
    for buffer in (first, second):
        assert make_ready(buffer, "f") == ["f"]
        assert make_ready(buffer, "H") == []
        assert uids_of(await buffer.take(policy_version=0)) == ["c", "D"]
        assert uids_of(await buffer.take(policy_version=0)) == ["g", "H"]


async def test_after_the_end_the_last_batch_is_smaller_and_then_there_is_none() -> None:
    buffer = make_buffer()
    for uid in "abc":
        buffer.admit(uid)
        make_ready(buffer, uid)
    assert uids_of(await buffer.take(policy_version=0)) == ["a", "b"]
    taking = asyncio.create_task(buffer.take(policy_version=0))
    await settle()
    assert is_waiting(taking)
    buffer.end()
    assert uids_of(await taking) == ["c"]
    assert await buffer.take(policy_version=0) == []


async def test_the_end_waits_for_groups_that_are_not_complete() -> None:
    buffer = make_buffer()
    buffer.admit("a")
    buffer.admit("b")
    buffer.end()
    taking = asyncio.create_task(buffer.take(policy_version=0))
    make_ready(buffer, "a")
    await settle()
    assert is_waiting(taking)
    buffer.drop("b")
    assert uids_of(await taking) == ["a"]


async def test_a_last_batch_that_is_too_small_can_be_left_in_the_buffer() -> None:
    buffer = make_buffer()
    buffer.admit("a")
    make_ready(buffer, "a")
    buffer.end()
    assert await buffer.take(policy_version=0, drop_last=True) == []
    assert buffer.counts()[GroupState.READY] == 1


@given(data=st.data())
def test_any_interleaving_keeps_slots_order_and_staleness(data: st.DataObject) -> None:
    """Random finishing order, failures and timing: the bound and the order hold by construction."""
    per_step = data.draw(st.integers(1, 4), label="prompts_per_step")
    max_staleness = data.draw(st.integers(0, 3), label="max_staleness")
    steps = data.draw(st.integers(1, 6), label="steps")
    num_slots = data.draw(st.integers(per_step, (max_staleness + 1) * per_step), label="slots")
    max_resampled = data.draw(st.integers(0, 3), label="max_resampled")
    one_sided = data.draw(st.sets(st.integers(0, 40)), label="one-sided")

    def in_order(uids: list[str]) -> list[str]:
        """What trains, when nothing but the order counts."""
        kept: list[str] = []
        num_resampled = 0
        for uid in uids:
            if int(uid.removeprefix("p:")) in one_sided and num_resampled < max_resampled:
                num_resampled += 1
            else:
                kept.append(uid)
                num_resampled = num_resampled if len(kept) % per_step else 0
        return kept

    async def scenario() -> None:
        buffer = make_buffer(
            num_slots=num_slots,
            groups_per_step=per_step,
            num_groups=steps * per_step,
            max_staleness=max_staleness,
            keeps=lambda group: int(group.uid.removeprefix("p:")) not in one_sided,
            max_resampled=max_resampled,
        )
        version, admitted, dropped = 0, [], set()
        born: dict[str, int] = {}
        running: list[str] = []
        trained: list[str] = []
        while len(trained) < steps * per_step:
            slot = asyncio.create_task(buffer.slot())
            await settle()
            can_admit = slot.done()
            slot.cancel()
            actions = (["admit"] if can_admit else []) + (["finish", "fail"] if running else [])
            taking = asyncio.create_task(buffer.take(policy_version=version))
            await settle()
            if taking.done():
                batch = await taking
                trained += [group.uid for group in batch]
                version += 1
                buffer.release(batch)
                continue
            taking.cancel()
            action = data.draw(st.sampled_from(actions), label="action")
            if action == "admit":
                uid = f"p:{len(admitted)}"
                buffer.admit(uid)
                admitted.append(uid)
                running.append(uid)
                born[uid] = version
            else:
                uid = running.pop(data.draw(st.integers(0, len(running) - 1), label="which"))
                buffer.generated(uid)
                if action == "finish":
                    buffer.push(rollout_ticket(uid, oldest=born[uid]))
                else:
                    buffer.drop(uid)
                    dropped.add(uid)
            counts = buffer.counts()
            assert sum(counts.values()) == len(list(buffer.uids())) <= num_slots
        assert trained == in_order([uid for uid in admitted if uid not in dropped])
        assert not any(buffer.counts().values())

    asyncio.run(scenario())
