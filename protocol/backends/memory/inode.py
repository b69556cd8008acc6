"""Inode: one file, directory, symlink or special file, in one of its versions.

An `Inode` is at once what the volume works on and what an engine is shown (`protocol.volume.Attributes`).
Versions: the first change after a snapshot works on a clone, stamped with the new epoch; the old version
goes into the undo log and is not changed any more.  `children` is the exception: all versions of a
directory share one dict, and its entries are undone one by one (see `undo`).
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.content import PAGE_BYTES, Content

if TYPE_CHECKING:
    from protocol.directory_cookies import DirectoryCookies

__all__ = ["DIRECTORY_BASE_BYTES", "DIRECTORY_ENTRY_BYTES", "Inode", "Link"]

Link = tuple[int, bytes]  # directory, name

# What tmpfs says a directory's size is (BOGO_DIRENT_SIZE, include/linux/shmem_fs.h).
DIRECTORY_ENTRY_BYTES: Final = 20
DIRECTORY_BASE_BYTES: Final = 40
_SECTORS_PER_PAGE: Final = PAGE_BYTES // 512
_SHORT_SYMLINK_BYTES: Final = 128  # shorter ones take no page in tmpfs (mm/shmem.c)


class Inode:
    """One version of an inode.

    `links` are the names it has (directory, name): usually one.  `lookups`, `generation` and `listing`
    belong to the live inode, not to its versions, and are handed on from clone to clone; so is
    `atime_ns`, which a snapshot does not keep: else every read after a snapshot would make a version.
    """

    __slots__ = (
        "atime_ns",
        "birth_ns",
        "born",
        "children",
        "content",
        "ctime_ns",
        "epoch",
        "generation",
        "gid",
        "inode",
        "links",
        "listing",
        "lookups",
        "mode",
        "mtime_ns",
        "nlink",
        "rdev",
        "size",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(self, inode: int, mode: int, uid: int, gid: int, now_ns: int, epoch: int) -> None:
        self.inode = inode
        self.mode = mode
        self.nlink = 0
        self.uid = uid
        self.gid = gid
        self.rdev = 0
        self.size = 0
        self.atime_ns = self.mtime_ns = self.ctime_ns = self.birth_ns = now_ns
        self.epoch = self.born = epoch
        self.generation = 0
        self.lookups = 0
        self.links: tuple[Link, ...] = ()
        self.content: Content | None = None
        self.children: dict[bytes, int] | None = None
        self.listing: DirectoryCookies | None = None
        self.target: bytes | None = None
        self.xattrs: dict[bytes, bytes] | None = None

    def clone(self, epoch: int) -> Inode:
        """A version for `epoch`.  From here on the receiver must not be changed.

        Versions share their dict of attributes, which is replaced and never changed; the ledger has to know of it.
        """
        twin = self.__class__.__new__(self.__class__)
        twin.inode = self.inode
        twin.mode = self.mode
        twin.nlink = self.nlink
        twin.uid = self.uid
        twin.gid = self.gid
        twin.rdev = self.rdev
        twin.size = self.size
        twin.atime_ns = self.atime_ns
        twin.mtime_ns = self.mtime_ns
        twin.ctime_ns = self.ctime_ns
        twin.birth_ns = self.birth_ns
        twin.epoch = epoch
        twin.born = self.born
        twin.generation = self.generation
        twin.lookups = self.lookups
        twin.links = self.links
        twin.content = self.content.share() if self.content is not None else None
        twin.children = self.children
        twin.listing = self.listing
        twin.target = self.target
        twin.xattrs = self.xattrs
        return twin

    @property
    def blocks(self) -> int:
        """Units of 512 bytes, as tmpfs counts them: whole pages written or reserved."""
        if self.content is not None:
            return self.content.pages * _SECTORS_PER_PAGE
        return _SECTORS_PER_PAGE if self.target is not None and len(self.target) >= _SHORT_SYMLINK_BYTES else 0

    @property
    def pages(self) -> int:
        return self.content.pages if self.content is not None else 0

    @property
    def is_dir(self) -> bool:
        return self.children is not None

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    def same_content(self, other: Inode) -> bool:
        """Whether both versions read the same: bytes, target."""
        if self.size != other.size or self.target != other.target:
            return self.is_dir and other.is_dir
        if self.content is other.content:
            return True
        mine, theirs = self.content or Content(), other.content or Content()
        # What is more than a Content knows how to compare itself with one.
        return mine.same_as(theirs) if type(theirs) is Content else theirs.same_as(mine)

    def same_metadata(self, other: Inode) -> bool:
        """Whether both versions show the same attributes, times of reading apart."""
        return (
            self.mode == other.mode
            and self.uid == other.uid
            and self.gid == other.gid
            and self.nlink == other.nlink
            and self.mtime_ns == other.mtime_ns
            and self.ctime_ns == other.ctime_ns
            and self.size == other.size
            and (self.xattrs or {}) == (other.xattrs or {})
        )
