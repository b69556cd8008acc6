"""Inode: one file, directory, symlink or special file, in one of its versions.

The volume works on an `Inode`, and an engine reads it as `protocol.volume.Attributes`.  Versions: the first change
after a snapshot works on a clone, stamped with the new epoch; the old version goes into the undo log and never changes
again.  `children` is the exception: all versions of a directory share one dict, and its entries are undone one by
one (see `undo`).
"""

from __future__ import annotations

import stat
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final

from protocol.backends.memory.content import SECTORS_PER_PAGE, Content
from protocol.compiled import mypyc_attr
from protocol.stored_attributes import StoredAttributes

if TYPE_CHECKING:
    from protocol.directory_cookies import DirectoryCookies

Link = tuple[int, bytes]  # directory, name
Links = tuple[Link, ...] | dict[Link, None]  # a dict (as an ordered set) beyond _TUPLE_LINKS names

# The size that tmpfs shows for a directory (BOGO_DIRENT_SIZE, include/linux/shmem_fs.h).
DIRECTORY_ENTRY_BYTES: Final = 20
DIRECTORY_BASE_BYTES: Final = 40
_SHORT_SYMLINK_BYTES: Final = 128  # shorter targets take no page in tmpfs (mm/shmem.c)
_TUPLE_LINKS: Final = 16


@mypyc_attr(allow_interpreted_subclasses=True)
class Inode(StoredAttributes):
    """One version of an inode.

    `links` are its names.  `generation`, `cookies` and `atime_ns` belong to the live inode, not to its
    versions, and pass from clone to clone.  `atime_ns` does so because otherwise every read after a snapshot would make
    a version.
    """

    __slots__ = ("born", "children", "content", "cookies", "epoch", "links", "target", "xattrs")

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
        self.links: Links = ()
        self.content: Content | None = None
        self.children: MutableMapping[bytes, int] | None = None  # not `dict`: see `protocol.compiled`
        self.cookies: DirectoryCookies | None = None
        self.target: bytes | None = None
        self.xattrs: dict[bytes, bytes] | None = None

    def clone(self, epoch: int) -> Inode:
        """Return a version for `epoch`.  From now on the original must not be changed.

        Both versions share the dict of extended attributes, which is replaced and never changed; the caller adds the
        new holder to the ledger.
        """
        kind: Any = self.__class__
        twin: Inode = kind.__new__(kind)
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
        twin.links = self.links if isinstance(self.links, tuple) else self.links.copy()
        twin.content = self.content.share() if self.content is not None else None
        twin.children = self.children
        twin.cookies = self.cookies
        twin.target = self.target
        twin.xattrs = self.xattrs
        return twin

    @property
    def blocks(self) -> int:
        """Units of 512 bytes, as tmpfs counts them: see `Content.sectors`, and a page for a symlink's long target."""
        if self.content is not None:
            return self.content.sectors
        return SECTORS_PER_PAGE if self.target is not None and len(self.target) >= _SHORT_SYMLINK_BYTES else 0

    @property
    def followed(self) -> object:
        """For a journal: the file of the lower layer that this version belongs to; None without a lower layer."""
        return None

    @property
    def pages(self) -> int:
        return self.content.pages if self.content is not None else 0

    @property
    def is_dir(self) -> bool:
        return self.children is not None

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def parent_link(self) -> Link:
        """The only name of a directory, or the first name of a file."""
        return next(iter(self.links))

    def same_content(self, other: Inode) -> bool:
        """Return whether both versions have the same bytes or target."""
        if self.size != other.size or self.target != other.target:
            return self.is_dir and other.is_dir
        if self.content is other.content:
            return True
        mine, theirs = self.content or Content(), other.content or Content()
        # A subclass of Content can compare itself with a Content, but not the reverse.
        return mine.same_as(theirs) if type(theirs) is Content else theirs.same_as(mine)

    def same_metadata(self, other: Inode) -> bool:
        """Return whether both versions have the same attributes except for access times."""
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


def with_link(links: Links, link: Link) -> Links:
    """Return `links` with `link` added; a dict is changed in place, so its inode must be owned.

    A tuple takes less memory for a few names; the dict keeps adding and removing one of many names O(1).
    """
    if isinstance(links, tuple):
        if len(links) < _TUPLE_LINKS:
            return (*links, link)
        links = dict.fromkeys(links)
    links[link] = None
    return links


def without_link(links: Links, link: Link) -> Links:
    """Return `links` with `link` removed; a dict is changed in place, so its inode must be owned."""
    if isinstance(links, tuple):
        if len(links) == 1:
            return ()
        at = links.index(link)
        return links[:at] + links[at + 1 :]
    del links[link]
    return links
