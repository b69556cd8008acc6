"""WorkspaceExecutor: runs the commands of a mounted workspace, for `protocol.tools`.

    context = ToolContext(workspace.filesystem, executor=workspace.executor)
    TOOLS["shell"].call({"command": "make test"}, context)

So the tools `shell` and `python` run where `vfsd exec` does: in the sandbox, in the container, or on this host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from protocol.execution.executor import DEFAULT_OUTPUT_BYTES, DEFAULT_TIMEOUT_S, ExecResult, check_words
from vfsd.client.connection import ControlClient
from vfsd.client.requests import RemoteCall
from vfsd.operations.fs import FsExecParams, FsExecResult
from vfsd.wire.messages import wire_path


class WorkspaceExecutor:
    """Implements `protocol.execution.executor.Executor`; may be used from any thread.

    Errors besides the contract's: OSError (EOPNOTSUPP) if the workspace was mounted without a way to run commands,
    ConnectionError if its daemon is gone.
    """

    def __init__(self, socket_path: str, instance: str = "") -> None:
        self._socket_path = socket_path
        self._instance = instance

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        output_limit_bytes: int = DEFAULT_OUTPUT_BYTES,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `Executor`.  `stdin` and `argv` together are limited to 512 KiB."""
        with ControlClient(self._socket_path, instance=self._instance) as client:
            return client.run(exec_call(argv, cwd, env, timeout_s, output_limit_bytes, stdin))


def caller_environment() -> dict[str, str]:
    """Return the environment of this process, as commands on this host get it; encoded like paths."""
    return {wire_path(name): wire_path(value) for name, value in os.environb.items()}


def current_umask() -> int:
    """Return the umask of this thread, without changing it for the others as umask(2) would."""
    with open("/proc/thread-self/status", encoding="utf-8", errors="replace") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def exec_call(
    argv: Sequence[str],
    cwd: str,
    env: Mapping[str, str] | None,
    timeout_s: float,
    output_limit_bytes: int,
    stdin: bytes,
) -> RemoteCall[ExecResult]:
    """Build the request of `Executor.run`."""
    check_words(argv)
    params = FsExecParams(
        argv=[wire_path(os.fsencode(word)) for word in argv],
        cwd=wire_path(os.fsencode(cwd)),
        env=dict(env or {}),
        environment=caller_environment(),
        timeout_s=timeout_s,
        output_limit_bytes=output_limit_bytes,
        stdin=stdin,
        stream=True,  # an answer of 32 MiB in one piece would stop every other thread while it is decoded
    )
    pieces: list[bytes] = []
    return RemoteCall("fs.exec", params, lambda done: _result(done, pieces), on_output=pieces.append)


def _result(done: FsExecResult, pieces: list[bytes]) -> ExecResult:
    """Convert the answer, with the output that preceded it.  A piece is of one stream only."""
    stdout, stderr = done.stdout, done.stderr
    if not isinstance(done.streamed_stdout_bytes, msgspec.UnsetType):
        left, count = done.streamed_stdout_bytes, 0
        while left > 0:
            left -= len(pieces[count])
            count += 1
        stdout, stderr = b"".join(pieces[:count]), b"".join(pieces[count:])
    return ExecResult(done.exit_status, stdout, stderr, done.timed_out, done.truncated)
