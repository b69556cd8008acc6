"""The supervisor of one command on this host: starts the command and kills every process that the command leaves.

It is a program of its own, which `protocol.execution.host` starts for every command as
`python -I -S supervisor.py DIRECTORY CONTROL_FD STATUS_FD COMMAND...`, so it imports only modules that load quickly.

- It changes into DIRECTORY itself.  If `subprocess` did that, between vfork and exec, the starting process would block
  with the interpreter lock held until DIRECTORY answers, and DIRECTORY may lie in the mount that this process serves.
  DIRECTORY may be a path below a descriptor that was passed, /proc/self/fd/N/PATH; then $PWD has the usual path.
- It is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): a descendant whose parent ends becomes its child, even in a
  session of its own.
- When the command ends, or at EOF on CONTROL_FD (the starting process closed it or died), it kills all descendants.
- A byte on CONTROL_FD is the number of a signal for the command's process group.
- If standard input is a terminal, it becomes the command's controlling terminal: Ctrl-C there sends SIGINT.

It writes `exit N` to STATUS_FD, with N as `subprocess` counts (-9: killed by SIGKILL), or `error ERRNO`.
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
_DAEMON_TIMER_SLACK_NS = 1  # the daemon sets it for itself (vfsd.machine.interpreter), and its children inherit it
_USUAL_TIMER_SLACK_NS = 50_000
_SCAN_PAUSE_S = 0.01
# A process that survives SIGKILL this long is blocked in the kernel.
_KILL_S = 10.0
_BELOW_DESCRIPTOR = b"/proc/self/fd/"
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[bytes]) -> None:
    """Run the command, kill the processes that it leaves, and report its exit status."""
    directory, control, status = arguments[0], int(arguments[1]), int(arguments[2])
    command = arguments[3:]
    for descriptor in (control, status):
        os.set_inheritable(descriptor, False)
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        _report(status, f"error {ctypes.get_errno()}")
        return
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _become(directory, command, writer)
    os.close(writer)
    if directory.startswith(_BELOW_DESCRIPTOR):
        os.close(int(directory.split(b"/")[4]))
    # The command's pipes must close when the command ends, so drop these copies.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    failure, early = _read_until(reader, control)
    if failure:
        _kill_all()
        _report(status, f"error {failure.decode()}")
        return
    ended = _wait(child, control, early)
    code = _kill_all(child)
    _report(status, f"exit {ended if ended is not None else code}")


def _become(directory: bytes, command: list[bytes], failed: int) -> None:
    """In the child: execute the command.  The errno of a failure goes to `failed`, which a successful exec closes."""
    try:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # if the supervisor itself is killed
        if _LIBC.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0) == _DAEMON_TIMER_SLACK_NS:
            _LIBC.prctl(_PR_SET_TIMERSLACK, _USUAL_TIMER_SLACK_NS, 0, 0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(directory)
        if directory.startswith(_BELOW_DESCRIPTOR):
            os.close(int(directory.split(b"/")[4]))
        else:
            os.environb[b"PWD"] = directory
        os.execvp(command[0], command)  # noqa: S606 (deliberately no shell)
    except OSError as error:
        os.write(failed, str(error.errno).encode())
    except BaseException:  # noqa: BLE001 (the parent's code must not run twice)
        os.write(failed, b"22")
    finally:
        os._exit(127)


def _read_until(reader: int, control: int) -> tuple[bytes, bytes]:
    """The errno of a failed start, b"" after a successful or cancelled one; and the signals that arrived meanwhile."""
    early = b""
    while True:
        if reader in _readable(reader, control):
            return os.read(reader, 16), early
        numbers = os.read(control, 16)
        if not numbers:
            return b"", early
        early += numbers


def _wait(child: int, control: int, early: bytes) -> int | None:
    """The command's exit status; None at EOF on `control`, when it is to be killed."""
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
    """Wait until some of `descriptors` are readable, and return those.

    By poll(2), because select(2) refuses descriptors above 1,023, which a daemon with many open files passes on.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]


def _signal(group: int, numbers: bytes) -> None:
    for number in numbers:
        try:
            os.killpg(group, number)
        except OSError:
            pass  # no such signal, or no process is left


def _kill_all(command: int = 0) -> int:
    """Kill descendants until none is left; return the exit status of `command` if it was still running."""
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
                # Children of a killed process become ours, and the next scan finds them.
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
    """The processes whose parent is `parent`.

    From status (proc_pid_status(5)), because on recent kernels stat waits for a process that executes another program
    while a mount hangs.
    """
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/status", "rb") as file:
                line = file.read().partition(b"\nPPid:")[2].partition(b"\n")[0]
        except OSError:
            continue
        if line.strip() == str(parent).encode():
            found.append(int(name))
    return found


def _report(status: int, text: str) -> None:
    try:
        os.write(status, text.encode() + b"\n")
    except OSError:
        pass  # the starting process is gone


if __name__ == "__main__":
    main([os.fsencode(argument) for argument in sys.argv[1:]])
