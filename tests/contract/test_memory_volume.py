"""The memory backend keeps the contract of protocol.volume."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.inode import Inode
from protocol.backends.memory.state import MemoryState
from protocol.testing import MakeVolume, VolumeContract
from protocol.volume import Volume
from protocol.volume_extensions import SnapshotableVolume, SnapshotInfo
from tests.contract.conftest import checked


class TestMemoryVolume(VolumeContract):
    @pytest.fixture
    def volume(self) -> Iterator[MakeVolume]:
        with checked(
            lambda max_bytes=None, max_inodes=None, clock=None: MemoryVolume(
                max_bytes, max_inodes, clock=clock or time.time_ns, uid=0, gid=0
            )
        ) as make:
            yield make


class TestMemoryVolumeWithSnapshots(TestMemoryVolume):
    """The same, when a snapshot lies between any two calls, and often within one: each change works on a clone."""

    @pytest.fixture
    def volume(self) -> Iterator[MakeVolume]:
        numbers = itertools.count()

        class Snapshotting(MemoryState):
            def getattr(self, inode: int) -> Inode:
                serial = self.log.serial + 1
                self.open_epoch(SnapshotInfo(f"s{next(numbers)}-{serial}", serial, 0, 0, 0, 0))
                return super().getattr(inode)

        with checked(
            lambda max_bytes=None, max_inodes=None, clock=None: MemoryVolume(
                max_bytes, max_inodes, state=Snapshotting(clock or time.time_ns, 0, 0)
            )
        ) as make:
            yield make


def test_a_memory_volume_has_all_methods_of_its_protocols() -> None:
    assert isinstance(MemoryVolume(), Volume)
    assert isinstance(MemoryVolume(), SnapshotableVolume)
