"""From a config to a run that may begin: all input is checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from rich.console import Console

from actors.cluster import address_of, connect, this_machine
from actors.job import Job, device_of
from actors.node import LOOPBACK, listen
from actors.resume import find_start
from real_ray.config import Config
from real_ray.config.deepspeed_json import deepspeed_config
from real_ray.data import load_prompts, load_tokenizer
from real_ray.errors import ResourceError
from real_ray.placement import check_fits, plan_placement
from real_ray.rewards import load_reward
from real_ray.run_length import with_num_steps
from real_ray.tracking import RunDirectory, check_may_begin
from real_ray.types import Prompt


def check_cluster(config: Config) -> str | None:
    """What the cluster of `cluster.address` has, if one is up; starts nothing.

    Raises:
        ResourceError: the run does not fit on it or on this machine, nothing answers at a given
            address, versions differ between nodes, or a port is in use.
    """
    if address_of(config.cluster) is None:
        _check_this_machine(config)
        return None
    with connect(config.cluster, logs=None) as cluster:
        from actors.preflight import check_capacity, check_versions

        check_versions(timeout_s=config.cluster.start_timeout_s)
        short: list[str] = []
        check_capacity(
            plan_placement(config, device_of(config, cluster)),
            cluster.nodes,
            autoscaler=config.cluster.autoscaler,
            tell=short.append,
        )
        total = {name: sum(n.get(name, 0) for n in cluster.nodes) for name in ("CPU", "GPU")}
        there = f"{len(cluster.nodes)} node(s), {total['CPU']:g} CPUs, {total['GPU']:g} GPUs"
        return "; ".join([there, *short])


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
        return Job(
            config=counted, start=start, run=run, train=train, evaluation=evaluation, out=console
        ).run_and_report()


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
