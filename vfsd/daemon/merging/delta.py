"""Delta: the differences between two states of one workspace, as a stream of bytes.

A stream is a sequence of frames: four bytes with the length, and a message in msgpack.  It begins with an `Entry` for
each path that the newer state has and a `Gone` for each path that it lacks, as `differences` yields them.  The `Data`
of a file follow its `Entry`, each with its bytes after the frame; what no `Data` covers is a hole.  `End` has the
SHA-256 of everything before it.

This is not the ZIP format of `protocol.archive`: an archive is a whole tree, has limits on paths and attributes that a
file system does not have, and takes twice as long to write and to read.  Content that the receiver has is not sent: an
`Entry` can name the path at which the older state has it, so a renamed directory takes a few bytes for each file.

The size is proportional to the number of changed paths and to the changed files' content.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, Final, TypeAlias

import msgspec

from protocol.diff.tree_diff import Comparison, compare, comparer, has_links, is_below, linked_changes
from protocol.errors import shown
from protocol.tree import Hole, Tree, TreeEntry
from protocol.volume import Volume
from protocol.volume_extensions import StagingVolume, staging

_LENGTH_BYTES: Final = 4
_CHUNK_BYTES: Final = 128 * 1024
_FRAME_MAX_BYTES: Final = 32 << 20  # far more than an entry can have: xattrs, target and path


class Entry(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """One path of the newer state.

    `inode` of `entry` is the number in the sender's state.  `origin` is a path of that inode in the older state, if
    there is one; `is_same`: the content is that of `origin` there.
    """

    entry: TreeEntry
    origin: bytes | None
    is_same: bool


class Gone(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """A path that only the older state has.  Everything below it is gone too."""

    path: bytes


class Data(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Content of the last `Entry`, from `offset` on."""

    offset: int
    size: int


class End(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """The end of the stream."""

    digest: bytes


_Frame: TypeAlias = Entry | Gone | Data | End
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Frame)


def write_delta(old: Tree, new: Tree, write: Callable[[bytes], object], keep_going: Callable[[], None]) -> int:
    """Write the differences from `old` to `new`; return the number of paths.  A worker thread.

    `write` and `keep_going` are called often; an exception that one of them raises ends the work.
    """
    digest = hashlib.sha256()

    def send(frame: _Frame, data: bytes = b"") -> None:
        message = _encoder.encode(frame)
        piece = b"".join((len(message).to_bytes(_LENGTH_BYTES, "big"), message, data))
        digest.update(piece)
        write(piece)

    found = list(differences(old, new, keep_going))
    origins = {one.old.inode: one.path for one in found if one.old is not None and one.old.inode}
    gone: bytes | None = None
    for one in found:
        keep_going()
        if one.new is None:
            if gone is None or not is_below(one.path, gone):
                gone = one.path
                send(Gone(one.path))
            continue
        origin = one.path if one.old is not None and one.old.inode == one.new.inode else origins.get(one.new.inode)
        is_same = _has_same_content(old, new, one, origin)
        send(Entry(msgspec.structs.replace(one.new, xattrs=dict(one.new.xattrs), ctime_ns=0), origin, is_same))
        if one.new.is_file and not is_same:
            for data in _content(new, one.new, keep_going):
                send(*data)
    send(End(digest.digest()))
    return len(found)


def differences(old: Tree, new: Tree, keep_going: Callable[[], None]) -> Iterator[Comparison]:
    """Compare two trees.  A file whose only difference is its set of hard links counts as changed, and comes last."""
    linked = {}
    for one in compare(old, new, keep_going=keep_going):
        left, right = one.old, one.new
        if one.kind is not None:
            yield one
        elif left is not None and right is not None and not right.is_dir:
            if (left.inode, left.nlink) != (right.inode, right.nlink):
                yield one
            elif has_links(right):
                linked[one.path] = one
    yield from (linked[change.path] for change in linked_changes(old, new, linked.values(), keep_going))


def _has_same_content(old: Tree, new: Tree, one: Comparison, origin: bytes | None) -> bool:
    """Whether the file has the content that `origin` has in `old`, as far as that is known without reading."""
    assert one.new is not None
    if origin is None or not one.new.is_file:
        return False
    if origin == one.path:
        return one.kind in (None, "metadata")
    comparing = comparer(new)
    return comparing is not None and comparing.same_content(one.path, old, origin) is True


def _content(tree: Tree, entry: TreeEntry, keep_going: Callable[[], None]) -> Iterator[tuple[Data, bytes]]:
    """The content of a file, without blocks of zeros."""
    offset = 0
    zeros = bytes(_CHUNK_BYTES)
    for chunk in tree.chunks(entry.path, _CHUNK_BYTES):
        keep_going()
        if not isinstance(chunk, Hole) and chunk != zeros[: len(chunk)]:
            yield Data(offset, len(chunk)), chunk
        offset += len(chunk)
    if offset != entry.size:
        raise OSError(errno.EIO, "the file changed while it was read", shown(entry.path))


class Extent(msgspec.Struct, frozen=True):
    """`size` bytes of a file, from its `offset` on, which are in the receiver's buffer from `at` on."""

    offset: int
    size: int
    at: int


class Delta:
    """A delta that was received.  `content[path]` are the extents of a file whose content was sent."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.gone: set[bytes] = set()
        self.content: dict[bytes, list[Extent]] = {}

    def paths(self) -> Iterator[bytes]:
        """All paths at which the two states differ, or below which they do (`gone`)."""
        return itertools.chain(self.entries, self.gone)


class DeltaReader:
    """Reads a stream: pass each piece to `feed`, and call `finish` at the end.

    `store` keeps content, and returns where.  `reserve` is called with the number of bytes that are about to be kept,
    and may raise.  EIO for a stream that is damaged.
    """

    def __init__(self, store: Callable[[bytes], int], reserve: Callable[[int], None]) -> None:
        self._store = store
        self._reserve = reserve
        self._digest = hashlib.sha256()
        self._buffer = bytearray()
        self._data: Data | None = None  # whose bytes come next
        self._last: bytes | None = None  # the path of the last entry with content
        self.delta = Delta()
        self.is_complete = False

    def feed(self, piece: bytes) -> bytes:
        """Take the next piece.  Returns what follows the end of the stream."""
        self._buffer += piece
        start = 0
        while not self.is_complete:
            end = self._take(start)
            if end is None:
                break
            start = end
        rest = bytes(memoryview(self._buffer)[start:])
        if self.is_complete:
            self._buffer.clear()
            return rest
        self._buffer = bytearray(rest)
        return b""

    def finish(self) -> Delta:
        """Return the delta.  EIO if the stream is not complete."""
        if not self.is_complete:
            raise _damaged("it is not complete")
        return self.delta

    def _take(self, start: int) -> int | None:
        """Take what begins at `start` of the buffer; return where the next begins, None if it is not complete."""
        view = memoryview(self._buffer)
        if self._data is not None:
            end = start + self._data.size
            if end > len(view):
                return None
            content = bytes(view[start:end])
            self._digest.update(content)
            self._keep(self._data, content)
            self._data = None
            return end
        body = start + _LENGTH_BYTES
        size = int.from_bytes(view[start:body], "big")
        if size > _FRAME_MAX_BYTES:
            raise _damaged(f"a frame of {size:,} bytes")
        if body + size > len(view):
            return None
        try:
            frame = _decoder.decode(view[body : body + size])
        except msgspec.DecodeError as error:
            raise _damaged(str(error)) from None
        if isinstance(frame, End):
            if frame.digest != self._digest.digest():
                raise _damaged("its hash is wrong")
            self.is_complete = True
            return body + size
        self._digest.update(view[start : body + size])
        self._reserve(size)
        self._take_frame(frame)
        return body + size

    def _take_frame(self, frame: Entry | Gone | Data) -> None:
        if isinstance(frame, Data):
            if self._last is None or not 0 < frame.size <= _CHUNK_BYTES:
                raise _damaged("content without a file")
            self._data = frame
        elif isinstance(frame, Gone):
            self.delta.gone.add(frame.path)
        else:
            path = frame.entry.path
            self.delta.entries[path] = frame
            self._last = None
            if frame.entry.is_file and not frame.is_same:
                self.delta.content[path] = []
                self._last = path

    def _keep(self, data: Data, content: bytes) -> None:
        assert self._last is not None
        self._reserve(len(content))
        self.delta.content[self._last].append(Extent(data.offset, data.size, self._store(content)))


def _damaged(reason: str) -> OSError:
    return OSError(errno.EIO, f"the changes of the other workspace arrived damaged: {reason}; nothing was changed")


class Buffer:
    """A buffer that lives until the stack is closed that it was opened with.

    `free_bytes`: how much it can take.  `reserve` is called with the number of bytes that are about to be kept, here or
    as what is known of paths, and raises ENOSPC if they do not fit.
    """

    def __init__(self, descriptor: int, free_bytes: int, reserve: Callable[[int], None]) -> None:
        self._file = descriptor
        self._size = 0
        self.free_bytes = free_bytes
        self.reserve = reserve

    def store(self, content: bytes) -> int:
        """Append `content`; return where it begins."""
        at = self._size
        os.pwrite(self._file, content, at)
        self._size += len(content)
        return at

    def read(self, at: int, size: int) -> bytes:
        """Read back what was stored."""
        return os.pread(self._file, size, at)


def buffer_on_disk(directory: str, stack: AsyncExitStack) -> Buffer:
    """Open a buffer in `directory`."""
    file = stack.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0)).fileno()  # noqa: SIM115 (the stack)
    found = os.fstatvfs(file)
    return Buffer(file, found.f_bavail * found.f_frsize, lambda _: None)


def buffer_in_memory(volume: Volume, stack: AsyncExitStack) -> Buffer:
    """Open a buffer in memory, within the limits of `volume`."""
    stats: Any = volume.statfs()
    stageable = staging(volume)
    reserve: Callable[[int], None] = (lambda _: None) if stageable is None else _reserving(stageable, stack)
    file = os.memfd_create("vfsd-merge", os.MFD_CLOEXEC)
    stack.callback(os.close, file)
    return Buffer(file, stats.blocks_free * stats.block_size, reserve)


def _reserving(volume: StagingVolume, stack: AsyncExitStack) -> Callable[[int], None]:
    stage = volume.new_stage()
    stack.callback(stage.give_back)
    reserve = stack.enter_context(stage.reserving())

    def reserved(size: int) -> None:
        try:
            reserve(size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            reason = "the changes of the other workspace do not fit in memory (--max-memory); nothing was changed"
            raise OSError(errno.ENOSPC, reason) from None

    return reserved
