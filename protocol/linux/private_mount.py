"""Run a command in which a directory is mounted over another one, or over `/`, invisibly for all other processes.

It is a program of its own, `python -I -S private_mount.py STATUS_FD SOURCE TARGET COMMAND...`, so that no other thread
runs when it changes its namespaces, and it imports only modules that load quickly.

- It enters a mount namespace of its own, mounts SOURCE over TARGET there, changes into TARGET, and becomes the command.
  Mounts of the rest of the system still appear in the namespace; the mount over TARGET appears in no other one.
- A user who may not do that gets a user namespace, too, in which only the user's own ids are mapped: programs such as
  sudo, which change the user, do not work in it.
- With an empty TARGET it makes no namespace, and changes into SOURCE.
- If TARGET is a JSON object (`_Machine`), SOURCE becomes the root directory, with other parts of the machine mounted in
  it, and the command gets a namespace of processes, too.  Three processes then have the command's terminal: this one
  waits for the namespace's init, which waits for the command.  If one of them is killed, the kernel ends all that runs
  in the namespace.
- SIGINT is blocked at its start, and let through when Python's handler, which prints a traceback, is gone.

It writes to STATUS_FD `mount ERRNO STEP` if the mount is not possible, and `exec ERRNO` or `chdir ERRNO` for the other
steps; then it ends.  Otherwise the descriptor is closed when the command starts.

Source: unshare(2), mount_namespaces(7), user_namespaces(7), pid_namespaces(7), mount(2), pivot_root(2), open_tree(2),
move_mount(2), mount_setattr(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID_NODEV = 6
_MS_NOEXEC = 8
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
        if target.startswith(b"{"):
            _Machine(status, source, target).enter()
        else:
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
    if os.geteuid() != 0 or _LIBC.unshare(_CLONE_NEWNS):
        _unshare_as_user(_CLONE_NEWNS)
    # Slave: what is mounted here later stays here.
    if _LIBC.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None) or _LIBC.mount(source, target, None, _MS_BIND, None):
        raise _StepError("mount", ctypes.get_errno(), "mount the workspace")


def _unshare_as_user(namespaces: int) -> None:
    """Enter a user namespace, in which only this user is mapped, and other namespaces."""
    user, group = os.geteuid(), os.getegid()
    if _LIBC.unshare(_CLONE_NEWUSER | namespaces):
        raise _StepError("mount", ctypes.get_errno(), "make a namespace")
    try:
        _write("/proc/self/setgroups", "deny")  # user_namespaces(7): before an unprivileged gid_map
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    except OSError as error:
        raise _StepError("mount", error.errno, "map the user") from None


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _change_into(directory: bytes) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise _StepError("chdir", error.errno or errno.EIO, "") from None


# -- the whole machine ------------------------------------------------------------------------------
# System calls without a function in older C libraries; the numbers of the last three are the same everywhere.
_SYS_PIVOT_ROOT = 155 if os.uname().machine == "x86_64" else 41
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 1
_MOUNT_ATTR_NOSUID = 2
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_NOT_THERE = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOTCONN)
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_STOPPED = b"stopped\n"


class _Attributes(ctypes.Structure):
    """struct mount_attr of linux/mount.h."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


class _Machine:
    """SOURCE as the root directory.  `target` has the members `directory`, to change into, and `steps`: [kind, path].

    The kinds: "shared", the machine's own directory with all mounts in it; "fixed", the same, but its own mount is
    read-only; "read-only", with all mounts in it; "changes", the machine's directory, whose changes stay in memory;
    "empty" and "tmp", an empty directory in memory; "workspace", SOURCE itself; "proc", the processes of the namespace.
    """

    def __init__(self, status: int, source: bytes, target: bytes) -> None:
        import json  # noqa: PLC0415 other runs do not need it

        plan = json.loads(target)
        self._status = status
        self._source = source
        self._directory = os.fsencode(plan["directory"])
        self._steps = [(kind, os.fsencode(path)) for kind, path in plan["steps"]]

    def enter(self) -> None:
        """Return in the process that is to become the command."""
        self._is_root = os.geteuid() == 0 and not _LIBC.unshare(_CLONE_NEWPID)
        if not self._is_root:
            _unshare_as_user(_CLONE_NEWPID)
            _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # of the thread that started this process
        for number in _OF_TERMINAL:
            signal.signal(number, lambda *_: None)  # the command starts with the default action, because exec resets it
        reader, writer = os.pipe()
        init = os.fork()
        if init:
            os.close(writer)
            os.close(self._status)
            self._wait_outside(init, reader)
        os.close(reader)
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if _LIBC.unshare(_CLONE_NEWNS) or _LIBC.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None):
            raise _StepError("mount", ctypes.get_errno(), "make a namespace")
        self._build()
        _change_into(self._directory)
        command = os.fork()
        if command:
            os.close(self._status)
            self._wait_inside(command, writer)
        os.close(writer)

    # -- mounts ---------------------------------------------------------------------------------------
    def _build(self) -> None:
        """Make SOURCE the root directory."""
        copies: dict[bytes, int | None] = {}  # made first, so that no copy contains the mounts below
        for kind, path in self._steps:
            if kind == "read-only":
                copies[path] = _copy_if_reached(kind, path)
            elif kind in {"shared", "fixed", "workspace"}:
                copies[path] = _copy(kind, path)
        # sudo works in it, for users that may use sudo.
        clear = _MOUNT_ATTR_NOSUID if self._is_root else 0
        self._attach(_copy("workspace", self._source, clear=clear), self._source)
        os.chdir(self._source)
        _mount(b"tmpfs", b"proc", b"mode=700")  # for the changes; the namespace's /proc covers it at the end
        for number, (kind, path) in enumerate(self._steps):
            place = path.lstrip(b"/")
            if path in copies:
                copy = copies[path]
                if copy is not None:
                    self._attach(copy, place)
            elif kind == "changes":
                self._keep_changes(b"proc/%d" % number, path, place)
            elif kind == "proc":
                _mount(b"proc", place, None)
                if self._is_root:
                    self._attach(_copy("fixed", place + b"/sys"), place + b"/sys")  # the kernel's settings
            else:
                os.makedirs(place, exist_ok=True)
                _mount(b"tmpfs", place, b"mode=1777" if kind == "tmp" else b"mode=700")
        _call(_SYS_PIVOT_ROOT, b".", b".", words=b"make the root of", path=self._source)
        if _LIBC.umount2(b".", _MNT_DETACH):  # the old root, which is on top of the new one
            raise _StepError("mount", ctypes.get_errno(), "leave the old root")
        os.chdir(b"/")

    def _attach(self, copy: int, place: bytes) -> None:
        if not os.path.lexists(place):  # in a private /tmp
            os.makedirs(place)
        _call(_SYS_MOVE_MOUNT, copy, b"", _AT_FDCWD, place, _MOVE_MOUNT_F_EMPTY_PATH, words=b"mount", path=place)
        os.close(copy)

    def _keep_changes(self, memory: bytes, path: bytes, place: bytes) -> None:
        """Mount `path` with an overlay in memory over it, or if that is not possible, an empty directory."""
        for each in (memory, memory + b"/upper", memory + b"/work"):
            os.mkdir(each)
        options = b"lowerdir=%s,upperdir=%s/upper,workdir=%s/work,userxattr" % (path, memory, memory)
        if _LIBC.mount(b"overlay", place, b"overlay", _MS_NOSUID_NODEV, options):
            _mount(b"tmpfs", place, b"mode=755")

    # -- processes --------------------------------------------------------------------------------------
    def _wait_inside(self, command: int, writer: int) -> None:
        """Be the init of the namespace: reap processes until the command ends, and report it."""
        _pass_on((*_PASSED_ON, signal.SIGCONT), command)
        while True:
            pid, status = os.waitpid(-1, os.WUNTRACED)
            if pid == command:
                is_stopped = os.WIFSTOPPED(status)
                os.write(writer, _STOPPED if is_stopped else b"%d\n" % status)
                if not is_stopped:
                    os._exit(0)

    def _wait_outside(self, init: int, reader: int) -> None:
        """Stop when the command stops, and end as it ended.  Ends this process."""
        _pass_on(_PASSED_ON, init)
        status = int(signal.SIGKILL)  # init was killed
        with open(reader, "rb") as reports:
            for line in reports:
                if line != _STOPPED:
                    status = int(line)
                    continue
                os.kill(os.getpid(), signal.SIGSTOP)
                os.kill(init, signal.SIGCONT)
        os.waitpid(init, 0)
        if os.WIFSIGNALED(status):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if os.WTERMSIG(status) not in {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))


def _pass_on(signals: tuple[int, ...], process: int) -> None:
    def pass_on(number: int, _frame: object) -> None:
        try:
            os.kill(process, number)
        except ProcessLookupError:  # it has just ended
            pass

    for number in signals:
        signal.signal(number, pass_on)


def _call(number: int, *arguments: object, words: bytes, path: bytes) -> int:
    found: int = _LIBC.syscall(number, *arguments)
    if found < 0:
        raise _StepError("mount", ctypes.get_errno(), os.fsdecode(words + b" " + path))
    return found


def _copy(kind: str, path: bytes, clear: int = 0) -> int:
    """Copy the mount at a path, and unless it is the workspace those below it; `clear` are attributes to remove."""
    flags = _OPEN_TREE_CLONE | (_AT_RECURSIVE if kind != "workspace" else 0)
    found = _call(_SYS_OPEN_TREE, _AT_FDCWD, path, flags, words=b"copy the mount of", path=path)
    attributes = _Attributes(_MOUNT_ATTR_RDONLY if kind in {"fixed", "read-only"} else 0, clear, 0, 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if kind == "read-only" else 0)
    size = ctypes.sizeof(attributes)
    if attributes.attr_set or clear:
        _call(
            _SYS_MOUNT_SETATTR,
            found,
            b"",
            flags,
            ctypes.byref(attributes),
            size,
            words=b"change the mount of",
            path=path,
        )
    return found


def _copy_if_reached(kind: str, path: bytes) -> int | None:
    """Copy as `_copy`; None if the mount is dead or this user cannot reach it, so that it looks empty."""
    try:
        return _copy(kind, path)
    except _StepError as error:
        if error.args[1] in _NOT_THERE:
            return None
        raise


def _mount(kind: bytes, place: bytes, options: bytes | None) -> None:
    if _LIBC.mount(kind, place, kind, _MS_NOSUID_NODEV | (_MS_NOEXEC if kind == b"proc" else 0), options):
        raise _StepError("mount", ctypes.get_errno(), f"mount {os.fsdecode(kind)} at /{os.fsdecode(place)}")


if __name__ == "__main__":
    main([os.fsencode(word) for word in sys.argv[1:]])
