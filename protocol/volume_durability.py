"""Journals, recovery and handover: optional parts of a volume, with which its state outlives the process.

The successor is the process that continues with the state of its predecessor.

Each protocol belongs to a capability, as in `protocol.volume_extensions`; the functions that ask for it are here, too.

Threading: as in `protocol.volume`; what other threads may do says so.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol, cast

from protocol.values import Value
from protocol.volume import Volume
from protocol.volume_extensions import CacheInvalidation, SnapshotableVolume

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog


class JournalStatus(Value):
    """The journal of a volume.

    `fsync`: when it is synced, "always", "everysec" or "no".  `unsynced_bytes`: not known to be on disk.  `failure`:
    why it records nothing any more, so that the volume refuses changes.
    """

    directory: str
    fsync: str
    size_bytes: int
    unsynced_bytes: int
    failure: str | None


class JournaledVolume(SnapshotableVolume, Protocol):
    """A volume whose changes a journal records (capability `journal`)."""

    notes: Mapping[str, bytes]

    def note(self, key: str, value: bytes, *, with_next: bool = False) -> None:
        """Keep a value with the state: `notes` has it, also after a crash; b"" removes it.  OSError.

        `with_next`: it is recorded together with the next change, so a crash keeps both or neither.
        """
        ...

    def journal_status(self) -> JournalStatus:
        """Describe the journal."""
        ...

    def connect(self, *, is_known: bool) -> CacheInvalidation:
        """Begin to serve a kernel; call it once, before the first request.

        `is_known`: the kernel that the daemon before this one served.  Then files without a name exist until the kernel
        forgets them, results that were recorded are returned to requests that come again, and the return value is what
        the kernel's caches may have wrong, because a daemon died between a change and its invalidation.
        """
        ...

    def store_content(self, data: bytes) -> Iterator[None]:
        """Record what the next transaction writes to a file, in small steps between which requests are answered.

        It counts only with that transaction.  Call `drop_stored` in any case.  OSError.
        """
        ...

    def drop_stored(self) -> None:
        """End what `store_content` began."""
        ...

    def invalidated(self) -> None:
        """Record, with the next change, that the kernel's caches agree with the state."""
        ...

    def take_unrecorded(self) -> CacheInvalidation:
        """Return what the kernel's caches may have wrong, once: calls that failed although the state has their change.

        The journal's disk did not take their record; the journal writes it when the disk works again.
        """
        ...

    @property
    def wants_image(self) -> bool:
        """Whether the journal has grown so much that an image of the state should replace it."""
        ...

    def begin_image(self) -> int:
        """Begin the part of the journal that follows the present state, and return its number.  OSError.

        No import is in preparation.  The next step is `write_image`, in a process that was forked in this state.
        """
        ...

    def write_image(self, number: int, progress: Callable[[], None]) -> None:
        """In the forked process: write the state that `begin_image` returned `number` for.  OSError.

        Calls `progress` again and again, so that the memory that this process takes can be observed.
        """
        ...

    def finish_image(self, number: int, *, is_complete: bool) -> None:
        """Have the image replace the journal before it, or remove the incomplete image.  Any thread.  OSError."""
        ...

    def keep_room(self) -> None:
        """Keep space on the disk for calls that remove something, if there is room.  Call it after `finish_image`."""
        ...


class JournalEnd(Value):
    """Where the next record comes: the number of the log, an offset in it, and the record's sequence number.

    `image_bytes` and `older_bytes`: the sizes of the image and of the logs since it, without the last.  `synced`: the
    offset up to which the log is known to be on disk.
    """

    number: int
    offset: int
    sequence: int
    image_bytes: int
    older_bytes: int
    synced: int


class GivenState(Protocol):
    """A state that a successor takes over, while this process serves it: see `HandedOverVolume.handing_over`.

    `below` identifies what is below the volume, a lower layer or a directory, and is the same in both processes; ""
    without one.  `has_image`: the log is not enough, so a process is forked that writes an image.
    """

    start: JournalEnd  # where the log began when this was made
    below: str
    has_image: bool = False

    @property
    def lock_fd(self) -> int | None:
        """The descriptor of the lock of the volume's journal; None without one."""
        return None

    def log_fd(self) -> int:
        """Return a new descriptor of the log that records what changes.  OSError if it was removed."""
        ...

    def position(self) -> JournalEnd:
        """Return the end of the log, to which the successor can follow.  OSError."""
        ...

    def write_image(self, descriptor: int) -> None:
        """In a process that was forked at `start`: write the state of then to a pipe.  OSError."""
        raise OSError(errno.EOPNOTSUPP, f"no image for the descriptor {descriptor}: the log has the whole state")

    def files(self) -> Iterable[tuple[int, int]]:
        """Yield inodes that only this process can open, and a descriptor of each.  Nothing may change any more."""
        return ()

    def rest(self) -> bytes:
        """Return what neither the image nor the log has.  Nothing may change any more."""
        ...

    def end(self) -> None:
        """Go on in this process, without the successor."""
        ...


class TakenState(Protocol):
    """A state that this process takes over: see `HandedOverVolume.taking_over`.  `below`: see `GivenState`."""

    below: str

    def read(self, image_fd: int, log_fd: int, start: JournalEnd) -> None:
        """Rebuild the state at `start`.  Closes the descriptors.  `image_fd`: -1 without an image.

        OSError: EPROTONOSUPPORT for another format, EBADMSG if the image is not complete; ValueError, KeyError.
        """
        ...

    def follow(self, end: int) -> None:
        """Apply what the log has up to the offset `end`.  OSError, ValueError, KeyError."""
        ...

    def take_files(self, files: Mapping[int, int]) -> None:
        """Take over a part of `GivenState.files`; the descriptors belong to this process."""
        ...

    def complete(self, rest: bytes) -> None:
        """Take over `GivenState.rest`.  ValueError if the state is not that of the predecessor."""
        ...


class HandedOverVolume(Volume, Protocol):
    """A volume with which a successor can continue under the same kernel (capability `handover`).

    If its state `has_image`, it is a `ForkableVolume`.
    """

    def handing_over(self) -> GivenState:
        """Begin to record what changes.  No transaction is in progress.  OSError."""
        ...

    def taking_over(self) -> TakenState:
        """Begin to take over the state of the predecessor.  This volume is empty, and is served afterwards.

        A volume that is to `keep_log` does so from before this call.
        """
        ...

    def discard_journal(self) -> None:
        """Record nothing any more, write nothing more to the journal, and give its lock up."""
        ...


def handed_over(volume: Volume) -> HandedOverVolume | None:
    """Return `volume` if it declares `handover`, else None."""
    return cast(HandedOverVolume, volume) if volume.capabilities.handover else None


UNIQUE_RESEND: Final = 1 << 63  # linux/fuse.h: set in the number of a request that the kernel sends again


class KernelRequest:
    """A request of the kernel that a task answers: its number `unique`, without UNIQUE_RESEND.

    `answered`: to be called with that number when the kernel has the reply, if a volume sets it.
    """

    def __init__(self, unique: int) -> None:
        self.unique = unique
        self.answered: Callable[[int], None] | None = None


# The request that the running task answers, for volumes that answer later; None: the task answers none.
current_request: Final[ContextVar[KernelRequest | None]] = ContextVar("current_request", default=None)


class RecoverableVolume(Volume, Protocol):
    """A volume that a successor can serve to the same kernel (capability `recoverable`).

    A volume in memory that has a journal needs nothing else, unless a part of what the kernel knows is not in it.
    """

    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """Record in `log` from now on what a successor needs; call it once, before `connect` and the first request.

        `is_known`: begin with what the predecessor, which served the same kernel, has recorded there.
        """
        ...


def recoverable(volume: Volume) -> RecoverableVolume | None:
    """Return `volume` if it declares `recoverable`."""
    return cast(RecoverableVolume, volume) if volume.capabilities.recoverable else None


def journaled(volume: Volume) -> JournaledVolume | None:
    """Return `volume` if it declares `journal`."""
    return cast(JournaledVolume, volume) if volume.capabilities.journal else None
