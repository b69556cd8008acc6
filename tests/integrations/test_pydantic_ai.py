"""Pydantic AI: its own conformance suite on a real mount, the snapshot tools, and the example."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("pydantic_ai.workspaces")

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces import WorkspaceRef, WorkspaceUnavailableError
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.integrations.pydantic_ai import VfsdBackend, snapshot_toolset
from vfsd.machine.runtime import process_start_ticks


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(workdir: Path) -> Iterator[Callable[[], VfsdBackend]]:
    """Make backends of new workspaces, which are unmounted after the test."""
    made: list[VfsdBackend] = []

    def make_one() -> VfsdBackend:
        made.append(VfsdBackend(workdir / f"ws{len(made)}", name=f"{workdir.name}-{len(made)}", exec_on_host=True))
        return made[-1]

    yield make_one
    for backend in made:
        if backend.ref is not None:
            try:
                Workspace.attach(backend.ref.id).unmount(lazy=True)
            except (FileNotFoundError, ConnectionError):
                pass


async def destroy(backend: VfsdBackend) -> None:
    workspace = await backend.workspace()
    await workspace.unmount(lazy=True)
    os.rmdir(workspace.path)


class TestConformance(WorkspaceBackendSuite):
    @pytest.fixture
    def backend(self, shared: Workspace) -> VfsdBackend:
        return VfsdBackend(ref=WorkspaceRef(provider="vfsd", id=shared.name))

    @pytest.fixture
    def fresh_backend(self, make: Callable[[], VfsdBackend]) -> Callable[[], VfsdBackend]:
        return make

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], VfsdBackend]:
        return lambda ref: VfsdBackend(ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[VfsdBackend], Awaitable[None]]:
        return destroy


@pytest.mark.anyio
async def test_a_dead_daemon_is_an_unavailable_workspace(make: Callable[[], VfsdBackend], anyio_backend: str) -> None:
    backend = make()
    root = await backend.working_dir()
    pid = (await backend.workspace()).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: process_start_ticks(pid) is None, "the daemon's end")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: backend.run(["true"]),
        lambda: backend.read_bytes(f"{root}/a"),
        lambda: backend.write_bytes(f"{root}/a", b"x"),
        lambda: backend.list_dir(root),
        backend.working_dir,
    ]
    for call in calls:
        with pytest.raises(WorkspaceUnavailableError):
            await call()
    subprocess.run(["umount", "-l", root], check=False)


@pytest.mark.anyio
async def test_no_file_operation_leads_outside(make: Callable[[], VfsdBackend], tmp_path: Path) -> None:
    backend = make()
    root = await backend.working_dir()
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path, f"{root}/out")
    for path in (f"{root}/out/secret", f"{tmp_path}/secret", f"{root}/../secret"):
        for call in (backend.read_bytes, backend.stat, backend.remove, lambda path: backend.write_bytes(path, b"x")):
            with pytest.raises(PermissionError):
                await call(path)
        assert not await backend.exists(path)
    assert await backend.realpath(f"{root}/out/secret") == f"{tmp_path}/secret"
    await backend.write_bytes(root + "/d" * 40 + "/" + "n" * 255, b"x")
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.anyio
async def test_without_a_way_to_run_commands_files_work(workdir: Path) -> None:
    backend = VfsdBackend(workdir / "ws", name=f"{workdir.name}-ws")
    root = await backend.working_dir()
    await backend.write_bytes(f"{root}/a", b"x")
    with pytest.raises(OSError, match="commands"):
        await backend.run(["true"])
    await destroy(backend)


def scripted(*calls: tuple[str, dict[str, str]]) -> tuple[FunctionModel, list[str]]:
    """A model that calls the tools one after the other, and the answers that it gets."""
    answers: list[str] = []
    left = list(calls)

    def reply(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        answers.extend(str(part.content) for part in messages[-1].parts if isinstance(part, ToolReturnPart))
        answers.extend(str(part.content) for part in messages[-1].parts if part.part_kind == "retry-prompt")
        if not left:
            return ModelResponse(parts=[TextPart("done")])
        name, arguments = left.pop(0)
        return ModelResponse(parts=[ToolCallPart(name, {**arguments})])

    return FunctionModel(reply), answers


@pytest.mark.anyio
async def test_an_agent_takes_and_restores_snapshots(make: Callable[[], VfsdBackend], anyio_backend: str) -> None:
    if anyio_backend == "trio":
        pytest.skip("Agent.run needs asyncio")
    backend = make()
    root = await backend.working_dir()
    model, answers = scripted(
        ("take_snapshot", {"tag": "before"}),
        ("damage", {}),
        ("changes_since", {"name": "snap-1"}),
        ("restore_snapshot", {"name": "no-such"}),
        ("restore_snapshot", {"name": "snap-1"}),
        ("list_snapshots", {}),
    )
    agent = Agent(model, toolsets=[snapshot_toolset(backend)])

    @agent.tool_plain
    async def damage() -> str:
        await backend.remove(f"{root}/a")
        return "damaged"

    await backend.write_bytes(f"{root}/a", b"x")
    await agent.run("go")
    assert answers[:3] == ["snap-1", "damaged", "removed a"]
    assert "no-such" in answers[3]
    assert answers[4] == "restored snap-1: 1 paths changed"
    assert "before" in answers[5]
    assert await backend.read_bytes(f"{root}/a") == b"x"


def test_arguments_that_do_not_go_together_are_refused() -> None:
    ref = WorkspaceRef(provider="vfsd", id="x")
    with pytest.raises(TypeError):
        VfsdBackend()
    with pytest.raises(TypeError):
        VfsdBackend("/tmp/x", ref=ref)
    with pytest.raises(TypeError):
        VfsdBackend(ref=ref, exec_on_host=True)
    with pytest.raises(ValueError, match="local"):
        VfsdBackend(ref=WorkspaceRef(provider="local", id="/tmp"))


def test_the_example_runs(workdir: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "pydantic_ai_agent.py"
    done = subprocess.run([sys.executable, example, workdir / "ws"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "notes.txt: draft"
