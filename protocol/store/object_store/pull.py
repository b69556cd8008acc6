"""RemoteSource: a snapshot of a remote store as the source of a local one; downloads what the local store lacks.

Threading: one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from protocol.store.directory.scan import FileProgress, Scanned, Unreadable
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import LARGE_BYTES, Blobs, Sink
from protocol.store.format.digests import CHUNK_BYTES
from protocol.store.format.packs import damaged_blob
from protocol.store.format.rows import Row, TreeCounts
from protocol.store.object_store.layout import decode_chunk_map, decode_listing_of
from protocol.tree import Chunk, Hole, no_progress

if TYPE_CHECKING:
    from protocol.store.format.records import Record
    from protocol.store.object_store.packs import PackView, RemotePacks
    from protocol.tree import ByteProgress

_ZEROS: Final = bytes(1 << 20)


class RemoteSource:
    """The snapshot `record` in the packs of a remote store.  `local` are the blobs of the store that takes it.

    Implements what `Store.take` needs of a `Source`.  `progress` is called with (bytes downloaded, all missing bytes).
    """

    identity: Final = None

    def __init__(self, packs: RemotePacks, record: Record, local: Blobs, progress: ByteProgress) -> None:
        self._packs = packs
        self._record = record
        self._local = local
        self._progress = progress
        self._done = 0
        self._total = 0

    def scan(
        self, sink: Sink, cache: StatCache, *, unreadable: Unreadable = "fail", progress: FileProgress = no_progress
    ) -> Scanned:
        """Give the snapshot to `sink`.  DamagedError."""
        del cache, unreadable, progress
        view = self._packs.view()
        missing = self._take_listings(view, sink)
        self._total = sum(row.size for row in missing)
        short = {row.content: row for row in missing if row.size <= LARGE_BYTES}
        for digest, data in self._packs.blobs(map(view.located, short)):
            if len(data) != short[digest].size:
                raise damaged_blob(digest, "has another size than its file")
            sink.small(data)
            self._count(len(data), digest)
        for row in missing:
            if row.size > LARGE_BYTES:
                digest, _ = sink.stream(self._content(view, row), self._count)
                if digest != row.content:
                    raise damaged_blob(row.content)
        record = self._record
        counts = TreeCounts(record.files, record.directories, record.size_bytes)
        return Scanned(record.root, counts, record.unstable, record.unreadable, inodes=record.inodes)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """Raise NotImplementedError: `Store.take` uses only the scan."""
        raise NotImplementedError

    def chunks(self, path: bytes, size: int) -> Iterator[Chunk]:
        """Not used, as `read`."""
        raise NotImplementedError

    def _count(self, size: int, _digest: bytes = b"") -> None:
        self._done += size
        self._progress(self._done, self._total)

    def _take_listings(self, view: PackView, sink: Sink) -> list[Row]:
        """Give all listings to `sink`, one level of the tree after the other; return the files that it lacks."""
        missing: dict[bytes, Row] = {}
        seen: set[bytes] = set()
        level = set(self._record.roots)
        while level:
            seen |= level
            below: set[bytes] = set()
            for digest, data in self._listings(view, level):
                sink.listing(data)
                for row in decode_listing_of(digest, data):
                    if row.is_dir:
                        below.add(row.content)
                    elif row.is_file and row.content and row.content not in missing and not sink.has(row.content):
                        missing[row.content] = row
            level = below - seen
        return list(missing.values())

    def _listings(self, view: PackView, digests: set[bytes]) -> Iterator[tuple[bytes, bytes]]:
        remote = []
        for digest in digests:
            data = self._local.small(digest)
            if data is None:
                remote.append(digest)
            else:
                yield digest, data
        yield from self._packs.blobs(map(view.located, remote))

    def _content(self, view: PackView, row: Row) -> Iterator[Chunk]:
        """The content of a file, in pieces."""
        ((_, data),) = self._packs.blobs([view.located(row.content)])
        found = None if row.size <= CHUNK_BYTES else decode_chunk_map(row.content, data)
        if row.size != (len(data) if found is None else found.size):
            raise damaged_blob(row.content, "has another size than its file")
        if found is None:
            yield data
            return
        done = 0
        for number, digest in sorted(found.chunks.items()):
            start = number * CHUNK_BYTES
            if start > done:
                yield Hole(start - done)
            ((_, chunk),) = self._packs.blobs([view.located(digest)])
            yield chunk
            done = start + len(chunk)
        if done < row.size:
            yield Hole(row.size - done)
