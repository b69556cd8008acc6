"""InodeCalls: the calls that read and change one inode: its content, its attributes and its extended attributes.

See `protocol.volume.Volume` for each method, and `content` for how content is stored.  The kernel checks permissions;
this part does what the kernel leaves to the file system.  Source: mm/shmem.c, fs/attr.c.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from protocol.backends.memory import xattrs
from protocol.backends.memory.blocks import PAGE_BYTES
from protocol.backends.memory.content import BLOCK_BYTES, Content
from protocol.backends.memory.ledger import SLACK_BYTES
from protocol.backends.memory.limits import VolumePart
from protocol.compiled import mypyc_attr
from protocol.errors import os_error
from protocol.linux.portable import without_privileges
from protocol.tree import TYPE_MASK
from protocol.volume import AttributeChanges

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.volume import Buffer

MAX_FILE_BYTES: Final = 2**63 - 1  # MAX_LFS_FILESIZE on 64 bits, linux/fs.h
_REGULAR: Final = stat.S_IFREG
_FALLOC_KEEP_SIZE: Final = 1  # linux/falloc.h
_FALLOC_PUNCH_HOLE: Final = 2
_RESERVED_PAGE_BYTES: Final = PAGE_BYTES + 1024  # more than a page promised by fallocate is charged
_XATTR_ROOM_BYTES: Final = 1024  # more than one attribute takes beyond its name and value
_XATTR_EFFECT_BYTES: Final = 64  # the same, in the journal
# Memory that a write may take beyond its data: two blocks that it covers in part, joined or copied.
_WRITE_BYTES: Final = 2 * (BLOCK_BYTES + BLOCK_BYTES // 8) + SLACK_BYTES


@mypyc_attr(allow_interpreted_subclasses=True)
class InodeCalls(VolumePart):
    """The calls that read and change one inode: its content, its attributes and its extended attributes."""

    # -- reading ---------------------------------------------------------------------------------
    def read_pieces(self, inode: int, offset: int, size: int) -> Buffer | list[bytes | bytearray]:
        """Return what `read` returns; a read longer than a block returns a list of pieces that are not joined."""
        try:
            node = self._inodes[inode]
        except KeyError:
            raise os_error(errno.ENOENT, f"inode {inode}") from None
        content = node.content
        if content is None:
            check_regular(node)
        left = node.size - offset
        if left < size:  # noqa: PLR1730  # half the cost of min()
            size = left
        if size <= 0:
            return b""
        self._state.update_atime(node)
        if content is None:
            return bytes(size)
        return content.read(offset, size) if size <= BLOCK_BYTES else content.pieces(offset, size)

    def seek(self, inode: int, offset: int, whence: int) -> int:
        node = self.getattr(inode)
        check_regular(node)
        if offset < 0 or offset >= node.size:
            raise os_error(errno.ENXIO)
        if whence == os.SEEK_HOLE:
            return node.content.seek_hole(offset, node.size) if node.content else offset
        if whence != os.SEEK_DATA:
            raise os_error(errno.EINVAL)
        if node.content is None:
            raise os_error(errno.ENXIO)
        return node.content.seek_data(offset, node.size)

    # -- writing ---------------------------------------------------------------------------------
    # In one piece: this is the most frequent change.
    def write(  # noqa: C901, PLR0912
        self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False
    ) -> int:
        recorder = self.recorder
        if recorder is not None and self.repeats and (done := self._repeated()) is not None:
            return done
        state, ledger = self._state, self._ledger
        if state.read_only:
            raise os_error(errno.EROFS)
        node = self._inodes.get(inode) or self.getattr(inode)
        length = len(data)
        end = offset + length
        if not 0 <= offset < end <= MAX_FILE_BYTES or node.mode & TYPE_MASK != _REGULAR:
            _check_write(node, offset, end)
            if not length:
                return 0
        if recorder is not None:
            recorder.begin_write(node, offset, data)
        limits = self._limits
        if node.epoch != state.epoch:
            node = limits.changeable(node)
        shared_limit = ledger.shared_limit
        # A write to a page that a fork shares needs memory, though the ledger does not grow.
        if shared_limit is not None and not shared_limit.wrote(length):
            limits.require(length)
        content = node.content
        if content is None:
            content = state.content(node)
        growth = -1
        # A subclass (content over a lower file) has a `write` of its own.
        if type(content) is Content and (
            (state.pages <= limits.checked_pages and ledger.content + length <= limits.checked_content)
            or limits.has_room_for(length)
        ):
            growth = content.write_plainly(offset, end, data, ledger)
        if growth < 0:
            length, growth = self._write_fitting(node, content, offset, data)
            end = offset + length
        state.pages += growth
        if end > node.size:  # `MemoryState.resize`, inline: no call in each appending write
            if node.nlink:
                state.size_bytes += end - node.size
            node.size = end
        node.mtime_ns = node.ctime_ns = self._clock()
        if kill_privileges:
            node.mode = without_privileges(node.mode)
        if node.xattrs:
            ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
        if recorder is not None:
            recorder.wrote(node, offset, data, length)
        return length

    def _write_fitting(self, node: Inode, content: Content, offset: int, data: Buffer) -> tuple[int, int]:
        """Write as much of `data` as fits.  Return the number of bytes written, and of pages that they added."""
        length = len(data)
        ledger = self._ledger
        growth = content.growth(offset, length)
        if growth and self._state.pages + growth > self._limits.page_room():
            length = self._fitting(content, offset, length)
            data = memoryview(data)[:length]
            growth = content.growth(offset, length)
        # Pages promised by fallocate, and pages that exist and that only this version has, are charged already.
        if growth or content.owned is not None:
            self._limits.require(length + (length >> 3) + _WRITE_BYTES)
        charge, pages = content.charge, content.pages
        try:
            content.write(offset, data, growth)
        except MemoryError:
            # As after a short write, complete blocks stay; blocks beyond the end of the file are freed.
            content.recount(offset // PAGE_BYTES, (offset + length + PAGE_BYTES - 1) // PAGE_BYTES)
            content.truncate(node.size)
            self._state.pages += content.pages - pages
            if self.recorder is not None:
                self.recorder.wrote_partly(node, offset, length)
            raise
        finally:
            ledger.content += content.charge - charge
        return length, growth

    def _fitting(self, content: Content, offset: int, length: int) -> int:
        """Return the length of the longest prefix of a write that fits and ends at a page.  Raises ENOSPC for none."""
        room = self._limits.page_room() - self._state.pages
        low, high = 0, (offset + length - 1) // PAGE_BYTES - offset // PAGE_BYTES  # page ends within the write
        while low < high:
            middle = (low + high + 1) // 2
            if content.growth(offset, (offset // PAGE_BYTES + middle) * PAGE_BYTES - offset) <= room:
                low = middle
            else:
                high = middle - 1
        fitting = (offset // PAGE_BYTES + low) * PAGE_BYTES - offset
        if fitting <= 0:
            raise os_error(errno.ENOSPC)
        return fitting

    # -- size and allocation ---------------------------------------------------------------------
    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        if self.repeats and self._repeated() is not None:
            return
        state = self._state
        if state.read_only:
            raise os_error(errno.EROFS)
        node = self.getattr(inode)
        check_regular(node)
        if offset < 0 or length <= 0:
            raise os_error(errno.EINVAL)
        if mode not in (0, _FALLOC_KEEP_SIZE, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE):
            raise os_error(errno.EOPNOTSUPP)
        if offset + length > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        is_hole = bool(mode & _FALLOC_PUNCH_HOLE)
        if self.recorder is not None:
            self.recorder.begin_allocation(node, is_hole=is_hole)
        if is_hole:
            node = self._limits.changeable(node)
            self._change_pages(node, lambda: state.content(node).punch(offset, length))
        else:
            content = node.content
            pages = content.reservation(offset, length) if content else _pages(offset, length)
            self._limits.check_room(pages, 0)
            node = self._limits.changeable(node, pages * _RESERVED_PAGE_BYTES)
            self._change_pages(node, lambda: state.content(node).reserve(offset, length))
            if not mode & _FALLOC_KEEP_SIZE and offset + length > node.size:
                state.resize(node, offset + length)
        self._ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
        node.mtime_ns = node.ctime_ns = self._clock()
        if self.recorder is not None:
            self.recorder.allocated(node, offset, length, is_hole=is_hole)

    def _resize(self, node: Inode, size: int) -> None:
        """Set the size of a regular file (owned).  At the same size, pages reserved beyond it are freed."""
        if size <= node.size and node.content is not None:
            content = node.content
            self._change_pages(node, lambda: content.truncate(size))
        self._state.resize(node, size)

    def _change_pages(self, node: Inode, change: Callable[[], None]) -> None:
        content = self._state.content(node)
        pages, charge = content.pages, content.charge
        change()
        self._state.pages += content.pages - pages
        self._ledger.content += content.charge - charge
        self._ledger.note_freed(max(0, charge - content.charge))

    # -- attributes --------------------------------------------------------------------------------
    def setattr(self, inode: int, changes: AttributeChanges) -> Inode:
        recorder = self.recorder
        if recorder is not None and self.repeats and (done := self._repeated()) is not None:
            return self.getattr(done)
        state, ledger = self._state, self._ledger
        if state.read_only:
            raise os_error(errno.EROFS)
        node = self._inodes.get(inode) or self.getattr(inode)
        mode, uid, gid, size, atime_ns, mtime_ns, ctime_ns, kill_privileges = changes
        if size is not None:
            check_size(node, size)
        if recorder is not None:
            recorder.begin(0, node, removes=size is not None and size < node.size)
        if node.epoch != state.epoch:
            # Shortening a file is never refused for lack of memory.
            node = state.own(node) if size is not None and size < node.size else self._limits.changeable(node)
        now = self._clock() if size is None else self._set_size(node, size, changes)
        if kill_privileges or uid is not None or gid is not None:
            self._set_owner(node, uid, gid, kill_privileges)
        if mode is not None:
            node.mode = node.mode & TYPE_MASK | mode & 0o7777
            if node.xattrs is not None:
                ledger.set_xattrs(node, xattrs.after_chmod(node.xattrs, node.mode))
        if atime_ns is not None:
            node.atime_ns = atime_ns
        if mtime_ns is not None:
            node.mtime_ns = mtime_ns
        node.ctime_ns = now if ctime_ns is None else ctime_ns
        if recorder is not None:
            recorder.changed(node, size)
        return node

    def _set_size(self, node: Inode, size: int, changes: AttributeChanges) -> int:
        """Set the size of a file (owned), and its mtime.  Return its new ctime."""
        now = self._clock()
        if size != node.size or node.blocks:
            node.mtime_ns = now
        elif changes._replace(mode=None) == AttributeChanges(size=size, kill_privileges=changes.kill_privileges):
            # truncate(2) to the same size of an empty file leaves the times alone (shmem_setattr, mm/shmem.c).  The
            # kernel adds a mode only when it clears set-id bits.
            now = node.ctime_ns
        self._resize(node, size)
        self._ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
        return now

    def _set_owner(self, node: Inode, uid: int | None, gid: int | None, kill_privileges: bool) -> None:
        if node.children is None:
            self._ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
            if kill_privileges:
                node.mode = without_privileges(node.mode)
        if uid is not None:
            node.uid = uid
        if gid is not None:
            node.gid = gid

    def readlink(self, inode: int) -> bytes:
        node = self.getattr(inode)
        if node.target is None:
            raise os_error(errno.EINVAL)
        self._state.update_atime(node)
        return node.target

    def find_xattr(self, inode: int, name: bytes) -> bytes | None:
        """Return the value of an attribute, or None if it does not exist.

        The kernel asks for `security.capability` before the first write to each file, so absence costs no exception.
        """
        stored = (self._inodes.get(inode) or self.getattr(inode)).xattrs
        if stored is None and name == b"security.capability":
            return None
        xattrs.check_name(name)
        return None if stored is None else stored.get(name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        if self.repeats and self._repeated() is not None:
            return
        node = self._changing(inode)
        mode, stored = xattrs.after_set(node.mode, node.xattrs, name, bytes(value), flags)
        if self.recorder is not None:
            self.recorder.begin(len(name) + len(value) + _XATTR_EFFECT_BYTES, node)
        node = self._limits.changeable(node, _XATTR_ROOM_BYTES + len(name) + len(value))
        node.mode = mode
        self._ledger.set_xattrs(node, stored)
        node.ctime_ns = self._clock()
        if self.recorder is not None:
            self.recorder.changed_xattr(node, name)

    def listxattr(self, inode: int) -> Sequence[bytes]:
        return tuple(self.getattr(inode).xattrs or ())

    def removexattr(self, inode: int, name: bytes) -> None:
        if self.repeats and self._repeated() is not None:
            return
        node = self._changing(inode)
        stored = xattrs.after_remove(node.xattrs, name)
        if self.recorder is not None:
            self.recorder.begin(len(name) + _XATTR_EFFECT_BYTES, node, removes=True)
        node = self._state.own(node)
        self._ledger.set_xattrs(node, stored)
        node.ctime_ns = self._clock()
        if self.recorder is not None:
            self.recorder.changed_xattr(node, name)

    def _changing(self, inode: int) -> Inode:
        if self._state.read_only:
            raise os_error(errno.EROFS)
        return self.getattr(inode)


def check_regular(node: Inode) -> None:
    """Raise EISDIR or EINVAL if `node` is not a regular file."""
    if not node.is_file:
        raise os_error(errno.EISDIR if node.is_dir else errno.EINVAL)


def check_size(node: Inode, size: int) -> None:
    """Raise EISDIR, EINVAL or EFBIG if `node` cannot have `size` bytes."""
    check_regular(node)
    if size < 0:
        raise os_error(errno.EINVAL)
    if size > MAX_FILE_BYTES:
        raise os_error(errno.EFBIG)


def _check_write(node: Inode, offset: int, end: int) -> None:
    check_regular(node)
    if offset < 0:
        raise os_error(errno.EINVAL)
    if offset < end > MAX_FILE_BYTES:
        raise os_error(errno.EFBIG)


def _pages(offset: int, length: int) -> int:
    return -(-(offset + length) // PAGE_BYTES) - offset // PAGE_BYTES
