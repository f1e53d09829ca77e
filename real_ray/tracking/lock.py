"""RunLock: one process at a time writes to a run directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from real_ray.errors import ConfigError

FILE = ".lock"
"""Name of the lock in a run directory."""


def is_held(path: Path) -> bool | None:
    """Whether a process holds a `RunLock`, as far as this machine can see.

    Makes no file. Takes a free lock for an instant, in which a `RunLock` would be refused.

    Returns:
        None: it cannot be told, as on a file system without locks.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


class RunLock:
    """Held until `release`, or until the process ends, however it ends.

    Raises:
        ConfigError: another process holds it.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"run.name: another process is running {path.parent}. Wait for its end, stop it, "
                "or choose another --run.name"
            ) from None
        except OSError:
            pass  # a file system without locks protects nobody, and is no reason not to run

    def release(self) -> None:
        """Let others in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.release()
