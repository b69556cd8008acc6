"""The blocks of one version of a file, which versions share until one of them writes, and their charge.

Invariants (checked by `check_ownership`):

- `allocated` is the sum of `block_bytes` of all blocks;
- a version owns a block if `owned` is None (it owns all) or contains its index.  Every other block is shared: it is in
  the ledger's `shared`, and other versions may hold it.  Only owned blocks that are not `bytes` change in place.
"""

from __future__ import annotations

from typing import Final

from protocol.backends.memory.blocks import Block, block_bytes
from protocol.backends.memory.ledger import Ledger

NONE_OWNED: Final[frozenset[int]] = frozenset()  # one object for all: most versions never write a block


class SharedBlocks:
    """Blocks by their index.  `ledger` is that of the state that they belong to; None if they are never shared."""

    __slots__ = ("allocated", "blocks", "ledger", "owned")

    # Set by the subclass, whose constructor is called for each file that is written: one call is enough.
    ledger: Ledger | None
    allocated: int
    blocks: dict[int, Block]
    owned: set[int] | frozenset[int] | None

    def adopt(self, ledger: Ledger) -> None:
        """Move to `ledger` from the ledger of the content that this one shares its blocks with."""
        self.ledger = ledger
        for block in self.blocks.values():
            if ledger.hold(block):
                ledger.kept -= block_bytes(block)

    def let_go_shared(self) -> None:
        """Release the shared blocks of a live file's content; blocks that snapshots still hold become kept."""
        owned = self.owned or NONE_OWNED
        for index, block in self.blocks.items():
            if index not in owned:
                self._let_go(block)

    def _let_go(self, block: Block) -> None:
        assert self.ledger is not None
        if self.ledger.let_go(block):
            self.ledger.kept += block_bytes(block)

    def free_unshared(self) -> int:
        """Release the blocks of a snapshot's content; return the bytes that no other version holds."""
        ledger = self.ledger
        assert ledger is not None
        return sum(block_bytes(block) for block in self.blocks.values() if not ledger.let_go(block))

    def _replace_block(self, index: int, block: Block) -> None:
        old = self.blocks.get(index)
        self.blocks[index] = block  # first, because it can raise MemoryError
        if old is not None:
            self._give_up(index, old)
        self.allocated += block_bytes(block)
        if isinstance(self.owned, set):
            self.owned.add(index)
        elif self.owned is not None:
            self.owned = {index}

    def _give_up(self, index: int, block: Block) -> None:
        """Remove block `index` from the charge; release it if it is shared."""
        self.allocated -= block_bytes(block)
        if self.owned is not None and index not in self.owned:
            self._let_go(block)

    def check_ownership(self) -> None:
        """Raise AssertionError if an invariant of the module's docstring does not hold."""
        assert self.allocated == sum(map(block_bytes, self.blocks.values())), "allocated bytes"
        if self.owned is None:
            return
        assert self.ledger is not None
        for index, block in self.blocks.items():
            assert index in self.owned or id(block) in self.ledger.shared, "a shared block without a record"
