"""Run a command in which one directory is mounted over another, invisibly for all other processes.

It is a program of its own, `python -I -S private_mount.py STATUS_FD SOURCE TARGET COMMAND...`, so that no other thread
runs when it changes its namespaces, and it imports only modules that load quickly.  It becomes the command.

- It enters a mount namespace of its own, mounts SOURCE over TARGET there, and changes into TARGET.  Mounts of the rest
  of the system still appear in the namespace; the mount over TARGET appears in no other one.
- A user who may not do that gets a user namespace, too, in which only his own ids are mapped: programs such as sudo,
  which change the user, do not work in it.
- With an empty TARGET it makes no namespace, and changes into SOURCE.
- SIGINT is blocked at its start, and let through when Python's handler, which prints a traceback, is gone.

It writes to STATUS_FD `mount ERRNO STEP` if the mount is not possible, and `exec ERRNO` or `chdir ERRNO` for the other
steps; then it ends.  Otherwise the descriptor is closed when the command starts.

Source: unshare(2), mount_namespaces(7), user_namespaces(7), mount(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_BIND = 4096
_MS_REC = 16384
_MS_SLAVE = 1 << 19
_LIBC = ctypes.CDLL(None, use_errno=True)


class _StepError(Exception):
    """A step failed: its name, the errno, and words for a message."""


def main(arguments: list[bytes]) -> None:
    """Make the mount and become the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    status, source, target, command = int(arguments[0]), arguments[1], arguments[2], arguments[3:]
    os.set_inheritable(status, False)
    try:
        if target:
            _mount_over(source, target)
        _change_into(target or source)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)  # noqa: S606 the purpose of this program
        except OSError as error:
            raise _StepError("exec", error.errno, "") from None
    except _StepError as error:
        step, code, words = error.args
        os.write(status, f"{step} {code} {words}".encode())
        os._exit(1)


def _mount_over(source: bytes, target: bytes) -> None:
    user, group = os.geteuid(), os.getegid()
    if user != 0 or _LIBC.unshare(_CLONE_NEWNS):
        if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
            raise _StepError("mount", ctypes.get_errno(), "make a namespace")
        try:
            _write("/proc/self/setgroups", "deny")  # user_namespaces(7): before an unprivileged gid_map
            _write("/proc/self/uid_map", f"{user} {user} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
        except OSError as error:
            raise _StepError("mount", error.errno, "map the user") from None
    # Slave: what is mounted here later stays here.
    if _LIBC.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None) or _LIBC.mount(source, target, None, _MS_BIND, None):
        raise _StepError("mount", ctypes.get_errno(), "mount the workspace")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _change_into(directory: bytes) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise _StepError("chdir", error.errno or errno.EIO, "") from None


if __name__ == "__main__":
    main([os.fsencode(word) for word in sys.argv[1:]])
