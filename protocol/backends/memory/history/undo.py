"""UndoLog: what it takes to get from the live state back to each snapshot.

An `Epoch` begins with every snapshot.  Its pre-images say what each inode, and each directory entry, was
when it began, for those that changed while it was the newest.  So the state at epoch E is: the first
pre-image found in E, then in the epochs after it, oldest first; where there is none, the live one.

Threading: the serving loop alone changes the log.  A view (`view.SnapshotTree`) may read it from another
thread.  That is safe because

- the loop stores a pre-image before it replaces the live version, and the reader reads the live version
  before the pre-images;
- single dict operations are atomic (the GIL), and a reader copies a dict before it iterates;
- while a view is open (`pins` > 0) no pre-image is taken away and no epoch merged: `release` does what had to wait.

Invariants (`MemoryVolume.check_invariants` holds them): serials increase; the newest epoch is the one
that pre-images go to; every name belongs to one epoch; without epochs there are no pre-images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from protocol.backends.memory.ledger import NAMES_BYTES, RECORD_BYTES, SNAPSHOT_BYTES, Ledger
from protocol.errors import SnapshotExistsError, SnapshotNotFoundError

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.volume import SnapshotInfo

__all__ = ["Epoch", "UndoLog"]

PreInodes = dict[int, "Inode | None"]  # None: there was none
PreNames = dict[int, dict[bytes, int]]  # directory -> name -> inode it stood for, 0: nothing


class Epoch:
    """The time from one snapshot to the next, and the pre-images of what changed in it.

    `info` is None for an epoch that no user sees: opened for a view or a transaction, or dropped.
    """

    __slots__ = ("info", "inodes", "names", "next", "previous", "serial")

    def __init__(self, serial: int, info: SnapshotInfo | None) -> None:
        self.serial = serial
        self.info = info
        self.inodes: PreInodes = {}
        self.names: PreNames = {}
        self.next: Epoch | None = None
        self.previous: Epoch | None = None

    @property
    def charge(self) -> int:
        """What the epoch itself takes, without its pre-images; a string takes four bytes a character at most."""
        info = self.info
        return SNAPSHOT_BYTES + (4 * (len(info.name) + len(info.tag or "")) if info is not None else 0)

    def chain(self) -> Iterator[Epoch]:
        """This epoch and all after it, oldest first."""
        epoch: Epoch | None = self
        while epoch is not None:
            yield epoch
            epoch = epoch.next


class UndoLog:
    """The epochs of one volume, and what they hold, charged to `ledger` as kept."""

    __slots__ = ("_by_name", "_dead", "_epochs", "_ledger", "newest", "pins", "serial")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._epochs: dict[int, Epoch] = {}  # by serial, so in order
        self._by_name: dict[str, Epoch] = {}
        self._dead: list[Epoch] = []
        self.newest: Epoch | None = None
        self.serial = 0  # of the newest epoch ever opened
        self.pins = 0

    def open(self, info: SnapshotInfo | None) -> Epoch:
        """Begin an epoch; what changes from now on leaves its pre-image there.  O(1)."""
        if info is not None and info.name in self._by_name:
            raise SnapshotExistsError(info.name)
        self.serial += 1
        epoch = Epoch(self.serial, info)
        self._epochs[epoch.serial] = epoch
        self._ledger.kept += epoch.charge
        if info is not None:
            self._by_name[info.name] = epoch
        if self.newest is not None:
            epoch.previous = self.newest
            self.newest.next = epoch  # before `newest` moves: a reader must find the new pre-images
        self.newest = epoch
        return epoch

    def infos(self) -> Sequence[SnapshotInfo]:
        """What is known of each snapshot, oldest first."""
        return [epoch.info for epoch in self._epochs.values() if epoch.info is not None]

    def find(self, name: str) -> Epoch:
        """The epoch that begins with snapshot `name`."""
        try:
            return self._by_name[name]
        except KeyError:
            raise SnapshotNotFoundError(name) from None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def epochs(self) -> list[Epoch]:
        """All epochs, oldest first; a copy."""
        return list(self._epochs.values())

    def close(self, epoch: Epoch) -> None:
        """Forget an epoch: its pre-images go to its older neighbour.  Waits while a view is open."""
        if epoch.info is not None:
            del self._by_name[epoch.info.name]
            self._ledger.kept -= epoch.charge
            epoch.info = None
            self._ledger.kept += epoch.charge
        self._dead.append(epoch)
        self._bury()

    def pin(self) -> None:
        """A view was opened: nothing that it may read is to go away."""
        self.pins += 1

    def release(self) -> None:
        """A view was closed."""
        self.pins -= 1
        self._bury()

    def _bury(self) -> None:
        if self.pins:
            return
        dead, self._dead = self._dead, []
        for epoch in dead:
            self._merge_away(epoch)

    def _merge_away(self, epoch: Epoch) -> None:
        older = epoch.previous
        del self._epochs[epoch.serial]
        self._ledger.kept -= epoch.charge
        if epoch.next is not None:
            epoch.next.previous = older
        if older is not None:
            older.next = epoch.next
            self._merge_into(older, epoch)
        else:
            self._forget(epoch)
        if self.newest is epoch:
            self.newest = older

    def _merge_into(self, older: Epoch, newer: Epoch) -> None:
        """What the older one has stays: it is nearer to the state that it must give back."""
        ledger = self._ledger
        for number, version in newer.inodes.items():
            if number in older.inodes:
                ledger.forget(version)
            else:
                older.inodes[number] = version
        for directory, names in newer.names.items():
            mine = older.names.setdefault(directory, names)
            if mine is not names:
                ledger.kept -= NAMES_BYTES
                for name, inode in names.items():
                    if name in mine:
                        ledger.kept -= RECORD_BYTES + len(name)
                    else:
                        mine[name] = inode

    def _forget(self, epoch: Epoch) -> None:
        """Nobody can go back to before `epoch`, or to its beginning."""
        for version in epoch.inodes.values():
            self._ledger.forget(version)
        for names in epoch.names.values():
            self._ledger.kept -= NAMES_BYTES + RECORD_BYTES * len(names) + sum(map(len, names))


def merged(epochs: Iterable[Epoch]) -> tuple[PreInodes, PreNames]:
    """The pre-images of several epochs as one, given oldest first: the older wins."""
    inodes: PreInodes = {}
    names: PreNames = {}
    for epoch in reversed(list(epochs)):
        inodes.update(epoch.inodes)
        for directory, entries in epoch.names.copy().items():
            names[directory] = {**names.get(directory, {}), **entries}
    return inodes, names
