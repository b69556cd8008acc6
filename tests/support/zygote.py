"""Start Python programs of this project by fork(2) from a process that has vfsd loaded.

That takes 30 ms of CPU time instead of the 200 to 500 ms of a new interpreter.

`install` replaces the method of `subprocess.Popen` that creates the process.  For `python -m MODULE ...`, where MODULE
is one of vfsd or of the tests, a process that has vfsd loaded (the zygote) forks one that runs the module.  Every other
command is started as usual.  A program can tell a forked process from a started one by /proc/PID/cmdline and by the
modules that are loaded already, but not by anything else that the tests depend on:

- it is a child of the process that called Popen (CLONE_PARENT), with the real wait(2), signals and exit status;
- it has the arguments, environment, directory, descriptors, process group and session that Popen was asked for;
- its standard streams are new objects, and it ends as Python does: threads, atexit functions, flush.

Popen starts the interpreter as usual if the caller's credentials, limits or signal mask differ from those of the
zygote, or if the environment has other variables for the interpreter.  `starting_interpreters` does so for a block;
tests of start-up, of imports and of an early Ctrl-C use it.

A forked process forks in turn, so that the daemon of a `vfsd mount` is a fork of that command.  The zygote has one
thread and serves nothing itself.  It ends when the test process closes its socket or dies.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

__all__ = ["install", "is_off", "pid", "starting_interpreters"]

_PACKAGES: Final = ("vfsd", "tests")
_MOST_BYTES: Final = 200_000  # of one message; a larger command is started as usual
_MOST_DESCRIPTORS: Final = 200  # SCM_MAX_FD is 253
_CLONE_PARENT: Final = 0x00008000  # clone(2); the numbers of linux/sched.h
_CLONE_CHILD_CLEARTID: Final = 0x00200000
_CLONE_CHILD_SETTID: Final = 0x01000000
_PR_GET_TID_ADDRESS: Final = 40  # prctl(2)
_STATUS_FIELDS: Final = ("Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "CapBnd", "NoNewPrivs", "Cpus_allowed")
_LIMITS: Final = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]

pid = 0  # of this process's zygote; 0: none runs
_PATH: Final = list(sys.path)  # of a forked process
_start_child: Final = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_spawn: Callable[[dict[str, Any], list[int]], int] | None = None  # how this process forks; None: it does not
_inherited: dict[str, str] = {}  # the variables for the interpreter that the zygote was started with
_state: object = None  # what the zygote has of this process; None in a fork, whose own children have it from itself


def install() -> Callable[[], None]:
    """Fork from now on.  Returns the function that ends the zygote."""
    global _spawn, _inherited, _state
    zygote = _Zygote()
    _spawn, _inherited, _state = zygote.spawn, _interpreter_variables(os.environ), _process_state()
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]

    def end() -> None:
        global _spawn  # noqa: PLW0603
        _spawn = None
        subprocess.Popen._execute_child = _start_child  # type: ignore[attr-defined]
        zygote.close()

    return end


def is_off() -> bool:
    """Whether every process is started as usual."""
    return _spawn is None


@contextlib.contextmanager
def starting_interpreters() -> Iterator[None]:
    """Start every process as usual in this block."""
    global _spawn  # noqa: PLW0603
    spawn, _spawn = _spawn, None
    try:
        yield
    finally:
        _spawn = spawn


# -- in the process that calls Popen ----------------------------------------------------------------------
def _execute_child(  # the signature of Python 3.11 to 3.13
    self: subprocess.Popen[Any], args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
    env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int,
    c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: int,
    start_new_session: Any, process_group: int,
) -> None:  # fmt: skip
    words = [] if isinstance(args, (str, bytes, os.PathLike)) or shell else [os.fspath(word) for word in args]
    environment = dict(os.environ) if env is None else {os.fsdecode(key): os.fsdecode(env[key]) for key in env}
    usual = executable or preexec_fn or not close_fds or not restore_signals or umask >= 0
    usual = usual or any(each is not None for each in (gid, gids, uid))
    child = None
    if _spawn is not None and not usual and _is_program(words) and _inherits_the_same(environment):
        standard = [max(p2cread, 0), c2pwrite if c2pwrite >= 0 else 1, errwrite if errwrite >= 0 else 2]
        request = {
            "words": [os.fsdecode(word) for word in words],
            "environment": environment,
            "umask": int(_status()["Umask"], 8),
            "numbers": [0, 1, 2, *pass_fds],
            "session": bool(start_new_session),
            "group": process_group,
        }
        with contextlib.suppress(OSError):  # a directory that does not exist, a closed descriptor, a long command line
            directory = os.open("." if cwd is None else cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                child = _spawn(request, [directory, *standard, *pass_fds])
            finally:
                os.close(directory)
    if child is None:
        _start_child(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
            start_new_session, process_group,
        )  # fmt: skip
        return
    self.pid, self._child_created = child, True  # type: ignore[attr-defined]
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _is_program(words: list[Any]) -> bool:
    """Whether this is `python [-P] -m` and a module of ours."""
    if len(words) < 3 or words[0] != sys.executable:
        return False
    module = words[3] if words[1:3] == ["-P", "-m"] and len(words) > 3 else words[2] if words[1] == "-m" else ""
    return os.fsdecode(module).partition(".")[0] in _PACKAGES and module != __name__


def _inherits_the_same(environment: Mapping[str, str]) -> bool:
    """Whether a process that this one starts would begin as a fork of the zygote does."""
    return _inherited == _interpreter_variables(environment) and _state in (None, _process_state())


def _interpreter_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that Python reads before the first line of a program."""
    prefixes = ("PYTHON", "LC_", "LANG", "LD_", "VFSD_COMPILED")
    read = {key: value for key, value in environment.items() if key.startswith(prefixes)}
    entries = [entry for entry in read.pop("PYTHONPATH", "").split(os.pathsep) if entry and entry not in _PATH]
    return {**read, "PYTHONPATH": os.pathsep.join(entries)}


def _process_state() -> tuple[object, ...]:
    """What a child inherits and the request does not state: credentials, signals, limits."""
    status = _status()
    return (
        tuple(status[name] for name in _STATUS_FIELDS),
        tuple(resource.getrlimit(each) for each in _LIMITS),
        tuple(os.readlink(f"/proc/thread-self/ns/{name}") for name in ("mnt", "net", "pid", "user")),
    )


def _status() -> dict[str, str]:
    """The fields of proc_pid_status(5) for this thread."""
    with open("/proc/thread-self/status", encoding="utf-8", errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


class _Zygote:
    """The zygote of this process; it starts when it is used first."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def spawn(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """The number of a new child of this process."""
        with self._lock:
            if self._socket is None:
                self._socket = self._start()
            message = json.dumps(request).encode()
            if len(message) > _MOST_BYTES or len(descriptors) > _MOST_DESCRIPTORS:
                raise OSError("too long for one message")
            socket.send_fds(self._socket, [message], descriptors)
            return int(self._socket.recv(100))

    def _start(self) -> socket.socket:
        global pid  # noqa: PLW0603
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, _PATH))}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        pid = self._process.pid
        return ours

    def close(self) -> None:
        global pid  # noqa: PLW0603
        if self._socket is not None and self._process is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._process.wait(30)
        pid = 0


# -- the zygote -------------------------------------------------------------------------------------------
def _serve(channel: socket.socket) -> None:
    """Fork a child for each message, until the test process closes its end.  Returns only in the zygote."""
    global _spawn, _inherited  # noqa: PLW0603
    # Ctrl-C goes to the whole process group.  A child unblocks the signal when it has Python's handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    _load()
    _inherited = _interpreter_variables(os.environ)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    fork = _fork_for_the_parent()
    while True:
        message, ancillary, _, _ = channel.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS))
        if not message:
            return
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        child = fork()
        if child == 0:
            _spawn = _fork_here
            subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
            _become(json.loads(message), list(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(str(child).encode())


def _load() -> None:
    """Load what commands and daemons import when they run."""
    from vfsd.cli.main import COMMANDS
    from vfsd.daemon import preload

    preload.preload(("memory", "overlay", "host", "container"), ("native", "pyfuse3"))
    preload.import_rest()
    preload.build_decoders()
    for module, _ in COMMANDS.values():
        importlib.import_module(f"vfsd.cli.{module}")
    for name in ("vfsd.cli.main", "vfsd.daemon.main"):
        _program(name)


def _fork_for_the_parent() -> Callable[[], int]:
    """A fork(2) whose child is a child of this process's parent.

    As os.fork() and fork(3) are made of clone(2): Python's hooks run before and after it, and the kernel writes the new
    thread's number where the C library keeps it, which pthread_kill(3) reads.
    """
    libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock
    address = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_TID_ADDRESS): the kernel lacks CONFIG_CHECKPOINT_RESTORE")
    number = {"x86_64": 56}.get(os.uname().machine, 220)  # of clone(2); 220 on all newer architectures
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    # The fourth and fifth arguments are the child's thread number and its thread-local storage, in this order or the
    # other; a flag for the latter is not set, so the address in both places serves every architecture.
    arguments = [ctypes.c_long(each) for each in (number, flags, 0, 0, address.value or 0, address.value or 0)]
    python = ctypes.pythonapi

    def fork() -> int:
        python.PyOS_BeforeFork()
        child = int(libc.syscall(*arguments))
        if child == 0:
            python.PyOS_AfterFork_Child()
        else:
            python.PyOS_AfterFork_Parent()
        if child < 0:
            raise OSError(ctypes.get_errno(), "clone")
        return child

    return fork


def _fork_here(request: dict[str, Any], descriptors: list[int]) -> int:
    """A child of this process, which is a fork itself."""
    if threading.active_count() > 1:
        raise OSError("other threads may hold locks")
    child = os.fork()
    if child == 0:
        atexit._clear()  # the parent's temporary files are not ours
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        gc.freeze()  # no object of the parent may close a descriptor that is by now another one
        _become(request, descriptors)
    return child


# -- a forked process -------------------------------------------------------------------------------------
def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run the program of `request` in this process, and end."""
    status = 1
    try:
        _take_over(request, descriptors)
        status = _run(request["words"])
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give this process the directory, descriptors, environment and streams of the request."""
    os.fchdir(descriptors[0])
    os.umask(request["umask"])
    numbers: list[int] = request["numbers"]
    above = max([*numbers, *descriptors]) + 1
    moved = [os.dup2(old, above + index) for index, old in enumerate(descriptors[1:])]
    for old, new in zip(moved, numbers, strict=True):
        os.dup2(old, new)
    first = 0
    for number in sorted(numbers):
        if first < number:  # os.closerange(0, 0) closes everything (Python 3.11)
            os.closerange(first, number)
        first = number + 1
    os.closerange(first, max(1024, above + len(moved)))
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    tempfile.tempdir = None
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = [
        _stream(number, like) for number, like in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__))
    ]
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _stream(number: int, like: Any) -> io.TextIOWrapper:
    """A standard stream as Python opens it, with the encoding of the zygote's own."""
    mode = "rb" if number == 0 else "wb"
    is_buffered = number == 0 or not like.write_through
    raw = open(number, mode, buffering=-1 if is_buffered else 0, closefd=False)  # noqa: SIM115 (for the life of the process)
    return io.TextIOWrapper(
        raw,
        encoding=like.encoding,
        errors=like.errors,
        newline=None if number == 0 else "\n",
        line_buffering=not like.write_through and (number == 2 or os.isatty(number)),
        write_through=like.write_through,
    )


@functools.cache
def _program(module: str) -> tuple[importlib.machinery.ModuleSpec, types.CodeType]:
    """The specification and the code of a module, for it to run as a program."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module {module}")
    return spec, spec.loader.get_code(module)  # type: ignore[attr-defined]


def _run(words: list[str]) -> int:
    """Run `python [-P] -m MODULE ARGUMENTS` in this interpreter; return its exit status."""
    module, arguments = (words[3], words[4:]) if words[1] == "-P" else (words[2], words[3:])
    status, kept = 0, []
    try:
        spec, code = _program(module)
        kept.append(sys.modules["__main__"])  # its objects may hold descriptors
        main = types.ModuleType("__main__")
        main.__dict__.update(__spec__=spec, __file__=spec.origin, __package__=spec.parent, __loader__=spec.loader)
        sys.modules["__main__"] = main
        sys.orig_argv[:] = words
        sys.argv[:] = [spec.origin or "", *arguments]
        sys.path[:] = _PATH if words[1] == "-P" else [os.getcwd(), *_PATH]
        exec(code, main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        status = 120  # as Python ends then
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF


if __name__ == "__main__":
    # The module's globals as its functions see them when they are imported by name, too.
    sys.modules[__spec__.name] = sys.modules["__main__"]
    _serve(socket.socket(fileno=int(sys.argv[1])))
