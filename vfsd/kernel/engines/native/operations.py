"""One method for each opcode: reads the request's body, calls the volume, returns what it answers.

`Operations.table` says for each opcode how long its body is at least, which method handles it and which
of `Replies` packs the answer.  A method returns the volume's answer as it is, awaitable or not; only the
session (`session.py`) knows how to wait.  Where a request bears on the reply (a size limit), the method
answers with the finished body instead.

A message is the session's buffer, which the next request overwrites: everything kept is copied, but for
the data of WRITE, where the session gives the buffer away when the volume answers with an awaitable.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import trio

from protocol.errors import os_error
from protocol.volume import (
    Answer,
    AttributeChanges,
    Attributes,
    Buffer,
    Caller,
    ContentPiecesVolume,
    FlushingVolume,
    PlainEntriesVolume,
    PlainEntry,
    QuietLookupsVolume,
    Volume,
)
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.negotiation import MAX_WRITE_BYTES
from vfsd.kernel.engines.native.replies import Message, Replies, dirents
from vfsd.kernel.engines.native.wire import Opcode

__all__ = ["BODY", "Handler", "Operations"]

T = TypeVar("T")
Request = bytearray  # the buffer, of which the first `length` bytes are the message
Method = Callable[[int, Request, int], Any]

BODY: Final = wire.IN_HEADER_BYTES
_new: Final = tuple.__new__  # a named tuple's own constructor takes three times as long
_SMALL_WRITE_BYTES: Final = 80 + 4096  # a page, with what stands before it
_TRUSTED: Final = b"trusted."
_ACL_ACCESS: Final = b"system.posix_acl_access"
_ANYBODY_EXECUTES: Final = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
# A copy runs to its end before the next request is answered; copy_file_range(2) may be short.
_MAX_COPY_BYTES: Final = 64 * 1024 * 1024


class Handler(NamedTuple):
    """How one opcode is handled: the least length of its message, the method, and what packs the answer."""

    least: int
    method: Method
    reply: Callable[[int, Any], Message]


class Operations:
    """The opcodes over one volume.

    `umask_is_ours`: the kernel leaves the umask to the volume (DONT_MASK).  `long_setxattr`: SETXATTR comes in its
    extended form (SETXATTR_EXT).  `kernel_knows_acls`: it expects that setting one changes the mode (POSIX_ACL).
    `drop` ends the wait of an interrupted request.  `forget_attributes` makes the kernel ask for an inode's
    attributes again.
    """

    def __init__(
        self,
        volume: Volume,
        replies: Replies,
        *,
        umask_is_ours: bool = False,
        long_setxattr: bool = False,
        kernel_knows_acls: bool = True,
        xattrs: bool = True,
        drop: Callable[[int], None] = lambda _unique: None,
        forget_attributes: Callable[[int], None] = lambda _inode: None,
    ) -> None:
        self._volume = volume
        self.replies = replies
        self._umask_is_ours = umask_is_ours
        self._setxattr_in = wire.FUSE_SETXATTR_IN if long_setxattr else wire.FUSE_SETXATTR_IN_COMPAT
        capabilities = volume.capabilities
        # The volume, if it has the shortcut.
        self._quiet = cast("QuietLookupsVolume", volume) if capabilities.quiet_lookups else None
        self._plain = cast("PlainEntriesVolume", volume) if capabilities.plain_entries else None
        self._pieces = cast("ContentPiecesVolume", volume) if capabilities.content_pieces else None
        self._kernel_knows_acls = kernel_knows_acls
        self._xattrs = xattrs
        self._drop = drop
        self._forget_attributes = forget_attributes
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
            # What the volume has is in the volume; the kernel has written back before it sends this.
            (Opcode.SYNCFS, 0, self._accept, r.done),
            # Sent for the handle of a TMPFILE only: other opens have none.
            (Opcode.RELEASE, 0, self._accept, r.done),
            (Opcode.RELEASEDIR, 0, self._accept, r.done),
            (Opcode.DESTROY, 0, self._accept, r.done),
        ]
        if self._xattrs:
            rows += (
                (Opcode.GETXATTR, wire.FUSE_GETXATTR_IN.size + 2, self._getxattr, r.attribute),
                (Opcode.SETXATTR, self._setxattr_in.size + 2, self._setxattr, r.done),
                (Opcode.LISTXATTR, wire.FUSE_GETXATTR_IN.size, self._listxattr, r.body),
                (Opcode.REMOVEXATTR, 2, self._removexattr, r.done),
            )
        if self._volume.capabilities.flush:
            rows.append((Opcode.FLUSH, 0, self._flush, r.done))
        if self._volume.capabilities.durable:
            rows.append((Opcode.FSYNC, wire.FUSE_FSYNC_IN.size, self._fsync, r.done))
            rows.append((Opcode.FSYNCDIR, wire.FUSE_FSYNC_IN.size, self._fsync, r.done))
        # OPEN, OPENDIR, CREATE and mostly FLUSH are not here, nor is BMAP, IOCTL or POLL: ENOSYS to the first
        # of them makes the kernel do them alone for as long as the mount lives.  Opens then keep caches, and a
        # CREATE becomes a MKNOD.
        return {int(opcode): Handler(BODY + least, method, reply) for opcode, least, method, reply in rows}

    # -- inodes ------------------------------------------------------------------------------
    def _lookup(self, node: int, message: Request, length: int) -> object:
        (name,) = wire.NAME[length](message, BODY)
        return self._volume.lookup(node, name) if self._quiet is None else self._quiet.find(node, name)

    def _forget(self, node: int, message: Request, _length: int) -> None:
        self._volume.forget(node, wire.FUSE_FORGET_IN.unpack_from(message, BODY)[0])

    def _batch_forget(self, _node: int, message: Request, length: int) -> None:
        count, _ = wire.FUSE_BATCH_FORGET_IN.unpack_from(message, BODY)
        start = BODY + wire.FUSE_BATCH_FORGET_IN.size
        end = start + min(count, (length - start) // wire.FUSE_FORGET_ONE.size) * wire.FUSE_FORGET_ONE.size
        forget = self._volume.forget
        for node, lookups in wire.FUSE_FORGET_ONE.iter_unpack(memoryview(message)[start:end]):
            forget(node, lookups)

    def _getattr(self, node: int, _message: Request, _length: int) -> object:
        return self._volume.getattr(node)

    def _access(self, node: int, message: Request, _length: int) -> object:
        """access(2) and chdir(2) of root, where the kernel checks nothing: it only may not execute what nobody may."""
        mask, _ = wire.FUSE_ACCESS_IN.unpack_from(message, BODY)

        def check(found: Attributes) -> None:
            if mask & os.X_OK and not stat.S_ISDIR(found.mode) and not found.mode & _ANYBODY_EXECUTES:
                raise os_error(errno.EACCES)

        return _then(self._volume.getattr(node), check)

    def _setattr(self, node: int, message: Request, _length: int) -> object:
        (
            valid, _, _, size, _, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns, mode, _, uid, gid, _
        ) = wire.FUSE_SETATTR_IN.unpack_from(message, BODY)  # fmt: skip
        if valid == _MODE_ONLY:  # chmod(2): by the same way as the others it would take a fifth longer
            return self._volume.setattr(node, _new(AttributeChanges, (mode & 0o7777, *_NO_CHANGES_BUT_MODE)))
        if not valid & ~wire.FATTR_FH:
            return self._set_nothing(node, message)
        if valid & wire.FATTR_SIZE and (valid & wire.FATTR_FH or not size):
            # ftruncate(2) and O_TRUNC set mtime also where the size stays (do_truncate, fs/open.c), truncate(2)
            # does not; O_TRUNC comes without a handle, so that truncate(2) to 0 looks the same.
            valid |= wire.FATTR_MTIME_NOW
        times = _times(valid, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns) if valid & _ANY_TIME else _NO_TIMES
        changes = _new(
            AttributeChanges,
            (
                mode & 0o7777 if valid & wire.FATTR_MODE else None,
                uid if valid & wire.FATTR_UID else None,
                gid if valid & wire.FATTR_GID else None,
                size if valid & wire.FATTR_SIZE else None,
                *times,
                # HANDLE_KILLPRIV_V2 leaves a chown to us wholly; for a truncate the kernel says.
                valid & _KILLS != 0,
            ),
        )
        return self._volume.setattr(node, changes)

    def _set_nothing(self, node: int, message: Request) -> object:
        """A chown to (-1, -1), or a kernel that found suid or sgid to clear (file_remove_privs, fs/inode.c).

        Both clear.  But the kernel lets a stranger's chown pass, which must not.
        """
        uid, _, _ = wire.IN_HEADER_CALLER.unpack_from(message, 0)
        return _then(
            self._volume.getattr(node),
            lambda found: self._volume.setattr(node, AttributeChanges(kill_privileges=uid in {0, found.uid})),
        )

    def _kill_privileges(self, node: int, message: Request) -> Callable[[T], object]:
        """What a change of content by the caller of `message` does to the suid and sgid of `node`, after it is made."""
        uid, _, _ = wire.IN_HEADER_CALLER.unpack_from(message, 0)

        def kill(result: T) -> object:
            def clear(found: Attributes) -> object:
                if not found.mode & (stat.S_ISUID | stat.S_ISGID):
                    return result
                changes = AttributeChanges(
                    kill_privileges=True, ctime_ns=found.ctime_ns
                )  # that of the change of content
                return _then(self._volume.setattr(node, changes), lambda _: result)

            # Root stands for CAP_FSETID.
            return result if uid == 0 else _then(self._volume.getattr(node), clear)

        return kill

    def _readlink(self, node: int, _message: Request, _length: int) -> object:
        return self._volume.readlink(node)

    # -- directory entries -------------------------------------------------------------------
    def _caller(self, message: Request, umask: int) -> Caller:
        uid, gid, pid = wire.IN_HEADER_CALLER.unpack_from(message, 0)
        return _new(Caller, (uid, gid, umask if self._umask_is_ours else 0, pid))

    def _mknod(self, node: int, message: Request, length: int) -> object:
        uid, gid, pid, mode, rdev, umask, name = wire.MKNOD_FROM_CALLER[length](message, wire.CALLER_AT)
        caller = _new(Caller, (uid, gid, umask if self._umask_is_ours else 0, pid))
        return self._volume.mknod(node, name, mode, rdev, caller)

    def _mkdir(self, node: int, message: Request, length: int) -> object:
        uid, gid, pid, mode, umask, name = wire.MKDIR_FROM_CALLER[length](message, wire.CALLER_AT)
        caller = _new(Caller, (uid, gid, umask if self._umask_is_ours else 0, pid))
        return self._volume.mkdir(node, name, mode, caller)

    def _symlink(self, node: int, message: Request, length: int) -> object:
        name, target = _two(*wire.NAME[length](message, BODY))
        return self._volume.symlink(node, name, target, self._caller(message, 0))

    def _link(self, node: int, message: Request, length: int) -> object:
        (inode,) = wire.FUSE_LINK_IN.unpack_from(message, BODY)
        return self._volume.link(inode, node, bytes(message[48 : length - 1]))

    def _unlink(self, node: int, message: Request, length: int) -> object:
        (name,) = wire.NAME[length](message, BODY)
        return self._volume.unlink(node, name)

    def _rmdir(self, node: int, message: Request, length: int) -> object:
        (name,) = wire.NAME[length](message, BODY)
        return self._volume.rmdir(node, name)

    def _rename(self, node: int, message: Request, length: int) -> object:
        (new_parent,) = wire.FUSE_RENAME_IN.unpack_from(message, BODY)
        name, new_name = _two(bytes(message[48 : length - 1]))
        return self._volume.rename(node, name, new_parent, new_name)

    def _rename2(self, node: int, message: Request, length: int) -> object:
        new_parent, flags, names = wire.RENAME2_NAMES[length](message, BODY)
        name, new_name = _two(names)
        if not flags:
            return self._volume.rename(node, name, new_parent, new_name)
        return self._volume.rename(node, name, new_parent, new_name, flags, self._caller(message, 0))

    def _tmpfile(self, node: int, message: Request, _length: int) -> object:
        _, mode, umask, _ = wire.FUSE_CREATE_IN.unpack_from(message, BODY)
        return self._volume.tmpfile(node, mode, self._caller(message, umask))

    def _readdir(self, node: int, message: Request, _length: int) -> object:
        _, cookie, size, _, _, _, _ = wire.FUSE_READDIR_IN.unpack_from(message, BODY)
        size = min(size, MAX_WRITE_BYTES)
        return _then(self._entries(node, cookie), lambda entries: dirents(entries, size))

    def _entries(self, node: int, cookie: int) -> Answer[Iterator[PlainEntry]]:
        return self._volume.readdir(node, cookie) if self._plain is None else self._plain.entries(node, cookie)

    def _readdirplus(self, node: int, message: Request, _length: int) -> object:
        _, cookie, size, _, _, _, _ = wire.FUSE_READDIR_IN.unpack_from(message, BODY)
        size = min(size, MAX_WRITE_BYTES)
        plain = self._plain
        if not cookie and plain is not None and plain.entry_count(node) * _ROOM_BUT_FOR_NAME > _LARGE * size:
            size = min(size, _SAMPLE_BYTES)
        entries = self._entries(node, cookie)
        if isinstance(entries, Awaitable):
            return self._readdirplus_later(node, entries, size)
        return self._direntsplus(node, entries, size)

    async def _readdirplus_later(self, node: int, entries: Awaitable[Iterator[PlainEntry]], size: int) -> Buffer:
        listing = self._direntsplus(node, await entries, size)
        return await listing if isinstance(listing, Awaitable) else listing

    def _direntsplus(self, node: int, entries: Iterator[PlainEntry], size: int) -> bytes | Coroutine[Any, Any, bytes]:
        """The entries that fit into `size` bytes, each with its attributes and a lookup of its own."""
        pack, quiet = self.replies.direntplus, self._quiet
        lookup = self._volume.lookup if quiet is None else quiet.find
        parts: list[bytes] = []
        waiting: list[tuple[int, PlainEntry, Awaitable[Attributes]]] = []
        for entry in entries:
            name = entry[0]
            size -= (_ROOM_BUT_FOR_NAME + len(name)) & ~7
            if size < 0:
                break
            found: Any = None
            if name not in _DOTS:
                try:
                    found = lookup(node, name)
                except OSError:
                    pass  # it goes without attributes, and whoever asks for them learns why
            if found is None:
                parts.append(self.replies.direntplus_bare(entry))
            elif quiet is not None or not hasattr(found, "__await__"):
                parts.append(pack(found, entry))
            else:
                waiting.append((len(parts), entry, found))
                parts.append(self.replies.direntplus_bare(entry))
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
        if self._pieces is not None:
            return self._pieces.read_pieces(node, offset, size)  # `writev` joins them
        return self._volume.read(node, offset, size)

    def _write(self, node: int, message: Request, length: int) -> object:
        data: Buffer
        if length <= _SMALL_WRITE_BYTES:  # copying them takes less time than looking at them in place
            offset, size, flags, data = wire.WRITE_DATA[length](message, BODY)
            if size < len(data):
                data = data[:size]
        else:
            _, offset, size, flags, _, _, _ = wire.FUSE_WRITE_IN.unpack_from(message, BODY)
            data = memoryview(message)[80 : 80 + size]
        if offset < 0 or 80 + size > length:
            raise os_error(errno.EINVAL)
        if not flags & wire.FUSE_WRITE_KILL_SUIDGID:
            return self._volume.write(node, offset, data)

        def kill(found: Attributes) -> object:
            if not found.mode & (stat.S_ISUID | stat.S_ISGID):
                return self._volume.write(node, offset, data)
            # The kernel does not expect the mode to change, and shows who asks for nothing else the one it has.
            answer = self._volume.write(node, offset, data, kill_privileges=True)
            return _then(answer, lambda written: self._forget_attributes(node) or written)

        return _then(self._volume.getattr(node), kill)

    def _fallocate(self, node: int, message: Request, _length: int) -> object:
        _, offset, size, mode, _ = wire.FUSE_FALLOCATE_IN.unpack_from(message, BODY)
        return _then(self._volume.fallocate(node, mode, offset, size), self._kill_privileges(node, message))

    def _lseek(self, node: int, message: Request, _length: int) -> object:
        _, offset, whence, _ = wire.FUSE_LSEEK_IN.unpack_from(message, BODY)
        return self._volume.seek(node, offset, whence)

    def _copy_file_range(self, node: int, message: Request, _length: int) -> object:
        _, offset, target, _, target_offset, size, _ = wire.FUSE_COPY_FILE_RANGE_IN.unpack_from(message, BODY)
        copied = self._volume.copy_range(node, offset, target, target_offset, min(size, _MAX_COPY_BYTES))
        return _then(copied, self._kill_privileges(target, message))

    def _fsync(self, node: int, message: Request, _length: int) -> object:
        _, flags, _ = wire.FUSE_FSYNC_IN.unpack_from(message, BODY)
        return self._volume.fsync(node, data_only=bool(flags & wire.FUSE_FSYNC_FDATASYNC))

    def _flush(self, node: int, _message: Request, _length: int) -> object:
        return cast("FlushingVolume", self._volume).flush(node)

    # -- the rest ----------------------------------------------------------------------------
    def _statfs(self, _node: int, _message: Request, _length: int) -> object:
        return self._volume.statfs()

    def _getxattr(self, node: int, message: Request, length: int) -> object:
        size, name = wire.GETXATTR_NAME[length](message, BODY)
        if self._quiet is not None:
            value = self._quiet.find_xattr(node, name)
            return None if value is None else _sized(value, size)
        return _then(self._volume.getxattr(node, name), lambda value: _sized(value, size))

    def _listxattr(self, node: int, message: Request, _length: int) -> object:
        size, _ = wire.FUSE_GETXATTR_IN.unpack_from(message, BODY)
        uid, _, _ = wire.IN_HEADER_CALLER.unpack_from(message, 0)

        def visible(names: Sequence[bytes]) -> bytes:
            # To whom the kernel would give none of them, trusted names are not shown (simple_xattr_list, fs/xattr.c).
            shown = names if uid == 0 else [name for name in names if not name.startswith(_TRUSTED)]
            return _sized(b"".join(name + b"\0" for name in shown), size)

        return _then(self._volume.listxattr(node), visible)

    def _setxattr(self, node: int, message: Request, length: int) -> object:
        size, flags, *more = self._setxattr_in.unpack_from(message, BODY)
        start = BODY + self._setxattr_in.size
        end = message.find(b"\0", start, length)
        if end < 0 or end + 1 + size > length:
            raise os_error(errno.EINVAL)
        name, value = bytes(message[start:end]), bytes(message[end + 1 : end + 1 + size])
        answer = self._volume.setxattr(node, name, value, flags)
        if name == _ACL_ACCESS and not self._kernel_knows_acls:
            return _then(answer, lambda _: self._forget_attributes(node))
        if more and more[0] & wire.FUSE_SETXATTR_ACL_KILL_SGID and name == _ACL_ACCESS:
            return _then(answer, lambda _: self._clear_sgid(node))
        return answer

    def _clear_sgid(self, node: int) -> object:
        def clear(found: Attributes) -> object:
            if not found.mode & stat.S_ISGID:
                return None
            return self._volume.setattr(node, AttributeChanges(mode=stat.S_IMODE(found.mode) & ~stat.S_ISGID))

        return _then(self._volume.getattr(node), clear)

    def _removexattr(self, node: int, message: Request, length: int) -> object:
        return self._volume.removexattr(node, bytes(message[40 : length - 1]))

    def _interrupt(self, _node: int, message: Request, _length: int) -> None:
        self._drop(wire.FUSE_INTERRUPT_IN.unpack_from(message, BODY)[0])

    def _accept(self, _node: int, _message: Request, _length: int) -> None:
        """Nothing to do, and that is well."""


_DOTS: Final = frozenset({b".", b".."})
_ROOM_BUT_FOR_NAME: Final = wire.FUSE_DIRENTPLUS.size + 7  # entries are aligned to 8 bytes
# The kernel asks for the first entries of a listing with their attributes, and for the rest only if by then somebody
# has looked at one.  In a directory of many replies that saves him little, and costs those who only list the most.
_LARGE: Final = 4  # replies
_SAMPLE_BYTES: Final = 16 << 10  # 100 entries


def _then(answer: T | Awaitable[T], change: Callable[[T], object]) -> object:
    """`change(answer)`, now or once `answer` is there."""
    # Not isinstance: asking an abstract class takes longer than most changes.
    return _after(cast("Awaitable[T]", answer), change) if hasattr(answer, "__await__") else change(answer)


async def _after(answer: Awaitable[T], change: Callable[[T], object]) -> object:
    result = change(await answer)
    return await result if isinstance(result, Awaitable) else result


def _two(strings: bytes) -> tuple[bytes, bytes]:
    """The two strings that a message ends in, which a NUL parts."""
    first, separator, second = strings.partition(b"\0")
    if not separator:
        raise os_error(errno.EINVAL)
    return first, second


def _sized(value: bytes, size: int) -> bytes:
    """An attribute's value for a caller with room for `size` bytes; 0 asks for the length only."""
    if size == 0:
        return wire.FUSE_GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise os_error(errno.ERANGE)
    return value


_MODE_ONLY: Final = wire.FATTR_MODE
_NO_CHANGES_BUT_MODE: Final = AttributeChanges()[1:]
_KILLS: Final = wire.FATTR_UID | wire.FATTR_GID | wire.FATTR_KILL_SUIDGID
_NOW: Final = wire.FATTR_ATIME_NOW | wire.FATTR_MTIME_NOW
_ANY_TIME: Final = _NOW | wire.FATTR_ATIME | wire.FATTR_MTIME | wire.FATTR_CTIME
_NO_TIMES: Final = (None, None, None)


def _times(
    valid: int, atime: int, mtime: int, ctime: int, atime_ns: int, mtime_ns: int, ctime_ns: int
) -> tuple[int | None, int | None, int | None]:
    """atime, mtime and ctime to be set, in nanoseconds."""
    # One moment for all that is set to the present, ctime too, as the kernel's own setattr_copy has it.
    now_ns = time.time_ns() if valid & _NOW else None
    return (
        now_ns if valid & wire.FATTR_ATIME_NOW else _time(valid & wire.FATTR_ATIME, atime, atime_ns),
        now_ns if valid & wire.FATTR_MTIME_NOW else _time(valid & wire.FATTR_MTIME, mtime, mtime_ns),
        _time(valid & wire.FATTR_CTIME, ctime, ctime_ns) if valid & wire.FATTR_CTIME else now_ns,
    )


def _time(given: int, seconds: int, nanoseconds: int) -> int | None:
    return seconds * 1_000_000_000 + nanoseconds if given else None
