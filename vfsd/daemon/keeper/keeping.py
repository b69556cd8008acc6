"""The keeper of one daemon: the parent process, which holds the mount's descriptor and restarts a daemon that died.

While a process has a duplicate of the descriptor of /dev/fuse, the mount exists, and programs that use it wait instead
of getting ENOTCONN.  The keeper is forked off before the daemon does anything, so it is small, shares its memory with
the daemon, and has the environment, limits, namespaces and code that the daemon was started with.  A replacement is
forked from it.

Invariants:

1. The daemon is the keeper's only child.  A replacement is forked after the daemon before it was reaped, so the two
   never use the mount or the journal at the same time.
2. Nothing is kept before the daemon's `Kept.begin`: a start that fails ends the keeper with the same exit status.
3. The keeper ends with its daemon if that ends with status 0 (it unmounted) or was asked to end by a signal.  It ends
   after `DEATHS_MAX` deaths in a row of daemons that answered nothing (`deaths_in_a_row`).  Then the descriptor is
   closed, so programs get ENOTCONN.
4. After an upgrade (`RELEASED`) it ends with its daemon, whatever the status.  Until then it leaves the mount's
   descriptor alone: if it made the kernel send a request again, that request would be executed twice.
5. A signal to end that reaches the keeper reaches the daemon, also if it comes between two daemons.
6. In a unit of systemd the keeper is the main process.  It passes on what the daemon notifies, feeds the watchdog while
   it runs, and kills a daemon that does not feed it any more, as systemd would do with a main process.

The memory that the keeper shares with its daemon has some numbers, and what the next daemon is to know
(`vfsd.daemon.resume`).  Messages of the daemon on the socket to its keeper begin with a byte:

    HOLD, HOLD_ANCHOR  duplicates of the mount's descriptor, of that of `Backend.anchor` (HOLD_ANCHOR), and of those of
                       `Backend.held`.  From then on the keeper restarts the daemon if that dies.
    NOTIFY             what the keeper passes on to systemd (`sd_notify`)

Threading: one thread and no event loop, so that fork(2) is safe.

A thread of the daemon may itself wait for the mount when the daemon is killed.  Such a thread cannot be killed, so the
daemon would never end: about once a second the keeper looks for that state, and answers the thread's request with EIO.
"""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from protocol.linux.shared_log import SharedLog
from protocol.values import Value
from vfsd.daemon import preload
from vfsd.daemon.backends import registry
from vfsd.daemon.keeper.sd_notify import Notifier
from vfsd.daemon.resume import Slots
from vfsd.kernel.engines.base import ResumableEngine
from vfsd.machine import interpreter, logs, runtime
from vfsd.machine.logs import log_failure
from vfsd.machine.runtime import process_start_ticks
from vfsd.wire.options import encode_options
from vfsd.wire.sockets import receive_descriptors

if TYPE_CHECKING:
    from vfsd.daemon.backends.registry import Backend
    from vfsd.kernel.engines.base import Engine
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)
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
    from vfsd.kernel.engines.native import mounting  # noqa: PLC0415 (an attached directory has no engine, no keeper)

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


# -- the daemon's side ---------------------------------------------------------------------------------------
class Resumed(Value):
    """A mount whose daemon died: a descriptor of its own, and how many of its daemons have died.

    `anchor`: a duplicate of `Backend.anchor`.
    """

    descriptor: int
    restarts: int
    anchor: int | None = None


class Kept:
    """The daemon's view of its keeper, which is its parent process.

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
        self._slots = Slots(memory_fd, memory.nbytes)
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


# -- the keeper ----------------------------------------------------------------------------------------------
_PAUSES_S: Final = (0.0, 0.0, 0.05, 0.2, 0.5)  # before a replacement, by the deaths in a row before it
_STUCK_CHECK_S: Final = 1.0
_WITHOUT_JOURNAL: Final = frozenset({"host", "container", "image", "exec"})  # the state is where the files are
TO_END: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Serve = Callable[[Kept], int]  # serves the workspace in the new process; returns its exit status


def is_wanted(options: MountOptions) -> bool:
    """Whether a daemon with these options has a keeper."""
    workspace = options.workspace
    kind = workspace.backend.kind
    is_possible = kind in _WITHOUT_JOURNAL or (options.journal.persist and kind in {"memory", "overlay"})
    return is_possible and workspace.keeper and options.kernel.engine in {"auto", "native"}


class Keeper:
    """Keeps the daemon of the workspace that is mounted with `options`."""

    def __init__(self, options: MountOptions) -> None:
        self._name = options.workspace.name
        self._options = options
        self._memory_fd, self._memory = shared_memory()
        self._log = SharedLog.create()
        self._device: int | None = None
        self._anchor: int | None = None
        self._child = 0
        self._end_signal: int | None = None  # that asked the daemon to end
        self._deaths = 0  # in a row, without an answered request
        self._restarts = 0
        self._channel: socket.socket | None = None
        self._notifier = Notifier.from_environment()
        self._fed_at = 0.0  # when systemd's watchdog was fed last
        self._is_stopping = False  # the daemon unmounts
        self._hung_at: float | None = None  # when the daemon counts as hung; None: it does not report

    def run(self, start: Serve, restart: Serve, close: Callable[[], None]) -> int:
        """Fork the daemon, which calls `start`, and its replacements, which call `restart`.

        Return the exit status of the process: in the keeper that of the last daemon.  `close` closes what belongs to
        the first daemon only.
        """
        registry.import_backend(self._options.workspace.backend.kind)
        gc.collect()
        gc.freeze()  # a collection would copy every page that the processes share
        status = self._fork(start)
        if status is not None:
            return status
        close()
        logs.configure(self._options.log.log_level, self._options.log.log_format)
        self._import()
        interpreter.set_name(f"vfsd-keep:{self._name}")
        while True:
            ended = self._wait()
            if self._memory[RELEASED]:  # another daemon serves, with a keeper of its own
                self._notifier.successor(self._memory[RELEASED])
                self._notifier.wait_processed()
                return 0
            if self._device is None or ended == 0 or self._end_signal is not None or -ended in TO_END:
                return _end_like(ended)
            if not self._may_restart(ended):
                return 1
            status = self._fork(restart)
            if status is not None:
                return status

    # -- the daemon's process ----------------------------------------------------------------------
    def _fork(self, serve: Serve) -> int | None:
        """Fork a daemon.  None in the keeper; in the new process, its exit status."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, TO_END)  # until `_forward` knows the new process
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for channel in filter(None, (ours, self._channel)):
                channel.close()
            return self._become(serve, theirs, keeper)
        theirs.close()
        self._child = pid
        if self._channel is not None:
            self._channel.close()
        self._channel = ours
        for number in TO_END:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None

    def _become(self, serve: Serve, channel: socket.socket, keeper: int) -> int:
        resumed = None
        if self._device is None:
            interpreter.end_with_parent(signal.SIGKILL)  # a starter that gives up kills the keeper
            if os.getppid() != keeper:
                return 1
        else:
            resumed = Resumed(self._device, self._restarts, self._anchor)
        # A replacement has `_forward` as its handler, with no child, until it has a handler of its own.
        return serve(
            Kept(channel, self._memory, self._memory_fd, self._log, resumed, self._notifier, lambda: self._end_signal)
        )

    def _forward(self, number: int, _frame: object) -> None:
        self._end_signal = number
        if self._child:
            try:
                os.kill(self._child, number)
            except ProcessLookupError:
                pass

    def _wait(self) -> int:
        """Wait until the daemon has ended and is reaped; return its status, negative for a signal."""
        channel = self._channel
        assert channel is not None
        self._hung_at = None
        pidfd = os.pidfd_open(self._child)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(channel, select.POLLIN)
            while True:
                ready = [descriptor for descriptor, _ in poll.poll(self._patience_ms)]
                if channel.fileno() in ready:
                    if not self._take(channel):
                        poll.unregister(channel)
                elif pidfd in ready:  # everything that it sent was taken
                    break
                elif self._device is not None and not self._memory[RELEASED]:
                    release_stuck(self._child, self._device, self._memory_fd)
                self._watch()
        finally:
            os.close(pidfd)
        child, self._child = self._child, 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @property
    def _patience_ms(self) -> float | None:
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is None:
            return None if self._device is None else _STUCK_CHECK_S * 1000
        return min(interval_s, _STUCK_CHECK_S) * 1000

    def _take(self, channel: socket.socket) -> bool:
        """Take a message of the daemon; False if it sends no more."""
        message, descriptors = receive_descriptors(channel, MAX_BYTES, 1 + MAX_HELD)
        if message[:1] == NOTIFY:
            self._notifier.send(message[1:])
            self._is_stopping = self._is_stopping or b"STOPPING=1" in message
            interval_s = self._notifier.watchdog_interval_s
            self._hung_at = None if interval_s is None or self._is_stopping else time.monotonic() + 2 * interval_s
        elif descriptors:
            # The others stay open while this process runs.
            self._device = descriptors[0]
            if message[:1] == HOLD_ANCHOR:
                self._anchor = descriptors[1]
            self._memory[KEEPS] = 1
        return bool(message)

    def _watch(self) -> None:
        """Feed systemd's watchdog, and kill a daemon that hangs."""
        interval_s, now = self._notifier.watchdog_interval_s, time.monotonic()
        if interval_s is None:
            return
        if now - self._fed_at >= interval_s:
            self._notifier.watchdog()
            self._fed_at = now
        if self._hung_at is not None and now > self._hung_at and self._child:
            self._hung_at = None
            _logger.error("the daemon hangs (WatchdogSec=): its keeper kills it", extra={"operation": "keep"})
            os.kill(self._child, signal.SIGKILL)

    def _import(self) -> None:
        """Import what replacements need: later the files may be those of another version of vfsd."""
        preload.import_rest(self._options.workspace.backend.kind)
        gc.collect()
        gc.freeze()

    # -- a death -----------------------------------------------------------------------------------
    def _may_restart(self, ended: int) -> bool:
        how = f"was killed by {signal.Signals(-ended).name}" if ended < 0 else f"failed with exit status {ended}"
        self._deaths = deaths_in_a_row(self._memory, self._deaths)
        if self._deaths >= DEATHS_MAX:
            self._give_up(ended, how)
            return False
        self._restarts += 1
        _logger.error("the daemon %s: its keeper starts another one", how, extra={"operation": "keep"})
        time.sleep(_PAUSES_S[self._deaths])  # a signal that comes meanwhile is handled, and the sleep goes on
        self._watch()
        return self._end_signal is None

    def _give_up(self, ended: int, how: str) -> None:
        record = runtime.read_record(self._name)
        reason = (
            f"its daemon died {DEATHS_MAX} times in a row without answering a request; the last one {how}, and its log"
            " says more"
        )
        if ended > 0 and record is not None and record.failure is not None:  # it said why itself
            reason = f"{record.failure}; its keeper gave up after {DEATHS_MAX} deaths in a row"
        _logger.error("%s: the keeper ends, and the mount fails with ENOTCONN", reason, extra={"operation": "keep"})
        if record is not None and record.keeper == os.getpid():
            runtime.note_failure(self._name, reason)
        assert self._device is not None
        os.close(self._device)


def _end_like(status: int) -> int:
    """Return an exit status; or end this process with the signal that ended the daemon, which its starter reports."""
    if status >= 0:
        return status
    if -status in (*TO_END, signal.SIGKILL):
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return 128 - status


def release_stuck(pid: int, device: int, memory_fd: int) -> None:
    """Answer the requests of the threads of `pid` with EIO, if that process was killed and does not end.

    No process serves the mount.  `memory_fd`: see `mounting.fail_noted`.
    """
    from vfsd.kernel.engines.native import mounting  # noqa: PLC0415 (loaded by `shared_memory`)

    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        if state != "Z":
            return
        threads = {int(thread) for thread in os.listdir(f"/proc/{pid}/task")}
        try:
            count = mounting.answer_threads(device, threads)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel that does not send requests again
                raise
            count = mounting.fail_noted(device, memory_fd)
    except OSError as error:  # ENODEV: the mount is gone, and its requests with it
        log_failure(_logger, "releasing the dead daemon", error, level=logging.INFO)
        return
    if count:
        _logger.warning("%d requests of the dead daemon itself were answered with EIO", count)
