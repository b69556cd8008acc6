"""Log: appends records to a journal file and makes them durable.

Invariants:

1. `require` comes before a change of the state, and `append` after it.  What `require` granted can be appended: the
   space in the file is allocated.  So a full disk refuses changes before they are made, and tears no record.
2. Records are appended in order, each with one pwritev(2) at the end of the last.  A write that fails does not move
   the end, so the next record overwrites what it left; until then its checksum tells that it is no record.
3. `synced` is at most the end, and everything before it was written before an fdatasync(2) that succeeded.
4. After a failed fsync(2) the kernel may have dropped the pages that it could not write, and a second fsync(2) would
   succeed without them (fsync(2), "Fsyncgate").  After a failed append the state has a change that the file lacks.  So
   the log stops: `require` and `sync` fail until it is mended.
5. While the log has stopped, `_held` has the records that could not be appended, in order; they follow the end.  An
   append whose change the caller takes back (`undone`) holds an ABORT instead.
6. A mend writes all records after `synced` again, each only if its checksum and sequence say that it was read as it was
   written, then those of `_held`, and syncs.  If that fails, the log stays stopped, and the mend is tried again.

When records reach the disk (`FsyncPolicy`, with Redis's names): "always" calls fdatasync(2) in `append`, on the thread
that appends, or leaves it to a caller that does not answer before `sync` has returned (`defers_syncs`); "everysec" has
a thread that calls it a second after the first record that is not synced; "no" leaves it to the kernel.  `sync` does it
at any time, on the thread that calls it.

The space after the end reads as zeros.  Before small records the zeros are written, 128 KiB at a time: the records then
overwrite pages and extents that exist, so appending and syncing them changes no metadata of the file.  A file system
that copies on write needs new space for that, which `require` has not allocated, so there no zeros are written.

Threading: one thread calls `require` and `append`.  Any thread may call `sync`.  A thread of the log's own mends it and
("everysec") syncs it; while the log has stopped, that thread alone writes, and `_sync_lock` guards `_held`.

A handover is a state that one process writes and another one reads: an image, which is a stream of records in a pipe,
and the log of what changed since.  The second process reads the log as far as the first one says that it is written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Final, Literal, Protocol

from msgspec.structs import replace

from protocol.journal.records import (
    FORMAT_VERSION,
    FRAME_BYTES,
    Begun,
    Buffer,
    Extent,
    FileHeader,
    JournalDamagedError,
    Kind,
    begun,
    completed,
    frame,
    padding,
    read_header,
    read_record,
    read_records,
)
from protocol.linux.syscalls import filesystem_type

FsyncPolicy = Literal["always", "everysec", "no"]

_logger = logging.getLogger(__name__)
_EVERY_S: Final = 1.0
_ALLOCATION_BYTES: Final = 4 << 20
_MAX_ALLOCATION_BYTES: Final = 64 << 20
# Kept free for changes that remove something: the record of a removal takes less than 2 KiB.
_MARGIN_BYTES: Final = 256 << 10
_SMALLEST_BYTES: Final = 64 << 10
_MARK_BYTES: Final = 4096  # allocated beyond every grant, for marks
_PART_BYTES: Final = 1 << 20
# With zeros written before, a record of 4 KB on ext4 takes 1.6 instead of 4.2 us, and its sync 0.17 instead of 0.34 ms.
# Larger records would only be written twice.
_SMALL_BYTES: Final = 16 << 10
_ZEROED_AFTER: Final = 4  # small records in a row
_ZEROS: Final = bytes(128 << 10)
_PAGE_BYTES: Final = 4096
_IN_PLACE: Final = frozenset({0xEF53, 0x58465342})  # EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC: linux/magic.h
_MAX_PIECES: Final = 512  # pwritev(2) takes 1,024
_JOINED_BYTES: Final = 8192  # copying less costs less than a CRC and an iovec for each piece
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LogFile(Protocol):
    """The file of a log; a test replaces it by one that loses what is not synced."""

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        """As pwritev(2)."""
        ...

    def allocate(self, offset: int, length: int) -> None:
        """As posix_fallocate(3)."""
        ...

    def reader(self) -> BinaryIO:
        """Open what was written for reading."""
        ...

    def truncate(self, length: int) -> None: ...

    def sync(self) -> None:
        """As fdatasync(2)."""
        ...

    def overwrites_in_place(self) -> bool:
        """Whether a write to space that has content already needs no other space."""
        ...

    def close(self) -> None: ...


class DescriptorFile:
    """A `LogFile` that is an open file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(self._descriptor, buffers, offset)

    def allocate(self, offset: int, length: int) -> None:
        os.posix_fallocate(self._descriptor, offset, length)

    def reader(self) -> BinaryIO:
        return open(os.dup(self._descriptor), "rb")  # no call that writes depends on the position, which they share

    def truncate(self, length: int) -> None:
        os.ftruncate(self._descriptor, length)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def overwrites_in_place(self) -> bool:
        return filesystem_type(self._descriptor) in _IN_PLACE

    def close(self) -> None:
        os.close(self._descriptor)


class Batch:
    """Appends effects to `log` as one batch, in pieces of about a megabyte.  `removes`: see `Log.require`."""

    def __init__(self, log: Log, *, removes: bool = False) -> None:
        self._log = log
        self._removes = removes
        self._parts: list[bytes] = []
        self._size = 0
        self._is_begun = False

    def add(self, pieces: Iterable[bytes]) -> None:
        """Add effects.  OSError: call `abort`."""
        for piece in pieces:
            self._parts.append(piece)
            self._size += len(piece)
            if self._size >= _PART_BYTES:
                self._append(Kind.PART)
                self._is_begun = True

    def end(self) -> None:
        """Make the batch count, unless it is empty.  OSError: call `abort`."""
        if self._parts or self._is_begun:
            self._append(Kind.COMMIT)

    def _append(self, kind: Kind) -> None:
        self._log.require(self._size, removes=self._removes)
        self._log.append(self._parts, kind, undone=True)
        self._parts, self._size = [], 0

    def abort(self) -> None:
        """Have what was appended not count."""
        if self._is_begun:
            self._log.abort()


class Log:
    """Appends to `file` after `extent`, its valid part, which the caller truncated it to."""

    def __init__(self, file: LogFile, header: FileHeader, extent: Extent, policy: FsyncPolicy) -> None:
        self._file = file
        self._magic = header.magic
        self._policy = policy
        # An image is complete when it is written: nothing that frees space is appended to it.
        self._margin = _MARGIN_BYTES if header.kind == "log" else 0
        self._writes_zeros = file.overwrites_in_place()
        self.end = extent.end
        self.sequence = extent.sequence
        self.synced = extent.end
        self._allocated = extent.end
        self._zeroed = extent.end  # zeros are written up to here, if that is beyond the end
        self._small = 0  # so many small records were the last ones
        self._sealed_end = extent.end if extent.is_closed else -1
        self._failure: OSError | None = None
        self._held: list[bytes] = []
        self._sync_lock = threading.Lock()
        self._unsynced = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.defers_syncs = False

    @property
    def failure(self) -> OSError | None:
        """Why the log has stopped; None while it accepts records."""
        return self._failure

    # -- appending -------------------------------------------------------------------------------
    def require(self, length: int, *, removes: bool = False) -> None:
        """Allocate space for records with payloads of `length` bytes in total.  ENOSPC if the disk is full; EIO.

        A change that only removes something may also use the last 256 KiB.
        """
        if self._failure is not None:
            raise self._stopped()
        needed = self.end + length + FRAME_BYTES + 8 + _MARK_BYTES
        if not removes:
            needed += self._margin
        if needed > self._allocated:
            self._allocate(needed, ahead=min(max(_ALLOCATION_BYTES, self.end // 8), _MAX_ALLOCATION_BYTES))

    def keep_room(self) -> None:
        """Allocate the space that is for removals only, if there is room; otherwise the next change asks for it."""
        needed = self.end + self._margin
        if needed > self._allocated and self._failure is None:
            with contextlib.suppress(OSError):
                self._allocate(needed)

    def _allocate(self, needed: int, *, ahead: int = 0) -> None:
        """Allocate up to `needed` at least, and if there is room `ahead` more, for later records."""
        missing = needed - self._allocated
        size = missing + ahead
        while True:
            try:
                self._file.allocate(self._allocated, size)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if size > missing:
                    size = max(missing, size // 2 if size > _SMALLEST_BYTES else missing)
                    continue
                reason = "no space left for the journal: free space on its file system, or `vfsd compact` it"
                raise OSError(errno.ENOSPC, reason) from None
            self._allocated += size
            return

    def append(self, pieces: Sequence[Buffer], kind: Kind = Kind.COMMIT, *, undone: bool = False) -> None:
        """Append a record whose payload is `pieces`; `require` granted the space.

        OSError if it cannot be written, or (with "always") synced; the log has then stopped, and writes the record when
        it is mended.  `undone`: the caller then takes the change back, and the record stays out.
        """
        length = sum(map(len, pieces))
        if length <= _JOINED_BYTES or len(pieces) > _MAX_PIECES:
            pieces = (b"".join(pieces),)
        head = frame(self._magic, kind, self.sequence + len(self._held), self.synced, pieces)
        self._write([head, *pieces], FRAME_BYTES + length, kind, undone=undone)

    def abort(self) -> None:
        """Have the parts that were appended last not count, now or when the log is mended.  OSError if it is full."""
        with self._sync_lock:
            if self._failure is not None:
                if not self._held:
                    self._held.append(self._abort_record())
                return
        self.require(0, removes=True)
        self.append([], Kind.ABORT, undone=True)

    def _abort_record(self) -> bytes:
        return frame(self._magic, Kind.ABORT, self.sequence + len(self._held), self.synced, [])

    def begin(self, length: int, start: bytes, data: Buffer) -> Begun:
        """Begin a record whose payload has `length` bytes: `start`, `data`, and what `complete` adds.

        Call this before the change: it computes the CRC of `data` while that is in the CPU's caches, which the change
        replaces.  For 1 MiB this saves 35 us of 150 (CRC and copy).  Nothing is written, and the change may fail.
        """
        return begun(self._magic, self.sequence, self.synced, length, start, data)

    def complete(self, record: Begun, data: Buffer, rest: bytes) -> None:
        """Append the record that `begin` returned, with `rest` after its data; otherwise as `append`.

        No other record was appended since.
        """
        head = completed(self._magic, record, rest)
        size = len(head) + len(data) + len(rest)
        self._write([head, data, rest] if size > _JOINED_BYTES else [b"".join((head, data, rest))], size, Kind.COMMIT)

    def _write(self, pieces: list[Buffer], size: int, kind: Kind, *, undone: bool = False) -> None:
        """Write a record of `size` bytes at the end."""
        pad = padding(size)
        if pad:
            pieces.append(pad)
            size += len(pad)
        self._small = self._small + 1 if size <= _SMALL_BYTES else 0
        try:
            if self._failure is not None:
                raise self._stopped()
            if self.end + size > self._zeroed and self._small >= _ZEROED_AFTER and self._writes_zeros:
                self._write_zeros()
            written = self._file.write(pieces, self.end)
            if written < size:
                self._write_rest(b"".join(pieces), written)
        except OSError as error:
            with self._sync_lock:
                self._held.append(self._abort_record() if undone else b"".join(pieces))
                self._stop(error)
            raise
        self.end += size
        self.sequence += 1
        if self._policy == "everysec":
            if not self._unsynced.is_set():
                self._unsynced.set()
                if self._thread is None:
                    self._start_thread()
        elif self._policy == "always" and kind != Kind.PART and not self.defers_syncs:
            self.sync()

    def _write_zeros(self) -> None:
        """Write zeros to the next pages of the space that is allocated."""
        start = max(self._zeroed, -(-self.end // _PAGE_BYTES) * _PAGE_BYTES)
        zeros = _ZEROS[: max(0, self._allocated - start)]
        if zeros:
            self._zeroed = start + self._file.write([zeros], start)

    def _write_rest(self, record: bytes, written: int) -> None:
        """Complete a short write: a signal, a limit, or a write of 2 GiB ends one."""
        self._write_at(self.end + written, memoryview(record)[written:])

    def _write_at(self, offset: int, data: Buffer) -> None:
        written = 0
        while written < len(data):
            more = self._file.write([memoryview(data)[written:]], offset + written)
            if more <= 0:
                raise OSError(errno.EIO, "the journal could not be written")
            written += more

    # -- syncing ---------------------------------------------------------------------------------
    def sync(self) -> None:
        """Return when every record that was appended before the call is on disk.  OSError."""
        end = self.end
        with self._sync_lock:
            if self._failure is not None:
                raise self._stopped()
            if self.synced >= end:
                return
            end = self.end
            try:
                self._file.sync()
            except OSError as error:
                self._stop(error)
                raise
            self.synced = end

    def _stop(self, error: OSError) -> None:
        """Refuse records from now on, with the lock held, and have them accepted again once the disk works."""
        if self._failure is None:
            self._failure = error
            _logger.error(
                "the journal cannot be written (%s): the workspace refuses changes until its disk works again; `vfsd"
                " export` saves its content elsewhere", error.strerror or error,
                extra={"operation": "journal"},
            )  # fmt: skip
            self._unsynced.set()
            if self._thread is None and self._margin:  # an image is not continued
                self._start_thread()

    def _stopped(self) -> OSError:
        assert self._failure is not None
        reason = f"the journal cannot be written ({self._failure.strerror}): no change is accepted until it can"
        return OSError(self._failure.errno or errno.EIO, reason)

    def mend(self) -> None:
        """Write again, after a failure, what may not be on disk; accept records from then on.  OSError."""
        with self._sync_lock:
            if self._failure is None:
                return
            self._write_again()
            end = self.end
            for record in self._held:
                self._write_at(end, record)
                end += len(record)
            self._file.sync()
            if self._held:
                self.end, self.sequence = end, self.sequence + len(self._held)
                self._held.clear()
            self.synced = end
            self._failure = None
        _logger.info("the journal is written again", extra={"operation": "journal"})

    def _write_again(self) -> None:
        """Write the records between `synced` and the end again.  OSError (EIO) if one cannot be read any more."""
        offset, sequence = self.synced, self.sequence
        with self._file.reader() as reader:
            reader.seek(offset)
            while offset < self.end:
                record = read_record(reader, self._magic, offset)
                if record is None or sequence not in (self.sequence, record.sequence):
                    break
                pieces = [record.payload]
                head = frame(self._magic, Kind(record.kind), record.sequence, record.synced, pieces)
                self._write_at(offset, b"".join((head, record.payload, padding(len(head) + len(record.payload)))))
                offset, sequence = record.end, record.sequence + 1
        if (offset, sequence) != (self.end, self.sequence):
            raise OSError(
                errno.EIO, f"the record at offset {offset} cannot be read any more: mount the workspace again"
            )

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._sync_every_second, name="vfsd-journal", daemon=True)
        self._thread.start()

    def _sync_every_second(self) -> None:
        while True:
            self._unsynced.wait()
            if self._stopping.wait(_EVERY_S):
                return
            self._unsynced.clear()  # before the sync: a record that is appended meanwhile waits for the next one
            try:
                self.sync() if self._failure is None else self.mend()
            except OSError:  # logged
                self._unsynced.set()

    # -- the end ---------------------------------------------------------------------------------
    def seal(self) -> None:
        """Sync, and mark the end as clean; free the space that is not used.  Records may follow.  OSError."""
        self.sync()
        if self._sealed_end == self.end:
            return
        if self._failure is not None:
            raise self._stopped()
        # Every grant left room for a mark, so a full disk does not prevent it after any change.
        if self.end + FRAME_BYTES > self._allocated:
            self._allocate(self.end + FRAME_BYTES)
        self.append([], Kind.MARK)
        self._file.truncate(self.end)
        self._allocated = self._zeroed = self.end
        self.sync()
        self._sealed_end = self.end

    def close(self) -> None:
        """Seal and close the file.  OSError if it cannot be synced; the file is closed also in this case.

        If the disk is full and nothing has changed since the log began, the mark of its end may be missing.
        """
        self._stopping.set()
        self._unsynced.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            self.mend()
            self.sync()
            with contextlib.suppress(OSError):
                self.seal()
        finally:
            self._file.close()

    def detach(self) -> None:
        """Close the file in a process that was forked from the one that appends; nothing is written."""
        self._failure = OSError(errno.EBADF, "the journal belongs to another process")
        self._file.close()


# -- handover to a successor -----------------------------------------------------------------------
_IMAGE: Final = "the image"
_MAGIC: Final = 0x56465344
_BUFFER_BYTES: Final = 1 << 20


class _Pipe:
    """A `LogFile` that is a pipe: records go out in their order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:  # noqa: ARG002
        return os.writev(self._descriptor, buffers)

    def allocate(self, offset: int, length: int) -> None:
        pass

    def reader(self) -> BinaryIO:
        raise OSError(errno.ESPIPE, "a pipe cannot be read again")

    def truncate(self, length: int) -> None:
        pass

    def overwrites_in_place(self) -> bool:
        return False

    def sync(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._descriptor)


def image_writer(descriptor: int) -> Log:
    """Begin an image in the pipe `descriptor`; closing the log completes it.  OSError."""
    # Nobody else writes to the pipe, so the magic need not be a secret.
    header = FileHeader(FORMAT_VERSION, "image", "", {}, 1, 1, _MAGIC)
    encoded = header.encoded()
    pipe = _Pipe(descriptor)
    written = 0
    while written < len(encoded):
        written += pipe.write([encoded[written:]], written)
    return Log(pipe, header, Extent(len(encoded), header.first, False, 0), "no")


def read_image(descriptor: int) -> Iterator[bytes]:
    """Yield the payloads of an image, in order, until it is complete; closes `descriptor`.

    JournalDamagedError if it is not complete; OSError (EPROTONOSUPPORT) if it has another format.
    """
    with open(descriptor, "rb", buffering=_BUFFER_BYTES) as file:
        header = read_header(_Stream(file), _IMAGE)  # type: ignore[arg-type]
        sequence, offset, kind = header.first, 0, 0
        while (record := read_record(file, header.magic, offset)) is not None and record.sequence == sequence:
            sequence, offset, kind = sequence + 1, record.end, record.kind
            if record.payload:
                yield record.payload
    if kind != Kind.MARK:
        raise JournalDamagedError(_IMAGE, "the image ends too early")


class _Stream:
    """A file without positions, which is read from its beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self.read = file.read

    def seek(self, _offset: int) -> None:
        pass


class LogFollower:
    """Reads the log behind `descriptor` from the record `sequence` at `offset` on.  Closes `descriptor` at the end.

    OSError (EPROTONOSUPPORT) if it has another format.
    """

    def __init__(self, descriptor: int, offset: int, sequence: int) -> None:
        self._file = open(descriptor, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 (closed by `close`)
        self._header = read_header(self._file, "the log")
        self._offset = offset
        self._sequence = sequence
        self._parts: list[bytes] = []  # of a batch that is not complete

    def batches(self, end: int) -> Iterator[list[bytes]]:
        """Yield the batches up to the offset `end`, to which the giving process has written complete records."""
        # A record that was read ahead in part may be complete now.
        self._file.seek(0, io.SEEK_END)
        for record in read_records(self._file, replace(self._header, first=self._sequence), self._offset, end):
            self._offset, self._sequence = record.end, record.sequence + 1
            if record.kind == Kind.ABORT:
                self._parts = []
            elif record.kind != Kind.MARK:
                self._parts.append(record.payload)
                if record.kind == Kind.COMMIT:
                    parts, self._parts = self._parts, []
                    yield parts
        if self._offset != end:
            raise OSError(errno.EBADMSG, f"the log cannot be read at offset {self._offset}")

    def close(self) -> None:
        self._file.close()
