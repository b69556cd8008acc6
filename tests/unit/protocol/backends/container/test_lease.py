"""The lease of a container: held as long as a process has a duplicate of it, and by one owner at a time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from protocol.backends.container.podman.lease import Lease, is_held


@pytest.fixture
def lease() -> Iterator[Lease]:
    made = Lease.make()
    yield made
    made.close()


def test_a_lease_is_held_until_its_last_duplicate_is_closed(lease: Lease) -> None:
    name = lease.name
    other = Lease.of(lease.descriptor)
    assert other.name == name
    assert is_held(name)
    lease.close()
    assert is_held(name)
    other.close()
    assert not is_held(name)


def test_a_process_that_is_killed_gives_its_lease_up(lease: Lease) -> None:
    name = lease.name
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lease.descriptor])
    with holder:
        lease.close()
        assert is_held(name)
        holder.kill()
    assert not is_held(name)


def test_one_process_can_claim_a_lease_that_is_free(lease: Lease) -> None:
    assert Lease.claim(lease.name) is None
    name = lease.name
    lease.close()
    claimed = Lease.claim(name)
    assert claimed is not None
    assert Lease.claim(name) is None
    claimed.close()


def test_asking_does_not_take_a_lease_and_nobody_can_send_to_one(lease: Lease) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(f"\0vfsd-container-{lease.name}")
        with pytest.raises(BrokenPipeError):
            stranger.send(b"x")
    assert is_held(lease.name)
    assert os.get_inheritable(lease.descriptor) is False
