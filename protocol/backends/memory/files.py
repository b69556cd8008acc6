"""FileContents: the calls that read, write, resize and allocate the content of regular files.

See `protocol.volume.Volume` for each method, and `content` for how content is stored.  Source: mm/shmem.c.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from protocol.backends.memory import xattrs
from protocol.backends.memory.blocks import PAGE_BYTES
from protocol.backends.memory.content import BLOCK_BYTES, Content
from protocol.backends.memory.ledger import SLACK_BYTES
from protocol.backends.memory.limits import VolumePart
from protocol.errors import os_error
from protocol.linux.portable import without_privileges
from protocol.tree import TYPE_MASK

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.volume import Buffer

MAX_FILE_BYTES: Final = 2**63 - 1  # MAX_LFS_FILESIZE on 64 bits, linux/fs.h
_REGULAR: Final = stat.S_IFREG
_FALLOC_KEEP_SIZE: Final = 1  # linux/falloc.h
_FALLOC_PUNCH_HOLE: Final = 2
_RESERVED_PAGE_BYTES: Final = PAGE_BYTES + 1024  # more than a page promised by fallocate is charged
# Memory that a write may take beyond its data: two blocks that it covers in part, joined or copied.
_WRITE_BYTES: Final = 2 * (BLOCK_BYTES + BLOCK_BYTES // 8) + SLACK_BYTES


class FileContents(VolumePart):
    """The calls that read, write, resize and allocate the content of regular files."""

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
        # A write to a page that another process shares needs memory, though the ledger does not grow.
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
