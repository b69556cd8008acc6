"""StoredBlocks: writes the content of a transaction to the journal before the transaction, in small steps.

A transaction is one step of the serving loop and one batch of the journal.  Without this, all of its content would be
written within that step, and no request answered meanwhile.  A block that is stored changes nothing: it counts when the
batch of the transaction refers to it.

Invariant: a block is held as long as its number is known, so no other object gets its identity.  The caller does not
change it until `clear`.

Threading: the serving loop; other requests may be recorded between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.blocks import Block, SparseBlock
from protocol.backends.memory.content import BLOCK_BYTES
from protocol.journal import effects
from protocol.journal.records import Kind

if TYPE_CHECKING:
    from protocol.journal.log import Log

SMALLEST_BYTES: Final = 16 << 10  # recording a smaller block costs little more than a reference to it
_EFFECT_BYTES: Final = 64


class StoredBlocks:
    """The blocks that are stored for the next transaction."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, Block]] = {}  # by identity
        self._pieces: dict[int, tuple[int, bytes]] = {}  # of content that no block has yet, by index
        self._count = 0

    def store(self, log: Log, blocks: Iterable[Block]) -> Iterator[None]:
        """Store blocks, one in each step.  Small ones are left to the transaction.  OSError."""
        for block in blocks:
            if not isinstance(block, SparseBlock) and len(block) >= SMALLEST_BYTES and id(block) not in self._numbers:
                self._numbers[id(block)] = self._append(log, block), block
                yield

    def store_content(self, log: Log, data: bytes) -> Iterator[None]:
        """Store what will be the content of a file.  OSError."""
        view = memoryview(data)
        for start in range(0, len(data), BLOCK_BYTES):
            piece = bytes(view[start : start + BLOCK_BYTES])
            if len(piece) >= SMALLEST_BYTES:
                self._pieces[start // BLOCK_BYTES] = self._append(log, piece), piece
                yield

    def _append(self, log: Log, block: bytes | bytearray) -> int:
        number = self._count
        log.require(len(block) + _EFFECT_BYTES)
        # A part: it is not synced, and does not count unless something after it does.
        log.append([effects.store(number, len(block)), block], Kind.PART)
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

    def clear(self) -> None:
        """Forget all blocks: the transaction is recorded, or will not be."""
        self._numbers.clear()
        self._pieces.clear()
        self._count = 0
