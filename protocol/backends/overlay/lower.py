"""The contract of an overlay's lower layer: a read-only tree from which entries and content are loaded on demand.

Three implementations: `HostLower`, a directory of this host, which other programs may change; `TreeLower`, an immutable
`protocol.tree.Tree`, such as an archive or a stored snapshot; and `LazyLower`, a snapshot in an object store, whose
calls raise NotReadyError while they would have to wait for the network.

The `Identity` of a file is its state when it was loaded.  A read from a layer that can change compares it before it
returns anything (`ChangedBelowError`), so all bytes of a file belong to one version.

Paths are bytes relative to the root of the layer; b"" is the root.

Threading: any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Self, TypeAlias

from protocol.errors import NotReadyError, os_error, shown
from protocol.linux.portable import Handle
from protocol.volume_extensions import VolumeUsage

if TYPE_CHECKING:
    from protocol.adapters.git_patterns import PathFilter
    from protocol.backends.memory.inode import Inode
    from protocol.tree import Tree

Identity: TypeAlias = tuple[int, int, int, int, int]  # st_dev, st_ino, st_size, st_mtime_ns, st_ctime_ns

REMOVED: Final = "another program removed the file below the overlay: remove it here, too, or write it anew"
_NS: Final = 10**9
LOST_NS: Final = (1 << 63) - 1
"""The ctime in the identity of a file whose content is lost: no file has it."""
IdentityRecord: TypeAlias = tuple[int, int, int, int, int, int, int]
"""An `Identity` as a journal has it: device, inode, size, mtime and ctime in s and ns each."""
FileRecord: TypeAlias = tuple[bytes, int, int, int, int, int, int, int, int]
"""A `LowerFile` as a journal has it: path, the fields of its `IdentityRecord`, sectors."""

# The numbers of inodes that the overlay makes begin here.  JavaScript has integers up to 2^53.
FIRST_NEW_NUMBER: Final = 1 << 52
_VANISHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ESTALE})


class ChangedBelowError(OSError):
    """A file of the lower directory changed since it was loaded (ESTALE); `path` is relative to that directory."""

    def __init__(
        self,
        path: bytes,
        reason: str = "another program changed the file below the overlay, and the parts that were not copied up are"
        " lost; `vfsd discard` shows the new file",
    ) -> None:
        super().__init__(errno.ESTALE, reason, path.decode("utf-8", "backslashreplace"))
        self.path = path


class LowerEntry(NamedTuple):
    """A name in a directory of the lower layer.

    `key` is equal for all names of one file.  `number` is the inode number that the file should have in the volume; it
    is the same at every mount of the same layer.  0: any.  `kind` is the type bits of the mode.
    """

    name: bytes
    kind: int
    key: tuple[int, int]
    number: int


class RecordedStat(NamedTuple):
    """The attributes of an entry, named as those of `os.stat_result`."""

    st_mode: int
    st_ino: int
    st_dev: int
    st_nlink: int
    st_uid: int
    st_gid: int
    st_size: int
    st_atime_ns: int
    st_mtime_ns: int
    st_ctime_ns: int
    st_blocks: int
    st_rdev: int

    @classmethod
    def of(cls, record: FileRecord) -> Self:
        """Return the values that a `LowerFile` depends on; the others are 0."""
        device, inode, size, mtime_ns, ctime_ns = recorded_identity(record[1:8])
        return cls(0, inode, device, 0, 0, 0, size, 0, mtime_ns, ctime_ns, record[8], 0)


LowerStat: TypeAlias = os.stat_result | RecordedStat


def identity(seen: LowerStat) -> Identity:
    """Return the values that identify a state of the file: replacing or modifying it changes at least one of them."""
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def identity_record(of: Identity) -> IdentityRecord:
    """Return an identity as a journal has it: msgpack has no integers for times beyond 2554."""
    device, inode, size, mtime_ns, ctime_ns = of
    mtime, ctime = divmod(mtime_ns, _NS), divmod(ctime_ns, _NS)
    return device, inode, size, *mtime, *ctime


def recorded_identity(record: IdentityRecord) -> Identity:
    """Return the identity that `record` describes."""
    device, inode, size, mtime_s, mtime_ns, ctime_s, ctime_ns = record
    return device, inode, size, mtime_s * _NS + mtime_ns, ctime_s * _NS + ctime_ns


def is_gone(error: OSError) -> bool:
    """Return whether the error means that the path does not exist (any more), or leads out of the directory."""
    return error.errno in _VANISHED


class Lower(ABC):
    """A lower layer.  Methods raise OSError; EIO if the layer is damaged, which the layer logs once."""

    can_change: bool
    """Whether other programs may change the entries and contents."""

    fingerprint: str = ""
    """Equal at two mounts only if both are of one directory, or of archives or snapshots with the same content."""

    memory_bytes: int = 0
    """The memory that the layer takes, its caches when they are full included."""

    notice: str | None = None
    """A sentence for the user who mounts the layer; None if there is nothing to say."""

    reopening: bytes = b""
    """How to open the layer again while its source does not answer; b"" if the source is this machine."""

    @property
    def root_fd(self) -> int | None:
        """A descriptor of the directory, which stays open; None if the layer is not a directory of this machine."""
        return None

    @abstractmethod
    def stat(self, path: bytes) -> LowerStat:
        """Return the attributes of an entry; a symlink is not followed."""

    @abstractmethod
    def readlink(self, path: bytes) -> bytes:
        """Return the target of a symlink."""

    @abstractmethod
    def xattrs(self, path: bytes) -> dict[bytes, bytes] | None:
        """Return the extended attributes that may be read; None if there are none."""

    @abstractmethod
    def scan(self, path: bytes) -> Sequence[LowerEntry]:
        """Return the entries of a directory."""

    @abstractmethod
    def file(self, path: bytes, seen: LowerStat) -> LowerFile:
        """Return the entry at `path`, whose attributes are `seen`, as what an inode of the overlay refers to."""

    def is_same(self, now: Identity, was: Identity) -> bool:
        """Return whether two identities are of one state of a file."""
        return now == was

    def evict(self, file: LowerFile) -> None:  # noqa: B027 -- most layers do not change
        """Drop the cached descriptors of a file that changed."""

    def check(self) -> None:  # noqa: B027 -- the same
        """Look whether the layer as a whole is still there, and log it once if not.  Called about once a second."""

    def usage_of_source(self, usage: VolumeUsage) -> VolumeUsage:
        """Return `usage` with what is known of the place where the layer comes from."""
        return usage

    @abstractmethod
    def forking(self) -> AbstractContextManager[object]:
        """A block in which no other thread uses the layer: for fork(2)."""

    def forked(self) -> None:  # noqa: B027 -- most layers share everything
        """Drop, in a process that fork(2) made, the things that only the source can use."""

    def serve_here(self) -> None:  # noqa: B027 -- most layers never wait
        """Have calls in this thread, which serves the mount, raise NotReadyError instead of waiting."""

    def wait(self, error: NotReadyError) -> object:
        """Wait for the arrival of what a call needs, and return what keeps it in memory.

        Raises `error` in the thread that serves the mount, and OSError if it cannot be fetched.  Call it without locks.
        """
        raise error

    @abstractmethod
    def close(self) -> None:
        """Free what the layer holds.  A process that was forked closes its own copy."""


class EarlierState(NamedTuple):
    """A file of the lower layer as it was before another program changed it."""

    file: LowerFile
    mode: int
    uid: int
    gid: int
    xattrs: dict[bytes, bytes]


class LowerFile(ABC):
    """The entry at a path of the lower layer, in the state in which it was loaded.

    `sectors` is its size on disk in units of 512 bytes.  `kept` is content that outlives the path (`keep`).
    `is_recorded`: a journal has that content.  `changed_ns` is not before the last change by another program; 0 if
    that is not known, and in a layer that cannot change.  Later changes by `apply` do not move it.  `gone_ns` is not
    before this state of the file was removed or replaced by one that nothing follows; 0 if it is still there, as far as
    is known.  `earlier` has the states before this one that a snapshot was taken of, oldest first.
    """

    __slots__ = ("changed_ns", "earlier", "gone_ns", "identity", "is_recorded", "kept", "path", "sectors")

    def __init__(self, path: bytes, seen: LowerStat) -> None:
        self.path = path
        self.identity = identity(seen)
        self.sectors = seen.st_blocks
        self.changed_ns = 0
        self.gone_ns = 0
        self.earlier: tuple[EarlierState, ...] = ()
        self.kept: Handle | bytes | None = None
        self.is_recorded = False

    @property
    def size(self) -> int:
        return self.identity[2]

    def same_content(self, other: Tree, path: bytes) -> bool | None:  # noqa: ARG002
        """Return whether `other` has the same content at `path`; None if only reading both files can tell."""
        return None

    @property
    def record(self) -> FileRecord:
        """The file as a journal has it."""
        return self.path, *identity_record(self.identity), self.sectors

    @abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, all of them within the file.  ChangedBelowError."""

    @abstractmethod
    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each run of data between two offsets, in order.  ChangedBelowError."""

    @property
    def is_ready(self) -> bool:
        """Whether a read takes no longer than any other; otherwise the next one calls `prepare` first."""
        return True

    def prepare(self) -> None:  # noqa: B027 -- most files are always ready
        """Make the file ready, which may take long.  Any thread; other files can be read meanwhile.  OSError."""

    def keep(self) -> None:  # noqa: B027 -- most layers do not change
        """Keep the present content readable after the path is removed or replaced.  See `apply`.  ChangedBelowError."""


class AbsentLower(Lower):
    """Stands for a lower layer that is not there, so that a journal can be verified without it.

    It has an empty root directory.  Reading anything else fails with ENOENT.
    """

    can_change = False

    def stat(self, path: bytes) -> LowerStat:
        if path:
            _fail(path)
        return RecordedStat(stat.S_IFDIR | 0o755, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0)

    def readlink(self, path: bytes) -> NoReturn:
        _fail(path)

    def xattrs(self, path: bytes) -> None:
        if path:
            _fail(path)

    def scan(self, path: bytes) -> NoReturn:
        _fail(path)

    def file(self, path: bytes, seen: LowerStat) -> LowerFile:
        return _AbsentFile(path, seen)

    def forking(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        """Nothing is held."""


class _AbsentFile(LowerFile):
    __slots__ = ()

    def read(self, offset: int, size: int) -> NoReturn:  # noqa: ARG002
        _fail(self.path)

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:  # noqa: ARG002
        yield from ()


def _fail(path: bytes) -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, "this journal is verified without its lower layer", os.fsdecode(path))


class HiddenNames:
    """Refuses a name (EPERM) that is hidden, or that a hidden entry of the lower layer has already.

    `path` returns the path of a directory, or None if no name leads to it.
    """

    def __init__(self, path_filter: PathFilter, lower: Lower, path: Callable[[Inode], bytes | None]) -> None:
        self._filter = path_filter
        self._lower = lower
        self._path = path

    def check_new(self, directory: Inode, name: bytes, is_directory: bool) -> None:
        """Check a name that is about to be made."""
        if self._filter:
            self.check(directory, name, is_directory=is_directory)
            self.check_collision(directory, name)

    def check(self, directory: Inode, name: bytes, *, is_directory: bool) -> None:
        """Raise EPERM if `name` in `directory` is hidden: it could collide with a hidden entry below."""
        path = self._below(directory, name) if self._filter else None
        if path is not None and self._filter.hides(path, is_directory=is_directory):
            raise os_error(errno.EPERM, shown(name))

    def check_collision(self, directory: Inode, name: bytes) -> None:
        """Raise EPERM if a hidden entry of the lower layer has the name, which a visible one is to get."""
        path = self._below(directory, name)
        if path is None or not any(self._filter.hides(path, is_directory=each) for each in (True, False)):
            return
        try:
            mode = self._lower.stat(path).st_mode
        except OSError as error:
            if not is_gone(error):
                raise
            return
        if self._filter.hides(path, is_directory=stat.S_ISDIR(mode)):
            raise os_error(errno.EPERM, shown(name))

    def _below(self, directory: Inode, name: bytes) -> bytes | None:
        above = self._path(directory)
        return None if above is None else above + b"/" + name if above else name
