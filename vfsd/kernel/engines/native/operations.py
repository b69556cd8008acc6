"""The opcodes: one method each, which unpacks the request's body and calls the volume.

`Operations.table` maps each opcode to the minimum length of its message, its method, and the method of `Replies` that
packs the answer.  A method returns what the volume returned, awaitable or not; the session (`session.py`) awaits it.
If the reply depends on the request (a size limit), the method returns the finished body instead.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import trio

from protocol.adapters.snapshot_directory import FIRST_INODE, NAME
from protocol.errors import NotReadyError, os_error
from protocol.volume import (
    ROOT_INODE,
    Answer,
    AttributeChanges,
    Attributes,
    Buffer,
    Caller,
    ExtendedVolume,
    PlainEntry,
    Volume,
    extended,
)
from vfsd.kernel.engines import policy
from vfsd.kernel.engines.base import ListingPositions
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.mounting import MAX_WRITE_BYTES
from vfsd.kernel.engines.native.replies import Message, Replies, dirents
from vfsd.kernel.engines.native.requests import BODY, Handler, Method, Request, then, tried
from vfsd.kernel.engines.native.wire import WRITE_DATA_AT, InitFlag, Opcode
from vfsd.kernel.engines.policy import PERMISSIONS

T = TypeVar("T")
_new: Final = tuple.__new__  # a named tuple's own constructor takes 5 % of MKDIR longer
# The loop answers no other request during a copy; copy_file_range(2) may copy less than requested.
_MAX_COPY_BYTES: Final = 64 * 1024 * 1024


class Operations:
    """The opcodes over one volume.

    `flags` are the negotiated ones.  `cancel` cancels a pending request.  `invalidate_attributes` invalidates the
    kernel's cached attributes of an inode; `invalidate_content` does so soon, with its pages.  `record_statfs` gets the
    thread's id of each statfs request.  `written_back`: see `vfsd.kernel.engines.base`.

    `snapshots`: the operations over the volume that adds `.snapshots` to this one.  The session gives them the requests
    whose node is FIRST_INODE or higher.  Requests that list the root, name `.snapshots` in it, or have such a number in
    their body come here, and are put to that volume.
    """

    def __init__(
        self,
        volume: Volume,
        replies: Replies,
        flags: InitFlag = InitFlag.POSIX_ACL,
        *,
        xattrs: bool = True,
        cancel: Callable[[int], None] = lambda _unique: None,
        invalidate_attributes: Callable[[int], None] = lambda _inode: None,
        invalidate_content: Callable[[int], None] = lambda _inode: None,
        written_back: Callable[[], NotReadyError] | None = None,
        record_statfs: Callable[[int], None] = lambda _thread_id: None,
        snapshots: Operations | None = None,
    ) -> None:
        self._volume: Final = extended(volume)
        self.served: Final = volume
        self.snapshots: Final = snapshots
        self._outer = None if snapshots is None else extended(snapshots.served)
        self._background_requests = 0  # so many that the kernel may have sent from its background queue
        self.replies = replies
        self._umask_is_ours = InitFlag.DONT_MASK in flags  # the volume applies the umask, not the kernel
        capabilities = volume.capabilities
        # The volume, if it has the shortcuts.
        self._short = self._volume if capabilities.shortcuts else None
        self._kernel_sets_times = InitFlag.WRITEBACK_CACHE in flags  # of a file that is written
        # With write-back cache the kernel's size is the right one.
        appends = capabilities.appends and not self._kernel_sets_times
        self._appending = self._volume if appends else None
        self._xattrs = ExtendedAttributes(volume, flags, invalidate_attributes) if xattrs else None
        self._positions = ListingPositions()
        self._cancel = cancel
        self._invalidate_attributes = invalidate_attributes
        self._invalidate_content = invalidate_content
        self._written_back = None if self._kernel_sets_times else written_back
        # Files with whole pages in the kernel's cache, and whether a program can have mapped them: see `_may_be_dirty`.
        self._cached: dict[int, bool] = {}
        self._cleaned: set[int] = set()  # whose dirty pages were written back for the request that comes again
        self._record_statfs = record_statfs
        self.waits_for_syncs = False  # the session waits for `unsynced` before it answers
        # The last request is answered when this is done: see `ExtendedVolume.unsynced`.
        self.unsynced: Callable[[], Awaitable[None]] | None = None
        self.table: Final = self._handlers()

    def _handlers(self) -> dict[int, Handler]:
        r = self.replies
        rows: list[tuple[Opcode, int, Method, Callable[[int, Any], Message]]] = [
            (Opcode.LOOKUP, 2, self._lookup, r.found),
            (Opcode.FORGET, wire.FUSE_FORGET_IN.size, self._forget, r.nothing),
            (Opcode.BATCH_FORGET, wire.FUSE_BATCH_FORGET_IN.size, self._batch_forget, r.nothing),
            (Opcode.GETATTR, 0, self._getattr, r.attributes),
            (Opcode.STATX, wire.FUSE_STATX_IN.size, self._getattr, r.statx),
            (Opcode.ACCESS, wire.FUSE_ACCESS_IN.size, self._access, r.done),
            (Opcode.SETATTR, wire.FUSE_SETATTR_IN.size, self._setattr, r.attributes),
            (Opcode.READLINK, 0, self._readlink, r.data),
            (Opcode.MKNOD, wire.FUSE_MKNOD_IN.size + 2, self._mknod, r.entry),
            (Opcode.MKDIR, wire.FUSE_MKDIR_IN.size + 2, self._mkdir, r.entry),
            (Opcode.SYMLINK, 4, self._symlink, r.entry),
            (Opcode.LINK, wire.FUSE_LINK_IN.size + 2, self._link, r.entry),
            (Opcode.UNLINK, 2, self._unlink, r.done),
            (Opcode.RMDIR, 2, self._rmdir, r.done),
            (Opcode.RENAME, wire.FUSE_RENAME_IN.size + 4, self._rename, r.done),
            (Opcode.RENAME2, wire.FUSE_RENAME2_IN.size + 4, self._rename2, r.done),
            (Opcode.TMPFILE, wire.FUSE_CREATE_IN.size, self._tmpfile, r.entry_and_open),
            (Opcode.READDIR, wire.FUSE_READDIR_IN.size, self._readdir, r.data),
            (Opcode.READDIRPLUS, wire.FUSE_READDIR_IN.size, self._readdirplus, r.data),
            (Opcode.READ, wire.FUSE_READ_IN.size, self._read, r.content),
            (Opcode.WRITE, wire.FUSE_WRITE_IN.size, self._write, r.written),
            (Opcode.FALLOCATE, wire.FUSE_FALLOCATE_IN.size, self._fallocate, r.done),
            (Opcode.LSEEK, wire.FUSE_LSEEK_IN.size, self._lseek, r.position),
            (Opcode.COPY_FILE_RANGE, wire.FUSE_COPY_FILE_RANGE_IN.size, self._copy_file_range, r.written),
            (Opcode.COPY_FILE_RANGE_64, wire.FUSE_COPY_FILE_RANGE_IN.size, self._copy_file_range, r.copied_64),
            (Opcode.STATFS, 0, self._statfs, r.statfs),
            (Opcode.INTERRUPT, wire.FUSE_INTERRUPT_IN.size, self._interrupt, r.nothing),
            # The kernel writes dirty pages back before it sends SYNCFS, and the volume has no buffers of its own.
            (Opcode.SYNCFS, 0, self._accept, r.done),
            # Sent only for the handle of a TMPFILE: no other open has a handle.
            (Opcode.RELEASE, 0, self._accept, r.done),
            (Opcode.RELEASEDIR, 0, self._accept, r.done),
            (Opcode.DESTROY, 0, self._accept, r.done),
        ]
        xattrs = self._xattrs
        if xattrs is not None:
            rows += (
                (Opcode.GETXATTR, wire.FUSE_GETXATTR_IN.size + 2, xattrs.get, r.attribute),
                (Opcode.SETXATTR, xattrs.set_bytes + 2, xattrs.set, r.done),
                (Opcode.LISTXATTR, wire.FUSE_GETXATTR_IN.size, xattrs.list, wire.body_reply),
                (Opcode.REMOVEXATTR, 2, xattrs.remove, r.done),
            )
        if self._volume.capabilities.opens:
            rows.append((Opcode.OPEN, wire.FUSE_OPEN_IN.size, self._open, r.opened))
            rows.append((Opcode.RELEASE, wire.FUSE_RELEASE_IN.size, self._release, r.done))
        if self._volume.capabilities.flush:
            rows.append((Opcode.FLUSH, 0, self._flush, r.done))
        if self._volume.capabilities.durable:
            rows.append((Opcode.FSYNC, wire.FUSE_FSYNC_IN.size, self._fsync, r.done))
            rows.append((Opcode.FSYNCDIR, wire.FUSE_FSYNC_IN.size, self._fsync, r.done))
        if self._volume.capabilities.journal or self._volume.capabilities.answers_once:
            rows = [
                (code, size, self._counted(method) if code in _CHANGING else method, r)
                for code, size, method, r in rows
            ]
        # OPENDIR, CREATE, BMAP, IOCTL, POLL and usually FLUSH are missing on purpose: after one ENOSYS the kernel
        # does these itself for the lifetime of the mount.  Opens then keep the page cache, and CREATE becomes MKNOD.
        return {int(opcode): Handler(BODY + length, method, reply) for opcode, length, method, reply in rows}

    def _counted(self, method: Method) -> Method:
        """Return `method`, with the calls that it makes counted as those of its request."""
        answering = self._volume.answering
        unique_of = wire.IN_HEADER_UNIQUE.unpack_from

        def counted(node: int, message: Request, length: int) -> object:
            answering(unique_of(message)[0])
            try:
                return method(node, message, length)
            finally:
                answering(0)
                if self.waits_for_syncs:
                    self.unsynced = self._volume.unsynced(of_request=True)

        return counted

    @property
    def sent_in_background(self) -> int:
        """The number of requests that the kernel may have sent from its background queue."""
        return self._background_requests + (0 if self.snapshots is None else self.snapshots.sent_in_background)

    def everything_unsynced(self, opcode: int) -> Callable[[], Awaitable[None]] | None:
        """Return what the answer to a request that took more than one step has to wait for."""
        if not self.waits_for_syncs or opcode not in _CHANGING:
            return None
        return self._volume.unsynced(of_request=False)

    # -- inodes ------------------------------------------------------------------------------
    def _lookup(self, node: int, message: Request, length: int) -> object:
        (name,) = wire.NAME[length](message, BODY)
        if node == ROOT_INODE and name == NAME and self._outer is not None:
            return self._outer.lookup(node, name)
        return self._volume.lookup(node, name) if self._short is None else self._short.find(node, name)

    def _forget(self, node: int, message: Request, _length: int) -> None:
        self.forget(node, wire.FUSE_FORGET_IN.unpack_from(message, BODY)[0])

    def forget(self, node: int, lookups: int) -> None:
        """See `Volume.forget`."""
        self._cached.pop(node, None)
        self._volume.forget(node, lookups)

    def _batch_forget(self, _node: int, message: Request, length: int) -> None:
        count, _ = wire.FUSE_BATCH_FORGET_IN.unpack_from(message, BODY)
        start = BODY + wire.FUSE_BATCH_FORGET_IN.size
        end = start + min(count, (length - start) // wire.FUSE_FORGET_ONE.size) * wire.FUSE_FORGET_ONE.size
        forget, cached = self._volume.forget, self._cached
        for node, lookups in wire.FUSE_FORGET_ONE.iter_unpack(memoryview(message)[start:end]):
            if node >= FIRST_INODE and self.snapshots is not None:
                self.snapshots.forget(node, lookups)
            else:
                cached.pop(node, None)
                forget(node, lookups)

    def _getattr(self, node: int, _message: Request, _length: int) -> object:
        if node in self._cached:
            self._cached[node] = True
        return self._volume.getattr(node)

    def _access(self, node: int, message: Request, _length: int) -> object:
        """Answer access(2) and chdir(2); sent only if the kernel checks no permissions, hence for root."""
        mask, _ = wire.FUSE_ACCESS_IN.unpack_from(message, BODY)

        def check(found: Attributes) -> None:
            if mask & os.X_OK and not policy.is_executable(found.mode):
                raise os_error(errno.EACCES)

        return then(self._volume.getattr(node), check)

    def _setattr(self, node: int, message: Request, _length: int) -> object:
        (
            valid, _, _, size, _, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns, mode, _, uid, gid, _
        ) = wire.FUSE_SETATTR_IN.unpack_from(message, BODY)  # fmt: skip
        if valid == wire.FATTR_MODE:  # chmod(2): the general way takes 9 % longer
            changed = (mode & PERMISSIONS, None, None, None, None, None, None, False)
            return self._volume.setattr(node, _new(AttributeChanges, changed))
        if not valid & ~(wire.FATTR_FH | wire.FATTR_CTIME):  # ctime with write-back cache only
            return self._set_nothing(node, message, _times(valid, 0, 0, ctime, 0, 0, ctime_ns)[2])
        if valid & wire.FATTR_SIZE and (valid & wire.FATTR_FH or not size):
            # ftruncate(2) and O_TRUNC set mtime even if the size stays, truncate(2) does not (do_truncate, fs/open.c).
            # O_TRUNC has no handle here, so truncate(2) to 0 cannot be told apart from it.
            # With write-back cache the kernel sends its own time.
            valid |= 0 if valid & wire.FATTR_MTIME else wire.FATTR_MTIME_NOW
        if valid & _MTIME == wire.FATTR_MTIME and self._written_back is not None and self._may_be_dirty(node):
            raise self._written_back()
        times = _times(valid, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns) if valid & _ANY_TIME else _NO_TIMES
        changes = AttributeChanges(
            mode & PERMISSIONS if valid & wire.FATTR_MODE else None,
            uid if valid & wire.FATTR_UID else None,
            gid if valid & wire.FATTR_GID else None,
            size if valid & wire.FATTR_SIZE else None,
            *times,
            # HANDLE_KILLPRIV_V2: a chown always clears set-id bits; for a truncate the kernel sets the flag.
            kill_privileges=valid & _CLEARS_SET_ID != 0,
        )
        return self._volume.setattr(node, changes)

    def _may_be_dirty(self, node: int) -> bool:
        """Whether a program may have stored through a shared mapping; False for the request that comes again.

        Such a page is whole in the kernel's cache: it was read, or a write(2) covered it.  In the second case the
        program has requested the size since, to map it.  (tar and cp write, and set the times.)
        """
        if node in self._cleaned:
            self._cleaned.remove(node)
            return False
        if self._cached.get(node, False):
            self._cleaned.add(node)
            return True
        return False

    def _set_nothing(self, node: int, message: Request, ctime_ns: int | None) -> object:
        """Handle SETATTR without attributes: chown(-1, -1), or set-id bits to clear (file_remove_privs, fs/inode.c).

        Both clear the set-id bits.  The kernel does not check the owner for this chown, so it is checked here.
        """
        uid, _, _ = wire.IN_HEADER_CALLER.unpack_from(message, 0)
        return then(
            self._volume.getattr(node),
            lambda found: self._volume.setattr(
                node, AttributeChanges(ctime_ns=ctime_ns, kill_privileges=uid in {0, found.uid})
            ),
        )

    def _clear_set_id(self, node: int, message: Request) -> Callable[[T], object]:
        """Return a function that clears the set-id bits of `node` after the caller of `message` changed its content.

        The function takes the result of the change, and returns it once the bits are cleared.
        """
        uid, _, _ = wire.IN_HEADER_CALLER.unpack_from(message, 0)

        def after(result: T) -> object:
            def clear(found: Attributes) -> object:
                if not policy.has_set_id(found.mode):
                    return result
                return then(self._volume.setattr(node, policy.clear_set_id(found)), lambda _: result)

            return result if policy.may_keep_set_id(uid) else then(self._volume.getattr(node), clear)

        return after

    def _readlink(self, node: int, _message: Request, _length: int) -> object:
        return self._volume.readlink(node)

    # -- directory entries -------------------------------------------------------------------
    def _caller(self, message: Request, umask: int) -> Caller:
        uid, gid, pid = wire.IN_HEADER_CALLER.unpack_from(message, 0)
        return _new(Caller, (uid, gid, umask if self._umask_is_ours else 0, pid))

    def _mknod(self, node: int, message: Request, length: int) -> object:
        mode, rdev, umask, name = wire.MKNOD_NAME[length](message, BODY)
        return self._volume.mknod(node, name, mode, rdev, self._caller(message, umask))

    def _mkdir(self, node: int, message: Request, length: int) -> object:
        mode, umask, name = wire.MKDIR_NAME[length](message, BODY)
        return self._volume.mkdir(node, name, mode, self._caller(message, umask))

    def _symlink(self, node: int, message: Request, length: int) -> object:
        name, target = _split(*wire.NAME[length](message, BODY))
        return self._volume.symlink(node, name, target, self._caller(message, 0))

    def _link(self, node: int, message: Request, length: int) -> object:
        inode, name = wire.LINK_NAME[length](message, BODY)
        if inode >= FIRST_INODE and self._outer is not None:
            return self._outer.link(inode, node, name)
        return self._volume.link(inode, node, name)

    def _unlink(self, node: int, message: Request, length: int) -> object:
        (name,) = wire.NAME[length](message, BODY)
        if node == ROOT_INODE and name == NAME and self._outer is not None:
            return self._outer.unlink(node, name)
        return self._volume.unlink(node, name)

    def _rmdir(self, node: int, message: Request, length: int) -> object:
        (name,) = wire.NAME[length](message, BODY)
        if node == ROOT_INODE and name == NAME and self._outer is not None:
            return self._outer.rmdir(node, name)
        return self._volume.rmdir(node, name)

    def _rename(self, node: int, message: Request, length: int) -> object:
        new_parent, names = wire.RENAME_NAMES[length](message, BODY)
        name, new_name = _split(names)
        return self._renaming(node, name, new_parent).rename(node, name, new_parent, new_name)

    def _rename2(self, node: int, message: Request, length: int) -> object:
        new_parent, flags, names = wire.RENAME2_NAMES[length](message, BODY)
        name, new_name = _split(names)
        volume = self._renaming(node, name, new_parent)
        return volume.rename(node, name, new_parent, new_name, flags, self._caller(message, 0))

    def _renaming(self, parent: int, name: bytes, new_parent: int) -> ExtendedVolume:
        """Return the volume that renames `name`."""
        is_outer = new_parent >= FIRST_INODE or (parent == ROOT_INODE and name == NAME)
        return self._outer if is_outer and self._outer is not None else self._volume

    def _tmpfile(self, node: int, message: Request, _length: int) -> object:
        _, mode, umask, _ = wire.FUSE_CREATE_IN.unpack_from(message, BODY)
        return self._volume.tmpfile(node, mode, self._caller(message, umask))

    def _readdir(self, node: int, message: Request, _length: int) -> object:
        _, cookie, size, _, _, _, _ = wire.FUSE_READDIR_IN.unpack_from(message, BODY)
        size = min(size, _SOUGHT_BYTES if self._positions.is_new(node, cookie) else MAX_WRITE_BYTES)
        return then(self._entries(node, cookie), lambda entries: self._dirents(node, entries, size))

    def _dirents(self, node: int, entries: Iterator[PlainEntry], size: int) -> bytes:
        packed, end = dirents(entries, size)
        self._positions.ended(node, end)
        return packed

    def _entries(self, node: int, cookie: int) -> Answer[Iterator[PlainEntry]]:
        volume = self._listed(node)
        return volume.readdir(node, cookie) if self._short is None else volume.entries(node, cookie)

    def _listed(self, directory: int) -> ExtendedVolume:
        """Return the volume that lists `directory`; for the root it has the shortcuts of this one."""
        return self._outer if directory == ROOT_INODE and self._outer is not None else self._volume

    def _readdirplus(self, node: int, message: Request, _length: int) -> object:
        _, cookie, size, _, _, _, _ = wire.FUSE_READDIR_IN.unpack_from(message, BODY)
        size = min(size, _SOUGHT_BYTES if self._positions.is_new(node, cookie) else MAX_WRITE_BYTES)
        plain = self._short
        if not cookie and plain is not None and plain.entry_count(node) * _DIRENTPLUS_BYTES > _LARGE_REPLIES * size:
            size = min(size, _SAMPLE_BYTES)
        entries = self._entries(node, cookie)
        if isinstance(entries, Awaitable):
            return self._readdirplus_later(node, entries, size)
        return self._direntsplus(node, entries, size)

    async def _readdirplus_later(self, node: int, entries: Awaitable[Iterator[PlainEntry]], size: int) -> Buffer:
        listing = self._direntsplus(node, await entries, size)
        return await listing if isinstance(listing, Awaitable) else listing

    def _direntsplus(self, node: int, entries: Iterator[PlainEntry], size: int) -> bytes | Coroutine[Any, Any, bytes]:
        """Pack the entries that fit into `size` bytes with their attributes; each adds a lookup of its inode."""
        pack, quiet = self.replies.direntplus, self._short
        lookup = self._listed(node).lookup if quiet is None else self._listed(node).find
        parts: list[bytes] = []
        waiting: list[tuple[int, PlainEntry, Awaitable[Attributes]]] = []
        end = 0
        for entry in entries:
            name = entry[0]
            size -= (_DIRENTPLUS_BYTES + len(name)) & ~7
            if size < 0:
                break
            end = entry[3]
            found: Any = None
            if name not in _DOTS:
                try:
                    found = lookup(node, name)
                except OSError:
                    pass  # listed without attributes; a lookup of the name will report the error
            if found is None:
                parts.append(self.replies.direntplus_bare(entry))
            elif quiet is not None or not hasattr(found, "__await__"):
                parts.append(pack(found, entry))
            else:
                waiting.append((len(parts), entry, found))
                parts.append(self.replies.direntplus_bare(entry))
        self._positions.ended(node, end)
        return self._await_lookups(parts, waiting) if waiting else b"".join(parts)

    async def _await_lookups(
        self, parts: list[bytes], waiting: list[tuple[int, PlainEntry, Awaitable[Attributes]]]
    ) -> bytes:
        async def fill(at: int, entry: PlainEntry, found: Awaitable[Attributes]) -> None:
            try:
                parts[at] = self.replies.direntplus(await found, entry)
            except OSError:
                pass

        async with trio.open_nursery() as nursery:
            for at, entry, found in waiting:
                nursery.start_soon(fill, at, entry, found)
        return b"".join(parts)

    # -- content -----------------------------------------------------------------------------
    def _read(self, node: int, message: Request, _length: int) -> object:
        _, offset, size, _, _, _, _ = wire.FUSE_READ_IN.unpack_from(message, BODY)
        if offset < 0 or size > MAX_WRITE_BYTES:
            raise os_error(errno.EINVAL)
        self._background_requests += 1
        self._cached[node] = True
        if self._short is not None:
            return self._short.read_pieces(node, offset, size)  # `writev` joins them
        return self._volume.read(node, offset, size)

    def _write(self, node: int, message: Request, length: int) -> object:
        _, offset, size, flags, _, open_flags, _ = wire.FUSE_WRITE_IN.unpack_from(message, BODY)
        data = memoryview(message)[WRITE_DATA_AT : WRITE_DATA_AT + size]
        if offset < 0 or WRITE_DATA_AT + size > length:
            raise os_error(errno.EINVAL)
        if flags & wire.FUSE_WRITE_CACHE:
            self._background_requests += 1
            if self._kernel_sets_times:
                return then(self._volume.getattr(node), lambda found: self._write_cached(found, offset, data))
            self._cached[node] = True
            return then(self._volume.write(node, offset, data), functools.partial(_whole, size))
        if size >= _PAGE_BYTES:
            self._cached[node] = False
        write: Callable[..., Any] = self._volume.write
        if open_flags & os.O_APPEND and self._appending is not None:
            write = self._append
        if not flags & wire.FUSE_WRITE_KILL_SUIDGID:
            return write(node, offset, data)

        def checked(found: Attributes) -> object:
            if not policy.has_set_id(found.mode):
                return write(node, offset, data)
            # The kernel does not expect that a write changes the mode, and would keep the cached one.
            answer = write(node, offset, data, kill_privileges=True)
            return then(answer, lambda written: self._invalidate_attributes(node) or written)

        return then(self._volume.getattr(node), checked)

    def _append(self, node: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> Any:
        """Write at the end of the file.  `offset` is where the kernel takes it to be, and has filled its pages."""
        assert self._appending is not None

        def check(appended: tuple[int, int]) -> int:
            written, size = appended
            if size != offset + written:
                self._invalidate_content(node)
            return written

        return then(self._appending.append(node, data, kill_privileges=kill_privileges), check)

    def _write_cached(self, found: Attributes, offset: int, data: memoryview) -> object:
        """Write back cached pages.  Their times are those of the write(2), which the kernel sends in a SETATTR.

        If they do not all fit, the file still gets the size that the kernel shows; what is missing reads as zeros when
        the kernel evicts the pages.  They are not invalidated here: FUSE_NOTIFY_INVAL_INODE waits for the file's other
        write-backs, and a daemon that is killed meanwhile never ends.
        """
        node, size, blocks = found.inode, len(data), found.blocks
        times = AttributeChanges(mtime_ns=found.mtime_ns, ctime_ns=found.ctime_ns)

        def finish(written: int) -> object:
            def check(after: Attributes) -> int:
                if after.blocks != blocks:  # the kernel does not maintain them, nor ask again
                    self._invalidate_attributes(node)
                return _whole(size, written)

            return then(self._volume.setattr(node, times), check)

        def refuse(error: Exception) -> object:
            def fail(_: object) -> object:
                raise error

            grown = times._replace(size=offset + size) if offset + size > found.size else times
            return then(self._volume.setattr(node, grown), fail)

        # The kernel removed capabilities at the write(2); those that were set since are to stay.
        capability = None if self._short is None else self._short.find_xattr(node, _CAPABILITY)

        def restore(written: int) -> object:
            if capability is None:
                return finish(written)
            return then(self._volume.setxattr(node, _CAPABILITY, capability, 0), lambda _: finish(written))

        return tried(lambda: then(self._volume.write(node, offset, data), restore), refuse)

    def _fallocate(self, node: int, message: Request, _length: int) -> object:
        _, offset, size, mode, _ = wire.FUSE_FALLOCATE_IN.unpack_from(message, BODY)
        return then(self._volume.fallocate(node, mode, offset, size), self._clear_set_id(node, message))

    def _lseek(self, node: int, message: Request, _length: int) -> object:
        _, offset, whence, _ = wire.FUSE_LSEEK_IN.unpack_from(message, BODY)
        return self._volume.seek(node, offset, whence)

    def _copy_file_range(self, node: int, message: Request, _length: int) -> object:
        _, offset, target, _, target_offset, size, _ = wire.FUSE_COPY_FILE_RANGE_IN.unpack_from(message, BODY)
        volume = self._volume
        if target >= FIRST_INODE and self._outer is not None:
            volume = self._outer
        copied = volume.copy_range(node, offset, target, target_offset, min(size, _MAX_COPY_BYTES))
        return then(copied, self._clear_set_id(target, message))

    def _fsync(self, node: int, message: Request, _length: int) -> object:
        _, flags, _ = wire.FUSE_FSYNC_IN.unpack_from(message, BODY)
        return self._volume.fsync(node, data_only=bool(flags & wire.FUSE_FSYNC_FDATASYNC))

    def _flush(self, node: int, _message: Request, _length: int) -> object:
        return self._volume.flush(node)

    # -- opens, if the volume wants to be asked ---------------------------------------------------
    def _open(self, node: int, message: Request, _length: int) -> object:
        flags, _ = wire.FUSE_OPEN_IN.unpack_from(message, BODY)
        return self._volume.open(node, flags)

    def _release(self, node: int, message: Request, _length: int) -> None:
        _, flags, _, _ = wire.FUSE_RELEASE_IN.unpack_from(message, BODY)
        self._volume.release(node, flags)

    # -- the rest ----------------------------------------------------------------------------
    def _statfs(self, _node: int, message: Request, _length: int) -> object:
        self._record_statfs(wire.IN_HEADER_ROUTE.unpack_from(message, 0)[3])
        return self._volume.statfs()

    def _interrupt(self, _node: int, message: Request, _length: int) -> None:
        self._cancel(wire.FUSE_INTERRUPT_IN.unpack_from(message, BODY)[0])

    def _accept(self, _node: int, _message: Request, _length: int) -> None:
        """Answer success without doing anything."""


# The opcodes whose requests change the volume.
_CHANGING: Final = frozenset(
    {
        Opcode.SETATTR, Opcode.MKNOD, Opcode.MKDIR, Opcode.SYMLINK, Opcode.LINK, Opcode.UNLINK, Opcode.RMDIR,
        Opcode.RENAME, Opcode.RENAME2, Opcode.TMPFILE, Opcode.WRITE, Opcode.FALLOCATE, Opcode.COPY_FILE_RANGE,
        Opcode.COPY_FILE_RANGE_64, Opcode.SETXATTR, Opcode.REMOVEXATTR,
    }
)  # fmt: skip
_CAPABILITY: Final = b"security.capability"
_DOTS: Final = frozenset({b".", b".."})
_DIRENTPLUS_BYTES: Final = wire.FUSE_DIRENTPLUS.size + 7  # without the name; entries are aligned to 8 bytes
# The kernel requests the first entries of a listing with their attributes, and later entries only if the program has
# looked an entry up by then.  If a listing takes many replies, a large first reply saves such a program little, and
# costs a program that only lists the most.
_LARGE_REPLIES: Final = 4
_SAMPLE_BYTES: Final = 16 << 10  # 100 entries
_SOUGHT_BYTES: Final = 2 << 10  # the reply to a reader that has moved: 12 entries with attributes, or 60 without


def _whole(size: int, written: int) -> int:
    """Return `written`, the answer to a write-back of `size` bytes.  OSError (ENOSPC) if it is less.

    The kernel ignores the count (fuse_writepage_end, fs/fuse/file.c), and fsync(2) or msync(2) would return 0.
    """
    if written < size:
        raise os_error(errno.ENOSPC)
    return written


def _split(strings: bytes) -> tuple[bytes, bytes]:
    """Split the two strings at the end of a message at the NUL between them."""
    first, separator, second = strings.partition(b"\0")
    if not separator:
        raise os_error(errno.EINVAL)
    return first, second


_CLEARS_SET_ID: Final = wire.FATTR_UID | wire.FATTR_GID | wire.FATTR_KILL_SUIDGID
_NOW: Final = wire.FATTR_ATIME_NOW | wire.FATTR_MTIME_NOW
_ANY_TIME: Final = _NOW | wire.FATTR_ATIME | wire.FATTR_MTIME | wire.FATTR_CTIME
_NO_TIMES: Final = (None, None, None)
_MTIME: Final = wire.FATTR_MTIME | wire.FATTR_MTIME_NOW
_PAGE_BYTES: Final = 4096


def _times(
    valid: int, atime: int, mtime: int, ctime: int, atime_ns: int, mtime_ns: int, ctime_ns: int
) -> tuple[int | None, int | None, int | None]:
    """Return the atime, mtime and ctime to set, in nanoseconds."""
    # All times that are set to the present, ctime too, are the same moment, as in the kernel's setattr_copy.
    now_ns = time.time_ns() if valid & _NOW else None
    return (
        now_ns if valid & wire.FATTR_ATIME_NOW else _time(valid & wire.FATTR_ATIME, atime, atime_ns),
        now_ns if valid & wire.FATTR_MTIME_NOW else _time(valid & wire.FATTR_MTIME, mtime, mtime_ns),
        _time(valid & wire.FATTR_CTIME, ctime, ctime_ns) if valid & wire.FATTR_CTIME else now_ns,
    )


def _time(given: int, seconds: int, nanoseconds: int) -> int | None:
    return seconds * 1_000_000_000 + nanoseconds if given else None


class ExtendedAttributes:
    """The requests for extended attributes over one volume.  Arguments as for `Operations`."""

    def __init__(self, volume: Volume, flags: InitFlag, invalidate_attributes: Callable[[int], None]) -> None:
        self._volume = volume
        self._invalidate_attributes = invalidate_attributes
        self._short = extended(volume) if volume.capabilities.shortcuts else None
        is_extended = InitFlag.SETXATTR_EXT in flags
        self._set_in = wire.FUSE_SETXATTR_IN if is_extended else wire.FUSE_SETXATTR_IN_COMPAT
        self.set_bytes = self._set_in.size
        self._kernel_knows_acls = InitFlag.POSIX_ACL in flags  # it expects that setting an ACL changes the mode

    def get(self, node: int, message: Request, length: int) -> object:
        size, name = wire.GETXATTR_NAME[length](message, BODY)
        if self._short is not None:
            value = self._short.find_xattr(node, name)
            return None if value is None else _sized(value, size)
        return then(self._volume.getxattr(node, name), lambda value: _sized(value, size))

    def list(self, node: int, message: Request, _length: int) -> object:
        size, _ = wire.FUSE_GETXATTR_IN.unpack_from(message, BODY)
        uid, _, _ = wire.IN_HEADER_CALLER.unpack_from(message, 0)

        def pack(names: Sequence[bytes]) -> bytes:
            return _sized(b"".join(name + b"\0" for name in policy.visible_xattrs(names, uid)), size)

        return then(self._volume.listxattr(node), pack)

    def set(self, node: int, message: Request, length: int) -> object:
        size, flags, *more = self._set_in.unpack_from(message, BODY)
        start = BODY + self._set_in.size
        end = message.find(b"\0", start, length)
        if end < 0 or end + 1 + size > length:
            raise os_error(errno.EINVAL)
        name, value = bytes(message[start:end]), bytes(message[end + 1 : end + 1 + size])
        answer = self._volume.setxattr(node, name, value, flags)
        if name == policy.ACL_ACCESS and not self._kernel_knows_acls:
            return then(answer, lambda _: self._invalidate_attributes(node))
        if more and more[0] & wire.FUSE_SETXATTR_ACL_KILL_SGID and name == policy.ACL_ACCESS:
            return then(answer, lambda _: self._clear_sgid(node))
        return answer

    def _clear_sgid(self, node: int) -> object:
        def clear(found: Attributes) -> object:
            changes = policy.clear_sgid(found)
            return None if changes is None else self._volume.setattr(node, changes)

        return then(self._volume.getattr(node), clear)

    def remove(self, node: int, message: Request, length: int) -> object:
        (name,) = wire.NAME[length](message, BODY)
        return self._volume.removexattr(node, name)


def _sized(value: bytes, size: int) -> bytes:
    """Pack an extended attribute for a caller whose buffer has `size` bytes; 0 requests the length only."""
    if size == 0:
        return wire.FUSE_GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise os_error(errno.ERANGE)
    return value
