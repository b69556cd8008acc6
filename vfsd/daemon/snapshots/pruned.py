"""PrunedSnapshots: the automatic snapshots that a volume dropped to free memory, until a command has named them.

Each has a note in the journal, which is recorded together with its removal, so that the next daemon names it, too, and
cuts the undo history there.

Invariant: a snapshot is in `_waiting` until an answer has named it, and its serial in `lost` until the next step has
cut the history.  It has a note, with what is left of both, while it is in one of them.

Threading: the serving loop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from protocol.values import Value
from protocol.volume_extensions import SnapshotInfo

_logger = logging.getLogger(__name__)
_NAMED: Final = 1000  # the newest that one answer names
_NOTE: Final = "pruned "  # and the serial


class PrunedRecord(Value):
    """A snapshot as a journal and an upgrade have it.

    `is_waiting`: no answer has named it.  `is_lost`: it is a safety snapshot, and the history was not cut there.
    """

    name: str
    serial: int
    created_ns: int
    is_waiting: bool
    is_lost: bool


class PrunedSnapshots:
    """Those of one workspace.  `note` keeps a value in the journal, with the next change; b"" removes it."""

    def __init__(self, note: Callable[[str, bytes], None], recorded: Iterable[PrunedRecord]) -> None:
        self._note = note
        self._records: dict[int, PrunedRecord] = {record.serial: record for record in recorded}

    @property
    def lost(self) -> Collection[int]:
        """The serials of safety snapshots that were dropped since the last step."""
        return {record.serial for record in self._records.values() if record.is_lost}

    def records(self) -> list[PrunedRecord]:
        """Return what the next daemon needs."""
        return list(self._records.values())

    def add(self, info: SnapshotInfo) -> None:
        """Add a snapshot that the volume has dropped."""
        _logger.info("dropped %s: memory was needed (--max-memory)", info.name)
        is_lost = info.kind == "safety"
        self._keep(PrunedRecord(info.name, info.serial, info.created_ns, is_waiting=True, is_lost=is_lost))
        if len(self._records) > _NAMED:
            oldest = next((each for each in self._records.values() if each.is_waiting and not each.is_lost), None)
            if oldest is not None:
                self._keep(msgspec.structs.replace(oldest, is_waiting=False))

    def collect(self) -> Sequence[SnapshotInfo]:
        """Return those that no answer has named yet."""
        found = [record for record in self._records.values() if record.is_waiting]
        for record in found:
            self._keep(msgspec.structs.replace(record, is_waiting=False))
        return [SnapshotInfo(each.name, each.serial, each.created_ns, 0, 0, 0) for each in found]

    def cut(self) -> None:
        """The undo history was cut at those in `lost`."""
        for record in self.records():
            self._keep(msgspec.structs.replace(record, is_lost=False))

    def _keep(self, record: PrunedRecord) -> None:
        is_needed = record.is_waiting or record.is_lost
        if is_needed:
            self._records[record.serial] = record
        else:
            self._records.pop(record.serial, None)
        self._note(f"{_NOTE}{record.serial}", msgspec.msgpack.encode(record) if is_needed else b"")


def recorded(notes: Mapping[str, bytes]) -> list[PrunedRecord]:
    """Return the records that the notes of a journal have."""
    found = []
    for key, value in notes.items():
        if key.startswith(_NOTE) and value:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.msgpack.decode(value, type=PrunedRecord))
    return sorted(found, key=lambda record: record.serial)
