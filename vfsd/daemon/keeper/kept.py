"""The daemon's side of its keeper: hand over what a replacement needs, and take it over as a replacement.

A mount exists while a process has its descriptor.  The keeper (`keeping`) holds it while no daemon runs, and starts
another daemon.

The memory that they share has what the next daemon is to know (`vfsd.daemon.resume`).  Messages of the daemon on the
socket to its keeper begin with a byte:

    HOLD, HOLD_ANCHOR  duplicates of the mount's descriptor, of that of `Backend.anchor` (HOLD_ANCHOR), and of those of
                       `Backend.held`.  From then on the keeper restarts the daemon if that dies.
    NOTIFY             what the keeper passes on to systemd (`sd_notify`)
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from protocol.values import Value
from vfsd.daemon.resume import Slots
from vfsd.kernel.engines.base import ResumableEngine
from vfsd.kernel.engines.native import mounting
from vfsd.machine import interpreter
from vfsd.machine.runtime import process_start_ticks
from vfsd.wire.options import encode_options

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog
    from vfsd.daemon.backends.registry import Backend
    from vfsd.daemon.keeper.sd_notify import Notifier
    from vfsd.kernel.engines.base import Engine
    from vfsd.wire.options import MountOptions

MAX_BYTES: Final = 8192  # of a message; the longest has a mountpoint
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
    """A mount whose daemon died: a descriptor of its own, and how many of its daemons have died.

    `anchor`: a duplicate of `Backend.anchor`.
    """

    descriptor: int
    restarts: int
    anchor: int | None = None


class Kept:
    """What a daemon has of its keeper, which is its parent.

    `channel`: the socket to the keeper.  `resumed`: the mount to continue with; None for the first daemon.
    `early_signal`: returns the signal that asked this process to end before it handled signals itself, or None.
    `memory_fd`: the descriptor of the shared memory.  `log`: for what a replacement of this daemon needs of the volume;
    `resume`: what else it needs, so far.  OSError for what a daemon of another version has left.
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
        self._slots = Slots(memory_fd, mounting.SHARED_BYTES)
        self.resume = self._slots.read()
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

    def keep(self, **changes: Any) -> None:
        """Change fields of `resume`.  OSError if there is no memory for it."""
        resume = replace(self.resume, **changes)
        self._slots.write(resume)
        self.resume = resume

    def begin(self, engine: Engine, backend: Backend, options: MountOptions) -> None:
        """Have the keeper keep the mount from now on, with what `backend` needs; `self.why_not` says why not."""
        self._memory[SERVING_NS] = time.monotonic_ns()
        self.why_not = self._begin(engine, backend, options)
        self.is_kept = self.why_not is None
        interpreter.end_with_parent(0)

    def _begin(self, engine: Engine, backend: Backend, options: MountOptions) -> str | None:
        if not isinstance(engine, ResumableEngine):
            return f"the engine {engine.name} cannot continue a mount"
        engine.share(self._memory, self.memory_fd)
        if self.resumed is not None:
            return None
        negotiated, device = engine.negotiated(), engine.descriptor
        if negotiated is None or device is None:
            return "there is no mount"
        self.keep(options=encode_options(options).decode(), negotiated=negotiated.decode())
        known, message = ([], HOLD) if backend.anchor is None else ([backend.anchor], HOLD_ANCHOR)
        try:
            socket.send_fds(self._channel, [message], [device, *known, *backend.held])
        except OSError as error:
            return f"the keeper died ({error.strerror})"
        return None
