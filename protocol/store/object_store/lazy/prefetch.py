"""Prefetch: fetches all of a snapshot into the cache, first the listings, then the contents.

It stops when the cache is full: more would remove what it has just fetched.  It also stops when the cache does not have
what was fetched, because the disk is full, for example.  So "done" means that the cache had everything.  While the
network fails it waits.

Threading: a thread of its own, and as many for contents as are read at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from protocol.store.format.digests import CHUNK_BYTES
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import Row, decode_listing
from protocol.store.object_store.layout import decode_chunk_map

if TYPE_CHECKING:
    from protocol.store.object_store.lazy.blob_cache import BlobCache
    from protocol.store.object_store.lazy.fetcher import Fetcher
    from protocol.store.object_store.lazy.index import LazyIndex

T = TypeVar("T")
_AT_ONCE: Final = 4  # of the requests that the store allows; programs that wait use the others
_GROUP_BYTES: Final = 4 << 20
_LISTINGS: Final = 256  # in one request of the fetcher
_CACHE_SHARE: Final = 0.8  # of the bound
_RETRY_S: Final = 5.0
_FULL: Final = "the cache is full; a larger --cache-bytes holds more"


class _StoppedError(Exception):
    """The cache holds no more.  The text says why."""


class Prefetch:
    """A prefetch of the snapshot whose root is `root`.  `report` is called with its state when that changes."""

    def __init__(
        self, fetcher: Fetcher, index: LazyIndex, cache: BlobCache, cache_bytes: int, report: Callable[[], object]
    ) -> None:
        self._fetcher = fetcher
        self._index = index
        self._cache = cache
        self._most_bytes = int(cache_bytes * _CACHE_SHARE)
        self._report = report
        self._lock = threading.Lock()
        self.done_bytes = 0
        self.total_bytes = 0
        self._waits_for = ""
        self._end = ""

    @property
    def state(self) -> str:
        """What it does: "running", "waiting: CAUSE", "done", or "stopped: CAUSE"."""
        return self._end or self._waits_for or "running"

    def run(self, root: Row, inodes: Row | None = None) -> None:
        """Fetch everything.  `inodes`: the inode row of the root."""
        try:
            contents = self._contents(root)
            if inodes is not None:
                with contextlib.suppress(DamagedError):  # the mount does without them
                    self._contents(inodes)
            self.total_bytes += sum(contents.values())
            self._fetch_contents(contents)
            self._check_cached(contents)
            self._end = "done"
        except _StoppedError as error:
            self._end = f"stopped: {error}"
        except DamagedError as error:
            self._end = f"stopped: {error.damage}"
        self._report()

    def _contents(self, root: Row) -> dict[bytes, int]:
        """Fetch all listings and chunk maps; return the size of each content and chunk, in the order of a walk."""
        sizes: dict[bytes, int] = {}
        maps: dict[bytes, int] = {}
        seen: set[bytes] = set()
        level = [root.content]
        while level:
            below: list[bytes] = []
            for data in self._trees(level):
                for row in decode_listing(data):
                    if row.is_dir and row.content not in seen:
                        seen.add(row.content)
                        below.append(row.content)
                    elif row.is_file and row.content:
                        (maps if row.size > CHUNK_BYTES else sizes)[row.content] = row.size
            level = below
        for digest, data in zip(maps, self._trees(list(maps)), strict=True):
            found = decode_chunk_map(digest, data)
            for number, chunk in found.chunks.items():
                sizes[chunk] = min(CHUNK_BYTES, found.size - number * CHUNK_BYTES)
        return sizes

    def _trees(self, digests: Sequence[bytes]) -> Iterator[bytes]:
        for at in range(0, len(digests), _LISTINGS):
            group = digests[at : at + _LISTINGS]
            blobs = self._patiently(lambda group=group: self._fetcher.fetch("tree", group))  # type: ignore[misc]
            self._check_cached(group)
            self._count(sum(map(len, blobs)), is_more=True)
            yield from blobs

    def _fetch_contents(self, contents: dict[bytes, int]) -> None:
        missing = []
        for digest, size in contents.items():
            if self._cache.has(digest):
                self._count(size)
            else:
                missing.append(digest)
        with ThreadPoolExecutor(_AT_ONCE, "vfsd-prefetch") as pool:
            running: list[Future[None]] = []
            for group in _groups(missing, contents):
                if self._cache.size_bytes() > self._most_bytes:
                    raise _StoppedError(_FULL)
                running = [each for each in running if not each.done()]
                while len(running) >= _AT_ONCE:
                    running.pop(0).result()
                running.append(pool.submit(self._fetch_group, group, sum(contents[digest] for digest in group)))
            for each in running:
                each.result()

    def _fetch_group(self, group: Sequence[bytes], size: int) -> None:
        self._patiently(lambda: self._fetcher.fetch("data", group, reads_ahead=False))
        self._check_cached(group)
        self._count(size)

    def _check_cached(self, digests: Iterable[bytes]) -> None:
        """_StoppedError unless the cache has the blobs, which were fetched."""
        if not all(map(self._cache.has, digests)):
            cause = self._cache.failure
            raise _StoppedError(_FULL if cause is None else f"the cache cannot be written ({cause})")

    def _patiently(self, fetch: Callable[[], T]) -> T:
        while True:
            try:
                return fetch()
            except DamagedError:
                raise
            except OSError as error:
                self._waits_for = f"waiting: {error.strerror}"
                self._report()
                threading.Event().wait(_RETRY_S)
                self._waits_for = ""

    def _count(self, size: int, *, is_more: bool = False) -> None:
        with self._lock:
            self.done_bytes += size
            self.total_bytes += size if is_more else 0
        self._report()


def _groups(digests: Iterable[bytes], sizes: dict[bytes, int]) -> Iterator[list[bytes]]:
    """Groups of about `_GROUP_BYTES`."""
    group: list[bytes] = []
    total = 0
    for digest in digests:
        group.append(digest)
        total += sizes[digest]
        if total >= _GROUP_BYTES:
            yield group
            group, total = [], 0
    if group:
        yield group
