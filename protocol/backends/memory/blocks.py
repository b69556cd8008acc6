"""The blocks of file content: `bytes` or `bytearray` for a dense block, `SparseBlock` for a block with holes.

Also the pages that fallocate(2) promised to a file (`Reserved`), and the blocks of one version of a file, which
versions share until one of them writes (`SharedBlocks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from protocol.backends.memory.ledger import Ledger
from protocol.compiled import mypyc_attr

if TYPE_CHECKING:
    from protocol.volume import Buffer

PAGE_BYTES: Final = 4096
_PAGE_SHIFT: Final = PAGE_BYTES.bit_length() - 1
BLOCK_CHARGE_BYTES: Final = 192  # of any dense block: the object and its entry in a dict
_SPARSE_CHARGE_BYTES: Final = 512
_PAGE_CHARGE_BYTES: Final = PAGE_BYTES + 192


def page_up(offset: int) -> int:
    """Return the number of pages that hold the bytes before `offset`."""
    return (offset + PAGE_BYTES - 1) >> _PAGE_SHIFT


def page_bits(first: int, after: int) -> int:
    """Return a mask with a bit for each page from `first` to `after` - 1."""
    return ((1 << after) - (1 << first)) if after > first else 0


class SparseBlock:
    """A block with pages that were never written.  Only written pages take memory.

    `pages` maps a page's number in the block to its bytes; zeros follow bytes that are shorter than a page.
    """

    __slots__ = ("length", "pages")

    def __init__(self, length: int, pages: dict[int, bytes]) -> None:
        self.length = length
        self.pages = pages

    @classmethod
    def of(cls, block: Block, holes: int) -> SparseBlock:
        """Return a copy of `block` without the pages whose bits are set in `holes`."""
        pages = {
            page: bytes(block[page << _PAGE_SHIFT : (page + 1) << _PAGE_SHIFT])
            for page in range(page_up(len(block)))
            if not holes >> page & 1
        }
        return cls(len(block), pages)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.length)
        pieces = []
        while start < stop:
            page, at = start >> _PAGE_SHIFT, start & PAGE_BYTES - 1
            size = min(PAGE_BYTES - at, stop - start)
            pieces.append(self.pages.get(page, b"")[at : at + size].ljust(size, b"\0"))
            start += size
        return b"".join(pieces)

    def write(self, start: int, data: Buffer) -> None:
        """Write `data` at `start`; the pages that it touches stop being holes."""
        done, length = 0, len(data)
        view = memoryview(data)
        while done < length:
            page, at = (start + done) >> _PAGE_SHIFT, start + done & PAGE_BYTES - 1
            size = min(PAGE_BYTES - at, length - done)
            old = self.pages.get(page, b"")
            self.pages[page] = b"".join((old[:at].ljust(at, b"\0"), view[done : done + size], old[at + size :]))
            done += size
        self.length = max(self.length, start + length)

    def cut(self, length: int) -> SparseBlock:
        """Return a copy of the first `length` bytes."""
        last, rest = length >> _PAGE_SHIFT, length & PAGE_BYTES - 1
        pages = {page: data for page, data in self.pages.items() if page < last or (page == last and rest)}
        if last in pages:
            pages[last] = pages[last][:rest]
        return SparseBlock(length, pages)


Block = bytes | bytearray | SparseBlock


def block_bytes(block: Block) -> int:
    """Return the charge of one block.

    malloc rounds large `bytes` up to whole pages (3 % of 128 KiB); a growing bytearray allocates an eighth more than it
    needs.
    """
    kind = type(block)
    if kind is SparseBlock:
        return _SPARSE_CHARGE_BYTES + _PAGE_CHARGE_BYTES * len(block.pages)  # type: ignore[union-attr]
    length = len(block)
    return BLOCK_CHARGE_BYTES + length + (length >> 5 if kind is bytes else length >> 3)


class Reserved(NamedTuple):
    """Pages that fallocate counted and that were not written yet."""

    first: int
    after: int
    is_data: bool = False  # a second fallocate filled them, so SEEK_DATA finds them


def overlap(ranges: Iterable[Reserved], first: int, after: int) -> int:
    """Return how many pages of `ranges` lie between two pages."""
    return sum(each.after - each.first for each in within(ranges, first, after))


def within(ranges: Iterable[Reserved], first: int, after: int) -> list[Reserved]:
    """Return the parts of `ranges` between two pages."""
    cut = (each._replace(first=max(first, each.first), after=min(after, each.after)) for each in ranges)
    return [each for each in cut if each.after > each.first]


def without(ranges: Iterable[Reserved], first: int, after: int) -> tuple[Reserved, ...]:
    """Return `ranges` without the parts between two pages."""
    left = []
    for each in ranges:
        if each.first < first:
            left.append(each._replace(after=min(each.after, first)))
        if each.after > after:
            left.append(each._replace(first=max(each.first, after)))
    return tuple(each for each in left if each.after > each.first)


def joined(ranges: Iterable[Reserved]) -> tuple[Reserved, ...]:
    """Return `ranges` sorted, with adjacent ranges of one kind joined."""
    joined: list[Reserved] = []
    for each in sorted(ranges):
        if joined and joined[-1].after == each.first and joined[-1].is_data == each.is_data:
            joined[-1] = joined[-1]._replace(after=each.after)
        else:
            joined.append(each)
    return tuple(joined)


NONE_OWNED: Final[frozenset[int]] = frozenset()  # one object for all: most versions never write a block


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedBlocks:
    """Blocks by their index.  `ledger` is that of the state that they belong to; None if they are never shared.

    Invariants (checked by `check_ownership`):

    - `allocated` is the sum of `block_bytes` of all blocks;
    - a version owns a block if `owned` is None (it owns all) or contains its index.  Every other block is shared: it is
      in the ledger's `shared`, and other versions may hold it.  Only owned blocks that are not `bytes` change in place.
    """

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
