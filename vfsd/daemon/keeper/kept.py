"""The daemon's side of its keeper: hand over what a replacement needs, and take it over as a replacement.

A mount exists while a process has its descriptor.  The keeper (`keeping`) holds it while no daemon runs, and starts
another daemon.

Messages of the daemon on the socket to its keeper begin with a byte:

    HOLD, HOLD_ANCHOR  the engine's saved negotiation, with duplicates of the mount's descriptor, of that of
                       `Backend.anchor` (HOLD_ANCHOR), and of those of `Backend.held`.  From then on the keeper restarts
                       the daemon if that dies.
    NOTIFY             what the keeper passes on to systemd (`sd_notify`)
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from protocol.values import Value
from vfsd.kernel.engines.base import ResumableEngine
from vfsd.kernel.engines.native import mounting
from vfsd.kernel.engines.native.mounting import SHARED_BYTES
from vfsd.machine import interpreter
from vfsd.machine.runtime import process_start_ticks

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog
    from vfsd.daemon.backends import Backend
    from vfsd.daemon.keeper.sd_notify import Notifier
    from vfsd.kernel.engines.base import Engine

MAX_BYTES: Final = 4096 + 1024  # a mountpoint, and some numbers
MAX_HELD: Final = 8  # descriptors besides that of the mount
HOLD: Final = b"-"
HOLD_ANCHOR: Final = b"A"
NOTIFY: Final = b"N"
DEATHS_MAX: Final = 5  # in a row, of daemons that neither answered anything nor served for a minute
_LIVED_NS: Final = 60 * 10**9

# The numbers in the memory that a keeper and its daemon share.
ANSWERED: Final = 0  # how many requests were answered since the last death
RELEASED: Final = 1  # the process that takes the workspace over, so no daemon is to be restarted; 0: none does
KEEPS: Final = 2  # 1: the keeper has the descriptor of the mount, and restarts a daemon that dies
SERVING_NS: Final = 3  # since when the daemon serves, by time.monotonic_ns()


def shared_memory(descriptor: int | None = None) -> tuple[int, memoryview]:
    """Make the memory that a keeper and its daemon share, or map that of `descriptor`."""
    size = mounting.SHARED_BYTES
    if descriptor is None:
        descriptor = os.memfd_create("vfsd-keeper")
        os.ftruncate(descriptor, size)
    return descriptor, memoryview(mmap.mmap(descriptor, size)).cast("Q")


def deaths_in_a_row(memory: memoryview, before: int) -> int:
    """Count the death of a daemon, after `before` in a row, and begin to count for the next daemon.

    The kernel sends the request that killed a daemon to the next one, so a daemon that dies of it answers nothing.  It
    may also be one that nobody uses: it counts as well if it has served for a minute.
    """
    serving_ns = memory[SERVING_NS]
    has_lived = memory[ANSWERED] or (serving_ns and time.monotonic_ns() - serving_ns > _LIVED_NS)
    memory[ANSWERED] = memory[SERVING_NS] = 0
    return 0 if has_lived else before + 1


class Resumed(Value):
    """A mount that another daemon made: a descriptor of its own, and the engine's saved negotiation.

    `restarts`: how many daemons of this mount have died.  `anchor`: a duplicate of `Backend.anchor`.
    """

    descriptor: int
    saved: bytes
    restarts: int
    anchor: int | None = None


class Kept:
    """What a daemon has of its keeper, which is its parent.

    `channel`: the socket to the keeper.  `resumed`: the mount to continue with; None for the first daemon.
    `early_signal`: returns the signal that asked this process to end before it handled signals itself, or None.
    `memory_fd`: the descriptor of the shared memory.  `log`: for what a replacement of this daemon needs.  `notes`:
    what was set while the daemon ran.
    """

    def __init__(
        self,
        channel: socket.socket,
        memory: memoryview,
        memory_fd: int,
        log: SharedLog,
        resumed: Resumed | None,
        notifier: Notifier,
        early_signal: Callable[[], int | None],
    ) -> None:
        """`notifier`: of the keeper."""
        self.log: Final = log
        self.notifier: Final = replace(notifier, keeper=self._notify)
        self.notes: Final = Notes(memory_fd)
        self.resumed = resumed
        self.early_signal = early_signal
        self.why_not: str | None = None  # why this daemon is not kept
        self.pid = os.getppid()
        self.start_ticks = process_start_ticks(self.pid) or 0
        self.is_kept = False
        self.memory_fd = memory_fd
        self._channel = channel
        self._memory = memory

    @property
    def state(self) -> str:
        """Describe the keeper in a line for people."""
        if self.why_not is not None:
            return f"none: {self.why_not}"
        if os.getppid() != self.pid:
            return "none: it died, so a daemon that dies stays dead"
        restarts = 0 if self.resumed is None else self.resumed.restarts
        return f"pid {self.pid}" + (f", restarted the daemon {restarts} time{'s' * (restarts > 1)}" if restarts else "")

    def release(self, successor: int) -> None:
        """Have the keeper end with this process, whatever ends it; 0: restart it again.

        `successor`: the keeper, or without one the daemon, that serves from then on.
        """
        self._memory[RELEASED] = successor

    @property
    def is_released(self) -> bool:
        """Whether another daemon is about to take the workspace over."""
        return bool(self._memory[RELEASED])

    def answered(self) -> None:
        """Count work for a client of the control socket, as the engine counts the kernel's requests."""
        self._memory[ANSWERED] += 1

    def _notify(self, message: bytes) -> bool:
        """Have the keeper pass a message on to systemd; return whether it was sent."""
        try:
            self._channel.send(NOTIFY + message, socket.MSG_DONTWAIT)
        except OSError:  # the keeper died, or is stopped
            return False
        return True

    def begin(self, engine: Engine, backend: Backend) -> None:
        """Have the keeper keep the mount from now on, with what `backend` needs; `self.why_not` says why not."""
        self._memory[SERVING_NS] = time.monotonic_ns()
        self.why_not = self._begin(engine, backend)
        self.is_kept = self.why_not is None
        interpreter.end_with_parent(0)

    def _begin(self, engine: Engine, backend: Backend) -> str | None:
        if not isinstance(engine, ResumableEngine):
            return f"the engine {engine.name} cannot continue a mount"
        engine.share(self._memory, self.memory_fd)
        if self.resumed is not None:
            return None
        saved, device = engine.negotiated(), engine.descriptor
        if saved is None or device is None:
            return "there is no mount"
        known, start = ([], HOLD) if backend.anchor is None else ([backend.anchor], HOLD_ANCHOR)
        try:
            socket.send_fds(self._channel, [start, saved], [device, *known, *backend.held])
        except OSError as error:
            return f"the keeper died ({error.strerror})"
        return None


# -- notes for the next daemon: what was set while this one ran ------------------------------------------------
_SLOT_BYTES: Final = 2 << 20  # more than all patterns and labels take
_HEADER: Final = "{:020} {:010} {:010}\n"  # the number of the change, the length and the CRC of the JSON text
_HEADER_BYTES: Final = 43
_SLOTS: Final = (SHARED_BYTES, SHARED_BYTES + _SLOT_BYTES)


class Notes:
    """The notes behind the shared memory in the file `memory_fd`.

    A journal has the policy, too, but `host:` and `container:` have no journal, and labels are in none.

    Invariant: the notes of before a change, or those of after it, can be read at every moment.  There are two slots,
    and a change writes to the older one; the CRC shows whether it is complete.
    """

    def __init__(self, memory_fd: int) -> None:
        self._memory_fd = memory_fd
        self._number, self._values = max(map(self._read, _SLOTS), key=lambda found: found[0])

    def _read(self, slot: int) -> tuple[int, dict[str, Any]]:
        words = os.pread(self._memory_fd, _HEADER_BYTES, slot).split()
        if len(words) == 3 and all(map(bytes.isdigit, words)):  # not zeros, or nothing
            number, length, crc = map(int, words)
            data = os.pread(self._memory_fd, length, slot + _HEADER_BYTES)
            if zlib.crc32(data) == crc:
                return number, json.loads(data)
        return 0, {}

    def get(self, key: str) -> Any:
        """Return what this daemon, or the one before it, has set; None if nothing was."""
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Note a value of JSON for the next daemon.  OSError if there is no memory for it, or it is too large."""
        values = {**self._values, key: value}
        data = json.dumps(values).encode()  # which keeps the lone surrogates of bytes that are not UTF-8
        number = self._number + 1
        if len(data) > _SLOT_BYTES - _HEADER_BYTES:
            raise OSError(errno.E2BIG, f"{len(data)} bytes are too many for the notes of a daemon")
        header = _HEADER.format(number, len(data), zlib.crc32(data)).encode()
        os.pwrite(self._memory_fd, header + data, _SLOTS[number % 2])
        self._number, self._values = number, values
