"""A Ray for one test module, which leaves nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray


@contextmanager
def local_ray(env: Mapping[str, str]) -> Iterator[None]:
    """Start Ray with two CPUs and this environment for its workers; stop it at the end."""
    # Not pytest's temporary directory: the paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as place:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": dict(env)},
            _temp_dir=place,
        )
        try:
            yield
        finally:
            ray.shutdown()
