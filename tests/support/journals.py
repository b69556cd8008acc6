"""A journal in memory, and the comparison of a volume with what its journal is replayed to."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.inode import Inode
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.inode import LowerContent
from protocol.backends.overlay.lower import Lower
from protocol.diff.tree_diff import same_bytes
from protocol.journal.directory import Journal
from protocol.journal.log import Log, LogFile
from protocol.journal.records import (
    FORMAT_VERSION,
    Buffer,
    Extent,
    FileHeader,
    Kind,
    read_header,
    read_records,
    verify,
)

HEADER = FileHeader(FORMAT_VERSION, "log", "j", {"kind": "memory"}, 1, 1, 0xFEEDBEEF)


class FileInMemory(LogFile):
    """Holds a log.  A `limit` is the size of the disk."""

    def __init__(self, limit: int | None = None) -> None:
        self.content = bytearray(HEADER.encoded())
        self.limit = limit
        self.error = 0  # the errno of all syncs, and of writes, which write only the first half; 0: none fails

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        self.content.extend(bytes(max(0, offset - len(self.content))))
        if self.error:
            self.content[offset : offset + len(data) // 2] = data[: len(data) // 2]
            raise OSError(self.error, os.strerror(self.error))
        self.content[offset : offset + len(data)] = data
        return len(data)

    def allocate(self, offset: int, length: int) -> None:
        if self.limit is not None and offset + length > self.limit:
            raise OSError(28, "No space left on device")

    def reader(self) -> BinaryIO:
        return io.BytesIO(self.content)

    def truncate(self, length: int) -> None:
        del self.content[length:]

    def overwrites_in_place(self) -> bool:
        return True

    def sync(self) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def close(self) -> None:
        pass


class JournalInMemory:
    """Has the parts of a `Journal` that a volume uses."""

    def __init__(self, limit: int | None = None) -> None:
        self.file = FileInMemory(limit)
        self.log = Log(self.file, HEADER, Extent(len(self.file.content), 1, False, 0), "no")

    def keep(self, volume: MemoryVolume) -> None:
        """Record the changes of `volume`."""
        volume.keep_journal(cast("Journal", self), is_new=True)

    def close(self) -> None:
        self.log.close()

    def detach(self) -> None:
        self.log.detach()

    def batches(self) -> list[list[bytes]]:
        """Return what a daemon that starts now would replay."""
        file = io.BytesIO(self.file.content)
        header = read_header(file, "log")
        start = file.tell()
        extent = verify(file, header, "log")
        batches, parts = [], []
        for record in read_records(file, header, start, extent.end):
            if record.kind == Kind.ABORT:
                parts = []
            elif record.kind != Kind.MARK:
                parts.append(record.payload)
                if record.kind == Kind.COMMIT:
                    batches.append(parts)
                    parts = []
        return batches


def replayed(batches: list[list[bytes]]) -> MemoryVolume:
    """Return a new volume after the batches."""
    volume = MemoryVolume(uid=77, gid=78, clock=lambda: 0)
    volume.replay(batches)
    return volume


def replayed_over(lower: Lower | bytes, batches: list[list[bytes]]) -> OverlayVolume:
    """Return a new overlay over `lower` after the batches."""
    volume = OverlayVolume(lower, clock=lambda: 0)
    volume.replay(batches)
    return volume


def assert_same_changes(first: OverlayVolume, second: OverlayVolume) -> None:
    """Compare what a journal of `first` has: every inode that ever changed, and those above.  Load nothing."""
    ours, theirs = first._overlay, second._overlay
    assert ours.recorded.keys() == theirs.recorded.keys()
    assert ours.listed == theirs.listed
    for number in ours.recorded:
        mine, its = ours.table.loaded(number), theirs.table.loaded(number)
        if mine is None or not mine.nlink:
            assert its is None or not its.nlink
            continue
        assert its is not None
        names = ("mode", "uid", "gid", "size", "mtime_ns", "ctime_ns", "birth_ns", "generation", "target", "xattrs")
        assert {name: getattr(mine, name) for name in names} == {name: getattr(its, name) for name in names}, number
        if number in ours.listed or mine.children is None:
            assert mine.nlink == its.nlink
        if number in ours.listed:
            assert mine.children == its.children
        if isinstance(mine.content, LowerContent):
            assert isinstance(its.content, LowerContent)
            # The second value is the device, which can be another one.
            assert mine.content.source[2:] == its.content.source[2:]
            assert mine.content.visible == its.content.visible
            assert mine.content.pages == its.content.pages
            assert mine.content.reserved == its.content.reserved


def load_all(volume: OverlayVolume) -> None:
    """Load every entry and inode of an overlay."""
    volume._overlay._load_all()
    for number in [*volume._overlay._waiting]:
        volume._overlay.table.get(number)


def assert_same_volume(first: MemoryVolume, second: MemoryVolume) -> None:
    """Compare every attribute of every inode with a name, and every snapshot."""
    first_inodes, second_inodes = (_linked(volume) for volume in (first, second))
    assert first_inodes.keys() == second_inodes.keys()
    for number, inode in first_inodes.items():
        assert facts(inode) == facts(second_inodes[number]), number
    infos = list(first.snapshots())
    assert infos == list(second.snapshots())
    for info in infos:
        with first.tree(info.name) as one, second.tree(info.name) as other:
            entries = list(one.walk())
            assert entries == list(other.walk()), info.name
            for entry in entries:
                if entry.is_file:
                    assert same_bytes(one.chunks(entry.path), other.chunks(entry.path)), (info.name, entry.path)
    assert first.notes == second.notes


def _linked(volume: MemoryVolume) -> dict[int, Inode]:
    return {number: inode for number, inode in volume._state.inodes.items() if inode.nlink}


def facts(inode: Inode) -> dict[str, Any]:
    """Return all attributes of an inode but its access time, with its content."""
    content = inode.content
    return {
        "attributes": [
            getattr(inode, name)
            for name in (
                "inode",
                "mode",
                "nlink",
                "uid",
                "gid",
                "rdev",
                "size",
                "mtime_ns",
                "ctime_ns",
                "birth_ns",
                "generation",
                "blocks",
                "target",
            )
        ],
        "links": set(inode.links),
        "xattrs": list((inode.xattrs or {}).items()),
        "children": inode.children,
        "content": bytes(content.read(0, inode.size)) if content is not None else bytes(inode.size),
        "data": _joined(list(content.data_ranges(inode.size))) if content is not None else [],
        "reserved": content.reserved if content is not None else (),
    }


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, length in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined
