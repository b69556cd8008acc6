"""RecordedAhead: writes parts of a transaction to the journal before the transaction, in small steps.

A transaction is one step of the serving loop and one batch of the journal.  Without this, all of its content and new
inodes would be written within that step, and no request answered meanwhile: 2 s for 100,000 small files.  What is
written ahead changes nothing: it counts when the batch of the transaction refers to it.

Invariants:

1. A block is held as long as its number is known, so no other object gets its identity.  The caller does not change it
   until `clear`.
2. Inodes that are stored are complete in the journal, with their entries.  Until `clear` only the attributes of those
   in `tops` change.  Another transaction may come before theirs, and calls `clear`.

Threading: the serving loop; other requests may be recorded between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.blocks import Block, SparseBlock
from protocol.backends.memory.content import BLOCK_BYTES
from protocol.backends.memory.journaling.changes import inode_details
from protocol.journal import effects
from protocol.journal.records import Kind

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import PreInodes
    from protocol.backends.memory.inode import Inode
    from protocol.journal.log import Log
    from protocol.journal.records import Buffer

SMALLEST_BYTES: Final = 16 << 10  # recording a smaller block costs little more than a reference to it
_EFFECT_BYTES: Final = 64
_STEP_BYTES: Final = 32 << 10
_STEP_PIECES: Final = 64
_STEP_BLOCKS: Final = 256  # that are not stored


class RecordedAhead:
    """What is written ahead of the next transaction."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, Block]] = {}  # by identity
        self._pieces: dict[int, tuple[int, bytes]] = {}  # of content that no block has yet, by index
        self._count = 0
        self._cleared = 0  # how often
        self._inodes: AbstractSet[int] = frozenset()
        self._inode_parts: list[int] = []
        self._entry_parts: list[int] = []
        self.tops: Collection[int] = ()  # of `inodes_of`: those whose attributes the transaction changes

    def store(self, log: Log, blocks: Iterable[Block]) -> Iterator[None]:
        """Store blocks, one in each step.  Small ones are left to what refers to them.  OSError."""
        for count, block in enumerate(blocks):
            if not isinstance(block, SparseBlock) and len(block) >= SMALLEST_BYTES and id(block) not in self._numbers:
                self._numbers[id(block)] = self._append(log, block), block
                yield
            elif count % _STEP_BLOCKS == 0:
                yield

    def store_content(self, log: Log, data: bytes) -> Iterator[None]:
        """Store what will be the content of a file.  OSError."""
        view = memoryview(data)
        for start in range(0, len(data), BLOCK_BYTES):
            piece = bytes(view[start : start + BLOCK_BYTES])
            if len(piece) >= SMALLEST_BYTES:
                self._pieces[start // BLOCK_BYTES] = self._append(log, piece), piece
                yield

    def store_inodes(self, log: Log, nodes: Iterable[Inode], tops: Collection[int]) -> Iterator[None]:
        """Store new inodes, which nothing else leads to and nobody changes; `tops` will get a name.  OSError."""
        stored: set[int] = set()
        directories: list[Inode] = []
        entries = (
            effects.entry(node.inode, name, child)
            for node in directories
            for name, child in (node.children or {}).items()
        )
        cleared = self._cleared
        parts: tuple[list[int], list[int]] = [], []
        for numbers, pieces in zip(parts, (self._described(nodes, stored, directories), entries), strict=True):
            for number in self._store_effects(log, pieces):
                numbers.append(number)
                yield
                if self._cleared != cleared:
                    return  # another transaction came first: this one is recorded without what was stored
        self._inode_parts, self._entry_parts = parts
        self._inodes, self.tops = stored, tops

    def _described(self, nodes: Iterable[Inode], stored: set[int], directories: list[Inode]) -> Iterator[bytes]:
        """Yield the effects of inodes other than their entries; add them to `stored`, and to `directories`."""
        for node in nodes:
            stored.add(node.inode)
            if node.children:
                directories.append(node)
            yield effects.inode(node)
            yield effects.reset(node.inode)
            yield from inode_details(None, node, {}, self)

    def _store_effects(self, log: Log, pieces: Iterable[bytes]) -> Iterator[int]:
        """Store effects, some in each step; yield the number of each STORE."""
        part: list[bytes] = []
        size = 0
        for piece in pieces:
            part.append(piece)
            size += len(piece)
            if size >= _STEP_BYTES or len(part) >= _STEP_PIECES:
                yield self._append(log, b"".join(part))
                part, size = [], 0
        if part:
            yield self._append(log, b"".join(part))

    def inodes_of(self, changed: PreInodes) -> Collection[int]:
        """Return the inodes that are stored, if they belong to the transaction that has `changed` these."""
        return self._inodes if self._inodes <= changed.keys() else ()

    def _append(self, log: Log, data: Buffer) -> int:
        number = self._count
        log.require(len(data) + _EFFECT_BYTES)
        # A part: it is not synced, and does not count unless something after it does.
        log.append([effects.store(number, len(data)), data], Kind.PART)
        self._count += 1
        return number

    def take(self, index: int, block: Block) -> int | None:
        """Return the number of a block that was stored, once; None for others.  `index`: its place in the file."""
        found = self._numbers.pop(id(block), None)
        if found is not None:
            return found[0]
        piece = self._pieces.get(index)
        if piece is None or isinstance(block, SparseBlock) or piece[1] != block:
            return None
        del self._pieces[index]
        return piece[0]

    def inode_effects(self) -> Iterator[bytes]:
        """Yield the effects that make the stored inodes."""
        return map(effects.stored_effects, self._inode_parts)

    def entry_effects(self) -> Iterator[bytes]:
        """Yield the effects that make the entries of the stored inodes."""
        return map(effects.stored_effects, self._entry_parts)

    def clear(self) -> None:
        """Forget everything: the transaction is recorded, or will not be."""
        self._numbers.clear()
        self._pieces.clear()
        self._inodes, self._inode_parts, self._entry_parts, self.tops = frozenset(), [], [], ()
        self._count = 0
        self._cleared += 1
