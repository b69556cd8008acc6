"""The memory of a workspace and its forks: one limit for all of them."""

from __future__ import annotations

import errno
import os

import pytest

from protocol.volume_extensions import VolumeUsage
from vfsd.daemon.fork_family import ForkFamily

MIB = 1 << 20


def usage(live: int) -> VolumeUsage:
    return VolumeUsage(live_bytes=live, snapshot_bytes=0, overhead_bytes=0, max_memory=100 * MIB)


def test_a_workspace_without_forks_needs_room_for_one_copy() -> None:
    family = ForkFamily()
    family.check_fork(usage(50 * MIB))
    with pytest.raises(OSError, match=r"51\.0 MiB.*takes 51\.0 of the 100\.0 MiB of --max-memory") as raised:
        family.check_fork(usage(51 * MIB))
    assert raised.value.errno == errno.ENOMEM


def test_a_volume_without_a_limit_can_always_be_forked() -> None:
    ForkFamily().check_fork(VolumeUsage(live_bytes=1 << 50))


def test_the_charge_of_another_process_counts_until_that_ends() -> None:
    family = ForkFamily()
    reading, writing = os.pipe()
    joined, has_joined = os.pipe()
    pid = os.fork()
    if not pid:
        family.join()
        family.measure()  # in a process that shares nearly everything
        charge = family.charge(usage(40 * MIB))
        os.write(has_joined, b"+" if 0 < charge <= 40 * MIB else b"-")
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        assert os.read(joined, 1) == b"+"
        (charge,) = family.others()
        assert 0 < charge <= 40 * MIB
        family.check_fork(usage(50 * MIB - charge))
        with pytest.raises(OSError, match="with 1 related fork takes"):
            family.check_fork(usage(50 * MIB))
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
    assert family.others() == []
    family.check_fork(usage(50 * MIB))
