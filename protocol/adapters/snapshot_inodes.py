"""SnapshotInodes: the inode numbers of the files in `.snapshots`, and what they mean while the kernel has lookups.

A number is FIRST_INODE or higher, which no volume below uses.  It is a hash of the snapshot's serial number and the
path (for a file with several names: of its inode number in the snapshot), so it stays the same while the snapshot
exists and one process serves it, and those of two snapshots differ.

Invariants (`check_invariants`):

- the table has exactly the numbers that have lookups;
- a number always means the same file of the same snapshot.

Threading: the serving loop; nothing awaits.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from protocol.errors import os_error
from protocol.tree import TreeEntry
from protocol.volume_extensions import SnapshotInfo

FIRST_INODE: Final = 1 << 62  # of `.snapshots` itself; bit 63 stays 0: some programs read inode numbers as signed
MOST_BYTES: Final = 16 << 20  # memory of nodes after which the kernel is asked to forget them
_MASK: Final = FIRST_INODE - 1
_NODE_BYTES: Final = 300  # memory of a node without its path


class SnapshotNode(NamedTuple):
    """A file of a snapshot that the kernel has looked up.  `identity`: see `SnapshotInodes.number`."""

    info: SnapshotInfo
    path: bytes
    identity: bytes | int
    is_dir: bool


class SnapshotInodes:
    """The table.  `seed`, up to 64 bytes: tables with different ones number the files differently."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._nodes: dict[int, SnapshotNode] = {}
        self._lookups: dict[int, int] = {}
        self._bytes = 0  # memory of `_nodes`, estimated

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    @property
    def is_full(self) -> bool:
        """Whether the table takes so much memory that the kernel should forget its files."""
        return self._bytes > MOST_BYTES

    def items(self) -> Sequence[tuple[int, SnapshotNode]]:
        """Return the numbers and their files."""
        return list(self._nodes.items())

    def node(self, inode: int) -> SnapshotNode:
        """Return the file of a number; ESTALE if the kernel has no lookup of it."""
        node = self._nodes.get(inode)
        if node is None:
            raise os_error(errno.ESTALE)
        return node

    def number(self, info: SnapshotInfo, identity: bytes | int) -> int:
        """Return the number of the file of a snapshot with this `identity`: its path, or its inode number there.

        A directory of 100,000 files has two equal ones with a probability of 1 in 900 million; `look_up` refuses the
        second.
        """
        kind, data = (b"i", b"%d" % identity) if isinstance(identity, int) else (b"p", identity)
        digest = blake2b(data, digest_size=8, key=self._seed, salt=b"%x" % info.serial, person=kind).digest()
        return FIRST_INODE | (int.from_bytes(digest, "little") & _MASK) or FIRST_INODE + 1

    def number_of(self, info: SnapshotInfo, entry: TreeEntry) -> int:
        """Return the number of a file of a snapshot."""
        return self.number(info, _identity(entry))

    def look_up(self, info: SnapshotInfo, entry: TreeEntry) -> int:
        """Count a lookup of a file; return its number."""
        identity = _identity(entry)
        number = self.number(info, identity)
        node = self._nodes.get(number)
        if node is None:
            self._nodes[number] = SnapshotNode(info, entry.path, identity, entry.is_dir)
            self._bytes += _NODE_BYTES + len(entry.path)
        elif node.identity != identity or node.info.serial != info.serial:
            raise OSError(errno.EIO, f"two files of snapshots have the hash {number}")
        self._lookups[number] = self._lookups.get(number, 0) + 1
        return number

    def forget(self, inode: int, count: int) -> None:
        """See `Volume.forget`."""
        left = self._lookups.get(inode, 0) - count
        if left > 0:
            self._lookups[inode] = left
        elif self._lookups.pop(inode, None) is not None:
            self._bytes -= _NODE_BYTES + len(self._nodes.pop(inode).path)

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold."""
        assert self._nodes.keys() == self._lookups.keys()
        assert all(count > 0 for count in self._lookups.values())
        assert all(self.number(node.info, node.identity) == number for number, node in self._nodes.items())
        assert self._bytes == sum(_NODE_BYTES + len(node.path) for node in self._nodes.values())


def _identity(entry: TreeEntry) -> bytes | int:
    """Return what two names of one file have in common and other files of the snapshot do not have."""
    return entry.inode if entry.nlink > 1 and entry.inode and not entry.is_dir else entry.path
