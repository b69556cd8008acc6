"""OverlayReplay: applies recorded effects to a new overlay.  Reads nothing from the lower layer.

Files below may have changed since they were recorded.  The volume notices it as it does in a running overlay: at the
next read (see `protocol.backends.overlay.volume`).

Threading: nothing else uses the state.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.backends.memory.content import Content
from protocol.backends.memory.journaling.handover import Giving, Taking
from protocol.backends.memory.journaling.replay import Replay
from protocol.backends.overlay.host_lower import KEPT_BYTES, PrivateCopy
from protocol.backends.overlay.inode import LowerContent, OverlayInode
from protocol.backends.overlay.journaling.recorder import Identities, KeptValue, Renewed, Visible
from protocol.backends.overlay.known_inodes import KnownInodes, LowerValue
from protocol.backends.overlay.lower import (
    FileRecord,
    Identity,
    IdentityRecord,
    LowerFile,
    RecordedStat,
    recorded_identity,
)
from protocol.journal import effects

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.journaling.replay import Replay
    from protocol.backends.overlay.journaling.recorder import OverlayImage
    from protocol.backends.overlay.state import OverlayState
    from protocol.backends.overlay.volume import OverlayVolume


class OverlayReplay(Replay):
    """Applies effects to `state`.

    `base` is the epoch of the base, until an effect says otherwise; the attribute has it at the end, and `identities`
    has those of files that applies wrote.
    """

    def __init__(self, state: OverlayState, notes: dict[str, bytes], base: Epoch) -> None:
        super().__init__(state, notes)
        self.base = base
        self.identities: dict[bytes, Identity | None] = {}
        self._overlay = state
        self._devices: dict[int, int] = {}  # device of the lower layer when the image was written -> now
        self._files: dict[FileRecord, LowerFile] = {}  # versions of one file share it
        self._is_begun = False
        self._handlers |= {
            effects.LOWER: self._lower,
            effects.LISTING: self._listing,
            effects.KIND: self._kind,
            effects.FOLLOWED: self._followed,
            effects.CONTENT: self._content,
            effects.VISIBLE: self._visible,
            effects.KEPT: self._kept,
            effects.BASE: self._base,
            effects.IDENTITIES: self._identities,
            effects.RENEWED: self._renewed,
            effects.DEVICE: self._device,
            effects.KNOWN: self._known,
        }

    def apply(self, batch: Sequence[bytes]) -> None:
        if not self._is_begun:
            self._is_begun = True
            # The journal says when the base begins: everything before that is older than all epochs.
            self._state.log.close(self.base)
            self._state.log.serial = self._state.epoch = 0
        super().apply(batch)

    # -- the lower layer ---------------------------------------------------------------------------
    def _device(self, device: int, _encoded: bytes) -> None:
        self._devices = {device: self._overlay.device}

    def _known(self, _number: int, encoded: bytes) -> None:
        known = self._overlay.known
        assert known is not None
        known.take(msgspec.msgpack.decode(encoded, type=bytes))

    def _identity(self, record: IdentityRecord) -> Identity:
        device, *rest = recorded_identity(record)
        number, size, mtime_ns, ctime_ns = rest
        return self._devices.get(device, device), number, size, mtime_ns, ctime_ns

    def _file(self, record: FileRecord) -> LowerFile:
        """Return the file of a record; the same one for the same record."""
        record = (record[0], self._devices.get(record[1], record[1]), *record[2:])
        file = self._files.get(record)
        if file is None:
            file = self._files[record] = self._overlay.lower.file(record[0], RecordedStat.of(record))
        return file

    def _lower(self, number: int, encoded: bytes) -> None:
        value = msgspec.msgpack.decode(encoded, type=LowerValue)
        ((_, found),) = effects.decoded(value.attributes)
        file = self._file(value.file)
        seen = RecordedStat.of(file.record)._replace(
            st_mode=found.mode, st_nlink=found.nlink, st_uid=found.uid, st_gid=found.gid, st_size=found.size,
            st_atime_ns=found.atime_ns, st_mtime_ns=found.mtime_ns, st_ctime_ns=found.ctime_ns, st_rdev=found.rdev,
        )  # fmt: skip
        state = self._overlay
        xattrs = None if value.xattrs is None else dict(value.xattrs)
        state.put_recorded(number, file, seen, tuple(value.links), xattrs, value.target)
        node = state.table[number]
        if not node.nlink:
            state.lookups[number] = 1  # until it is freed

    def _listing(self, number: int, encoded: bytes) -> None:
        self._overlay.put_listing(number, msgspec.msgpack.decode(encoded, type=list[tuple[bytes, int, int]]))

    def _kind(self, number: int, encoded: bytes) -> None:
        self._overlay.correct(number, msgspec.msgpack.decode(encoded, type=int))

    def _followed(self, number: int, encoded: bytes) -> None:
        node = self._owned(number)
        assert isinstance(node, OverlayInode)
        node.lower = self._file(msgspec.msgpack.decode(encoded, type=FileRecord))

    def _kept(self, _number: int, encoded: bytes) -> None:
        value = msgspec.msgpack.decode(encoded, type=KeptValue)
        file = self._file(value.file)
        file.is_recorded = True
        if file.size <= KEPT_BYTES:
            file.kept = value.data
            return
        if value.offset == 0:
            with tempfile.TemporaryFile() as unnamed:
                file.kept = PrivateCopy(os.dup(unnamed.fileno()))
        assert isinstance(file.kept, PrivateCopy)
        file.kept.write(value.data, value.offset)

    def _renewed(self, _number: int, encoded: bytes) -> None:
        rows = msgspec.msgpack.decode(encoded, type=Renewed)
        renewed = {(self._devices.get(device, device), inode): self._identity(record) for device, inode, record in rows}
        self._overlay.renew(renewed)
        self._files = {file.record: file for file in self._files.values()}

    # -- content -----------------------------------------------------------------------------------
    def _content(self, number: int, encoded: bytes) -> None:
        record = msgspec.msgpack.decode(encoded, type=FileRecord | None)
        state = self._state
        content = None if record is None else LowerContent(self._file(record), state.ledger)
        state.swap_content(self._owned(number), content, shared=False)

    def _visible(self, number: int, encoded: bytes) -> None:
        limit, runs = msgspec.msgpack.decode(encoded, type=Visible)

        def change(content: Content) -> None:
            assert isinstance(content, LowerContent)
            content.set_visible(limit, runs)

        self._change(number, change)

    def _punch(self, number: int, offset: int, length: int) -> None:
        def change(content: Content) -> None:
            if isinstance(content, LowerContent):
                content.punch_blocks(offset, length)
            else:
                content.punch(offset, length)

        self._change(number, change)

    # -- the base ----------------------------------------------------------------------------------
    def _base(self, serial: int, _encoded: bytes) -> None:
        state = self._state
        state.log.serial = max(state.log.serial, serial - 1)
        before, self.base = self.base, state.open_epoch(None)
        if before in state.log.epochs():
            state.log.close(before)

    def _identities(self, _number: int, encoded: bytes) -> None:
        rows: Any = msgspec.msgpack.decode(encoded, type=Identities)
        self.identities = {path: None if record is None else self._identity(record) for path, record in rows}


class OverlayGiving(Giving):
    """Handover of an overlay to a successor, in addition to what `Giving` does for a memory volume.

    The image has the inodes of the lower layer that changed.  The kernel also knows others, which `KnownInodes`
    describes: the forked process writes its records after the image, and `rest` has those loaded since.  So both
    processes give an inode, and a name in a listing, the same numbers.  The new process loads an inode when it is used.

    Invariant: `recorded` and `listed` of the state have at least what the image introduces, so that the log introduces
    no inode a second time.  Under the state's lock, because views load from other threads.
    """

    def __init__(self, volume: OverlayVolume, state: OverlayState, new_image: Callable[[], OverlayImage]) -> None:
        super().__init__(volume, state, new_image)
        self.below = volume.lower.fingerprint
        self._overlay_volume = volume
        self._overlay = state
        self._new_overlay_image = new_image
        self._kept_before = state.known
        with state.lock:
            if self._own is None:
                new_image().introduce()
            if state.known is None:
                state.known = KnownInodes(state, None)
            self._known = state.known
            self._known.recent = []

    def image(self) -> OverlayImage:
        self._overlay.known = None  # what this process loads is not for the log of the process that serves
        image = self._new_overlay_image()
        image.known = self._known
        return image

    def known(self) -> tuple[list[bytes], list[int]]:
        return self._known.recent or [], list(self._overlay_volume.outdated)

    def end(self) -> None:
        super().end()
        with self._overlay.lock:
            self._known.recent = None
            self._overlay.known = self._kept_before
            if self._own is None:
                self._overlay.recorded.clear()
                self._overlay.listed.clear()


class OverlayTaking(Taking):
    """See `Taking`."""

    def __init__(
        self, volume: OverlayVolume, state: OverlayState, replay: Replay, replayed: Callable[[Replay], None]
    ) -> None:
        super().__init__(volume, state, replay, replayed)
        self.below = volume.lower.fingerprint
        self._overlay_volume = volume
        self._overlay = state
        self._known = state.known = state.known or KnownInodes(state, None)

    def know(self, known: list[bytes], outdated: list[int]) -> None:
        for record in known:
            self._known.take(record)
        self._overlay_volume.outdated.update(outdated)
