"""GroupBuffer: slots, order, wholeness, staleness."""

from __future__ import annotations

import asyncio

import pytest
from fakes import rollout_ticket
from hypothesis import given
from hypothesis import strategies as st

from real_ray.buffer import GroupBuffer, GroupState
from real_ray.errors import GroupError, StalenessError


def make_buffer(
    *, num_slots: int = 4, num_groups: int = 100, num_generations: int = 2, max_staleness: int = 1
) -> GroupBuffer:
    return GroupBuffer(
        num_slots=num_slots,
        num_groups=num_groups,
        num_generations=num_generations,
        max_staleness=max_staleness,
    )


async def make_ready(buffer: GroupBuffer, uid: str, *, oldest: int = 0) -> None:
    buffer.generated(uid)
    await buffer.push(rollout_ticket(uid, oldest=oldest))


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
        await make_ready(buffer, uid)
    taking = asyncio.create_task(buffer.take(2, policy_version=0))
    await settle()
    assert is_waiting(taking), "the oldest group is not ready"
    await make_ready(buffer, "a")
    assert [group.uid for group in await taking] == ["a", "b"]
    assert [group.uid for group in await buffer.take(2, policy_version=0)] == ["c", "d"]


async def test_a_slot_is_free_only_after_release() -> None:
    buffer = make_buffer(num_slots=2)
    for uid in "ab":
        await buffer.slot()
        buffer.admit(uid)
        await make_ready(buffer, uid)
    waiting = asyncio.create_task(buffer.slot())
    batch = await buffer.take(1, policy_version=0)
    await settle()
    assert is_waiting(waiting), "trained on, but its weights are not in the generators"
    await buffer.release(batch)
    await waiting
    assert buffer.num_trained == 1


async def test_a_failed_group_frees_its_slot_and_leaves_the_order() -> None:
    buffer = make_buffer(num_slots=2)
    for uid in "ab":
        buffer.admit(uid)
    await make_ready(buffer, "b")
    waiting = asyncio.create_task(buffer.slot())
    taking = asyncio.create_task(buffer.take(1, policy_version=0))
    await settle()
    assert is_waiting(waiting)
    assert is_waiting(taking)
    await buffer.fail("a")
    await waiting
    assert [group.uid for group in await taking] == ["b"]
    assert buffer.num_failed == 1


async def test_no_more_groups_are_admitted_than_the_run_trains_on() -> None:
    buffer = make_buffer(num_slots=4, num_groups=3)
    for uid in "abc":
        await buffer.slot()
        buffer.admit(uid)
    waiting = asyncio.create_task(buffer.slot())
    await settle()
    assert is_waiting(waiting), "a fourth group would be sampled for nothing"
    await buffer.fail("b")
    await waiting


@pytest.mark.parametrize("members", [1, 3])
async def test_a_fragment_or_a_merged_group_is_refused_by_name(members: int) -> None:
    buffer = make_buffer(num_generations=2)
    buffer.admit("p:7@0")
    buffer.generated("p:7@0")
    with pytest.raises(GroupError, match=r"p:7@0.*not whole.*0 to 1.*got " + str(members)):
        await buffer.push(rollout_ticket("p:7@0", members=members))


async def test_a_group_is_pushed_once_and_only_after_it_was_admitted() -> None:
    buffer = make_buffer()
    with pytest.raises(GroupError, match=r"p:1.*not in the pipeline"):
        await buffer.push(rollout_ticket("p:1"))
    buffer.admit("p:1")
    with pytest.raises(GroupError, match=r"p:1.*already in the pipeline"):
        buffer.admit("p:1")
    with pytest.raises(GroupError, match=r"p:1.*generating, not scoring"):
        await buffer.push(rollout_ticket("p:1"))
    await make_ready(buffer, "p:1")
    with pytest.raises(GroupError, match="p:1"):
        await buffer.push(rollout_ticket("p:1"))
    with pytest.raises(GroupError, match=r"p:1.*ready"):
        await buffer.fail("p:1")
    with pytest.raises(GroupError, match=r"p:1.*not taken"):
        await buffer.release([rollout_ticket("p:1")])


@pytest.mark.parametrize(("oldest", "version"), [(0, 2), (3, 2)])
async def test_staleness_out_of_bounds_is_refused_when_the_batch_is_taken(
    oldest: int, version: int
) -> None:
    buffer = make_buffer(max_staleness=1)
    buffer.admit("p:1")
    await make_ready(buffer, "p:1", oldest=oldest)
    with pytest.raises(StalenessError, match=r"p:1.*version 2 trains.*allowed 0 to 1"):
        await buffer.take(1, policy_version=version)


@given(data=st.data())
def test_any_interleaving_keeps_slots_order_and_staleness(data: st.DataObject) -> None:
    """Random finishing order, failures and timing: the bound and the order hold by construction."""
    per_step = data.draw(st.integers(1, 4), label="prompts_per_step")
    max_staleness = data.draw(st.integers(0, 3), label="max_staleness")
    steps = data.draw(st.integers(1, 6), label="steps")
    num_slots = (max_staleness + 1) * per_step

    async def scenario() -> None:
        buffer = make_buffer(
            num_slots=num_slots, num_groups=steps * per_step, max_staleness=max_staleness
        )
        version, admitted, failed = 0, [], set()
        born: dict[str, int] = {}
        running: list[str] = []
        trained: list[str] = []
        while len(trained) < steps * per_step:
            slot = asyncio.create_task(buffer.slot())
            await settle()
            can_admit = slot.done()
            slot.cancel()
            actions = (["admit"] if can_admit else []) + (["finish", "fail"] if running else [])
            taking = asyncio.create_task(buffer.take(per_step, policy_version=version))
            await settle()
            if taking.done():
                batch = await taking
                trained += [group.uid for group in batch]
                version += 1
                await buffer.release(batch)
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
                    await buffer.push(rollout_ticket(uid, oldest=born[uid]))
                else:
                    await buffer.fail(uid)
                    failed.add(uid)
            assert sum(buffer.counts().values()) <= num_slots
        assert trained == [uid for uid in admitted if uid not in failed]
        assert buffer.num_failed == len(failed)
        assert buffer.counts()[GroupState.TRAINING] == 0

    asyncio.run(scenario())
