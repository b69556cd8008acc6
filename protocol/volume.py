"""Volume: the kernel's view of a backend (inodes, offsets, directory entries).

The contract between a backend and an engine; it does not depend on FUSE.  Every call names an inode by its number,
never a file handle, so a handle carries no state.

Threading: only the thread of the serving loop calls a volume.  A method returns its result, or an awaitable of it if it
has to wait; between two calls nothing else changes the state.  Other threads may use only a `Tree` (`protocol.tree`).

Lifetime: an inode lives while it has links or lookups.  Every method that returns an inode to the caller (`lookup`,
`mknod`, `mkdir`, `symlink`, `link`, `tmpfile`) adds one lookup; `forget` removes lookups; the last forget of an inode
without links frees it.

Errors are `OSError` with the errno that tmpfs on Linux raises; see `protocol.errors`.

Source: fs/fuse/*.c and include/uapi/linux/fuse.h for the kernel's requests; man pages of section 2.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    runtime_checkable,
)

import msgspec

from protocol.values import Value

if TYPE_CHECKING:
    from protocol.diff.tree_diff import Change
    from protocol.tree import Tree

__all__ = [
    "NAME_MAX",
    "RENAME_EXCHANGE",
    "RENAME_NOREPLACE",
    "RENAME_WHITEOUT",
    "ROOT_INODE",
    "SUPERUSER",
    "TAG_MAX_BYTES",
    "ApplyConflict",
    "ApplyResult",
    "ApplyRun",
    "AttributeChanges",
    "Attributes",
    "Buffer",
    "CacheInvalidation",
    "Caller",
    "CheckableVolume",
    "ContentPiecesVolume",
    "DirectoryEntry",
    "EntryChange",
    "ExternallyChangedVolume",
    "FlushingVolume",
    "ImportPreparation",
    "ImportStage",
    "InodeChange",
    "OverlaidVolume",
    "PlainAttributes",
    "PlainEntriesVolume",
    "PlainEntry",
    "PreparingVolume",
    "QuietLookupsVolume",
    "SnapshotInfo",
    "SnapshotKind",
    "SnapshotableVolume",
    "StagingVolume",
    "StatFs",
    "Volume",
    "VolumeCapabilities",
    "VolumeChanges",
    "VolumeUsage",
    "checkable",
    "externally_changed",
    "overlaid",
    "preparing",
    "snapshotable",
    "staging",
]

ROOT_INODE: Final = 1  # FUSE_ROOT_ID, linux/fuse.h
NAME_MAX: Final = 255  # bytes; linux/limits.h
RENAME_NOREPLACE: Final = 1  # linux/fs.h
RENAME_EXCHANGE: Final = 2
RENAME_WHITEOUT: Final = 4

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview  # collections.abc.Buffer is Python 3.12's
# The return type of a method that may have to wait.
Answer: TypeAlias = T | Awaitable[T]


class Attributes(Protocol):
    """The attributes of an inode, as of stat(2).  A live view: read it before the next call on the volume.

    Sizes in bytes, `blocks` in units of 512 bytes, times in nanoseconds since the epoch (may be negative).
    """

    @property
    def inode(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def mode(self) -> int: ...
    @property
    def nlink(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def rdev(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def atime_ns(self) -> int: ...
    @property
    def mtime_ns(self) -> int: ...
    @property
    def ctime_ns(self) -> int: ...
    @property
    def birth_ns(self) -> int: ...


class PlainAttributes(NamedTuple):
    """`Attributes` that stay as they are."""

    inode: int
    mode: int
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    size: int = 0
    blocks: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    birth_ns: int = 0
    generation: int = 0


class Caller(NamedTuple):
    """The process that calls, which will own what it creates.  `umask` is 0 if the kernel has applied it already."""

    uid: int
    gid: int
    umask: int = 0
    pid: int = 0


SUPERUSER: Final = Caller(0, 0)


class AttributeChanges(NamedTuple):
    """The attributes to set; None leaves one alone.  `mode` has permission bits only.

    `kill_privileges`: clear suid and sgid, as after a chown, write or truncate by an unprivileged caller.
    """

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    kill_privileges: bool = False


class DirectoryEntry(NamedTuple):
    """One entry of a directory.  A scan continues after it at `cookie`; `mode` has the type bits."""

    name: bytes
    inode: int
    mode: int
    cookie: int


class StatFs(Value):
    """The result of statvfs(3).  A block has `block_size` bytes."""

    block_size: int
    blocks: int
    blocks_free: int
    inodes: int
    inodes_free: int
    name_max: int = NAME_MAX


class VolumeCapabilities(Value):
    """What a volume can do beyond `Volume`.  Engines and the daemon read this; they never test for a class.

    A capability that names a protocol promises its methods.  The defaults are those of a plain volume that may store
    its data somewhere durable.
    """

    snapshots: bool = False  # SnapshotableVolume: immutable states; only calls on the volume change the live state
    lower_layer: bool = False  # OverlaidVolume: covers a directory; can be compared with it, reset and applied to it
    external_changes: bool = False  # ExternallyChangedVolume: a restore changes the files without the volume's calls
    staged_imports: bool = False  # StagingVolume: content is unpacked within the volume's limits before an import
    prepared_imports: bool = False  # PreparingVolume: an import is built in small steps before it becomes visible
    self_check: bool = False  # CheckableVolume: it can verify its own state
    forkable: bool = False  # ForkableVolume: a process that fork(2) copied can serve its copy
    acls: bool = False  # stores POSIX ACLs and applies them, and the umask, to modes and to new entries
    flush: bool = False  # FlushingVolume: wants a request for each close(2)
    durable: bool = True  # fsync has something to do; without, an engine need not forward it
    # Shortcuts for engines, each of which avoids work in the most frequent requests.
    content_pieces: bool = False  # ContentPiecesVolume
    quiet_lookups: bool = False  # QuietLookupsVolume
    plain_entries: bool = False  # PlainEntriesVolume


@runtime_checkable
class Volume(Protocol):
    """What every volume implements.  See the module's docstring for lifetime and threading."""

    @property
    def capabilities(self) -> VolumeCapabilities:
        """What this volume can do; the same for as long as it is served."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether every changing call fails with EROFS."""
        ...

    # -- inodes ------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Answer[Attributes]:
        """Return the inode of `name` in directory `parent`; adds a lookup.  ENOENT, ENOTDIR, ENAMETOOLONG."""
        ...

    def forget(self, inode: int, count: int) -> None:
        """Remove `count` lookups.  Unknown inodes are ignored."""
        ...

    def getattr(self, inode: int) -> Answer[Attributes]:
        """Return the attributes of `inode`.  ENOENT if it was freed."""
        ...

    def setattr(self, inode: int, changes: AttributeChanges) -> Answer[Attributes]:
        """Apply `changes` (all or none), update ctime.  EFBIG, EISDIR, EINVAL, ENOSPC, EROFS."""
        ...

    def readlink(self, inode: int) -> Answer[bytes]:
        """Return the target of a symlink.  EINVAL for anything else."""
        ...

    # -- directory entries -------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Answer[Attributes]:
        """Make a regular file, fifo, socket or device node; `mode` has type and permission bits."""
        ...

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Answer[Attributes]:
        """Make a directory; it inherits the group and the set-gid bit of a set-gid parent."""
        ...

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Answer[Attributes]:
        """Make a symlink to `target` (1 to 4,095 bytes)."""
        ...

    def link(self, inode: int, parent: int, name: bytes) -> Answer[Attributes]:
        """Make another name for `inode`.  EPERM for directories, EMLINK, EEXIST."""
        ...

    def unlink(self, parent: int, name: bytes) -> Answer[None]:
        """Remove a name that is not a directory's.  ENOENT, EISDIR."""
        ...

    def rmdir(self, parent: int, name: bytes) -> Answer[None]:
        """Remove an empty directory.  ENOENT, ENOTDIR, ENOTEMPTY."""
        ...

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = SUPERUSER,
    ) -> Answer[None]:
        """Rename, by rename(2); `flags` are RENAME_NOREPLACE, RENAME_EXCHANGE or RENAME_WHITEOUT (others: EINVAL).

        The whiteout belongs to `caller`.
        """
        ...

    def readdir(self, inode: int, cookie: int) -> Answer[Iterator[DirectoryEntry]]:
        """List the entries after `cookie` (0: from the start), with "." and ".."; adds no lookups.

        Cookies are stable and increase: a scan lists an entry that is neither added nor removed meanwhile exactly once,
        whatever else is added or removed.
        """
        ...

    # -- content -----------------------------------------------------------------------------
    def read(self, inode: int, offset: int, size: int) -> Answer[Buffer]:
        """Return `size` bytes from `offset`, fewer only at the end.  Holes read as zeros."""
        ...

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[int]:
        """Write `data` at `offset`; return the count written, smaller only if the quota is reached.  EFBIG, ENOSPC."""
        ...

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> Answer[None]:
        """fallocate(2): allocate, FALLOC_FL_KEEP_SIZE, PUNCH_HOLE; others EOPNOTSUPP, as on tmpfs."""
        ...

    def seek(self, inode: int, offset: int, whence: int) -> Answer[int]:
        """lseek(2) for SEEK_DATA and SEEK_HOLE.  ENXIO past the end."""
        ...

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> Answer[int]:
        """copy_file_range(2): return the count of bytes copied, smaller at the end of the source."""
        ...

    def fsync(self, inode: int, *, data_only: bool) -> Answer[None]:
        """Make `inode` durable, if the backend has durable storage."""
        ...

    # -- the rest ----------------------------------------------------------------------------
    def statfs(self) -> Answer[StatFs]: ...

    def getxattr(self, inode: int, name: bytes) -> Answer[bytes]:
        """ENODATA if it does not exist."""
        ...

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> Answer[None]:
        """`flags`: 0, XATTR_CREATE (EEXIST) or XATTR_REPLACE (ENODATA).  ERANGE, E2BIG, EOPNOTSUPP."""
        ...

    def listxattr(self, inode: int) -> Answer[Sequence[bytes]]: ...

    def removexattr(self, inode: int, name: bytes) -> Answer[None]:
        """ENODATA if it does not exist."""
        ...

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Answer[Attributes]:
        """Make a regular file without a name (O_TMPFILE), which `link` can give it; adds a lookup."""
        ...


@runtime_checkable
class FlushingVolume(Volume, Protocol):
    """A volume that needs a request for every close(2) of a descriptor (capability `flush`)."""

    def flush(self, inode: int) -> Answer[None]:
        """Handle the close(2) of a descriptor of `inode`; close(2) fails with the error that this raises."""
        ...


PlainEntry: TypeAlias = tuple[bytes, int, int, int]  # the fields of `DirectoryEntry`


class ContentPiecesVolume(Volume, Protocol):
    """A volume that returns content without joining the buffers that hold it."""

    def read_pieces(self, inode: int, offset: int, size: int) -> Buffer | list[bytes | bytearray]:
        """Like `read`; the result may be a list of buffers."""
        ...


class QuietLookupsVolume(Volume, Protocol):
    """A volume that reports a missing name or attribute as None, which costs less than an exception."""

    def find(self, parent: int, name: bytes) -> Attributes | None:
        """Like `lookup`; None if `name` does not exist."""
        ...

    def find_xattr(self, inode: int, name: bytes) -> bytes | None:
        """Like `getxattr`; None if the attribute does not exist."""
        ...


class PlainEntriesVolume(Volume, Protocol):
    """A volume that lists a directory as plain tuples, which take a third of the time of named tuples."""

    def entries(self, inode: int, cookie: int) -> Iterator[PlainEntry]:
        """Like `readdir`, with plain tuples."""
        ...

    def entry_count(self, inode: int) -> int:
        """Return the number of names in a directory, without "." and ".."."""
        ...


# -- snapshots ---------------------------------------------------------------------------------


SnapshotKind: TypeAlias = Literal["user", "safety", "automatic"]
TAG_MAX_BYTES: Final = 1024  # of a snapshot's tag in UTF-8


class SnapshotInfo(Value):
    """An immutable, named state of a volume.

    `serial` increases with every snapshot of the volume and is never given again.  `kind` is "safety" for one that
    vfsd took before a restore or an import, so that it can be undone, and "automatic" for one that it took after a
    command or a call of a tool.  Where memory is short, those of these two kinds are dropped.
    """

    name: str
    serial: int
    created_ns: int
    files: int  # inodes that are no directories
    directories: int
    size_bytes: int  # sum of the sizes of regular files, each inode once
    tag: str | None = None
    kind: SnapshotKind = "user"
    unstable: tuple[bytes, ...] = ()  # files that changed while they were read: they may mix old and new content
    unreadable: tuple[bytes, ...] = ()  # paths that could not be read, and are not in the snapshot


class EntryChange(NamedTuple):
    """The name `name` in directory `parent` referred to inode `old` (0: it did not exist) and refers to `new` now."""

    parent: int
    name: bytes
    old: int
    new: int


class InodeChange(NamedTuple):
    """Inode `inode` was changed in place: its content if `content`, else its attributes only."""

    inode: int
    content: bool


class CacheInvalidation(Value):
    """Changes that did not come through the mount, for which the kernel's caches have to be invalidated.

    `paths` maps every directory that is a parent in `entries`, and every inode in `inodes` that has a name, to one of
    its paths in the new state, relative to the root (b"" is the root).  `modes` has the mode of every inode that is
    `old` or `new` in `entries`, and of those in `inodes`.
    """

    entries: Sequence[EntryChange] = ()
    inodes: Sequence[InodeChange] = ()
    paths: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    modes: Mapping[int, int] = msgspec.field(default_factory=dict)


class VolumeUsage(Value):
    """Size, memory use and limits of a volume.  None: not known, or no limit."""

    files: int | None = None  # live inodes that are no directories
    directories: int | None = None
    size_bytes: int | None = None  # sum of the sizes of regular files, each inode once
    used_bytes: int | None = None  # counted against `max_bytes`
    max_bytes: int | None = None
    max_inodes: int | None = None
    live_bytes: int | None = None  # memory of the live state
    snapshot_bytes: int | None = None  # memory that only snapshots hold
    overhead_bytes: int | None = None  # memory that is reserved, lent, or used for what is known of a lower layer
    max_memory: int | None = None  # limit of these three together
    pruned: int | None = None  # snapshots dropped to free memory
    changed_below: int | None = None  # files of a lower layer that changed since the volume first read them


class VolumeChanges(Protocol):
    """The result of a `SnapshotableVolume.changes` block."""

    @property
    def invalidation(self) -> CacheInvalidation:
        """What the block changed; empty until the block ends."""
        ...


@runtime_checkable
class SnapshotableVolume(Volume, Protocol):
    """A volume with snapshots of its own (capability `snapshots`).

    All calls are made on the serving loop; none awaits.
    """

    on_pruned: Callable[[SnapshotInfo], None] | None
    """Called with each snapshot that the volume drops to free memory.  A volume that never does so never calls it."""

    def usage(self) -> VolumeUsage:
        """Return size, memory use and limits.  O(1).  `files`, `directories` and `size_bytes` are never None."""
        ...

    def has_lookups(self, inode: int) -> bool:
        """Whether the kernel has looked `inode` up and not forgotten it; False for a freed inode.

        A change that does not come through the mount invalidates the kernel's caches of these inodes only.
        """
        ...

    # -- snapshots ---------------------------------------------------------------------------
    def take_snapshot(self, name: str, *, tag: str | None = None, kind: SnapshotKind = "user") -> SnapshotInfo:
        """Keep the current state under `name`.  O(1).  SnapshotExistsError, ENAMETOOLONG, ENOSPC."""
        ...

    def snapshots(self) -> Sequence[SnapshotInfo]:
        """Return all snapshots, oldest first."""
        ...

    def snapshot(self, name: str) -> SnapshotInfo:
        """Return one snapshot.  SnapshotNotFoundError."""
        ...

    def change_counts(self) -> Mapping[str, tuple[int, int, int]]:
        """Count the inodes (added, modified, removed) of each snapshot against the one before it, by name."""
        ...

    def drop_snapshot(self, name: str) -> None:
        """Drop snapshot `name`; others are not affected, open trees stay readable.  SnapshotNotFoundError."""
        ...

    def keeping(self, *names: str) -> AbstractContextManager[None]:
        """Inside the block, do not drop the snapshots `names` to free memory."""
        ...

    def tree(self, name: str | None = None) -> AbstractContextManager[Tree]:
        """Open a read-only tree of snapshot `name`, or of the live state at this moment.

        Another thread may read the tree while the volume continues; enter and leave the block on the loop.
        """
        ...

    # -- changes that do not come through the mount ------------------------------------------
    def restore_snapshot(self, name: str, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Make the live state (below `paths`, or all of it) equal to snapshot `name`.

        O(what changed since).  Open files stay usable; unchanged files are not touched.  Later snapshots stay and can
        be restored.  ENOENT if a path is in neither state.
        """
        ...

    def import_tree(self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Put the content of `tree` into the live state, all or nothing.

        With `replace` the state (below `paths`, or all of it) becomes equal to `tree`: what `tree` lacks is
        removed, what is equal is not touched.  Without, entries that `tree` lacks stay.
        """
        ...

    def changes(self) -> AbstractContextManager[VolumeChanges]:
        """Make several calls as one change: if the block raises, all of them are undone.  It must not await."""
        ...

    # -- unsaved changes ---------------------------------------------------------------------
    def mark(self) -> int:
        """Return a number for the current state, to pass to `changed_since`.  O(1)."""
        ...

    def changed_since(self, mark: int) -> bool:
        """Whether anything reachable by a path was written since `mark`, even if it has the same value.  O(1)."""
        ...

    def mark_saved(self, tree: Tree | None = None) -> None:
        """Record that the state in `tree` is stored elsewhere; None: the live state.  Other trees are ignored."""
        ...

    @property
    def is_saved(self) -> bool:
        """Whether the live state has not changed since the state recorded by `mark_saved`."""
        ...

    @property
    def saved_ns(self) -> int | None:
        """The time of the last `mark_saved`, in nanoseconds since the epoch; None: never."""
        ...


# -- optional parts, by capability -----------------------------------------------------------------


class ImportStage(Protocol):
    """Memory in which the content of an import is unpacked before it becomes part of a volume.

    A worker thread may use it; `give_back` ends it.
    """

    def usage(self) -> VolumeUsage:
        """Size and limits of what was unpacked."""
        ...

    def reserving(self) -> AbstractContextManager[Callable[[int], None]]:
        """A function that reserves a number of bytes of memory until the block ends.  It raises ENOSPC."""
        ...

    def fill(self, tree: Tree, reserved: Any = None) -> None:
        """Unpack `tree`, once.  `reserved` is a result of `PreparingVolume.reserve_inodes`.  ENOSPC."""
        ...

    def tree(self) -> AbstractContextManager[Tree]:
        """Open a read-only tree of the content."""
        ...

    def give_back(self) -> None:
        """Return the memory to the volume."""
        ...


class StagingVolume(SnapshotableVolume, Protocol):
    """A volume that lends memory for the content of an import (capability `staged_imports`).

    Without it, `import_tree` reads the content directly from its source.
    """

    def new_stage(self) -> ImportStage:
        """Make an empty stage with this volume's limits.  Any thread."""
        ...


class ImportPreparation(Protocol):
    """The new entries of an `import_tree`, built before they become visible."""

    def steps(self) -> Iterator[int]:
        """Build in small steps; each yields the number of entries that it built.  ENOSPC."""
        ...

    @property
    def is_valid(self) -> bool:
        """Whether everything that was built can still take its place."""
        ...

    def discard(self) -> Iterator[None]:
        """Remove what was built, in small steps."""
        ...


class PreparingVolume(StagingVolume, Protocol):
    """A volume that can build an import in small steps, so that the mount answers meanwhile.

    Capability `prepared_imports`.  Without it, an import is one call of `import_tree`.
    """

    def reserve_inodes(self, count: int) -> Any:
        """Reserve `count` inode numbers for a stage, whose inodes the import then moves instead of copying them."""
        ...

    def preparation(self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = ()) -> ImportPreparation:
        """Prepare an `import_tree` with these arguments.  Take no snapshot until it is imported or discarded."""
        ...

    def import_prepared(self, preparation: Any) -> CacheInvalidation:
        """Do the `import_tree` that a valid `preparation` is for.  An error leaves the state as it was."""
        ...


class ApplyConflict(Value):
    """A path of the lower layer that another program changed, or that prevents the removal of its directory."""

    path: bytes
    reason: str


class ApplyResult(Protocol):
    """What an apply wrote to the lower layer, or would write."""

    changes: list[Change]
    conflicts: list[ApplyConflict]
    error: BaseException | None  # what stopped it; some changes may be written

    @property
    def recovery(self) -> str | None:
        """A sentence on an earlier, interrupted apply that this one completed or rolled back."""
        ...


class ApplyRun(Protocol):
    """One apply of an `OverlaidVolume`."""

    def write(self, keep_going: Callable[[], None]) -> ApplyResult:
        """Check for conflicts and write.  A worker thread.  `keep_going` may raise until the first change is made."""
        ...

    def finish(self, result: Any) -> None:
        """Record in the volume what `write` returned.  The serving loop."""
        ...


class OverlaidVolume(SnapshotableVolume, Protocol):
    """A volume whose live state covers a directory, its lower layer (capability `lower_layer`)."""

    on_change: Callable[[CacheInvalidation], None] | None
    """Called, from any thread, when a file of the lower layer changed; the caller invalidates the kernel's caches."""

    def invalidation_done(self, invalidation: CacheInvalidation) -> None:
        """Serve the new content of what `on_change` was called with: the kernel's caches are invalidated."""
        ...

    @property
    def apply_interrupted(self) -> bool:
        """Whether an apply was interrupted; the next one completes it or rolls it back."""
        ...

    def base_tree(self) -> AbstractContextManager[Tree]:
        """Open a read-only tree of the lower layer, in the state in which the volume first read it."""
        ...

    def discard(self, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Make the live state (below `paths`, or all of it) equal to the lower layer.  ENOENT."""
        ...

    def applying(self, paths: Sequence[bytes], *, force: bool, dry_run: bool) -> AbstractContextManager[ApplyRun]:
        """Write the live state of this moment (below `paths`, or all of it) to the lower layer.

        With conflicts nothing is written, unless `force`.  Enter and leave the block on the loop.
        """
        ...


class ExternallyChangedVolume(Volume, Protocol):
    """A volume over files that a restore changes directly (capability `external_changes`).

    All calls are made on the serving loop, between which a worker thread changes the files.
    """

    def hold(self, paths: Iterable[bytes]) -> None:
        """Keep the open files at `paths` usable: they are about to be changed.  May be called repeatedly."""
        ...

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:
        """Take over `changes`, some of which may not have been made.  May be called repeatedly, each for a part."""
        ...

    def release(self) -> None:
        """End what `hold` began: all changes were passed to `invalidation_of`."""
        ...


class CheckableVolume(Volume, Protocol):
    """A volume that can verify its own state (capability `self_check`)."""

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself.  Checks everything."""
        ...


class ForkableVolume(SnapshotableVolume, Protocol):
    """A volume that a copy of the process can serve after fork(2) (capability `forkable`): each has its own state."""

    def forking(self) -> AbstractContextManager[None]:
        """Inside the block, on the thread that calls fork(2), no other thread changes the state.

        The serving loop must be at rest.  The block ends in both processes.
        """
        ...

    def forked(self) -> None:
        """In the new process: drop what belonged to the old one's kernel and threads.

        That is: lookups, inodes without links, open views, and memory lent to imports.
        """
        ...


def snapshotable(volume: Volume) -> SnapshotableVolume | None:
    """Return `volume` if it declares `snapshots`, else None."""
    return cast(SnapshotableVolume, volume) if volume.capabilities.snapshots else None


def forkable(volume: Volume) -> ForkableVolume | None:
    """Return `volume` if it declares `forkable`."""
    return cast(ForkableVolume, volume) if volume.capabilities.forkable else None


def overlaid(volume: Volume) -> OverlaidVolume | None:
    """Return `volume` if it declares `lower_layer`."""
    return cast(OverlaidVolume, volume) if volume.capabilities.lower_layer else None


def externally_changed(volume: Volume) -> ExternallyChangedVolume | None:
    """Return `volume` if it declares `external_changes`."""
    return cast(ExternallyChangedVolume, volume) if volume.capabilities.external_changes else None


def staging(volume: Volume) -> StagingVolume | None:
    """Return `volume` if it declares `staged_imports`."""
    return cast(StagingVolume, volume) if volume.capabilities.staged_imports else None


def preparing(volume: Volume) -> PreparingVolume | None:
    """Return `volume` if it declares `prepared_imports`."""
    return cast(PreparingVolume, volume) if volume.capabilities.prepared_imports else None


def checkable(volume: Volume) -> CheckableVolume | None:
    """Return `volume` if it declares `self_check`."""
    return cast(CheckableVolume, volume) if volume.capabilities.self_check else None
