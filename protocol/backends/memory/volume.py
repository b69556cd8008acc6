"""MemoryVolume: a POSIX volume in memory with snapshots.

Its parts:

- `state.MemoryState`: the inode table with its counters, undo log and memory ledger; it makes every change;
- `limits.MemoryLimits`: checks whether a change fits;
- `entries.DirectoryEntries` and `files.InodeCalls`: the calls of `protocol.volume.Volume`;
- `history.snapshots.SnapshotHistory`: the calls of `protocol.volume_extensions.SnapshotableVolume`.

Threading: the serving loop only.  No call waits, so each one is atomic.  tmpfs is the reference for every answer
(mm/shmem.c, fs/libfs.c, fs/namei.c).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from protocol.backends.memory.blocks import PAGE_BYTES
from protocol.backends.memory.entries import not_found
from protocol.backends.memory.files import check_regular
from protocol.backends.memory.history.snapshots import SnapshotHistory
from protocol.backends.memory.invariants import Invariants
from protocol.backends.memory.ledger import RESERVE_BYTES
from protocol.backends.memory.limits import MemoryLimits
from protocol.backends.memory.state import MemoryState
from protocol.errors import os_error
from protocol.volume import Answer, AttributeChanges, DirectoryEntry, StatFs, VolumeCapabilities
from protocol.volume_durability import JournalStatus
from protocol.volume_extensions import CacheInvalidation, SharedLimit, SnapshotInfo, VolumeUsage

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.journaling.changes import Image
    from protocol.backends.memory.journaling.handover import Giving, Taking
    from protocol.backends.memory.journaling.recorder import Recorder, WaitSynced
    from protocol.backends.memory.journaling.replay import Replay
    from protocol.journal.directory import Journal
    from protocol.volume import Buffer

_UNLIMITED_INODES: Final = 2**31 - 1
_COPY_BYTES: Final = 1 << 20
_KEEP_SIZE_PUNCH_HOLE: Final = 3  # linux/falloc.h


class MemoryVolume(SnapshotHistory):
    """A volume in memory.  Implements `PreparingVolume`, `ForkableVolume` and `CheckableVolume`.

    `max_bytes` bounds the live content (whole pages of 4,096 bytes, holes not counted) and the metadata beyond 4 MiB;
    `max_inodes` bounds the live inodes, the root included; `max_memory` bounds content, metadata and snapshots
    together.  None means no limit.  `clock` returns nanoseconds since the epoch.  `uid` and `gid` own the root, by
    default those of the process.  A backend that starts with content passes its own `state`.

    The parts are base classes, so a request costs no forwarding call.
    """

    capabilities: VolumeCapabilities = VolumeCapabilities(
        snapshots=True,
        acls=True,
        appends=True,
        durable=False,
        shortcuts=True,
        staged_imports=True,
        prepared_imports=True,
        self_check=True,
        forkable=True,
        handover=True,
        paths=True,
        orphans=True,
    )

    _replay: Replay | None = None  # from the replay of a journal until `connect`

    def __init__(
        self,
        max_bytes: int | None = None,
        max_inodes: int | None = None,
        read_only: bool = False,
        *,
        clock: Callable[[], int] = time.time_ns,
        uid: int | None = None,
        gid: int | None = None,
        state: MemoryState | None = None,
        max_memory: int | None = None,
    ) -> None:
        if state is None:
            state = MemoryState(clock, os.getuid() if uid is None else uid, os.getgid() if gid is None else gid)
        state.read_only = read_only
        limits = MemoryLimits(state, max_bytes, max_inodes, max_memory)
        super().__init__(state, limits)
        self.notes: dict[str, bytes] = {}  # the values that `note` keeps
        self.pinned: set[int] = set()  # inodes with one lookup more than is known: see `Recorder.reconnect`

    def path_of(self, inode: int) -> bytes | None:
        """See `protocol.volume.ExtendedVolume`."""
        return self._state.path_of(inode)

    def keeping(self, *names: str) -> AbstractContextManager[None]:
        """See `SnapshotableVolume`."""
        return self._limits.keeping(*names)

    def reserving(self) -> AbstractContextManager[Callable[[int], None]]:
        """See `ImportStage`."""
        return self._ledger.reserving()

    # -- settings and statistics -----------------------------------------------------------------
    @property
    def read_only(self) -> bool:
        """Whether every changing call fails with EROFS."""
        return self._state.read_only

    @read_only.setter
    def read_only(self, value: bool) -> None:
        self._state.read_only = value

    def usage(self) -> VolumeUsage:
        state, limits, ledger = self._state, self._limits, self._state.ledger
        reserve = RESERVE_BYTES * len(state.inodes)
        return VolumeUsage(
            files=state.files,
            directories=state.directories,
            size_bytes=state.size_bytes,
            used_bytes=(state.pages + limits.metadata_pages()) * PAGE_BYTES,
            max_bytes=limits.max_bytes,
            max_inodes=limits.max_inodes,
            live_bytes=ledger.content + ledger.metadata - reserve,
            snapshot_bytes=max(0, ledger.kept),
            overhead_bytes=ledger.overhead + reserve,
            max_memory=ledger.bound,
            pruned=limits.pruned,
        )

    def has_lookups(self, inode: int) -> bool:
        return inode in self._state.lookups

    def is_orphan(self, inode: int) -> bool:
        return inode in self._state.orphans

    def lookup_orphan(self, inode: int) -> Inode:
        state = self._state
        if inode not in state.orphans:
            raise os_error(errno.ENOENT, f"inode {inode}")
        state.lookups[inode] += 1
        return state.inodes[inode]

    def lookup_counts(self) -> dict[int, int]:
        """Return the number of lookups of each inode that has any, the root included."""
        return self._state.lookups.copy()

    @property
    def on_pruned(self) -> Callable[[SnapshotInfo], None] | None:
        return self._limits.on_pruned

    @on_pruned.setter
    def on_pruned(self, callback: Callable[[SnapshotInfo], None] | None) -> None:
        self._limits.on_pruned = callback

    def check_invariants(self) -> None:
        Invariants(self._state).check()
        if self.recorder is not None:
            self.recorder.check_invariants()

    def new_stage(self) -> MemoryVolume:
        stage = MemoryVolume(self._limits.max_bytes, self._limits.max_inodes)
        stage._state.ledger.borrow_from(self._state.ledger)
        return stage

    def give_back(self) -> None:
        self._state.ledger.give_back()

    # -- journal -----------------------------------------------------------------------------------
    def replay(self, batches: Iterable[Sequence[bytes]]) -> None:
        """Rebuild state, snapshots and notes from the batches of a journal.  The volume is new.

        Files without a name exist until `connect`.  ValueError if a batch has an effect of a later version.
        """
        replay = self._new_replay()
        for batch in batches:
            replay.apply(batch)
        replay.finish()
        self._replayed(replay)
        self._replay = replay

    def keep_journal(self, journal: Journal, *, is_new: bool) -> None:
        """Record every change in `journal` from now on; in a new one, the present state first.  OSError.

        From now on the volume is durable: see `fsync`.
        """
        from protocol.backends.memory.journaling.changes import write_image  # noqa: PLC0415 (start-up: few mounts)

        if is_new:
            write_image(self._new_image(), journal.log)
        self.record_in(journal)
        self.capabilities = replace(self.capabilities, durable=True, journal=True)

    def record_in(self, journal: Journal) -> None:
        """Record every change in `journal` from now on; the volume does not become durable by that."""
        self.recorder = self._new_recorder(journal)

    def discard_journal(self) -> None:
        """Record nothing any more, and close the journal as it is."""
        recorder = self._unbind()
        if recorder is not None:
            recorder.journal.detach()

    def handing_over(self) -> Giving:
        """See `HandedOverVolume`."""
        from protocol.backends.memory.journaling.handover import Giving  # noqa: PLC0415 (start-up: upgrades are rare)

        return Giving(self, self._state, self._new_image)

    def taking_over(self) -> Taking:
        from protocol.backends.memory.journaling.handover import Taking  # noqa: PLC0415 (start-up: upgrades are rare)

        return Taking(self, self._state, self._new_replay(), self._replayed)

    def _replayed(self, replay: Replay) -> None:
        """Take over the results of a replay other than state and notes."""

    # Start-up: few mounts have a journal.
    def _new_replay(self) -> Replay:
        from protocol.backends.memory.journaling.replay import Replay  # noqa: PLC0415

        return Replay(self._state, self.notes)

    def _new_image(self) -> Image:
        from protocol.backends.memory.journaling.changes import Image  # noqa: PLC0415

        return Image(self._state, self.notes)

    def _new_recorder(self, journal: Journal) -> Recorder:
        from protocol.backends.memory.journaling.recorder import Recorder  # noqa: PLC0415

        return Recorder(self, self._state, journal)

    def connect(self, *, is_known: bool) -> CacheInvalidation:
        """See `JournaledVolume`."""
        replay, self._replay = self._replay, None
        recorder = self.recorder
        assert recorder is not None
        if is_known and replay is not None:
            self.keep_room()  # which the daemon before had
            recorder.reconnect(replay.requests)
            return replay.invalidation()
        if replay is not None:
            replay.disconnect()
        recorder.connect()
        return CacheInvalidation()

    @property
    def journal(self) -> Journal | None:
        """The journal that records the changes."""
        return None if self.recorder is None else self.recorder.journal

    def sync_with(self, wait: WaitSynced) -> None:
        """Have `unsynced` and `fsync` use `wait`."""
        assert self.recorder is not None
        self.recorder.wait_synced = wait

    def store_content(self, data: bytes) -> Iterator[None]:
        """See `JournaledVolume`."""
        return iter(()) if self.recorder is None else self.recorder.ahead.store_content(data)

    def drop_stored(self) -> None:
        """See `JournaledVolume`."""
        if self.recorder is not None:
            self.recorder.ahead.clear()

    @property
    def answering(self) -> Callable[[int], None]:
        """See `JournaledVolume`."""
        assert self.recorder is not None
        return self.recorder.answering

    def defer_syncs(self) -> bool:
        """See `JournaledVolume`."""
        assert self.recorder is not None
        return self.recorder.defer_syncs()

    def invalidated(self) -> None:
        """See `JournaledVolume`."""
        assert self.recorder is not None
        self.recorder.invalidated()

    def unsynced(self, *, of_request: bool) -> Callable[[], Awaitable[None]] | None:
        """See `JournaledVolume`."""
        return None if self.recorder is None else self.recorder.unsynced(of_request=of_request)

    def journal_status(self) -> JournalStatus:
        """Describe the journal, which there is."""
        assert self.recorder is not None
        return self.recorder.status()

    def note(self, key: str, value: bytes, *, with_next: bool = False) -> None:
        """See `JournaledVolume`."""
        if self.notes.get(key, b"") != value:
            if self.recorder is not None:
                self.recorder.note(key, value, with_next=with_next)
            if value:
                self.notes[key] = value
            else:
                self.notes.pop(key, None)

    def take_unrecorded(self) -> CacheInvalidation:
        """See `JournaledVolume`."""
        return CacheInvalidation() if self.recorder is None else self.recorder.take_unrecorded()

    @property
    def wants_image(self) -> bool:
        """See `JournaledVolume`."""
        journal = self.journal
        return journal is not None and journal.log.failure is None and journal.is_large

    def begin_image(self) -> int:
        """See `JournaledVolume`."""
        assert self.recorder is not None
        self.recorder.flush()
        return self.recorder.journal.rotate()

    def write_image(self, number: int, progress: Callable[[], None]) -> None:
        """See `JournaledVolume`."""
        from protocol.backends.memory.journaling.changes import write_image  # noqa: PLC0415 (start-up: few mounts)

        assert self.recorder is not None
        journal = self.recorder.journal
        journal.unlock()
        log = journal.image_log(number)
        write_image(self._new_image(), log, progress)
        log.close()

    def finish_image(self, number: int, *, is_complete: bool) -> None:
        """See `JournaledVolume`."""
        journal = self.journal
        if journal is not None:
            if is_complete:
                journal.finish_image(number)
            else:
                journal.abandon_image(number)

    def keep_room(self) -> None:
        """See `JournaledVolume`."""
        if self.journal is not None:
            self.journal.log.keep_room()

    def flush_journal(self) -> None:
        """Record what waits for the next record.  OSError."""
        if self.recorder is not None:
            self.recorder.flush()

    def end_journal(self) -> None:
        """Sync and close the journal, if there is one.  OSError if it cannot be synced."""
        recorder = self._unbind()
        if recorder is not None:
            try:
                recorder.flush()
            finally:
                recorder.journal.close()

    def _unbind(self) -> Recorder | None:
        recorder, self.recorder, self.repeats = self.recorder, None, None
        if recorder is not None:
            recorder.unbind()
            self.capabilities = replace(self.capabilities, durable=False, journal=False)
        return recorder

    # -- fork(2) -----------------------------------------------------------------------------------
    def share_limit(self, limit: SharedLimit | None) -> None:
        self._ledger.shared_limit = limit

    @contextmanager
    def forking(self) -> Iterator[None]:
        with self._state.lock, self._state.ledger.forking():
            yield

    def forked(self) -> None:
        recorder = self._unbind()
        state = self._state
        if recorder is not None:
            recorder.journal.detach()
        state.ledger.forked()
        self.close_views()
        state.drop_lookups()
        self.pinned.clear()

    # -- calls that use another call of the volume -----------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Inode:
        inode = self.find(parent, name)
        if inode is None:
            raise not_found(name)
        return inode

    def readdir(self, inode: int, cookie: int) -> Iterator[DirectoryEntry]:
        return map(DirectoryEntry._make, self.entries(inode, cookie))

    def read(self, inode: int, offset: int, size: int) -> Buffer:
        found = self.read_pieces(inode, offset, size)
        return b"".join(found) if isinstance(found, list) else found

    def getxattr(self, inode: int, name: bytes) -> bytes:
        value = self.find_xattr(inode, name)
        if value is None:
            raise os_error(errno.ENODATA)
        return value

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        node = self.getattr(source)
        check_regular(node)
        length = max(0, min(length, node.size - source_offset))
        if source == target and source_offset < target_offset + length and target_offset < source_offset + length:
            raise os_error(errno.EINVAL)
        done, end = 0, source_offset + length
        content = node.content
        runs = [] if content is None else list(content.data_within(source_offset, end))
        try:
            for start, stop in (*runs, (end, end)):
                if start > source_offset + done:
                    hole = start - source_offset - done
                    self._copy_hole(target, target_offset + done, hole)
                    done += hole
                while (at := source_offset + done) < stop:
                    # Not `read`, which changes the atime of the source while the kernel shows the cached one.
                    content = self._state.inodes[source].content
                    assert content is not None
                    data = content.read(at, min(_COPY_BYTES, stop - at))
                    written = self.write(target, target_offset + done, data)
                    done += written
                    if written < len(data):
                        return done
        except OSError:
            if not done:
                raise
        return done

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> tuple[int, int]:
        written = self.write(inode, self.getattr(inode).size, data, kill_privileges=kill_privileges)
        return written, self.getattr(inode).size

    def _copy_hole(self, target: int, offset: int, length: int) -> None:
        size = self.getattr(target).size
        if offset < size:
            self.fallocate(target, _KEEP_SIZE_PUNCH_HOLE, offset, min(length, size - offset))
        if offset + length > size:
            self.setattr(target, AttributeChanges(size=offset + length))

    def fsync(self, inode: int, *, data_only: bool) -> Answer[None]:  # noqa: ARG002
        """Sync the journal.  Without one, memory cannot be made more durable."""
        return None if self.recorder is None else self.recorder.sync()

    def statfs(self) -> StatFs:
        limits, ledger = self._limits, self._state.ledger
        used = self._state.pages + limits.metadata_pages()
        if limits.max_bytes is not None:
            blocks = limits.max_bytes // PAGE_BYTES
        else:
            blocks = max(os.sysconf("SC_PHYS_PAGES"), used)
        free = min(blocks - used, ledger.room // PAGE_BYTES)
        inodes = limits.max_inodes if limits.max_inodes is not None else _UNLIMITED_INODES
        return StatFs(PAGE_BYTES, blocks, max(0, free), inodes, max(0, inodes - len(self._state.inodes)))
