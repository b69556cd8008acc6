"""UndoHistory: the steps that `restore --undo` and `--redo` walk, and the position of the live state among them.

A step is one restore, import, merge, adoption, apply or discard that changed something.  The history is a sequence of
states, oldest first, with a step between each two, and a position: the state that the live one came from.

    state 0 --restore r1--> state 1 --restore r2--> state 2
                               ^ position: `--undo` goes to state 0, `--redo` to state 2

- A step keeps the live state at the position, drops the states after it (the redo branch), and adds a last state.
- `--undo` and `--redo` keep the live state at the position, and move by one.  So changes that programs made since the
  last step are kept at the position where they were made, and come back with it.

A state is kept as a safety snapshot, identified by its serial, which is never reused.  A safety snapshot is *loose*
when the history does not name it any more: it belonged to a redo branch that a new step cut off, to a state that was
overwritten after an undo, or to a step beyond STEPS_KEPT.  Loose snapshots can still be restored by name, until
`expired` lists them by number or age.

Invariants, which `check` verifies:

1. 0 <= position < number of states <= STEPS_KEPT + 1;
2. every state has a snapshot; the state at the position may have none, then only the live state holds it;
3. no two states have the same snapshot;
4. every state but the last has the name of the step that led away from it; the last has none.

A snapshot that a user drops leaves the history with its state (`among`); the steps on both sides of it become one.  A
snapshot that was dropped to free memory cuts the history (`cut`): the states beyond it, seen from the position, leave
the history too, so that no undo or redo skips a step.  Their snapshots become loose.

`PrunedSnapshots` are the automatic snapshots that a volume dropped to free memory, until a command has named them.
Each has a note in the journal, which is recorded together with its removal, so that the next daemon names it, too, and
cuts the undo history there.  Invariant: a snapshot waits until an answer has named it, and its serial is in `lost`
until the next step has cut the history.  It has a note, with what is left of both, while it is in one of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from protocol.values import Value
from protocol.volume_extensions import SnapshotInfo

STEPS_KEPT: Final = 50
LOOSE_KEPT: Final = 20
LOOSE_KEPT_DAYS: Final = 30
_DAY_NS: Final = 24 * 3600 * 10**9


class HistoryState(Value):
    """One state: the serial of its snapshot, if it has one, and the step that led away from it ("restore r1")."""

    serial: int | None = None
    step: str | None = None


class UndoHistory(Value):
    """See the module's docstring."""

    states: tuple[HistoryState, ...] = (HistoryState(),)
    position: int = 0
    is_cut_before: bool = False  # earlier states were dropped to free memory
    is_cut_after: bool = False  # later states were dropped to free memory

    # -- queries --------------------------------------------------------------------------------
    @property
    def undo_steps(self) -> int:
        """The number of possible undos."""
        return self.position

    @property
    def redo_steps(self) -> int:
        """The number of possible redos."""
        return len(self.states) - 1 - self.position

    @property
    def here(self) -> HistoryState:
        """The state that the live one came from."""
        return self.states[self.position]

    def step_between(self, position: int) -> str:
        """The name of the step between this position and the adjacent `position`."""
        return self.states[min(position, self.position)].step or ""

    def serials(self) -> set[int]:
        """The serials of all snapshots in the history."""
        return {state.serial for state in self.states if state.serial is not None}

    def position_of(self, serial: int) -> int | None:
        """The position of the state with snapshot `serial`."""
        return next((at for at, state in enumerate(self.states) if state.serial == serial), None)

    def steps_to(self, infos: Iterable[SnapshotInfo]) -> dict[str, int]:
        """The number of redos (positive) or undos (negative) to each of `infos` that is another state, by name."""
        at = {state.serial: number - self.position for number, state in enumerate(self.states)}
        return {info.name: at[info.serial] for info in infos if at.get(info.serial)}

    # -- changed copies -----------------------------------------------------------------------------
    def stepped(self, serial: int, step: str) -> UndoHistory:
        """Add `step`; the live state before it was kept as `serial`."""
        states = (*self.states[: self.position], HistoryState(serial, step), HistoryState())[-(STEPS_KEPT + 1) :]
        return UndoHistory(states, len(states) - 1, self.is_cut_before)

    def moved(self, position: int, serial: int | None) -> UndoHistory:
        """Move to `position`; the live state was kept as `serial` (None: its present snapshot stays)."""
        states = list(self.states)
        if serial is not None:
            states[self.position] = replace(self.here, serial=serial)
        return replace(self, states=tuple(states), position=position)

    def cut(self, serials: Collection[int]) -> UndoHistory:
        """Remove the states whose snapshots were dropped to free memory, and those that only these lead to."""
        lost = [at for at, state in enumerate(self.states) if state.serial in serials]
        first = max((at + 1 for at in lost if at < self.position), default=0)
        after = min((at for at in lost if at > self.position), default=len(self.states))
        states = list(self.states)
        if self.position in lost:
            states[self.position] = replace(self.here, serial=None)
        states[after - 1] = replace(states[after - 1], step=None)
        return UndoHistory(
            tuple(states[first:after]),
            self.position - first,
            self.is_cut_before or first > 0,
            self.is_cut_after or after < len(states),
        )

    def among(self, serials: Collection[int]) -> UndoHistory:
        """Remove the states whose snapshots are not among `serials`."""
        kept: list[HistoryState] = []
        position = 0
        for at, state in enumerate(self.states):
            if at == self.position:
                position = len(kept)
                kept.append(state if state.serial in serials else replace(state, serial=None))
            elif state.serial in serials:
                kept.append(state)
        kept[-1] = replace(kept[-1], step=None)
        return replace(self, states=tuple(kept), position=position)

    def check(self) -> None:
        """AssertionError if an invariant is violated."""
        assert 0 <= self.position < len(self.states) <= STEPS_KEPT + 1, (self.position, len(self.states))
        for at, state in enumerate(self.states):
            assert state.serial is not None or at == self.position, f"state {at} has no snapshot"
            assert (state.step is None) == (at == len(self.states) - 1), f"the step after state {at}: {state.step!r}"
        serials = [state.serial for state in self.states if state.serial is not None]
        assert len(serials) == len(set(serials)), f"a snapshot of two states: {serials}"

    # -- on disk -------------------------------------------------------------------------------------
    @classmethod
    def of_snapshots(cls, infos: Sequence[SnapshotInfo]) -> UndoHistory:
        """Derive a history from the safety snapshots: one was taken before each step.

        For stores of earlier versions, and for a history that a power failure damaged.
        """
        kept = [info for info in infos if info.kind == "safety"][-STEPS_KEPT:]
        return cls((*(HistoryState(info.serial, info.tag or "a restore") for info in kept), HistoryState()), len(kept))

    def encoded(self) -> bytes:
        """Encode; `decoded` is the inverse."""
        states = tuple((state.serial, state.step) for state in self.states)
        return msgspec.json.encode(_Written(_VERSION, self.position, states))

    @classmethod
    def decoded(cls, data: bytes) -> UndoHistory | None:
        """Decode; None for data that is not a valid history."""
        try:
            written = msgspec.json.decode(data, type=_Written)
            history = cls(tuple(HistoryState(*state) for state in written.states), written.position)
            history.check()
        except (msgspec.DecodeError, AssertionError):
            return None
        return history if written.version == _VERSION else None


_VERSION: Final = 1


class _Written(msgspec.Struct, frozen=True):
    version: int
    position: int
    states: tuple[tuple[int | None, str | None], ...]


def expired(
    infos: Sequence[SnapshotInfo], history: UndoHistory, now_ns: int, keep: Collection[str] = ()
) -> list[SnapshotInfo]:
    """The loose safety snapshots of `infos` (oldest first) that are too many or too old, without those in `keep`."""
    needed = history.serials()
    loose = [info for info in infos if info.kind == "safety" and info.serial not in needed]
    many = loose[: max(0, len(loose) - LOOSE_KEPT)]
    oldest_ns = now_ns - LOOSE_KEPT_DAYS * _DAY_NS
    return [info for info in loose if (info in many or info.created_ns < oldest_ns) and info.name not in keep]


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
