"""The command `exec`: run a program, and kill all its processes at the end."""

from __future__ import annotations

import codecs
import errno
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from protocol.errors import os_error
from protocol.execution import supervisor
from protocol.paths import located
from protocol.portable.answers import UsageError, base64_text
from protocol.portable.place import Place

_INPUT_BYTES = 512 * 1024

# What Python 3.8 lacks of what the supervisor uses.
_SUPERVISOR = """
import ctypes, os
if not hasattr(os, "pidfd_open"):
    def pidfd_open(pid):
        descriptor = ctypes.CDLL(None, use_errno=True).syscall(434, pid, 0)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return descriptor
    os.pidfd_open = pidfd_open
if not hasattr(os, "waitstatus_to_exitcode"):
    os.waitstatus_to_exitcode = lambda status: (
        -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    )
exec(compile({source!r}, "supervisor", "exec"))
"""


def run_command(
    place: Place,
    cwd: str,
    env: Iterable[tuple[str, str]],
    timeout: float,
    output_limit: int,
    stdin: bool,
    line: str | None,
    argv: list[str],
) -> Any:
    """Run a program below the root; return its exit status and output."""
    if argv[:1] == ["--"]:
        del argv[0]
    if line is not None:
        argv = ["/bin/sh", "-c", line, "sh", *argv]
    if not argv:
        raise UsageError("exec: give a COMMAND, or -c LINE")
    content = sys.stdin.buffer.read(_INPUT_BYTES + 1) if stdin else b""
    if len(content) > _INPUT_BYTES:
        raise ValueError(f"standard input is longer than {_INPUT_BYTES} bytes")
    inside = place.path(cwd)
    if not place.files.stat(inside).is_directory:
        with located(inside):
            raise os_error(errno.ENOTDIR)
    directory = os.path.normpath(os.path.join(place.root, inside))
    run = _Run(argv, directory, {**os.environ, **dict(env)}, output_limit)
    return run.result(content, timeout)


class _Run:
    """A command under `protocol.execution.supervisor`, which kills all its processes at the end."""

    def __init__(self, argv: list[str], directory: str, env: dict[str, str], limit: int) -> None:
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        source = supervisor.__loader__.get_source(supervisor.__name__)  # type: ignore[union-attr]
        program = _SUPERVISOR.format(source=source)
        self._argv, self._directory, self._limit = argv, directory, limit
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, directory, str(control), str(status), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(control, status),
            start_new_session=True,
            env=env,
        )
        os.close(control)
        os.close(status)
        self._kept = {"stdout": b"", "stderr": b""}
        self._truncated = False

    def result(self, content: bytes, timeout_s: float) -> dict[str, Any]:
        """Wait for the end of the command; kill it at the timeout, and if this is interrupted."""
        threads = [threading.Thread(target=self._feed, args=(content,), daemon=True)]
        threads += [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._kept]
        for thread in threads:
            thread.start()
        report, timed_out = b"", False
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                left_s = None if timed_out else max(0.0, deadline_s - time.monotonic())
                if not select.select([self._status], [], [], left_s)[0]:
                    timed_out = True
                    self._kill()
                    continue
                data = os.read(self._status, 100)
                if not data:
                    break
                report += data
        finally:
            self._kill()
            self._process.wait()
            os.close(self._status)
        for thread in threads:
            thread.join(1)  # a process that is not the command's may hold a pipe
        kind, _, number = report.decode().strip().partition(" ")
        if kind == "error":
            raise os_error(int(number), self._argv[0] if os.path.isdir(self._directory) else self._directory)
        if kind != "exit":
            raise os_error(errno.EIO, "the command's supervisor was killed")
        output = {name: _text(kept, self._truncated) for name, kept in self._kept.items()}
        ended = {"timed_out": timed_out, "truncated": self._truncated, "snapshot": None, "snapshot_error": None}
        return {"exit_status": int(number), **output, **ended}

    def _kill(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _feed(self, content: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.close()
        except OSError:
            pass  # the command reads no more

    def _read(self, name: str) -> None:
        while True:
            data = os.read(getattr(self._process, name).fileno(), 64 * 1024)
            if not data:
                return
            kept = data[: self._limit - len(self._kept[name])]
            self._truncated = self._truncated or len(kept) < len(data)
            self._kept[name] += kept


def _text(content: bytes, truncated: bool) -> str:
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=not truncated)
    except UnicodeDecodeError:
        return base64_text(content)
