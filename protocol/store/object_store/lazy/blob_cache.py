"""BlobCache: verified blobs on this machine's disk, shared by all workspaces of a user.

A blob is a file with the name of its digest.  Invariants:
1. Readers take no lock and trust nothing: a blob is compared with its digest whenever it is read, and a file that
   differs is removed.  So a torn write, a damaged disk or another program costs a fetch, and never serves wrong bytes.
2. Writers hold the lock of the file `lock`.  That file has the size of the cache, and whether a writer is at work; if
   one died, the next one counts again.  Before blobs are added, old ones are removed until the bound holds.

The size of a file counts in blocks of 4 KiB, with its directory entry, so that the bound also holds for many small
blobs.  The modification time is that of the last use, within ten minutes.

Threading: any thread, any process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

from protocol.linux.regular_file import open_regular, write_atomically
from protocol.store.format.packs import DamagedError
from protocol.store.object_store.layout import check_blob

LEAST_CACHE_BYTES: Final = 16 << 20
_STATE: Final = struct.Struct("<QB")  # size in bytes, and 1 while a writer is at work
_LOCK: Final = "lock"
_BLOCK_BYTES: Final = 4096
_ENTRY_BYTES: Final = 256
_DIRECTORIES_BYTES: Final = 256 * 2 * _BLOCK_BYTES
_KEPT_SHARE: Final = 0.9  # of the bound: a removal goes down to this, because it has to look at all files
_USED_S: Final = 600
_NEW: Final = ".new"


class BlobCache:
    """The blobs in `directory`, of at most `most_bytes` on disk.  None or 0: there is no cache."""

    def __init__(self, directory: str | None, most_bytes: int) -> None:
        self._directory = directory if most_bytes > 0 else None
        self._most_bytes = most_bytes
        self.failure: str | None = None  # why the last `put` or `check` could not write; None if it could

    def _path(self, digest: bytes) -> str:
        assert self._directory is not None
        name = digest.hex()
        return os.path.join(self._directory, name[:2], name[2:])

    def check(self) -> None:
        """Set `failure` if the cache cannot be written."""
        if self._directory is None:
            return
        try:
            with self._locked():
                self.failure = None
        except OSError as error:
            self.failure = error.strerror

    def has(self, digest: bytes) -> bool:
        """Whether there is a file for a blob, which may be damaged."""
        return self._directory is not None and os.path.exists(self._path(digest))

    def get(self, digest: bytes) -> bytes | None:
        """A blob, compared with its digest; None if it is not there, or damaged."""
        if self._directory is None:
            return None
        path = self._path(digest)
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                data = file.readall()
                used_s = os.fstat(file.fileno()).st_mtime
            check_blob(digest, data)
        except DamagedError:
            with contextlib.suppress(OSError):
                os.unlink(path)  # the size that is counted stays too large until the next count
            return None
        except OSError:
            return None
        if abs(time.time() - used_s) > _USED_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return data

    def put(self, blobs: Sequence[tuple[bytes, bytes]]) -> None:
        """Add blobs.  If the cache cannot be written, set `failure`; that is not an error."""
        if self._directory is None:
            return
        new = [(digest, data) for digest, data in blobs if not self.has(digest)]
        if not new:
            return
        try:
            self._write_blobs(new)
            self.failure = None
        except OSError as error:
            self.failure = error.strerror

    def _write_blobs(self, new: Sequence[tuple[bytes, bytes]]) -> None:
        with self._locked() as state:
            total, is_dirty = _read(state)
            if is_dirty:
                total = sum(cost for cost, _, _ in self._files(clean=True)) + _DIRECTORIES_BYTES
            _write(state, total, is_dirty=True)
            total = self._room_for(sum(_cost(len(data)) for _, data in new), total)
            for digest, data in new:
                cost = _cost(len(data))
                if total + cost > self._most_bytes:
                    continue
                path = self._path(digest)
                try:
                    write_atomically(path, data, durable=False)
                except FileNotFoundError:  # the first blob in this directory
                    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                    write_atomically(path, data, durable=False)
                total += cost
            _write(state, total, is_dirty=False)

    def size_bytes(self) -> int:
        """The size that is counted; 0 if nothing was ever added."""
        if self._directory is None:
            return 0
        with contextlib.suppress(OSError), open(open_regular(os.path.join(self._directory, _LOCK)), "rb") as file:
            return _read(file.fileno())[0]
        return 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the writers; yield the descriptor of its file."""
        assert self._directory is not None
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        descriptor = open_regular(os.path.join(self._directory, _LOCK), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _room_for(self, needed: int, total: int) -> int:
        """Remove the blobs that were not used for the longest time, so that `needed` bytes fit; return the new size."""
        if total + needed <= self._most_bytes:
            return total
        goal = max(0, int(self._most_bytes * _KEPT_SHARE) - needed)
        files = sorted(self._files(clean=False), key=lambda file: file[1])
        total = sum(cost for cost, _, _ in files) + _DIRECTORIES_BYTES
        for cost, _, path in files:
            if total <= goal:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= cost
        return total

    def _files(self, *, clean: bool) -> Iterator[tuple[int, float, str]]:
        """Yield cost, time of the last use and path of each blob.  `clean` removes what killed writers left."""
        assert self._directory is not None
        for part in os.scandir(self._directory):
            if not part.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(part.path):
                if clean and entry.name.endswith(_NEW):
                    os.unlink(entry.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    seen = entry.stat(follow_symlinks=False)
                    yield _cost(seen.st_size), seen.st_mtime, entry.path


def _cost(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES + _ENTRY_BYTES


def _read(descriptor: int) -> tuple[int, bool]:
    """The size, and whether it has to be counted again."""
    data = os.pread(descriptor, _STATE.size, 0)
    if len(data) < _STATE.size:
        return 0, True
    total, writing = _STATE.unpack(data)
    return total, bool(writing)


def _write(descriptor: int, total: int, *, is_dirty: bool) -> None:
    os.pwrite(descriptor, _STATE.pack(total, is_dirty), 0)
