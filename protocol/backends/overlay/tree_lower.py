"""TreeLower: an immutable tree as the lower layer of an overlay, such as an archive or a stored snapshot.

Inode numbers and ctimes are those of the snapshot, if it has them (`protocol.store.format.rows`).  Else numbers
come from a hash of the path, or of the link group for a file with several names, and the ctime is the mtime.  So they
are the same at every mount.  The atime is the mtime, because trees have no other.

Content that is missing, truncated or damaged cannot be read (EIO), which is logged once for each path.

Threading: any thread; a lock gives the tree to one thread at a time.
"""

from __future__ import annotations

import errno
import logging
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES, DIRECTORY_ENTRY_BYTES
from protocol.backends.overlay.lower import FIRST_NEW_NUMBER, Lower, LowerEntry, LowerFile, LowerStat, RecordedStat
from protocol.errors import os_error, shown
from protocol.tree import TYPE_MASK
from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from protocol.store.format.rows import Row
    from protocol.tree import LowerTree, Tree, TreeEntry
    from protocol.volume_extensions import VolumeUsage

_logger = logging.getLogger(__name__)
_GIT_BITS: Final = 32  # of an inode number, in the index of git
_NUMBER_BYTES: Final = 6  # fewer than FIRST_NEW_NUMBER has
_MOST_REPORTED: Final = 100  # damaged paths that are logged
_SECTOR_BYTES: Final = 512
_ALWAYS_READY_BYTES: Final = 1 << 20  # reading and verifying so much takes some milliseconds
# Of this process and not of the tree, or no damage: an entry that was not readable when the snapshot was taken.
_PASSED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EACCES, errno.ECANCELED})


def tree_stat(
    entry: TreeEntry | Row, number: int, nlink: int, size: int, rdev: int, ctime_ns: int, sectors: int | None = None
) -> RecordedStat:
    """Return the attributes of an entry of a tree.

    `ctime_ns`: 0 if it is unknown.  `sectors`: None for those of a file without holes.
    """
    mtime_ns = entry.mtime_ns
    ctime_ns = ctime_ns or mtime_ns
    blocks = -(-size // _SECTOR_BYTES) if sectors is None else sectors
    owner = entry.uid, entry.gid
    return RecordedStat(entry.mode, number, 0, nlink, *owner, size, mtime_ns, mtime_ns, ctime_ns, blocks, rdev)


class TreeLower(Lower):
    """The tree `tree`, called `name` in the log.

    `fingerprint` identifies its content, and `memory_bytes` is what it takes.  `check` is called about once a second;
    `close` at the end.
    """

    can_change = False

    def __init__(
        self,
        tree: LowerTree,
        name: str,
        *,
        fingerprint: str = "",
        memory_bytes: int = 0,
        check: Callable[[], None] = lambda: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._tree = tree
        self._name = name
        self.fingerprint = fingerprint
        self.memory_bytes = memory_bytes
        self._check = check
        self._close = close
        self._lock = threading.RLock()
        self._preparing = threading.RLock()  # taken before `_lock`
        self._recent: tuple[bytes, TreeEntry] | None = None  # an inode is made with three calls for one path
        self._reported: set[bytes] = set()

    @contextmanager
    def _reading(self, path: bytes, lock: AbstractContextManager[object] | None = None) -> Iterator[None]:
        """Hold a lock (that of the tree); turn damage into EIO, and log it once."""
        try:
            with lock or self._lock:
                yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            if error.errno in _PASSED:
                raise
            if path not in self._reported and len(self._reported) < _MOST_REPORTED:
                self._reported.add(path)
                reason = error.strerror or str(error)
                text = "a file below the overlay, in %s, cannot be read: %s"
                _logger.error(text, self._name, reason, extra={"path": shown(path)})  # noqa: TRY400 -- one line
            raise os_error(errno.EIO, shown(path)) from error

    def _entry(self, path: bytes) -> TreeEntry:
        recent = self._recent
        if recent is not None and recent[0] == path:
            return recent[1]
        with self._reading(path):
            entry = self._tree.entry(path)
        self._recent = path, entry
        return entry

    def stat(self, path: bytes) -> RecordedStat:
        entry = self._entry(path)
        nlink, size = entry.nlink, entry.size
        if entry.is_dir:
            nlink, size = self._counted(path)
        with self._lock:
            sectors = self._tree.sectors(path) if entry.is_file else None
        number = _number(entry)
        shown = shown_number(path, _link(entry), number)
        return tree_stat(entry, shown, nlink, size, entry.rdev, entry.ctime_ns if number else 0, sectors)

    def _counted(self, path: bytes) -> tuple[int, int]:
        """The link count and the size of a directory."""
        try:
            with self._reading(path):
                modes = [entry.mode for entry in self._tree.entries(path)]
        except OSError:  # its directory can be listed all the same
            return 1, DIRECTORY_BASE_BYTES
        return 2 + sum(map(stat.S_ISDIR, modes)), DIRECTORY_BASE_BYTES + DIRECTORY_ENTRY_BYTES * len(modes)

    def usage_of_source(self, usage: VolumeUsage) -> VolumeUsage:
        return replace(usage, inode_failure=self._tree.inode_failure)

    def readlink(self, path: bytes) -> bytes:
        return self._entry(path).target

    def xattrs(self, path: bytes) -> dict[bytes, bytes] | None:
        return dict(self._entry(path).xattrs) or None

    def scan(self, path: bytes) -> list[LowerEntry]:
        with self._reading(path):
            return [
                tree_entry(entry.path, entry.mode, _link(entry), _number(entry)) for entry in self._tree.entries(path)
            ]

    def is_ready(self, path: bytes) -> bool:
        """Whether the file can be read without a preparation."""
        with self._reading(path):
            return self._tree.preparation(path) is None

    def prepare(self, path: bytes) -> None:
        """Verify a large file before its first read, which then takes no longer than others.  Any thread.

        Other threads use the tree meanwhile.
        """
        with self._reading(path, self._preparing):
            with self._lock:
                prepare = self._tree.preparation(path)  # None if another thread was faster
            if prepare is not None:
                prepare()

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """Return `size` bytes of the file at `path` from `offset`.  OSError (EIO) if it has fewer, or is damaged."""
        if not self.is_ready(path):
            self.prepare(path)
        with self._reading(path):
            data = self._tree.read(path, offset, size)
            if len(data) != size:
                raise OSError(errno.EIO, "the file is shorter than its entry says")
        return data

    def ranges(self, path: bytes, start: int, end: int) -> list[tuple[int, int]]:
        """Return what `LowerTree.ranges` does."""
        with self._reading(path):
            return list(self._tree.ranges(path, start, end))

    def same_content(self, path: bytes, other: Tree, other_path: bytes) -> bool | None:
        """See `LowerFile.same_content`."""
        with self._reading(path):
            return self._tree.same_content(path, other, other_path)

    def file(self, path: bytes, seen: LowerStat) -> TreeFile:
        return TreeFile(self, path, seen)

    def check(self) -> None:
        self._check()

    @contextmanager
    def forking(self) -> Iterator[None]:
        with self._preparing, self._lock:
            yield

    def close(self) -> None:
        self._tree.stop()
        with self._preparing, self._lock:
            self._close()


class TreeFile(LowerFile):
    """See `LowerFile`."""

    __slots__ = ("lower",)

    def __init__(self, lower: TreeLower, path: bytes, seen: LowerStat) -> None:
        super().__init__(path, seen)
        self.lower = lower

    def read(self, offset: int, size: int) -> bytes:
        return self.lower.read(self.path, offset, size)

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        end = min(end, self.size)
        if start < end:
            yield from self.lower.ranges(self.path, start, end)

    def same_content(self, other: Tree, path: bytes) -> bool | None:
        return self.lower.same_content(self.path, other, path)

    @property
    def is_ready(self) -> bool:
        return self.size <= _ALWAYS_READY_BYTES or self.lower.is_ready(self.path)

    def prepare(self) -> None:
        self.lower.prepare(self.path)


def inode_number(path: bytes, link: int) -> int:
    """The inode number of a path; or of all names of a file that has several, which `link` identifies."""
    hashed = b"\0%d" % link if link else path  # no path contains a NUL byte
    return int.from_bytes(blake2b(hashed, digest_size=_NUMBER_BYTES).digest(), "little")


def tree_entry(path: bytes, mode: int, link: int, number: int) -> LowerEntry:
    """Return an entry of a directory.  `link`, `number`: as `_link` and `_number` return them."""
    # Two files may have been given one number.
    key = (1, link) if link else (0, inode_number(path, 0))
    return LowerEntry(path.rpartition(b"/")[2], mode & TYPE_MASK, key, shown_number(path, link, number))


def _link(entry: TreeEntry) -> int:
    """A number that only the names of one file have in common; 0: the file has one name."""
    return entry.inode if entry.nlink > 1 and not entry.is_dir else 0


def _number(entry: TreeEntry) -> int:
    """The inode number of an entry; 0: it is unknown."""
    return entry.inode if entry.ctime_ns else 0


def shown_number(path: bytes, link: int, number: int) -> int:
    """The inode number of an entry, below FIRST_NEW_NUMBER: `number` if that is known, and fits.

    Of a larger one the lower 32 bits stay, which are what git compares.
    """
    computed = inode_number(path, link)
    if number >= FIRST_NEW_NUMBER:
        number = (computed << _GIT_BITS | number & ((1 << _GIT_BITS) - 1)) % FIRST_NEW_NUMBER
    return number if number > ROOT_INODE else computed
