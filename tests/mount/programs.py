"""Programs beside a workspace: other processes told what to do step by step, and the real command line."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import readable
from vfsd.client.connection import ControlClient
from vfsd.client.launch import log_path
from vfsd.machine.runtime import record_path, socket_path

_TIMEOUT_S = 60.0
# Run a line as an expression, or else as statements; answer with the value, or with the error that it raised.
_PROGRAM = """
import errno, fcntl, json, mmap, os, signal, socket, sys, threading
names = dict(globals())
for line in sys.stdin:
    code = json.loads(line)
    try:
        try:
            compiled, run = compile(code, "<told>", "eval"), eval
        except SyntaxError:
            compiled, run = compile(code, "<told>", "exec"), exec
        answer = {"value": repr(run(compiled, names))}
    except OSError as error:
        answer = {"errno": error.errno, "text": str(error)}
    except BaseException as error:
        answer = {"text": repr(error)}
    print(json.dumps(answer), flush=True)
"""


class Program:
    """Another process that does what it is told: `program("fd = os.open('f', 0)")`, `program("os.read(fd, 9)")`.

    Its current directory is "/" unless it is told to change that.
    """

    def __init__(self, *, before: Sequence[str] = (), **popen: Any) -> None:
        """`before` is a command that starts it, such as setpriv(1)."""
        self._process = subprocess.Popen(
            [*before, sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **{"cwd": "/", **popen},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, code: str, **values: Any) -> Any:
        """What `code` yields.  `values` are set as names before.  OSError as the program saw it."""
        self.begin(code, **values)
        return self.result()

    def begin(self, code: str, **values: Any) -> None:
        """Have it start with `code`; `result` waits for the end of it."""
        assert self._process.stdin is not None
        if values:
            self("; ".join(f"{name} = {value!r}" for name, value in values.items()))
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program has died"
        answer = json.loads(line)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["text"])
        if "value" not in answer:
            raise AssertionError(answer["text"])
        return ast.literal_eval(answer["value"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()


# -- the command line ---------------------------------------------------------------------------------
VFSD = (sys.executable, "-P", "-m", "vfsd.cli.main")
# The mounts of other tests are detached there, because their daemons would wait for the copies.
_WITH_A_COPY = r"""
awk -v kept="$1" '/ - fuse\.vfsd / && $5 != kept {print $5}' /proc/self/mountinfo | xargs -r umount --lazy
"""


@contextmanager
def elsewhere(mountpoint: Path, script: str = ":") -> Iterator[None]:
    """A process in a mount namespace of its own, with a copy of the mount, that has executed `script`."""
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"{_WITH_A_COPY}{script}; echo ready; read line",
         "sh", mountpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        yield
        other.communicate()


def vfsd(*arguments: object, before: Sequence[str] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end; `before` is a command that starts it, such as setpriv(1)."""
    command = [*before, *VFSD, *map(str, arguments)]
    settings = {"capture_output": True, "text": True, "timeout": _TIMEOUT_S, "cwd": "/"}
    return subprocess.run(command, check=False, **{**settings, **options})


@contextmanager
def started_run(place: Path, script: str, *flags: str, **popen: Any) -> Iterator[subprocess.Popen[str]]:
    """`vfsd run` with a script of the shell in `place`, which has printed "started"."""
    command = [*VFSD, "run", *flags, "--", "sh", "-c", script]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True, **popen) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "started\n"
        yield running


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """The standard output of what ended with status 0."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def failed(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why it ended with status 1."""
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    first, *notes = done.stderr.splitlines()
    assert first.startswith("vfsd: error: "), done.stderr
    assert notes == []
    return first


def git(place: Path | str, *words: str) -> str:
    """The standard output of git, with the identity and configuration of all tests."""
    done = subprocess.run(["git", *words], cwd=place, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- daemons ------------------------------------------------------------------------------------------
def wait_ended(pid: int) -> None:
    """Return when process `pid` has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert readable(descriptor, _TIMEOUT_S), f"process {pid} does not end"
    finally:
        os.close(descriptor)


def log_of(name: str) -> str:
    with open(log_path(name), encoding="utf-8") as file:
        return file.read()


def wait_logged(name: str, text: str, pid: int) -> None:
    """Return when the log of workspace `name` contains `text`; its daemon `pid` must not end before that."""
    descriptor = os.pidfd_open(pid)
    try:
        while text not in log_of(name):
            # No notification tells of a line in a file; the daemon's end would be seen at once.
            ended = readable(descriptor, 0.02)
            assert not ended or text in log_of(name), f"it ended without logging {text!r}:\n{log_of(name)}"
    finally:
        os.close(descriptor)


def left_behind(name: str) -> list[str]:
    """What of a workspace's socket and record is still there."""
    return [path for path in (socket_path(name), record_path(name)) if os.path.lexists(path)]


@contextmanager
def control(name: str) -> Iterator[ControlClient]:
    with ControlClient(socket_path(name)) as client:
        yield client
