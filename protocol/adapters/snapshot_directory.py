"""SnapshotDirectoryVolume: a volume that also shows its snapshots, as `.snapshots/NAME` at its root.

It passes everything on to the volume below, except a lookup of `.snapshots` that the volume below does not have, and
calls with the inode numbers of that directory and of what is in it (`SnapshotInodes`).  A number of these is
FIRST_INODE or higher, which no volume below uses.  It is a hash of the snapshot's serial number and the path (for a
file with several names: of its inode number in the snapshot), so it stays the same while the snapshot exists and one
process serves it, and those of two snapshots differ.

An engine may call the volume below directly where the capability `snapshot_directory` says so, as the native engine
does: then most requests cost one comparison more than without `.snapshots`.

Everything in `.snapshots` is read-only (EROFS).  When a snapshot is dropped, its inodes are stale (ESTALE).

Threading: as in `protocol.volume`.  The state changes between awaits only: a call looks at its node, may wait for
`SnapshotStates.using`, and then registers what it found in one step.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar, cast

from msgspec.structs import replace

from protocol.errors import SnapshotNotFoundError, os_error, shown
from protocol.tree import Tree, TreeEntry, names_in
from protocol.volume import (
    COOKIE_END,
    NAME_MAX,
    ROOT_INODE,
    SUPERUSER,
    Answer,
    AttributeChanges,
    Attributes,
    Buffer,
    Caller,
    DirectoryEntry,
    PlainAttributes,
    PlainEntry,
    StatFs,
    Volume,
    catching,
    extended,
    then,
)
from protocol.volume_extensions import SnapshotInfo

T = TypeVar("T")
NAME: Final = b".snapshots"
_BATCH: Final = 1024  # entries that one request lists at most


class SnapshotStates(Protocol):
    """Gives access to the snapshots of a workspace."""

    def infos(self) -> Answer[Sequence[SnapshotInfo]]:
        """Return the snapshots, oldest first."""
        ...

    def using(self, info: SnapshotInfo, read: Callable[[Tree], T]) -> Answer[T]:
        """Return what `read` returns for the state of a snapshot.  SnapshotNotFoundError if it was dropped."""
        ...


class SnapshotDirectoryVolume:
    """`volume`, with `.snapshots` at its root; listings of the root show it if `is_visible`."""

    def __init__(
        self, volume: Volume, states: SnapshotStates, *, is_visible: bool, seed: bytes = b"", waits: bool = False
    ) -> None:
        """`seed`, up to 64 bytes: volumes with different ones number the files differently.

        A process that continues the mount of another one needs its own: the kernel still forgets the other's numbers.
        `waits`: `states` return awaitables, so this volume has no `shortcuts`.
        """
        self._volume: Final = extended(volume)
        below = volume.capabilities
        self.capabilities: Final = replace(below, snapshot_directory=True, shortcuts=below.shortcuts and not waits)
        self._states = states
        self._is_visible = is_visible
        self._inodes = SnapshotInodes(seed)
        self._listing: tuple[int, list[bytes]] | None = None  # the directory that was listed last
        # Its entries that were listed last: READDIRPLUS looks each of them up, which takes a thread with `StoreStates`.
        self._listed: dict[tuple[int, bytes], TreeEntry] = {}
        self._shown: set[int] | None = None  # serials in the listings of `.snapshots` that the kernel may have cached
        self._own: PlainEntry | None = None  # at `.snapshots` in the volume below, in the last listing
        self.on_refused_write: Callable[[int], None] = lambda _inode: None
        """Called with an inode whose pages a program has changed in the kernel's cache, through a mapping."""

    @property
    def below(self) -> Volume:
        """See `ExtendedVolume`."""
        return self._volume

    @property
    def read_only(self) -> bool:
        return self._volume.read_only

    def answering(self, unique: int) -> None:
        """See `ExtendedVolume`."""
        self._volume.answering(unique)

    def defer_syncs(self) -> bool:
        """See `ExtendedVolume`."""
        return self._volume.defer_syncs()

    def unsynced(self, *, of_request: bool) -> Callable[[], Awaitable[None]] | None:
        """See `ExtendedVolume`."""
        return self._volume.unsynced(of_request=of_request)

    # -- for the daemon ------------------------------------------------------------------------------
    @property
    def is_entered(self) -> bool:
        """Whether the kernel knows a file of a snapshot, or a listing of `.snapshots`."""
        return len(self._inodes) > 0 or self._shown is not None

    @property
    def known_inodes(self) -> Sequence[int]:
        """The files of snapshots that the kernel knows."""
        return list(self._inodes)

    def names_to_invalidate(self, infos: Sequence[SnapshotInfo]) -> list[tuple[bytes, int]]:
        """Return the names in `.snapshots`, with their inodes, that the kernel must forget; `infos`: those that exist.

        These are dropped snapshots, and all if the nodes take too much memory: with a name the kernel forgets
        everything below it that no program uses.
        """
        self._listing = None
        self._listed = {}
        existing = {info.serial for info in infos}
        return [
            (shown_name(node.info) or b"", number)
            for number, node in self._inodes.items()
            if not node.path and (self._inodes.is_full or node.info.serial not in existing)
        ]

    def stale_inodes(self, infos: Sequence[SnapshotInfo]) -> list[tuple[int, bool]]:
        """Return the inodes of dropped snapshots, each with whether it is a directory; `infos`: those that exist.

        The kernel must forget their attributes, and the listings of the directories: a program may still be in one.
        """
        existing = {info.serial for info in infos}
        return [(number, node.is_dir) for number, node in self._inodes.items() if node.info.serial not in existing]

    def take_outdated_listing(self, infos: Sequence[SnapshotInfo]) -> bool:
        """Return whether the kernel may have cached a listing of `.snapshots` that differs from `infos`.

        The caller then has the kernel forget it.
        """
        if self._shown is None or self._shown == {info.serial for info in infos}:
            return False
        self._shown = None
        return True

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the inode numbers does not hold."""
        self._inodes.check_invariants()

    # -- inodes --------------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Answer[Attributes]:
        if parent >= FIRST_INODE:
            return self._lookup(parent, name)
        if parent != ROOT_INODE or name != NAME:
            return self._volume.lookup(parent, name)
        return catching(FileNotFoundError, lambda: self._volume.lookup(parent, name), lambda _: self._top())

    def find(self, parent: int, name: bytes) -> Attributes | None:
        if parent >= FIRST_INODE:
            # Raises instead of returning None, for `Volume.lookup` says that this absence must not be cached.
            return cast("Attributes", self._lookup(parent, name))
        found = self._volume.find(parent, name)
        if found is None and parent == ROOT_INODE and name == NAME:
            return cast("Attributes", self._top())
        return found

    def _lookup(self, parent: int, name: bytes) -> Answer[Attributes]:
        if len(name) > NAME_MAX:
            raise os_error(errno.ENAMETOOLONG)
        if parent == FIRST_INODE:
            return then(self._states.infos(), lambda infos: self._enter(infos, name))
        node = self._inodes.node(parent)
        listed = self._listed.get((parent, name))
        if listed is not None:
            return self._found(node.info, listed)
        path = node.path + b"/" + name if node.path else name
        return then(self._using(node.info, lambda state: state.entry(path)), lambda e: self._found(node.info, e))

    def _enter(self, infos: Sequence[SnapshotInfo], name: bytes) -> Answer[Attributes]:
        info = next((info for info in infos if shown_name(info) == name), None)
        if info is None:
            raise SnapshotNotFoundError(shown(name))
        return then(self._using(info, lambda state: state.entry(b"")), lambda entry: self._found(info, entry))

    def _found(self, info: SnapshotInfo, entry: TreeEntry) -> Attributes:
        """Register a lookup."""
        return _attributes(self._inodes.look_up(info, entry), entry)

    def forget(self, inode: int, count: int) -> None:
        if inode < FIRST_INODE:
            self._volume.forget(inode, count)
            return
        self._inodes.forget(inode, count)

    def getattr(self, inode: int) -> Answer[Attributes]:
        if inode < FIRST_INODE:
            return self._volume.getattr(inode)
        if inode == FIRST_INODE:
            return self._top()
        return then(self._entry(inode), lambda entry: _attributes(inode, entry))

    def is_orphan(self, inode: int) -> bool:
        return self._volume.is_orphan(inode)

    def lookup_orphan(self, inode: int) -> Attributes:
        return self._volume.lookup_orphan(inode)

    def _top(self) -> Answer[Attributes]:
        """The attributes of `.snapshots`: those of the root, without permission to write."""

        def attributes(root: Attributes) -> Attributes:
            mode = stat.S_IFDIR | (root.mode & 0o555)
            made = root.birth_ns
            return PlainAttributes(FIRST_INODE, mode, 2, root.uid, root.gid, 0, 0, 0, made, made, made, made)

        return then(self._volume.getattr(ROOT_INODE), attributes)

    def _entry(self, inode: int) -> Answer[TreeEntry]:
        node = self._inodes.node(inode)
        return self._using(node.info, lambda state: state.entry(node.path))

    def _using(self, info: SnapshotInfo, read: Callable[[Tree], T]) -> Answer[T]:
        return catching(SnapshotNotFoundError, lambda: self._states.using(info, read), _stale)

    def setattr(self, inode: int, changes: AttributeChanges) -> Answer[Attributes]:
        _check_writable(inode)
        return self._volume.setattr(inode, changes)

    def readlink(self, inode: int) -> Answer[bytes]:
        if inode < FIRST_INODE:
            return self._volume.readlink(inode)

        def target(entry: TreeEntry) -> bytes:
            if not entry.is_symlink:
                raise os_error(errno.EINVAL)
            return entry.target

        return then(self._entry(inode), target)

    # -- directory entries ---------------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Answer[Attributes]:
        _check_writable(parent)
        return self._volume.mknod(parent, name, mode, rdev, caller)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Answer[Attributes]:
        _check_writable(parent)
        return self._volume.mkdir(parent, name, mode, caller)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Answer[Attributes]:
        _check_writable(parent)
        return self._volume.symlink(parent, name, target, caller)

    def link(self, inode: int, parent: int, name: bytes) -> Answer[Attributes]:
        _check_writable(inode, parent)
        return self._volume.link(inode, parent, name)

    def unlink(self, parent: int, name: bytes) -> Answer[None]:
        _check_writable(parent)
        return self._keeping_top(parent, name, lambda: self._volume.unlink(parent, name))

    def rmdir(self, parent: int, name: bytes) -> Answer[None]:
        _check_writable(parent)
        return self._keeping_top(parent, name, lambda: self._volume.rmdir(parent, name))

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0, caller: Caller = SUPERUSER
    ) -> Answer[None]:
        _check_writable(parent, new_parent)

        def rename() -> Answer[None]:
            return self._volume.rename(parent, name, new_parent, new_name, flags, caller)

        return self._keeping_top(parent, name, rename)

    def _keeping_top(self, parent: int, name: bytes, remove: Callable[[], Answer[None]]) -> Answer[None]:
        """Return the result of `remove`; EROFS if `name` is `.snapshots`, which the volume below does not have."""
        if parent != ROOT_INODE or name != NAME:
            return remove()

        def refuse(_: FileNotFoundError) -> None:
            raise os_error(errno.EROFS)

        return catching(FileNotFoundError, remove, refuse)

    def readdir(self, inode: int, cookie: int) -> Answer[Iterator[DirectoryEntry]]:
        if inode >= FIRST_INODE:
            return then(self._list(inode, cookie), lambda found: (DirectoryEntry(*entry) for entry in found))
        listed = self._volume.readdir(inode, min(cookie, COOKIE_END - 1))
        if not self._is_visible or inode != ROOT_INODE:
            return listed
        return then(listed, lambda found: (DirectoryEntry(*entry) for entry in self._with_top(found, cookie)))

    def entries(self, inode: int, cookie: int) -> Iterator[PlainEntry]:
        if inode >= FIRST_INODE:
            return iter(cast("list[PlainEntry]", self._list(inode, cookie)))
        listed = self._volume.entries(inode, min(cookie, COOKIE_END - 1))
        return self._with_top(listed, cookie) if self._is_visible and inode == ROOT_INODE else listed

    def _with_top(self, entries: Iterator[PlainEntry], cookie: int) -> Iterator[PlainEntry]:
        """Yield `entries` and, last, `.snapshots`: once, whether the volume below has an entry of that name or not."""
        if cookie == 0:
            self._own = None
        if cookie < COOKIE_END:
            for entry in entries:
                if entry[0] == NAME:
                    self._own = entry
                else:
                    yield entry
            _, inode, mode, _ = self._own or (NAME, FIRST_INODE, stat.S_IFDIR, 0)
            yield NAME, inode, mode, COOKIE_END

    def entry_count(self, inode: int) -> int:
        if inode < FIRST_INODE:
            return self._volume.entry_count(inode)
        return 0 if self._listing is None or self._listing[0] != inode else len(self._listing[1])

    def _list(self, inode: int, cookie: int) -> Answer[list[PlainEntry]]:
        """Return the next entries.  The cookie of an entry is its number: a directory of a snapshot never changes."""
        if inode == FIRST_INODE:
            return then(self._states.infos(), lambda infos: self._list_top(infos, cookie))
        node = self._inodes.node(inode)
        names = self._listing[1] if self._listing is not None and self._listing[0] == inode else None
        prefix = node.path + b"/" if node.path else b""

        def read(state: Tree) -> tuple[list[bytes], list[tuple[int, bytes, TreeEntry | None]]]:
            all_names = names_in(state, node.path) if names is None else names
            batch = list(enumerate((b".", b".."), 1))[cookie:]
            start = max(0, cookie - 2)
            batch += enumerate(all_names[start : start + _BATCH], start + 3)
            return all_names, [(at, name, state.entry(prefix + name) if at > 2 else None) for at, name in batch]

        def keep(result: tuple[list[bytes], list[tuple[int, bytes, TreeEntry | None]]]) -> list[PlainEntry]:
            all_names, batch = result
            self._listing = inode, all_names
            self._listed = {(inode, name): entry for _, name, entry in batch if entry is not None}
            return [
                (name, inode, stat.S_IFDIR, at)
                if entry is None
                else (name, self._inodes.number_of(node.info, entry), entry.mode, at)
                for at, name, entry in batch
            ]

        # ESTALE: readdir(3) of glibc takes ENOENT for the end of the listing.
        return then(catching(FileNotFoundError, lambda: self._using(node.info, read), _stale), keep)

    def _list_top(self, infos: Sequence[SnapshotInfo], cookie: int) -> list[PlainEntry]:
        serials = {info.serial for info in infos}
        if cookie == 0:
            self._shown = serials
        elif self._shown is not None and self._shown != serials:
            self._shown = set()  # the parts of this listing do not fit together
        return self._top_entries(infos, cookie)

    def _top_entries(self, infos: Sequence[SnapshotInfo], cookie: int) -> list[PlainEntry]:
        """List `.snapshots`, the newest first.

        Cookies go down as serial numbers go up, so a snapshot that is taken meanwhile lies before the reader.
        """
        dots: list[PlainEntry] = [(b".", FIRST_INODE, stat.S_IFDIR, 1), (b"..", ROOT_INODE, stat.S_IFDIR, 2)]
        named = ((shown_name(info), info) for info in infos)
        found = [
            (name, self._inodes.number(info, b""), stat.S_IFDIR, COOKIE_END - info.serial)
            for name, info in named
            if name is not None
        ]
        found.sort(key=itemgetter(3))
        return [entry for entry in dots + found if entry[3] > cookie]

    # -- content -------------------------------------------------------------------------------------
    def read(self, inode: int, offset: int, size: int) -> Answer[Buffer]:
        return self._volume.read(inode, offset, size) if inode < FIRST_INODE else self._read(inode, offset, size)

    def read_pieces(self, inode: int, offset: int, size: int) -> Answer[Buffer | list[bytes | bytearray]]:
        if inode < FIRST_INODE:
            return self._volume.read_pieces(inode, offset, size)
        return self._read(inode, offset, size)

    def _read(self, inode: int, offset: int, size: int) -> Answer[Any]:
        node = self._inodes.node(inode)
        return self._using(node.info, lambda state: state.read(node.path, offset, size))

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[int]:
        self._check_written(inode)
        return self._volume.write(inode, offset, data, kill_privileges=kill_privileges)

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> Answer[tuple[int, int]]:
        self._check_written(inode)
        return self._volume.append(inode, data, kill_privileges=kill_privileges)

    def _check_written(self, inode: int) -> None:
        if inode >= FIRST_INODE:
            self.on_refused_write(inode)
            raise os_error(errno.EROFS)

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> Answer[None]:
        _check_writable(inode)
        return self._volume.fallocate(inode, mode, offset, length)

    def seek(self, inode: int, offset: int, whence: int) -> Answer[int]:
        if inode < FIRST_INODE:
            return self._volume.seek(inode, offset, whence)

        def position(entry: TreeEntry) -> int:
            if not 0 <= offset < entry.size:
                raise os_error(errno.ENXIO)
            return offset if whence == _SEEK_DATA else entry.size  # a tree does not say where holes are

        return then(self._entry(inode), position)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> Answer[int]:
        _check_writable(target)
        if source >= FIRST_INODE:
            raise os_error(errno.EXDEV)  # the kernel then copies with reads and writes
        return self._volume.copy_range(source, source_offset, target, target_offset, length)

    def fsync(self, inode: int, *, data_only: bool) -> Answer[None]:
        return self._volume.fsync(inode, data_only=data_only) if inode < FIRST_INODE else None

    def open(self, inode: int, flags: int) -> Answer[None]:
        if inode < FIRST_INODE:
            return self._volume.open(inode, flags)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise os_error(errno.EROFS)
        return None

    def release(self, inode: int, flags: int) -> None:
        if inode < FIRST_INODE:
            self._volume.release(inode, flags)

    def flush(self, inode: int) -> Answer[None]:
        return self._volume.flush(inode) if inode < FIRST_INODE else None

    # -- the rest ------------------------------------------------------------------------------------
    def statfs(self) -> Answer[StatFs]:
        return self._volume.statfs()

    def getxattr(self, inode: int, name: bytes) -> Answer[bytes]:
        if inode < FIRST_INODE:
            return self._volume.getxattr(inode, name)

        def value(xattrs: dict[bytes, bytes]) -> bytes:
            if name not in xattrs:
                raise os_error(errno.ENODATA)
            return xattrs[name]

        return then(self._xattrs(inode), value)

    def find_xattr(self, inode: int, name: bytes) -> bytes | None:
        if inode < FIRST_INODE:
            return self._volume.find_xattr(inode, name)
        return cast("dict[bytes, bytes]", self._xattrs(inode)).get(name)

    def _xattrs(self, inode: int) -> Answer[dict[bytes, bytes]]:
        return {} if inode == FIRST_INODE else then(self._entry(inode), lambda entry: dict(entry.xattrs))

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> Answer[None]:
        _check_writable(inode)
        return self._volume.setxattr(inode, name, value, flags)

    def listxattr(self, inode: int) -> Answer[Sequence[bytes]]:
        return self._volume.listxattr(inode) if inode < FIRST_INODE else then(self._xattrs(inode), list)

    def removexattr(self, inode: int, name: bytes) -> Answer[None]:
        _check_writable(inode)
        return self._volume.removexattr(inode, name)

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Answer[Attributes]:
        _check_writable(parent)
        return self._volume.tmpfile(parent, mode, caller)


_SEEK_DATA: Final = 3  # linux/fs.h


def shown_name(info: SnapshotInfo) -> bytes | None:
    """Return the name of a snapshot's directory; None if it cannot be the name of a file."""
    name = info.name.encode("utf-8", "surrogateescape")
    is_name = 0 < len(name) <= NAME_MAX and b"/" not in name and b"\0" not in name and name not in {b".", b".."}
    return name if is_name else None


def _attributes(number: int, entry: TreeEntry) -> Attributes:
    return PlainAttributes(
        inode=number,
        mode=entry.mode,
        nlink=entry.nlink,
        uid=entry.uid,
        gid=entry.gid,
        rdev=entry.rdev,
        size=len(entry.target) if entry.is_symlink else entry.size,
        blocks=(entry.size + 511) // 512 if entry.is_file else 0,
        atime_ns=entry.mtime_ns,
        mtime_ns=entry.mtime_ns,
        ctime_ns=entry.mtime_ns,
        birth_ns=entry.mtime_ns,
    )


def _check_writable(*inodes: int) -> None:
    if max(inodes) >= FIRST_INODE:
        raise os_error(errno.EROFS)


def _stale(_: FileNotFoundError) -> NoReturn:
    raise os_error(errno.ESTALE)


# -- inode numbers ---------------------------------------------------------------------------------
FIRST_INODE: Final = 1 << 62  # of `.snapshots` itself; bit 63 stays 0: some programs read inode numbers as signed
MOST_BYTES: Final = 16 << 20  # memory of nodes after which the kernel is asked to forget them
_MASK: Final = FIRST_INODE - 1
_NODE_BYTES: Final = 300  # memory of a node without its path


class SnapshotNode(NamedTuple):
    """A file of a snapshot that the kernel has looked up.  `identity`: see `SnapshotInodes.number`."""

    info: SnapshotInfo
    path: bytes
    identity: bytes | int
    is_dir: bool


class SnapshotInodes:
    """The table.  `seed`, up to 64 bytes: tables with different ones number the files differently."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._nodes: dict[int, SnapshotNode] = {}
        self._lookups: dict[int, int] = {}
        self._bytes = 0  # memory of `_nodes`, estimated

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    @property
    def is_full(self) -> bool:
        """Whether the table takes so much memory that the kernel should forget its files."""
        return self._bytes > MOST_BYTES

    def items(self) -> Sequence[tuple[int, SnapshotNode]]:
        """Return the numbers and their files."""
        return list(self._nodes.items())

    def node(self, inode: int) -> SnapshotNode:
        """Return the file of a number; ESTALE if the kernel has no lookup of it."""
        node = self._nodes.get(inode)
        if node is None:
            raise os_error(errno.ESTALE)
        return node

    def number(self, info: SnapshotInfo, identity: bytes | int) -> int:
        """Return the number of the file of a snapshot with this `identity`: its path, or its inode number there.

        A directory of 100,000 files has two equal ones with a probability of 1 in 900 million; `look_up` refuses the
        second.
        """
        kind, data = (b"i", b"%d" % identity) if isinstance(identity, int) else (b"p", identity)
        digest = blake2b(data, digest_size=8, key=self._seed, salt=b"%x" % info.serial, person=kind).digest()
        return FIRST_INODE | (int.from_bytes(digest, "little") & _MASK) or FIRST_INODE + 1

    def number_of(self, info: SnapshotInfo, entry: TreeEntry) -> int:
        """Return the number of a file of a snapshot."""
        return self.number(info, _identity(entry))

    def look_up(self, info: SnapshotInfo, entry: TreeEntry) -> int:
        """Count a lookup of a file; return its number."""
        identity = _identity(entry)
        number = self.number(info, identity)
        node = self._nodes.get(number)
        if node is None:
            self._nodes[number] = SnapshotNode(info, entry.path, identity, entry.is_dir)
            self._bytes += _NODE_BYTES + len(entry.path)
        elif node.identity != identity or node.info.serial != info.serial:
            raise OSError(errno.EIO, f"two files of snapshots have the hash {number}")
        self._lookups[number] = self._lookups.get(number, 0) + 1
        return number

    def forget(self, inode: int, count: int) -> None:
        """See `Volume.forget`."""
        left = self._lookups.get(inode, 0) - count
        if left > 0:
            self._lookups[inode] = left
        elif self._lookups.pop(inode, None) is not None:
            self._bytes -= _NODE_BYTES + len(self._nodes.pop(inode).path)

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold."""
        assert self._nodes.keys() == self._lookups.keys()
        assert all(count > 0 for count in self._lookups.values())
        assert all(self.number(node.info, node.identity) == number for number, node in self._nodes.items())
        assert self._bytes == sum(_NODE_BYTES + len(node.path) for node in self._nodes.values())


def _identity(entry: TreeEntry) -> bytes | int:
    """Return what two names of one file have in common and other files of the snapshot do not have."""
    return entry.inode if entry.nlink > 1 and entry.inode and not entry.is_dir else entry.path
