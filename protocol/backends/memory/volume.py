"""MemoryVolume: POSIX over the state in memory.

Every call answers at once.  Threading: the serving loop only; a call is atomic because nothing in it
awaits.  What tmpfs answers is the reference (mm/shmem.c, fs/libfs.c, fs/namei.c): the kernel checks
permissions, this module keeps what the kernel leaves to the file system.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from protocol.backends.memory import xattrs
from protocol.backends.memory.base import PAGE_BYTES, missing
from protocol.backends.memory.content import BLOCK_BYTES, Content
from protocol.backends.memory.entries import Entries
from protocol.backends.memory.inode import Inode
from protocol.backends.memory.invariants import check
from protocol.backends.memory.ledger import RESERVE_BYTES, SLACK_BYTES
from protocol.directory_cookies import DirectoryCookies
from protocol.errors import os_error
from protocol.volume import (
    NAME_MAX,
    AttributeChanges,
    DirectoryEntry,
    StatFs,
    VolumeCapabilities,
    VolumeUsage,
)

if TYPE_CHECKING:
    from protocol.volume import Buffer

__all__ = ["MemoryUse", "MemoryVolume"]

MAX_FILE_BYTES: Final = 2**63 - 1  # MAX_LFS_FILESIZE on 64 bits, linux/fs.h
_UNLIMITED_INODES: Final = 2**31 - 1
_KIND: Final = 0o170000  # S_IFMT as a mask
_REGULAR: Final = stat.S_IFREG
_DAY_NS: Final = 24 * 3600 * 10**9
_FALLOC_KEEP_SIZE: Final = 1  # linux/falloc.h
_FALLOC_PUNCH_HOLE: Final = 2
_DOT_COOKIES: Final = ((1, b"."), (2, b".."))
_COPY_BYTES: Final = 1 << 20
# What a write may take beyond its data: two blocks that it covers in part, put together or copied.
_WRITE_BYTES: Final = 2 * (BLOCK_BYTES + BLOCK_BYTES // 8) + SLACK_BYTES


class MemoryUse(NamedTuple):
    """What a volume takes of the machine's memory, in bytes.

    `live`: files, names and attributes as allocated; `snapshots`: what only snapshots hold; `overhead`: the reserve for
    removing and restoring, what is lent to an import, and what an overlay remembers of the directory below.
    """

    live: int
    snapshots: int
    overhead: int


class MemoryVolume(Entries):
    """A volume in memory, with snapshots.  Implements `protocol.volume.SnapshotableVolume`.

    `max_bytes` bounds what live content takes (whole pages of 4,096 bytes, holes not counted) and the metadata beyond
    4 MiB, `max_inodes` the live inodes, the root among them, `max_memory` content, metadata and snapshots together;
    None: no limit.
    `clock` gives the time in nanoseconds since the epoch.  The root belongs to `uid` and `gid`.  `state`: a backend's
    that begins with something, whose root is its own.
    """

    capabilities: VolumeCapabilities = VolumeCapabilities(
        snapshots=True,
        acls=True,
        durable=False,
        content_pieces=True,
        quiet_lookups=True,
        plain_entries=True,
        staged_imports=True,
        prepared_imports=True,
        self_check=True,
    )

    # -- what a caller may know ------------------------------------------------------------------
    @property
    def files(self) -> int:
        """Live inodes with links that are no directories."""
        return self._state.files

    @property
    def directories(self) -> int:
        """Live directories, the root among them."""
        return self._state.directories

    @property
    def size_bytes(self) -> int:
        """The sum of the sizes of the regular files, each inode once."""
        return self._state.size_bytes

    @property
    def used_bytes(self) -> int:
        """What `max_bytes` bounds: live content in whole pages, and metadata beyond a first allowance."""
        return (self._state.pages + self._metadata_pages()) * PAGE_BYTES

    @property
    def memory(self) -> MemoryUse:
        """What the state takes of the machine's memory."""
        ledger = self._ledger
        reserve = RESERVE_BYTES * len(self._inodes)
        live = ledger.content + ledger.metadata - reserve
        return MemoryUse(live, max(0, ledger.kept), ledger.overhead + reserve)

    def usage(self) -> VolumeUsage:
        """See `protocol.volume.SnapshotableVolume`."""
        memory = self.memory
        return VolumeUsage(
            files=self.files,
            directories=self.directories,
            size_bytes=self.size_bytes,
            used_bytes=self.used_bytes,
            max_bytes=self.max_bytes,
            max_inodes=self.max_inodes,
            live_bytes=memory.live,
            snapshot_bytes=memory.snapshots,
            overhead_bytes=memory.overhead,
            max_memory=self.max_memory,
            pruned=self.pruned,
        )

    def has_lookups(self, inode: int) -> bool:
        """See `protocol.volume.SnapshotableVolume`."""
        found = self._inodes.get(inode)
        return found is not None and found.lookups > 0

    def new_stage(self) -> MemoryVolume:
        """See `protocol.volume.StagingVolume`."""
        stage = MemoryVolume(self.max_bytes, self.max_inodes)
        stage.borrow_from(self)
        return stage

    def borrow_from(self, volume: MemoryVolume) -> None:
        """Take memory only from what `volume` has left, as a loan: what is unpacked here is to be put into it."""
        self._ledger.borrow_from(volume._ledger)

    @contextmanager
    def reserving(self) -> Iterator[Callable[[int], None]]:
        """A function that reserves a number of bytes of memory until the block ends.  It raises OSError (ENOSPC)."""
        reserved = 0

        def reserve(count: int) -> None:
            nonlocal reserved
            self._ledger.reserve(count)
            reserved += count

        try:
            yield reserve
        finally:
            self._ledger.release(reserved)

    def give_back(self) -> None:
        """End the loan: this volume is used no more, or was put into the other."""
        self._ledger.give_back()

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself.  O(everything): for tests and bug reports."""
        check(self._state)

    # -- inodes ----------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Inode:
        """See `protocol.volume.Volume`, as for all that follow."""
        inode = self.find(parent, name)
        if inode is None:
            raise missing(name)
        return inode

    def find(self, parent: int, name: bytes) -> Inode | None:
        """`lookup`, with None for absence: what is asked before all that is made costs no exception."""
        directory = self._inodes.get(parent)
        if directory is None or directory.children is None:
            directory = self._directory(parent)
            assert directory.children is not None
        number = directory.children.get(name)
        if number is not None:
            inode = self._inodes[number]
        elif name == b".":
            inode = directory
        elif name == b"..":
            inode = self._parent(directory)
        elif len(name) > NAME_MAX:
            raise missing(name)
        else:
            return None
        inode.lookups += 1
        return inode

    def forget(self, inode: int, count: int) -> None:
        node = self._inodes.get(inode)
        if node is not None:
            node.lookups -= count
            if node.nlink == 0:
                self._state.release(node)

    def setattr(self, inode: int, changes: AttributeChanges) -> Inode:
        if self.read_only:
            raise os_error(errno.EROFS)
        node = self.getattr(inode)
        mode, uid, gid, size, atime_ns, mtime_ns, ctime_ns, kill_privileges = changes
        if size is not None:
            self._check_size(node, size)
        state, ledger = self._state, self._ledger
        if node.epoch != state.epoch:
            # What makes a file shorter always works.
            node = state.own(node) if size is not None and size < node.size else self._changeable(node)
        now = self._clock()
        if size is not None:
            if size != node.size or node.blocks:
                node.mtime_ns = now
            elif changes._replace(mode=None) == AttributeChanges(size=size, kill_privileges=kill_privileges):
                # truncate(2) that finds nothing to do leaves the times alone (shmem_setattr, mm/shmem.c).  A mode comes
                # with it only where the kernel takes set-id bits away.
                now = node.ctime_ns
            self._resize(node, size)
            ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
        if kill_privileges or uid is not None or gid is not None:
            self._set_owner(node, uid, gid, kill_privileges)
        if mode is not None:
            node.mode = node.mode & _KIND | mode & 0o7777
            if node.xattrs is not None:
                ledger.set_xattrs(node, xattrs.after_chmod(node.xattrs, node.mode))
        if atime_ns is not None:
            node.atime_ns = atime_ns
        if mtime_ns is not None:
            node.mtime_ns = mtime_ns
        node.ctime_ns = now if ctime_ns is None else ctime_ns
        return node

    def readlink(self, inode: int) -> bytes:
        node = self.getattr(inode)
        if node.target is None:
            raise os_error(errno.EINVAL)
        self._accessed(node)
        return node.target

    # -- directories -------------------------------------------------------------------------------
    def readdir(self, inode: int, cookie: int) -> Iterator[DirectoryEntry]:
        return map(DirectoryEntry._make, self.entries(inode, cookie))

    def entry_count(self, inode: int) -> int:
        """How many names a directory has, "." and ".." not counted."""
        return len(self._directory(inode).children or ())

    def entries(self, inode: int, cookie: int) -> Iterator[tuple[bytes, int, int, int]]:
        """`readdir` with plain tuples, which take a third of the time that named ones do."""
        directory = self._directory(inode)
        self._accessed(directory)
        if directory.listing is None:
            directory.listing = DirectoryCookies(directory.children or ())
        chunks = self._chunks(directory, directory.listing, cookie)
        return itertools.chain(self._dots(directory, cookie), itertools.chain.from_iterable(chunks))

    def _dots(self, directory: Inode, cookie: int) -> Iterator[tuple[bytes, int, int, int]]:
        for dot, name in _DOT_COOKIES:
            if dot > cookie:
                node = directory if dot == 1 else self._parent(directory)
                yield name, node.inode, node.mode, dot

    def _chunks(
        self, directory: Inode, listing: DirectoryCookies, cookie: int
    ) -> Iterator[Iterator[tuple[bytes, int, int, int]]]:
        children = directory.children
        assert children is not None
        for cookies, names in listing.chunks(cookie):
            numbers = [children[name] for name in names]
            yield zip(names, numbers, self._modes(numbers), cookies, strict=True)

    def _modes(self, numbers: list[int]) -> list[int]:
        inodes = self._inodes
        return [inodes[number].mode for number in numbers]

    # -- content -----------------------------------------------------------------------------------
    def read(self, inode: int, offset: int, size: int) -> Buffer:
        found = self.read_pieces(inode, offset, size)
        return b"".join(found) if isinstance(found, list) else found

    def read_pieces(self, inode: int, offset: int, size: int) -> Buffer | list[bytes | bytearray]:
        """What `read` answers; where that is long, as a list of blocks that were not put together."""
        try:
            node = self._inodes[inode]
        except KeyError:
            raise os_error(errno.ENOENT, f"inode {inode}") from None
        content = node.content
        if content is None:
            self._check_regular(node)
        left = node.size - offset
        if left < size:  # noqa: PLR1730  # half the cost of min()
            size = left
        if size <= 0:
            return b""
        self._accessed(node)
        if content is None:
            return bytes(size)
        return content.read(offset, size) if size <= BLOCK_BYTES else content.pieces(offset, size)

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        if self.read_only:
            raise os_error(errno.EROFS)
        node = self._inodes.get(inode) or self.getattr(inode)
        length = len(data)
        end = offset + length
        if not 0 <= offset < end <= MAX_FILE_BYTES or node.mode & _KIND != _REGULAR:
            self._check_write(node, offset, end)
            if not length:
                return 0
        state, ledger = self._state, self._ledger
        if node.epoch != state.epoch:
            node = self._changeable(node)
        content = node.content
        if content is None:
            content = state.content(node)
        growth = -1
        # Of the class itself: one that has content from elsewhere has a `write` of its own.
        if type(content) is Content and (
            (state.pages <= self._checked_pages and ledger.content + length <= self._checked_content)
            or self._has_room_for(length)
        ):
            growth = content.write_plainly(offset, end, data, ledger)
        if growth < 0:
            length, growth = self._write_fitting(node, content, offset, data)
            end = offset + length
        state.pages += growth
        if end > node.size:  # as `State.resize`, whose call takes 3 % of an appending write
            if node.nlink:
                state.size_bytes += end - node.size
            node.size = end
        node.mtime_ns = node.ctime_ns = self._clock()
        if kill_privileges:
            node.mode = _without_privileges(node.mode)
        if node.xattrs:
            ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
        return length

    def _write_fitting(self, node: Inode, content: Content, offset: int, data: Buffer) -> tuple[int, int]:
        """Write what there is room for; how many bytes that was, and how many pages they added."""
        length = len(data)
        ledger = self._ledger
        growth = content.growth(offset, length)
        if growth and self._state.pages + growth > self._page_room():
            length = self._fitting(node, offset, length)
            data = memoryview(data)[:length]
            growth = content.growth(offset, length)
        # What was promised by fallocate, and what is there already and this version's own, is charged.
        if growth or content.owned is not None:
            self._require(length + (length >> 3) + _WRITE_BYTES)
        charge, pages = content.charge, content.pages
        try:
            content.write(offset, data, growth)
        except MemoryError:
            # Blocks that it had written stay, as after a short write, but for what lies beyond the end.
            content.recount(offset // PAGE_BYTES, (offset + length + PAGE_BYTES - 1) // PAGE_BYTES)
            content.truncate(node.size)
            self._state.pages += content.pages - pages
            raise
        finally:
            ledger.content += content.charge - charge
        return length, growth

    def _fitting(self, node: Inode, offset: int, length: int) -> int:
        """The longest prefix of a write, ending at a page, for which there is room.  ENOSPC: none."""
        room = self._page_room() - self._state.pages
        content = self._state.content(node)
        low, high = 0, (offset + length - 1) // PAGE_BYTES - offset // PAGE_BYTES  # whole pages ends within the write
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

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        self._check_writable()
        node = self.getattr(inode)
        self._check_regular(node)
        if offset < 0 or length <= 0:
            raise os_error(errno.EINVAL)
        if mode not in (0, _FALLOC_KEEP_SIZE, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE):
            raise os_error(errno.EOPNOTSUPP)
        if offset + length > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)
        state = self._state
        if mode & _FALLOC_PUNCH_HOLE:
            node = self._changeable(node)
            self._change_pages(node, lambda: state.content(node).punch(offset, length))
        else:
            content = node.content
            pages = content.reservation(offset, length) if content else _pages(offset, length)
            self._check_room(pages, 0)
            node = self._changeable(node, pages * (PAGE_BYTES + 1024))
            self._change_pages(node, lambda: state.content(node).reserve(offset, length))
            if not mode & _FALLOC_KEEP_SIZE and offset + length > node.size:
                state.resize(node, offset + length)
        self._ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
        node.mtime_ns = node.ctime_ns = self._clock()

    def seek(self, inode: int, offset: int, whence: int) -> int:
        node = self.getattr(inode)
        self._check_regular(node)
        if offset < 0 or offset >= node.size:
            raise os_error(errno.ENXIO)
        if whence == os.SEEK_HOLE:
            return node.content.seek_hole(offset, node.size) if node.content else offset
        if whence != os.SEEK_DATA:
            raise os_error(errno.EINVAL)
        if node.content is None:
            raise os_error(errno.ENXIO)
        return node.content.seek_data(offset, node.size)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        node = self.getattr(source)
        self._check_regular(node)
        length = max(0, min(length, node.size - source_offset))
        if source == target and source_offset < target_offset + length and target_offset < source_offset + length:
            raise os_error(errno.EINVAL)
        done = 0
        while done < length:
            # Past `read`: the kernel would go on to show the source's old atime, until it asks for another reason.
            part = min(_COPY_BYTES, length - done)
            content = self._inodes[source].content
            data = content.read(source_offset + done, part) if content is not None else bytes(part)
            try:
                written = self.write(target, target_offset + done, data)
            except OSError:
                if done:
                    break
                raise
            done += written
            if written < len(data):
                break
        return done

    def fsync(self, inode: int, *, data_only: bool) -> None:
        del inode, data_only  # nothing is more durable than memory is

    # -- the rest ------------------------------------------------------------------------------------
    def statfs(self) -> StatFs:
        used = self._state.pages + self._metadata_pages()
        blocks = self._max_pages if self.max_bytes is not None else max(os.sysconf("SC_PHYS_PAGES"), used)
        inodes = self.max_inodes if self.max_inodes is not None else _UNLIMITED_INODES
        ledger = self._ledger
        free = min(blocks - used, (ledger.ceiling - ledger.used) // PAGE_BYTES)
        return StatFs(PAGE_BYTES, blocks, max(0, free), inodes, max(0, inodes - len(self._inodes)))

    def getxattr(self, inode: int, name: bytes) -> bytes:
        value = self.find_xattr(inode, name)
        if value is None:
            raise os_error(errno.ENODATA)
        return value

    def find_xattr(self, inode: int, name: bytes) -> bytes | None:
        """`getxattr`, with None for absence: the kernel asks for a capability before it first writes to a file."""
        kept = (self._inodes.get(inode) or self.getattr(inode)).xattrs
        if kept is None and name == b"security.capability":
            return None
        xattrs.check_name(name)
        return None if kept is None else kept.get(name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self._check_writable()
        node = self.getattr(inode)
        mode, kept = xattrs.after_set(node.mode, node.xattrs, name, bytes(value), flags)
        node = self._changeable(node, _set_bytes(name, value))
        node.mode = mode
        self._ledger.set_xattrs(node, kept)
        node.ctime_ns = self._clock()

    def listxattr(self, inode: int) -> Sequence[bytes]:
        return tuple(self.getattr(inode).xattrs or ())

    def removexattr(self, inode: int, name: bytes) -> None:
        self._check_writable()
        node = self.getattr(inode)
        kept = xattrs.after_remove(node.xattrs, name)
        node = self._state.own(node)
        self._ledger.set_xattrs(node, kept)
        node.ctime_ns = self._clock()

    # -- helpers ---------------------------------------------------------------------------------------
    def _accessed(self, node: Inode) -> None:
        """Update atime as relatime does (mount(8)): not a change that a snapshot keeps."""
        atime = node.atime_ns
        if atime <= node.mtime_ns or atime <= node.ctime_ns or self._clock() - atime > _DAY_NS:
            node.atime_ns = atime if self.read_only else self._clock()

    def _set_owner(self, node: Inode, uid: int | None, gid: int | None, kill_privileges: bool) -> None:
        if node.children is None:
            self._ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
            if kill_privileges:
                node.mode = _without_privileges(node.mode)
        if uid is not None:
            node.uid = uid
        if gid is not None:
            node.gid = gid

    def _resize(self, node: Inode, size: int) -> None:
        if size <= node.size and node.content is not None:  # at the same size what was reserved beyond it goes
            content = node.content
            self._change_pages(node, lambda: content.truncate(size))
        self._state.resize(node, size)

    def _change_pages(self, node: Inode, change: Callable[[], None]) -> None:
        content = self._state.content(node)
        pages, charge = content.pages, content.charge
        change()
        self._state.pages += content.pages - pages
        self._ledger.content += content.charge - charge

    def _check_regular(self, node: Inode) -> None:
        if not node.is_file:
            raise os_error(errno.EISDIR if node.is_dir else errno.EINVAL)

    def _check_write(self, node: Inode, offset: int, end: int) -> None:
        self._check_regular(node)
        if offset < 0:
            raise os_error(errno.EINVAL)
        if offset < end > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)

    def _check_size(self, node: Inode, size: int) -> None:
        self._check_regular(node)
        if size < 0:
            raise os_error(errno.EINVAL)
        if size > MAX_FILE_BYTES:
            raise os_error(errno.EFBIG)


def _set_bytes(name: bytes, value: bytes) -> int:
    """What setting one attribute takes at most, without the others."""
    return 1024 + len(name) + len(value)


def _without_privileges(mode: int) -> int:
    """Without suid, and without sgid where it is one (with group execute): setattr_should_drop_suidgid, fs/attr.c."""
    if stat.S_ISDIR(mode):
        return mode
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


def _pages(offset: int, length: int) -> int:
    return -(-(offset + length) // PAGE_BYTES) - offset // PAGE_BYTES
