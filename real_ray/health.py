"""Finding out when a generator is dead, or alive and doing nothing."""

from __future__ import annotations

import asyncio

from real_ray.activity import Activity
from real_ray.errors import ActorDiedError
from real_ray.members import Member
from real_ray.roles import GeneratorProgress

_LONGEST_POLL_S = 10.0


async def watch_health(member: Member, stall_s: float, activity: Activity) -> None:
    """Watch a generator for as long as it is well.

    Args:
        stall_s: `rollout.stall_s`.
        activity: hears how far it is.

    Raises:
        ActorDiedError: it is dead, does not answer, or samples no token though it has completions
            to finish. What it does not do during a weight sync does not count.
    """
    clock = asyncio.get_running_loop().time
    seen: GeneratorProgress | None = None
    moved = clock()
    while True:
        await asyncio.sleep(min(_LONGEST_POLL_S, stall_s / 4))
        was_in_sync = member.in_sync
        try:
            async with asyncio.timeout(stall_s):
                progress = await member.generator.progress()
        except TimeoutError:
            if not (was_in_sync or member.in_sync):
                raise ActorDiedError(
                    f"{member.name} did not answer within {stall_s:g} s (rollout.stall_s)"
                ) from None
            continue
        if (
            seen is None
            or progress.num_tokens > seen.num_tokens
            or progress.num_finished > seen.num_finished
            or not progress.num_running
            or member.in_sync
            or was_in_sync
        ):
            moved = clock()
        if progress != seen:
            seen = progress
            activity.set(
                member.name,
                f"{member.state.value}, {progress.num_running} completions with "
                f"{progress.num_tokens} tokens under way",
            )
        if clock() - moved >= stall_s:
            raise ActorDiedError(
                f"{member.name} sampled no token for {clock() - moved:.0f} s, with "
                f"{progress.num_running} completions under way (rollout.stall_s)"
            )
