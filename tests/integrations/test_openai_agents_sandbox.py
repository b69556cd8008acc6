"""OpenAI Agents SDK: sandboxes as workspaces, their saved states, and runs of agents."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import RunConfig, Runner, RunState, function_tool, set_tracing_disabled
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent, SandboxPathGrant, SandboxRunConfig
from agents.sandbox.entries import File
from agents.sandbox.errors import (
    ExecTransportError,
    SnapshotNotRestorableError,
    SnapshotPersistError,
    WorkspaceArchiveWriteError,
    WorkspaceStartError,
    WorkspaceStopError,
)
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import SandboxSession
from agents.sandbox.types import User
from agents.testing import ScriptedModel, assistant_message, function_call

from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.workspace import Workspace
from vfsd.integrations.openai_agents import (
    VfsdSandboxClient,
    VfsdSandboxClientOptions,
    VfsdSandboxSessionState,
    VfsdSnapshot,
    VfsdSnapshotSpec,
)
from vfsd.machine.mountinfo import mount_at

ON_HOST = VfsdSandboxClientOptions(exec_on_host=True)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tracing_disabled(True)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")


@pytest.fixture
def runner(workdir: Path) -> Any:
    """A workspace that runs commands, named after the test's directory."""
    with Workspace.mount(workdir / "runner", name=f"{workdir.name}-runner", exec_on_host=True) as workspace:
        yield workspace


async def started(client: VfsdSandboxClient, **arguments: Any) -> SandboxSession:
    session = await client.create(**arguments)
    await session.start()
    return session


async def write(session: SandboxSession, path: str, content: bytes) -> None:
    await session.write(Path(path), io.BytesIO(content))


async def end(client: VfsdSandboxClient, session: SandboxSession) -> None:
    await session.stop()
    await session.shutdown()
    await client.delete(session)


def saved(workspace: Workspace) -> list[str]:
    return [each.tag or "" for each in workspace.snapshots(changes=False)]


def test_a_state_is_one_snapshot_and_a_later_process_resumes_it(runner: Workspace) -> None:
    root = Path(runner.path)

    async def first() -> dict[str, object]:
        client = VfsdSandboxClient(runner)
        session = await started(client, snapshot=VfsdSnapshotSpec())
        await write(session, "a", b"saved")
        await end(client, session)
        return client.serialize_session_state(session.state)

    async def second(payload: dict[str, object]) -> None:
        client = VfsdSandboxClient()
        session = await client.resume(client.deserialize_session_state(payload))
        await session.start()
        assert await session.running()
        await session.shutdown()
        await client.delete(session)

    payload = asyncio.run(first())
    assert len(saved(runner)) == 1
    (root / "a").write_bytes(b"changed")
    (root / "b").write_bytes(b"")
    asyncio.run(second(dict(payload)))
    assert (root / "a").read_bytes() == b"saved"
    assert os.listdir(root) == ["a"]
    assert mount_at(runner.path) is not None
    runner.undo()  # the resume lost nothing
    assert (root / "a").read_bytes() == b"changed"


def test_a_workspace_that_has_not_changed_is_not_restored(runner: Workspace) -> None:
    async def main() -> None:
        client = VfsdSandboxClient(runner)
        manifest = Manifest(entries={"temporary": File(content=b"t", ephemeral=True)})
        session = await started(client, manifest=manifest, snapshot=VfsdSnapshotSpec())
        await write(session, "a", b"saved")
        await session.stop()
        await write(session, "temporary", b"not saved")
        inode = os.stat(f"{runner.path}/a").st_ino
        resumed = await client.resume(session.state)
        await resumed.start()
        assert os.stat(f"{runner.path}/a").st_ino == inode
        assert not [each for each in runner.snapshots(changes=False) if each.kind == "safety"]
        assert Path(f"{runner.path}/temporary").read_bytes() == b"t"

    run(main())


def test_what_is_ephemeral_is_not_restored(runner: Workspace) -> None:
    async def main() -> None:
        client = VfsdSandboxClient(runner)
        session = await started(client, snapshot=VfsdSnapshotSpec())
        session.register_persist_workspace_skip_path("cache")
        await write(session, "cache/x", b"x")
        await write(session, "a", b"saved")
        await session.stop()
        await write(session, "a", b"changed")
        session._inner._set_start_state_preserved(False)
        await session.start()
        assert os.listdir(runner.path) == ["a"]
        assert Path(f"{runner.path}/a").read_bytes() == b"saved"

    run(main())


@pytest.mark.parametrize("spec", ["native", "local"])
def test_each_session_of_a_client_has_its_own_workspace(workdir: Path, spec: str) -> None:
    async def main() -> None:
        client = VfsdSandboxClient()
        snapshot = VfsdSnapshotSpec() if spec == "native" else LocalSnapshotSpec(base_path=workdir / "saved")
        session = await started(client, snapshot=snapshot, options=ON_HOST)
        other = await started(client, options=ON_HOST)
        await write(session, "bin/run", b"#!/bin/sh\necho run\n")
        await session.exec("chmod 755 bin/run; ln -s /usr/bin/env bin/env; ln -s $PWD/bin/run r")
        assert await other.ls(".") == []
        await end(client, other)
        assert mount_at(other.state.mountpoint) is None
        assert not os.path.exists(other.state.mountpoint)
        await end(client, session)
        # A state in the workspace needs the workspace.
        assert (mount_at(session.state.mountpoint) is None) == (spec == "local")
        state = client.deserialize_session_state(client.serialize_session_state(session.state))
        resumed = await client.resume(state)
        await resumed.start()
        assert resumed.state.manifest.root == session.state.manifest.root
        assert (await resumed.exec("./r; readlink bin/env")).stdout == b"run\n/usr/bin/env\n"
        Workspace.attach(resumed.state.workspace).unmount(lazy=True)
        assert not await resumed.running()
        await client.delete(resumed)  # what has ended is deleted
        assert not os.path.exists(session.state.mountpoint)
        if spec == "native":
            with pytest.raises(WorkspaceStartError, match="has ended, and the states"):
                await client.resume(state)

    run(main())


def test_a_state_is_found_by_its_id_and_is_portable(runner: Workspace, workdir: Path) -> None:
    async def main() -> None:
        client = VfsdSandboxClient(runner)
        for content in (b"1", b"2"):
            session = await started(client, snapshot=VfsdSnapshot(id="work"))
            await write(session, "a", content)
            await end(client, session)
        snapshot = VfsdSnapshot(id="work", workspace=runner.name)
        assert saved(runner)[-1] == snapshot.tag
        # In another workspace, and in a sandbox of the SDK's own.
        other = await started(VfsdSandboxClient(), snapshot=snapshot, options=ON_HOST)
        assert (await other.read(Path("a"))).read() == b"2"
        await other.stop()
        assert other.state.snapshot.workspace == other.state.workspace
        Workspace.attach(other.state.workspace).unmount(lazy=True)
        os.rmdir(other.state.mountpoint)
        local = await UnixLocalSandboxClient().create(snapshot=snapshot, manifest=Manifest(root=str(workdir / "local")))
        await local.start()
        assert (workdir / "local/a").read_bytes() == b"2"
        with pytest.raises(WorkspaceStopError) as refused:
            await local.stop()
        assert isinstance(refused.value.__cause__, SnapshotPersistError)
        with pytest.raises(SnapshotNotRestorableError):
            await VfsdSnapshot(id="other", workspace=runner.name).restore()

    run(main())


def test_a_state_in_a_tar_file_leaves_one_snapshot_that_may_go(runner: Workspace, workdir: Path) -> None:
    async def main() -> None:
        client = VfsdSandboxClient(runner)
        session = await started(client, snapshot=LocalSnapshotSpec(base_path=workdir / "saved"))
        for content in (b"1", b"2"):
            await write(session, "a", content)
            await session.stop()
        assert [each.kind for each in runner.snapshots(changes=False)] == ["automatic"]
        inode = os.stat(f"{runner.path}/a").st_ino
        await (await client.resume(session.state)).start()  # unchanged: the tar file is not read
        assert os.stat(f"{runner.path}/a").st_ino == inode
        runner.drop(*(each.name for each in runner.snapshots(changes=False)))
        await (await client.resume(session.state)).start()
        assert Path(f"{runner.path}/a").read_bytes() == b"2"

    run(main())


def test_a_failed_resume_changes_nothing(runner: Workspace, workdir: Path) -> None:
    async def main() -> None:
        client = VfsdSandboxClient(runner)
        session = await started(client, snapshot=LocalSnapshotSpec(base_path=workdir / "saved"))
        await write(session, "a", b"saved")
        await session.stop()
        await write(session, "b", b"later")
        (archive,) = (workdir / "saved").iterdir()
        archive.write_bytes(archive.read_bytes()[:700] + b"damaged" * 500)
        with pytest.raises(WorkspaceArchiveWriteError):
            await (await client.resume(session.state)).start()
        assert sorted(os.listdir(runner.path)) == ["a", "b"]

    run(main())


def test_an_archive_is_one_state_while_programs_write(runner: Workspace) -> None:
    async def main() -> None:
        session = await started(VfsdSandboxClient(runner))
        line = "n=0; while :; do n=$((n+1)); echo $n > .n; mv .n a; ln -f a b; done"
        writer = await session.pty_exec_start(line, yield_time_s=0.3)
        assert writer.process_id is not None
        for _ in range(5):
            with await session.persist_workspace() as stream, tarfile.open(fileobj=stream) as tar:
                names = set(tar.getnames())
                assert names <= {".", "./a", "./b", "./.n"}
        await session.shutdown()
        assert saved(runner) == []  # the archive's own snapshots are dropped

    run(main())


def test_arguments_that_do_not_go_together_are_refused(runner: Workspace, workdir: Path) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="pass exposed_ports only"):
            await VfsdSandboxClient(runner).create(options=ON_HOST)
        with pytest.raises(ValueError, match="commands see the workspace at"):
            await VfsdSandboxClient(runner).create(manifest=Manifest(root="/elsewhere"))
        with pytest.raises(TypeError, match="nonsense"):
            await VfsdSandboxClient().create(options=VfsdSandboxClientOptions(nonsense=1))
        grant = SandboxPathGrant(path="/x", host_path=str(workdir))
        with pytest.raises(ValueError, match="host_path"):
            await VfsdSandboxClient().create(manifest=Manifest(extra_path_grants=(grant,)), options=ON_HOST)
        accounts = await VfsdSandboxClient(runner).create(manifest=Manifest(users=[User(name="nobody")]))
        with pytest.raises(ValueError, match="on this host"):
            await accounts.start()
        local = await UnixLocalSandboxClient().create(manifest=Manifest(root=str(workdir / "l")))
        with pytest.raises(TypeError, match="not a state"):
            await VfsdSandboxClient().resume(local.state)

    run(main())
    state = VfsdSandboxSessionState(
        snapshot=VfsdSnapshot(id="x"), manifest=Manifest(), workspace="no-such", mountpoint="/nowhere"
    )
    with pytest.raises(WorkspaceStartError, match="mount it again under that name"):
        asyncio.run(VfsdSandboxClient().resume(state))


def test_without_commands_files_work(workspace: Workspace) -> None:
    async def main() -> None:
        session = await started(VfsdSandboxClient(workspace))
        await write(session, "a", b"a")
        assert (await session.read(Path("a"))).read() == b"a"
        with pytest.raises(ExecTransportError, match="exec_on_host=True or sandbox"):
            await session.exec("true")
        await session.stop()

    run(main())


def test_cancelling_a_command_kills_it(runner: Workspace) -> None:
    async def main() -> None:
        session = await started(VfsdSandboxClient(runner))
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.5):
                await session.exec("echo $$ > pid; exec sleep 600")
        pid = Path(f"{runner.path}/pid").read_text().strip()
        for _ in range(100):
            if not os.path.exists(f"/proc/{pid}"):
                return
            await asyncio.sleep(0.05)
        pytest.fail("the command runs on")

    run(main())


def test_an_agent_pauses_and_a_later_run_resumes(runner: Workspace) -> None:
    @function_tool(needs_approval=True)
    def approve() -> str:
        """Ask the user."""
        return "approved"

    def agent(*steps: Any) -> SandboxAgent[Any]:
        return SandboxAgent(name="coder", model=ScriptedModel(steps), tools=[approve])

    def config() -> RunConfig:
        sandbox = SandboxRunConfig(client=VfsdSandboxClient(runner.name), snapshot=VfsdSnapshotSpec())
        return RunConfig(sandbox=sandbox)

    call = [function_call("exec_command", {"cmd": "echo one > a.txt; cat a.txt"}, call_id="1")]
    ask = [function_call("approve", {}, call_id="3")]

    async def main() -> None:
        first = await Runner.run(agent(call, ask), "go", run_config=config())
        assert len(first.interruptions) == 1
        assert "one" in str(first.new_items[1].output)
        Path(f"{runner.path}/a.txt").write_text("drifted\n")
        later = agent([function_call("exec_command", {"cmd": "cat a.txt"}, call_id="4")], [assistant_message("done")])
        state = await RunState.from_json(later, first.to_state().to_json())
        state.approve(state.get_interruptions()[0])
        second = await Runner.run(later, state, run_config=config())
        assert second.final_output == "done"
        assert any("one" in str(getattr(item, "output", "")) for item in second.new_items[-3:])

    run(main())
    assert Path(f"{runner.path}/a.txt").read_text() == "one\n"


def test_the_example_runs(workdir: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "openai_agents_sandbox.py"
    done = subprocess.run([sys.executable, example, workdir / "ws"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the agent: done", "added new.txt", "removed notes.txt", "notes.txt: important"]


def test_a_workspace_of_asyncio_is_accepted(workdir: Path) -> None:
    async def main() -> None:
        async with AsyncWorkspace.mount(workdir / "ws", exec_on_host=True) as workspace:
            session = await started(VfsdSandboxClient(workspace))
            assert (await session.exec("pwd")).stdout.decode().strip() == session.state.manifest.root

    run(main())
