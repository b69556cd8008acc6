"""UndoHistory: the steps that `restore --undo` and `--redo` walk, and where the live state is among them.

A step is one restore, import, apply or discard that changed something.  The history is a row of states, oldest first,
with a step between each state and the next, and a position: the state that the live one came from.

    state 0 --restore r1--> state 1 --restore r2--> state 2
                               ^ position: `--undo` goes to state 0, `--redo` to state 2

- A step keeps the live state at the position, forgets what follows (the redo branch), and moves to a new last state.
- `--undo` and `--redo` keep the live state at the position, and move by one.  So what programs wrote since the last
  step is kept at the position where they wrote it, and is there again when the position comes back.

A state is kept as a safety snapshot, named here by its serial, which is never given twice.  A safety snapshot that the
history does not name any more (of a redo branch that a new step cut off, of a state that was overwritten after an
undo, of a step beyond STEPS_KEPT) is a *loose* one: it stays in the list, to be restored by name, until `expired` lists
it by number or age.

Invariants, which `check` holds:

1. 0 <= position < number of states <= STEPS_KEPT + 1;
2. every state has a snapshot, but the one at the position may have none: then only the live state has it;
3. no two states have the same snapshot;
4. every state but the last has the name of the step that led away from it, the last has none.

A snapshot that a user dropped leaves the history with its state (`among`); the steps on both sides of it become one.
A snapshot that was dropped for lack of memory cuts the history (`cut`): the states beyond it, seen from the position,
leave the history too, so that no undo or redo goes over more than one step.  Their snapshots stay as loose ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec

from protocol.volume import SnapshotInfo

__all__ = [
    "LOOSE_KEPT",
    "LOOSE_KEPT_DAYS",
    "STEPS_KEPT",
    "HistoryState",
    "UndoHistory",
    "expired",
]

STEPS_KEPT: Final = 50
LOOSE_KEPT: Final = 20
LOOSE_KEPT_DAYS: Final = 30
_DAY_NS: Final = 24 * 3600 * 10**9

Info = TypeVar("Info", bound=SnapshotInfo)


@dataclass(frozen=True, slots=True)
class HistoryState:
    """One state: the serial of its snapshot (None: it has none), and the step that led away from it ("restore r1")."""

    serial: int | None = None
    step: str | None = None


@dataclass(frozen=True, slots=True)
class UndoHistory:
    """See the module's docstring."""

    states: tuple[HistoryState, ...] = (HistoryState(),)
    position: int = 0
    is_cut_before: bool = False  # there were steps before the first state, and memory was needed for something else
    is_cut_after: bool = False  # there were steps after the last one

    # -- what it says --------------------------------------------------------------------------------
    @property
    def undo_steps(self) -> int:
        """How many times one can go back."""
        return self.position

    @property
    def redo_steps(self) -> int:
        """How many times one can go forward."""
        return len(self.states) - 1 - self.position

    @property
    def here(self) -> HistoryState:
        """The state that the live one came from."""
        return self.states[self.position]

    def step_between(self, position: int) -> str:
        """The step between here and the neighbouring `position`, in words."""
        return self.states[min(position, self.position)].step or ""

    def serials(self) -> set[int]:
        """The snapshots that it needs."""
        return {state.serial for state in self.states if state.serial is not None}

    def position_of(self, serial: int) -> int | None:
        """Where the state with that snapshot is."""
        return next((at for at, state in enumerate(self.states) if state.serial == serial), None)

    def steps_to(self, infos: Iterable[SnapshotInfo]) -> dict[str, int]:
        """How many undos (below 0) or redos (above 0) lead to each of `infos`, by name; others are left out."""
        at = {state.serial: number - self.position for number, state in enumerate(self.states)}
        return {info.name: at[info.serial] for info in infos if at.get(info.serial)}

    # -- what it becomes -----------------------------------------------------------------------------
    def stepped(self, serial: int, step: str) -> UndoHistory:
        """After `step`, before which the live state was kept as `serial`."""
        states = (*self.states[: self.position], HistoryState(serial, step), HistoryState())[-(STEPS_KEPT + 1) :]
        return UndoHistory(states, len(states) - 1, self.is_cut_before)

    def moved(self, position: int, serial: int | None) -> UndoHistory:
        """At `position`, after the live state was kept as `serial`; None where its snapshot here stays what it is."""
        states = list(self.states)
        if serial is not None:
            states[self.position] = replace(self.here, serial=serial)
        return replace(self, states=tuple(states), position=position)

    def cut(self, serials: Collection[int]) -> UndoHistory:
        """Without the states whose snapshots `serials` were dropped for lack of memory, and those beyond them."""
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
        """Without the states whose snapshots are not among `serials` any more."""
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
        """AssertionError where an invariant does not hold."""
        assert 0 <= self.position < len(self.states) <= STEPS_KEPT + 1, (self.position, len(self.states))
        for at, state in enumerate(self.states):
            assert state.serial is not None or at == self.position, f"state {at} has no snapshot"
            assert (state.step is None) == (at == len(self.states) - 1), f"the step after state {at}: {state.step!r}"
        serials = [state.serial for state in self.states if state.serial is not None]
        assert len(serials) == len(set(serials)), f"a snapshot of two states: {serials}"

    # -- on disk -------------------------------------------------------------------------------------
    @classmethod
    def of_snapshots(cls, infos: Sequence[SnapshotInfo]) -> UndoHistory:
        """The history that the safety snapshots are by themselves: each was taken before a step.

        For a store that an earlier version wrote, and for one whose history was damaged by a power failure.
        """
        kept = [info for info in infos if info.kind == "safety"][-STEPS_KEPT:]
        return cls((*(HistoryState(info.serial, info.tag or "a restore") for info in kept), HistoryState()), len(kept))

    def encoded(self) -> bytes:
        """As bytes; `decoded` is the inverse."""
        states = tuple((state.serial, state.step) for state in self.states)
        return msgspec.json.encode(_Written(_VERSION, self.position, states))

    @classmethod
    def decoded(cls, data: bytes) -> UndoHistory | None:
        """None for what is no history."""
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


def expired(infos: Sequence[Info], history: UndoHistory, now_ns: int, keep: Collection[str] = ()) -> list[Info]:
    """The loose safety snapshots of `infos` (oldest first) to drop: too many, or too old.  Never those of `keep`."""
    needed = history.serials()
    loose = [info for info in infos if info.kind == "safety" and info.serial not in needed]
    many = loose[: max(0, len(loose) - LOOSE_KEPT)]
    oldest_ns = now_ns - LOOSE_KEPT_DAYS * _DAY_NS
    return [info for info in loose if (info in many or info.created_ns < oldest_ns) and info.name not in keep]
