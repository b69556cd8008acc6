"""StatCache: the directories of the previous scan, so that unchanged files are not read again.

A file counts as unchanged when its inode number, size, mode, owner, links, ctime and mtime are what they were.
But a file that changed again within the same tick of the clock as before would look the same: so one whose ctime was
not safely in the past when it was looked at is "racy", and is read again the next time (as git does with its index).

On disk it is a log of directories, each with a checksum; the last word on a path counts.  It is written without sync:
what is torn is not used.  It is bound to the store's generation, which a garbage collection ends: what it
says about a file stays true, but whether the store still has the content has to be asked.

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

from protocol.linux.statx import RECORD_BYTES, change_key
from protocol.store.format.layout import open_regular, read_regular, write_atomically
from protocol.store.format.rows import Row, TreeCounts, decode_listing

__all__ = ["CachedDirectory", "StatCache"]

_MAGIC: Final = b"vfsdstat3"
_FRAME: Final = struct.Struct("<II")  # length, crc32
_SLACK_BYTES: Final = 1 << 20


class CachedDirectory:
    """A directory as it was.  `records` has RECORD_BYTES for each of `names`; `racy` names those to read again.

    `is_stored`: whether a snapshot was taken of it.  Who only looked at it knows its digest, and not whether the store
    has all below: it may have the listing still, and no longer the contents, which nothing needed.
    """

    __slots__ = (
        "children", "counts", "digest", "is_stored", "links", "listed_racy", "listing", "names", "own", "racy",
        "records", "row",
    )  # fmt: skip

    def __init__(
        self,
        own: bytes,
        names: list[bytes],
        records: bytes,
        racy: frozenset[bytes],
        listing: bytes,
        digest: bytes,
        counts: TreeCounts,
        links: dict[int, int],
        *,
        listed_racy: bool,
        is_stored: bool,
    ) -> None:
        self.own = own
        self.listed_racy = listed_racy
        self.is_stored = is_stored
        self.names = names
        self.records = records
        self.racy = racy
        self.listing = listing
        self.digest = digest
        self.counts = counts
        self.links = links
        self.children: dict[bytes, CachedDirectory] = {}
        self.row: Row | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing in it to look at but its names' records."""
        return not self.children and not self.racy

    def key_at(self, path: bytes) -> bytes | None:
        """What `change_key` gave for the entry at `path`, below this directory; None where there was none."""
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


class _Stored(msgspec.Struct, array_like=True, gc=False):
    """A directory in the log."""

    path: bytes
    own: bytes
    listed_racy: bool
    names: list[bytes]
    records: bytes
    racy: list[bytes]
    listing: bytes
    digest: bytes
    counts: TreeCounts
    links: dict[int, int]
    is_stored: bool


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Stored)


class StatCache:
    """What is known of a workspace's directories.  `changed` collects what a walk has learnt."""

    def __init__(self, path: str | None = None, generation: int = 0) -> None:
        self._path = path
        self._loaded = path is None
        self._generation = generation
        self._log_bytes = 0
        self._base_bytes = 0
        self._root: CachedDirectory | None = None

    @property
    def root(self) -> CachedDirectory | None:
        """The root directory as it was, and all below it; None where nothing is known."""
        if not self._loaded:
            self._loaded = True
            self._load()
        return self._root

    @property
    def generation(self) -> int:
        """The store's generation in which all contents named here were in the store."""
        return self._generation

    def learn(self, root: CachedDirectory, changed: list[tuple[bytes, CachedDirectory]], generation: int) -> None:
        """Remember what a walk has found; `changed` are the directories that are not as they were."""
        is_new = self._generation != generation or self._root is None
        self._root, self._generation, self._loaded = root, generation, True
        if self._path is None:
            return
        # Each before what is below it.  A log that ends between the two then says of a directory less than is true now:
        # what it was earlier, which no longer fits.
        frames = [_frame(_encoder.encode(_stored(path, directory))) for path, directory in reversed(changed)]
        size = sum(map(len, frames))
        with contextlib.suppress(OSError):  # without it the next walk takes longer, and that is all
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
        assert self._root is not None
        parts = [_MAGIC, _frame(_encoder.encode((self._generation, time.time_ns())))]
        pending = [(b"", self._root)]
        while pending:
            path, directory = pending.pop()
            parts.append(_frame(_encoder.encode(_stored(path, directory))))
            prefix = path + b"/" if path else b""
            pending += ((prefix + name, child) for name, child in directory.children.items())
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
        found: dict[bytes, _Stored] = {}
        read_bytes = len(_MAGIC)
        try:
            head = next(frames, None)
            if head is None:
                return
            self._generation = int(msgspec.msgpack.decode(head)[0])
            read_bytes += _FRAME.size + len(head)
            for frame in frames:
                read_bytes += _FRAME.size + len(frame)
                stored = _decoder.decode(frame)
                found[stored.path] = stored
        except (ValueError, TypeError, IndexError):
            return
        self._base_bytes = len(data)
        # What is appended behind a torn frame is not read: written anew the next time.
        self._log_bytes = len(data) if read_bytes == len(data) else 3 * len(data) + _SLACK_BYTES
        self._root = _linked(found)


def _frame(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(data: bytes, at: int) -> Iterator[bytes]:
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return  # torn; what comes after it cannot be found
        yield payload
        at += _FRAME.size + length


def _stored(path: bytes, directory: CachedDirectory) -> _Stored:
    return _Stored(
        path, directory.own, directory.listed_racy, directory.names, directory.records, list(directory.racy),
        directory.listing, directory.digest, directory.counts, directory.links, directory.is_stored,
    )  # fmt: skip


def _linked(found: dict[bytes, _Stored]) -> CachedDirectory | None:
    """The directories of a log, each below its parent; those whose parent no longer has them are left out."""
    made: dict[bytes, CachedDirectory] = {}
    for path, stored in found.items():
        if len(stored.records) != RECORD_BYTES * len(stored.names):
            return None
        directory = CachedDirectory(
            stored.own, stored.names, stored.records, frozenset(stored.racy), stored.listing, stored.digest,
            stored.counts, stored.links, listed_racy=stored.listed_racy, is_stored=stored.is_stored,
        )  # fmt: skip
        made[path] = directory
    try:
        for path, directory in made.items():
            prefix = path + b"/" if path else b""
            for row in decode_listing(directory.listing):
                child = made.get(prefix + row.name) if row.is_dir else None
                if child is not None:
                    # The row as this listing has it: the log may end between the two, and several write to it.
                    child.row = row
                    if row.content != child.digest:
                        child.own = b""  # nothing is what it was, so it is looked through
                    directory.children[row.name] = child
    except ValueError:
        return None
    return made.get(b"")
