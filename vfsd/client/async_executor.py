"""AsyncWorkspaceExecutor: runs the commands of a mounted workspace, for asyncio and trio."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from protocol.execution.executor import DEFAULT_OUTPUT_BYTES, DEFAULT_TIMEOUT_S, ExecResult, check_words
from vfsd.client.async_connection import AsyncControlClient
from vfsd.client.async_process import AsyncProcess
from vfsd.client.executor import caller_environment, exec_call
from vfsd.operations.exec import ExecParams, TerminalSize
from vfsd.wire.messages import wire_path


class AsyncWorkspaceExecutor:
    """The async twin of `WorkspaceExecutor`.  Several commands may run in parallel.

    Cancelling `run` kills the command with all of its processes, and waits for that (up to 3 s).
    """

    def __init__(self, client: AsyncControlClient, socket_path: str, instance: str = "") -> None:
        """Use `AsyncWorkspace.async_executor`."""
        self._client = client
        self._socket_path = socket_path
        self._instance = instance

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        output_limit_bytes: int = DEFAULT_OUTPUT_BYTES,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `WorkspaceExecutor.run`."""
        return await self._client.run(exec_call(argv, cwd, env, timeout_s, output_limit_bytes, stdin))

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        terminal: TerminalSize | None = None,
        has_input: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncProcess:
        """Start a command: `async with await executor.start(argv) as process`.

        With `terminal` it runs in a terminal, whose output is all "stdout".  With `has_input` it reads what
        `AsyncProcess.send_input` sends; otherwise its input is empty.  `user` is one of the container.  After
        `timeout_s` seconds the command is killed; None: no limit.

        The errors are those of `run`, such as FileNotFoundError for a program that does not exist, and OSError
        (EOPNOTSUPP) for a `user` of a command on this host.  Either this method raises them or the first `receive`.
        """
        check_words(argv)
        params = ExecParams(
            argv=[wire_path(os.fsencode(word)) for word in argv],
            cwd=wire_path(os.fsencode(cwd)),
            env=dict(env or {}),
            environment=caller_environment(),
            user=user,
            terminal=terminal,
            input=has_input,
            timeout_s=timeout_s,
        )
        return await AsyncProcess.start(self._socket_path, params, self._instance)
