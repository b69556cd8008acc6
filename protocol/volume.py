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

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import (
    TYPE_CHECKING,
    Final,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    runtime_checkable,
)

from protocol.values import Value

if TYPE_CHECKING:
    pass

ROOT_INODE: Final = 1  # FUSE_ROOT_ID, linux/fuse.h
NAME_MAX: Final = 255  # bytes; linux/limits.h
COOKIE_END: Final = 1 << 62  # the cookies of a volume's entries are less; `.snapshots` comes after them
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


USUAL_UMASK: Final = 0o022  # of a caller who names none


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
    """The abilities of a volume beyond `Volume`.  Engines and the daemon read this; they never test for a class.

    A capability that names a protocol promises its methods; others promise methods of `ExtendedVolume`.  The defaults
    are those of a plain volume that may store its data somewhere durable.
    """

    snapshots: bool = False  # SnapshotableVolume: immutable states; only calls on the volume change the live state
    lower_layer: bool = False  # OverlaidVolume: covers a directory; can be compared with it, reset and applied to it
    external_changes: bool = False  # ExternallyChangedVolume: a restore changes the files without the volume's calls
    staged_imports: bool = False  # StagingVolume: content is unpacked within the volume's limits before an import
    prepared_imports: bool = False  # PreparingVolume: an import is built in small steps before it becomes visible
    self_check: bool = False  # CheckableVolume: it can verify its own state
    forkable: bool = False  # ForkableVolume: a process that fork(2) copied can serve its copy
    journal: bool = False  # JournaledVolume: a journal on disk records the state, which survives the process
    handover: bool = False  # HandedOverVolume: a successor can continue with the state, beneath the same kernel
    answers_once: bool = False  # recognises a request that its predecessor has executed
    recoverable: bool = False  # RecoverableVolume: a successor can continue to serve its kernel
    acls: bool = False  # stores POSIX ACLs and applies them, and the umask, to modes and to new entries
    flush: bool = False  # wants a request for each close(2)
    appends: bool = False  # finds the end of a file for an append itself
    locks: bool = False  # can lock a directory against calls that reach it in another way
    opens: bool = False  # wants a request for each open(2) of a file
    durable: bool = True  # fsync has something to do; without, an engine need not forward it
    paths: bool = False  # tells a path of an inode
    orphans: bool = False  # finds an inode without a name by its number
    shortcuts: bool = False  # has faster forms of the most frequent calls
    snapshot_directory: bool = False  # adds `.snapshots` to the volume `below` (`protocol.adapters.snapshot_directory`)


@runtime_checkable
class Volume(Protocol):
    """The contract of every volume.  See the module's docstring for lifetime and threading."""

    @property
    def capabilities(self) -> VolumeCapabilities:
        """The abilities of this volume; the same for as long as it is served."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether every changing call fails with EROFS."""
        ...

    # -- inodes ------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Answer[Attributes]:
        """Return the inode of `name` in directory `parent`; adds a lookup.  ENOENT, ENOTDIR, ENAMETOOLONG.

        An engine must not have the kernel cache the absence that a SnapshotNotFoundError reports.
        """
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

        Cookies are stable, positive, less than COOKIE_END, and increase: a scan lists an entry that is neither added
        nor removed meanwhile exactly once, whatever else is added or removed; a name that is given to another inode
        stays where it is.  A scan ends although its reader adds an entry for each that it reads, or renames it: a new
        entry's cookie is less than those that were given before.
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


PlainEntry: TypeAlias = tuple[bytes, int, int, int]  # the fields of `DirectoryEntry`


class ExtendedVolume(Volume, Protocol):
    """A volume with the methods that engines call only where a capability promises them; `extended` gives it this type.

    A volume has those methods whose capability it declares.
    """

    def flush(self, inode: int) -> Answer[None]:
        """`flush`: handle the close(2) of a descriptor of `inode`; close(2) fails with the error that this raises."""
        ...

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[tuple[int, int]]:
        """`appends`: write `data` at the end that the file really has; return the count written and the size after it.

        A kernel appends at the size that it has cached.  Another program, or a change that did not come through the
        mount, may have changed the size since.  No other write of the file, by whatever program, comes between finding
        the end and writing there.  Errors as `write`.
        """
        ...

    def lock(self, inode: int) -> Answer[None]:
        """`locks`: lock a directory, where it really is, with flock(2) until `unlock`.  BlockingIOError if that fails.

        A caller that compares a file's content and then replaces the file holds the lock, so that no such caller on
        another mount of the directory, or beside all mounts, replaces the file in between.  Invariants:

        - at most one directory is locked: `lock` first unlocks the one before;
        - what was looked up before `lock` is looked up anew after it;
        - a lock ends with the process or connection that took it, and not before a change that this process or
          connection sent is made or refused.  If a connection was cut, renames into the directory fail until `unlock`.
        """
        ...

    def unlock(self) -> Answer[None]:
        """`locks`: unlock the directory that `lock` has locked, if there is one."""
        ...

    def open(self, inode: int, flags: int) -> Answer[None]:
        """`opens`: allow or refuse open(2) of `inode`, which is no directory; `flags` are its flags.  EPERM, EACCES.

        Without it the kernel opens files by itself, and a program can change pages of the kernel's cache through a
        shared mapping before the volume is asked whether the file may be written.
        """
        ...

    def release(self, inode: int, flags: int) -> None:
        """`opens`: record that the last descriptor of an open with `flags` was closed."""
        ...

    def path_of(self, inode: int) -> bytes | None:
        """`paths`: return a path of `inode` relative to the root (b"" is the root), or None if no name of it is known.

        For an inode with several names it is one of them.  Adds no lookup.
        """
        ...

    def is_orphan(self, inode: int) -> bool:
        """`orphans`: whether the kernel has looked `inode` up and not forgotten it, and no name refers to it.

        False for a freed inode.
        """
        ...

    def lookup_orphan(self, inode: int) -> Attributes:
        """`orphans`: return an orphan; adds a lookup, as `lookup` does.  ENOENT if `inode` is not one."""
        ...

    def answering(self, unique: int) -> None:
        """`answers_once`, `journal`: count the calls from now on as those of the kernel's request `unique`; 0: of none.

        The result of a call that changes something is recorded together with the change, so that the request is not
        executed again by a daemon that continues.
        """
        ...

    def defer_syncs(self) -> bool:
        """`journal`: have calls return before their record is on disk; return whether to wait for `unsynced`.

        That is so with `--fsync always`.  Until this is called, such calls wait themselves, and so does the thread.
        """
        ...

    def unsynced(self, *, of_request: bool) -> Callable[[], Awaitable[None]] | None:
        """`journal`: return what an answer has to wait for: a function that waits for the disk (OSError); or None.

        `of_request`: only for what was recorded since `answering` began to count for a request.
        """
        ...

    @property
    def below(self) -> Volume:
        """`snapshot_directory`: the volume without `.snapshots`, which an engine may call instead of this one.

        That is for calls whose inode numbers are all less than FIRST_INODE, if none is the root, or the call neither
        lists it nor names `.snapshots` in it.
        """
        ...

    # -- `shortcuts` for engines: each avoids work in the most frequent requests ---------------
    def read_pieces(self, inode: int, offset: int, size: int) -> Answer[Buffer | list[bytes | bytearray]]:
        """Like `read`; the result may be a list of the buffers that hold the content."""
        ...

    def find(self, parent: int, name: bytes) -> Attributes | None:
        """Like `lookup`; None if `name` does not exist, which costs less than an exception."""
        ...

    def find_xattr(self, inode: int, name: bytes) -> bytes | None:
        """Like `getxattr`; None if the attribute does not exist."""
        ...

    def entries(self, inode: int, cookie: int) -> Iterator[PlainEntry]:
        """Like `readdir`, with plain tuples, which take a third of the time of named tuples."""
        ...

    def entry_count(self, inode: int) -> int:
        """Return the number of names in a directory, without "." and ".."."""
        ...


def extended(volume: Volume) -> ExtendedVolume:
    """Return `volume`.  The caller calls only those methods of `ExtendedVolume` whose capability it declares."""
    return cast(ExtendedVolume, volume)


U = TypeVar("U")
E = TypeVar("E", bound=Exception)


def then(answer: Answer[T], function: Callable[[T], Answer[U]]) -> Answer[U]:
    """Return `function(answer)`, or an awaitable of it if `answer` is an awaitable."""
    # isinstance() of an abstract class takes longer than most answers.
    if not hasattr(answer, "__await__"):
        return function(answer)

    async def later() -> U:
        result = function(await cast("Awaitable[T]", answer))
        return await result if isinstance(result, Awaitable) else result

    return later()


def catching(kind: type[E], act: Callable[[], Answer[T]], otherwise: Callable[[E], Answer[T]]) -> Answer[T]:
    """Return the answer of `act`, or that of `otherwise` if `act` raises an error of this kind."""
    try:
        answer = act()
    except kind as error:
        return otherwise(error)
    if not hasattr(answer, "__await__"):
        return answer

    async def later() -> T:
        try:
            return await cast("Awaitable[T]", answer)
        except kind as error:
            other = otherwise(error)
        return await other if isinstance(other, Awaitable) else other

    return later()
