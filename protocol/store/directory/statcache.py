"""StatCache: the directories of the previous scan, so that unchanged files are not read again.

A file counts as unchanged if its inode number, size, mode, owner, link count, ctime and mtime are the same.  But a file
that changes twice within one tick of the file system's clock would look unchanged.  So a file whose ctime was not
safely in the past when it was scanned is "racy": the next scan reads it again (git does the same with its index).

On disk the cache is a log of directories, each with a checksum; the last entry of a path is valid.  The log is not
synced; a torn entry and all after it are ignored.  The cache names the store's generation, which ends with a garbage
collection: what the cache says about a file stays true, but the store may no longer have the content.

Threading: one thread at a time.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Final

import msgspec

from protocol.linux.regular_file import open_regular, read_regular, write_atomically
from protocol.linux.statx import RECORD_BYTES, change_key
from protocol.store.format.rows import Row, TreeCounts, decode_listing

_MAGIC: Final = b"vfsdstat3"
_FRAME: Final = struct.Struct("<II")  # length, crc32
_SLACK_BYTES: Final = 1 << 20


class CachedDirectory(msgspec.Struct, array_like=True, dict=True, eq=False):
    """A scanned directory, as it is in the log.  Its attributes are not written: they follow from the fields."""

    path: bytes
    own: bytes  # `change_key` of the directory itself
    listed_racy: bool  # entries may have changed without a change of the directory's times
    names: list[bytes]
    records: bytes  # RECORD_BYTES for each name
    racy: frozenset[bytes]  # names to read again
    listing: bytes
    digest: bytes  # of the listing
    counts: TreeCounts
    links: dict[int, int]  # size of each file with several names, by inode number
    is_stored: bool
    """Whether a snapshot was taken of it.  A directory that was only scanned has a digest, but the store may lack the
    contents, even if it has the same listing from an earlier snapshot."""

    def __post_init__(self) -> None:
        self.children: dict[bytes, CachedDirectory] = {}
        self.row: Row | None = None
        self.inodes: bytes | None = None  # the digest of its inode listing, if that was made
        self.outdated: set[bytes] = set()  # names whose content is newer than their record; all of them are racy

    @property
    def is_plain(self) -> bool:
        """Whether an unchanged `records` means that nothing in the directory changed."""
        return not self.children and not self.racy

    def key_at(self, path: bytes) -> bytes | None:
        """The `change_key` of the entry at `path`, below this directory; None if there was none."""
        directory, rest = self, path
        while b"/" in rest:
            name, _, rest = rest.partition(b"/")
            below = directory.children.get(name)
            if below is None:
                return None
            directory = below
        at = bisect.bisect_left(directory.names, rest)
        if at == len(directory.names) or directory.names[at] != rest:
            return None
        return change_key(directory.records, at)

    def rows(self) -> dict[bytes, Row]:
        """Its rows by name."""
        return {row.name: row for row in decode_listing(self.listing)}


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(CachedDirectory)


class StatCache:
    """The directories of a workspace, in the file `path` (None: in memory only)."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._loaded = path is None
        self._generation = 0  # in which the store had every content that is named here
        self._present_generation = 0
        self._log_bytes = 0
        self._base_bytes = 0  # size of the log when it was last rewritten
        self.root: CachedDirectory | None = None
        """The root directory with everything below it; None if nothing is cached."""

    @property
    def is_trusted(self) -> bool:
        """Whether the store still has every content that is named here."""
        return self._generation == self._present_generation

    def prepare(self, generation: int) -> None:
        """Load the directories for a scan in the store's present `generation`."""
        if not self._loaded:
            self._loaded = True
            self._load()
        self._present_generation = generation

    def learn(self, root: CachedDirectory, changed: list[CachedDirectory]) -> None:
        """Keep the result of the scan; `changed` are the directories that differ from the cached ones."""
        is_new = not self.is_trusted or self.root is None
        self.root, self._generation = root, self._present_generation
        if self._path is None:
            return
        # Each directory before those below it.  A log that is cut off then has an outdated entry for a lower
        # directory, which no longer matches the stat data and is scanned again.
        frames = [_frame(_encoder.encode(directory)) for directory in reversed(changed)]
        size = sum(map(len, frames))
        with contextlib.suppress(OSError):  # without the cache the next scan only takes longer
            if is_new or not self._append(frames) or self._log_bytes + size > 2 * self._base_bytes + _SLACK_BYTES:
                self._rewrite()
            else:
                self._log_bytes += size

    def _append(self, frames: list[bytes]) -> bool:
        assert self._path is not None
        if not frames:
            return True
        try:
            descriptor = open_regular(self._path, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return False
        try:
            data = b"".join(frames)
            return os.write(descriptor, data) == len(data)
        finally:
            os.close(descriptor)

    def _rewrite(self) -> None:
        assert self._path is not None
        assert self.root is not None
        parts = [_MAGIC, _frame(_encoder.encode((self._generation, time.time_ns())))]
        pending = [self.root]
        while pending:
            directory = pending.pop()
            parts.append(_frame(_encoder.encode(directory)))
            pending += directory.children.values()
        data = b"".join(parts)
        write_atomically(self._path, data, durable=False)
        self._base_bytes = self._log_bytes = len(data)

    def _load(self) -> None:
        assert self._path is not None
        try:
            data = read_regular(self._path)
        except FileNotFoundError:
            return
        if not data.startswith(_MAGIC):
            return
        frames = _frames(data, len(_MAGIC))
        found: dict[bytes, CachedDirectory] = {}
        read_bytes = len(_MAGIC)
        try:
            head = next(frames, None)
            if head is None:
                return
            self._generation = int(msgspec.msgpack.decode(head)[0])
            read_bytes += _FRAME.size + len(head)
            for frame in frames:
                read_bytes += _FRAME.size + len(frame)
                directory = _decoder.decode(frame)
                found[directory.path] = directory
        except (ValueError, TypeError, IndexError):
            return
        self._base_bytes = len(data)
        # Entries that were appended after a torn one are never read, so rewrite the log the next time.
        self._log_bytes = len(data) if read_bytes == len(data) else 3 * len(data) + _SLACK_BYTES
        self.root = _linked(found)


def _frame(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(data: bytes, at: int) -> Iterator[bytes]:
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return  # torn; the entries after it cannot be found
        yield payload
        at += _FRAME.size + length


def _linked(found: dict[bytes, CachedDirectory]) -> CachedDirectory | None:
    """The root, with each directory of a log below its parent; a directory that its parent does not name is dropped."""
    if any(len(directory.records) != RECORD_BYTES * len(directory.names) for directory in found.values()):
        return None
    try:
        for path, directory in found.items():
            prefix = path + b"/" if path else b""
            for row in decode_listing(directory.listing):
                child = found.get(prefix + row.name) if row.is_dir else None
                if child is not None:
                    # Use this listing's row: the log may be cut off between the two, and several processes write it.
                    child.row = row
                    if row.content != child.digest:
                        child.own = b""  # scan its entries again
                    directory.children[row.name] = child
    except ValueError:
        return None
    return found.get(b"")
