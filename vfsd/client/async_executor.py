"""AsyncWorkspaceExecutor: runs the commands of a mounted workspace, for asyncio and trio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protocol.execution.executor import DEFAULT_OUTPUT_BYTES, DEFAULT_TIMEOUT_S, ExecResult
from vfsd.client.async_connection import AsyncControlClient
from vfsd.client.executor import exec_call


class AsyncWorkspaceExecutor:
    """The async twin of `WorkspaceExecutor`.  Several commands may run in parallel.

    Cancelling `run` kills the command with all of its processes, and waits for that (up to 3 s).
    """

    def __init__(self, client: AsyncControlClient) -> None:
        """Use `AsyncWorkspace.async_executor`."""
        self._client = client

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
