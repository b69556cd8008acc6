"""LazyLower: a snapshot in an object store as the lower layer of an overlay, fetched as it is read.

In the thread that serves the mount, a call that needs something from the network raises NotReadyError, and the engine
repeats it later.  In other threads the call waits.  No lock is held while a thread waits.

Inode numbers and times are those of `TreeLower`: the same at every mount, on every machine.  The link count of a
directory that was not listed yet is 1, which means "not counted" as on btrfs, because counting its subdirectories would
fetch its listing; its size is a constant.

Threading: any thread.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from msgspec.structs import replace

from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES
from protocol.backends.overlay.lower import Identity, Lower, LowerEntry, LowerFile, LowerStat
from protocol.backends.overlay.tree_lower import TreeStat, inode_number
from protocol.errors import NotReadyError, os_error, shown
from protocol.store.format.digests import CHUNK_BYTES
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import UNREADABLE, Row
from protocol.store.object_store.lazy.contents import BLOBS_BYTES, ROWS_BYTES
from protocol.tree import TYPE_MASK
from protocol.volume_extensions import VolumeUsage

if TYPE_CHECKING:
    from protocol.store.object_store.lazy.contents import RemoteContents

P = ParamSpec("P")
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_MOST_REPORTED: Final = 100  # damaged paths that are logged
_READ_AHEAD: Final = 4  # chunks


class LazyLower(Lower):
    """The snapshot with the root `root`, whose blobs are in `contents`.  `name` is its URL, for the log."""

    can_change = False
    memory_bytes = BLOBS_BYTES + ROWS_BYTES

    def __init__(self, contents: RemoteContents, root: Row, name: str, fingerprint: str) -> None:
        self.contents = contents
        self.name = name
        self.fingerprint = fingerprint
        self._root = root
        self._directories: dict[bytes, Row] = {}  # those that were listed, by path
        self._recent: tuple[bytes, Row] | None = None  # an inode is made with three calls for one path
        self._serving: int | None = None
        self._reported: set[bytes] = set()

    # -- waiting -----------------------------------------------------------------------------------
    def serve_here(self) -> None:
        self._serving = threading.get_ident()

    def wait(self, error: NotReadyError) -> object:
        if threading.get_ident() == self._serving:
            raise error
        return error.arrival.result()

    def waited(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, again after each arrival of what it needs; in the serving thread NotReadyError."""
        held: list[object] = []
        while True:
            try:
                return function(*args, **kwargs)
            except NotReadyError as error:
                held.append(self.wait(error))

    def reading(self, path: bytes, read: Callable[[], T]) -> T:
        """Call `read`; log damage once for each path."""
        try:
            return read()
        except NotReadyError as error:

            def arrived(arrival: Future[object]) -> None:
                failure = arrival.exception()
                if isinstance(failure, DamagedError):
                    self._report(path, failure)

            error.arrival.add_done_callback(arrived)
            raise
        except (DamagedError, ValueError) as error:
            self._report(path, error)
            raise os_error(errno.EIO, shown(path)) from error

    def _report(self, path: bytes, error: DamagedError | ValueError) -> None:
        if path not in self._reported and len(self._reported) < _MOST_REPORTED:
            self._reported.add(path)
            reason = error.damage if isinstance(error, DamagedError) else str(error)
            text = "a file below the overlay, in %s, cannot be read: %s"
            _logger.error(text, self.name, reason, extra={"path": shown(path)})

    # -- rows ----------------------------------------------------------------------------------------
    def row(self, path: bytes) -> Row:
        """The row at `path`.  NotReadyError in any thread; FileNotFoundError, NotADirectoryError."""
        if not path:
            return self._root
        recent = self._recent
        if recent is not None and recent[0] == path:
            return recent[1]
        above, _, name = path.rpartition(b"/")
        row = self._listing(above).get(name)
        if row is None:
            raise os_error(errno.ENOENT, shown(path))
        self._recent = path, row
        return row

    def _listing(self, path: bytes) -> Mapping[bytes, Row]:
        """The rows of the directory at `path`.  Begins at the nearest directory above that was listed before."""
        at, names = path, []
        while at and at not in self._directories:
            at, _, name = at.rpartition(b"/")
            names.append(name)
        row = self._directories[at] if at else self._root
        while True:
            if not row.is_dir:
                raise os_error(errno.ENOTDIR, shown(path))
            found = self._rows(at, row)
            if not names:
                return found
            name = names.pop()
            at = at + b"/" + name if at else name
            if name not in found:
                raise os_error(errno.ENOENT, shown(path))
            row = found[name]

    def _rows(self, path: bytes, row: Row) -> Mapping[bytes, Row]:
        if not row.content:  # a directory that could not be read when the snapshot was taken
            return {}
        found = self.reading(path, lambda: self.contents.listing(row.content))
        self._directories[path] = row
        return found

    # -- Lower -----------------------------------------------------------------------------------------
    def stat(self, path: bytes) -> TreeStat:
        """Return the attributes.  NotReadyError in any thread: the caller holds a lock."""
        row = self.row(path)
        more = row.more
        nlink, size, link = more.nlink, row.size, more.link
        if row.is_dir:
            counts = more.counts
            nlink = 2 if counts is not None and not counts.directories else 1
            size, link = DIRECTORY_BASE_BYTES, 0
        number = inode_number(path, link if nlink > 1 else 0)
        return TreeStat(row.mode, number, nlink, row.uid, row.gid, size, row.mtime_ns, more.rdev)

    def readlink(self, path: bytes) -> bytes:
        return self.row(path).content

    def xattrs(self, path: bytes) -> dict[bytes, bytes] | None:
        return dict(self.row(path).more.xattrs) or None

    def scan(self, path: bytes) -> list[LowerEntry]:
        rows = self.waited(self._listing, path)
        prefix = path + b"/" if path else b""
        found = []
        for name, row in rows.items():
            link = row.more.link if not row.is_dir else 0
            number = inode_number(prefix + name, link)
            found.append(LowerEntry(name, row.mode & TYPE_MASK, (1, link) if link else (0, number), number))
        return found

    def file(self, path: bytes, seen: LowerStat) -> LazyFile:
        recent = self._recent
        return LazyFile(self, path, seen, recent[1] if recent is not None and recent[0] == path else None)

    def is_same(self, now: Identity, was: Identity) -> bool:
        return now == was

    def forget(self, file: LowerFile) -> None:
        """The files do not change."""

    def check(self) -> None:
        """A snapshot stays as it is."""

    def usage_of_source(self, usage: VolumeUsage) -> VolumeUsage:
        client = self.contents.client
        progress = client.progress
        prefetch = None
        if progress.prefetch:
            percent = 100 * progress.done_bytes // max(1, progress.total_bytes)
            prefetch = f"{progress.prefetch} ({percent} % of {progress.total_bytes:,} bytes)"
        return replace(
            usage,
            source=self.name,
            fetched_bytes=progress.transferred_bytes,
            prefetch=prefetch,
            fetch_failure=client.failing,
        )

    def forking(self) -> AbstractContextManager[object]:
        return self.contents.forking()

    def forked(self) -> None:
        self._serving = None
        self.contents.forked()

    def close(self) -> None:
        self.contents.close()


class LazyFile(LowerFile):
    """See `LowerFile`.  `content` is the digest of a regular file's content, or None until it is looked up."""

    __slots__ = ("_content", "_last", "lower")

    def __init__(self, lower: LazyLower, path: bytes, seen: LowerStat, row: Row | None) -> None:
        super().__init__(path, seen)
        self.lower = lower
        self._content = row.content if row is not None and not row.more.state & UNREADABLE else None
        self._last = -1  # the chunk that was read last

    def read(self, offset: int, size: int) -> bytes:
        if not size:
            return b""
        return self.lower.waited(self.lower.reading, self.path, lambda: self._read(offset, size))

    def _read(self, offset: int, size: int) -> bytes:
        content = self._content
        if content is None:
            row = self.lower.row(self.path)
            if row.more.state & UNREADABLE:
                raise OSError(errno.EACCES, "could not be read when the snapshot was taken", shown(self.path))
            content = self._content = row.content
        contents = self.lower.contents
        if self.size <= CHUNK_BYTES:
            (data,) = contents.blobs("data", (content,))
            data = data[offset : offset + size]
        else:
            data = self._read_chunks(contents, content, offset, size)
        if len(data) != size:
            raise DamagedError("the file is shorter than its entry says")
        return data

    def _read_chunks(self, contents: RemoteContents, content: bytes, offset: int, size: int) -> bytes:
        found = contents.chunk_map(content)
        if found.size != self.size:
            raise DamagedError("the file has another size than its entry says")
        chunks = found.chunks
        first, last = offset // CHUNK_BYTES, (offset + size - 1) // CHUNK_BYTES
        needed = {chunks[number]: b"" for number in range(first, last + 1) if number in chunks}
        ahead = [chunks[number] for number in range(last + 1, last + 1 + _READ_AHEAD) if number in chunks]
        is_sequential = self._last in {first, first - 1} or not first
        needed.update(zip(needed, contents.blobs("data", list(needed), ahead if is_sequential else ()), strict=True))
        if last != self._last:
            if is_sequential:
                contents.read_ahead("data", ahead)
            self._last = last
        parts = []
        for number in range(first, last + 1):
            start = max(offset - number * CHUNK_BYTES, 0)
            end = min(offset + size - number * CHUNK_BYTES, CHUNK_BYTES)
            parts.append(needed[chunks[number]][start:end] if number in chunks else bytes(end - start))
        return b"".join(parts)

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """All of the file: a stored snapshot does not know holes."""
        end = min(end, self.size)
        if start < end:
            yield start, end

    def keep(self) -> None:
        """The content stays."""
