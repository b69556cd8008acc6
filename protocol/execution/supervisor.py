"""What stands between vfsd and a command that it runs on the host: starts it, and leaves nothing of it running.

A program of its own, run as `python -I -S supervisor.py DIRECTORY CONTROL_FD STATUS_FD COMMAND...` by
`protocol.execution.executor`, and importing nothing but what start-up has anyway: it is started for every command.

- It changes into DIRECTORY itself.  Were that done between vfork and exec, as `subprocess` does, the starter
  would stand still, interpreter lock held, for an answer that its own loop may have to give: DIRECTORY can lie in
  the mount that it serves.
- Everything that the command starts, and leaves behind, is this process's: it is a subreaper (prctl(2),
  PR_SET_CHILD_SUBREAPER), so that a grandchild in a session of its own comes here when its parent ends.
- When the command ends, or CONTROL_FD says EOF (the starter closed it, or died), all of them are killed.
- A byte on CONTROL_FD is the number of a signal for the command's process group.
- Where standard input is a terminal it becomes the command's controlling terminal: a Ctrl-C typed there is its SIGINT.

On STATUS_FD it says `exit N`, with N as `subprocess` counts (-9: killed by SIGKILL), or `error ERRNO`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import sys
import termios
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30
_DAEMON_TIMER_SLACK_NS = 1  # what a daemon has for itself (vfsd.machine.interpreter), and its children inherit
_USUAL_TIMER_SLACK_NS = 50_000
_SCAN_PAUSE_S = 0.01
# A process that SIGKILL has not ended by then waits in the kernel for something that we cannot give it.
_KILL_S = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[bytes]) -> None:
    """Run the command, tell how it ended, kill what is left of it."""
    directory, control, status = arguments[0], int(arguments[1]), int(arguments[2])
    command = arguments[3:]
    for descriptor in (control, status):
        os.set_inheritable(descriptor, False)
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        _tell(status, f"error {ctypes.get_errno()}")
        return
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _become(directory, command, writer)
    os.close(writer)
    # The command's own pipes are not ours: they must end when it does.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    failure, early = _read_until(reader, control)
    if failure:
        _kill_all()
        _tell(status, f"error {failure.decode()}")
        return
    ended = _wait(child, control, early)
    code = _kill_all(child)
    _tell(status, f"exit {ended if ended is not None else code}")


def _become(directory: bytes, command: list[bytes], failed: int) -> None:
    """In the child: turn into the command; its errno goes to `failed`, which a successful exec closes."""
    try:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # where the supervisor itself is killed
        if _LIBC.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0) == _DAEMON_TIMER_SLACK_NS:
            _LIBC.prctl(_PR_SET_TIMERSLACK, _USUAL_TIMER_SLACK_NS, 0, 0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(directory)
        os.environb[b"PWD"] = directory
        os.execvp(command[0], command)  # noqa: S606 (there is no shell on purpose)
    except OSError as error:
        os.write(failed, str(error.errno).encode())
    except BaseException:  # noqa: BLE001 (nothing of the parent's may run twice)
        os.write(failed, b"22")
    finally:
        os._exit(127)


def _read_until(reader: int, control: int) -> tuple[bytes, bytes]:
    """The errno of a failed start, b"" of one that worked, or that nobody wants any more; and signals for it."""
    early = b""
    while True:
        if reader in _readable(reader, control):
            return os.read(reader, 16), early
        numbers = os.read(control, 16)
        if not numbers:
            return b"", early
        early += numbers


def _wait(child: int, control: int, early: bytes) -> int | None:
    """The command's exit status; None when it is to be killed first."""
    handle = os.pidfd_open(child)
    _signal(child, early)
    while True:
        if handle in _readable(handle, control):
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
        numbers = os.read(control, 16)
        if not numbers:
            return None
        _signal(child, numbers)


def _readable(*descriptors: int) -> list[int]:
    """Wait until some of `descriptors` can be read, and return those.  select(2) refuses numbers above 1,023,
    which a daemon with many open files passes on."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]


def _signal(group: int, numbers: bytes) -> None:
    for number in numbers:
        try:
            os.killpg(group, number)
        except OSError:
            pass  # no such signal, or nobody is left


def _kill_all(command: int = 0) -> int:
    """Kill every descendant, until there is none; the exit status of `command`, if it was still there."""
    code = -int(signal.SIGKILL)
    me = os.getpid()
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        for pid in _children(me):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            while True:
                # What a killed one leaves behind becomes our child, and is found by the next scan.
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == command:
                    code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return code
        time.sleep(_SCAN_PAUSE_S)
    return code


def _children(parent: int) -> list[int]:
    """The processes whose parent is `parent` (proc_pid_stat(5): the fields after the name in parentheses)."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(name))
    return found


def _tell(status: int, text: str) -> None:
    try:
        os.write(status, text.encode() + b"\n")
    except OSError:
        pass  # the starter is gone


if __name__ == "__main__":
    main([os.fsencode(argument) for argument in sys.argv[1:]])
