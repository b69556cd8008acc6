"""HostAttributes: what the host showed of an inode, as `protocol.volume.Attributes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from os import stat_result

    from protocol.backends.host.nodes import HostInode

__all__ = ["HostAttributes", "seen_as"]


class HostAttributes(NamedTuple):
    """The attributes of `node` at one moment.  `birth` finds out when it was made, which few ask for."""

    inode: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    node: HostInode
    birth: Callable[[HostInode], int]
    generation: int = 0

    @property
    def birth_ns(self) -> int:
        return self.birth(self.node)


_make: Final = HostAttributes._make


def seen_as(node: HostInode, seen: stat_result, birth: Callable[[HostInode], int]) -> HostAttributes:
    """The attributes of `node`, of which the host showed `seen`."""
    return _make((
        node.number, seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_rdev, seen.st_size,
        seen.st_blocks, seen.st_atime_ns, seen.st_mtime_ns, seen.st_ctime_ns, node, birth, 0,
    ))  # fmt: skip
