"""Fork this process: the new one has a copy of the volume's memory.

Threading: `fork_process` runs on the serving loop and blocks it while another thread calls fork(2), so no request
changes the state meanwhile.  That thread first takes the locks that threads of views and imports hold for moments
(`ForkableVolume.forking`).  It is the only thread of the new process.

The new process has these things of the old one:

- Descriptors.  Devices, sockets, pipes and the log are replaced by /dev/null, not closed: an object of the old process
  then closes that, and not a new descriptor of the same number.  That leaves about 13 more in each generation of
  forks of forks.  Files and directories below an overlay stay open.
- Tasks.  They are kept as they are, unreachable for the new loop.  If they were collected, their `finally` clauses
  would run, which remove the record of the old workspace and unmount it.
- Signal handlers, which are reset.
- Objects that the garbage collector does not examine any more (`gc.freeze`), because that would write to each of them.

The new process ends with `os._exit`: the interpreter's own end would collect the old tasks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import signal
import stat
import threading
import traceback
import warnings
from collections.abc import Callable, Collection
from typing import Final

import trio

from protocol.volume_extensions import ForkableVolume
from vfsd.machine.resources import KilledFirst, free_memory
from vfsd.machine.runtime import ensure_socket_dir

SYSTEMD_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID")
"""Those that belong to the unit of one process."""
_DESCRIPTORS: Final = 512  # the size of the table of descriptors, in which a new process has room
_LAST_STANDARD: Final = 2
_MEMORY: Final = "/memfd:"  # before the names of files that are only in memory, in /proc
_old_tasks: list[object] = []  # of the processes that this one was forked from


def check_memory(what: str = "a fork may come to need as much memory as its source") -> None:
    """OSError (ENOMEM) if there is no memory for a second process of this size.  `what` needs it: a clause."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free = free_memory()
    if free is not None and resident > free:
        raise OSError(
            errno.ENOMEM,
            f"{what}, {resident >> 20} MiB, and {free >> 20} MiB are free, of the machine or of its cgroup",
        )


def fork_writer(
    volume: ForkableVolume,
    write: Callable[[], None],
    mountpoint: str,
    started: Callable[[int], None] = lambda _: None,
    *,
    kept: Collection[int] = (),
) -> tuple[int, list[int]]:
    """Fork a process that calls `write` with the present state, after this process called `started` with its id.

    It keeps the descriptors `kept`.

    It ends with status 0 if that returns, with the errno of an OSError, and with 1 after another exception.

    Return its process id and two descriptors of the process.  The caller awaited nothing since it chose the state.
    """

    def run() -> int:
        gc.disable()
        detach(kept, mountpoint)
        KilledFirst()  # the image can be written again
        try:
            write()
        except OSError as error:
            return error.errno or 1
        return 0

    return fork_process(volume, run, keeps_state=True, started=started)


def fork_process(
    volume: ForkableVolume,
    child: Callable[[], int],
    *,
    keeps_state: bool = False,
    started: Callable[[int], None] = lambda _: None,
) -> tuple[int, list[int]]:
    """Call fork(2) in a thread while this one waits; run `child` in the new process.

    With `keeps_state` the new process only reads the volume, which keeps what belongs to the old one's kernel.

    Return its process id and two descriptors of the process.  The new process waits until they are open: if they
    cannot be opened (EMFILE), or this process dies before, it ends without a trace.
    """
    made: list[tuple[int, list[int]] | OSError] = []
    child_go_fd, go_fd = os.pipe()
    _old_tasks.append(trio.lowlevel.current_root_task())

    def run() -> None:
        try:
            with warnings.catch_warnings(), volume.forking():
                # Python 3.12: "This process is multi-threaded, use of fork() may lead to deadlocks in the child."
                warnings.simplefilter("ignore", DeprecationWarning)
                gc.freeze()
                pid = os.fork()
        except OSError as error:
            made.append(error)
            return
        if pid:
            started(pid)
            made.append(_let_go(pid, go_fd))
            return
        status = 1
        try:
            os.close(go_fd)
            if not os.read(child_go_fd, 1):
                return  # to `os._exit`
            os.close(child_go_fd)
            if not keeps_state:
                volume.forked()
            status = child()
        except BaseException:  # noqa: BLE001 (it must not return to the thread's end, which waits for other threads)
            traceback.print_exc()
        finally:
            os._exit(status)

    try:
        thread = threading.Thread(target=run, name="vfsd-fork")
        thread.start()
        thread.join()
    finally:
        os.close(child_go_fd)
        os.close(go_fd)
        _old_tasks.pop()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _let_go(pid: int, go_fd: int) -> tuple[int, list[int]] | OSError:
    """Open two descriptors of the new process and let it run; if that fails, end it and return the error."""
    pidfds: list[int] = []
    try:
        pidfds.append(os.pidfd_open(pid))
        pidfds.append(os.pidfd_open(pid))
    except OSError as error:
        for each in pidfds:
            os.close(each)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        os.waitpid(pid, 0)
        return OSError(error.errno or errno.EIO, f"no fork was made, for lack of a descriptor: {error.strerror}")
    with contextlib.suppress(BrokenPipeError):  # it was killed: its report will be missing
        os.write(go_fd, b"\0")
    return pid, pidfds


def detach(kept: Collection[int], mountpoint: str) -> None:
    """In a new process: reset the signals, and replace descriptors that belong to the old process, except `kept`.

    `mountpoint` is that of the old process's workspace.
    """
    _reset_signals()
    _replace_descriptors({0, 1, 2, *kept}, mountpoint)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _replace_descriptors(kept: set[int], mountpoint: str) -> None:
    """Replace by /dev/null what belongs to the old process: all but regular files and directories of other places."""
    belongs = tuple(path.rstrip("/") + "/" for path in (mountpoint, ensure_socket_dir(), "/proc"))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    # The kernel enlarges a table of descriptors here at once, but waits 10 to 15 ms (synchronize_rcu) if threads share
    # it, and this process has only one thread yet.
    with contextlib.suppress(OSError):  # a lower RLIMIT_NOFILE
        os.close(os.dup2(null, _DESCRIPTORS - 1, inheritable=False))
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor in kept or descriptor == null:
            continue
        if _is_spare(descriptor):
            os.close(descriptor)  # a number without an object
            continue
        try:
            kind = stat.S_IFMT(os.stat(descriptor).st_mode) if not _is_in(descriptor, belongs) else 0
        except OSError:
            continue  # the descriptor of the listing
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _is_in(descriptor: int, places: tuple[str, ...]) -> bool:
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return (path + "/").startswith(places) or path.startswith(_MEMORY)


def _is_spare(descriptor: int) -> bool:
    """Whether this is a descriptor of `SpareDescriptors`: /dev/null, and other than a replaced one only for reading."""
    with contextlib.suppress(OSError):
        opened = os.stat(descriptor).st_rdev, fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        return descriptor > _LAST_STANDARD and opened == (os.stat(os.devnull).st_rdev, os.O_RDONLY)
    return False
