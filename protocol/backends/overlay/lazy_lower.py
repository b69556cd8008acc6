"""LazyLower: a snapshot in an object store as the lower layer of an overlay, fetched as it is read.

In the thread that serves the mount, a call that needs something from the network raises NotReadyError, and the engine
repeats it later.  In other threads the call waits.  No lock is held while a thread waits.

Inode numbers and ctimes are those that were pushed (`format.rows`), so an index of git that was made before the push is
still valid; else those of `TreeLower`.  So they are the same at every mount, on every machine.  The link count of a
directory that was not listed yet is 1, which means "not counted" as on btrfs, because counting its subdirectories would
fetch its listing; its size is a constant.

Threading: any thread.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, ParamSpec, TypeAlias, TypeVar

from msgspec.structs import replace

from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES
from protocol.backends.overlay.lower import Lower, LowerEntry, LowerFile, LowerStat, RecordedStat
from protocol.backends.overlay.tree_lower import shown_number, tree_entry, tree_stat
from protocol.errors import NotReadyError, os_error, shown
from protocol.store.format.digests import CHUNK_BYTES, chunk_ranges
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import UNREADABLE, Row, inodes_lost
from protocol.store.object_store.lazy.contents import BLOBS_BYTES, ROWS_BYTES
from protocol.volume_extensions import VolumeUsage

if TYPE_CHECKING:
    from protocol.store.object_store.lazy.contents import RemoteContents

P = ParamSpec("P")
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_MOST_REPORTED: Final = 100  # damaged paths that are logged
_READ_AHEAD: Final = 4  # chunks
_PAGE_BYTES: Final = 4096
_REPEATED_S: Final = 1.0
_PAGE_REPEATED_S: Final = 0.01  # the read ahead of a single page looks like its repetition
_Rows: TypeAlias = tuple[Row, Row | None]  # the row of an entry, and its inode row


class LazyLower(Lower):
    """The snapshot with the root `root`, whose blobs are in `contents`.  `name` is its URL, for the log.

    `inodes`: the inode row of the root.  `reopening`: see `Lower`.
    """

    can_change = False
    memory_bytes = BLOBS_BYTES + ROWS_BYTES

    def __init__(
        self,
        contents: RemoteContents,
        root: Row,
        name: str,
        fingerprint: str,
        *,
        inodes: Row | None = None,
        reopening: bytes = b"",
    ) -> None:
        self.contents = contents
        self.name = name
        self.fingerprint = fingerprint
        self.reopening = reopening
        self._root: _Rows = root, inodes
        self._directories: dict[bytes, _Rows] = {}  # those that were listed, by path
        self._recent: tuple[bytes, _Rows] | None = None  # an inode is made with three calls for one path
        self._serving: int | None = None
        self._reported: set[bytes] = set()
        self.inode_failure: str | None = None  # the first damage of an inode listing

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
        return self._rows_at(path)[0]

    def _rows_at(self, path: bytes) -> _Rows:
        if not path:
            return self._root
        recent = self._recent
        if recent is not None and recent[0] == path:
            return recent[1]
        above, _, name = path.rpartition(b"/")
        rows, inodes = self._listings(above)
        row = rows.get(name)
        if row is None:
            raise os_error(errno.ENOENT, shown(path))
        found = row, inodes.get(name)
        self._recent = path, found
        return found

    def _listings(self, path: bytes) -> tuple[Mapping[bytes, Row], Mapping[bytes, Row]]:
        """The rows and the inode rows of the directory at `path`.

        Begins at the nearest directory above that was listed before.
        """
        at, names = path, []
        while at and at not in self._directories:
            at, _, name = at.rpartition(b"/")
            names.append(name)
        here = self._directories[at] if at else self._root
        while True:
            if not here[0].is_dir:
                raise os_error(errno.ENOTDIR, shown(path))
            rows, inodes = self._listed(at, here)
            if not names:
                return rows, inodes
            name = names.pop()
            at = at + b"/" + name if at else name
            if name not in rows:
                raise os_error(errno.ENOENT, shown(path))
            here = rows[name], inodes.get(name)

    def _listed(self, path: bytes, here: _Rows) -> tuple[Mapping[bytes, Row], Mapping[bytes, Row]]:
        row, inode = here
        if not row.content:  # a directory that could not be read when the snapshot was taken
            return {}, {}
        below = inode.content if inode is not None and inode.is_dir else b""
        found = self.reading(path, lambda: self.contents.listings(row.content, below))
        self._directories[path] = here
        if below and not found[1] and self.inode_failure is None:
            self._report_inodes(path, self.contents.inode_damage(below))
        return found

    def _report_inodes(self, path: bytes, damage: str | None) -> None:
        """Log the first damaged inode listing."""
        if damage is not None:
            self.inode_failure = inodes_lost(path, damage)
            text = "%s: %s; `vfsd store check --store %s` says how to mend it"
            _logger.warning(text, self.name, self.inode_failure, self.name.partition("#")[0])

    # -- Lower -----------------------------------------------------------------------------------------
    def stat(self, path: bytes) -> RecordedStat:
        """Return the attributes.  NotReadyError in any thread: the caller holds a lock."""
        row, inode = self._rows_at(path)
        more = row.more
        nlink, size, link = more.nlink, row.size, more.link
        if row.is_dir:
            counts = more.counts
            nlink = 2 if counts is not None and not counts.directories else 1
            size, link = DIRECTORY_BASE_BYTES, 0
        number = inode.size if inode is not None else 0
        ctime_ns = inode.mtime_ns if inode is not None and number else 0
        shown = shown_number(path, link if nlink > 1 else 0, number)
        return tree_stat(row, shown, nlink, size, more.rdev, ctime_ns)

    def readlink(self, path: bytes) -> bytes:
        return self.row(path).content

    def xattrs(self, path: bytes) -> dict[bytes, bytes] | None:
        return dict(self.row(path).more.xattrs) or None

    def scan(self, path: bytes) -> list[LowerEntry]:
        rows, inodes = self.waited(self._listings, path)
        prefix = path + b"/" if path else b""
        numbers = {name: inode.size for name, inode in inodes.items()}
        return [
            tree_entry(prefix + name, row.mode, 0 if row.is_dir else row.more.link, numbers.get(name, 0))
            for name, row in rows.items()
        ]

    def file(self, path: bytes, seen: LowerStat) -> LazyFile:
        recent = self._recent
        return LazyFile(self, path, seen, recent[1][0] if recent is not None and recent[0] == path else None)

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
            cache_failure=progress.cache_failure or None,
            inode_failure=self.inode_failure,
        )

    def forking(self) -> AbstractContextManager[object]:
        return self.contents.forking()

    def forked(self) -> None:
        self._serving = None
        self.contents.forked()

    def close(self) -> None:
        self.contents.close()


class LazyFile(LowerFile):
    """See `LowerFile`.  `content` is the digest of a regular file's content, or None until it is looked up.

    A kernel whose read ahead failed reads the first page of it again before its program gets the error.  That read gets
    the same error at once: otherwise a program would wait for twice the timeout.
    """

    __slots__ = ("_content", "_failed", "_last", "lower")

    def __init__(self, lower: LazyLower, path: bytes, seen: LowerStat, row: Row | None) -> None:
        super().__init__(path, seen)
        self.lower = lower
        self._content = row.content if row is not None and not row.more.state & UNREADABLE else None
        self._last = -1  # the chunk that was read last
        self._failed: tuple[int, float, OSError] | None = None  # offset, until when it is repeated, and the error

    def read(self, offset: int, size: int) -> bytes:
        if not size:
            return b""
        failed, self._failed = self._failed, None
        if failed is not None and offset == failed[0] and size <= _PAGE_BYTES and time.monotonic() < failed[1]:
            raise failed[2]
        return self.lower.waited(self.lower.reading, self.path, lambda: self._noting_failure(offset, size))

    def _noting_failure(self, offset: int, size: int) -> bytes:
        try:
            return self._read(offset, size)
        except NotReadyError as error:
            if size > _PAGE_BYTES or self.size <= _PAGE_BYTES:  # perhaps a read ahead
                repeated_s = _REPEATED_S if size > _PAGE_BYTES else _PAGE_REPEATED_S

                def arrived(arrival: Future[object]) -> None:
                    failure = arrival.exception()
                    if isinstance(failure, OSError) and not isinstance(failure, DamagedError):
                        self._failed = offset, time.monotonic() + repeated_s, failure

                error.arrival.add_done_callback(arrived)
            raise

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
        """The chunks that are not all zeros, once the chunk map was fetched; before, all of the file."""
        end = min(end, self.size)
        if start >= end:
            return
        if self._content is not None and self.size > CHUNK_BYTES:
            try:
                chunks = self.lower.contents.chunk_map(self._content).chunks
            except (NotReadyError, OSError):
                yield start, end
            else:
                yield from chunk_ranges(chunks, start, end)
        else:
            yield start, end
