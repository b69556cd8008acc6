"""OverlayRecorder: writes the effects of every change of an overlay to its journal.

In addition to what holds for every `Recorder`: an effect never depends on the lower layer.  Before an inode of the
lower layer changes for the first time, it is introduced (`Introductions`).  Blocks that are copied up are recorded.

Threading: the serving loop; other threads load inodes under the state's lock, and what they find waits in two queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.content import BLOCK_BYTES
from protocol.backends.memory.journaling.changes import RecordedAhead, changes_since, whole_block
from protocol.backends.memory.journaling.recorder import Recorder
from protocol.backends.overlay.inode import LowerContent, OverlayInode
from protocol.backends.overlay.journaling.introductions import (
    Introductions,
    identities_effect,
    kept,
    kept_files,
    renewed_effect,
)
from protocol.journal import effects
from protocol.journal.log import Batch

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.inode import Inode, Link
    from protocol.backends.overlay.lower import Identity
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
        """A bound of what it adds to the record."""
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
        self.add(overlay_changes(self._state, epoch, introductions, RecordedAhead()))

    def base(self, epoch: Epoch) -> None:
        """Add the changes since the beginning of `epoch`, and that the present state is the base: the next epoch."""
        self.changes(epoch)
        self.add([effects.of_overlay(effects.BASE, self._state.log.serial + 1, None)])

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
    state: OverlayState, epoch: Epoch, introductions: Introductions, ahead: RecordedAhead
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
            self.pinned.add(number)
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
        if sum(map(len, corrections)) > _CORRECTIONS_BYTES:
            self._log.require(sum(map(len, (*corrections, *self._pending, *pieces))), removes=True)
        self._pending += corrections
        super().commit(*pieces, result=result)
        self._recorded_pending()

    def _corrected(self) -> Iterator[bytes]:
        """Yield the effects of names that changed below, in directories that the journal has."""
        while self._corrections:
            links, number, kind = self._corrections.popleft()
            if any(directory in self._overlay.listed for directory, _ in links):
                yield effects.of_overlay(effects.KIND, number, kind)

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
        yield from overlay_changes(self._overlay, epoch, self._epoch, self._ahead)

    # -- apply -----------------------------------------------------------------------------------
    @contextmanager
    def applying(self) -> Iterator[ApplyRecord]:
        """Record what the block adds as one batch.  OSError, after the block, if that is impossible."""
        record = ApplyRecord(self._overlay, Batch(self._log))
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
                pieces.append(effects.of_overlay(effects.VISIBLE, number, content.visible))
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
        self.commit(*pieces, effects.reservations(number, content.reserved), effects.inode(node))

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
        pieces.append(effects.of_overlay(effects.VISIBLE, number, content.visible))
        if is_hole:
            pieces.append(effects.punch(number, offset, length))
        else:
            pieces.append(effects.reservations(number, content.reserved))
        self.commit(*pieces, effects.inode(node), *self._changed_xattrs(node), result=0)
