"""The contract of content: reading, writing, sparse files, the quota."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import cast

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
from protocol.volume import ROOT_INODE, AppendingVolume, Buffer


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
        volume = cast("AppendingVolume", fs.volume)
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
