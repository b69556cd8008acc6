"""The helper process of a daemon over a remote snapshot: `python -m protocol.store.object_store.lazy.helper`.

Standard input is a socket to the daemon (`client`).  The helper has the credentials from its environment, and ends
when the daemon closes the connection.

Threading: the main thread receives; a pool answers; `obstore` has threads of its own, and nothing here forks.

A prefetch fetches all of a snapshot into the cache, first the listings, then the contents.  It stops when the cache is
full: more would remove what it has just fetched.  It also stops when the cache does not have what was fetched, because
the disk is full, for example.  So "done" means that the cache had everything.  While the network fails it waits.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from protocol.linux import credentials
from protocol.store.format.digests import CHUNK_BYTES
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import Row, decode_listing, needed_by
from protocol.store.object_store.lazy.client import (
    Blobs,
    Failed,
    Fetch,
    Opened,
    Progress,
    Start,
    received,
    requests,
    send,
)
from protocol.store.object_store.lazy.contents import BlobCache
from protocol.store.object_store.lazy.fetcher import Fetcher, LazyIndex
from protocol.store.object_store.packs import IndexCache, RemotePacks, decode_chunk_map, decode_named, encode_named
from protocol.store.object_store.remote import RemoteStore
from protocol.store.object_store.storage import open_storage

if TYPE_CHECKING:
    from protocol.store.format.rows import Record
    from protocol.store.object_store.lazy.contents import BlobCache
    from protocol.store.object_store.lazy.fetcher import Fetcher, LazyIndex

_THREADS: Final = 16
_REPORT_S: Final = 0.25
_LEAST_TIMEOUT_S: Final = 5
_TICK_MS: Final = 100
_CAUSE_S: Final = 2.0  # the error of a request that was given up in time says more


class Helper:
    """Answers the daemon at the other end of `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, "vfsd-fetch")
        self._reported_at = 0.0
        self._prefetch: Prefetch | None = None
        self._opened_or_late = threading.Lock()  # taken by the first of both

    def run(self) -> None:
        """Serve until the connection ends."""
        arriving = received(self._connection)
        start = requests.decode(next(arriving, b""))
        assert isinstance(start, Start)
        try:
            record = self._open(start)
        except OSError as error:
            self._send(_failed(0, error))
            return
        if start.prefetch:
            self._begin_prefetch(start, record)
        for digest in record.roots:
            self._pool.submit(self._fetch_root, digest)
        for data in arriving:
            request = requests.decode(data)
            assert isinstance(request, Fetch)
            self._pool.submit(self._answer, request, time.monotonic() + start.timeout_s)

    def _open(self, start: Start) -> Record:
        timeout = f"{max(_LEAST_TIMEOUT_S, math.ceil(start.timeout_s))}s"
        options = {"timeout": timeout, "connect_timeout": timeout, **start.options}
        name, named = start.name or "", start.record
        # With a record, the snapshot is opened whether the store is there or not.
        self._storage = storage = open_storage(
            start.url, options, patience_s=start.timeout_s, makes_directory=False, late=named is not None
        )
        until = time.monotonic() + start.timeout_s + _CAUSE_S
        threading.Thread(target=self._watch_opening, args=(until,), name="vfsd-opening", daemon=True).start()
        self._index = LazyIndex(storage, RemotePacks(storage, IndexCache(start.index_directory)))
        self._index.begin()
        self._cache = BlobCache(start.cache_directory, start.cache_bytes)
        self._fetcher = Fetcher(storage, self._index, self._cache, self._pool.submit)
        if named is None:
            remote = RemoteStore(storage)
            known = None if start.root is None or start.name is None else remote.replaced(start.name, start.root)
            found = known or remote.get(start.name)
            name, record = found.name, found.record
            named = encode_named(record)
        record = decode_named(named, start.url)
        self._index.near_s = start.created_s or record.created_ns / 1e9
        if not self._opened_or_late.acquire(blocking=False):
            threading.Event().wait()  # `_watch_opening` ends the process
        self._send(Opened(name, named, self._index.near_s))
        return record

    def _watch_opening(self, until: float) -> None:
        """End the helper if the daemon ends, or the time comes, before the snapshot was opened."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        while time.monotonic() < until:
            if poll.poll(_TICK_MS):
                os._exit(0)  # the daemon is gone
            if self._opened_or_late.locked():
                return
        if not self._opened_or_late.acquire(blocking=False):
            return
        what = "the object store does not answer within --remote-timeout: repeat the command later, or set a longer one"
        self._send(Failed(0, errno.ETIMEDOUT, what, False))
        os._exit(0)

    def _begin_prefetch(self, start: Start, record: Record) -> None:
        self._prefetch = Prefetch(self._fetcher, self._index, self._cache, start.cache_bytes, self._report)
        run = functools.partial(self._prefetch.run, record.root, record.inodes)
        threading.Thread(target=run, name="vfsd-prefetch", daemon=True).start()

    def _fetch_root(self, digest: bytes) -> None:
        """Fetch a listing of the root, while the daemon mounts: a program reads it first."""
        with contextlib.suppress(OSError):  # the read that needs it gets the error
            self._fetcher.fetch("tree", [digest], reads_ahead=False, exactly=True)

    def _answer(self, request: Fetch, until: float) -> None:
        if time.monotonic() > until:
            return  # the daemon has given up
        try:
            blobs = self._fetcher.fetch(request.kind, request.digests) if request.digests else []
        except OSError as error:
            self._send(_failed(request.number, error))
            return
        except Exception as error:  # noqa: BLE001 (the daemon must get an answer)
            self._send(Failed(request.number, errno.EIO, f"the helper failed: {error!r}", False))
            return
        self._report(always=True)  # before the answer: the reader may ask for the status at once
        self._send(Blobs(request.number, blobs))
        if request.ahead:
            self._pool.submit(self._fetch_ahead, request)

    def _fetch_ahead(self, request: Fetch) -> None:
        wanted = [digest for digest in request.ahead if not self._cache.has(digest)]
        with contextlib.suppress(OSError):  # the read that needs it gets the error
            if wanted:
                self._fetcher.fetch(request.kind, wanted, reads_ahead=False)

    def _report(self, *, always: bool = False) -> None:
        now = time.monotonic()
        prefetch = self._prefetch
        state = "" if prefetch is None else prefetch.state
        with self._sending:
            if not always and now - self._reported_at < _REPORT_S and state in {"", "running"}:
                return
            self._reported_at = now
        done, total = (0, 0) if prefetch is None else (prefetch.done_bytes, prefetch.total_bytes)
        self._send(Progress(self._storage.received_bytes, done, total, state, self._cache.failure or ""))

    def _send(self, message: Any) -> None:
        with self._sending:
            try:
                send(self._connection, message)
            except OSError:
                os._exit(0)  # the daemon is gone


def _failed(number: int, error: OSError) -> Failed:
    text = error.strerror or str(error)
    if isinstance(error, DamagedError):
        return Failed(number, errno.EIO, error.damage, True)
    return Failed(number, error.errno or errno.EIO, text, False)


# -- prefetch --------------------------------------------------------------------------------------
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
        """Its state: "running", "waiting: CAUSE", "done", or "stopped: CAUSE"."""
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
        _, contents = needed_by([root.content], lambda level: map(decode_listing, self._trees(list(level))))
        maps = [digest for digest, size in contents.items() if size > CHUNK_BYTES]
        sizes = {digest: size for digest, size in contents.items() if size <= CHUNK_BYTES}
        for digest, data in zip(maps, self._trees(maps), strict=True):
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


def main() -> None:
    """Serve the daemon, and end with it."""
    credentials.scrub()  # `obstore` reads them with getenv(3)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a daemon in the foreground
    connection = socket.socket(fileno=os.dup(0))
    try:
        Helper(connection).run()
    except OSError:
        pass  # the daemon was killed
    # Requests that are running, and their threads, end here.
    os._exit(0)


if __name__ == "__main__":
    main()
