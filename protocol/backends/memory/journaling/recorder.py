"""Recorder: writes the effects of every change of a volume to its journal.

Each call that changes something calls `begin` before its first change, and at its end the method that records it;
without a journal this costs a comparison.  A call gives one record, and a transaction (restore, import, `changes`) one
batch.

Invariants:

1. A change is recorded before its call returns, in one batch that contains all of it.
2. `Log.require` comes before the change: if there is no space on disk, the call fails and changes nothing.  A
   transaction is recorded at its end and undone if that fails.
3. If the volume refuses a call, nothing is recorded; except for snapshots that were dropped to free memory, which
   wait in `_pending` for the next record, as do inodes whose last user has closed them, and safety snapshots and notes
   that belong to the next change.
4. A batch that a request of the kernel led to has a REQUEST effect with the result (see `answering`), so a request
   that a daemon recorded and did not answer is answered by its replacement and not executed again.
5. The first listing of a directory is recorded before the next change of it, so a replay gives the same cookies.

Not recorded: lookups, and access times, which the next change of the inode records.

Threading: the serving loop only, as the volume.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.inode import Inode
from protocol.backends.memory.journaling.changes import RecordedAhead, changes_since
from protocol.backends.memory.xattrs import content_bytes
from protocol.journal import effects
from protocol.journal.log import Batch
from protocol.journal.records import Begun, Buffer
from protocol.volume import ROOT_INODE
from protocol.volume_durability import UNIQUE_RESEND, JournalStatus
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.state import MemoryState
    from protocol.backends.memory.volume import MemoryVolume
    from protocol.journal.directory import Journal
    from protocol.journal.log import Log
    from protocol.volume_extensions import SnapshotInfo

WaitSynced = Callable[["Log", int], Awaitable[None]]  # returns when a log is on disk up to an offset; OSError
# More than the effects of any call take, without content, symlink targets and extended attributes.
_CALL_BYTES: Final = 4096
_MOST_PENDING: Final = 1000
_WRITE_BYTES: Final = effects.WRITE_LAYOUT.size + effects.INODE_LAYOUT.size  # of the effects of a write without data


class Recorder:
    """Records the changes of `volume`, whose state is `state`, in `journal`."""

    def __init__(self, volume: MemoryVolume, state: MemoryState, journal: Journal) -> None:
        self.journal = journal
        self._volume = volume
        self._state = state
        self._inodes = state.inodes
        self._pending: list[bytes] = []
        self.ahead = RecordedAhead(journal)
        self._in_transaction = False
        self.request = 0  # the request of the kernel that is being executed; 0: none
        self._before_request = 0  # the end of the log when it began
        self.wait_synced: WaitSynced | None = None
        # The first inode of the call, before it: extended attributes and size.
        self._xattrs: dict[bytes, bytes] | None = None
        self._size = 0
        self._begun: Begun | None = None  # of the usual write
        self._unrecorded: list[EntryChange | InodeChange] = []
        self._recorded: Sequence[Buffer] = ()  # by the last call, while `defers_syncs`
        state.log.on_drop = self._dropped

    def unbind(self) -> None:
        """End recording."""
        self._state.log.on_drop = None

    # -- requests of the kernel ------------------------------------------------------------------
    def answering(self, unique: int) -> None:
        """See `ExtendedVolume.answering`."""
        self.request = unique & ~UNIQUE_RESEND
        if unique:
            self._before_request = self.journal.log.end

    def defer_syncs(self) -> bool:
        """See `ExtendedVolume.defer_syncs`; without `wait_synced` there is nobody who would sync."""
        self._log.defers_syncs = self.wait_synced is not None and self.journal.policy == "always"
        return self._log.defers_syncs

    def unsynced(self, *, of_request: bool) -> Callable[[], Awaitable[None]] | None:
        """See `JournaledVolume.unsynced`."""
        log = self._log
        if not log.defers_syncs or log.synced >= log.end or (of_request and log.end == self._before_request):
            return None
        return functools.partial(self._wait_synced, log, log.end, self._recorded)

    async def _wait_synced(self, log: Log, end: int, pieces: Sequence[Buffer]) -> None:
        assert self.wait_synced is not None
        try:
            await self.wait_synced(log, end)
        except OSError:
            self._unrecorded += _changes_in(pieces)
            raise

    def take_unrecorded(self) -> CacheInvalidation:
        """See `JournaledVolume.take_unrecorded`."""
        changes, self._unrecorded = self._unrecorded, []
        entries = [each for each in changes if isinstance(each, EntryChange)]
        return CacheInvalidation(entries, [each for each in changes if isinstance(each, InodeChange)])

    def connect(self) -> None:
        """Record that a new mount begins: its kernel knows no file, and numbers its requests from the start."""
        self._pending.append(effects.of_number(effects.CONNECTION))
        with contextlib.suppress(OSError):  # the disk is full: the first change records it
            self.flush()

    def reconnect(self, requests: dict[int, list[int]]) -> None:
        """Continue with a kernel whose lookups are not known.  `requests`: the results that the journal has.

        An inode that exists now is kept until the kernel's next FORGET of it.
        """
        self._volume.repeats = requests
        self._volume.pinned = pinned = set(self._inodes)
        pinned.discard(ROOT_INODE)
        lookups = self._state.lookups
        for number in pinned:
            lookups[number] = lookups.get(number, 0) + 1

    def check_invariants(self) -> None:
        """Check that no request is being executed, and that each inode with a pin has a lookup."""
        assert not self.request
        assert self._volume.pinned <= self._state.lookups.keys(), "a pinned inode without lookups"

    def invalidated(self) -> None:
        """See `JournaledVolume.invalidated`."""
        self._pending.append(effects.of_number(effects.INVALIDATED))

    # -- records ---------------------------------------------------------------------------------
    @property
    def _log(self) -> Log:
        return self.journal.log

    def _require(self, length: int, *, removes: bool = False) -> None:
        """Make room for a record.  In a transaction, its end does that."""
        if not self._in_transaction:
            self._log.require(length + _CALL_BYTES + self._pending_bytes(), removes=removes)

    def _pending_bytes(self) -> int:
        return sum(map(len, self._pending))

    def commit(self, *pieces: Buffer, result: int | None = None) -> None:
        """Append a record.  `result`: of the call, for a request that comes again."""
        if self._in_transaction:
            return
        if self.request and result is not None:
            pieces = (*pieces, effects.at_offset(effects.REQUEST, self.request, result))
        if self._pending:
            pieces = (*self._pending, *pieces)
            self._pending.clear()
        if pieces:
            if self._log.defers_syncs:
                self._recorded = pieces
            try:
                self._log.append(pieces)
            except OSError:
                self._unrecorded += _changes_in(pieces)
                raise

    def flush(self) -> None:
        """Record what waits for the next record.  OSError."""
        if self._pending:
            self._require(0, removes=True)
            self.commit()

    def sync(self) -> Awaitable[None] | None:
        """Return when everything recorded is on disk, or what waits for that.  OSError."""
        self.flush()
        log = self._log
        if self.wait_synced is not None:
            return self.wait_synced(log, log.end)
        log.sync()
        return None

    def status(self) -> JournalStatus:
        """Describe the journal."""
        log = self._log
        failure = None if log.failure is None else str(log.failure.strerror or log.failure)
        if failure is None and self.journal.is_removed:
            failure = "its files were removed: the content is only in memory"
        return JournalStatus(
            self.journal.directory,
            self.journal.policy,
            self.journal.size_bytes(),
            log.end - log.synced,
            failure,
        )

    @contextmanager
    def recording(self, epoch: Epoch) -> Iterator[None]:
        """A block whose changes are recorded at its end, unless it raises.  `epoch` is that of the transaction.

        OSError if they cannot be recorded.
        """
        try:
            self._require(0, removes=True)  # EIO after a failure, before anything changes
            self._in_transaction = True
            try:
                yield
            finally:
                self._in_transaction = False
            self._record_epoch(epoch)
        finally:
            self.ahead.clear()

    def _record_epoch(self, epoch: Epoch) -> None:
        batch = Batch(self._log)
        try:
            batch.add(self._pending)
            batch.add(self._changes(epoch))
            batch.end()
        except OSError:
            batch.abort()
            raise
        self._pending.clear()

    def _changes(self, epoch: Epoch) -> Iterator[bytes]:
        """Yield the effects of a transaction."""
        return changes_since(self._state, epoch, self.ahead)

    def note(self, key: str, value: bytes, *, with_next: bool) -> None:
        """Record a value that is replayed with the state; `with_next`: in the record of the next change.  OSError."""
        if with_next:
            self._pending.append(effects.note(key, value))
            return
        self._require(len(key) + len(value))
        self.commit(effects.note(key, value))

    # -- calls ---------------------------------------------------------------------------------
    def begin(self, length: int, *nodes: Inode | None, removes: bool = False) -> None:
        """Prepare a call that is about to change `nodes`: make room for their attributes and `length` more bytes.

        OSError, which means that the call must not change anything.
        """
        first = nodes[0] if nodes else None
        if first is not None:
            self._xattrs, self._size = first.xattrs, first.size
            length += xattr_bytes(first)
        self._require(length, removes=removes)

    def made(self, parent: int | None, name: bytes, node: Inode) -> None:
        """Record a new inode, and its name in the directory `parent`."""
        pieces = [effects.inode(node)]
        if node.target is not None:
            pieces.append(effects.target(node.inode, node.target))
        if parent is not None:
            pieces.append(effects.entry(parent, name, node.inode))
        if node.xattrs is not None:
            pieces.append(effects.xattrs(node.inode, node.xattrs))
        if parent is not None:
            pieces.append(effects.inode(self._inodes[parent]))
        self.commit(*pieces, result=node.inode)

    def linked(self, parent: int, name: bytes, node: Inode) -> None:
        """Record a further name of an inode."""
        above = effects.inode(self._inodes[parent])
        self.commit(effects.inode(node), effects.entry(parent, name, node.inode), above, result=node.inode)

    def removed(self, directory: Inode, name: bytes, node: Inode) -> None:
        """Record that a name was removed."""
        number = node.inode
        after = effects.inode(node) if number in self._inodes else effects.of_number(effects.FREE, number)
        self.commit(effects.entry(directory.inode, name, 0), effects.inode(directory), after, result=0)

    def renamed(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, moved: Inode, victim: Inode | None
    ) -> None:
        """Record a rename.  `victim`: the inode that had the new name."""
        left = self._number(parent, name)  # a whiteout, or the inode that was exchanged
        numbers = dict.fromkeys((parent, new_parent, moved.inode, 0 if victim is None else victim.inode, left))
        numbers.pop(0, None)
        is_gone = victim is not None and victim.inode not in self._inodes
        if victim is not None and is_gone:
            del numbers[victim.inode]
        pieces = [effects.inode(self._inodes[number]) for number in numbers]
        whiteout = self._inodes.get(left) if left and (victim is None or left != victim.inode) else None
        if whiteout is not None and whiteout.xattrs is not None:
            pieces.append(effects.xattrs(left, whiteout.xattrs))
        pieces.append(effects.entry(parent, name, left))
        pieces.append(effects.entry(new_parent, new_name, self._number(new_parent, new_name)))
        if victim is not None and is_gone:
            pieces.append(effects.of_number(effects.FREE, victim.inode))
        self.commit(*pieces, result=0)

    def _number(self, parent: int, name: bytes) -> int:
        return (self._inodes[parent].children or {}).get(name, 0)

    def forgotten(self, inode: int, count: int) -> int:
        """Return how many lookups a FORGET with `count` takes from an inode: also the one of a pin."""
        if inode not in self._volume.pinned:
            return count
        self._volume.pinned.remove(inode)
        return min(count + 1, self._state.lookups.get(inode, 0))

    def freed(self, inode: int) -> None:
        """Record, with the next change, that the last user of an inode without a name is gone."""
        self._pending.append(effects.of_number(effects.FREE, inode))
        if len(self._pending) >= _MOST_PENDING:
            with contextlib.suppress(OSError):  # the next call reports it
                self.flush()

    def record_listing(self, directory: Inode) -> None:
        """Record, with the next change, that the names of a directory get cookies."""
        self._pending.append(effects.listed(directory.inode))

    def changed(self, node: Inode, size: int | None) -> None:
        """Record the attributes of an inode.  `size`: it was set to this."""
        # At the same size, too: that frees pages which are reserved beyond it.
        pieces = (
            [effects.at_offset(effects.TRUNCATE, node.inode, size)] if size is not None and size <= self._size else []
        )
        self.commit(*pieces, effects.inode(node), *self._changed_xattrs(node), result=node.inode)

    def _changed_xattrs(self, node: Inode) -> tuple[bytes, ...]:
        """Return the XATTRS effect of `node`, if its attributes are not those before the call."""
        return () if node.xattrs is self._xattrs else (effects.xattrs(node.inode, node.xattrs),)

    def changed_xattr(self, node: Inode, name: bytes) -> None:
        """Record one extended attribute."""
        value = None if node.xattrs is None else node.xattrs.get(name)
        self.commit(effects.inode(node), effects.with_value(effects.XATTR, node.inode, (name, value)), result=0)

    # -- content ---------------------------------------------------------------------------------
    def begin_write(self, node: Inode, offset: int, data: Buffer) -> None:
        """Prepare a write: as `begin`."""
        if node.xattrs is not None or self._pending or self._in_transaction:
            self._begun = None
            self.begin(len(data), node)
            return
        # The usual write: its record has three effects, whose sizes are known.
        self._xattrs = None
        log, length = self.journal.log, len(data)
        log.require(length + _CALL_BYTES)
        size = _WRITE_BYTES + length + (effects.REQUEST_LAYOUT.size if self.request else 0)
        self._begun = log.begin(size, effects.with_data(effects.WRITE, node.inode, offset, length), data)

    def wrote(self, node: Inode, offset: int, data: Buffer, done: int, *before: Buffer) -> None:
        """Record the first `done` bytes of a write, after the effects `before`."""
        begun = self._begun
        if begun is None or done < len(data) or self._pending:
            written = data if done == len(data) else memoryview(data)[:done]
            attributes = effects.inode(node), *self._changed_xattrs(node)
            self.commit(
                *before, effects.with_data(effects.WRITE, node.inode, offset, done), written, *attributes, result=done
            )
            return
        request, rest = self.request, effects.inode(node)
        self._recorded = (rest,)
        try:
            self.journal.log.complete(
                begun, data, rest + effects.at_offset(effects.REQUEST, request, done) if request else rest
            )
        except OSError:
            self._unrecorded += _changes_in((rest,))
            raise

    def wrote_partly(self, node: Inode, offset: int, length: int) -> None:
        """Record the content of a range in which a write ended without memory: complete blocks of it were written."""
        length = min(length, node.size - offset)
        if node.content is not None and length > 0:
            data = node.content.read(offset, length)
            self.commit(effects.with_data(effects.WRITE, node.inode, offset, length), data, effects.inode(node))

    def begin_allocation(self, node: Inode, *, is_hole: bool) -> None:
        """Prepare fallocate(2): as `begin`."""
        self.begin(0, node, removes=is_hole)

    def allocated(self, node: Inode, offset: int, length: int, *, is_hole: bool) -> None:
        """Record a hole, or pages that were promised."""
        code = effects.PUNCH if is_hole else effects.RESERVE
        attributes = effects.inode(node), *self._changed_xattrs(node)
        self.commit(effects.of_range(code, node.inode, offset, length), *attributes, result=0)

    # -- snapshots -------------------------------------------------------------------------------
    def took(self, info: SnapshotInfo) -> None:
        """Record a new snapshot; a safety snapshot with the change that it precedes: a crash keeps both or neither."""
        if info.kind == "safety":
            self._pending.append(effects.with_value(effects.SNAPSHOT, 0, info))
        else:
            self.commit(effects.with_value(effects.SNAPSHOT, 0, info))

    def _dropped(self, serial: int) -> None:
        self._pending.append(effects.of_number(effects.DROP, serial))


def _changes_in(pieces: Iterable[Buffer]) -> Iterator[EntryChange | InodeChange]:
    """Yield the names and inodes that the effects `pieces` change."""
    effect = iter(pieces)
    for piece in effect:
        code = piece[0]
        if code == effects.WRITE:
            next(effect)  # the content
        elif code in (effects.ENTRY, effects.INODE):
            _, number, child = effects.subjects(bytes(piece))
            if code == effects.INODE:
                yield InodeChange(number, content=True)
            else:
                yield EntryChange(number, bytes(piece)[effects.ENTRY_LAYOUT.size :], 0, child)


def xattr_bytes(node: Inode | None) -> int:
    """Return a bound of the size of an XATTRS effect with the extended attributes of `node`."""
    if node is None or node.xattrs is None:
        return 0
    return content_bytes(node.xattrs) + 16 * len(node.xattrs)
