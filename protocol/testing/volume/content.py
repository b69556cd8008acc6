"""The contracts of content (reading, writing, sparse files, quota) and of attributes (modes, owners, times, xattrs)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import cast

import pytest

from protocol.testing.volume.driver import (
    ALICE,
    KEEP_SIZE,
    PAGE_BYTES,
    PUNCH_HOLE,
    Clock,
    Driver,
    MakeVolume,
    VolumeSuite,
    fails,
)
from protocol.volume import ROOT_INODE, Buffer, extended


class ContentContract(VolumeSuite):
    """The content of files."""

    # -- content -----------------------------------------------------------------------------
    def test_written_data_is_read_back_and_holes_are_zeros(self, fs: Driver) -> None:
        number = fs.file(b"f")
        for offset, data in ((0, b"start"), (4095, b"page edge"), (131_071, b"block edge"), (300_000, b"end")):
            assert fs.volume.write(number, offset, data) == len(data)
        expected = bytearray(300_003)
        for offset, data in ((0, b"start"), (4095, b"page edge"), (131_071, b"block edge"), (300_000, b"end")):
            expected[offset : offset + len(data)] = data
        assert not _difference(fs.read(number), expected)
        assert fs.read(number, 131_070, 5) == expected[131_070:131_075]
        assert fs.read(number, 300_001, 100) == b"nd"
        assert fs.read(number, 300_003, 1) == fs.read(number, 10**12, 1) == b""

    def test_any_buffer_can_be_written(self, fs: Driver) -> None:
        number = fs.file(b"f")
        buffers: tuple[Buffer, ...] = (b"ab", bytearray(b"ab"), memoryview(b"xaby")[1:3])
        for at, data in enumerate(buffers):
            fs.volume.write(number, 2 * at, data)
        assert fs.read(number) == b"ababab"

    def test_an_append_is_at_the_end_and_tells_the_size(self, fs: Driver) -> None:
        if not fs.volume.capabilities.appends:
            return
        volume = extended(fs.volume)
        number = fs.file(b"f", mode=0o4755)
        assert volume.append(number, b"x" * 4090) == (4090, 4090)
        assert volume.append(number, memoryview(b"0123456789")) == (10, 4100)
        fs.set(number, size=2)
        assert volume.append(number, b"yz", kill_privileges=True) == (2, 4)
        assert fs.read(number) == b"xxyz"
        assert fs.stat(number).mode & 0o7777 == 0o755
        with fails(errno.EISDIR):
            volume.append(ROOT_INODE, b"x")

    def test_writing_nothing_changes_nothing(self, fs: Driver, clock: Clock) -> None:
        number = fs.file(b"f", b"x")
        before = fs.stat(number).mtime_ns
        clock.tick()
        assert fs.volume.write(number, 100, b"") == 0
        assert (fs.stat(number).size, fs.stat(number).mtime_ns) == (1, before)

    def test_truncating_and_growing_again_reads_zeros(self, fs: Driver) -> None:
        for cut in (3, 4096, 5000, 131_072, 131_073):
            number = fs.file(b"f%d" % cut, b"x" * 200_000)
            fs.set(number, size=cut)
            fs.set(number, size=200_000)
            assert not _difference(fs.read(number), b"x" * cut + bytes(200_000 - cut))

    def test_a_sparse_file_of_10_to_the_15_takes_space_only_for_written_data(self, fs: Driver) -> None:
        number = fs.file(b"f")
        fs.set(number, size=10**15)
        assert (fs.stat(number).size, fs.stat(number).blocks) == (10**15, 0)
        assert fs.read(number, 10**15 - 10, 100) == bytes(10)
        fs.volume.write(number, 5 * 10**14, b"x")
        assert 0 < fs.stat(number).blocks <= 2 * 131_072 // 512
        fs.set(number, size=10)
        assert fs.stat(number).blocks == 0

    def test_the_largest_file_size_cannot_be_exceeded(self, fs: Driver) -> None:
        number = fs.file(b"f", b"x")
        with fails(errno.EFBIG):
            fs.volume.write(number, 2**63 - 1, b"xx")
        with fails(errno.EFBIG):
            fs.set(number, size=2**63)
        with fails(errno.EFBIG):
            fs.volume.fallocate(number, 0, 2**63 - 1, 10)
        assert fs.read(number) == b"x"

    def test_seek_distinguishes_data_and_holes(self, fs: Driver) -> None:
        number = fs.file(b"f")
        fs.volume.write(number, 1 << 20, b"x" * PAGE_BYTES)
        fs.set(number, size=4 << 20)
        data = fs.volume.seek(number, 0, os.SEEK_DATA)
        hole = fs.volume.seek(number, 1 << 20, os.SEEK_HOLE)
        assert isinstance(data, int)
        assert isinstance(hole, int)
        assert 0 < data <= 1 << 20
        assert (1 << 20) + PAGE_BYTES <= hole < 4 << 20
        assert fs.volume.seek(number, 0, os.SEEK_HOLE) == 0
        for offset, whence in ((hole, os.SEEK_DATA), (4 << 20, os.SEEK_DATA), (4 << 20, os.SEEK_HOLE)):
            with fails(errno.ENXIO):
                fs.volume.seek(number, offset, whence)

    def test_punching_a_hole_zeroes_it_keeps_the_size_and_frees_pages(self, fs: Driver) -> None:
        number = fs.file(b"f", b"x" * 20_000)
        before = fs.stat(number).blocks
        fs.volume.fallocate(number, PUNCH_HOLE | KEEP_SIZE, 4_000, 10_000)
        assert not _difference(fs.read(number), b"x" * 4_000 + bytes(10_000) + b"x" * 6_000)
        assert fs.stat(number).blocks == before - 2 * PAGE_BYTES // 512

    def test_fallocate_grows_the_file_unless_told_not_to(self, fs: Driver) -> None:
        number = fs.file(b"f", b"x")
        fs.volume.fallocate(number, KEEP_SIZE, 0, 10_000)
        assert fs.stat(number).size == 1
        assert fs.stat(number).blocks == 3 * PAGE_BYTES // 512
        fs.volume.fallocate(number, 0, 0, 10_000)
        assert not _difference(fs.read(number), b"x" + bytes(9_999))
        with fails(errno.EOPNOTSUPP):
            fs.volume.fallocate(number, 0x20, 0, 4096)
        for offset, length in ((-1, 1), (0, 0)):
            with fails(errno.EINVAL):
                fs.volume.fallocate(number, 0, offset, length)

    def test_copy_range_copies_up_to_the_end_of_the_source(self, fs: Driver) -> None:
        source, target = fs.file(b"a", bytes(range(256)) * 1000), fs.file(b"b", b"y" * 10)
        assert fs.volume.copy_range(source, 100, target, 5, 10**6) == 255_900
        assert not _difference(fs.read(target), b"yyyyy" + fs.read(source)[100:])
        assert fs.volume.copy_range(source, 10**7, target, 0, 10) == 0

    # -- quota -------------------------------------------------------------------------------
    def test_a_write_over_the_quota_is_cut_to_what_fits_and_then_refused(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=10 * PAGE_BYTES))
        number = fs.file(b"f")
        assert fs.volume.write(number, 100, b"x" * 20 * PAGE_BYTES) == 10 * PAGE_BYTES - 100
        assert fs.stat(number).size == 10 * PAGE_BYTES
        with fails(errno.ENOSPC):
            fs.volume.write(number, 10 * PAGE_BYTES, b"y")
        assert not _difference(fs.read(number), bytes(100) + b"x" * (10 * PAGE_BYTES - 100))
        assert fs.volume.write(number, 0, b"y" * PAGE_BYTES) == PAGE_BYTES  # takes no room
        statfs = fs.volume.statfs()
        assert (getattr(statfs, "blocks_free", None), getattr(statfs, "blocks", None)) == (0, 10)

    def test_space_is_freed_when_files_shrink_or_are_removed(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=10 * PAGE_BYTES))
        fs.file(b"a", b"x" * 5 * PAGE_BYTES)
        fs.file(b"b", b"x" * 5 * PAGE_BYTES)
        fs.set(b"a", size=PAGE_BYTES)
        number = fs.hold(b"b")
        fs.unlink(b"b")
        last = fs.file(b"c", b"y" * 4 * PAGE_BYTES)
        with fails(errno.ENOSPC):  # what is open still takes its room
            fs.volume.write(last, 4 * PAGE_BYTES, b"y")
        fs.volume.forget(number, 1)
        assert fs.volume.write(last, 4 * PAGE_BYTES, b"y" * 5 * PAGE_BYTES) == 5 * PAGE_BYTES

    def test_fallocate_reserves_space_for_later_writes(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=10 * PAGE_BYTES))
        number = fs.file(b"f")
        with fails(errno.ENOSPC):
            fs.volume.fallocate(number, 0, 0, 11 * PAGE_BYTES)
        assert (fs.stat(number).size, fs.stat(number).blocks) == (0, 0)
        fs.volume.fallocate(number, 0, 0, 8 * PAGE_BYTES)
        with fails(errno.ENOSPC):
            fs.volume.fallocate(fs.file(b"g"), 0, 0, 3 * PAGE_BYTES)
        assert fs.volume.write(number, 0, b"x" * 8 * PAGE_BYTES) == 8 * PAGE_BYTES

    def test_holes_take_no_space(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_bytes=10 * PAGE_BYTES))
        fs.set(fs.file(b"f"), size=10**12)
        fs.file(b"g", b"x" * 10 * PAGE_BYTES)

    def test_inodes_over_the_quota_are_refused_and_leave_no_trace(self, volume: MakeVolume) -> None:
        fs = Driver(volume(max_inodes=3))  # the root is one
        number = fs.file(b"a")
        fs.directory(b"b")
        makers: tuple[Callable[[], object], ...] = (
            lambda: fs.file(b"c"),
            lambda: fs.directory(b"c"),
            lambda: fs.symlink(b"c", b"x"),
            lambda: fs.volume.tmpfile(ROOT_INODE, 0o600, ALICE),
        )
        for make in makers:
            with fails(errno.ENOSPC):
                make()
        assert fs.names() == [b"a", b"b"]
        fs.link(number, b"c")
        fs.unlink(b"c")
        fs.unlink(b"a")
        fs.file(b"c")


def _difference(found: bytes, expected: bytes | bytearray) -> str:
    """Where two long contents first differ; "" where they do not.  pytest would explain each byte, for minutes."""
    if len(found) != len(expected):
        return f"{len(found)} bytes, not {len(expected)}"
    return next((f"at byte {at}" for at, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), "")


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
