"""What `real-ray scale` does, and says."""

from __future__ import annotations

import time

from real_ray.config import load_config
from real_ray.errors import UserError
from real_ray.report.status import find_run, generators
from real_ray.tracking.scaling import ask_for
from real_ray.tracking.status import read_status

_ANSWER_S = 10.0


def scale_run(run: str, num_generators: int) -> str:
    """Ask a run for another number of generators, and wait until it has heard.

    Args:
        run: its directory, or its name in `runs/`.

    Returns:
        What it said, in words.

    Raises:
        UserError: there is no such run, it has ended, or it does not allow that number.
    """
    directory, status = find_run(run)
    if status.state != "running":
        raise UserError(
            f"{directory}: the run has {status.state}, so there is nothing to scale. Set "
            "rollout.num_generators when it goes on"
        )
    load_config(directory / "config.yaml").rollout.check_scale(num_generators)
    asked_at = time.time()
    try:
        ask_for(directory, num_generators)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written: {error.strerror}. Ask as the user of the run"
        ) from error
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        status = read_status(directory / "status.json")
        if status.time >= asked_at and status.generators.get("wanted") == num_generators:
            return f"run {directory.name}: {generators(status)}. See `real-ray status {run}`"
        time.sleep(0.1)
    return (
        f"run {directory.name} has not heard of it within {_ANSWER_S:g} s: it is still starting, "
        f"hangs, or is gone; see `real-ray status {run}`"
    )
