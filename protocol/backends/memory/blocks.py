"""The blocks of file content: `bytes` or `bytearray` for a dense block, `SparseBlock` for a block with holes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
