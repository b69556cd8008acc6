"""AgentVolume: a volume whose answers come from a helper inside a container (see `agent.link`).

Each request of the kernel is one request to the helper; any number may be in flight.  Two things are cached:

- the pages of directories that were listed last, for at most _LISTED_S and until anything is changed, because a kernel
  then looks up the entries one by one (READDIRPLUS) and reads the rest of the page;
- the fact that a new file has no capabilities, for which a kernel asks before the first write.

The helper's replies are checked (`agent.replies`); an invalid reply ends the link.

A successor can continue with the helper, which owns the state: inodes, open files, listings.  It needs the name and the
secret of the helper's socket (`HeldHelper`).  With a keeper they are in its `SharedLog`; an upgrade sends
them.  The pages in `_pages` are lost when this process dies: the helper keeps the lookups of these entries, at most
those of the last second's pages.

Threading: the serving loop; in an upgrade the successor reads in a worker thread.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from weakref import WeakValueDictionary

import msgspec
import trio

from protocol.backends.container.agent.link import AgentLink, Reply
from protocol.backends.container.agent.replies import (
    KnownInode,
    Listed,
    appended_in,
    attributes_in,
    entries_in,
    number_in,
    statfs_in,
    string_in,
)
from protocol.backends.container.helper import wire
from protocol.backends.container.helper.wire import (
    CHUNK_BYTES,
    ENTRY,
    NAME_MAX,
    SECOND_NS,
    SECRET_BYTES,
    VERSION,
    Op,
    WireError,
)
from protocol.backends.container.inode_map import IDENTITY, IdMap
from protocol.backends.host.files import MAX_FILE_BYTES
from protocol.errors import os_error
from protocol.linux.shared_log import SharedLog, written_records
from protocol.tree import TYPE_MASK
from protocol.values import Value
from protocol.volume import (
    ROOT_INODE,
    SUPERUSER,
    AttributeChanges,
    Buffer,
    Caller,
    DirectoryEntry,
    PlainAttributes,
    StatFs,
    VolumeCapabilities,
)
from protocol.volume_durability import GivenState, JournalEnd, TakenState

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog

T = TypeVar("T")
Answer = Coroutine[Any, Any, T]

# A page that a kernel requests with attributes (READDIRPLUS) has some 200 entries, without attributes 1,000.
_PAGE_ENTRIES: Final = 200
_MOST_PAGE_ENTRIES: Final = 1600
_SOUGHT_ENTRIES: Final = 50  # after a cookie of no page that is known: seekdir(3), or a listing during changes
_LISTED_S: Final = 0.2
_PAGES_KEPT: Final = 16
# A kernel asks for this before the first write to a file; a new file cannot have it.
_CAPABILITY: Final = b"security.capability"
_NEW_S: Final = 0.2
_NEW_KEPT: Final = 256
_GIVEN_S: Final = 60  # how long a helper waits for the process that it is given to
_MOST_XATTR_BYTES: Final = 64 * 1024  # XATTR_SIZE_MAX and XATTR_LIST_MAX, linux/limits.h
_PATH_MAX: Final = 4096
_DOTS: Final = frozenset({b".", b".."})


class _Page:
    """A page of a directory: its entries and their attributes, each with a lookup that was not handed out yet."""

    __slots__ = ("entries", "positions", "seen", "until_s", "wanted")

    def __init__(self, entries: list[Listed], until_s: float, wanted: int) -> None:
        self.entries = [one.entry for one in entries]
        self.positions = {one.entry.cookie: at for at, one in enumerate(entries, 1)}  # where a listing continues
        self.seen = {one.entry.name: one.seen for one in entries if one.seen is not None}
        self.until_s = until_s
        self.wanted = wanted  # the number of entries that were requested


class AgentVolume:
    """Implements `protocol.volume.Volume`.  `readdir` returns a page: more may follow after its last cookie.

    `ids` translates users and groups; files that the daemon's root creates belong to `user` (ids of the container).
    """

    def __init__(
        self,
        link: AgentLink | None = None,
        *,
        read_only: bool = False,
        ids: IdMap = IDENTITY,
        user: tuple[int, int] = (0, 0),
        supports_acl: bool = False,
    ) -> None:
        self.read_only = read_only
        self.capabilities: Final = VolumeCapabilities(
            acls=supports_acl, appends=True, locks=True, recoverable=True, handover=True, answers_once=True
        )
        self.known: list[KnownInode] = []  # of the predecessor
        self.on_taken: Callable[[HeldHelper], None] = lambda _: None
        self._held: HeldHelper | None = None
        if link is not None:
            self.serve(link, ids, user)
        self._pages: dict[int, _Page] = {}
        self._new: dict[int, float] = {}  # new files, and until when they count as new
        self._appending: WeakValueDictionary[int, trio.StrictFIFOLock] = WeakValueDictionary()  # by inode
        self._change_count = 0  # grows at the start and at the end of each change
        self._changes_in_flight = 0

    def serve(self, link: AgentLink, ids: IdMap, user: tuple[int, int], held: HeldHelper | None = None) -> None:
        """Answer with the helper of `link` from now on.  `held`: how a successor can reach it."""
        self._link, self._ids, self._user, self._held = link, ids, user, held

    # -- other processes: see `protocol.volume_durability` -----------------------------------------
    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """Write to the log which helper has the state; `is_known`: it is there."""
        if not is_known:
            save_helper(log, self._held)

    def answering(self, unique: int) -> None:
        """Nothing: `protocol.volume_durability.current_request` says it, also after the first step of an answer."""

    def known_inodes(self) -> Iterator[tuple[int, int, int, int, list[tuple[int, bytes]]]]:
        """See `protocol.backends.container.reconnecting_volume.ContinuedVolume`.

        How many lookups the kernel has is not known.  It returns all together, and then the helper's go as well.
        """
        known, self.known = self.known, []
        for each in known:
            yield each.number, each.kind, 1, each.lookups, [(each.parent, each.name)] if each.parent else []

    def handing_over(self) -> HelperGiving:
        if self._held is None:
            raise OSError(errno.EOPNOTSUPP, "the helper cannot wait for another daemon: unmount it and mount it again")
        self._drop_pages()
        return HelperGiving(self._held, self._give)

    def _give(self, is_given: bool) -> None:
        """Have the helper wait for the process that it is given to, also if it would end with this one."""
        link, held = self._link, self._held
        assert held is not None
        link.give(is_given=is_given)
        if not link.holds and not link.lost.is_set():
            link.post(Op.HOLD, (_GIVEN_S if is_given else 0,), (held.name, held.secret))

    def taking_over(self) -> HelperTaking:
        return HelperTaking(self.on_taken)

    def discard_journal(self) -> None:
        """The successor has the helper."""
        self._link.give(is_given=True)

    def tidy(self) -> None:
        """Return the lookups of pages that are out of date."""
        for parent in tuple(self._pages):
            self._fresh_page(parent)

    # -- requests --------------------------------------------------------------------------------
    def _checked(self, read: Callable[[], T]) -> T:
        """Parse a reply with `read`; an invalid one ends the link."""
        try:
            return read()
        except WireError as error:
            self._link.lose(f"invalid reply: {error}")
            raise os_error(errno.EIO) from None

    async def _seen(
        self, op: int, numbers: tuple[int, ...], strings: tuple[bytes, ...] = (), *, root: bool = False
    ) -> PlainAttributes:
        """Send a request whose reply is attributes with one lookup."""
        reply = await self._link.call(op, numbers, strings, undo=self._undo)
        return self._checked(lambda: attributes_in(reply[0], self._ids, root=root))

    def _undo(self, reply: Reply) -> None:
        """Return the lookup of a reply whose caller was cancelled."""
        seen = self._checked(lambda: attributes_in(reply[0], root=True))
        self._link.forget(seen.inode, 1)

    async def _change(self, op: int, numbers: tuple[int, ...], strings: tuple[bytes, ...] = ()) -> Reply:
        """Send a change whose reply has no lookup."""
        with self._changed():
            return await self._link.call(op, numbers, strings)

    async def _make(self, op: int, numbers: tuple[int, ...], strings: tuple[bytes, ...], kind: int) -> PlainAttributes:
        """Send a change whose reply is a new inode, of type `kind` (0: any)."""
        with self._changed():
            seen = await self._seen(op, numbers, strings)
        if kind and seen.mode & TYPE_MASK != kind:
            self._link.lose(f"invalid reply: it made {seen.mode:o} for {kind:o}")
            raise os_error(errno.EIO)
        return seen

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Drop cached pages, and keep pages that arrive during the change from being cached."""
        self._change_count += 1
        self._changes_in_flight += 1
        self._drop_pages()
        try:
            yield
        finally:
            self._change_count += 1
            self._changes_in_flight -= 1

    def _check_writable(self) -> None:
        if self.read_only:
            raise os_error(errno.EROFS)

    def _owner(self, caller: Caller) -> tuple[int, int]:
        """The owner, in the container's ids, of a file that `caller` creates."""
        uid, gid = (caller.uid, caller.gid)
        if self._ids.is_identity:
            return (uid, gid) if uid or not any(self._user) else self._user
        return self._ids.users.inside(uid), self._ids.groups.inside(gid)

    # -- cached pages -----------------------------------------------------------------------
    def _listed(self, parent: int, name: bytes) -> PlainAttributes | None:
        page = self._fresh_page(parent)
        return None if page is None else page.seen.pop(name, None)

    def _fresh_page(self, parent: int) -> _Page | None:
        page = self._pages.get(parent)
        if page is not None and page.until_s < trio.current_time():
            self._drop_page(parent)
            return None
        return page

    def _drop_page(self, parent: int) -> None:
        page = self._pages.pop(parent, None)
        if page is not None:
            for seen in page.seen.values():
                self._link.forget(seen.inode, 1)

    def _drop_pages(self) -> None:
        for parent in tuple(self._pages):
            self._drop_page(parent)

    # -- inodes ------------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> PlainAttributes | Answer[PlainAttributes]:
        """See `protocol.volume.Volume`."""
        _check_name(name, dots=True)
        return self._listed(parent, name) or self._seen(Op.LOOKUP, (parent,), (name,), root=name in _DOTS)

    def forget(self, inode: int, count: int) -> None:
        if inode != ROOT_INODE:
            self._link.forget(inode, count)

    async def getattr(self, inode: int) -> PlainAttributes:
        appending = self._appending.get(inode)
        if appending is not None:
            # A kernel that got the new size before the answer to the append would show the pages that it filled for it.
            async with appending:
                pass
        numbers, _ = await self._link.call(Op.GETATTR, (inode,))
        return self._shown(inode, numbers)

    def _shown(self, inode: int, numbers: tuple[int, ...]) -> PlainAttributes:
        seen = self._checked(lambda: attributes_in(numbers, self._ids, root=inode == ROOT_INODE))
        if seen.inode != inode:
            self._link.lose(f"invalid reply: inode {seen.inode} for {inode}")
            raise os_error(errno.EIO)
        return seen

    async def setattr(self, inode: int, changes: AttributeChanges) -> PlainAttributes:
        self._check_writable()
        given = (
            (changes.mode, wire.SET_MODE), (changes.uid, wire.SET_UID), (changes.gid, wire.SET_GID),
            (changes.size, wire.SET_SIZE), (changes.atime_ns, wire.SET_ATIME), (changes.mtime_ns, wire.SET_MTIME),
            (changes.ctime_ns, wire.SET_CTIME),
        )  # fmt: skip
        bits = wire.KILL_PRIVILEGES if changes.kill_privileges else 0
        for value, bit in given:
            bits |= bit if value is not None else 0
        mode, uid, gid, size, atime_ns, mtime_ns, _ = (value or 0 for value, _ in given)
        if size < 0:
            raise os_error(errno.EINVAL)
        if size > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        uid, gid = self._ids.users.inside(uid), self._ids.groups.inside(gid)
        times = (*divmod(atime_ns, SECOND_NS), *divmod(mtime_ns, SECOND_NS))
        numbers, _ = await self._change(Op.SETATTR, (inode, bits, mode, uid, gid, size, *times))
        return self._shown(inode, numbers)

    async def readlink(self, inode: int) -> bytes:
        _, strings = await self._link.call(Op.READLINK, (inode,), most_bytes=_PATH_MAX)
        target = self._checked(lambda: string_in(strings, _PATH_MAX))
        if not target or b"\0" in target:
            raise os_error(errno.EIO)
        return target

    # -- making and removing entries ---------------------------------------------------------------
    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> PlainAttributes:
        self._check_new_name(name)
        numbers = (parent, mode, rdev, *self._owner(caller), caller.umask)
        made = await self._make(Op.MKNOD, numbers, (name,), mode & TYPE_MASK or 0o100000)
        self._new.pop(made.inode, None)
        self._new[made.inode] = trio.current_time() + _NEW_S
        if len(self._new) > _NEW_KEPT:
            del self._new[next(iter(self._new))]
        return made

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> PlainAttributes:
        self._check_new_name(name)
        numbers = (parent, mode & 0o7777, *self._owner(caller), caller.umask)
        return await self._make(Op.MKDIR, numbers, (name,), 0o040000)

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> PlainAttributes:
        self._check_new_name(name)
        if len(target) >= _PATH_MAX:
            raise os_error(errno.ENAMETOOLONG)
        return await self._make(Op.SYMLINK, (parent, *self._owner(caller)), (name, target), 0o120000)

    async def tmpfile(self, parent: int, mode: int, caller: Caller) -> PlainAttributes:
        self._check_writable()
        numbers = (parent, mode & 0o7777, *self._owner(caller), caller.umask)
        return await self._make(Op.TMPFILE, numbers, (), 0o100000)

    async def link(self, inode: int, parent: int, name: bytes) -> PlainAttributes:
        self._check_new_name(name)
        seen = await self._make(Op.LINK, (inode, parent), (name,), 0)
        if seen.inode != inode:
            self._link.lose(f"invalid reply: a link of inode {seen.inode} for {inode}")
            raise os_error(errno.EIO)
        return seen

    async def unlink(self, parent: int, name: bytes) -> None:
        self._check_writable()
        _check_name(name)
        await self._change(Op.UNLINK, (parent,), (name,))

    async def rmdir(self, parent: int, name: bytes) -> None:
        self._check_writable()
        if name in _DOTS:
            raise os_error(errno.EINVAL if name == b"." else errno.ENOTEMPTY)
        _check_name(name)
        await self._change(Op.RMDIR, (parent,), (name,))

    async def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = SUPERUSER,
    ) -> None:
        self._check_writable()
        _check_name(name)
        _check_name(new_name)
        await self._change(Op.RENAME, (parent, new_parent, flags, *self._owner(caller)), (name, new_name))

    async def lock(self, inode: int) -> None:
        """See `protocol.volume.ExtendedVolume`."""
        await self._change(Op.LOCK, (inode,))

    async def unlock(self) -> None:
        await self._change(Op.UNLOCK, ())

    def _check_new_name(self, name: bytes) -> None:
        self._check_writable()
        if name in _DOTS:
            raise os_error(errno.EEXIST)
        _check_name(name)

    # -- directories -------------------------------------------------------------------------------
    def readdir(self, inode: int, cookie: int) -> Iterator[DirectoryEntry] | Answer[Iterator[DirectoryEntry]]:
        """A page of the entries after `cookie`; empty at the end."""
        page = self._fresh_page(inode) if cookie else None
        wanted = _SOUGHT_ENTRIES if cookie else _PAGE_ENTRIES
        if page is not None:
            at = page.positions.get(cookie, 0)
            if 0 < at < len(page.entries):
                return iter(page.entries[at:])
            # A sequential listing without changes in between.
            wanted = min(2 * page.wanted, _MOST_PAGE_ENTRIES)
        return self._page(inode, cookie, wanted)

    async def _page(self, inode: int, cookie: int, wanted: int) -> Iterator[DirectoryEntry]:
        count, is_changing = self._change_count, self._changes_in_flight > 0
        most = (wanted + 2) * (ENTRY.size + NAME_MAX)
        reply = await self._link.call(
            Op.READDIR, (inode, cookie, wanted), most_bytes=most, undo=lambda reply: self._release_page(reply, cookie)
        )
        entries = self._checked(lambda: list(entries_in(string_in(reply[1], most), cookie, self._ids)))
        self._drop_page(inode)
        page = self._pages[inode] = _Page(entries, trio.current_time() + _LISTED_S, wanted)
        if is_changing or count != self._change_count:
            self._drop_page(inode)  # the page may be outdated
        elif len(self._pages) > _PAGES_KEPT:
            self._drop_page(next(iter(self._pages)))
        return iter(page.entries)

    def _release_page(self, reply: Reply, cookie: int) -> None:
        for one in self._checked(lambda: list(entries_in(string_in(reply[1], CHUNK_BYTES), cookie))):
            if one.seen is not None:
                self._link.forget(one.seen.inode, 1)

    # -- content -----------------------------------------------------------------------------------
    async def read(self, inode: int, offset: int, size: int) -> Buffer:
        parts = []
        while True:
            wanted = min(size, CHUNK_BYTES)
            _, strings = await self._link.call(Op.READ, (inode, offset, wanted), most_bytes=wanted)
            data = self._checked(lambda: string_in(strings, wanted))  # noqa: B023 (called at once)
            parts.append(data)
            size -= len(data)
            offset += len(data)
            if not size or len(data) < wanted:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        self._check_writable()
        if offset + len(data) > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        written = 0
        while True:
            part = bytes(memoryview(data)[written : written + CHUNK_BYTES])
            try:
                numbers, _ = await self._change(Op.WRITE, (inode, offset + written, int(kill_privileges)), (part,))
            except OSError:
                if written:
                    return written
                raise
            count = self._checked(lambda: number_in(numbers, len(part)))  # noqa: B023 (called at once)
            written += count
            if count < len(part) or written == len(data):
                return written

    async def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> tuple[int, int]:
        self._check_writable()
        written = size = 0
        # A write(2) with O_DIRECT may be several requests at once, whose data has to keep its order.
        async with self._appending.setdefault(inode, trio.StrictFIFOLock()):
            while True:
                part = bytes(memoryview(data)[written : written + CHUNK_BYTES])
                try:
                    numbers, _ = await self._change(Op.APPEND, (inode, int(kill_privileges)), (part,))
                except OSError:
                    if written:
                        return written, size
                    raise
                count, size = self._checked(lambda: appended_in(numbers, len(part)))  # noqa: B023 (called at once)
                written += count
                if count < len(part) or written == len(data):
                    return written, size

    async def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        self._check_writable()
        if offset < 0 or length <= 0:
            raise os_error(errno.EINVAL)
        if offset + length > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        await self._change(Op.FALLOCATE, (inode, mode, offset, length))

    async def seek(self, inode: int, offset: int, whence: int) -> int:
        if whence not in {os.SEEK_DATA, os.SEEK_HOLE}:
            raise os_error(errno.EINVAL)
        numbers, _ = await self._link.call(Op.SEEK, (inode, offset, whence))
        return self._checked(lambda: number_in(numbers, MAX_FILE_BYTES))

    async def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        self._check_writable()
        length = min(length, MAX_FILE_BYTES - max(source_offset, target_offset))
        numbers, _ = await self._change(Op.COPY, (source, source_offset, target, target_offset, length))
        return self._checked(lambda: number_in(numbers, length))

    async def fsync(self, inode: int, *, data_only: bool) -> None:
        await self._link.call(Op.FSYNC, (inode, int(data_only)))

    # -- the rest ----------------------------------------------------------------------------------
    async def statfs(self) -> StatFs:
        numbers, _ = await self._link.call(Op.STATFS)
        return self._checked(lambda: statfs_in(numbers))

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        if name == _CAPABILITY and self._new.get(inode, 0.0) > trio.current_time():
            raise os_error(errno.ENODATA)
        _, strings = await self._link.call(Op.GETXATTR, (inode,), (name,), most_bytes=_MOST_XATTR_BYTES)
        return self._checked(lambda: string_in(strings, _MOST_XATTR_BYTES))

    async def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self._check_writable()
        self._new.pop(inode, None)
        await self._change(Op.SETXATTR, (inode, flags), (name, value))

    async def listxattr(self, inode: int) -> Sequence[bytes]:
        _, strings = await self._link.call(Op.LISTXATTR, (inode,), most_bytes=_MOST_XATTR_BYTES)
        names = self._checked(lambda: string_in(strings, _MOST_XATTR_BYTES)).split(b"\0")
        return tuple(name for name in names if 0 < len(name) <= NAME_MAX)

    async def removexattr(self, inode: int, name: bytes) -> None:
        self._check_writable()
        await self._change(Op.REMOVEXATTR, (inode,), (name,))


def _check_name(name: bytes, *, dots: bool = False) -> None:
    """Check that a name is a single step: one with a slash could lead anywhere."""
    if not name or b"/" in name or b"\0" in name or (name in _DOTS and not dots):
        raise os_error(errno.EINVAL)
    if len(name) > NAME_MAX:
        raise os_error(errno.ENAMETOOLONG)


class HeldHelper(Value):
    """A helper that waits for another daemon.  `hello`: what it replied to HELLO, which stays the same."""

    version: int
    name: bytes
    secret: bytes
    hello: tuple[int, ...] = ()

    @classmethod
    def new(cls) -> Self:
        """A name and a secret for a helper."""
        return cls(VERSION, secrets.token_bytes(8), secrets.token_bytes(SECRET_BYTES))

    def check(self) -> None:
        """Check that this version of vfsd can use the helper.  OSError (EPROTONOSUPPORT)."""
        if self.version != VERSION:
            raise OSError(
                errno.EPROTONOSUPPORT,
                f"the helper that has the files open speaks version {self.version} of the protocol, this vfsd speaks"
                f" version {VERSION}: unmount the workspace and mount it again",
            )


def save_helper(log: SharedLog, held: HeldHelper | None) -> None:
    """Record the helper in the log; None: the next daemon cannot continue."""
    log.replace([msgspec.msgpack.encode(held)])


def load_helper(log: SharedLog) -> HeldHelper:
    """Read the helper of the dead daemon.  OSError (ESTALE) if there is none."""
    held = None
    for record in log.records():
        held = msgspec.msgpack.decode(record, type=HeldHelper | None)
    if held is None:
        raise OSError(errno.ESTALE, "the daemon before had no helper that waits for another daemon: mount again")
    return held


class HelperGiving(GivenState):
    """The predecessor's side.  `give` notes whether the successor may have the helper."""

    below = ""

    def __init__(self, held: HeldHelper, give: Callable[[bool], None]) -> None:
        self._log = SharedLog.create()
        self.start = self.position()
        self._log.append(msgspec.msgpack.encode(held))
        self._give = give

    def log_fd(self) -> int:
        return os.dup(self._log.descriptor)

    def position(self) -> JournalEnd:
        return JournalEnd(0, self._log.end, 0, 0, 0, 0)

    def rest(self) -> bytes:
        self._give(True)
        return b""

    def end(self) -> None:
        self._give(False)
        os.close(self._log.descriptor)


class HelperTaking(TakenState):
    """The successor's side.  `take` gets the helper."""

    def __init__(self, take: Callable[[HeldHelper], None]) -> None:
        self.below = ""
        self._take = take
        self._log_fd = self._at = -1

    def read(self, _image_fd: int, log_fd: int, start: JournalEnd) -> None:
        self._log_fd, self._at = log_fd, start.offset

    def follow(self, end: int) -> None:
        for record in written_records(self._log_fd, self._at, end):
            held = msgspec.msgpack.decode(record, type=HeldHelper)
            held.check()
            self._take(held)
        self._at = end

    def take_files(self, files: Mapping[int, int]) -> None:
        for descriptor in files.values():
            os.close(descriptor)

    def complete(self, rest: bytes) -> None:
        os.close(self._log_fd)
        if rest:
            raise ValueError("a state of another kind")
