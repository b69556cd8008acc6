"""EmptyTree: the base of two workspaces that have no state in common."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from protocol.errors import os_error
from protocol.tree import CHUNK_BYTES, LookupTree, TreeEntry

_NOBODY = 0xFFFFFFFF  # no user has this number: so each real root directory differs from that of an EmptyTree


class EmptyTree(LookupTree):
    """A tree that has only its root."""

    def entry(self, path: bytes) -> TreeEntry:
        if path:
            raise os_error(errno.ENOENT, os.fsdecode(path))
        return TreeEntry(b"", stat.S_IFDIR, uid=_NOBODY, gid=_NOBODY)

    def children(self, path: bytes) -> list[bytes]:
        self.entry(path)
        return []

    def read(self, path: bytes, offset: int, size: int) -> bytes:  # noqa: ARG002
        raise os_error(errno.ENOENT, os.fsdecode(path))

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:  # noqa: ARG002
        raise os_error(errno.ENOENT, os.fsdecode(path))
