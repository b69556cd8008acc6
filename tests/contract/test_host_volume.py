"""Volumes over a host directory keep the contract of protocol.volume: the host backend, and the helper of containers.

Each runs over a tmpfs of the size that a test asks for.

The host has no virtual clock, so the tests use `HostClock`.  The quota is the tmpfs's.
"""

from __future__ import annotations

import errno
import itertools
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from protocol.backends.host import HostVolume
from protocol.testing import Clock, Driver, MakeVolume, VolumeContract
from protocol.testing.volume.driver import ALICE, fails
from protocol.volume import ROOT_INODE, Volume
from tests.support.agents import local_agent
from tests.support.host_directories import HostClock, mounted_tmpfs
from tests.support.remote import remote_volume
from tests.support.rights import needs_root

pytestmark = needs_root

# struct vfs_cap_data of revision 2 (linux/capability.h): the host takes nothing else for a capability.
CAPABILITY = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)


class OverHostDirectory(VolumeContract):
    """The contract for a volume over a host directory.  Subclasses say how `opened` opens one."""

    def opened(self, place: Path) -> AbstractContextManager[Volume]:
        """The volume of the directory `place`, checked and closed after the block."""
        raise NotImplementedError

    @pytest.fixture
    def volume(self, tmp_path: Path) -> Iterator[MakeVolume]:
        with ExitStack() as stack:
            numbers = itertools.count()

            def make(
                *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
            ) -> Volume:
                place = tmp_path / f"tmpfs-{next(numbers)}"
                stack.enter_context(mounted_tmpfs(place, max_bytes=max_bytes, max_inodes=max_inodes))
                return stack.enter_context(self.opened(place))

            yield make

    @pytest.fixture
    def clock(self, tmp_path: Path) -> Clock:
        return HostClock(tmp_path / "probe")

    # -- what the host does in its own way -----------------------------------------------------
    def test_a_new_file_has_the_callers_owner_its_mode_and_the_time(self, fs: Driver, clock: Clock) -> None:
        now = clock.tick()
        number = fs.file(b"f", mode=0o4755)
        inode = fs.stat(number)
        assert (inode.mode, inode.uid, inode.gid) == (0o104755, 1000, 1000)
        assert (inode.nlink, inode.size, inode.blocks) == (1, 0, 0)
        assert inode.atime_ns == inode.mtime_ns == inode.birth_ns
        # Given to the caller when it was there already.
        assert (inode.mtime_ns, inode.ctime_ns) == (now, now)

    @pytest.fixture
    def shell_below(self, tmp_path: Path) -> Callable[[str], object]:
        """Runs a shell line of another program in the directory that the volume serves."""
        return lambda line: subprocess.run(["sh", "-c", line], cwd=tmp_path / "tmpfs-0", check=True)

    def test_an_append_is_at_the_end_that_another_program_made(
        self, fs: Driver, shell_below: Callable[[str], object]
    ) -> None:
        number = fs.file(b"f", b"one")
        shell_below("printf other >> f")
        assert fs.volume.append(number, b"two") == (3, 11)  # type: ignore[attr-defined]
        shell_below("truncate -s 1 f")
        assert fs.volume.append(number, b"three") == (5, 6)  # type: ignore[attr-defined]
        assert fs.read(number) == b"othree"

    def test_a_change_of_content_or_owner_removes_file_capabilities(self, fs: Driver) -> None:
        changes: tuple[Callable[[int], object], ...] = (
            lambda number: fs.volume.write(number, 0, b"x"),
            lambda number: fs.set(number, size=0),
            lambda number: fs.set(number, uid=3),
        )
        for at, change in enumerate(changes):
            number = fs.file(b"f%d" % at, b"abc")
            fs.volume.setxattr(number, b"security.capability", CAPABILITY, 0)
            fs.volume.setxattr(number, b"user.kept", b"1", 0)
            change(number)
            assert fs.volume.listxattr(number) == (b"user.kept",)

    def test_inodes_over_the_quota_are_refused_and_leave_no_trace(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_inodes=4))  # the root is one, and tmpfs counts a further link as one
        number = fs.file(b"a")
        fs.directory(b"b")
        fs.link(number, b"c")
        makers: tuple[Callable[[], object], ...] = (
            lambda: fs.file(b"d"),
            lambda: fs.directory(b"d"),
            lambda: fs.symlink(b"d", b"x"),
            lambda: fs.link(number, b"d"),
            lambda: fs.volume.tmpfile(ROOT_INODE, 0o600, ALICE),
        )
        for make in makers:
            with fails(errno.ENOSPC):
                make()
        assert fs.names() == [b"a", b"b", b"c"]
        fs.unlink(b"c")
        fs.file(b"d")


class TestHostVolume(OverHostDirectory):
    descriptors: int | None = None

    @contextmanager
    def opened(self, place: Path) -> Iterator[Volume]:
        volume = HostVolume(os.fsencode(place), descriptors=self.descriptors)
        try:
            yield volume
            volume.check_invariants()
        finally:
            volume.close()


@pytest.mark.extended
class TestHostVolumeWithFewDescriptors(TestHostVolume):
    """The same, when almost every call must close something to open something else."""

    descriptors = 2


@pytest.mark.extended
class TestAgentVolume(OverHostDirectory):
    """The helper that vfsd starts in containers, run on this host."""

    removed_files = 2_500  # each costs two round trips; the helper's listing has several parts from 1,000 on

    def opened(self, place: Path) -> AbstractContextManager[Volume]:
        return local_agent(str(place))  # type: ignore[return-value]


def test_a_host_volume_has_all_methods_of_its_protocol(tmp_path: Path) -> None:
    volume = HostVolume(os.fsencode(tmp_path))
    assert isinstance(volume, Volume)
    volume.close()


class TestRemoteVolume(OverHostDirectory):
    """`exec:COMMAND`, with the command `python3`."""

    # As over the helper alone.
    test_a_scan_lists_each_lasting_name_once_while_others_come_and_go = None  # type: ignore[assignment]
    test_rm_rf_removes_each_file_while_listing = None  # type: ignore[assignment]

    def opened(self, place: Path) -> AbstractContextManager[Volume]:
        return remote_volume(shlex.quote(sys.executable), str(place))  # type: ignore[return-value]
