"""Decodes and checks a helper's replies: WireError for values that no correct helper sends.

The checks keep invalid values from the kernel: the inode number of the root for another file, unknown file types,
negative sizes, invalid names, cookies that do not increase.

`FrameDecoder` checks the length in a frame's header against `limit`.  So a frame that belongs to no request, or is
longer than the request allows, is refused before it takes memory.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from protocol.backends.container.helper.wire import (
    ATTRIBUTE_COUNT,
    ENTRY,
    HEADER,
    KNOWN,
    NAME_MAX,
    SECOND_NS,
    TREE_ENTRY,
    XATTR,
    WireError,
)
from protocol.backends.container.inode_map import IDENTITY, IdMap
from protocol.tree import TreeEntry
from protocol.volume import ROOT_INODE, DirectoryEntry, PlainAttributes, StatFs

_MOST_INODE: Final = 1 << 62  # larger numbers are those of snapshots (`snapshot_directory`) and the flags of engines
_KINDS: Final = frozenset(
    {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK}
)
_MOST_32: Final = 0xFFFFFFFF
_PATH_BYTES: Final = 64 * 1024
_TARGET_BYTES: Final = 4095
_DOTS: Final = {1: b".", 2: b".."}  # by their cookies


def attributes_in(numbers: tuple[int, ...], ids: IdMap = IDENTITY, *, root: bool = False) -> PlainAttributes:
    """Parse attributes; `root`: they may be those of the root."""
    if len(numbers) != ATTRIBUTE_COUNT:
        raise WireError(f"{len(numbers)} numbers for attributes")
    inode, mode, nlink, uid, gid, rdev, size, blocks, *times = numbers
    if not (ROOT_INODE if root else ROOT_INODE + 1) <= inode < _MOST_INODE:
        raise WireError(f"inode {inode}")
    if mode & ~0o7777 not in _KINDS:
        raise WireError(f"mode {mode:o}")
    if not (0 <= nlink <= _MOST_32 and 0 <= uid <= _MOST_32 and 0 <= gid <= _MOST_32):
        raise WireError(f"links, user or group {nlink}, {uid}, {gid}")
    if size < 0 or blocks < 0 or rdev < 0:
        raise WireError(f"size, blocks or device {size}, {blocks}, {rdev}")
    atime_s, mtime_s, ctime_s, birth_s, *parts = times
    if min(parts) < 0 or max(parts) >= SECOND_NS:
        raise WireError(f"nanoseconds {parts}")
    if ids is not IDENTITY:
        uid, gid = ids.users.outside(uid), ids.groups.outside(gid)
    return PlainAttributes(
        inode, mode, nlink, uid, gid, rdev, size, blocks,
        atime_s * SECOND_NS + parts[0], mtime_s * SECOND_NS + parts[1], ctime_s * SECOND_NS + parts[2],
        birth_s * SECOND_NS + parts[3],
    )  # fmt: skip


class Listed(NamedTuple):
    """An entry of a directory, with its attributes and one lookup unless it is a dot."""

    entry: DirectoryEntry
    seen: PlainAttributes | None


def entries_in(blob: bytes, cookie: int, ids: IdMap = IDENTITY) -> Iterator[Listed]:
    """Parse a page of a directory: the entries after `cookie`."""
    at = 0
    while at < len(blob):
        if len(blob) - at < ENTRY.size:
            raise WireError("half an entry")
        following, *fields, length = ENTRY.unpack_from(blob, at)
        name = blob[at + ENTRY.size : at + ENTRY.size + length]
        at += ENTRY.size + length
        if len(name) != length or following <= cookie:
            raise WireError(f"entry {name!r} with cookie {following} after {cookie}")
        cookie = following
        if cookie in _DOTS:
            if name != _DOTS[cookie] or not ROOT_INODE <= fields[0] < _MOST_INODE:
                raise WireError(f"{name!r} as {_DOTS[cookie]!r}")
            yield Listed(DirectoryEntry(name, fields[0], stat.S_IFDIR, cookie), None)
            continue
        if not 0 < length <= NAME_MAX or b"/" in name or b"\0" in name or name in _DOTS.values():
            raise WireError(f"name {name!r}")
        seen = attributes_in(tuple(fields), ids)
        yield Listed(DirectoryEntry(name, seen.inode, seen.mode, cookie), seen)


class KnownInode(NamedTuple):
    """An inode that the helper counts lookups of.  `parent` is 0 for one without a name."""

    number: int
    kind: int
    lookups: int
    parent: int
    name: bytes


def known_in(blob: bytes, after: int) -> Iterator[KnownInode]:
    """Parse a page of the inodes with numbers beyond `after`."""
    at = 0
    while at < len(blob):
        if len(blob) - at < KNOWN.size:
            raise WireError("half an inode")
        number, kind, lookups, parent, length = KNOWN.unpack_from(blob, at)
        name = blob[at + KNOWN.size : at + KNOWN.size + length]
        at += KNOWN.size + length
        if not max(after, ROOT_INODE) < number < _MOST_INODE or kind not in _KINDS or lookups <= 0:
            raise WireError(f"inode {number} of type {kind:o} with {lookups} lookups after {after}")
        if len(name) != length or parent < 0 or bool(parent) != (0 < length <= NAME_MAX) or b"/" in name:
            raise WireError(f"inode {number} at {name!r} in {parent}")
        after = number
        yield KnownInode(number, kind, lookups, parent, name)


def tree_entries_in(blob: bytes, ids: IdMap = IDENTITY) -> Iterator[TreeEntry]:
    """Parse a page of a walk.  The caller checks the order of the entries."""
    at = 0
    while at < len(blob):
        if len(blob) - at < TREE_ENTRY.size:
            raise WireError("half an entry")
        (
            mode, size, mtime_s, mtime_ns, ctime_s, ctime_ns, uid, gid, nlink, inode, rdev, *lengths,
        ) = TREE_ENTRY.unpack_from(blob, at)  # fmt: skip
        at += TREE_ENTRY.size
        parts = []
        for length in lengths:
            parts.append(blob[at : at + length])
            at += length
        path, target, xattrs = parts
        if at > len(blob) or len(path) > _PATH_BYTES or b"\0" in path or mode & ~0o7777 not in _KINDS:
            raise WireError(f"entry {path[:100]!r} of mode {mode:o}")
        counts = (nlink, uid, gid, rdev)
        if (
            min(counts) < 0
            or max(counts) > _MOST_32
            or size < 0
            or not 0 <= mtime_ns < SECOND_NS
            or not 0 <= ctime_ns < SECOND_NS
            or not 0 < inode < _MOST_INODE
        ):
            raise WireError(f"entry {path!r} of {counts}, {size} bytes, inode {inode}")
        if stat.S_ISLNK(mode) != bool(target) or len(target) > _TARGET_BYTES or b"\0" in target:
            raise WireError(f"entry {path!r} with the target {target[:100]!r}")
        if not stat.S_ISREG(mode):
            size = len(target)
        yield TreeEntry(
            path, mode, size, mtime_s * SECOND_NS + mtime_ns, ids.users.outside(uid), ids.groups.outside(gid),
            nlink, inode, rdev, target, dict(_xattrs_in(xattrs)), ctime_s * SECOND_NS + ctime_ns,
        )  # fmt: skip


def _xattrs_in(blob: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(blob):
        if len(blob) - at < XATTR.size:
            raise WireError("half an attribute")
        of_name, of_value = XATTR.unpack_from(blob, at)
        at += XATTR.size
        name, value = blob[at : at + of_name], blob[at + of_name : at + of_name + of_value]
        at += of_name + of_value
        if at > len(blob) or not 0 < of_name <= NAME_MAX or b"\0" in name:
            raise WireError(f"attribute {name!r}")
        yield name, value


def statfs_in(numbers: tuple[int, ...]) -> StatFs:
    """Parse the numbers of statfs."""
    if len(numbers) != 6 or min(numbers) < 0 or not 0 < numbers[0] <= _MOST_32:
        raise WireError(f"statfs {numbers}")
    block_size, blocks, free, inodes, inodes_free, name_max = numbers
    return StatFs(block_size, blocks, free, inodes, inodes_free, min(name_max, NAME_MAX))


def number_in(numbers: tuple[int, ...], most: int) -> int:
    """The single number of a reply, from 0 to `most`."""
    if len(numbers) != 1 or not 0 <= numbers[0] <= most:
        raise WireError(f"{numbers} where a number up to {most} was expected")
    return numbers[0]


def appended_in(numbers: tuple[int, ...], most: int) -> tuple[int, int]:
    """The reply to an append of `most` bytes: the count written, and the size of the file."""
    if len(numbers) != 2 or not 0 <= numbers[0] <= min(most, numbers[1]):
        raise WireError(f"{numbers} for an append of {most} bytes")
    return numbers[0], numbers[1]


def string_in(strings: list[bytes], most: int) -> bytes:
    """The single string of a reply, of at most `most` bytes."""
    if len(strings) != 1 or len(strings[0]) > most:
        raise WireError(f"{len(strings)} strings, of {[len(one) for one in strings[:3]]} bytes")
    return strings[0]


class Frame(NamedTuple):
    """One reply: the `number` of its request, the `code` 0 or an errno, and the `body` that `wire.unpack` decodes."""

    number: int
    code: int
    body: bytes


class FrameDecoder:
    """Decodes frames.  `limit` returns the largest size of the reply to a request; WireError for an unknown request."""

    def __init__(self, limit: Callable[[int], int]) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._needed = HEADER.size
        self._header: tuple[int, int, int] | None = None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add `data`; yield the frames that are complete now.  The caller must exhaust the iterator.  WireError."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= self._needed:
            if self._header is None:
                self._header = length, number, code = HEADER.unpack_from(self._buffer, at)
                if length > self._limit(number):
                    raise WireError(f"a reply of {length} bytes to request {number}")
                at += HEADER.size
                self._needed = length
            else:
                length, number, code = self._header
                body = bytes(memoryview(self._buffer)[at : at + length])
                at += length
                self._header, self._needed = None, HEADER.size
                yield Frame(number, code, body)
        if at:
            del self._buffer[:at]
