"""The contract of attributes: modes, owners, times, extended attributes, statfs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import cast

import pytest

from protocol.testing.volume.driver import (
    KEEP_SIZE,
    PAGE_BYTES,
    PUNCH_HOLE,
    Clock,
    Driver,
    MakeVolume,
    VolumeSuite,
    fails,
)
from protocol.volume import ROOT_INODE


class AttributesContract(VolumeSuite):
    """The attributes of inodes."""

    # -- attributes --------------------------------------------------------------------------
    def test_setattr_sets_only_the_given_attributes(self, fs: Driver, clock: Clock) -> None:
        number = fs.file(b"f", b"x")
        before = fs.stat(number).mtime_ns
        now = clock.tick()
        shown = fs.set(number, mode=0o600, uid=5, gid=6)
        assert (shown.mode, shown.uid, shown.gid, shown.size) == (stat.S_IFREG | 0o600, 5, 6, 1)
        assert (shown.mtime_ns, shown.ctime_ns) == (before, now)

    def test_times_have_nanoseconds_and_may_be_before_1970(self, fs: Driver) -> None:
        number = fs.file(b"f")
        shown = fs.set(number, atime_ns=-1, mtime_ns=1_234_567_890_123_456_789)
        assert (shown.atime_ns, shown.mtime_ns) == (-1, 1_234_567_890_123_456_789)

    def test_writes_and_truncations_clear_suid_and_sgid_on_request(self, fs: Driver) -> None:
        number = fs.file(b"f", mode=0o6755)
        fs.volume.write(number, 0, b"xx")
        assert fs.stat(number).mode & 0o7777 == 0o6755
        fs.volume.write(number, 0, b"xx", kill_privileges=True)
        assert fs.stat(number).mode & 0o7777 == 0o755
        fs.set(number, mode=0o6755)
        assert fs.set(number, size=1, kill_privileges=True).mode & 0o7777 == 0o755
        fs.set(number, mode=0o6755)
        assert fs.set(number, uid=1, kill_privileges=True).mode & 0o7777 == 0o755

    def test_sgid_without_group_execute_is_no_privilege(self, fs: Driver) -> None:
        number = fs.file(b"f", mode=0o2644)
        fs.volume.write(number, 0, b"x", kill_privileges=True)
        assert fs.stat(number).mode & 0o7777 == 0o2644

    def test_a_directorys_set_gid_bit_survives_a_chown(self, fs: Driver) -> None:
        fs.directory(b"d")
        fs.set(b"d", mode=0o2755)
        assert fs.set(b"d", gid=9, kill_privileges=True).mode & 0o7777 == 0o2755

    def test_a_change_of_content_or_owner_removes_file_capabilities(self, fs: Driver) -> None:
        changes: tuple[Callable[[int], object], ...] = (
            lambda number: fs.volume.write(number, 0, b"x"),
            lambda number: fs.set(number, size=0),
            lambda number: fs.set(number, uid=3),
        )
        for at, change in enumerate(changes):
            number = fs.file(b"f%d" % at, b"abc")
            fs.volume.setxattr(number, b"security.capability", b"cap", 0)
            fs.volume.setxattr(number, b"user.kept", b"1", 0)
            change(number)
            assert fs.volume.listxattr(number) == (b"user.kept",)

    @pytest.mark.parametrize("what", ["write", "truncate", "punch"])
    def test_changing_content_updates_mtime_and_ctime(self, fs: Driver, clock: Clock, what: str) -> None:
        number = fs.file(b"f", b"x" * 5000)
        now = clock.tick()
        if what == "write":
            fs.volume.write(number, 0, b"y")
        elif what == "truncate":
            fs.set(number, size=100)
        else:
            fs.volume.fallocate(number, PUNCH_HOLE | KEEP_SIZE, 0, 4096)
        assert (fs.stat(number).mtime_ns, fs.stat(number).ctime_ns) == (now, now)

    def test_changing_names_updates_the_times_of_directories_and_the_ctime_of_the_inode(
        self, fs: Driver, clock: Clock
    ) -> None:
        fs.directory(b"d")
        number = fs.file(b"f")
        fs.file(b"d/victim")
        victim = fs.hold(b"d/victim")
        steps: tuple[tuple[Callable[[], object], tuple[bytes, ...], int], ...] = (
            (lambda: fs.link(number, b"d/g"), (b"d",), number),
            (lambda: fs.unlink(b"d/g"), (b"d",), number),
            (lambda: fs.rename(b"f", b"d/victim"), (b"", b"d"), number),
            (lambda: fs.directory(b"d/sub"), (b"d",), 0),
            (lambda: fs.rmdir(b"d/sub"), (b"d",), 0),
        )
        for change, directories, named in steps:
            created = fs.stat(number).mtime_ns
            now = clock.tick()
            change()
            for path in directories:
                assert (fs.stat(path).mtime_ns, fs.stat(path).ctime_ns) == (now, now)
            if named:
                assert (fs.stat(named).mtime_ns, fs.stat(named).ctime_ns) == (created, now)
        assert fs.stat(victim).nlink == 0

    def test_reading_changes_neither_mtime_nor_ctime(self, fs: Driver, clock: Clock) -> None:
        number = fs.file(b"f", b"x")
        before = fs.stat(number).mtime_ns, fs.stat(number).ctime_ns
        clock.tick()
        fs.read(number)
        fs.names()
        assert (fs.stat(number).mtime_ns, fs.stat(number).ctime_ns) == before

    # -- extended attributes -----------------------------------------------------------------
    def test_xattrs_are_set_listed_and_removed(self, fs: Driver, clock: Clock) -> None:
        number = fs.file(b"f")
        before = fs.stat(number).mtime_ns
        now = clock.tick()
        fs.volume.setxattr(number, b"user.a", b"\0binary\xff", 0)
        fs.volume.setxattr(number, b"user.b", b"", 0)
        assert (fs.stat(number).mtime_ns, fs.stat(number).ctime_ns) == (before, now)
        assert sorted(cast("tuple[bytes, ...]", fs.volume.listxattr(number))) == [b"user.a", b"user.b"]
        assert fs.volume.getxattr(number, b"user.a") == b"\0binary\xff"
        assert fs.volume.getxattr(number, b"user.b") == b""
        fs.volume.removexattr(number, b"user.a")
        for use in (fs.volume.getxattr, fs.volume.removexattr):
            with fails(errno.ENODATA):
                use(number, b"user.a")

    def test_xattr_flags_require_presence_or_absence(self, fs: Driver) -> None:
        number = fs.directory(b"d")
        with fails(errno.ENODATA):
            fs.volume.setxattr(number, b"user.a", b"1", os.XATTR_REPLACE)
        fs.volume.setxattr(number, b"user.a", b"1", os.XATTR_CREATE)
        with fails(errno.EEXIST):
            fs.volume.setxattr(number, b"user.a", b"2", os.XATTR_CREATE)
        fs.volume.setxattr(number, b"user.a", b"3", os.XATTR_REPLACE)
        assert fs.volume.getxattr(number, b"user.a") == b"3"

    # -- the rest ----------------------------------------------------------------------------
    def test_statfs_counts_used_space_and_inodes(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=100 * PAGE_BYTES, max_inodes=50))
        fs.file(b"f", b"x" * (PAGE_BYTES + 1))
        statfs = fs.volume.statfs()
        shown = {name: getattr(statfs, name, None) for name in ("blocks", "blocks_free", "inodes", "inodes_free")}
        assert shown == {"blocks": 100, "blocks_free": 98, "inodes": 50, "inodes_free": 48}

    def test_fsync_of_anything_is_allowed(self, fs: Driver) -> None:
        for number in (ROOT_INODE, fs.file(b"f", b"x"), fs.directory(b"d")):
            fs.volume.fsync(number, data_only=False)
