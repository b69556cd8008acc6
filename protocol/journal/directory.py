"""Journal: the files of one workspace in a directory of their own, from opening them to the clean end.

    lock            locked with flock(2) by the daemon that uses the journal
    image-00000003  the state at the beginning of log 3; absent for log 1
    log-00000003    what happened since
    below           how to open the layer below an overlay while its source does not answer; most journals have none

The state is that of the image with the highest number (an empty state without an image), and of the logs from that
number on.  A new log is begun when the one before it is complete and synced; an image gets its name by a rename when it
is complete and synced; files that it replaces are removed after that.  So at each moment the files describe one state.

Invariants:

1. All files have the same `FileHeader.journal` and `FileHeader.identity`.
2. Each log but the last ends, synced, with the record before the first one of the next log.
3. An image is complete, and its last record is a clean mark.
4. One process at a time appends: the one that holds the lock.
5. `below` is complete, and is there before the first log if the journal was begun with it.

Threading: one thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

from protocol.journal.log import DescriptorFile, FsyncPolicy, Log
from protocol.journal.records import (
    FORMAT_VERSION,
    Extent,
    FileHeader,
    JournalDamagedError,
    Kind,
    Span,
    index,
    read_header,
    read_span,
)
from protocol.linux.regular_file import open_regular, read_regular, sync_directory, write_atomically
from protocol.values import Value
from protocol.volume_durability import JournalEnd

Identity = dict[str, str | int]

_NAME: Final = re.compile(r"(log|image)-(\d{8})(\.new)?")
_LOCK: Final = "lock"
_BELOW: Final = "below"
_BELOW_FILE: Final = re.compile(r"below(\.[0-9a-f-]+\.new)?")  # with what an interrupted write left
_LARGEST_BELOW_BYTES: Final = 80 << 20
_LARGE_BYTES: Final = 64 << 20
_COMMIT: Final = int(Kind.COMMIT)  # comparing with the enum's member takes longer


class JournalReport(Value):
    """The content of a journal.

    `identity`: what it belongs to.  `size_bytes`: of all files.  `cut_bytes`: of an interrupted write at the end, which
    do not count.  `is_clean`: the last daemon closed it.  `logs` and `image`: the numbers of the files that count.
    """

    identity: Identity
    size_bytes: int
    cut_bytes: int
    is_clean: bool
    logs: tuple[int, ...]
    image: int | None


class _File(Value):
    path: str
    header: FileHeader
    extent: Extent
    spans: list[Span]


class JournalFiles:
    """The verified files of a journal, for reading.  JournalDamagedError, OSError."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        found = {"log": _numbers(directory, "log"), "image": _numbers(directory, "image")}
        if not found["log"]:
            raise FileNotFoundError(errno.ENOENT, "there is no journal in this directory", directory)
        self.image_number = max(found["image"], default=None)
        first = self.image_number or min(found["log"])
        numbers = [number for number in found["log"] if number >= first]
        self._files = [self._verified("image", self.image_number)] if self.image_number is not None else []
        self._logs = [self._verified("log", number) for number in numbers]
        if numbers != list(range(first, first + len(numbers))) or (self.image_number is None and first != 1):
            raise JournalDamagedError(directory, f"a file of the journal is missing: it has the logs {numbers}")
        self._check_sequence()

    def _verified(self, kind: str, number: int) -> _File:
        path = os.path.join(self.directory, f"{kind}-{number:08}")
        with _opened(path) as file:
            header = read_header(file, path)
            if (header.kind, header.number) != (kind, number):
                raise JournalDamagedError(path, f"this file of the journal is {header.kind} {header.number}")
            return _File(path, header, *index(file, header, path))

    def _check_sequence(self) -> None:
        for file in self._files:
            if not file.extent.is_closed:
                raise JournalDamagedError(file.path, "this image is not complete")
        for log, following in zip(self._logs, self._logs[1:], strict=False):
            if log.extent.sequence != following.header.first or log.extent.cut_bytes:
                raise JournalDamagedError(log.path, "this log ends before the next one begins")
        headers = {(file.header.journal, tuple(sorted(file.header.identity.items()))) for file in self.all}
        if len(headers) > 1:
            raise JournalDamagedError(self.directory, "the files of this directory belong to different journals")

    @property
    def all(self) -> list[_File]:
        return [*self._files, *self._logs]

    @property
    def last(self) -> _File:
        """The log that the next record is appended to."""
        return self._logs[-1]

    @property
    def identity(self) -> Identity:
        return self.last.header.identity

    def report(self) -> JournalReport:
        return JournalReport(
            identity=self.identity,
            size_bytes=sum(os.stat(file.path).st_blocks * 512 for file in self.all),
            cut_bytes=self.last.extent.cut_bytes,
            is_clean=self.last.extent.is_closed,
            logs=tuple(file.header.number for file in self._logs),
            image=self.image_number,
        )

    def batches(self) -> Iterator[list[bytes]]:
        """Yield the payloads of each COMMIT with its PART records, from the first to the last, each once.

        An image, which is complete, is yielded record by record, so that it is not in memory twice.
        """
        for file in self.all:
            is_image = file.header.kind == "image"
            parts: list[bytes] = []
            with _opened(file.path) as opened:
                for span in file.spans:
                    data = read_span(opened, span, file.path)
                    for kind, start, length in zip(span.kinds, span.starts, span.lengths, strict=True):
                        if kind == _COMMIT and not parts:
                            yield [data[start : start + length]]
                        elif kind == Kind.ABORT:
                            parts = []
                        elif kind != Kind.MARK:
                            parts.append(data[start : start + length])
                            if is_image or kind == _COMMIT:
                                yield parts
                                parts = []


class Journal:
    """A journal that this process appends to.  Make one with `create` or `resume`."""

    def __init__(
        self,
        directory: str,
        lock_fd: int,
        log: Log,
        header: FileHeader,
        policy: FsyncPolicy,
        *,
        image_bytes: int = 0,
        older_bytes: int = 0,
    ) -> None:
        self.directory = directory
        self.log = log
        self.policy = policy
        self._header = header
        self._lock_fd = lock_fd
        self._image_bytes = image_bytes
        self._older_bytes = older_bytes  # of the logs since the image, without the last
        self._failed_at_bytes = 0  # the logs had this size when the last image could not be written

    # -- opening ---------------------------------------------------------------------------------
    @classmethod
    def create(
        cls, directory: str, identity: Mapping[str, str | int], policy: FsyncPolicy, *, below: bytes = b""
    ) -> Journal:
        """Begin a journal in `directory`, which is made if it does not exist.  FileExistsError if it has one.

        `below` is what `read_below` returns.
        """
        os.makedirs(directory, mode=0o700, exist_ok=True)
        _check_empty(directory)  # before the lock makes a file
        lock_fd = lock(directory)
        try:
            _check_empty(directory)
            header = FileHeader(
                FORMAT_VERSION, "log", secrets.token_hex(16), dict(identity), 1, 1, secrets.randbits(32)
            )
            if below:
                write_below(directory, below)
            log = _begin_log(directory, header, policy)
            sync_directory(os.path.dirname(os.path.abspath(directory)))
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(directory, lock_fd, log, header, policy)

    @classmethod
    def resume(cls, directory: str, policy: FsyncPolicy) -> tuple[JournalFiles, Journal]:
        """Lock and verify the journal in `directory`; return its files, and the journal to append to.

        What an interrupted write left at the end is cut off (`JournalReport.cut_bytes`).

        FileNotFoundError without a journal; BlockingIOError if another daemon uses it; JournalDamagedError; OSError.
        """
        lock_fd = lock(directory)
        try:
            files = JournalFiles(directory)
            last = files.last
            descriptor = open_regular(last.path, os.O_RDWR)
            try:
                os.ftruncate(descriptor, last.extent.end)
                os.fsync(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            log = Log(DescriptorFile(descriptor), last.header, last.extent, policy)
            older = sum(file.extent.end for file in files.all[:-1] if file.header.kind == "log")
            image = sum(file.extent.end for file in files.all if file.header.kind == "image")
            journal = cls(directory, lock_fd, log, last.header, policy, image_bytes=image, older_bytes=older)
            journal._remove_unused(files.image_number)
        except BaseException:
            os.close(lock_fd)
            raise
        return files, journal

    @classmethod
    def in_memory(cls) -> Journal:
        """Begin a journal that is on no disk: what a successor needs to continue with this state."""
        descriptor = os.memfd_create("vfsd-journal")
        header = FileHeader(FORMAT_VERSION, "log", secrets.token_hex(16), {}, 1, 1, secrets.randbits(32))
        encoded = header.encoded()
        _write_all(descriptor, encoded)
        log = Log(DescriptorFile(descriptor), header, Extent(len(encoded), header.first, False, 0), "no")
        return cls("", os.dup(descriptor), log, header, "no")

    @classmethod
    def continued(cls, directory: str, end: JournalEnd, policy: FsyncPolicy) -> Journal:
        """Continue the journal of a daemon that hands it over at `end`, and appends nothing any more.

        Nothing is written, and the lock is not taken: call `take_lock` before the first change.  OSError.
        """
        path = os.path.join(directory, f"log-{end.number:08}")
        with contextlib.ExitStack() as stack:
            with _opened(path) as file:
                header = read_header(file, path)
            descriptor = open_regular(path, os.O_RDWR)
            stack.callback(os.close, descriptor)
            lock_fd = open_regular(os.path.join(directory, _LOCK))
            stack.pop_all()
        log = Log(DescriptorFile(descriptor), header, Extent(end.offset, end.sequence, False, 0), policy)
        log.synced = end.synced
        return cls(directory, lock_fd, log, header, policy, image_bytes=end.image_bytes, older_bytes=end.older_bytes)

    def take_lock(self, descriptor: int | None = None) -> None:
        """Hold the lock with this descriptor of the daemon before; or take it.  BlockingIOError if it is held."""
        taken = lock(self.directory) if descriptor is None else descriptor
        os.close(self._lock_fd)
        self._lock_fd = taken

    def end(self) -> JournalEnd:
        """Return where the next record comes."""
        log = self.log
        return JournalEnd(self.number, log.end, log.sequence, self._image_bytes, self._older_bytes, log.synced)

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the lock.  A process that has a duplicate of it holds the lock, too."""
        return self._lock_fd

    def reopened_log(self) -> int:
        """Open the log that is appended to once more, with a position of its own.  OSError if it was removed."""
        if not self.directory:
            return os.open(f"/proc/self/fd/{self._lock_fd}", os.O_RDWR | os.O_CLOEXEC)
        return open_regular(os.path.join(self.directory, f"log-{self.number:08}"))

    @property
    def identity(self) -> Identity:
        return self._header.identity

    @property
    def number(self) -> int:
        """The number of the log that is appended to."""
        return self._header.number

    def size_bytes(self) -> int:
        """Return the disk space that the journal takes; 0 if its directory was removed."""
        total = 0
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(self.directory, name)).st_blocks * 512
        return total

    @property
    def is_removed(self) -> bool:
        """Whether another program removed or replaced the files, so that the next mount would not find them."""
        try:
            lock_file = os.stat(os.path.join(self.directory, _LOCK))
            os.stat(os.path.join(self.directory, f"log-{self.number:08}"))
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not os.path.samestat(lock_file, os.fstat(self._lock_fd))

    @property
    def is_large(self) -> bool:
        """Whether the logs have outgrown 64 MB and their image, so that a new image would be worth its cost."""
        logs = self._older_bytes + self.log.end
        return logs > max(_LARGE_BYTES, self._image_bytes, 2 * self._failed_at_bytes)

    # -- compaction ------------------------------------------------------------------------------
    def rotate(self) -> int:
        """Begin the next log, which begins with the present state.  Return its number.  OSError: nothing changed."""
        self.log.seal()
        header = FileHeader(
            FORMAT_VERSION,
            "log",
            self._header.journal,
            self._header.identity,
            self._header.number + 1,
            self.log.sequence,
            secrets.randbits(32),
        )
        log = _begin_log(self.directory, header, self.policy)
        old, self.log = self.log, log
        self._header = header
        log.defers_syncs = old.defers_syncs
        self._older_bytes += old.end
        old.close()
        return header.number

    def image_log(self, number: int) -> Log:
        """Begin the image of the state at the beginning of log `number`; `finish_image` completes it."""
        path = self._image_path(number) + ".new"
        header = FileHeader(
            FORMAT_VERSION, "image", self._header.journal, self._header.identity, number, 1, secrets.randbits(32)
        )
        return _begin_file(path, header, "no")

    def finish_image(self, number: int) -> None:
        """Give the image that `image_log` began, and that is closed, its name; remove the files that it replaces."""
        path = self._image_path(number)
        os.rename(path + ".new", path)
        sync_directory(self.directory)
        self._remove_unused(number)
        self._image_bytes, self._older_bytes, self._failed_at_bytes = os.stat(path).st_size, 0, 0

    def abandon_image(self, number: int) -> None:
        """Remove the image that could not be written; the logs before it stay, and `is_large` waits."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._image_path(number) + ".new")
        self._failed_at_bytes = self._older_bytes + self.log.end

    def unlock(self) -> None:
        """Give up this process's part of the lock, in a process that was forked to write an image."""
        os.close(self._lock_fd)

    def _image_path(self, number: int) -> str:
        return os.path.join(self.directory, f"image-{number:08}")

    def _remove_unused(self, image: int | None) -> None:
        """Remove incomplete images, and the files before `image`."""
        for name in os.listdir(self.directory):
            match = _NAME.fullmatch(name)
            if match is not None and (match[3] or (image is not None and int(match[2]) < image)):
                os.unlink(os.path.join(self.directory, name))

    # -- the end ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Sync and close the journal.  OSError if it cannot be synced; it is closed then, too."""
        try:
            self.log.close()
        finally:
            os.close(self._lock_fd)

    def detach(self) -> None:
        """Close the files in a process that was forked from the one that appends."""
        self.log.detach()
        os.close(self._lock_fd)


def read_journal(directory: str) -> JournalFiles:
    """Verify the journal in `directory` while no daemon uses it.

    BlockingIOError if a daemon uses it; FileNotFoundError; JournalDamagedError; OSError.
    """
    _check_used(directory)
    descriptor = lock(directory)
    try:
        return JournalFiles(directory)
    finally:
        os.close(descriptor)


def drop_journal(directory: str) -> None:
    """Remove the journal in `directory`, damaged or not, and the directory if nothing else is in it.

    BlockingIOError if a daemon uses it; FileNotFoundError if there is no journal; OSError.
    """
    _check_used(directory)
    descriptor = lock(directory)
    try:
        _check_used(directory)
        remove_files(directory)
    finally:
        os.close(descriptor)


def remove_files(directory: str) -> None:
    """Remove the files of the journal in `directory`, and the directory if nothing else is in it.  OSError.

    The caller holds the lock.  Files that are gone already are no error.
    """
    # The images first: without them the logs do not count, whatever interrupts this.
    names = sorted(filter(_NAME.fullmatch, os.listdir(directory)))
    for name in (*names, *filter(_BELOW_FILE.fullmatch, os.listdir(directory)), _LOCK):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def has_journal(directory: str) -> bool:
    """Return whether `directory` has a journal.  OSError if it cannot be read."""
    try:
        return bool(_numbers(directory, "log"))
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_identity(directory: str) -> Identity:
    """Return what the journal in `directory` belongs to, without verifying it.

    FileNotFoundError without a journal, JournalDamagedError, OSError.  A daemon may use the journal meanwhile.
    """
    number = max(_numbers(directory, "log"), default=0)
    path = os.path.join(directory, f"log-{number:08}")
    with _opened(path) as file:
        return read_header(file, path).identity


def read_below(directory: str) -> bytes:
    """Return how to open the layer below the overlay of this journal; b"" if the journal has nothing.  OSError."""
    try:
        return read_regular(os.path.join(directory, _BELOW), _LARGEST_BELOW_BYTES)
    except FileNotFoundError:
        return b""


def write_below(directory: str, data: bytes) -> None:
    """Set what `read_below` returns.  With the lock.  OSError."""
    write_atomically(os.path.join(directory, _BELOW), data, durable=True)


def is_locked(directory: str) -> bool:
    """Return whether a daemon uses the journal in `directory`."""
    try:
        os.close(lock(directory))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def lock(directory: str) -> int:
    """Lock the journal in `directory`; return the descriptor that holds the lock.

    BlockingIOError if another process holds it; PermissionError if the directory belongs to another user, or others may
    write to it; FileNotFoundError.
    """
    status = os.stat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "a journal needs a directory of its own that belongs to you, and that nobody else may write to"
        raise PermissionError(errno.EPERM, reason, directory)
    path = os.path.join(directory, _LOCK)
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        descriptor = open_regular(path)  # a backup on a read-only file system can be checked
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BlockingIOError(
            errno.EWOULDBLOCK, "another daemon uses this journal: unmount its workspace first", directory
        ) from None
    return descriptor


def _check_empty(directory: str) -> None:
    """FileExistsError if there is a journal in `directory`; ENOTEMPTY if there are other files."""
    if _numbers(directory, "log") or _numbers(directory, "image"):
        raise FileExistsError(errno.EEXIST, "this directory has a journal already", directory)
    ours = (_LOCK, _NAME, _BELOW_FILE)
    others = [name for name in os.listdir(directory) if not any(re.fullmatch(each, name) for each in ours)]
    if others:
        reason = f"this directory has other files ({others[0]!r}): give --journal-dir an empty or new directory"
        raise OSError(errno.ENOTEMPTY, reason, directory)


def _check_used(directory: str) -> list[str]:
    """Return the names of the journal's files in `directory`.  FileNotFoundError if there are none."""
    names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    if not names:
        raise FileNotFoundError(errno.ENOENT, "there is no journal in this directory", directory)
    return names


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _numbers(directory: str, kind: str) -> list[int]:
    matches = (_NAME.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(match[2]) for match in matches if match is not None and match[1] == kind and not match[3])


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    with open(open_regular(path), "rb", buffering=1 << 20) as file:
        yield file


def _begin_log(directory: str, header: FileHeader, policy: FsyncPolicy) -> Log:
    return _begin_file(os.path.join(directory, f"log-{header.number:08}"), header, policy)


def _begin_file(path: str, header: FileHeader, policy: FsyncPolicy) -> Log:
    """Make a file with its header, durably; a file of that name is replaced.

    The header is written under another name first, so that no file without a header has the name.
    """
    new = path if path.endswith(".new") else path + ".new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    descriptor = open_regular(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        encoded = header.encoded()
        _write_all(descriptor, encoded)
        os.fsync(descriptor)
        if new != path:
            os.rename(new, path)
        sync_directory(os.path.dirname(path))
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        raise
    return Log(DescriptorFile(descriptor), header, Extent(len(encoded), header.first, False, 0), policy)
