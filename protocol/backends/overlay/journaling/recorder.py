"""OverlayRecorder, which writes the effects of every change of an overlay to its journal, and the image of an overlay.

In addition to what holds for every `Recorder`: an effect never depends on the lower layer, so a replay reads nothing
from it.  Before an inode of the lower layer changes for the first time, it is introduced as it was loaded, with the
directories above it, and, of a directory, with its entries (`Introductions`).  Blocks that are copied up are recorded.

The values in the effects of overlays (`protocol.journal.effects`):

    LOWER       number, `LowerValue`
    LISTING     number of the directory, `Listing`
    KIND        number, type bits of the mode, or 0
    FOLLOWED    number, `FileRecord`
    CONTENT     number, `FileRecord`, or None for content that is empty
    VISIBLE     number, `LowerContent.visible`
    KEPT        0, `KeptValue`
    BASE        serial of the epoch that begins with the base, None
    IDENTITIES  0, [(path, `IdentityRecord` or None)]
    RENEWED     0, [(device, inode, `IdentityRecord`)]
    DEVICE      the device number, None

Threading: the serving loop; other threads load inodes under the state's lock, and what they find waits in two queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from protocol.backends.memory.content import BLOCK_BYTES
from protocol.backends.memory.journaling.changes import (
    Image,
    RecordedAhead,
    changes_since,
    inode_details,
    listing_at,
    whole_block,
)
from protocol.backends.memory.journaling.recorder import Recorder
from protocol.backends.overlay.inode import LowerContent, OverlayInode
from protocol.backends.overlay.known_inodes import lower_effect
from protocol.backends.overlay.lower import FileRecord, IdentityRecord, identity_record
from protocol.journal import effects
from protocol.journal.log import Batch
from protocol.tree import TYPE_MASK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.backends.memory.history.undo import Epoch, PreInodes, PreNames
    from protocol.backends.memory.inode import Inode, Link
    from protocol.backends.overlay.known_inodes import KnownInodes
    from protocol.backends.overlay.lower import Identity, LowerFile
    from protocol.backends.overlay.state import OverlayState
    from protocol.backends.overlay.volume import OverlayVolume
    from protocol.journal.directory import Journal
    from protocol.journal.records import Buffer

_BLOCK_BYTES: Final = BLOCK_BYTES + 4096  # of the effect with a block, at most
_MASK_BYTES: Final = 16  # of a run of masked blocks, at most
_CORRECTIONS_BYTES: Final = 1024  # fit into the space that every call requires


class _Write:
    """A write to a file of the lower layer, from its request to its record."""

    def __init__(self, content: LowerContent, copied_up: list[int]) -> None:
        self.copied_up = copied_up
        self.limit = content.limit
        self.masked = content.masked

    @property
    def size_bytes(self) -> int:
        """A bound of the bytes that it adds to the record."""
        return len(self.copied_up) * (_BLOCK_BYTES + _MASK_BYTES) + _MASK_BYTES * len(self.masked)


class ApplyRecord:
    """The record of an apply, which has changed the lower directory already: a failure is raised by `end` only."""

    def __init__(self, state: OverlayState, batch: Batch) -> None:
        self._state = state
        self._batch = batch
        self._introduced: list[Introductions] = []
        self._failure: OSError | None = None

    def add(self, pieces: Iterable[bytes]) -> None:
        """Add effects."""
        if self._failure is None:
            try:
                self._batch.add(pieces)
            except OSError as error:
                self._failure = error

    def lower(self, identities: Mapping[bytes, Identity | None], renewed: Mapping[tuple[int, int], Identity]) -> None:
        """Add what happened to the lower directory, and the content of files that the state still needs."""
        self.add([identities_effect(identities), renewed_effect(renewed)])
        for file in kept_files(self._state):  # which have their new identities
            if not file.is_recorded:
                self.add(kept(file))
                file.is_recorded = True

    def changes(self, epoch: Epoch) -> None:
        """Add the changes since the beginning of `epoch`, the newest."""
        introductions = Introductions(self._state, epoch.inodes, epoch.names)
        self._introduced.append(introductions)
        self.add(overlay_changes(self._state, epoch, introductions, None))

    def base(self, epoch: Epoch) -> None:
        """Add the changes since the beginning of `epoch`, and that the present state is the base: the next epoch."""
        self.changes(epoch)
        self.add([effects.with_value(effects.BASE, self._state.log.serial + 1, None)])

    def end(self) -> None:
        """Have the record count.  OSError."""
        if self._failure is None:
            try:
                self._batch.end()
            except OSError as error:
                self._failure = error
        if self._failure is not None:
            self._batch.abort()
            for introductions in reversed(self._introduced):
                introductions.withdraw()
            reason = (
                f"the changes were applied, but the journal cannot record that ({self._failure.strerror}): free space"
                " on its file system, then `vfsd compact`"
            )
            raise OSError(self._failure.errno, reason) from self._failure


def overlay_changes(
    state: OverlayState, epoch: Epoch, introductions: Introductions, ahead: RecordedAhead | None
) -> Iterator[bytes]:
    """Yield the effects since the beginning of `epoch`, the newest, after the introductions that they need."""
    for number, before in list(epoch.inodes.items()):
        if isinstance(before, OverlayInode):
            yield from introductions.of(number, listing=True)
    yield from changes_since(state, epoch, ahead)
    yield from introductions.cookies()


class OverlayRecorder(Recorder):
    """Records the changes of `volume`, whose state is `state`, in `journal`."""

    def __init__(self, volume: OverlayVolume, state: OverlayState, journal: Journal) -> None:
        super().__init__(volume, state, journal)
        self._overlay = state
        self._introduced: list[Introductions] = []  # whose effects are in `_pending`
        self._introductions: list[bytes] = []  # those effects
        self._corrections: deque[tuple[tuple[Link, ...], int, int]] = deque()
        self._unlisted: deque[int] = deque()  # directories with numbers that only a record keeps
        self._writing: _Write | None = None
        self._blocks: set[int] = set()  # of a file of the lower layer, before fallocate(2)
        self._epoch: Introductions
        state.on_correction = lambda links, number, kind: self._corrections.append((links, number, kind))
        state.on_new_numbers = self._unlisted.append

    def unbind(self) -> None:
        super().unbind()
        self._overlay.on_correction = self._overlay.on_new_numbers = None

    # -- records ---------------------------------------------------------------------------------
    def _require(self, length: int, *, removes: bool = False) -> None:
        try:
            super()._require(length, removes=removes)
        except OSError:
            self._withdraw()
            raise

    def _withdraw(self) -> None:
        """Take back the introductions that wait for a record, whose change was refused."""
        taken = set(map(id, self._introductions))
        self._pending = [effect for effect in self._pending if id(effect) not in taken]
        for introductions in reversed(self._introduced):
            introductions.withdraw()
        self._recorded_pending()

    def _recorded_pending(self) -> None:
        self._introduced.clear()
        self._introductions.clear()

    # -- the kernel ------------------------------------------------------------------------------
    def reconnect(self, requests: dict[int, list[int]]) -> None:
        super().reconnect(requests)
        known = self._overlay.known
        for number in () if known is None else known.expected_numbers:
            self._volume.pinned.add(number)
            self._state.lookups[number] = self._state.lookups.get(number, 0) + 1

    def record_listing(self, directory: Inode) -> None:
        """Record that the names of a directory get cookies, in the journal if that has the names."""
        known, number = self._overlay.known, directory.inode
        if not isinstance(directory, OverlayInode) or number in self._overlay.listed:
            super().record_listing(directory)
        elif known is not None:
            known.listed(number)

    def commit(self, *pieces: Buffer, result: int | None = None) -> None:
        if self._in_transaction:
            return
        corrections = list(self._corrected())
        if sum(map(len, corrections)) > _CORRECTIONS_BYTES and self._log.failure is None:
            self._log.require(sum(map(len, (*corrections, *self._pending, *pieces))), removes=True)
        self._pending += corrections
        try:
            super().commit(*pieces, result=result)
        finally:
            self._recorded_pending()  # a record that cannot be written yet is held

    def _corrected(self) -> Iterator[bytes]:
        """Yield the effects of names that changed below, in directories that the journal has."""
        while self._corrections:
            links, number, kind = self._corrections.popleft()
            if any(directory in self._overlay.listed for directory, _ in links):
                yield effects.with_value(effects.KIND, number, kind)

    def _record_epoch(self, epoch: Epoch) -> None:
        with self._overlay.lock:
            introductions = self._epoch = Introductions(self._overlay, epoch.inodes, epoch.names)
            try:
                super()._record_epoch(epoch)
            except OSError:
                introductions.withdraw()
                raise
        self._recorded_pending()

    def _changes(self, epoch: Epoch) -> Iterator[bytes]:
        yield from self._corrected()
        yield from overlay_changes(self._overlay, epoch, self._epoch, self.ahead)

    # -- apply -----------------------------------------------------------------------------------
    @contextmanager
    def applying(self) -> Iterator[ApplyRecord]:
        """Record what the block adds as one batch.  OSError, after the block, if that is impossible."""
        record = ApplyRecord(self._overlay, Batch(self._log, removes=True))
        record.add(self._pending)
        record.add(self._corrected())
        yield record
        record.end()
        self._pending.clear()
        self._recorded_pending()

    def flush(self) -> None:
        while self._unlisted:
            self._introduce(self._overlay.table.get(self._unlisted.popleft()))
        super().flush()

    def _introduce(self, *inodes: Inode | None) -> None:
        """Introduce inodes that are about to change."""
        if self._in_transaction:
            return  # its end introduces them
        state = self._overlay
        for inode in inodes:
            if not isinstance(inode, OverlayInode):
                continue
            number = inode.inode
            if state.recorded.get(number) is inode.lower and (inode.children is None or number in state.listed):
                continue
            with state.lock:
                introductions = Introductions(state, {}, {})
                self._introduced.append(introductions)
                made = [*introductions.of(number, listing=True), *introductions.cookies()]
            self._introductions += made
            self._pending += made

    # -- calls ---------------------------------------------------------------------------------
    def begin(self, length: int, *nodes: Inode | None, removes: bool = False) -> None:
        self._introduce(*nodes)
        super().begin(length, *nodes, removes=removes)

    def begin_write(self, node: Inode, offset: int, data: Buffer) -> None:
        self._introduce(node)
        self._pending += self._corrected()
        self._writing = None
        content = node.content
        if isinstance(content, LowerContent):
            self._begun = None
            self._writing = _Write(content, content.copied_up_by(offset, len(data)))
            self.begin(len(data) + self._writing.size_bytes, node)
        else:
            super().begin_write(node, offset, data)

    def wrote(self, node: Inode, offset: int, data: Buffer, done: int, *before: Buffer) -> None:
        """See `Recorder`.  Records also the blocks that were copied up, and masks."""
        writing, content, number = self._writing, node.content, node.inode
        pieces = list(before)
        if writing is not None:
            assert isinstance(content, LowerContent)
            for index in writing.copied_up:
                if index in content.blocks:
                    pieces += whole_block(number, index, content.blocks[index])
            if content.limit != writing.limit or content.masked is not writing.masked:
                pieces.append(effects.with_value(effects.VISIBLE, number, content.visible))
        super().wrote(node, offset, data, done, *pieces)

    def wrote_partly(self, node: Inode, offset: int, length: int) -> None:
        content, number = node.content, node.inode
        if not isinstance(content, LowerContent):
            super().wrote_partly(node, offset, length)
            return
        pieces: list[Buffer] = []
        for index in range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)):
            if index in content.blocks:
                pieces += whole_block(number, index, content.blocks[index])
        self.commit(
            *pieces, effects.with_value(effects.RESERVATIONS, number, list(content.reserved)), effects.inode(node)
        )

    def begin_allocation(self, node: Inode, *, is_hole: bool) -> None:
        content = node.content
        if not isinstance(content, LowerContent):
            super().begin_allocation(node, is_hole=is_hole)
            return
        self._blocks = set(content.blocks)
        # A hole copies up the two blocks that it covers in part, and masks the others.
        masks = _MASK_BYTES * (len(content.masked) + len(content.reserved) + 3)
        self.begin(2 * _BLOCK_BYTES + masks, node, removes=is_hole)

    def allocated(self, node: Inode, offset: int, length: int, *, is_hole: bool) -> None:
        content, number = node.content, node.inode
        if not isinstance(content, LowerContent):
            super().allocated(node, offset, length, is_hole=is_hole)
            return
        pieces: list[bytes] = []
        for index in sorted(content.blocks.keys() - self._blocks):
            pieces += whole_block(number, index, content.blocks[index])
        pieces.append(effects.with_value(effects.VISIBLE, number, content.visible))
        if is_hole:
            pieces.append(effects.of_range(effects.PUNCH, number, offset, length))
        else:
            pieces.append(effects.with_value(effects.RESERVATIONS, number, list(content.reserved)))
        self.commit(*pieces, effects.inode(node), *self._changed_xattrs(node), result=0)


_KEPT_BYTES: Final = 1 << 20  # in one effect


class Introductions:
    """Introduces inodes as they were at the moment that the pre-images `inodes` and `names` lead back to."""

    def __init__(self, state: OverlayState, inodes: PreInodes, names: PreNames) -> None:
        self._state = state
        self._inodes = inodes
        self._names = names
        self._recorded: list[tuple[int, LowerFile | None]] = []
        self._listed: list[int] = []

    def of(self, number: int, *, listing: bool) -> Iterator[bytes]:
        """Yield the effects that are missing for inode `number`; with its entries if `listing`."""
        state = self._state
        todo = [number]
        while todo:
            inode = self._version(todo.pop())
            if not isinstance(inode, OverlayInode) or self._is_recorded(inode):
                continue
            self._recorded.append((inode.inode, state.recorded.get(inode.inode)))
            state.recorded[inode.inode] = inode.lower
            links = [link for link in inode.links if isinstance(self._version(link[0]), OverlayInode)]
            yield lower_effect(inode, links)
            todo += (directory for directory, _ in links)
        if listing and number not in state.listed:
            yield from self.listing(number)

    def listing(self, number: int) -> Iterator[bytes]:
        """Yield the effect with the entries of `number`, if it is a directory of the lower layer."""
        inode = self._version(number)
        if isinstance(inode, OverlayInode) and inode.children is not None:
            entries = listing_at(inode, self._names)
            self._listed.append(number)
            self._state.listed.add(number)
            rows = [(name, child, self._kind(child)) for name, child in entries.items()]
            yield effects.with_value(effects.LISTING, number, rows)

    def cookies(self) -> Iterator[bytes]:
        """Yield the cookies of the listed directories, if a program has read their entries."""
        for number in self._listed:
            live = self._state.table.loaded(number)
            if live is not None and live.cookies is not None:
                yield effects.cookies(number, live.cookies)

    def withdraw(self) -> None:
        """Forget that these effects are in the journal."""
        for number, file in reversed(self._recorded):
            if file is None:
                del self._state.recorded[number]
            else:
                self._state.recorded[number] = file
        self._state.listed.difference_update(self._listed)

    def _version(self, number: int) -> Inode | None:
        return self._inodes[number] if number in self._inodes else self._state.table.get(number)

    def _is_recorded(self, inode: OverlayInode) -> bool:
        """Whether the journal has the inode; if it has not changed yet, with the lower file that it follows now."""
        file = self._state.recorded.get(inode.inode)
        if file is None:
            return False
        return file is inode.lower or file.record == inode.lower.record or not inode.follows(inode.lower.identity)

    def _kind(self, number: int) -> int:
        version = self._inodes.get(number)
        return (self._state.kind(number) if version is None else version.mode) & TYPE_MASK


def kept(file: LowerFile) -> Iterator[bytes]:
    """Yield the effects with the content of a file that an apply replaced."""
    for offset in range(0, max(1, file.size), _KEPT_BYTES):
        data = file.read(offset, min(_KEPT_BYTES, file.size - offset))
        yield effects.with_value(effects.KEPT, 0, KeptValue(file.record, offset, data))


def kept_files(state: OverlayState) -> list[LowerFile]:
    """Return the files that an apply replaced and whose content the state still needs."""
    files: dict[int, LowerFile] = {}
    for number in set(state.table).union(*(epoch.inodes for epoch in state.log.epochs())):
        for version in state.versions(number):
            if isinstance(version.content, LowerContent) and version.content.lower.kept is not None:
                files[id(version.content.lower)] = version.content.lower
    return list(files.values())


def identities_effect(identities: Mapping[bytes, Identity | None]) -> bytes:
    """Return the effect with the identities of the files that applies wrote."""
    rows = [(path, None if found is None else identity_record(found)) for path, found in identities.items()]
    return effects.with_value(effects.IDENTITIES, 0, rows)


def renewed_effect(renewed: Mapping[tuple[int, int], Identity]) -> bytes:
    """Return the effect of other ctimes of files below."""
    rows = [(*key, identity_record(found)) for key, found in renewed.items()]
    return effects.with_value(effects.RENEWED, 0, rows)


Listing: TypeAlias = list[tuple[bytes, int, int]]
"""Name, inode number and type bits of each entry."""
Visible: TypeAlias = tuple[int, tuple[int, ...]]
Identities: TypeAlias = list[tuple[bytes, IdentityRecord | None]]
Renewed: TypeAlias = list[tuple[int, int, IdentityRecord]]


class KeptValue(NamedTuple):
    """A part of the content of a file; the parts come in order."""

    file: FileRecord
    offset: int
    data: bytes


class OverlayImage(Image):
    """The image of one state, whose base is the beginning of `base`.

    It begins with the inodes of the lower layer that changed, as they were in the oldest state, and records which state
    is the base.

    `known`: in an image for a successor, its records follow.
    """

    def __init__(
        self,
        state: OverlayState,
        notes: Mapping[str, bytes],
        base: Epoch,
        identities: Mapping[bytes, Identity | None],
    ) -> None:
        super().__init__(state, notes)
        self._overlay = state
        self._base = base
        self._identities = identities
        self.known: KnownInodes | None = None

    def cookies(self) -> Iterator[bytes]:
        """Yield the cookies of directories whose names the image has."""
        for number, live in self._overlay.table.items():
            is_listed = not isinstance(live, OverlayInode) or number in self._overlay.listed
            if live.cookies is not None and is_listed:
                yield effects.cookies(number, live.cookies)

    def effects(self) -> Iterator[bytes]:
        yield effects.with_value(effects.DEVICE, self._overlay.device, None)
        for file in kept_files(self._overlay):
            yield from kept(file)
        yield from super().effects()
        yield identities_effect(self._identities)
        for record in () if self.known is None else self.known.records():
            yield effects.with_value(effects.KNOWN, 0, record)

    def checked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield `pieces` unchecked: an entry may lead to an inode that is only below."""
        return pieces

    def begin_epoch(self, epoch: Epoch) -> Iterator[bytes]:
        if epoch is self._base:
            yield effects.with_value(effects.BASE, epoch.serial, None)

    def beginning(self, inodes: PreInodes, names: PreNames) -> Iterator[bytes]:
        state = self._overlay
        changed = self._changed()
        recorded, listed = [*state.recorded], state.listed.copy()
        # The image replaces what the journal has, so it introduces everything again.
        state.recorded.clear()
        state.listed.clear()
        introductions = Introductions(state, inodes, names)
        for number in dict.fromkeys((*recorded, *changed)):
            if inodes.get(number) is not None:
                yield from introductions.of(number, listing=False)
        own = {number: None if isinstance(inode, OverlayInode) else inode for number, inode in inodes.items()}
        yield from self.first_inodes(own)  # before the listings, which refer to them
        for number in dict.fromkeys((*listed, *changed)):
            if inodes.get(number) is not None:
                yield from introductions.listing(number)
        for number in list(state.recorded):
            inode = inodes.get(number)
            if isinstance(inode, OverlayInode):
                yield from _content(inode)
        yield from self.first_names(own, names)

    def introduce(self) -> None:
        """Have the state note what `effects` will introduce, in this process, which does not write the image."""
        inodes, names = self.oldest()
        introductions = Introductions(self._overlay, inodes, names)
        changed = [number for number in self._changed() if inodes.get(number) is not None]
        for number in changed:
            deque(introductions.of(number, listing=False), maxlen=0)
        for number in changed:
            deque(introductions.listing(number), maxlen=0)

    def _changed(self) -> list[int]:
        """Return the inodes of the lower layer that were ever changed, those that are gone included."""
        state = self._overlay
        numbers = {number for number, inode in dict.items(state.table) if inode.epoch}
        numbers = numbers.union(*(epoch.inodes for epoch in state.log.epochs()))
        found = []
        for number in sorted(numbers):
            versions = [each for each in state.versions(number) if isinstance(each, OverlayInode)]
            if any(each.epoch for each in versions) or (versions and state.table.loaded(number) is None):
                found.append(number)
        return found


def _content(inode: OverlayInode) -> Iterator[bytes]:
    """Yield how the content of the oldest version differs from its lower file."""
    content = inode.content
    if not inode.is_file:
        return
    if isinstance(content, LowerContent) and content.is_pristine and content.lower is inode.lower:
        return
    before = OverlayInode(inode.inode, inode.mode, 0, 0, 0, 0)
    before.lower, before.xattrs, before.target = inode.lower, inode.xattrs, inode.target
    before.content = LowerContent(inode.lower)
    yield from inode_details(before, inode, {})
