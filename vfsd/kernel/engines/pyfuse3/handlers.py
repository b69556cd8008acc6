"""Maps the requests of pyfuse3 to calls on a volume.

A file handle (`fh`) of a file is a key of `Handlers._opened`, which has the inode and the opener; that of a directory
is its inode.

Threading: the handlers run on the trio loop.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, cast

import pyfuse3
import trio

from protocol.errors import DeniedByPolicyError, NotReadyError, SnapshotNotFoundError, errno_of, os_error
from protocol.volume import (
    RENAME_EXCHANGE,
    Answer,
    AttributeChanges,
    Attributes,
    Caller,
    Volume,
    extended,
)
from vfsd.kernel.engines import policy
from vfsd.kernel.engines.base import (
    ChangeObserver,
    EngineSettings,
    Impersonator,
    ListingPositions,
    attribute_change,
    repeated,
)

_logger = logging.getLogger(__name__)

# Stands for no limit: about 30 years.  The kernel takes seconds as u64 and caps them at MAX_SEC_IN_JIFFIES.
_FOREVER_S: Final = 1e9
_BLOCK_BYTES: Final = 4096  # st_blksize: a page, the unit of the kernel's cache
_MAX_REQUESTS_BEFORE_RETRY: Final = 64
_SOUGHT_ENTRIES: Final = 12  # in the reply to a reader of a directory that has moved
_SIZES_KEPT: Final = 16

P = ParamSpec("P")
R = TypeVar("R")


def _handler(
    method: Callable[Concatenate[Handlers, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Handlers, P], Coroutine[Any, Any, R]]:
    """Wrap a request handler: count it, and convert every exception to FUSEError.

    Retries once after ENOSPC.  The kernel sends the FORGET that frees an unlinked file's space after the unlink, so it
    may be read after the next request of the same program; on a local file system that request would have the space.  A
    volume that raises ENOSPC has changed nothing.
    """

    @functools.wraps(method)
    async def handle(self: Handlers, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.requests += 1
        number = self.requests
        self.in_progress.add(number)
        try:
            again = functools.partial(method, self, *args, **kwargs)
            try:
                return await method(self, *args, **kwargs)
            except NotReadyError as error:
                # It has changed nothing, so nothing has to wait for it.
                self.in_progress.discard(number)
                return await repeated(again, error)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            await self._wait_for_forgets()
            return await repeated(again)
        except pyfuse3.FUSEError:
            raise
        except DeniedByPolicyError as error:
            self.report_denial(error, args)
            raise _fuse_error(error, method.__name__) from None
        except Exception as error:  # noqa: BLE001 - an exception that leaks ends pyfuse3's loop
            raise _fuse_error(error, method.__name__) from None
        finally:
            self.in_progress.discard(number)

    return handle


def _fuse_error(error: Exception, operation: str) -> pyfuse3.FUSEError:
    code = errno_of(error)
    if code is None:
        _logger.error("unexpected error in %s, answered with EIO", operation, exc_info=error)
        code = errno.EIO
    return pyfuse3.FUSEError(code)


class _OpenFile(NamedTuple):
    """A file behind a handle.  `clears_set_id`: writes through it clear set-id bits.  `flags`: of open(2)."""

    inode: int
    clears_set_id: bool
    thread: int  # of the opener
    opener: object  # as the observer identified it
    flags: int


class Handlers(pyfuse3.Operations):
    """Maps pyfuse3's handlers to a volume."""

    supports_dot_lookup = False  # only NFS export uses it
    enable_writeback_cache = False  # a write that returned is in the volume

    def __init__(self, volume: Volume, settings: EngineSettings, impersonator: Impersonator | None) -> None:
        self.requests = 0
        self.in_progress: set[int] = set()  # numbers of requests
        self.background_requests = 0  # so many that the kernel may have sent from its background queue
        self.record_statfs: Callable[[int], None] = lambda _thread_id: None  # set by the engine
        # Set by the engine: whether the device holds requests, and the invalidation of cached attributes, and of pages.
        self.is_readable: Callable[[], bool] = lambda: False
        self.invalidate_attributes: Callable[[int], None] = lambda _inode: None
        self.invalidate_content: Callable[[int], None] = lambda _inode: None
        self.written_back: Callable[[], NotReadyError]  # set by the engine: see `vfsd.kernel.engines.base`
        self._cleaned: set[int] = set()  # whose dirty pages were written back for the request that comes again
        self.observer: ChangeObserver | None = None  # set by the engine
        self._opened: dict[int, _OpenFile] = {}
        self._positions = ListingPositions()
        self._last_handle = 0
        self._volume = volume
        self._opening = extended(volume) if volume.capabilities.opens else None
        self._appending = extended(volume) if volume.capabilities.appends else None
        self._kernel_sizes: dict[int, tuple[int, ...]] = {}  # of each file that the kernel knows: see `_appends`
        self._flush = extended(volume).flush if volume.capabilities.flush else None
        self._xattrs = settings.xattrs
        self.enable_acl = settings.xattrs and volume.capabilities.acls
        self._impersonator = impersonator
        self._timeout_s = min(settings.cache_timeout_s, _FOREVER_S)
        # Absence is cached only if no one except this daemon can create the name.
        self._absent: pyfuse3.EntryAttributes | None = None
        if settings.cache_timeout_s >= _FOREVER_S:
            self._absent = pyfuse3.EntryAttributes()
            self._absent.st_ino = 0
            self._absent.entry_timeout = self._timeout_s

    # -- helpers -------------------------------------------------------------------------------
    def _volume_for(self, ctx: pyfuse3.RequestContext) -> tuple[Volume, float]:
        """Return the volume that answers this caller, and for how many seconds the kernel may cache the answer."""
        other = self._impersonator
        # Requests of the kernel itself have pid 0, and so has an impersonator without a thread.
        if other is not None and ctx.pid and ctx.pid == other.thread_id:
            return other.volume, 0.0
        return self._volume, self._timeout_s

    def _observer_of(self, volume: Volume) -> ChangeObserver | None:
        """The observer, for a change of `volume`; None if an impersonator's volume only pretends to make it."""
        return self.observer if volume is self._volume else None

    def report_denial(self, error: DeniedByPolicyError, arguments: Sequence[object]) -> None:
        """Report a request that the policy refused."""
        if self.observer is None:
            return
        thread = 0
        for argument in arguments:
            if isinstance(argument, pyfuse3.RequestContext):
                thread = argument.pid
        if error.attempt == "write" and arguments:
            opened = self._opened.get(cast("int", arguments[0]))  # WRITE names a handle, and no process
            thread = 0 if opened is None else opened.thread
        self.observer.denied(error.attempt, thread, error.path)

    def _entry_changed(
        self, volume: Volume, change: str, ctx: pyfuse3.RequestContext, parent: int, name: bytes
    ) -> None:
        """Report a change of `name` in `parent` to the observer."""
        observer = self._observer_of(volume)
        if observer is not None:
            observer.entry_changed(change, ctx.pid, parent, name)

    def _fill(self, attributes: Attributes, timeout_s: float) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = attributes.inode
        entry.generation = attributes.generation
        entry.entry_timeout = entry.attr_timeout = timeout_s
        entry.st_mode = attributes.mode
        entry.st_nlink = attributes.nlink
        entry.st_uid = attributes.uid
        entry.st_gid = attributes.gid
        entry.st_rdev = attributes.rdev
        entry.st_size = attributes.size
        if self._appending is not None and stat.S_ISREG(attributes.mode):
            self._kernel_got_size(attributes.inode, attributes.size)
        entry.st_blksize = _BLOCK_BYTES
        entry.st_blocks = attributes.blocks
        entry.st_atime_ns = attributes.atime_ns
        entry.st_mtime_ns = attributes.mtime_ns
        entry.st_ctime_ns = attributes.ctime_ns
        return entry

    def _kernel_got_size(self, inode: int, size: int) -> None:
        """Note that the kernel may have this size of a file from now on, or one of those before."""
        sizes = self._kernel_sizes.get(inode)
        if sizes is None:
            self._kernel_sizes[inode] = (size,)
        elif size != sizes[-1]:
            self._kernel_sizes[inode] = (*sizes[1 - _SIZES_KEPT :], size)

    def _kernel_grew(self, inode: int, end: int) -> None:
        """Note that the kernel has written up to `end`."""
        sizes = self._kernel_sizes.get(inode, ())
        if len(sizes) > 1:
            self._kernel_got_size(inode, end)
        elif sizes and sizes[0] < end:
            self._kernel_sizes[inode] = (end,)

    def _appends(self, opened: _OpenFile, offset: int) -> bool:
        """Whether a write at `offset` is one at the end of the file, which libfuse does not say.

        The kernel appends at the size that it has.  Other offsets are those of pages of a mapping, or of writes after
        fcntl(2) removed O_APPEND.  While another program changes the size, it is not certain which size the kernel has:
        it may have sent the request before it got the last one, or have dropped that.
        """
        return bool(opened.flags & os.O_APPEND) and offset in self._kernel_sizes.get(opened.inode, ())

    async def _wait_for_forgets(self) -> None:
        """Let other tasks read the requests in the device, up to `_MAX_REQUESTS_BEFORE_RETRY` of them.

        A FORGET counts as a request here.  The kernel delivers at most eight requests before the FORGETs that wait
        (fuse_dev_do_read, fs/fuse/dev.c), so even a device that is never empty has delivered them.
        """
        last = self.requests + _MAX_REQUESTS_BEFORE_RETRY
        while self.requests < last and self.is_readable():
            await trio.lowlevel.checkpoint()

    def _may_be_dirty(self, inode: int) -> bool:
        """Whether a program may have stored through a shared mapping; False for the request that comes again."""
        if inode in self._cleaned:
            self._cleaned.remove(inode)
            return False
        if any(each.inode == inode and each.flags & os.O_ACCMODE == os.O_RDWR for each in self._opened.values()):
            self._cleaned.add(inode)
            return True
        return False

    async def _has_set_id(self, inode: int) -> bool:
        return policy.has_set_id((await _result(self._volume.getattr(inode))).mode)

    # -- inodes --------------------------------------------------------------------------------
    @_handler
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        volume, timeout_s = self._volume_for(ctx)
        try:
            found = volume.lookup(parent_inode, name)
            return self._fill(await found if isinstance(found, Awaitable) else found, timeout_s)
        except FileNotFoundError as error:
            if self._absent is None or not timeout_s or isinstance(error, SnapshotNotFoundError):
                raise
            return self._absent

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self.requests += 1
        for inode, count in inode_list:
            self._kernel_sizes.pop(inode, None)
            try:
                self._volume.forget(inode, count)
            except Exception:  # FORGET has no reply
                _logger.exception("forget of inode %d failed", inode)

    @_handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        volume, timeout_s = self._volume_for(ctx)
        return self._fill(await _result(volume.getattr(inode)), timeout_s)

    @_handler
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        volume, timeout_s = self._volume_for(ctx)
        if fields.update_mtime and not fields.update_size and self._may_be_dirty(inode):
            raise self.written_back()
        chown = fields.update_uid or fields.update_gid
        # ftruncate(2) sets mtime even if the size stays, truncate(2) does not (do_truncate, fs/open.c).
        now_ns = time.time_ns() if fields.update_size and fh is not None else None
        changes = AttributeChanges(
            mode=attr.st_mode & policy.PERMISSIONS if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else now_ns,
            ctime_ns=attr.st_ctime_ns if fields.update_ctime else now_ns,
            # chown(2) clears set-id bits for every caller, truncate(2) only without CAP_FSETID (fs/open.c).
            kill_privileges=chown or (fields.update_size and not policy.may_keep_set_id(ctx.uid)),
        )
        filled = self._fill(await _result(volume.setattr(inode, changes)), timeout_s)
        if fields.update_size and self._appending is not None:
            self._kernel_sizes[inode] = (filled.st_size,)
        change = attribute_change(
            size=fields.update_size,
            owner=chown,
            mode=fields.update_mode,
            times=fields.update_atime or fields.update_mtime,
        )
        observer = self._observer_of(volume)
        if observer is not None and change is not None:
            observer.inode_changed(change, ctx.pid, inode)
        return filled

    @_handler
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:  # noqa: ARG002
        return await _result(self._volume.readlink(inode))

    # -- directory entries ---------------------------------------------------------------------
    @_handler
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        volume, timeout_s = self._volume_for(ctx)
        made = self._fill(await _result(volume.mknod(parent_inode, name, mode, rdev, _caller(ctx))), timeout_s)
        self._entry_changed(volume, "create" if stat.S_ISREG(mode) else "mknod", ctx, parent_inode, name)
        return made

    @_handler
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        volume, timeout_s = self._volume_for(ctx)
        made = self._fill(await _result(volume.mkdir(parent_inode, name, mode, _caller(ctx))), timeout_s)
        self._entry_changed(volume, "mkdir", ctx, parent_inode, name)
        return made

    @_handler
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        volume, timeout_s = self._volume_for(ctx)
        made = self._fill(await _result(volume.symlink(parent_inode, name, target, _caller(ctx))), timeout_s)
        self._entry_changed(volume, "symlink", ctx, parent_inode, name)
        return made

    @_handler
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        volume, timeout_s = self._volume_for(ctx)
        made = self._fill(await _result(volume.link(inode, new_parent_inode, new_name)), timeout_s)
        observer = self._observer_of(volume)
        if observer is not None:
            observer.linked(ctx.pid, inode, new_parent_inode, new_name)
        return made

    @_handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        volume = self._volume_for(ctx)[0]
        await _result(volume.unlink(parent_inode, name))
        self._entry_changed(volume, "unlink", ctx, parent_inode, name)

    @_handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        volume = self._volume_for(ctx)[0]
        await _result(volume.rmdir(parent_inode, name))
        self._entry_changed(volume, "rmdir", ctx, parent_inode, name)

    @_handler
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        volume = self._volume_for(ctx)[0]
        await _result(volume.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, _caller(ctx)))
        observer = self._observer_of(volume)
        if observer is not None:
            exchange = bool(flags & RENAME_EXCHANGE)
            observer.renamed(ctx.pid, parent_inode_old, name_old, parent_inode_new, name_new, exchange=exchange)

    @_handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:  # noqa: ARG002
        return inode

    @_handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        volume = self._volume
        room = _SOUGHT_ENTRIES if self._positions.is_new(fh, start_id) else -1
        end = start_id
        for name, inode, mode, cookie in await _result(volume.readdir(fh, start_id)):
            if not room:
                break
            if name in {b".", b".."}:
                # READDIRPLUS counts no lookup for these two; the kernel uses only their number and type.
                entry = pyfuse3.EntryAttributes()
                entry.st_ino, entry.st_mode = inode, mode
                if not pyfuse3.readdir_reply(token, name, entry, cookie):
                    break
                end, room = cookie, room - 1
                continue
            try:
                # Repeated here, because the token has entries already.
                attributes = await repeated(functools.partial(volume.lookup, fh, name))
            except FileNotFoundError:
                continue  # removed since the listing: only if a lookup waits
            entry = self._fill(attributes, self._timeout_s)
            if not pyfuse3.readdir_reply(token, name, entry, cookie):
                volume.forget(entry.st_ino, 1)
                break
            end, room = cookie, room - 1
        self._positions.ended(fh, end)

    @_handler
    async def releasedir(self, fh: int) -> None:
        """Nothing: a handle carries no state."""

    @_handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await _result(self._volume.fsync(fh, data_only=datasync))

    # -- files ---------------------------------------------------------------------------------
    async def _open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if self._opening is not None:
            await _result(self._opening.open(inode, flags))
        # libfuse negotiates FUSE_ATOMIC_O_TRUNC: truncating is part of the open.
        if flags & os.O_TRUNC:
            kill = not policy.may_keep_set_id(ctx.uid) and await self._has_set_id(inode)
            now_ns = time.time_ns()  # even if the file is empty already
            changes = AttributeChanges(size=0, mtime_ns=now_ns, ctime_ns=now_ns, kill_privileges=kill)
            await _result(self._volume.setattr(inode, changes))
            if self._appending is not None:
                self._kernel_sizes[inode] = (0,)
            if kill:
                self.invalidate_attributes(inode)
            if self.observer is not None:
                self.observer.inode_changed("truncate", ctx.pid, inode)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        clears = writes and not policy.may_keep_set_id(ctx.uid)
        opener = self.observer.identify(ctx.pid) if writes and self.observer is not None else None
        self._last_handle += 1
        self._opened[self._last_handle] = _OpenFile(inode, clears, ctx.pid, opener, flags)
        return pyfuse3.FileInfo(fh=self._last_handle, keep_cache=True)

    @_handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return await self._open(inode, flags, ctx)

    @_handler
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        try:
            made = await _result(self._volume.mknod(parent_inode, name, mode, 0, _caller(ctx)))
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel's cached absence is out of date.  On ESTALE it looks the name up again, checks permissions,
            # which this handler cannot, and opens what it finds (do_filp_open, fs/namei.c).
            raise pyfuse3.FUSEError(errno.ESTALE) from None
        entry = self._fill(made, self._timeout_s)
        if self.observer is not None:
            self.observer.entry_changed("create", ctx.pid, parent_inode, name, made.inode)
        return await self._open(entry.st_ino, flags & ~os.O_TRUNC, ctx), entry

    @_handler
    async def read(self, fh: int, off: int, size: int) -> bytes:
        self.background_requests += 1
        data = self._volume.read(self._opened[fh].inode, off, size)
        # pyfuse3 takes any contiguous buffer; its annotation says bytes.
        return cast("bytes", await data if isinstance(data, Awaitable) else data)

    @_handler
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self.background_requests += 1
        opened = self._opened[fh]
        inode, clears_set_id, thread, opener, _ = opened
        kill = clears_set_id and await self._has_set_id(inode)
        if self._appending is not None and self._appends(opened, off):
            written, size = await _result(self._appending.append(inode, buf, kill_privileges=kill))
            if size != off + written:
                self.invalidate_content(inode)
        else:
            written = await _result(self._volume.write(inode, off, buf, kill_privileges=kill))
            if written < len(buf):
                await self._wait_for_forgets()  # as after ENOSPC: see `_handler`
                written = await _result(self._volume.write(inode, off, buf, kill_privileges=kill))
        self._kernel_grew(inode, off + written)
        if kill:
            self.invalidate_attributes(inode)
        if self.observer is not None:
            self.observer.written(thread, inode, written, opener)
        return written

    @_handler
    async def flush(self, fh: int) -> None:
        if self._flush is None:
            # The kernel then stops sending FLUSH, which saves a request for each close(2).
            raise pyfuse3.FUSEError(errno.ENOSYS)
        await _result(self._flush(self._opened[fh].inode))

    @_handler
    async def release(self, fh: int) -> None:
        opened = self._opened.pop(fh)
        if self._opening is not None:
            self._opening.release(opened.inode, opened.flags)
        self.background_requests += 1

    @_handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        await _result(self._volume.fsync(self._opened[fh].inode, data_only=datasync))

    # -- the rest ------------------------------------------------------------------------------
    @_handler
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        self.record_statfs(ctx.pid)
        stats = await _result(self._volume.statfs())
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = stats.block_size
        data.f_blocks = stats.blocks
        data.f_bfree = data.f_bavail = stats.blocks_free
        data.f_files = stats.inodes
        data.f_ffree = data.f_favail = stats.inodes_free
        data.f_namemax = stats.name_max
        return data

    @_handler
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:  # noqa: ARG002
        self._check_xattrs()
        return await _result(self._volume.getxattr(inode, name))

    @_handler
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._check_xattrs()
        # pyfuse3 handles XATTR_CREATE and XATTR_REPLACE itself, with a getxattr before this.
        await _result(self._volume.setxattr(inode, name, value, 0))
        if self.observer is not None:
            self.observer.inode_changed("setxattr", ctx.pid, inode)

    @_handler
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        self._check_xattrs()
        return policy.visible_xattrs(await _result(self._volume.listxattr(inode)), ctx.uid)

    @_handler
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._check_xattrs()
        await _result(self._volume.removexattr(inode, name))
        if self.observer is not None:
            self.observer.inode_changed("removexattr", ctx.pid, inode)

    def _check_xattrs(self) -> None:
        if not self._xattrs:  # the kernel then stops sending xattr requests
            raise os_error(errno.ENOSYS)


async def _result(answer: Answer[R]) -> R:
    """Return a volume's answer, awaited if it is an awaitable."""
    return await answer if isinstance(answer, Awaitable) else answer


def _caller(ctx: pyfuse3.RequestContext) -> Caller:
    # The kernel has applied the umask already: libfuse does not negotiate FUSE_DONT_MASK.
    return Caller(ctx.uid, ctx.gid, 0, ctx.pid)
