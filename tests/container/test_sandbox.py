"""--sandbox: commands run in a container that sees the mount, live; --snapshot-each rewinds what they did."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.adapters.host import HostFilesystem
from protocol.backends.container.podman.service import PodmanService
from protocol.backends.container.podman.spec import ContainerState
from protocol.execution.executor import Executor
from protocol.tools import TOOLS, ToolContext
from tests.container.conftest import inside, shown
from tests.container.test_executor import container_of, where_of
from tests.mount.conftest import ENGINES, mounted, socket_of
from tests.support.exec_suite import Where, line_of, run, started
from tests.support.waiting import readable
from vfsd.client.connection import ControlClient
from vfsd.client.workspace import Workspace
from vfsd.operations.fs import FsExecParams, FsExecResult

SandboxIt = Callable[..., Workspace]


@pytest.fixture
def sandboxed(podman: PodmanService, busybox_image: str, workdir: Path) -> Iterator[SandboxIt]:
    """Mounts a workspace with a sandbox."""
    with contextlib.ExitStack() as stack:

        def mount_it(backend: str = "memory", *, image: str = busybox_image, **options: Any) -> Workspace:
            wanted = {"sandbox": f"image:{image}", "podman_url": podman.address.url, "engine": "native", **options}
            return stack.enter_context(mounted(workdir / "m", backend=backend, name=workdir.name, **wanted))

        yield mount_it


@pytest.fixture
def ending(podman: PodmanService, busybox_image: str, workdir: Path) -> Iterator[Workspace]:
    """A workspace with a sandbox, which the test itself ends."""
    (workdir / "m").mkdir()
    options: dict[str, Any] = {"sandbox": f"image:{busybox_image}", "podman_url": podman.address.url}
    workspace = Workspace.mount(workdir / "m", name=workdir.name, **options)
    yield workspace
    assert sandboxes(podman, workspace) == []
    assert not os.path.ismount(workspace.path)


def sandboxes(podman: PodmanService, workspace: Workspace) -> list[ContainerState]:
    return podman.labelled({"vfsd.workspace": workspace.name})


def fs_exec(workspace: Workspace, script: str, **options: Any) -> FsExecResult:
    with ControlClient(socket_of(workspace)) as client:
        result = client.call("fs.exec", FsExecParams(argv=["sh", "-c", script], **options))
        assert isinstance(result, FsExecResult)
        return result


@pytest.mark.extended
@pytest.mark.parametrize("served_by", ENGINES)
def test_host_and_sandbox_see_the_same_files_at_once(
    sandboxed: SandboxIt, podman: PodmanService, served_by: str
) -> None:
    workspace = sandboxed(engine=served_by)
    root = Path(workspace.path)
    where = where_of(workspace, container_of(podman, workspace))
    with started(where, "-i", "--", "sh") as shell:
        assert shell.stdin is not None

        def do(command: str) -> bytes:
            assert shell.stdin is not None
            shell.stdin.write(f"{command}\n".encode())
            shell.stdin.flush()
            return line_of(shell)

        for number in range(5):
            (root / "f").write_text(f"host {number}")
            assert do("cat f; echo") == f"host {number}\n".encode()
            do(f"echo sandbox {number} > f; echo done")
            assert (root / "f").read_text() == f"sandbox {number}\n"
        # A restore is seen by a shell that has been there all the time.
        workspace.snapshot("before")
        do("mkdir d; echo x > d/new; rm f; echo done")
        workspace.restore("before")
        assert do("echo $(ls) $(cat f)") == b"f sandbox 4\n"
        workspace.undo()
        assert do("echo $(ls) $(ls d)") == b"d new\n"
        shell.stdin.close()
        assert shell.wait(60) == 0


@pytest.mark.extended
def test_a_sandbox_sees_nothing_else_of_this_machine(sandboxed: SandboxIt, podman: PodmanService) -> None:
    workspace = sandboxed()
    done = fs_exec(workspace, "ls /; cat /proc/net/route | wc -l; ls -d " + workspace.path)
    assert workspace.path not in done.stdout.decode()
    assert done.stdout.decode().split()[-1] == "1"  # the heading: no network
    assert done.exit_status != 0
    (state,) = sandboxes(podman, workspace)
    whole = shown(podman.container(state.id))
    assert (whole["HostConfig"]["NetworkMode"], whole["HostConfig"]["PidsLimit"]) == ("none", 2048)
    assert workspace.status().commands == f"in a sandbox of {whole['ImageName']} (container {state.name})"


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["overlay", "host"])
def test_overlay_and_host_workspaces_have_sandboxes_too(sandboxed: SandboxIt, workdir: Path, kind: str) -> None:
    below = workdir / "below"
    below.mkdir()
    (below / "f").write_text("below\n")
    workspace = sandboxed(f"{kind}:{below}")
    done = fs_exec(workspace, "cat f; echo changed > f; echo new > g; pwd")
    assert done.stdout == b"below\n/workspace\n"
    assert (Path(workspace.path) / "g").read_text() == "new\n"
    assert (below / "f").read_text() == ("changed\n" if kind == "host" else "below\n")


@pytest.mark.extended
def test_a_python_project_is_tested_in_the_sandbox(
    sandboxed: SandboxIt, python_image: str, podman: PodmanService
) -> None:
    workspace = sandboxed(image=python_image, snapshot_each=True)
    root = Path(workspace.path)
    subprocess.run(["git", "init", "-q", root], check=True)
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (root / "test_calc.py").write_text(
        "import unittest\nfrom calc import add\n\nclass Adding(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(add(2, 2), 4)\n"
    )
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    subprocess.run(["git", "-C", root, "commit", "-qm", "first"], check=True)
    where = where_of(workspace, container_of(podman, workspace))
    failed = run(where, "--", "python3", "-m", "unittest", "-v")
    assert failed.returncode == 1
    assert b"AssertionError: 0 != 4" in failed.stderr
    assert (root / "__pycache__").is_dir()
    run(where, "--", "sed", "-i", "s/a - b/a + b  # fixed/", "calc.py")  # of another size: Python's cache goes by that
    assert run(where, "--", "python3", "-B", "-m", "unittest").returncode == 0
    changed = subprocess.run(["git", "-C", root, "diff", "--stat"], capture_output=True, text=True, check=True).stdout
    assert "calc.py" in changed
    workspace.restore("exec-1")
    assert run(where, "--", "python3", "-B", "-m", "unittest").returncode == 1


@pytest.mark.extended
def test_the_shell_and_python_tools_run_in_the_sandbox(sandboxed: SandboxIt, python_image: str) -> None:
    workspace = sandboxed(image=python_image)
    assert isinstance(workspace.executor, Executor)
    context = ToolContext(HostFilesystem(workspace.path), executor=workspace.executor)
    TOOLS["write_file"].call({"path": "src/f.txt", "content": "hello"}, context)
    shell = TOOLS["shell"].call({"command": "cat f.txt; pwd; exit 3", "cwd": "src"}, context)
    assert (shell.stdout, shell.exit_status) == ("hello/workspace/src\n", 3)
    python = TOOLS["python"].call({"code": "open('made', 'w').write('x'); print(6 * 7)"}, context)
    assert (python.stdout, python.exit_status) == ("42\n", 0)
    assert TOOLS["read_file"].call({"path": "made"}, context).content == "x"
    with pytest.raises(FileNotFoundError):
        workspace.executor.run(["no-such-program"])


@pytest.mark.extended
def test_memory_beyond_its_limit_is_the_commands_loss_alone(sandboxed: SandboxIt, python_image: str) -> None:
    workspace = sandboxed(image=python_image, memory_bytes=96 << 20)
    take = "import sys; taken = bytearray(int(sys.argv[1]) << 20); print(len(taken))"
    assert workspace.executor.run(["python3", "-c", take, "16"]).exit_status == 0
    lost = workspace.executor.run(["python3", "-c", take, "400"])
    assert (lost.exit_status, lost.stdout) == (137, b"")
    assert workspace.executor.run(["echo", "fine"]).stdout == b"fine\n"


# -- its life -----------------------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_running_command_keeps_a_workspace_from_being_unmounted(ending: Workspace, podman: PodmanService) -> None:
    workspace = ending
    where = where_of(workspace, container_of(podman, workspace))
    with started(where, "--", "sh", "-c", "echo ready; exec sleep 1000") as client:
        assert line_of(client) == b"ready\n"
        with pytest.raises(OSError, match="a command runs in the sandbox"):
            workspace.unmount()
        assert fs_exec(workspace, "echo still here").stdout == b"still here\n"
        workspace.unmount(lazy=True)
        assert client.wait(60) != 0


@pytest.mark.extended
def test_who_holds_the_mount_here_keeps_the_sandbox_as_it_is(ending: Workspace, podman: PodmanService) -> None:
    workspace = ending
    fs_exec(workspace, "echo installed > /root/tool")
    with open(Path(workspace.path) / "open", "w"):
        with pytest.raises(OSError, match="busy"):
            workspace.unmount()
        assert fs_exec(workspace, "cat /root/tool").stdout == b"installed\n"
    workspace.unmount()


@pytest.mark.extended
@pytest.mark.parametrize("how", ["umount", "SIGTERM"])
def test_however_it_ends_the_sandbox_goes_with_the_workspace(ending: Workspace, how: str) -> None:
    handle = os.pidfd_open(ending.pid)
    try:
        if how == "umount":
            subprocess.run(["fusermount3", "-u", ending.path], check=True)
        else:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        assert readable(handle, 60), "the daemon did not end"
    finally:
        os.close(handle)


def test_a_sandbox_that_could_not_be_removed_is_removed_by_the_next_attempt(
    podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    (workdir / "m").mkdir()
    socket = workdir / "podman.sock"
    socket.symlink_to(podman.address.path)
    options: dict[str, Any] = {"sandbox": f"image:{busybox_image}", "podman_url": f"unix://{socket}"}
    workspace = Workspace.mount(workdir / "m", name=workdir.name, **options)
    socket.unlink()
    with pytest.raises(OSError, match="no Podman service"):
        workspace.unmount()
    socket.symlink_to(podman.address.path)
    workspace.unmount()
    assert sandboxes(podman, workspace) == []


@pytest.mark.extended
def test_a_sandbox_that_was_removed_is_made_again(sandboxed: SandboxIt, podman: PodmanService) -> None:
    workspace = sandboxed()
    fs_exec(workspace, "echo text > f")
    container_of(podman, workspace).remove()
    assert fs_exec(workspace, "cat f").stdout == b"text\n"
    container_of(podman, workspace).kill()
    assert fs_exec(workspace, "cat f").stdout == b"text\n"
    assert len(sandboxes(podman, workspace)) == 1


@pytest.mark.extended
def test_the_next_daemon_removes_the_sandbox_of_one_that_was_killed(
    podman: PodmanService, busybox_image: str, workdir: Path
) -> None:
    (workdir / "m").mkdir()
    options: dict[str, Any] = {"sandbox": f"image:{busybox_image}", "podman_url": podman.address.url}
    first = Workspace.mount(workdir / "m", name=workdir.name, **options)
    left = container_of(podman, first)
    where = where_of(first, left)
    with started(where, "--", "sh", "-c", "echo ready; exec sleep 1000") as client:
        assert line_of(client) == b"ready\n"
        os.kill(first.pid, signal.SIGKILL)
        assert client.wait(60) == 125
    with Workspace.mount(workdir / "m", name=workdir.name, **options) as second:
        (state,) = sandboxes(podman, second)
        assert state.id != left.id
        assert fs_exec(second, "ls").stdout == b""


# -- what is said ---------------------------------------------------------------------------------------------
@pytest.mark.fuse
def test_a_sandbox_that_cannot_be_had_fails_the_mount_and_leaves_nothing(workdir: Path) -> None:
    (workdir / "m").mkdir()
    with pytest.raises(OSError, match="no Podman service"):
        Workspace.mount(workdir / "m", name=workdir.name, sandbox="image:x", podman_url=f"unix://{workdir}/none.sock")
    with pytest.raises(OSError, match="needs a Podman on this machine"):
        Workspace.mount(workdir / "m", name=workdir.name, sandbox="image:x", podman_url="tcp://127.0.0.1:1")
    assert not os.path.ismount(workdir / "m")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sandbox": "busybox"}, "image:REF"),
        ({"sandbox": "image:x", "exec_on_host": True}, "exclude each other"),
        ({"sandbox": "image:x", "backend": "image:y"}, "sandbox goes with memory"),
        ({"pids_limit": 10}, "pids_limit"),
        ({"memory_bytes": -1, "sandbox": "image:x"}, "memory_bytes must be positive"),
        ({"workdir": "/x", "sandbox": "image:x"}, "workdir"),
    ],
)
def test_options_that_make_no_sense_are_refused(workdir: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Workspace.mount(workdir / "m", **options)


@pytest.mark.extended
def test_another_user_of_the_container_needs_allow_other(sandboxed: SandboxIt, podman: PodmanService) -> None:
    workspace = sandboxed(allow_other=True)
    where: Where = where_of(workspace, container_of(podman, workspace))
    inside(container_of(podman, workspace), "chmod 1777 /workspace")
    assert run(where, "--user", "dev", "--", "sh", "-c", "echo mine > f").returncode == 0
    assert (Path(workspace.path) / "f").stat().st_uid == 1000
