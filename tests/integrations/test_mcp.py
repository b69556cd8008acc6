"""`vfsd mcp` with the official SDK's client, on both transports and both kinds of session, on a real mount."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from protocol.tools import TOOLS
from tests.mount.conftest import mounted
from tests.support.tree_hash import tree_hash
from vfsd.client.workspace import Workspace

VFSD = [sys.executable, "-m", "vfsd.cli.main"]
Connect: TypeAlias = Callable[[], Any]  # opens a client
Steps: TypeAlias = Callable[[Client], Awaitable[None]]


@pytest.fixture
def workspace(workdir: Path) -> Iterator[Workspace]:
    with mounted(workdir / "ws", name=f"{workdir.name}-ws", exec_on_host=True) as workspace:
        yield workspace


@contextmanager
def http_server(name: str, *words: str) -> Iterator[dict[str, str]]:
    """What a server printed: its URL and its token."""
    command = [*VFSD, "mcp", "-w", name, "--http", "0", "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())
        finally:
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=60)
    assert server.returncode == 130
    assert "Traceback" not in errors


@asynccontextmanager
async def http_client(url: str, token: str, mode: Any = "auto") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


def stdio_server(name: str) -> StdioServerParameters:
    return StdioServerParameters(command=VFSD[0], args=[*VFSD[1:], "mcp", "-w", name], env=dict(os.environ))


@pytest.fixture(params=["stdio", "stdio-legacy", "http", "http-legacy"])
def connect(request: pytest.FixtureRequest, workspace: Workspace) -> Iterator[Connect]:
    """Opens clients of a server, as the latest version of the protocol and as the one with sessions have it."""
    transport, _, legacy = request.param.partition("-")
    mode: Any = legacy or "auto"
    if transport == "stdio":
        yield lambda: Client(stdio_server(workspace.name), mode=mode)
        return
    with http_server(workspace.name) as server:
        yield lambda: http_client(server["url"], server["token"], mode)


def run(connect: Connect, steps: Steps) -> None:
    async def main() -> None:
        async with connect() as client:
            await steps(client)

    anyio.run(main)


async def call(client: Client, name: str, /, *, fails: bool = False, **arguments: Any) -> str:
    result = await client.call_tool(name, arguments)
    assert result.is_error == fails, result
    (content,) = result.content
    assert content.type == "text"
    return content.text


async def written(path: Path) -> str:
    """What a command that now runs has written to `path`."""
    while not path.exists() or not path.read_text():
        await anyio.sleep(0.02)
    return path.read_text().strip()


async def ended(pid: str) -> None:
    while Path("/proc", pid).exists():
        await anyio.sleep(0.02)


def test_each_tool_is_described_and_works(connect: Connect, workspace: Workspace) -> None:
    async def steps(client: Client) -> None:
        offered = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert offered.keys() == TOOLS.keys() | {"snapshot", "snapshots", "restore", "diff", "log"}
        for name, tool in TOOLS.items():
            assert offered[name].input_schema == tool.json_schema()
        annotations = offered["rm"].annotations
        assert annotations is not None
        assert (annotations.read_only_hint, annotations.destructive_hint) == (False, True)
        assert (annotations.idempotent_hint, annotations.open_world_hint) == (True, False)

        await call(client, "write_file", path="src/a.py", content="x = 1\ny = 2\n")
        assert Path(workspace.path, "src/a.py").read_text() == "x = 1\ny = 2\n"
        assert "x = 1" in await call(client, "read_file", path="src/a.py")
        assert await call(client, "ls") == "src/"
        assert await call(client, "glob", pattern="*.py") == "src/a.py"
        assert await call(client, "grep", pattern="y =") == "src/a.py\n     2\ty = 2"
        assert await call(client, "python", code="print(open('src/a.py').read())") == "x = 1\ny = 2"

        before = tree_hash(Path(workspace.path))
        await call(client, "snapshot", name="before")
        await call(client, "edit_file", path="src/a.py", old_text="y = 2", new_text="y = 3")
        await call(client, "shell", command="echo new > b.txt; mkdir d; chmod 600 src/a.py")
        assert "\nA b.txt\nA d/\nM src/a.py" in await call(client, "diff")
        assert "+y = 3" in await call(client, "diff", patch=True)
        assert "brings it back" in await call(client, "restore", snapshot="before")
        assert tree_hash(Path(workspace.path)) == before
        await call(client, "restore", undo=True)
        assert Path(workspace.path, "b.txt").read_text() == "new\n"
        assert (await call(client, "snapshots")).startswith("before  ")
        await call(client, "rm", path="src", recursive=True)
        assert not Path(workspace.path, "src").exists()

    run(connect, steps)


def test_a_failure_is_a_result_and_the_next_call_works(connect: Connect) -> None:
    async def steps(client: Client) -> None:
        assert await call(client, "read_file", fails=True, path="no") == "No such file or directory: no"
        assert "not in the workspace" in await call(client, "read_file", fails=True, path="/etc/passwd")
        assert "`path`" in await call(client, "read_file", fails=True)
        assert await call(client, "restore", fails=True, snapshot="no") == "no such snapshot: no"
        with pytest.raises(MCPError, match="no such tool"):
            await client.call_tool("no", {})
        assert await call(client, "shell", command="exit 3") == "(exit status 3)"

    run(connect, steps)


def test_huge_output_is_bounded(connect: Connect) -> None:
    async def steps(client: Client) -> None:
        text = await call(client, "shell", command="head -c 50000000 /dev/zero | tr '\\0' z")
        assert len(text) < 300_000
        assert text.endswith("(there was more output; it was cut off)")

    run(connect, steps)


def test_files_are_resources(connect: Connect, workspace: Workspace) -> None:
    async def steps(client: Client) -> None:
        Path(workspace.path, "a b.txt").write_text("hello\n")
        Path(workspace.path, "blob").write_bytes(b"\xff\xfe")
        root = f"vfsd://{workspace.name}/"
        listed = {file.uri: file.mime_type for file in (await client.list_resources()).resources}
        assert listed == {f"{root}a%20b.txt": "text/plain", f"{root}blob": None}
        (text,) = (await client.read_resource(f"{root}a%20b.txt")).contents
        assert text.model_dump()["text"] == "hello\n"
        (blob,) = (await client.read_resource(f"{root}blob")).contents
        assert blob.model_dump()["blob"] == "//4="
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == f"{root}{{+path}}"
        for wrong in (f"{root}no", "file:///etc/passwd", f"{root}"):
            with pytest.raises(MCPError, match=r"No such file|not a file of this server"):
                await client.read_resource(wrong)

    run(connect, steps)


def test_a_cancelled_command_is_killed(connect: Connect, workspace: Workspace) -> None:
    async def steps(client: Client) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "shell", {"command": "echo $$ > pid; exec sleep 1000"})
            pid = await written(Path(workspace.path, "pid"))
            group.cancel_scope.cancel()
        await ended(pid)
        assert await call(client, "shell", command="echo on") == "on"

    run(connect, steps)


def test_a_long_call_reports_progress(connect: Connect, workspace: Workspace) -> None:
    async def steps(client: Client) -> None:
        reports: list[tuple[float, str | None]] = []

        async def report(progress: float, _total: float | None, message: str | None) -> None:
            reports.append((progress, message))
            Path(workspace.path, "go").touch()

        # Ends when the first report has arrived.
        command = {"command": "while [ ! -e go ]; do sleep 0.1; done; echo went"}
        result = await client.call_tool("shell", command, progress_callback=report)
        assert result.content[0].model_dump()["text"] == "went"
        assert reports[0][0] > 0
        assert "shell has been running" in str(reports[0][1])

    run(connect, steps)


def test_calls_run_in_parallel(connect: Connect) -> None:
    async def steps(client: Client) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "shell", {"command": "while [ ! -e go ]; do sleep 0.1; done"})
            await call(client, "write_file", path="go", content="")

    run(connect, steps)


def test_calls_fail_while_the_daemon_is_dead_and_work_after_the_next_mount(workdir: Path) -> None:
    name = f"{workdir.name}-dies"

    async def steps(client: Client) -> None:
        with mounted(workdir / "ws", name=name):
            assert await call(client, "ls") == ". is empty"
        assert name in await call(client, "ls", fails=True)
        workspace = Workspace.mount(workdir / "ws", name=name)
        os.kill(workspace.pid, signal.SIGKILL)
        await ended(str(workspace.pid))
        assert f"the daemon of {name} is dead" in await call(client, "ls", fails=True)
        assert len((await client.list_tools()).tools) == len(TOOLS) + 5
        with pytest.raises(MCPError, match="is dead"):
            await client.list_resources()
        with mounted(workdir / "ws", name=name):
            assert await call(client, "ls") == ". is empty"

    run(lambda: Client(stdio_server(name)), steps)


# -- standard input and output ----------------------------------------------------------------------
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


@pytest.fixture
def process(workspace: Workspace) -> Iterator[subprocess.Popen[bytes]]:
    """A server on standard input and output that has said hello, and runs a command whose pid is in the file `pid`."""
    command = [*VFSD, "mcp", "-w", workspace.name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        shell = {"name": "shell", "arguments": {"command": "echo $$ > pid; exec sleep 1000"}}
        messages = [
            HELLO,
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": shell},
        ]
        for message in messages:
            process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "vfsd"
        yield process
        process.kill()


def test_the_end_of_input_ends_the_server_and_its_commands(
    process: subprocess.Popen[bytes], workspace: Workspace
) -> None:
    pid = anyio.run(written, Path(workspace.path, "pid"))
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in output.splitlines())
    anyio.run(ended, pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_its_commands(
    process: subprocess.Popen[bytes], workspace: Workspace, number: signal.Signals
) -> None:
    pid = anyio.run(written, Path(workspace.path, "pid"))
    process.send_signal(number)
    assert process.wait(60) == 128 + number  # although its input is still open
    assert process.stderr is not None
    assert process.stderr.read() == b""
    anyio.run(ended, pid)


def test_a_full_disk_at_standard_output_is_one_line(workspace: Workspace) -> None:
    with open("/dev/full", "wb") as full:
        hello = json.dumps(HELLO).encode() + b"\n"
        command = [*VFSD, "mcp", "-w", workspace.name]
        done = subprocess.run(command, input=hello, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"vfsd: error: cannot write to standard output: No space left on device\n"


# -- HTTP -------------------------------------------------------------------------------------------
def test_a_request_needs_the_token_and_the_servers_own_names(workspace: Workspace) -> None:
    with http_server(workspace.name) as server:
        url, token = server["url"], f"Bearer {server['token']}"

        def status(**headers: str) -> int:
            sent = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **headers}
            return httpx2.post(url, json=HELLO, headers=sent, timeout=60).status_code

        assert status() == 401
        assert status(Authorization="Bearer wrong") == 401
        assert status(Authorization=token, Host="attacker.example") == 421
        assert status(Authorization=token, Origin="http://attacker.example") == 403
        assert status(Authorization=token) == 200


def test_the_token_of_a_file_is_not_printed(workspace: Workspace, workdir: Path) -> None:
    file = workdir / "token"
    file.touch(mode=0o600)
    file.write_text("0123456789abcdef\n")
    with http_server(workspace.name, "--token-file", str(file)) as server:
        assert server.keys() == {"url"}

        async def steps(client: Client) -> None:
            assert await call(client, "ls") == ". is empty"

        run(lambda: http_client(server["url"], "0123456789abcdef"), steps)
