"""UndoLog: the records that lead from the live state back to each snapshot.

An `Epoch` begins with every snapshot.  It holds the pre-images of the inodes and directory entries that changed while
it was the newest: their state at its beginning.  So the state of an inode at epoch E is the first pre-image found in E
and the epochs after it, oldest first, or the live version if there is none.

Threading: only the serving loop changes the log.  A view (`view.SnapshotTree`) may read it from another thread.  This
is safe because

- the loop stores a pre-image before it replaces the live version, and the reader reads the live version before the
  pre-images;
- single dict operations are atomic (the GIL), and a reader copies a dict before it iterates;
- while a view is open (`pins` > 0) no pre-image is removed and no epoch is merged; `release` does so afterwards.

Invariants (checked by `MemoryVolume.check_invariants`): serials increase; pre-images go to the newest epoch; every name
belongs to one epoch; without epochs there are no pre-images; an epoch with pre-images of the entries of a directory has
one of the directory, and if that did not exist at the beginning of the epoch, no entry did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from protocol.backends.memory.ledger import NAMES_BYTES, RECORD_BYTES, SNAPSHOT_BYTES, Ledger
from protocol.errors import SnapshotExistsError, SnapshotNotFoundError

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.volume_extensions import SnapshotInfo

PreInodes = dict[int, "Inode | None"]  # None: there was none
PreNames = dict[int, dict[bytes, int]]  # directory -> name -> inode it stood for, 0: nothing


class Epoch:
    """The time from one snapshot to the next, with the pre-images of its changes.

    `info` is None for an epoch that is not a snapshot: opened for a view or a transaction, or dropped.
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
        """The memory of the epoch without its pre-images, in bytes; a character takes at most four."""
        info = self.info
        return SNAPSHOT_BYTES + (4 * (len(info.name) + len(info.tag or "")) if info is not None else 0)

    def chain(self) -> Iterator[Epoch]:
        """This epoch and all after it, oldest first."""
        epoch: Epoch | None = self
        while epoch is not None:
            yield epoch
            epoch = epoch.next


class UndoLog:
    """The epochs of one volume, charged to `ledger` as kept."""

    __slots__ = ("_by_name", "_closed", "_epochs", "_ledger", "newest", "on_drop", "pins", "serial")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._epochs: dict[int, Epoch] = {}  # by serial, so in order
        self._by_name: dict[str, Epoch] = {}
        self._closed: list[Epoch] = []
        self.newest: Epoch | None = None
        self.serial = 0  # of the newest epoch ever opened
        self.pins = 0
        self.on_drop: Callable[[int], None] | None = None  # called with the serial of each snapshot that is dropped

    def open(self, info: SnapshotInfo | None) -> Epoch:
        """Begin an epoch, which receives the pre-images of all changes from now on.  O(1).  SnapshotExistsError."""
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
        """Return all snapshots, oldest first."""
        return [epoch.info for epoch in self._epochs.values() if epoch.info is not None]

    def find(self, name: str) -> Epoch:
        """Return the epoch that begins with snapshot `name`.  SnapshotNotFoundError."""
        try:
            return self._by_name[name]
        except KeyError:
            raise SnapshotNotFoundError(name) from None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def by_serial(self, serial: int) -> Epoch:
        """Return the epoch with this serial.  KeyError."""
        return self._epochs[serial]

    def epochs(self) -> list[Epoch]:
        """Return all epochs, oldest first; a copy."""
        return list(self._epochs.values())

    def close(self, epoch: Epoch) -> None:
        """Forget an epoch: merge its pre-images into the one before it, as soon as no view is open."""
        if epoch.info is not None:
            if self.on_drop is not None:
                self.on_drop(epoch.serial)
            del self._by_name[epoch.info.name]
            self._ledger.kept -= epoch.charge
            epoch.info = None
            self._ledger.kept += epoch.charge
        self._closed.append(epoch)
        self._merge_closed()

    def pin(self) -> None:
        """Record an open view: keep everything that it may read."""
        self.pins += 1

    def release(self) -> None:
        """Record that a view was closed; after the last one, merge the closed epochs."""
        self.pins -= 1
        self._merge_closed()

    def _merge_closed(self) -> None:
        if self.pins:
            return
        closed, self._closed = self._closed, []
        for epoch in closed:
            self._remove(epoch)

    def _remove(self, epoch: Epoch) -> None:
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
        """Move the pre-images of `newer` to `older`, which keeps its own: they are of an earlier state."""
        ledger = self._ledger
        for number, version in newer.inodes.items():
            if number in older.inodes:
                ledger.forget(version)
            else:
                older.inodes[number] = version
        for directory, names in newer.names.items():
            version = newer.inodes.get(directory)
            if version is not None and version.born >= older.serial:
                ledger.kept -= _names_charge(names)  # of a directory that did not exist at the beginning of `older`
                continue
            mine = older.names.setdefault(directory, names)
            if mine is not names:
                ledger.kept -= NAMES_BYTES
                for name, inode in names.items():
                    if name in mine:
                        ledger.kept -= RECORD_BYTES + len(name)
                    else:
                        mine[name] = inode

    def _forget(self, epoch: Epoch) -> None:
        """Free the pre-images of the oldest epoch: no snapshot needs them."""
        for version in epoch.inodes.values():
            self._ledger.forget(version)
        self._ledger.kept -= sum(map(_names_charge, epoch.names.values()))

    def forget_names(self, epoch: Epoch, directory: int) -> None:
        """Free the pre-images of the entries of a directory that exists neither before `epoch` nor after it."""
        names = epoch.names.pop(directory, None)
        if names is not None:
            self._ledger.kept -= _names_charge(names)


def _names_charge(names: dict[bytes, int]) -> int:
    return NAMES_BYTES + RECORD_BYTES * len(names) + sum(map(len, names))


def merged(epochs: Iterable[Epoch]) -> tuple[PreInodes, PreNames]:
    """Return the pre-images of several epochs, given oldest first, as one; the older one takes precedence."""
    inodes: PreInodes = {}
    names: PreNames = {}
    for epoch in reversed(list(epochs)):
        inodes.update(epoch.inodes)
        for directory, entries in epoch.names.copy().items():
            names[directory] = {**names.get(directory, {}), **entries}
    return inodes, names
