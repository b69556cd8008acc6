"""Observer: makes a call and reports its answer, and what it did to the inodes that it touched.

An observation is (answer, touched): the answer ("ok", value) or ("error", errno's name), and for each path and
slot of the call, and each path's directory, its attributes after the call.  Times are told in words, since two
file systems never do a thing at the same nanosecond: "same" as before the call, "now" where the call changed
it to the present, the value itself where it was set to one far away.
Inode numbers, and st_blksize, a hint that an engine chooses, are not told.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from typing import Any, Final

from tests.differential.calls import OMIT, OPERATIONS
from tests.differential.operations import Process, digest, errno_name, extended_attributes, sync_file_system

__all__ = ["Observer"]

_NEAR_NS: Final = 12 * 3600 * 10**9  # times that a call sets are further from the present than that
_COARSE: Final = 5  # CLOCK_REALTIME_COARSE, clock_gettime(2)
_CHUNK: Final = 1 << 18
_HEAD_BYTES: Final = 1 << 19
# Where a sparse file may have content beyond its head: the offsets of `calls.OFFSET`.
_FAR_OFFSETS: Final = (2**31, 2**32 + 5, 2**40, 2**62, 2**63 - 70_000)
# These read, so that they may update atime, or not: relatime counts the reads that reach the file system.
_READING: Final = frozenset(
    {
        "read",
        "pread",
        "listdir",
        "flistdir",
        "map_read",
        "map_write",
        "map_private",
        "copy_file_range",
        "sendfile",
        "lseek",
        "seek_sparse",
    }
)

Attributes = tuple[Any, ...]


class Observer:
    """Runs calls in `process`.

    With `process.write_back` st_blocks is shown only in the tree, which is synced first.  And the kernel sets the times
    of files by a clock that ticks every 4 ms, so a call waits until that shows a new time.

    st_blocks of a copy are those after `fill_copied_holes`: tmpfs allocates copied holes, a workspace keeps them.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._write_back = process.write_back
        self._present_ns = time.time_ns()

    def observe(self, operation: str, args: tuple[Any, ...]) -> Any:
        if operation == "tree":
            return self._tree(*args)
        places = list(_places(operation, args))
        before = [self._stat(place) for place in places]
        known = {found.st_ino: found for found in before if isinstance(found, os.stat_result)}
        if self._write_back:
            _await_tick(known.values())
        answer: tuple[str, Any]
        try:
            answer = "ok", self._process.run(operation, args)
        except OSError as error:
            answer = "error", errno_name(error)
        except (ValueError, OverflowError) as error:
            answer = "refused", str(error)
        reads = operation in _READING
        after = [self._stat(place) for place in places]
        blocks = after
        if operation == "copy_file_range" and answer[0] == "ok":
            self._process.fill_copied_holes(*args[2:4], answer[1])
            blocks = [self._stat(place) for place in places]
        labels = _places_of_atime(operation, args) if answer[0] == "ok" else ()
        sets = {
            found.st_ino
            for (label, *_), found in zip(places, after, strict=True)
            if label in labels and isinstance(found, os.stat_result)
        }
        return answer, [
            (
                label,
                self._show(found, known.get(found.st_ino), reads, found.st_ino in sets, self._blocks(filled))
                if isinstance(found, os.stat_result)
                else found,
            )
            for (label, *_), found, filled in zip(places, after, blocks, strict=True)
        ]

    def _stat(self, place: tuple[str, Any, bool]) -> os.stat_result | str:
        _, where, follow = place
        try:
            if isinstance(where, int):
                return os.fstat(self._process.fd(where))
            return os.stat(where, follow_symlinks=follow)
        except OSError as error:
            return errno_name(error)

    def _blocks(self, found: os.stat_result | str) -> int | str:
        if isinstance(found, str) or (self._write_back and stat.S_ISREG(found.st_mode)):
            return "-"
        return found.st_blocks

    def _show(
        self, now: os.stat_result, before: os.stat_result | None, reads: bool, sets: bool, blocks: int | str
    ) -> Attributes:
        # A directory may be read by anybody on the machine.
        if reads or before is None or stat.S_ISLNK(now.st_mode) or (stat.S_ISDIR(now.st_mode) and not sets):
            atime: int | str = "-"
        else:
            # Whether a read came through before is told nowhere: only what this call does counts.
            unchanged = not sets and now.st_atime_ns == before.st_atime_ns
            atime = "same" if unchanged else self._time(now.st_atime_ns, before.st_atime_ns)
        return (
            stat.filemode(now.st_mode),
            now.st_nlink,
            now.st_uid,
            now.st_gid,
            now.st_size,
            blocks,
            now.st_rdev,
            atime,
            self._time(now.st_mtime_ns, before.st_mtime_ns if before else None),
            self._time(now.st_ctime_ns, before.st_ctime_ns if before else None),
            _order(now.st_mtime_ns, now.st_ctime_ns),
        )

    def _time(self, now_ns: int, before_ns: int | None = None) -> int | str:
        if abs(now_ns - self._present_ns) > _NEAR_NS:
            return now_ns
        return "same" if now_ns == before_ns else "now"

    # -- the whole tree --------------------------------------------------------------------------
    def _tree(self) -> list[tuple[bytes, Any]]:
        """Everything, in order: path, and (attributes, first path of the inode, target, xattrs, content)."""
        found: list[tuple[bytes, Any]] = []
        if self._write_back:
            _sync_all(b"/")
            self._sync_unlinked()
        self._walk(b"/", found, {})
        status = os.statvfs("/")
        # What the content takes; the inodes free are not alike, tmpfs counts by another measure.
        found.append((b"statfs", (status.f_bsize, status.f_blocks, status.f_bfree, status.f_bavail)))
        return found

    @staticmethod
    def _sync_unlinked() -> None:
        """Start to write back the open files without a name."""
        descriptor = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_file_system(descriptor)
        finally:
            os.close(descriptor)

    def _walk(self, path: bytes, found: list[tuple[bytes, Any]], names: dict[int, bytes]) -> None:
        try:
            attributes = os.lstat(path)
        except OSError as error:
            found.append((path, ((errno_name(error),), b"", b"", (), ())))
            return
        kind = stat.S_IFMT(attributes.st_mode)
        first = names.setdefault(attributes.st_ino, path)
        shown = self._show(attributes, None, True, False, attributes.st_blocks)
        target = os.readlink(path) if kind == stat.S_IFLNK else b""
        content = _content(path, attributes.st_size) if kind == stat.S_IFREG and first == path else ()
        found.append((path, (shown, first, target, extended_attributes(path), content)))
        if kind == stat.S_IFDIR:
            for name in sorted(os.listdir(path)):
                self._walk(os.path.join(path, name), found, names)


def _await_tick(files: Iterable[os.stat_result]) -> None:
    """Wait until the clock of cached files shows a later time than that at which one of `files` was changed."""
    latest = max((file.st_ctime_ns for file in files if stat.S_ISREG(file.st_mode)), default=0)
    while latest - _NEAR_NS < time.clock_gettime_ns(_COARSE) <= latest:
        time.sleep(0.001)


def _sync_all(path: bytes) -> None:
    """Sync all regular files below `path`: syncfs(2) of a FUSE mount does not wait until they are written."""
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            _sync_all(entry.path)
        elif entry.is_file(follow_symlinks=False):
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOATIME)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _content(path: bytes, size: int) -> tuple[Any, ...]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOATIME)
    try:
        pieces: list[Any] = [(0, digest(os.pread(descriptor, _HEAD_BYTES, 0)))]
        pieces += [
            (far, digest(os.pread(descriptor, min(_CHUNK, size - far), far))) for far in _FAR_OFFSETS if far < size
        ]
        return tuple(pieces)
    finally:
        os.close(descriptor)


def _places(operation: str, args: tuple[Any, ...]) -> list[tuple[str, Any, bool]]:
    """(label, path or slot, whether to follow) of what the call touches."""
    places: list[tuple[str, Any, bool]] = []
    for number, (kind, value) in enumerate(zip(OPERATIONS[operation].kinds, args, strict=True), 1):
        if kind.name == "slot":
            places.append((f"slot {value}", value, True))
        elif kind.name == "path":
            places.append((f"path {number}", value, False))
            places.append((f"path {number} followed", value, True))
            parent, slash, _ = value.rstrip(b"/").rpartition(b"/")
            places.append((f"directory {number}", parent or (b"/" if slash else b"."), True))
    return places


def _places_of_atime(operation: str, args: tuple[Any, ...]) -> tuple[str, ...]:
    """The labels of the places whose atime a call sets."""
    if operation == "utimes_now":
        return ("path 1", "path 1 followed")
    if operation == "futimens":
        return () if args[1] == OMIT else (f"slot {args[0]}",)
    if operation == "utimens" and args[1] != OMIT:
        return ("path 1", "path 1 followed") if args[3] else ("path 1",)
    return ()


def _order(one: int, other: int) -> str:
    return "mtime < ctime" if one < other else "mtime = ctime" if one == other else "mtime > ctime"
