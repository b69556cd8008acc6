"""Recorder: writes the effects of every change of a volume to its journal.

It takes the place of the volume's methods that change something, so a volume without a journal has no cost.  Each call
gives one record, and a transaction (restore, import, `changes`) gives one batch.

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
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from protocol.backends.memory.inode import Inode
from protocol.backends.memory.journaling.changes import RecordedAhead, changes_since
from protocol.backends.memory.xattrs import content_bytes
from protocol.journal import effects
from protocol.journal.log import Batch
from protocol.journal.records import Buffer
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges, Caller, PlainEntry
from protocol.volume_durability import UNIQUE_RESEND, JournalStatus

if TYPE_CHECKING:
    from protocol.backends.memory.blocks import Block
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.state import MemoryState
    from protocol.backends.memory.volume import MemoryVolume
    from protocol.journal.directory import Journal
    from protocol.journal.log import Log
    from protocol.volume_extensions import SnapshotInfo, SnapshotKind

WaitSynced = Callable[["Log", int], Awaitable[None]]  # returns when a log is on disk up to an offset; OSError
# More than the effects of any call take, without content, symlink targets and extended attributes.
_CALL_BYTES: Final = 4096
_MOST_PENDING: Final = 1000
_WRITE_BYTES: Final = effects.WRITE_LAYOUT.size + effects.INODE_LAYOUT.size  # of the effects of a write without data
PUNCH_HOLE: Final = 2  # linux/falloc.h
_RECORDED: Final = (
    "mknod", "mkdir", "symlink", "tmpfile", "link", "unlink", "rmdir", "rename", "setattr", "setxattr", "removexattr",
    "write", "fallocate", "forget", "take_snapshot", "drop_snapshot", "entries",
)  # fmt: skip
# Of these calls a recorded result is returned.
_ANSWERED_ONCE: Final = frozenset(_RECORDED) - {"forget", "take_snapshot", "drop_snapshot", "entries"}
_ANSWERED_WITH_INODE: Final = frozenset({"mknod", "mkdir", "symlink", "tmpfile", "link", "setattr"})


class Recorder:
    """Records the changes of `volume`, whose state is `state`, in `journal`."""

    def __init__(self, volume: MemoryVolume, state: MemoryState, journal: Journal) -> None:
        self.journal = journal
        self._volume = volume
        self._state = state
        self._inodes = state.inodes
        self._pending: list[bytes] = []
        self._ahead = RecordedAhead()
        self._in_transaction = False
        self._request = 0  # the request of the kernel that is being executed; 0: none
        self._before_request = 0  # the end of the log when it began
        self.wait_synced: WaitSynced | None = None
        self._repeats: dict[int, list[int]] = {}  # recorded results of requests that may come again, by request
        self.pinned: set[int] = set()  # inodes with one lookup more than is known
        self._replaced: dict[str, Callable[..., Any]] = {name: getattr(volume, name) for name in _RECORDED}
        for name in _RECORDED:
            setattr(volume, name, getattr(self, name))
        state.log.on_drop = self._dropped

    def unbind(self) -> None:
        """Give the volume its own methods back: nothing is recorded any more."""
        for name, method in self._replaced.items():
            setattr(self._volume, name, method)
        self._state.log.on_drop = None

    # -- requests of the kernel ------------------------------------------------------------------
    def answering(self, unique: int) -> None:
        """See `ExtendedVolume.answering`."""
        self._request = unique & ~UNIQUE_RESEND
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
        assert self.wait_synced is not None
        return functools.partial(self.wait_synced, log, log.end)

    def connect(self) -> None:
        """Record that a new mount begins: its kernel knows no file, and numbers its requests from the start."""
        self._pending.append(effects.connection())
        with contextlib.suppress(OSError):  # the disk is full: the first change records it
            self.flush()

    def reconnect(self, requests: dict[int, list[int]]) -> None:
        """Continue with a kernel whose lookups are not known.  `requests`: the results that the journal has.

        An inode that exists now is kept until the kernel's next FORGET of it.
        """
        self._repeats = requests
        self.pinned = set(self._inodes)
        self.pinned.discard(ROOT_INODE)
        lookups = self._state.lookups
        for number in self.pinned:
            lookups[number] = lookups.get(number, 0) + 1
        for name in _ANSWERED_ONCE:
            setattr(self._volume, name, functools.partial(self._once, name))

    def _once(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the recorded result of a call, or make the call."""
        results = self._repeats.get(self._request)
        if not results:
            return getattr(self, name)(*args, **kwargs)
        result = results.pop(0)
        if name in _ANSWERED_WITH_INODE:
            if name != "setattr":  # the kernel counts a lookup
                self._state.lookups[result] = self._state.lookups.get(result, 0) + 1
            return self._state.getattr(result)
        return result if name == "write" else None

    def check_invariants(self) -> None:
        """Check that no request is being executed, and that each inode with a pin has a lookup."""
        assert not self._request
        assert self.pinned <= self._state.lookups.keys(), "a pinned inode without lookups"

    def invalidated(self) -> None:
        """See `JournaledVolume.invalidated`."""
        self._pending.append(effects.invalidated())

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

    def _commit(self, *pieces: Buffer, result: int | None = None) -> None:
        """Append a record.  `result`: of the call, for a request that comes again."""
        if self._in_transaction:
            return
        if self._request and result is not None:
            pieces = (*pieces, effects.request(self._request, result))
        if self._pending:
            pieces = (*self._pending, *pieces)
            self._pending.clear()
        if pieces:
            self._log.append(pieces)

    def flush(self) -> None:
        """Record what waits for the next record.  OSError."""
        if self._pending:
            self._require(0, removes=True)
            self._commit()

    def sync(self) -> None:
        """Return when everything recorded is on disk.  OSError."""
        self.flush()
        self._log.sync()

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
        """See `TransactionRecorder`.  `epoch` is that of the transaction."""
        try:
            self._require(0, removes=True)  # EIO after a failure, before anything changes
            self._in_transaction = True
            try:
                yield
            finally:
                self._in_transaction = False
            self._record_epoch(epoch)
        finally:
            self._ahead.clear()

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
        return changes_since(self._state, epoch, self._ahead)

    # -- what is recorded before its transaction ---------------------------------------------------
    def store(self, blocks: Iterable[Block]) -> Iterator[None]:
        """See `TransactionRecorder`."""
        return self._ahead.store(self._log, blocks)

    def store_inodes(self, nodes: Iterable[Inode], tops: Collection[int]) -> Iterator[None]:
        """See `TransactionRecorder`."""
        return self._ahead.store_inodes(self._log, nodes, tops)

    def store_content(self, data: bytes) -> Iterator[None]:
        """See `JournaledVolume`."""
        return self._ahead.store_content(self._log, data)

    def forget_stored(self) -> None:
        """See `TransactionRecorder`."""
        self._ahead.clear()

    def note(self, key: str, value: bytes, *, with_next: bool) -> None:
        """Record a value that is replayed with the state; `with_next`: in the record of the next change.  OSError."""
        if with_next:
            self._pending.append(effects.note(key, value))
            return
        self._require(len(key) + len(value))
        self._commit(effects.note(key, value))

    def _after(self, number: int) -> bytes:
        """Return the effect of an inode after a call: its attributes, or that it is gone."""
        node = self._inodes.get(number)
        return effects.free(number) if node is None else effects.inode(node)

    # -- names -----------------------------------------------------------------------------------
    def _acl_bytes(self, parent: int) -> int:
        """Return a bound of the extended attributes that a new inode in `parent` inherits."""
        directory = self._inodes.get(parent)
        return xattr_bytes(directory)

    def _made(self, parent: int, name: bytes, node: Inode, *more: bytes) -> None:
        pieces = [effects.inode(node), *more, effects.entry(parent, name, node.inode)]
        if node.xattrs is not None:
            pieces.append(effects.xattrs(node.inode, node.xattrs))
        self._commit(*pieces, effects.inode(self._inodes[parent]), result=node.inode)

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Inode:
        self._require(self._acl_bytes(parent))
        node: Inode = self._replaced["mknod"](parent, name, mode, rdev, caller)
        self._made(parent, name, node)
        return node

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Inode:
        self._require(self._acl_bytes(parent))
        node: Inode = self._replaced["mkdir"](parent, name, mode, caller)
        self._made(parent, name, node)
        return node

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        self._require(self._acl_bytes(parent) + len(target))
        node: Inode = self._replaced["symlink"](parent, name, target, caller)
        self._made(parent, name, node, effects.target(node.inode, target))
        return node

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Inode:
        self._require(self._acl_bytes(parent))
        node: Inode = self._replaced["tmpfile"](parent, mode, caller)
        self._commit(effects.inode(node), effects.xattrs(node.inode, node.xattrs), result=node.inode)
        return node

    def link(self, inode: int, parent: int, name: bytes) -> Inode:
        self._require(0)
        node: Inode = self._replaced["link"](inode, parent, name)
        above = effects.inode(self._inodes[parent])
        self._commit(effects.inode(node), effects.entry(parent, name, node.inode), above, result=node.inode)
        return node

    def unlink(self, parent: int, name: bytes) -> None:
        self._remove("unlink", parent, name)

    def rmdir(self, parent: int, name: bytes) -> None:
        self._remove("rmdir", parent, name)

    def _remove(self, method: str, parent: int, name: bytes) -> None:
        self._require(0, removes=True)
        number = self._number(parent, name)
        self._replaced[method](parent, name)
        after = self._after(number)
        self._commit(effects.entry(parent, name, 0), effects.inode(self._inodes[parent]), after, result=0)

    def _number(self, parent: int, name: bytes) -> int:
        directory = self._inodes.get(parent)
        return directory.children.get(name, 0) if directory is not None and directory.children is not None else 0

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = SUPERUSER,
    ) -> None:
        self._require(self._acl_bytes(parent))
        moved, victim = self._number(parent, name), self._number(new_parent, new_name)
        self._replaced["rename"](parent, name, new_parent, new_name, flags, caller)
        left = self._number(parent, name)  # a whiteout, or the inode that was exchanged
        numbers = dict.fromkeys((parent, new_parent, moved, victim, left))
        numbers.pop(0, None)
        is_gone = bool(victim) and victim not in self._inodes
        if is_gone:
            del numbers[victim]
        pieces = [effects.inode(self._inodes[number]) for number in numbers]
        whiteout = self._inodes.get(left) if left not in (0, moved, victim) else None
        if whiteout is not None and whiteout.xattrs is not None:
            pieces.append(effects.xattrs(left, whiteout.xattrs))
        pieces.append(effects.entry(parent, name, left))
        pieces.append(effects.entry(new_parent, new_name, self._number(new_parent, new_name)))
        if is_gone:
            pieces.append(effects.free(victim))
        self._commit(*pieces, result=0)

    def forget(self, inode: int, count: int) -> None:
        was = inode in self._inodes
        if inode in self.pinned:
            self.pinned.remove(inode)
            count = min(count + 1, self._state.lookups.get(inode, 0))
        self._replaced["forget"](inode, count)
        if was and inode not in self._inodes:
            self._pending.append(effects.free(inode))
            if len(self._pending) >= _MOST_PENDING:
                with contextlib.suppress(OSError):  # the next call reports it
                    self.flush()

    def record_listing(self, directory: Inode) -> None:
        """Record, with the next change, that the names of a directory get cookies."""
        self._pending.append(effects.listed(directory.inode))

    def entries(self, inode: int, cookie: int) -> Iterator[PlainEntry]:
        directory = self._inodes.get(inode)
        if directory is not None and directory.children is not None:
            cookies = directory.cookies
            if cookies is None or cookies.ascends:
                self.record_listing(directory)
        found: Iterator[PlainEntry] = self._replaced["entries"](inode, cookie)
        return found

    # -- attributes ------------------------------------------------------------------------------
    def setattr(self, inode: int, changes: AttributeChanges) -> Inode:
        node = self._inodes.get(inode)
        size = changes.size
        self._require(xattr_bytes(node), removes=node is not None and size is not None and size < node.size)
        before, old_size = (None, 0) if node is None else (node.xattrs, node.size)
        changed: Inode = self._replaced["setattr"](inode, changes)
        # At the same size, too: that frees pages which are reserved beyond it.
        pieces = [effects.truncate(inode, size)] if size is not None and size <= old_size else []
        self._commit(*pieces, effects.inode(changed), *changed_xattrs(changed, before), result=inode)
        return changed

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self._require(len(name) + len(value) + 64)
        self._replaced["setxattr"](inode, name, value, flags)
        self._record_xattr(inode, name)

    def removexattr(self, inode: int, name: bytes) -> None:
        self._require(len(name) + 64, removes=True)
        self._replaced["removexattr"](inode, name)
        self._record_xattr(inode, name)

    def _record_xattr(self, inode: int, name: bytes) -> None:
        node = self._inodes[inode]
        value = None if node.xattrs is None else node.xattrs.get(name)
        self._commit(effects.inode(node), effects.xattr(inode, name, value), result=0)

    # -- content ---------------------------------------------------------------------------------
    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        node, length = self._inodes.get(inode), len(data)
        if not length or node is None or node.xattrs is not None or self._pending or self._in_transaction:
            return self._write_with_others(inode, offset, data, kill_privileges=kill_privileges)
        # The usual write: its record has three effects, whose sizes are known.
        log, request = self.journal.log, self._request
        size = _WRITE_BYTES + length + (effects.REQUEST_LAYOUT.size if request else 0)
        log.require(length + _CALL_BYTES)
        begun = log.begin(size, effects.write(inode, offset, length), data)
        try:
            done: int = self._replaced["write"](inode, offset, data, kill_privileges=kill_privileges)
        except MemoryError:
            self._record_partial_write(inode, offset, length)
            raise
        if done < length or self._pending:
            self._record_write(inode, offset, data, done, None)
            return done
        attributes = effects.inode(self._inodes[inode])
        log.complete(begun, data, attributes + effects.request(request, done) if request else attributes)
        return done

    def _write_with_others(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool) -> int:
        """Write, and record it with whatever else belongs into the same record."""
        node = self._inodes.get(inode)
        before = None if node is None else node.xattrs
        self._require(len(data) + (0 if before is None else xattr_bytes(node)))
        try:
            done: int = self._replaced["write"](inode, offset, data, kill_privileges=kill_privileges)
        except MemoryError:
            self._record_partial_write(inode, offset, len(data))
            raise
        self._record_write(inode, offset, data, done, before)
        return done

    def _record_write(
        self, inode: int, offset: int, data: Buffer, done: int, before: dict[bytes, bytes] | None
    ) -> None:
        """Record the first `done` bytes of a write.  `before`: the extended attributes before it."""
        if done:
            node = self._inodes[inode]
            self._commit(
                effects.write(inode, offset, done),
                data if done == len(data) else memoryview(data)[:done],
                effects.inode(node),
                *changed_xattrs(node, before),
                result=done,
            )

    def _record_partial_write(self, inode: int, offset: int, length: int) -> None:
        """Record the content of a range in which a write ended without memory: complete blocks of it were written."""
        node = self._inodes.get(inode)
        length = 0 if node is None else min(length, node.size - offset)
        if node is not None and node.content is not None and length > 0:
            data = node.content.read(offset, length)
            self._commit(effects.write(inode, offset, length), data, effects.inode(node))

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        node = self._inodes.get(inode)
        before = None if node is None else node.xattrs
        is_hole = bool(mode & PUNCH_HOLE)
        self._require(xattr_bytes(node), removes=is_hole)
        self._replaced["fallocate"](inode, mode, offset, length)
        node = self._inodes[inode]
        effect = effects.punch if is_hole else effects.reserve
        self._commit(effect(inode, offset, length), effects.inode(node), *changed_xattrs(node, before), result=0)

    # -- snapshots -------------------------------------------------------------------------------
    def take_snapshot(self, name: str, *, tag: str | None = None, kind: SnapshotKind = "user") -> SnapshotInfo:
        self._require(len(os.fsencode(name)) + len(tag or "") * 4)
        info: SnapshotInfo = self._replaced["take_snapshot"](name, tag=tag, kind=kind)
        if kind == "safety":  # recorded with the change that it precedes: a crash keeps both or neither
            self._pending.append(effects.snapshot(info))
        else:
            self._commit(effects.snapshot(info))
        return info

    def drop_snapshot(self, name: str) -> None:
        self._require(0, removes=True)
        self._replaced["drop_snapshot"](name)
        self._commit()

    def _dropped(self, serial: int) -> None:
        self._pending.append(effects.drop(serial))


def xattr_bytes(node: Inode | None) -> int:
    """Return a bound of the size of an XATTRS effect with the extended attributes of `node`."""
    if node is None or node.xattrs is None:
        return 0
    return content_bytes(node.xattrs) + 16 * len(node.xattrs)


def changed_xattrs(node: Inode, before: dict[bytes, bytes] | None) -> tuple[bytes, ...]:
    """Return the XATTRS effect of `node`, if its attributes are not those `before` the call."""
    return () if node.xattrs is before else (effects.xattrs(node.inode, node.xattrs),)
