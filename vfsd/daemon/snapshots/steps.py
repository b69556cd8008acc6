"""Steps: the history of a workspace whose snapshots are in a store, while a restore moves it.

Threading: a `StepRun`'s methods are called in worker threads, one after the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.store import Store
from protocol.store.format.layout import write_atomically
from protocol.volume import SnapshotInfo
from vfsd.daemon.snapshots.base import is_staged
from vfsd.daemon.snapshots.history import UndoHistory

__all__ = ["HistoryFile", "StepRun", "Todo"]


@dataclass(frozen=True, slots=True)
class Todo:
    """What a restore is in the history: `step` in words, or a move to the state at position `to`.

    Without `remove` files that the snapshot lacks stay.
    """

    step: str
    to: int | None = None
    remove: bool = True


class HistoryFile:
    """The history that `store` keeps of the workspace `key`.  A death leaves it as it was, or as it was to be."""

    def __init__(self, store: Store, key: str) -> None:
        self._path = os.path.join(store.layout.workspace(key), "history")

    def raw(self) -> bytes | None:
        """As it is on disk; None where there is none yet."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            return file.read()
        return None

    def read(self, infos: Sequence[SnapshotInfo]) -> UndoHistory:
        """The history, without what is not among the snapshots `infos` any more."""
        data = self.raw()
        history = None if data is None else UndoHistory.decoded(data)
        if history is None:
            history = UndoHistory.of_snapshots(infos)
        return history.among({info.serial for info in infos})

    def write(self, history: UndoHistory) -> None:
        """Not synced: after a power failure that damages it, the safety snapshots say what the steps were."""
        write_atomically(self._path, history.encoded(), durable=False)


class StepRun:
    """One restore as the history sees it: `before` it and `after` it.

    `safety` is the name that the state before gets, `earlier` that of a snapshot which that state may have already.
    `resumes`: it goes on with a restore that was interrupted, so it is no step of its own.  `is_half_done`: the live
    state is half of a restore, so it must not take the place of a whole state.
    """

    def __init__(self, store: Store, key: str, todo: Todo, safety: str, *, resumes: bool, is_half_done: bool) -> None:
        self.todo = todo
        self.safety = safety
        self.earlier: str | None = None
        self._store = store
        self._key = key
        self._resumes = resumes
        self._is_half_done = is_half_done
        self._file = HistoryFile(store, key)
        self._raw = self._file.raw()
        self._serial = 0
        infos = [info for info in store.snapshots(key) if not is_staged(info.name)]
        self.before = self.after = self._file.read(infos)
        if not resumes and not is_half_done:
            self.earlier = next((info.name for info in infos if info.serial == self.before.here.serial), None)

    @property
    def tag(self) -> str:
        """What the safety snapshot is tagged with."""
        todo = self.todo
        return f"{'before' if todo.to is None or todo.to > self.before.position else 'after'} {todo.step}"

    def begin(self) -> None:
        """The safety snapshot is there, and nothing is changed yet.  EBUSY where another daemon was faster."""
        if self._file.raw() != self._raw:
            reason = "another workspace of the same directory was restored meanwhile: try again"
            raise OSError(errno.EBUSY, reason)
        self._serial = self._store.snapshot(self._key, self.safety).serial
        self.after = self._after(self._serial)
        self._file.write(self.after)

    def _after(self, serial: int) -> UndoHistory:
        if self._resumes:
            return self.before
        if self.todo.to is None:
            return self.before.stepped(serial, self.todo.step)
        replaces = self.before.here.serial is None or not self._is_half_done
        return self.before.moved(self.todo.to, serial if replaces else None)

    def revert(self) -> None:
        """Nothing was changed, or all was put back."""
        self.after = self.before
        if self._file.raw() != self._raw:
            self._file.write(self.before)

    def keep_earlier(self) -> bool:
        """Whether an earlier snapshot has the state before, so that the new one may go."""
        if self.earlier is None:
            return False
        store, key = self._store, self._key
        with store.tree(key, self.earlier) as earlier, store.tree(key, self.safety) as safety:
            if earlier.root != safety.root:
                return False
        here = self.before.here.serial
        assert here is not None
        self.after = self._after(here)
        self._file.write(self.after)
        return True
