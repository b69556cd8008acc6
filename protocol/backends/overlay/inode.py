"""The parts of an overlay's state that come from the lower layer: inodes, content, entries of a directory, the table.

All of them load on demand (see `state`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from protocol.backends.memory.blocks import PAGE_BYTES, SparseBlock, page_bits, page_up
from protocol.backends.memory.content import BLOCK_BYTES, SECTORS_PER_PAGE, Content
from protocol.backends.memory.inode import Inode
from protocol.backends.overlay.lower import ChangedBelowError

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.ledger import Ledger
    from protocol.backends.overlay.lower import FileRecord, Identity, LowerFile, LowerStat
    from protocol.volume import Buffer


class OverlayInode(Inode):
    """`lower` is the file of the lower layer.

    A file's `nlink` is that of the lower file: larger than `links` while names are not loaded yet or lie outside DIR.
    """

    __slots__ = ("lower",)

    lower: LowerFile

    def set_size_and_times(self, seen: LowerStat) -> None:
        """Set size and times to those of the lower file."""
        self.size = seen.st_size
        self.atime_ns, self.mtime_ns, self.ctime_ns = seen.st_atime_ns, seen.st_mtime_ns, seen.st_ctime_ns
        self.birth_ns = min(self.mtime_ns, self.ctime_ns)

    def follows(self, was: Identity) -> bool:
        """Whether this version has no changes over the lower file, whose identity is `was`.

        A change sets the ctime.  Another mtime alone comes from a discard or a restore that touched the file.
        """
        content = self.content
        return (
            self.lower.identity == was
            and (self.size, self.ctime_ns) == (was[2], was[4])
            and (content is None or (isinstance(content, LowerContent) and content.is_pristine))
        )

    @property
    def followed(self) -> FileRecord:
        return self.lower.record

    def clone(self, epoch: int) -> OverlayInode:
        twin = super().clone(epoch)
        assert isinstance(twin, OverlayInode)
        twin.lower = self.lower
        return twin


def lower_files(version: Inode) -> set[LowerFile]:
    """The files of the lower layer that an inode came from, and that its content is read from."""
    found = {version.lower} if isinstance(version, OverlayInode) else set()
    return found | {version.content.lower} if isinstance(version.content, LowerContent) else found


_COUNTED_BLOCKS: Final = 64  # with more changed blocks the visible size of the lower file is estimated
_MASK_BYTES: Final = 96  # an integer in a set
_NO_MASK: Final[frozenset[int]] = frozenset()
_Staged = tuple[bytearray, int]  # a block, and the bits of its pages that are holes


def _filled_blocks(lower: LowerFile, start: int, end: int) -> Iterator[int]:
    """Yield the blocks with data of `lower` between two offsets, each once and in order.  ChangedBelowError."""
    last = -1
    for first, after in lower.ranges(start, end) if start < end else ():
        for index in range(max(last + 1, first // BLOCK_BYTES), -(-after // BLOCK_BYTES)):
            yield index
            last = index


class LowerContent(Content):
    """The content of a file of the lower layer with blocks that were written, truncated or punched above it.

    See `Content` for the methods; reading may raise ChangedBelowError.  In addition to what holds for every `Content`:

    - a block in `blocks` is the content of its range; nothing of the range is read from the lower file;
    - any other block is read from the lower file as far as `limit`, or is zeros if its index is in `masked`.  A hole in
      the lower file needs no mask, so a sparse file of terabytes stays cheap;
    - `pages` counts pages held in memory, without those of the lower file;
    - a block that is changed in part is first copied up whole (BLOCK_BYTES, with the holes of the lower file).

    Any thread may read a version that a snapshot holds; nothing is cached between two reads.
    """

    __slots__ = ("_staged", "limit", "lower", "masked")

    def __init__(self, lower: LowerFile, ledger: Ledger | None = None) -> None:
        super().__init__(ledger)
        self.lower = lower
        self.limit = lower.size
        self.masked = _NO_MASK
        self._staged: dict[int, _Staged] = {}

    def share(self) -> LowerContent:
        twin = LowerContent(self.lower)
        twin.limit = self.limit
        twin.masked = self.masked
        self._share_with(twin)
        return twin

    @property
    def source(self) -> FileRecord:
        return self.lower.record

    @property
    def visible(self) -> tuple[int, tuple[int, ...]]:
        """The limit, and the masked blocks as the first and the number of each run."""
        runs: list[int] = []
        for index in sorted(self.masked):
            if runs and index == runs[-2] + runs[-1]:
                runs[-1] += 1
            else:
                runs += (index, 1)
        return self.limit, tuple(runs)

    def set_visible(self, limit: int, runs: Sequence[int]) -> None:
        """Set what `visible` returns.  The caller counts the change of the charge."""
        self.limit = limit
        pairs = zip(runs[::2], runs[1::2], strict=True)
        self.masked = frozenset(chain.from_iterable(range(first, first + count) for first, count in pairs))

    def copied_up_by(self, offset: int, length: int) -> list[int]:
        """Return the blocks that a write would copy up from the lower file."""
        if not length:
            return []
        end = offset + length
        found = []
        for index in {offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES}:
            visible = self._visible(index)
            base = index * BLOCK_BYTES
            if visible and (offset > base or end < base + visible):
                found.append(index)
        return found

    @property
    def charge(self) -> int:
        return super().charge + _MASK_BYTES * len(self.masked)

    @property
    def is_pristine(self) -> bool:
        """Whether the content is exactly that of the lower file."""
        return not self.blocks and not self.masked and self.limit == self.lower.size and not self.reserved

    @property
    def needs_lower(self) -> bool:
        """Whether a part of the content is read from the lower file."""
        covered = sum(index * BLOCK_BYTES < self.limit for index in self.blocks.keys() | self.masked)
        return covered < -(-self.limit // BLOCK_BYTES)

    @property
    def sectors(self) -> int:
        """Units of 512 bytes: the pages in memory, and the part of the lower file that is still visible."""
        above = super().sectors
        count = -(-self.limit // BLOCK_BYTES)
        if not count:
            return above
        if self.is_pristine:
            return self.lower.sectors
        if len(self.blocks) + len(self.masked) <= _COUNTED_BLOCKS:
            with contextlib.suppress(ChangedBelowError):
                below = self._below_pages()
                return above + below * SECTORS_PER_PAGE
        seen = max(0, count - len(self.blocks.keys() | self.masked))
        return above + self.lower.sectors * seen // max(count, -(-self.lower.size // BLOCK_BYTES))

    def _below_pages(self) -> int:
        at = pages = 0
        for index in sorted(each for each in self.blocks.keys() | self.masked if each * BLOCK_BYTES < self.limit):
            pages += sum(b - a for a, b in self._below_ranges(at * BLOCK_BYTES, index * BLOCK_BYTES))
            at = index + 1
        return pages + sum(b - a for a, b in self._below_ranges(at * BLOCK_BYTES, self.limit))

    def same_as(self, other: Content) -> bool:
        """See `Content.same_as`.  Reads only blocks that one side reads from the lower file and the other does not."""
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
            return False  # the old content can no longer be read

    def _same_blocks(self, other: Content, indices: Iterable[int]) -> bool:
        return all(
            self.read(index * BLOCK_BYTES, BLOCK_BYTES) == other.read(index * BLOCK_BYTES, BLOCK_BYTES)
            for index in indices
        )

    # -- reading -------------------------------------------------------------------------------
    def _visible(self, index: int) -> int:
        """Return how many bytes of block `index` are read from the lower file."""
        if index in self.blocks or index in self.masked:
            return 0
        return max(0, min(BLOCK_BYTES, self.limit - index * BLOCK_BYTES))

    def read(self, offset: int, size: int) -> bytes | bytearray:
        index, start = divmod(offset, BLOCK_BYTES)
        if not self.blocks and not self.masked:
            return self._read_below(offset, size)
        if start + size > BLOCK_BYTES:
            return b"".join(self.pieces(offset, size))
        if self._visible(index):
            return self._read_below(offset, size)
        return super().read(offset, size)

    def pieces(self, offset: int, size: int) -> list[bytes | bytearray]:
        if not self.blocks and not self.masked:
            return [self._read_below(offset, size)]
        return super().pieces(offset, size)

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
                yield first // PAGE_BYTES, page_up(after)

    # -- copying up ----------------------------------------------------------------------------
    def growth(self, offset: int, length: int) -> int:
        """See `Content.growth`; counts the pages that must be copied up too."""
        if not length:
            return 0
        growth = super().growth(offset, length)  # counts every page of the write in a block that is not in memory
        self._staged = self._stage(offset, length)  # loaded once; `write` uses it too
        for index, (block, holes) in self._staged.items():
            present = page_bits(0, page_up(len(block))) & ~holes
            first = max(0, offset - index * BLOCK_BYTES) // PAGE_BYTES
            after = page_up(min(BLOCK_BYTES, offset + length - index * BLOCK_BYTES))
            growth += (present & ~page_bits(first, after)).bit_count()
        return growth

    def write(self, offset: int, data: Buffer, growth: int) -> None:
        before = self.pages
        for index, each in self._stage(offset, len(data)).items():
            self._put_block(index, each)
        self._staged = {}
        super().write(offset, data, growth - (self.pages - before))

    def _stage(self, offset: int, length: int) -> dict[int, _Staged]:
        """Return the blocks of the lower file that a write covers in part, as they are copied up."""
        return {
            index: self._staged.get(index) or self._load(index, self._visible(index))
            for index in self.copied_up_by(offset, length)
        }

    def _load(self, index: int, visible: int) -> _Staged:
        base = index * BLOCK_BYTES
        holes = page_bits(0, page_up(visible))
        for first, after in self.lower.ranges(base, base + visible):
            holes &= ~page_bits((first - base) // PAGE_BYTES, page_up(after - base))
        return bytearray(self.lower.read(base, visible)), holes

    def _put_block(self, index: int, staged: _Staged) -> None:
        """Install a block that was copied up, and count it; a block of holes only is masked."""
        block, holes = staged
        pages = page_up(len(block))
        if holes.bit_count() == pages:
            self.masked |= {index}
            return
        self._replace_block(index, SparseBlock.of(block, holes) if holes else block)
        if holes:
            self.holes = {**(self.holes or {}), index: holes}
        self.pages += pages - holes.bit_count()

    # -- shrinking -----------------------------------------------------------------------------
    def truncate(self, size: int) -> None:
        before = set(self.blocks)
        self._staged = {}
        self.limit = min(self.limit, size)
        self.masked = frozenset(index for index in self.masked if index * BLOCK_BYTES < self.limit)
        super().truncate(size)
        self._mask(before)

    def punch(self, offset: int, length: int) -> None:
        self._staged = {}
        if offset < self.limit:
            self._punch_below(offset, offset + length)
        self.punch_blocks(offset, length)

    def punch_blocks(self, offset: int, length: int) -> None:
        """Punch the blocks in memory, after the lower file was masked."""
        before = set(self.blocks)
        super().punch(offset, length)
        self._mask(before)

    def _punch_below(self, offset: int, end: int) -> None:
        # As on tmpfs, a page that the hole covers only in part stays, zeroed.
        if end >= page_up(self.limit) * PAGE_BYTES:
            self.limit = offset  # blocks in memory beyond `offset` stay; nothing of the lower file beyond it is visible
            return
        hidden = set()
        loaded = {}  # the blocks at both ends; all are read before the first change
        for index in list(_filled_blocks(self.lower, offset // BLOCK_BYTES * BLOCK_BYTES, min(end, self.limit))):
            visible = self._visible(index)
            base = index * BLOCK_BYTES
            if visible and offset <= base and end >= base + page_up(visible) * PAGE_BYTES:
                hidden.add(index)
            elif visible:
                loaded[index] = self._load(index, visible)
        for index, staged in loaded.items():
            self._put_block(index, staged)
        self.masked |= hidden

    def _mask(self, before: set[int]) -> None:
        """Mask blocks that were freed, so that the lower file does not become visible in their place."""
        gone = {index for index in before - self.blocks.keys() if index * BLOCK_BYTES < self.limit}
        if gone:
            self.masked |= gone

    def check(self, size: int) -> None:
        assert self.limit <= max(size, 0), "lower content beyond the size"
        assert self.limit <= self.lower.size
        super().check(size)


class FilledChildren(dict[bytes, int]):
    """Name to inode number, after loading: a dict without overrides."""

    __slots__ = ("fill",)

    fill: Callable[[], None]


class UnfilledChildren(FilledChildren):
    """Name to inode number, before loading.  Each access calls `fill`, which turns it into a `FilledChildren`.

    After that its class has no overrides, so every later access runs at the speed of a plain dict.  Any thread may ask;
    `fill` holds the state's lock.
    """

    __slots__ = ()

    def __init__(self, fill: Callable[[], None]) -> None:
        super().__init__()
        self.fill = fill

    def become(self, entries: dict[bytes, int]) -> None:
        """Finish loading, with `entries`."""
        self.update(entries)
        self.__class__ = FilledChildren  # type: ignore[assignment]  # last: other threads wait in `fill` until then


def _after_filling(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: UnfilledChildren, *args: Any) -> Any:
        self.fill()
        return method(self, *args)

    return call


for _name in (
    "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__",
    "copy", "get", "items", "keys", "values",
):  # fmt: skip
    setattr(UnfilledChildren, _name, _after_filling(getattr(dict, _name)))


class InodeTable(dict[int, "Inode"]):
    """Inode number to inode.  `make` creates the inode of an assigned number.  KeyError, FileNotFoundError.

    Its length counts the inodes held in memory as changes, not those of the lower layer.  Any thread may ask; `make`
    holds the state's lock.
    """

    __slots__ = ("below", "make")

    def __init__(self, inodes: dict[int, Inode], make: Callable[[int], Inode]) -> None:
        super().__init__(inodes)
        self.make = make
        self.below = 0

    def __missing__(self, number: int) -> Inode:
        return self.make(number)

    def __delitem__(self, number: int) -> None:
        if isinstance(dict.__getitem__(self, number), OverlayInode):
            self.below -= 1
        dict.__delitem__(self, number)

    def __len__(self) -> int:
        return dict.__len__(self) - self.below

    def get(self, number: int, default: Any = None) -> Any:
        found = dict.get(self, number)
        if found is not None:
            return found
        try:
            return self.make(number)
        except (KeyError, FileNotFoundError):
            return default

    def loaded(self, number: int) -> Inode | None:
        """The inode, if it was loaded."""
        return dict.get(self, number)
