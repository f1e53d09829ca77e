"""Sockets that listen on one address and no other, and the cores of this machine."""

from __future__ import annotations

import os
import socket

import pytest

from actors.node import LOOPBACK, free_port, listen, num_cores
from real_ray.errors import ResourceError

OTHER = "127.0.0.2"  # also this machine, but another address


def test_a_listener_answers_on_its_address() -> None:
    with listen(LOOPBACK, 0) as listener:
        address = listener.getsockname()
        assert address[0] == LOOPBACK
        with socket.create_connection(address, timeout=5) as caller:
            accepted, _ = listener.accept()
            with accepted:
                caller.sendall(b"x")
                assert accepted.recv(1) == b"x"


@pytest.mark.parametrize(("address", "other"), [(LOOPBACK, OTHER), (OTHER, LOOPBACK)])
def test_a_listener_answers_nowhere_else(address: str, other: str) -> None:
    with listen(address, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=5)
        with listen(other, port):  # so the port is free there
            pass


def test_ipv6() -> None:
    with listen("::1", 0) as listener:
        assert listener.family is socket.AF_INET6
        with socket.create_connection(listener.getsockname()[:2], timeout=5):
            pass


def test_a_port_in_use_is_named_and_left_alone() -> None:
    with listen(LOOPBACK, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ResourceError) as refused:
            listen(LOOPBACK, port)
        assert str(refused.value) == (
            f"port {port} on {LOOPBACK} is in use: choose another one, or 0 for a free one"
        )
        with socket.create_connection((LOOPBACK, port), timeout=5):
            pass


def test_a_port_is_free_again_after_its_listener() -> None:
    with listen(LOOPBACK, 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection((LOOPBACK, port), timeout=5):
            accepted, _ = first.accept()
            accepted.close()  # first, so that the port is left in TIME_WAIT
    with listen(LOOPBACK, port) as second:
        assert second.getsockname()[1] == port


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ResourceError, match=r"^cannot listen on 192\.0\.2\.1:0: .*address"):
        listen("192.0.2.1", 0)  # reserved for documentation


@pytest.mark.parametrize("address", [LOOPBACK, OTHER])
def test_a_free_port_can_be_listened_on(address: str) -> None:
    port = free_port(address)
    with listen(address, port) as listener:
        assert listener.getsockname() == (address, port)
        assert free_port(address) != port


def test_cores_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    try:
        os.sched_setaffinity(0, {one})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_cores() == len(allowed)
