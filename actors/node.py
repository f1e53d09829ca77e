"""The machine that an actor runs on: cores, addresses and ports."""

from __future__ import annotations

import errno
import os
import socket

from real_ray.errors import ResourceError

LOOPBACK = "127.0.0.1"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address only.

    Raises:
        ResourceError: the port is in use, or the address is not this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(
                f"port {port} on {address} is in use: choose another one, or 0 for a free one"
            ) from error
        raise ResourceError(f"cannot listen on {address}:{port}: {error}") from error
    return listener


def address_towards(address: str) -> str:
    """The address that this machine has for another one, or for itself; sends nothing."""
    any_port = 9
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, any_port))
        own: str = probe.getsockname()[0]
        return own


def free_port(address: str) -> int:
    """A port that is free on this address at this moment."""
    with listen(address, 0) as listener:
        port: int = listener.getsockname()[1]
        return port
