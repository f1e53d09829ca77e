"""Stacks of all processes of a run, on `kill -USR1`.

Imports Ray only where it talks to it: the processes of an engine do without.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import os
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from real_ray.errors import RealRayError, RunError

_REPLY_S = 30.0
_SIGNAL = signal.SIGUSR1


def enable_stacks() -> None:
    """Have this process print the stacks of all its threads to stderr when it gets SIGUSR1.

    Works also while it is stuck in native code, where no Python handler would run. In a Ray worker
    stderr is its log file, `worker-*-PID.err`.
    """
    # Not sys.stderr, which a library may have replaced by something without a file.
    faulthandler.register(_SIGNAL, file=2, all_threads=True)


def hint() -> str:
    """How a user gets the stacks of the run that this process drives."""
    return f"for stacks of all processes: kill -USR1 {os.getpid()} (on {platform.node()})"


@contextlib.contextmanager
def stacks_on_signal(*, table: Callable[[], str], tell: Callable[[str], None]) -> Iterator[None]:
    """Tell who waits for whom, and all stacks, whenever this process gets SIGUSR1.

    Needs a running event loop and a connection to Ray. If the event loop is stuck too, only the
    threads of this process are printed, to stderr.

    Args:
        table: `Watchdog.table`.
        tell: hears one text for this process and then one for all actors.
    """
    loop = asyncio.get_running_loop()
    under_way: set[asyncio.Task[None]] = set()

    def start() -> None:
        task = loop.create_task(dump(table=table, tell=tell), name="stacks")
        under_way.add(task)
        task.add_done_callback(end)

    def end(task: asyncio.Task[None]) -> None:
        under_way.discard(task)
        if not task.cancelled() and task.exception() is not None:
            tell(f"no stacks: {task.exception()!r}")  # and the run goes on

    loop.add_signal_handler(_SIGNAL, start)
    faulthandler.register(_SIGNAL, file=2, all_threads=True, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(_SIGNAL)
        loop.remove_signal_handler(_SIGNAL)
        for task in under_way:
            task.cancel()


async def dump(*, table: Callable[[], str], tell: Callable[[str], None]) -> None:
    """Tell the table and the stacks of this process' tasks; have the actors print theirs.

    Raises:
        RayError: the cluster does not say where the actors are.
    """
    tell(f"{table()}\n\ntasks of the driver (its threads are on stderr):\n{task_stacks()}")
    by_node: dict[str, list[int]] = {}
    for node, pid in await asyncio.to_thread(_actor_processes):
        by_node.setdefault(node, []).append(pid)
    told = await asyncio.gather(*(_print_on(node, pids) for node, pids in by_node.items()))
    tell("\n".join(["stacks of the actors, at the end of these files:", *itertools.chain(*told)]))


def task_stacks() -> str:
    """Every task of this event loop with the places where its coroutines wait, outermost first."""
    parts = []
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        parts += [f"{task.get_name()}:", *(f"  {place}" for place in _places(task.get_coro()))]
    return "\n".join(parts)


def print_stacks(pids: Sequence[int]) -> list[str]:
    """Have processes of this machine and their children print their stacks.

    Only those that called `enable_stacks`: the signal would end any other.

    Returns:
        A line for each process: its name and where its stderr goes.
    """
    lines, where = [], platform.node()
    for pid in pids:
        for process in _with_children(pid):
            # One that ends meanwhile has nothing to print any more.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess):
                who = f"{where} pid {process.pid} {process.name()}"
                file = Path(f"/proc/{process.pid}/fd/2").readlink()
                if _has_handler(process.pid):
                    os.kill(process.pid, _SIGNAL)
                    lines.append(f"{who}: {file}")
                elif process.pid == pid:
                    lines.append(f"{who}: has not started yet, or prints no stacks")
    return lines


def _with_children(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _places(awaited: Any) -> Iterator[str]:
    """Follows coroutines and generators to what they wait for in the end."""
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            frame: FrameType | None = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                code = frame.f_code
                yield f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
                awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        else:
            return


def _has_handler(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (_SIGNAL - 1) & 1)


def _actor_processes() -> list[tuple[str, int]]:
    """Node and process id of every actor of this job."""
    import ray

    job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
    actors = ray._private.state.actors(job_id=job, actor_state_name="ALIVE")
    return sorted((actor["Address"]["NodeID"], actor["Pid"]) for actor in actors.values())


async def _print_on(node: str, pids: Sequence[int]) -> list[str]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.replies import reply

    if node == ray.get_runtime_context().get_node_id():
        return print_stacks(pids)  # also where Ray here starts no more workers
    there = ray.remote(print_stacks).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    late = RunError(f"node {node[:8]} did not answer within {_REPLY_S:g} s")
    try:
        lines: list[str] = await reply(
            there.remote(pids), who=f"node {node[:8]}", timeout_s=_REPLY_S, late=late
        )
    except RealRayError as error:
        return [str(error)]  # the other nodes' stacks may say why
    return lines
