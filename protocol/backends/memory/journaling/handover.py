"""Handover of a memory volume to a successor: `Giving` in the old process, `Taking` in the new one.

1. `Giving` records every change from now on: in the volume's journal, or in one that is only in memory.
2. A process that is forked in the same step writes the image (`Giving.write_image`); `Taking` reads it.
3. `Taking.follow` applies what was recorded since, as often as `Giving.position` says how far that is.
4. When nothing changes any more, `Giving.rest` has what no journal records: lookups, access times, and sums that
   `Taking.complete` compares, so that an incomplete state is not served.

Threading: that of the volume; `Taking` is alone with it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.backends.memory.journaling.changes import write_image
from protocol.journal.directory import Journal
from protocol.journal.log import LogFollower, image_writer, read_image
from protocol.values import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from protocol.backends.memory.journaling.changes import Image
    from protocol.backends.memory.journaling.replay import Replay
    from protocol.backends.memory.state import MemoryState
    from protocol.backends.memory.volume import MemoryVolume
    from protocol.volume_durability import JournalEnd

_INODES: Final = "Q"  # of an array: 64 bits, in the order of bytes of this machine


class _Rest(Value):
    """The values that no journal records.  `sums`: see `MemoryState.sums`.  `read`: inode and access time of those that
    were read meanwhile.

    Of overlays, `known`: what the old process has loaded of the lower layer since the image, as records of
    `KnownInodes`; `outdated`: inodes that changed below, which the kernel was not told.
    """

    inodes: bytes
    counts: bytes
    pinned: bytes
    read: list[tuple[int, int, int]]  # seconds and nanoseconds
    serial: int
    next_inode: int
    is_saved: bool
    saved_ns: int | None
    sums: dict[str, int]
    known: list[bytes] = msgspec.field(default_factory=list)
    outdated: list[int] = msgspec.field(default_factory=list)


class Giving:
    """The old process's side.  A subclass for a state with more parts replaces the methods after `end`."""

    below = ""
    has_image = True

    def __init__(self, volume: MemoryVolume, state: MemoryState, new_image: Callable[[], Image]) -> None:
        self._volume = volume
        self._state = state
        self._new_image = new_image
        self._own = volume.journal  # None: the volume keeps none
        if self._own is None:
            volume.record_in(Journal.in_memory())
        journal = volume.journal
        assert journal is not None
        self._journal = journal
        self._since_ns = state.clock()
        self.start = self.position()

    @property
    def lock_fd(self) -> int | None:
        """The descriptor of the lock of the volume's journal."""
        return None if self._own is None else self._own.lock_fd

    def log_fd(self) -> int:
        """Return a new descriptor of the log.  OSError if it was removed."""
        return self._journal.reopened_log()

    def position(self) -> JournalEnd:
        """Record what waits for the next record, and return the end of the log.  OSError."""
        self._volume.flush_journal()
        return self._journal.end()

    def write_image(self, descriptor: int) -> None:
        """Write the state at `start` to a pipe, in a process that was forked then.  OSError."""
        if self._own is not None:
            self._own.unlock()
        log = image_writer(descriptor)
        write_image(self.image(), log)
        log.close()

    def files(self) -> Iterable[tuple[int, int]]:
        """Return nothing: the image has the content of files without a name."""
        return ()

    def rest(self) -> bytes:
        """Return what no journal records.  Nothing may change after the last `position`."""
        state, volume = self._state, self._volume
        since = self._since_ns
        return msgspec.msgpack.encode(
            _Rest(
                array(_INODES, state.lookups.keys()).tobytes(),
                array(_INODES, state.lookups.values()).tobytes(),
                array(_INODES, volume.pinned).tobytes(),
                [
                    (node.inode, *divmod(node.atime_ns, 10**9))
                    for node in state.inodes.values()
                    if node.atime_ns >= since
                ],
                state.log.serial,
                state.next_inode,
                volume.is_saved,
                volume.saved_ns,
                state.sums(),
                *self.known(),
            )
        )

    def end(self) -> None:
        """Go on without the new process: end a journal that was begun for it."""
        if self._own is None and self._volume.journal is self._journal:
            self._volume.discard_journal()

    def image(self) -> Image:
        """Return the image that the forked process writes."""
        return self._new_image()

    def known(self) -> tuple[list[bytes], list[int]]:
        """Return `known` and `outdated` of `_Rest`."""
        return [], []


class Taking:
    """The new process's side, for a volume that is empty.  A subclass replaces the methods after `complete`."""

    below = ""

    def __init__(
        self, volume: MemoryVolume, state: MemoryState, replay: Replay, replayed: Callable[[Replay], None]
    ) -> None:
        self._volume = volume
        self._state = state
        self._replay = replay
        self._replayed = replayed
        self._log: LogFollower | None = None
        # Opening the volume has used serials, which the snapshots of the old process have.
        state.log.serial = state.epoch = 0 if state.log.newest is None else state.log.newest.serial

    def read(self, image_fd: int, log_fd: int, start: JournalEnd) -> None:
        """Rebuild the state at `start`.  Closes the descriptors.

        OSError: EPROTONOSUPPORT for another format, EBADMSG if the image is not complete.  ValueError for an effect of
        a later version.
        """
        self._log = LogFollower(log_fd, start.offset, start.sequence)
        for payload in read_image(image_fd):
            self._replay.apply((payload,))

    def follow(self, end: int) -> None:
        """Apply what was recorded up to the offset `end` of the log.  OSError, ValueError, KeyError."""
        assert self._log is not None
        for batch in self._log.batches(end):
            self._replay.apply(batch)

    def take_files(self, files: Mapping[int, int]) -> None:
        """Take nothing: see `Giving.files`."""

    def complete(self, rest: bytes) -> None:
        """Take over what no journal records.  ValueError if the state is not that of the old process."""
        assert self._log is not None
        self._log.close()
        found = msgspec.msgpack.decode(rest, type=_Rest)
        state = self._state
        self.know(found.known, found.outdated)
        self._replay.finish()
        self._replayed(self._replay)
        sums = state.sums()
        if sums != found.sums:
            differing = [name for name, value in found.sums.items() if sums.get(name) != value]
            raise ValueError(f"the state was not transferred completely ({', '.join(differing)})")
        inodes, counts = array(_INODES, found.inodes), array(_INODES, found.counts)
        state.lookups.clear()
        state.lookups.update(zip(inodes, counts, strict=True))
        self._volume.pinned.update(array(_INODES, found.pinned))
        for number, seconds, nanoseconds in found.read:
            state.set_atime(number, seconds * 10**9 + nanoseconds)
        if found.serial > state.log.serial:  # of a snapshot that was dropped: it is not given again
            state.log.serial = found.serial - 1
            state.moment()
        state.next_inode = found.next_inode
        self._volume.restore_saved(found.saved_ns, is_saved=found.is_saved)

    def know(self, known: list[bytes], outdated: list[int]) -> None:
        """Take over `Giving.known`."""
