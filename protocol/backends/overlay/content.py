"""LowerContent: the bytes of a file from below, of which blocks were written, cut off or punched above.

Beside what holds of every `Content`:

- a block that is in `blocks` is the truth about its range; nothing of it is read below;
- of every other block what lies before `limit` is read below, unless its index is in `masked`: then it is zeros.
  What is a hole below needs no mask, so that a file of terabytes with little in it stays cheap;
- `pages` counts what is held above; the blocks below are not in it;
- a block that is to be changed in part is copied up first, whole (BLOCK_BYTES, holes as they are below).

Threading: a version that a snapshot holds may be read by any thread; nothing here is kept between two reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.blocks import SparseBlock
from protocol.backends.memory.content import BLOCK_BYTES, PAGE_BYTES, Content
from protocol.backends.overlay.lower import ChangedBelowError

if TYPE_CHECKING:
    from protocol.backends.memory.ledger import Ledger
    from protocol.backends.overlay.lower import LowerFile
    from protocol.volume import Buffer

__all__ = ["LowerContent"]

_SECTOR_BYTES: Final = 512
_COUNTED_BLOCKS: Final = 64  # with more of them above, what is seen below is estimated
_MASK_BYTES: Final = 96  # an integer in a set
_NOTHING: Final[frozenset[int]] = frozenset()
_Staged = tuple[bytearray, int]  # a block, and the bits of its pages that are holes


def _page_up(offset: int) -> int:
    return -(-offset // PAGE_BYTES)


def _filled_blocks(lower: LowerFile, start: int, end: int) -> Iterator[int]:
    """The blocks, each once and in order, with data of `lower` between two offsets.  ChangedBelowError."""
    last = -1
    for first, after in lower.ranges(start, end) if start < end else ():
        for index in range(max(last + 1, first // BLOCK_BYTES), -(-after // BLOCK_BYTES)):
            yield index
            last = index


class LowerContent(Content):
    """Sparse content over a file below.  Offsets and sizes in bytes."""

    __slots__ = ("_staged", "limit", "lower", "masked")

    def __init__(self, lower: LowerFile, ledger: Ledger | None = None) -> None:
        super().__init__(ledger)
        self.lower = lower
        self.limit = lower.size
        self.masked = _NOTHING
        self._staged: dict[int, _Staged] = {}

    def share(self) -> LowerContent:
        """See `Content.share`."""
        twin = LowerContent(self.lower)
        twin.limit = self.limit
        twin.masked = self.masked
        self._share_with(twin)
        return twin

    @property
    def charge(self) -> int:
        """See `Content.charge`; with the masks."""
        return super().charge + _MASK_BYTES * len(self.masked)

    @property
    def is_pristine(self) -> bool:
        """Whether nothing but what is below is shown."""
        return not self.blocks and not self.masked and self.limit == self.lower.size and not self.reserved

    @property
    def sectors(self) -> int:
        """Units of 512 bytes: those above, and of those below the share that is still seen."""
        above = self.pages * (PAGE_BYTES // _SECTOR_BYTES)
        count = -(-self.limit // BLOCK_BYTES)
        if not count:
            return above
        if self.is_pristine:
            return self.lower.sectors
        if len(self.blocks) + len(self.masked) <= _COUNTED_BLOCKS:
            with contextlib.suppress(ChangedBelowError):
                below = self._below_pages()
                return above + below * (PAGE_BYTES // _SECTOR_BYTES)
        seen = max(0, count - len(self.blocks.keys() | self.masked))
        return above + self.lower.sectors * seen // max(count, -(-self.lower.size // BLOCK_BYTES))

    def _below_pages(self) -> int:
        at = pages = 0
        for index in sorted(each for each in self.blocks.keys() | self.masked if each * BLOCK_BYTES < self.limit):
            pages += sum(b - a for a, b in self._below_ranges(at * BLOCK_BYTES, index * BLOCK_BYTES))
            at = index + 1
        return pages + sum(b - a for a, b in self._below_ranges(at * BLOCK_BYTES, self.limit))

    def same_as(self, other: Content) -> bool:
        """See `Content.same_as`.  Reads below only where one side is from there and the other not."""
        indices = self.blocks.keys() | other.blocks.keys() | self.masked
        if isinstance(other, LowerContent) and other.lower is self.lower:
            indices = indices | other.masked
            beyond = _filled_blocks(self.lower, *sorted((self.limit, other.limit)))
        else:
            beyond = _filled_blocks(self.lower, 0, self.limit)
            if isinstance(other, LowerContent):
                beyond = chain(beyond, _filled_blocks(other.lower, 0, other.limit))
        try:
            return self._same_blocks(other, chain(sorted(indices), (each for each in beyond if each not in indices)))
        except ChangedBelowError:
            return False  # what it was nobody can tell any more

    def _same_blocks(self, other: Content, indices: Iterable[int]) -> bool:
        return all(
            self.read(index * BLOCK_BYTES, BLOCK_BYTES) == other.read(index * BLOCK_BYTES, BLOCK_BYTES)
            for index in indices
        )

    # -- what is seen of below -----------------------------------------------------------------
    def _visible(self, index: int) -> int:
        """How many bytes of block `index` are read below."""
        if index in self.blocks or index in self.masked:
            return 0
        return max(0, min(BLOCK_BYTES, self.limit - index * BLOCK_BYTES))

    def read(self, offset: int, size: int) -> bytes | bytearray:
        """See `Content.read`.  ChangedBelowError."""
        index, start = divmod(offset, BLOCK_BYTES)
        if not self.blocks and not self.masked:
            return self._read_below(offset, size)
        if start + size > BLOCK_BYTES:
            return b"".join(self.pieces(offset, size))
        if self._visible(index):
            return self._read_below(offset, size)
        return super().read(offset, size)

    def pieces(self, offset: int, size: int) -> list[bytes | bytearray]:
        """See `Content.pieces`."""
        if not self.blocks and not self.masked:
            return [self._read_below(offset, size)]
        found = []
        while size > 0:
            part = min(size, BLOCK_BYTES - offset % BLOCK_BYTES)
            found.append(self.read(offset, part))
            offset += part
            size -= part
        return found

    def _read_below(self, offset: int, size: int) -> bytes:
        wanted = min(size, self.limit - offset)
        if wanted <= 0:
            return bytes(size)
        data = self.lower.read(offset, wanted)
        return data if wanted == size else data + bytes(size - wanted)

    def _data_ranges(self, page: int) -> Iterator[tuple[int, int]]:
        per_block = BLOCK_BYTES // PAGE_BYTES
        at = page // per_block
        covered = sorted(index for index in self.blocks.keys() | self.masked if index >= at)
        for index in covered:
            yield from self._below_ranges(at * BLOCK_BYTES, index * BLOCK_BYTES)
            if index in self.blocks:
                yield from self._block_ranges(index)
            at = index + 1
        yield from self._below_ranges(at * BLOCK_BYTES, self.limit)

    def _below_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        end = min(end, self.limit)
        if start < end:
            for first, after in self.lower.ranges(start, end):
                yield first // PAGE_BYTES, _page_up(after)

    # -- copying up ----------------------------------------------------------------------------
    def growth(self, offset: int, length: int) -> int:
        """See `Content.growth`: with what has to be copied up for it."""
        if not length:
            return 0
        staged = self._stage(offset, length)
        if not staged:
            return super().growth(offset, length)
        # Put in place and taken away again: nobody else reads a version that may be written to.
        pages, holes, masked, allocated = self.pages, self.holes, self.masked, self.allocated
        for index, each in staged.items():
            self._put_block(index, each)
        growth = self.pages - pages + super().growth(offset, length)
        for index in staged:
            self.blocks.pop(index, None)
            if isinstance(self.owned, set):
                self.owned.discard(index)
        self.pages, self.holes, self.masked, self.allocated = pages, holes, masked, allocated
        self._staged = staged
        return growth

    def write(self, offset: int, data: Buffer, growth: int) -> None:
        """See `Content.write`."""
        before = self.pages
        for index, each in self._stage(offset, len(data)).items():
            self._put_block(index, each)
        self._staged = {}
        super().write(offset, data, growth - (self.pages - before))

    def _stage(self, offset: int, length: int) -> dict[int, _Staged]:
        """The blocks that a write covers in part, and that are below."""
        end = offset + length
        staged = {}
        for index in {offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES}:
            visible = self._visible(index)
            base = index * BLOCK_BYTES
            if visible and (offset > base or end < base + visible):
                staged[index] = self._staged.get(index) or self._load(index, visible)
        return staged

    def _load(self, index: int, visible: int) -> _Staged:
        base = index * BLOCK_BYTES
        holes = (1 << _page_up(visible)) - 1
        for first, after in self.lower.ranges(base, base + visible):
            low, high = (first - base) // PAGE_BYTES, _page_up(after - base)
            holes &= ~((1 << high) - (1 << low))
        return bytearray(self.lower.read(base, visible)), holes

    def _put_block(self, index: int, staged: _Staged) -> None:
        """Put a block that came from below in place, and count it; one of holes only is masked."""
        block, holes = staged
        pages = _page_up(len(block))
        if holes.bit_count() == pages:
            self.masked |= {index}
            return
        # Copied: a staged block may be put in place a second time.
        self._replace_block(index, SparseBlock.of(block, holes) if holes else bytearray(block))
        if holes:
            self.holes = {**(self.holes or {}), index: holes}
        self.pages += pages - holes.bit_count()

    # -- shrinking -----------------------------------------------------------------------------
    def truncate(self, size: int) -> None:
        """See `Content.truncate`."""
        before = set(self.blocks)
        self._staged = {}
        self.limit = min(self.limit, size)
        self.masked = frozenset(index for index in self.masked if index * BLOCK_BYTES < self.limit)
        super().truncate(size)
        self._mask(before)

    def punch(self, offset: int, length: int) -> None:
        """See `Content.punch`."""
        self._staged = {}
        if offset < self.limit:
            self._punch_below(offset, offset + length)
        before = set(self.blocks)
        super().punch(offset, length)
        self._mask(before)

    def _punch_below(self, offset: int, end: int) -> None:
        # As on tmpfs, a page of which the end is not within the hole stays, zeroed.
        if end >= _page_up(self.limit) * PAGE_BYTES:
            self.limit = offset  # what the blocks above hold is theirs; of the rest nothing is seen from here on
            return
        hidden = set()
        for index in list(_filled_blocks(self.lower, offset // BLOCK_BYTES * BLOCK_BYTES, min(end, self.limit))):
            visible = self._visible(index)
            base = index * BLOCK_BYTES
            if visible and offset <= base and end >= base + _page_up(visible) * PAGE_BYTES:
                hidden.add(index)
            elif visible:
                self._put_block(index, self._load(index, visible))
        self.masked |= hidden

    def _mask(self, before: set[int]) -> None:
        """A block that was given back must not be seen from below again."""
        gone = {index for index in before - self.blocks.keys() if index * BLOCK_BYTES < self.limit}
        if gone:
            self.masked |= gone

    def check(self, size: int) -> None:
        """See `Content.check`."""
        assert self.limit <= max(size, 0), "seen from below beyond the size"
        assert self.limit <= self.lower.size
        super().check(size)
