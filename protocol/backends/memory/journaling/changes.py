"""The effects of many changes: of all since the beginning of an epoch, of an import ahead of it, and of a whole state.

`changes_since` takes the effects of an epoch from its pre-images.

Versions share blocks, and a block that versions share is replaced and never changed (see `content`).  So the blocks
that changed are those that are another object than in the pre-image.  A block that a restore took from a snapshot is
recorded as a reference to that snapshot: a restore costs as little on disk as in memory, and sharing survives a replay.

A reference names a snapshot and an inode, not an epoch: which epoch holds a version depends on when views were open.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.blocks import Block, SparseBlock
from protocol.backends.memory.content import BLOCK_BYTES
from protocol.backends.memory.history.undo import Epoch, PreInodes, PreNames, merged
from protocol.journal import effects
from protocol.journal.log import Batch
from protocol.journal.records import Kind

if TYPE_CHECKING:
    from protocol.backends.memory.blocks import Block
    from protocol.backends.memory.history.undo import Epoch, PreInodes
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState
    from protocol.journal.directory import Journal
    from protocol.journal.log import Log
    from protocol.journal.records import Buffer

Source = tuple[int, int, int]  # the serial of a snapshot, the number of an inode in it, the index of a block
_Sources = Mapping[int, Source] | Callable[[], Mapping[int, Source]]
_SourcesOf = Callable[[int], _Sources]


def changes_since(state: MemoryState, epoch: Epoch, ahead: RecordedAhead | None) -> Iterator[bytes]:
    """Yield the effects that lead from the beginning of `epoch`, the newest, to the live state, one by one.

    `ahead`: what the journal has already.
    """
    end = EpochEnd(state, epoch, {}, {})
    return epoch_effects(epoch, end, lambda number: functools.partial(_sources, state, epoch, number), ahead)


class EpochEnd:
    """The state at the end of an epoch, where the epoch changed it.  `later`: the pre-images of all epochs after it."""

    def __init__(self, state: MemoryState, epoch: Epoch, later: PreInodes, later_names: PreNames) -> None:
        live = state.inodes.get
        self.inodes = {number: later[number] if number in later else live(number) for number in epoch.inodes}
        self.entries: dict[int, Mapping[bytes, int]] = {}  # of the directories
        for number, node in self.inodes.items():
            if (
                node is not None
                and node.children is not None
                and (epoch.inodes[number] is None or number in epoch.names)
            ):
                self.entries[number] = listing_at(node, later_names)


def epoch_effects(
    epoch: Epoch, end: EpochEnd, sources: _SourcesOf, ahead: RecordedAhead | None = None
) -> Iterator[bytes]:
    """Yield the effects that lead from the beginning of `epoch` to its `end`.  `sources`: see `inode_details`.

    Inodes come first, then names, then inodes that are gone, so each effect refers to something that exists.
    """
    recorded = () if ahead is None else ahead.inodes_of(epoch.inodes)
    if ahead is not None and recorded:
        yield from ahead.inode_effects()
        for number in recorded:
            top = end.inodes[number]
            if number in ahead.tops and top is not None:
                yield effects.inode(top)
    for number, before in epoch.inodes.items():
        now = end.inodes[number]
        if now is not None and number not in recorded:
            yield effects.inode(now)
            if before is None:
                yield effects.of_number(effects.RESET, number)
            yield from inode_details(before, now, sources(number), ahead)
    if ahead is not None and recorded:
        yield from ahead.entry_effects()
    yield from _changed_names(epoch, end, recorded)
    for number, now in end.inodes.items():
        if now is None:
            yield effects.of_number(effects.FREE, number)


def _changed_names(epoch: Epoch, end: EpochEnd, recorded: Collection[int]) -> Iterator[bytes]:
    for number, before in epoch.inodes.items():
        if before is None and number not in recorded:
            for name, child in end.entries.get(number, _NOTHING).items():
                yield effects.entry(number, name, child)
    for directory, names in epoch.names.items():
        if epoch.inodes[directory] is None:
            continue  # listed above, or made, or revived, and removed while a view was open: see `MemoryState.release`
        entries = end.entries.get(directory, _NOTHING)
        for name in names:
            yield effects.entry(directory, name, entries.get(name, 0))


def inode_details(
    before: Inode | None,
    now: Inode,
    sources: _Sources,
    ahead: RecordedAhead | None = None,
) -> Iterator[bytes]:
    """Yield the effects from version `before` (None: nothing) to `now`, other than attributes and entries.

    `sources`: where snapshots show blocks, by the identity of the block; or a function that returns it.
    """
    number = now.inode
    followed = now.followed
    if followed is not None and (before is None or before.followed != followed):
        yield effects.with_value(effects.FOLLOWED, number, followed)
    if now.xattrs is not (None if before is None else before.xattrs):
        yield effects.xattrs(number, now.xattrs)
    if now.target is not None and (before is None or before.target != now.target):
        yield effects.target(number, now.target)
    old = before.content if before is not None else None
    content = now.content
    if content is old:
        return
    source, old_source = (None if each is None else each.source for each in (content, old))
    if source != old_source:
        yield effects.with_value(effects.CONTENT, number, source)
        old = None
    visible = None if content is None else content.visible
    if visible is not None and (old is None or old.visible != visible):
        yield effects.with_value(effects.VISIBLE, number, visible)
    old_blocks = old.blocks if old is not None else {}
    blocks = content.blocks if content is not None else {}
    for index in old_blocks.keys() - blocks.keys():
        yield effects.at_offset(effects.NO_BLOCK, number, index)
    changed = {index: block for index, block in blocks.items() if old_blocks.get(index) is not block}
    if changed:
        yield from _changed_blocks(number, changed, sources, ahead)
    reserved = content.reserved if content is not None else ()
    if reserved != (old.reserved if old is not None else ()):
        yield effects.with_value(effects.RESERVATIONS, number, list(reserved))


def _changed_blocks(
    number: int,
    changed: Mapping[int, Block],
    sources: _Sources,
    ahead: RecordedAhead | None,
) -> Iterator[bytes]:
    """Yield the effects that set blocks: by a reference to where the journal has them, or with their content."""
    if ahead is not None:
        left = {}
        for index, block in changed.items():
            kept = ahead.take(index, block)
            if kept is None:
                left[index] = block
            else:
                yield effects.of_range(effects.STORED_BLOCK, number, index, kept)
        changed = left
    if changed and callable(sources):
        sources = sources()
    for index, block in changed.items():
        source = sources.get(id(block)) if isinstance(sources, Mapping) else None
        if source is not None:
            yield effects.shared_block(number, index, *source)
        else:
            yield from whole_block(number, index, block)


def whole_block(number: int, index: int, block: Block) -> Iterator[bytes]:
    """Yield the effect that sets a block."""
    if isinstance(block, SparseBlock):
        yield effects.sparse_block(number, index, block.length, block.pages)
    else:
        yield effects.with_data(effects.BLOCK, number, index, len(block)) + block


def _sources(state: MemoryState, epoch: Epoch, number: int) -> dict[int, Source]:
    """Return where snapshots show the blocks of inode `number`, by the identity of the block.

    `epoch` is the newest.
    """
    found: dict[int, Source] = {}
    serial: int | None = None  # of the newest snapshot that shows the next version
    for each in state.log.epochs():
        if each.info is not None:
            serial = each.serial
        if number in each.inodes:
            version = each.inodes[number]
            if version is not None and version.content is not None and serial is not None and each is not epoch:
                found.update((id(block), (serial, number, index)) for index, block in version.content.blocks.items())
            if each is not epoch:
                serial = None  # it shows this version, and not the later ones
    return found


SMALLEST_BYTES: Final = 16 << 10  # recording a smaller block costs little more than a reference to it
_EFFECT_BYTES: Final = 64
_STEP_BYTES: Final = 32 << 10
_STEP_PIECES: Final = 64
_STEP_BLOCKS: Final = 256  # that are not stored


class RecordedAhead:
    """Writes parts of a transaction to `journal` before the transaction, in small steps.

    A transaction is one step of the serving loop and one batch of the journal.  Without this, all of its content and
    new inodes would be written within that step, and no request answered meanwhile: 2 s for 100,000 small files.  Parts
    written ahead change nothing: they count when the batch of the transaction refers to them.

    Invariants:

    1. A block is held as long as its number is known, so no other object gets its identity.  The caller does not change
       it until `clear`.
    2. Inodes that are stored are complete in the journal, with their entries.  Until `clear` only the attributes of
       those in `tops` change.  Another transaction may come before theirs, and calls `clear`.

    Other requests may be recorded between two steps.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._numbers: dict[int, tuple[int, Block]] = {}  # by identity
        self._pieces: dict[int, tuple[int, bytes]] = {}  # of content that no block has yet, by index
        self._count = 0
        self._cleared = 0  # how often
        self._inodes: AbstractSet[int] = frozenset()
        self._inode_parts: list[int] = []
        self._entry_parts: list[int] = []
        self.tops: Collection[int] = ()  # of `inodes_of`: those whose attributes the transaction changes

    def store(self, blocks: Iterable[Block]) -> Iterator[None]:
        """Store blocks, one in each step.  Small ones are left to their references.  Nobody changes them.  OSError."""
        for count, block in enumerate(blocks):
            if not isinstance(block, SparseBlock) and len(block) >= SMALLEST_BYTES and id(block) not in self._numbers:
                self._numbers[id(block)] = self._append(block), block
                yield
            elif count % _STEP_BLOCKS == 0:
                yield

    def store_content(self, data: bytes) -> Iterator[None]:
        """Store what will be the content of a file.  OSError."""
        view = memoryview(data)
        for start in range(0, len(data), BLOCK_BYTES):
            piece = bytes(view[start : start + BLOCK_BYTES])
            if len(piece) >= SMALLEST_BYTES:
                self._pieces[start // BLOCK_BYTES] = self._append(piece), piece
                yield

    def store_inodes(self, nodes: Iterable[Inode], tops: Collection[int]) -> Iterator[None]:
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
            for number in self._store_effects(pieces):
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
            yield effects.of_number(effects.RESET, node.inode)
            yield from inode_details(None, node, {}, self)

    def _store_effects(self, pieces: Iterable[bytes]) -> Iterator[int]:
        """Store effects, some in each step; yield the number of each STORE."""
        part: list[bytes] = []
        size = 0
        for piece in pieces:
            part.append(piece)
            size += len(piece)
            if size >= _STEP_BYTES or len(part) >= _STEP_PIECES:
                yield self._append(b"".join(part))
                part, size = [], 0
        if part:
            yield self._append(b"".join(part))

    def inodes_of(self, changed: PreInodes) -> Collection[int]:
        """Return the inodes that are stored, if they belong to the transaction that has `changed` these."""
        return self._inodes if self._inodes <= changed.keys() else ()

    def _append(self, data: Buffer) -> int:
        log, number = self._journal.log, self._count
        log.require(len(data) + _EFFECT_BYTES)
        # A part: it is not synced, and does not count unless something after it does.
        log.append([effects.with_data(effects.STORE, number, 0, len(data)), data], Kind.PART, undone=True)
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
        return map(functools.partial(effects.of_number, effects.STORED_EFFECTS), self._inode_parts)

    def entry_effects(self) -> Iterator[bytes]:
        """Yield the effects that make the entries of the stored inodes."""
        return map(functools.partial(effects.of_number, effects.STORED_EFFECTS), self._entry_parts)

    def clear(self) -> None:
        """Forget everything: the transaction is recorded, or will not be."""
        self._numbers.clear()
        self._pieces.clear()
        self._inodes, self._inode_parts, self._entry_parts, self.tops = frozenset(), [], [], ()
        self._count = 0
        self._cleared += 1


_PROGRESS_PIECES: Final = 256


def write_image(image: Image, log: Log, progress: Callable[[], None] = lambda: None) -> None:
    """Append `image` to `log` as one batch; call `progress` again and again.

    OSError, EBADMSG if the image could not be replayed: it must not replace the journal.
    """
    batch = Batch(log)
    batch.add(_observed(image.checked(image.effects()), progress))
    batch.end()


def _observed(pieces: Iterator[bytes], progress: Callable[[], None]) -> Iterator[bytes]:
    for number, piece in enumerate(pieces):
        if number % _PROGRESS_PIECES == 0:
            progress()
        yield piece


class Image:
    """An image: effects that lead from an empty volume to a state with all its snapshots.

    It begins with the state of the oldest epoch, and continues with the changes of each epoch, as the journal itself
    would.  So a replay needs no code of its own for images, and versions share their blocks after it as before.
    """

    def __init__(self, state: MemoryState, notes: Mapping[str, bytes]) -> None:
        self._state = state
        self._notes = notes
        self._sources: dict[int, Source] = {}  # of the blocks that a snapshot shows, by identity
        self._touched: dict[int, int] = {}  # inode -> the last epoch that changed it

    def oldest(self) -> tuple[PreInodes, PreNames]:
        """Return the inodes of the oldest state, and the pre-images of its names."""
        inodes, names = merged(self._state.log.epochs())
        for number, live in self._state.inodes.items():
            inodes.setdefault(number, live)
        return inodes, names

    def effects(self) -> Iterator[bytes]:
        epochs = self._state.log.epochs()
        yield from self.beginning(*self.oldest())
        named = -1  # the newest epoch that begins with a snapshot
        for at, (epoch, end) in enumerate(zip(epochs, self._ends(epochs), strict=True)):
            if epoch.info is not None:
                named = at
                yield effects.with_value(effects.SNAPSHOT, 0, epoch.info)
            yield from self.begin_epoch(epoch)
            for number, before in epoch.inodes.items():
                if before is not None and named > self._touched.get(number, -1):
                    self._add_sources(before, epochs[named].serial)
                self._touched[number] = at
            yield from epoch_effects(epoch, end, lambda _: self._sources)
        yield from self.cookies()
        yield effects.of_number(effects.NEXT, self._state.next_inode)
        yield effects.of_number(effects.INVALIDATED)  # an image is begun when no change is in progress
        for key, value in self._notes.items():
            yield effects.note(key, value)

    def checked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield `pieces`; OSError (EBADMSG) for an entry of, or to, an inode that does not exist at that point.

        Reading a whole image back would take the memory of the state once more, and as long as writing it.
        """
        existing: set[int] = set()
        for piece in pieces:
            code, number, other = effects.subjects(piece)
            if code == effects.INODE:
                existing.add(number)
            elif code == effects.FREE:
                existing.discard(number)
            elif code == effects.ENTRY and (number not in existing or (other and other not in existing)):
                raise OSError(
                    errno.EBADMSG, f"the image has an entry of inode {number} to {other}, and lacks one of them"
                )
            yield piece

    def cookies(self) -> Iterator[bytes]:
        """Yield the cookies of the directories that were listed."""
        for number, live in self._state.inodes.items():
            if live.cookies is not None:
                yield effects.cookies(number, live.cookies)

    def begin_epoch(self, epoch: Epoch) -> Iterator[bytes]:  # noqa: ARG002
        """Yield the effects with which a subclass begins an epoch."""
        yield from ()

    def beginning(self, inodes: PreInodes, names: PreNames) -> Iterator[bytes]:
        """Yield the effects that make the oldest state, from its inodes and the pre-images of its names."""
        yield from self.first_inodes(inodes)
        yield from self.first_names(inodes, names)

    def first_inodes(self, inodes: PreInodes) -> Iterator[bytes]:
        for inode in inodes.values():
            if inode is not None:
                yield effects.inode(inode)
                yield from inode_details(None, inode, {})

    def first_names(self, inodes: PreInodes, names: PreNames) -> Iterator[bytes]:
        for inode in inodes.values():
            if inode is not None and inode.children is not None:
                for name, number in listing_at(inode, names).items():
                    yield effects.entry(inode.inode, name, number)

    def _ends(self, epochs: Sequence[Epoch]) -> list[EpochEnd]:
        """Return the ends of the epochs."""
        ends = []
        later: PreInodes = {}
        later_names: PreNames = {}
        for epoch in reversed(epochs):
            ends.append(EpochEnd(self._state, epoch, later, later_names))
            later.update(epoch.inodes)
            for directory, names in epoch.names.items():
                later_names[directory] = {**later_names.get(directory, {}), **names}
        return ends[::-1]

    def _add_sources(self, version: Inode, serial: int) -> None:
        """Record the blocks of a version that the snapshot `serial` shows."""
        if version.content is not None:
            for index, block in version.content.blocks.items():
                self._sources.setdefault(id(block), (serial, version.inode, index))


def listing_at(directory: Inode, names: PreNames) -> Mapping[bytes, int]:
    """Return the entries of a directory at the moment that the pre-images `names` lead back to."""
    assert directory.children is not None
    earlier = names.get(directory.inode)
    if not earlier:
        return directory.children
    listing = {**directory.children, **earlier}
    return {name: number for name, number in listing.items() if number}


_NOTHING: Final[Mapping[bytes, int]] = {}
