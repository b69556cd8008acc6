"""Content: the bytes of one regular file, sparse, in blocks that versions share until one version writes.

Invariants (checked by `check`), besides those of `shared_blocks`:

- a block has 1 to BLOCK_BYTES bytes; bytes beyond its end, and missing blocks, read as zeros;
- `holes[i]` has a bit for each page of block i, below the block's end, that was never written and takes no memory.  A
  block with such pages is a `SparseBlock`; a block without them is dense and has no key; no block has only holes;
- `pages` counts the pages written plus those reserved by fallocate; a page is never both, and never reserved twice.  A
  reserved page reads as zeros and is a hole until a second fallocate fills it, as on tmpfs.

tmpfs counts pages in st_blocks and distinguishes them for SEEK_HOLE; blocks are larger, because each dense block costs
a dict entry and an object.  Source: mm/shmem.c; lseek(2), fallocate(2).
"""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise, takewhile
from typing import TYPE_CHECKING, Any, Final

from protocol.backends.memory.blocks import (
    BLOCK_CHARGE_BYTES,
    NONE_OWNED,
    PAGE_BYTES,
    Block,
    Reserved,
    SharedBlocks,
    SparseBlock,
    block_bytes,
    joined,
    overlap,
    page_bits,
    page_up,
    within,
    without,
)
from protocol.backends.memory.ledger import Ledger
from protocol.compiled import mypyc_attr
from protocol.errors import os_error
from protocol.tree import Chunk, Hole

if TYPE_CHECKING:
    from protocol.volume import Buffer

BLOCK_BYTES: Final = 128 * 1024
SECTORS_PER_PAGE: Final = PAGE_BYTES // 512
_PAGES_PER_BLOCK: Final = BLOCK_BYTES // PAGE_BYTES
_BLOCK_SHIFT: Final = BLOCK_BYTES.bit_length() - 1
_PAGE_SHIFT: Final = PAGE_BYTES.bit_length() - 1
_BLOCK_MASK: Final = BLOCK_BYTES - 1

Range = tuple[int, int]  # first page, page after the last


# The charge of a page promised by fallocate: the most that writing it allocates.
_RESERVED_PAGE_BYTES: Final = PAGE_BYTES + 768


def _same_bytes(a: Block, b: Block) -> bool:
    """Return whether two blocks read the same; zeros follow the end of each."""
    if a is b:
        return True
    if isinstance(a, SparseBlock):
        a = a[:]
    if isinstance(b, SparseBlock):
        b = b[:]
    common = min(len(a), len(b))
    rest = a if len(a) > common else b
    return a[:common] == b[:common] and rest.count(0, common) == len(rest) - common


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of ranges that are (offset, length), adjacent ones as one."""
    start = end = 0
    for offset, length in ranges:
        if offset > end:
            if end > start:
                yield start, end
            start = offset
        end = offset + length
    if end > start:
        yield start, end


@mypyc_attr(allow_interpreted_subclasses=True)
class Content(SharedBlocks):
    """Sparse content.  Offsets and sizes are in bytes; the inode has the file's size.

    `ledger` is that of the state that the content belongs to; content that is never shared needs none.
    """

    __slots__ = ("holes", "pages", "reserved")

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger
        self.allocated = 0
        self.blocks = {}
        self.owned = None
        self.holes: dict[int, int] | None = None
        self.reserved: tuple[Reserved, ...] = ()
        self.pages = 0

    def share(self) -> Content:
        """Return a second content with the same bytes; from now on neither changes a shared block in place."""
        kind: Any = Content
        twin: Content = kind.__new__(kind)
        self._share_with(twin)
        return twin

    def _share_with(self, twin: Content) -> None:
        """Share all blocks with `twin`, which is new."""
        ledger = self.ledger
        if ledger is None:
            ledger = self.ledger = Ledger()
        owned = self.owned
        for index, block in self.blocks.items():
            if owned is not None and index not in owned:
                ledger.hold(block)
            elif ledger.hold(block, 2):
                ledger.kept -= block_bytes(block)  # two files had the same object: from now on it is charged once
        self.owned = NONE_OWNED
        twin.ledger = ledger
        twin.allocated = self.allocated
        twin.blocks = self.blocks.copy()
        twin.owned = NONE_OWNED
        twin.holes = self.holes.copy() if self.holes else None
        twin.reserved = self.reserved
        twin.pages = self.pages

    @classmethod
    def of_block(cls, ledger: Ledger, index: int, block: bytes) -> Content:
        """Return content of one block, at most BLOCK_BYTES long, which the caller charges."""
        kind: Any = cls
        content: Content = kind.__new__(kind)
        content.ledger = ledger
        length = len(block)
        content.allocated = length + (length >> 5) + BLOCK_CHARGE_BYTES  # as `block_bytes`
        content.blocks = {index: block}
        content.owned = content.holes = None
        content.reserved = ()
        content.pages = (length + PAGE_BYTES - 1) >> _PAGE_SHIFT
        return content

    @classmethod
    def of_chunks(
        cls, ledger: Ledger, chunks: Iterable[Chunk], check: Callable[[int, int], None]
    ) -> tuple[Content, int]:
        """Return content with the bytes of `chunks`, and their number; chunks of zeros become holes, too.

        `check` is called before each write with the pages that the content then has, and the bytes of memory needed.
        """
        content = cls(ledger)
        offset = 0
        for chunk in chunks:
            if not isinstance(chunk, Hole) and chunk.count(0) < len(chunk):
                growth = content.growth(offset, len(chunk))
                needed = content.allocated + len(chunk) + (len(chunk) >> 3) + 2 * BLOCK_BYTES
                check(content.pages + growth, needed)
                content.write(offset, chunk, growth)
            offset += len(chunk)
        return content, offset

    @property
    def source(self) -> object:
        """For a journal: what the parts that `blocks` lack are read from; None: they are zeros."""
        return None

    @property
    def visible(self) -> object:
        """The parts of `source` that the file still shows, as a journal records them; None without a source."""
        return None

    @property
    def sectors(self) -> int:
        """Units of 512 bytes, as st_blocks counts them: whole pages written or reserved."""
        return self.pages * SECTORS_PER_PAGE

    # -- memory ledger -----------------------------------------------------------------------
    @property
    def charge(self) -> int:
        """The charge of this content in a live file, in bytes."""
        if self.reserved:
            return self.allocated + sum(each.after - each.first for each in self.reserved) * _RESERVED_PAGE_BYTES
        return self.allocated

    def same_as(self, other: Content) -> bool:
        """Return whether both read the same; cheap for versions of one file, which share blocks."""
        return all(
            _same_bytes(self.blocks.get(index, b""), other.blocks.get(index, b""))
            for index in self.blocks.keys() | other.blocks.keys()
        )

    # -- reading -----------------------------------------------------------------------------
    def read(self, offset: int, size: int) -> bytes | bytearray:
        """Return exactly `size` bytes from `offset`; the caller clips them to the file's size."""
        start = offset & _BLOCK_MASK
        if start + size <= BLOCK_BYTES:
            block = self.blocks.get(offset >> _BLOCK_SHIFT)
            if block is None:
                return bytes(size)
            piece = block[start : start + size]
            return piece if len(piece) == size else piece + bytes(size - len(piece))
        return b"".join(self.pieces(offset, size))

    def pieces(self, offset: int, size: int) -> list[bytes | bytearray]:
        """Return the bytes of `read` as a list of pieces; a whole block that is `bytes` is not copied."""
        pieces = []
        while size > 0:
            part = min(size, BLOCK_BYTES - (offset & _BLOCK_MASK))
            pieces.append(self.read(offset, part))
            offset += part
            size -= part
        return pieces

    def seek_data(self, offset: int, size: int) -> int:
        """Return the offset of the first data at or after `offset` in a file of `size` bytes.  ENXIO if none."""
        page = offset >> _PAGE_SHIFT
        for first, after in self._allocated_ranges(page):
            start = max(first, page) << _PAGE_SHIFT
            if after > page and start < size:
                return max(start, offset)
        raise os_error(errno.ENXIO)

    def seek_hole(self, offset: int, size: int) -> int:
        """Return the offset of the first hole at or after `offset`; the end of the file counts as one."""
        page = offset >> _PAGE_SHIFT
        reached = page
        for first, after in self._allocated_ranges(page):
            if after <= reached:
                continue
            if first > reached:
                break
            reached = after
        return min(size, max(offset, reached << _PAGE_SHIFT))

    def data_ranges(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of the written ranges in order; adjacent ranges are not joined."""
        for first, after in self._data_ranges(0):
            start, end = first << _PAGE_SHIFT, min(after << _PAGE_SHIFT, size)
            if end > start:
                yield start, end - start

    def data_within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the (start, end) of the written ranges between two offsets; adjacent ranges are not joined."""
        for first, after in self._data_ranges(start >> _PAGE_SHIFT):
            low, high = max(start, first << _PAGE_SHIFT), min(end, after << _PAGE_SHIFT)
            if low >= end:
                return
            if low < high:
                yield low, high

    def chunks(self, size: int, most: int) -> Iterator[Chunk]:
        """Yield the content of a file of `size` bytes as `Tree.chunks` does, with at most `most` bytes in a chunk."""
        at = 0
        for start, end in _joined(self.data_ranges(size)):
            if start > at:
                yield Hole(start - at)
            for offset in range(start, end, most):
                yield bytes(self.read(offset, min(most, end - offset)))
            at = end
        if at < size:
            yield Hole(size - at)

    def _allocated_ranges(self, page: int) -> Iterator[Range]:
        """Yield `_data_ranges` and the ranges that were reserved twice."""
        twice = ((first, after) for first, after, is_data in self.reserved if is_data and after > page)
        return heapq.merge(self._data_ranges(page), twice) if self.reserved else self._data_ranges(page)

    def _data_ranges(self, page: int) -> Iterator[Range]:
        """Yield runs of written pages (first, after), in order, from the block that contains `page`."""
        first_block = page // _PAGES_PER_BLOCK
        for index in sorted(i for i in self.blocks if i >= first_block):
            yield from self._block_ranges(index)

    def _block_ranges(self, index: int) -> Iterator[Range]:
        """Yield the runs of written pages in block `index`."""
        base = index * _PAGES_PER_BLOCK
        count = page_up(len(self.blocks[index]))
        holes = self.holes.get(index, 0) if self.holes else 0
        if not holes:
            yield base, base + count
            return
        start = None
        for bit in range(count + 1):
            present = bit < count and not holes >> bit & 1
            if present and start is None:
                start = bit
            elif not present and start is not None:
                yield base + start, base + bit
                start = None

    # -- writing -----------------------------------------------------------------------------
    def growth(self, offset: int, length: int) -> int:
        """Return how many pages a write of `length` bytes at `offset` would add to `pages`."""
        if not length:
            return 0
        end = offset + length
        new = 0
        for index in range(offset >> _BLOCK_SHIFT, ((end - 1) >> _BLOCK_SHIFT) + 1):
            base = index << _BLOCK_SHIFT
            first = max(0, offset - base) >> _PAGE_SHIFT
            after = page_up(min(BLOCK_BYTES, end - base))
            block = self.blocks.get(index)
            if block is None:
                new += after - first
                continue
            present = page_up(len(block))
            if after > present:
                new += after - max(first, present)
            if self.holes and index in self.holes:
                new += (self.holes[index] & page_bits(first, after)).bit_count()
        if self.reserved:
            new -= overlap(self.reserved, offset >> _PAGE_SHIFT, page_up(end))
        return new

    def write(self, offset: int, data: Buffer, growth: int) -> None:
        """Write all of `data`, at least one byte; `growth` is the result of `growth()` for it."""
        length = len(data)
        start = offset & _BLOCK_MASK
        if start + length <= BLOCK_BYTES:
            self._write_block(offset >> _BLOCK_SHIFT, start, data)
        else:
            view = memoryview(data)
            done = 0
            while done < length:
                start = (offset + done) & _BLOCK_MASK
                part = min(length - done, BLOCK_BYTES - start)
                self._write_block((offset + done) >> _BLOCK_SHIFT, start, view[done : done + part])
                done += part
        self.pages += growth
        if self.reserved:
            self.reserved = without(self.reserved, offset >> _PAGE_SHIFT, page_up(offset + length))

    def recount(self, first: int, after: int) -> None:
        """Recount the pages after a write to pages `first` to `after` that ended with MemoryError."""
        self.reserved = without(self.reserved, first, after) if self.reserved else self.reserved
        self.pages = sum(map(self._block_pages, self.blocks)) + sum(each.after - each.first for each in self.reserved)

    def write_plainly(self, offset: int, end: int, data: Buffer, ledger: Ledger) -> int:
        """Do `growth` and `write` in one step for the usual write; return the growth, or -1 if nothing was done.

        The usual write lies within one block, which only this version has and which has no holes, and starts at its end
        or before; or it starts a new block.  The allocated bytes are charged to `ledger` as content of a live file.
        Without this method write requests of 1 to 4 KiB take 23 to 36 % longer (`python -m bench.dispatch`).
        """
        if self.holes is not None or self.owned is not None or self.reserved or (offset ^ (end - 1)) >> _BLOCK_SHIFT:
            return -1
        blocks = self.blocks
        index = offset >> _BLOCK_SHIFT
        block = blocks.get(index)
        start = offset & _BLOCK_MASK
        if block is None:
            if start:
                return -1
            blocks[index] = bytes(data)
            length = end - offset
            growth = (length + PAGE_BYTES - 1) >> _PAGE_SHIFT
            charge = length + (length >> 5) + BLOCK_CHARGE_BYTES  # as `block_bytes`
            self.allocated += charge
            ledger.content += charge
        else:
            length = len(block)
            if start > length:
                return -1
            stop = start + end - offset
            if not start and stop >= length:
                charge = stop + (stop >> 5) + BLOCK_CHARGE_BYTES - block_bytes(block)
                blocks[index] = bytes(data)  # charged afterwards, as below: MemoryError must change neither
                self.allocated += charge
                ledger.content += charge
            elif type(block) is bytearray:
                block[start:stop] = data
                if stop > length:
                    charge = stop + (stop >> 3) - length - (length >> 3)
                    self.allocated += charge
                    ledger.content += charge
            else:
                now = max(stop, length)
                charge = now + (now >> 3) - length - (length >> 5)
                block = bytearray(block)  # type: ignore[arg-type]  # no holes: none is sparse
                block[start:stop] = data
                blocks[index] = block
                self.allocated += charge
                ledger.content += charge
            growth = ((stop - 1) >> _PAGE_SHIFT) - ((length - 1) >> _PAGE_SHIFT) if stop > length else 0
        self.pages += growth
        return growth

    def _write_block(self, index: int, start: int, data: Buffer) -> None:
        block = self.blocks.get(index)
        end = start + len(data)
        if block is None:
            if start < PAGE_BYTES:
                self._replace_block(index, bytes(start) + data if start else bytes(data))
            else:
                sparse = SparseBlock(0, {})
                sparse.write(start, data)
                self._replace_block(index, sparse)
                self._add_holes(index, page_bits(0, start >> _PAGE_SHIFT))
            return
        if start == 0 and end >= len(block):
            self._replace_block(index, bytes(data))
            if self.holes:
                self.holes.pop(index, None)
            return
        mutable = self._writable_block(index)
        if start > len(mutable):
            bits = page_bits(page_up(len(mutable)), start >> _PAGE_SHIFT)
            if bits and not isinstance(mutable, SparseBlock):
                mutable = SparseBlock.of(mutable, 0)
                self._replace_block(index, mutable)
            self._add_holes(index, bits)
        before = block_bytes(mutable)
        try:
            if isinstance(mutable, SparseBlock):
                mutable.write(start, data)
            else:
                if start > len(mutable):
                    mutable.extend(bytes(start - len(mutable)))
                mutable[start:end] = data
        finally:  # MemoryError can occur between two pages
            self.allocated += block_bytes(mutable) - before
        if self.holes and index in self.holes:
            self._clear_holes(index, page_bits(start >> _PAGE_SHIFT, page_up(end)))

    def _writable_block(self, index: int) -> bytearray | SparseBlock:
        """Return block `index` as an owned block that can be changed in place; copy it if necessary."""
        block = self.blocks[index]
        if type(block) is not bytes and (self.owned is None or index in self.owned):
            return block  # type: ignore[return-value]
        if isinstance(block, SparseBlock):
            mutable: bytearray | SparseBlock = SparseBlock(block.length, block.pages.copy())
        else:
            mutable = bytearray(block)
        self._replace_block(index, mutable)
        return mutable

    def _add_holes(self, index: int, bits: int) -> None:
        if bits:
            if self.holes is None:
                self.holes = {}
            self.holes[index] = self.holes.get(index, 0) | bits

    def _clear_holes(self, index: int, bits: int) -> None:
        """Clear holes of the sparse block `index`; a block without holes becomes dense."""
        assert self.holes is not None
        left = self.holes[index] & ~bits
        if left:
            self.holes[index] = left
            return
        dense = bytearray(self.blocks[index][:])
        del self.holes[index]
        self._replace_block(index, dense)

    # -- shrinking and allocating --------------------------------------------------------------
    def truncate(self, size: int) -> None:
        """Drop everything from `size` on."""
        last, start = size >> _BLOCK_SHIFT, size & _BLOCK_MASK
        if self.blocks:
            beyond = [i for i in self.blocks if i > last or (i == last and not start)]
            for index in beyond:
                self._drop_block(index)
            block = self.blocks.get(last)
            if block is not None and len(block) > start:
                self._cut_block(last, start)
        if self.reserved:
            after = max(page_up(size), *(each.after for each in self.reserved))
            self._unreserve(page_up(size), after)

    def _drop_block(self, index: int) -> None:
        self.pages -= self._block_pages(index)
        self._remove_block(index)

    def _remove_block(self, index: int) -> None:
        self._give_up(index, self.blocks.pop(index))
        if isinstance(self.owned, set):
            self.owned.discard(index)
        if self.holes:
            self.holes.pop(index, None)

    def _block_pages(self, index: int) -> int:
        holes = self.holes.get(index, 0) if self.holes else 0
        return page_up(len(self.blocks[index])) - holes.bit_count()

    def _cut_block(self, index: int, length: int) -> None:
        """Shorten block `index` to `length` bytes; drop it if no written page is left."""
        before = self._block_pages(index)
        block = self.blocks[index]
        if isinstance(block, SparseBlock):
            short = block.cut(length)
            after = len(short.pages)
            if after:
                self._replace_block(index, short)
                self._clear_holes(index, ~page_bits(0, page_up(length)))
            else:
                self._remove_block(index)
        else:
            self._replace_block(index, block[:length])
            after = self._block_pages(index)
        self.pages += after - before

    def punch(self, offset: int, length: int) -> None:
        """Make a hole: free whole pages and zero parts of pages.  FALLOC_FL_PUNCH_HOLE."""
        end = offset + length
        touched = [i for i in self.blocks if i << _BLOCK_SHIFT < end and (i + 1) << _BLOCK_SHIFT > offset]
        for index in touched:
            base = index << _BLOCK_SHIFT
            self._punch_block(index, max(0, offset - base), end - base)
        if self.reserved:
            self._unreserve(page_up(offset), end >> _PAGE_SHIFT)

    def _punch_block(self, index: int, start: int, end: int) -> None:
        """Punch from `start` to `end`, both relative to the block; `end` may lie beyond it."""
        length = len(self.blocks[index])
        if start >= length:
            return
        reaches_end = end >= page_up(length) << _PAGE_SHIFT
        if reaches_end and start == 0:
            self._drop_block(index)
            return
        before = self._block_pages(index)
        stop = min(length, end)
        first = page_up(start)
        if reaches_end and first << _PAGE_SHIFT < length:  # a shorter block instead of holes at its end
            if start & PAGE_BYTES - 1:
                self._zero(index, start, first << _PAGE_SHIFT)
            self._cut_block(index, first << _PAGE_SHIFT)
            return
        last = stop >> _PAGE_SHIFT
        if start < first << _PAGE_SHIFT:
            self._zero(index, start, min(stop, first << _PAGE_SHIFT))
        if first <= last and last << _PAGE_SHIFT < stop:
            self._zero(index, max(start, last << _PAGE_SHIFT), stop)
        if last > first:
            holes = (self.holes.get(index, 0) if self.holes else 0) | page_bits(first, last)
            if holes.bit_count() == page_up(length):
                self._remove_block(index)
                self.pages -= before
                return
            self._replace_block(index, SparseBlock.of(self.blocks[index], holes))
            self._add_holes(index, holes)
            self.pages += self._block_pages(index) - before

    def _zero(self, index: int, start: int, stop: int) -> None:
        """Overwrite a part of one page of block `index` with zeros, if the page was written."""
        if self.holes and self.holes.get(index, 0) >> (start >> _PAGE_SHIFT) & 1:
            return
        block = self._writable_block(index)
        self.allocated -= block_bytes(block)
        if isinstance(block, SparseBlock):
            block.write(start, bytes(stop - start))
        else:
            block[start:stop] = bytes(stop - start)
        self.allocated += block_bytes(block)

    def reservation(self, offset: int, length: int) -> int:
        """Return how many pages `reserve` would add."""
        first, after = offset >> _PAGE_SHIFT, page_up(offset + length)
        written = sum(
            max(0, min(after, end) - max(first, start)) for start, end in self._data_ranges(first) if start < after
        )
        return after - first - written - overlap(self.reserved, first, after)

    def reserve(self, offset: int, length: int) -> None:
        """Count missing pages as used, so that writing them cannot fail; fill those that were reserved before."""
        first, after = offset >> _PAGE_SHIFT, page_up(offset + length)
        added = self.reservation(offset, length)
        again = [each._replace(is_data=True) for each in within(self.reserved, first, after)]
        written = takewhile(lambda each: each[0] < after, self._data_ranges(first))
        missing: tuple[Reserved, ...] = (Reserved(first, after),)
        for start, end, *_ in chain(written, again):
            missing = without(missing, start, end)
        self.reserved = joined(chain(without(self.reserved, first, after), again, missing))
        self.pages += added

    def _unreserve(self, first: int, after: int) -> None:
        if after > first:
            self.pages -= overlap(self.reserved, first, after)
            self.reserved = without(self.reserved, first, after)

    # -- replaying a journal -------------------------------------------------------------------
    def set_block(self, index: int, block: Block | None) -> None:
        """Replace block `index` by `block`, which nothing else holds; None removes it."""
        if index in self.blocks:
            self._drop_block(index)
        if block is not None:
            self._replace_block(index, block)
            self._count_block(index, block)

    def share_block(self, index: int, source: Content, source_index: int) -> None:
        """Replace block `index` by one that another version has, live or old; neither changes it in place then."""
        assert self.ledger is not None
        block = source.blocks[source_index]
        if source.owned is None or source_index in source.owned:
            if self.ledger.hold(block):
                self.ledger.kept -= block_bytes(block)  # as in `_share_with`
            source.owned = set(source.blocks if source.owned is None else source.owned) - {source_index}
        self.ledger.hold(block)
        self.ledger.kept -= block_bytes(block)
        if index in self.blocks:
            self._drop_block(index)
        if self.owned is None:
            self.owned = set(self.blocks)
        self.blocks[index] = block
        self.allocated += block_bytes(block)
        self._count_block(index, block)

    def _count_block(self, index: int, block: Block) -> None:
        """Count the pages of a block that was just set, and record its holes."""
        if isinstance(block, SparseBlock):
            self._add_holes(index, page_bits(0, page_up(block.length)) & ~sum(1 << page for page in block.pages))
        self.pages += self._block_pages(index)

    def set_reservations(self, ranges: tuple[Reserved, ...]) -> None:
        """Replace all reservations."""
        before, after = (sum(each.after - each.first for each in some) for some in (self.reserved, ranges))
        self.reserved = ranges
        self.pages += after - before

    # -- invariants ----------------------------------------------------------------------------
    def check(self, size: int) -> None:
        """Raise AssertionError if an invariant of the module's docstring does not hold."""
        pages = 0
        for index, block in self.blocks.items():
            assert 0 < len(block) <= BLOCK_BYTES, (index, len(block))
            assert (index << _BLOCK_SHIFT) + len(block) <= size, "content beyond the size"
            pages += self._block_pages(index)
            assert self._block_pages(index) > 0, "a block of holes only"
            assert isinstance(block, SparseBlock) == bool(self.holes and index in self.holes), "sparse without holes"
            if isinstance(block, SparseBlock):
                assert len(block.pages) == self._block_pages(index), "pages that are holes"
        for index, bits in (self.holes or {}).items():
            assert bits, "a key without holes"
            assert bits >> page_up(len(self.blocks[index])) == 0, "holes beyond the block"
            for bit in range(_PAGES_PER_BLOCK):
                if bits >> bit & 1:
                    page = self.blocks[index][bit << _PAGE_SHIFT : (bit + 1) << _PAGE_SHIFT]
                    assert page == bytes(len(page)), "a hole that is not zeros"
        assert self.reserved == joined(self.reserved), "reservations out of order, or in pieces"
        for before, each in pairwise(self.reserved):
            assert before.after <= each.first, "reserved twice"
        for first, after, _ in self.reserved:
            assert first < after
            assert not any(min(after, e) > max(first, s) for s, e in self._data_ranges(first)), "written and reserved"
        assert self.pages == pages + sum(each.after - each.first for each in self.reserved), "page count"
        self.check_ownership()
