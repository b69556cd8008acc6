"""StoredAttributes: attributes of an inode as fields, which compiled code reads without a call.

`vfsd.kernel.engines.native.replies` packs the fields, and the inodes of the volume in memory have them.  The class is
not in `protocol.volume`, because that module is not compiled: its protocols would gain nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.compiled import mypyc_attr

if TYPE_CHECKING:
    from protocol.volume import Attributes


@mypyc_attr(allow_interpreted_subclasses=True)
class StoredAttributes:
    """See `protocol.volume.Attributes`."""

    __slots__ = (
        "atime_ns", "birth_ns", "ctime_ns", "generation", "gid", "inode", "mode", "mtime_ns", "nlink", "rdev", "size",
        "uid",
    )  # fmt: skip

    inode: int
    generation: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    birth_ns: int

    @property
    def blocks(self) -> int:
        raise NotImplementedError


class CopiedAttributes(StoredAttributes):
    """A copy of other attributes."""

    __slots__ = ("_blocks",)

    def __init__(self, a: Attributes) -> None:
        self.inode, self.generation, self.mode, self.nlink = a.inode, a.generation, a.mode, a.nlink
        self.uid, self.gid, self.rdev, self.size, self._blocks = a.uid, a.gid, a.rdev, a.size, a.blocks
        self.atime_ns, self.mtime_ns, self.ctime_ns, self.birth_ns = a.atime_ns, a.mtime_ns, a.ctime_ns, a.birth_ns

    @property
    def blocks(self) -> int:
        return self._blocks
