"""Contract suites for third-party implementations: subclass one, override its fixture, and run pytest.

    class TestMyVolume(VolumeContract):
        @pytest.fixture
        def volume(self):
            def make(*, max_bytes=None, max_inodes=None, clock=None):
                return MyVolume(...)
            return make

The docstrings of `protocol.volume` and `protocol.filesystem` define the results.  Where those of a volume do not, the
behaviour of tmpfs does.
"""

from __future__ import annotations

from protocol.testing import _assertions as _assertions
from protocol.testing.archive import ArchiveContract, SnapshotContract
from protocol.testing.filesystem import FilesystemContract
from protocol.testing.read_only import ReadOnlyContract
from protocol.testing.streaming import StreamingContract
from protocol.testing.volume import Clock, Driver, MakeVolume, VolumeContract

__all__ = [
    "ArchiveContract",
    "Clock",
    "Driver",
    "FilesystemContract",
    "MakeVolume",
    "ReadOnlyContract",
    "SnapshotContract",
    "StreamingContract",
    "VolumeContract",
]
