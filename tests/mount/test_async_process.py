"""Commands with live output, input and a terminal: `AsyncWorkspaceExecutor.start`, on asyncio and on trio."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.mount.conftest import mounted
from vfsd import AsyncWorkspace
from vfsd.client.async_connection import AsyncProcess, AsyncWorkspaceExecutor
from vfsd.client.workspace import Workspace
from vfsd.operations.fs import TerminalSize


@pytest.fixture(scope="module")
def workspace(session_dir: str) -> Iterator[Workspace]:
    mountpoint = Path(session_dir) / "async-process"
    mountpoint.mkdir()
    with mounted(mountpoint, exec_on_host=True) as workspace:
        yield workspace


async def executor(workspace: Workspace) -> AsyncWorkspaceExecutor:
    return (await AsyncWorkspace.attach(workspace.name)).async_executor


async def received(process: AsyncProcess, ending: bytes) -> bytes:
    output = b""
    with anyio.fail_after(60):
        while not output.endswith(ending) and (pieces := await process.receive()):
            output += b"".join(piece.data for piece in pieces)
    return output


def test_output_and_status_are_complete(workspace: Workspace, run: functools.partial[Any]) -> None:
    async def body() -> None:
        line = "head -c 300000 /dev/zero; echo error >&2; pwd >&2; exit 3"
        async with await (await executor(workspace)).start(["sh", "-c", line]) as process:
            done = await process.communicate()
        assert (done.exit_status, done.stdout) == (3, bytes(300_000))
        assert done.stderr == f"error\n{workspace.path}\n".encode()

    run(body)


def test_input_is_sent_while_output_arrives(workspace: Workspace, run: functools.partial[Any]) -> None:
    async def body() -> None:
        start = (await executor(workspace)).start
        async with await start(["cat"], has_input=True) as process:
            assert (await process.communicate(b"x" * 1_000_000)).stdout == b"x" * 1_000_000
        # A command that does not read its input.
        async with await start(["true"], has_input=True) as process:
            assert (await process.communicate(b"x" * 1_000_000)).exit_status == 0

    run(body)


def test_a_terminal(workspace: Workspace, run: functools.partial[Any]) -> None:
    async def body() -> None:
        line = "stty size; read name; echo hello $name; stty size"
        start = (await executor(workspace)).start
        async with await start(["sh", "-c", line], terminal=TerminalSize(30, 100), has_input=True) as process:
            assert await received(process, b"30 100\r\n") == b"30 100\r\n"
            process.resize(TerminalSize(31, 101))
            async with anyio.create_task_group() as group:
                group.start_soon(process.send_input, b"you\n")
                assert await received(process, b"101\r\n") == b"you\r\nhello you\r\n31 101\r\n"
            while await process.receive():
                pass
            assert process.ended is not None
            assert process.ended.exit_status == 0
            with pytest.raises(BrokenPipeError):
                await process.send_input(b"more")

    run(body)


def test_a_signal_a_time_limit_and_the_end_of_the_block_end_it(
    workspace: Workspace, run: functools.partial[Any]
) -> None:
    async def body() -> None:
        start = (await executor(workspace)).start
        async with await start(["sh", "-c", "trap 'exit 5' USR1; echo ready; while :; do sleep 0.1; done"]) as process:
            await received(process, b"ready\n")
            process.signal("USR1")
            assert (await process.communicate()).exit_status == 5
        async with await start(["sleep", "600"], timeout_s=0.2) as process:
            assert (await process.communicate()).timed_out
        async with await start(["sh", "-c", "echo $$; exec sleep 600"]) as process:
            pid = int(await received(process, b"\n"))
        deadline = time.monotonic() + 60
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            await anyio.sleep(0.02)
        assert not os.path.exists(f"/proc/{pid}")

    run(body)


def test_what_cannot_be_started_is_an_error(workspace: Workspace, run: functools.partial[Any]) -> None:
    async def communicate(*argv: str, **options: Any) -> None:
        async with await (await executor(workspace)).start(argv, **options) as process:
            await process.communicate(b"input" if options.get("has_input") else None)

    async def body() -> None:
        with pytest.raises(FileNotFoundError):
            await communicate("no-such-program")
        with pytest.raises(FileNotFoundError):
            await communicate("no-such-program", has_input=True)
        with pytest.raises(OSError, match="--user is for containers"):
            await communicate("true", user="nobody")

    run(body)
