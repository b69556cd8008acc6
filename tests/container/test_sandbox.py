"""--sandbox: commands run in a container that sees the mount, live; --snapshot-each rewinds what they did."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
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
from tests.container.test_exec import container_of, where_of
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
def test_many_commands_can_be_taken_back_one_by_one(sandboxed: SandboxIt, runs_long: bool) -> None:
    count = 50 if runs_long else 12
    workspace = sandboxed(snapshot_each=True)
    root = Path(workspace.path)
    states: dict[str, dict[str, bytes]] = {}

    def content() -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    for number in range(count):
        script = f"echo {number} > f{number % 7}; mkdir -p d{number % 5}; echo {number} >> d{number % 5}/log"
        done = fs_exec(workspace, script + (f"; rm -f f{(number + 3) % 7}" if number % 3 else ""))
        assert done.exit_status == 0
        assert done.snapshot == f"exec-{number + 1}"
        states[done.snapshot] = content()
    assert len({str(state) for state in states.values()}) == count
    for number, (name, state) in enumerate(reversed(states.items())):
        workspace.restore(name)
        assert content() == state, name
        if number % 10 == 0:
            seen = fs_exec(workspace, "cat $(find . -type f | sort)").stdout
            assert seen == b"".join(state[path] for path in sorted(state, key=lambda path: f"./{path}"))
    tags = {snapshot.name: snapshot.tag for snapshot in workspace.snapshots()}
    assert (tags["exec-1"] or "").startswith("sh -c 'echo 0 > f0")


@pytest.mark.extended
def test_a_fork_has_a_sandbox_of_its_own(sandboxed: SandboxIt, podman: PodmanService, workdir: Path) -> None:
    source = sandboxed()
    fs_exec(source, "echo source > file")
    with source.fork(workdir / "fork", name=f"{workdir.name}-fork") as fork:
        (of_source,), (of_fork,) = sandboxes(podman, source), sandboxes(podman, fork)
        assert of_source.id != of_fork.id
        assert fs_exec(fork, "cat file; echo fork > file").stdout == b"source\n"
        assert fs_exec(source, "cat file").stdout == b"source\n"
        fork.unmount()
        assert sandboxes(podman, fork) == []
    assert fs_exec(source, "cat file").stdout == b"source\n"


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


def bring_git(root: Path) -> list[str]:
    """Put this machine's git into the workspace, for an image that has none; options of `vfsd exec` that use it."""
    git = shutil.which("git")
    assert git is not None
    shown = subprocess.run(["ldd", git], capture_output=True, text=True, check=True).stdout
    (root / "tools").mkdir()
    for path in [git, *re.findall(r"=> (/\S+) \(0x", shown)]:
        shutil.copy(path, root / "tools")
    for name in ("git-upload-pack", "git-receive-pack"):
        (root / "tools" / name).symlink_to("git")
    variables = {
        "PATH": "/workspace/tools:/usr/bin:/bin",
        "GIT_EXEC_PATH": "/workspace/tools",
        "LD_LIBRARY_PATH": "/workspace/tools",
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }
    return [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]


@pytest.mark.extended
def test_a_repository_is_cloned_and_tested_in_the_sandbox(
    sandboxed: SandboxIt, python_image: str, podman: PodmanService, workdir: Path
) -> None:
    workspace = sandboxed(image=python_image)
    root = Path(workspace.path)
    where = where_of(workspace, container_of(podman, workspace))
    git = bring_git(root)
    origin = root / "origin"
    subprocess.run(["git", "init", "-q", origin], check=True)
    for number in range(60):
        (origin / f"test_{number}.py").write_text(
            f"import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual({number}, {number})\n"
        )
    subprocess.run(["git", "-C", origin, "add", "."], check=True)
    subprocess.run(["git", "-C", origin, "commit", "-qm", "first"], check=True)
    cloned = run(where, *git, "--", "git", "clone", "-q", "--no-local", "/workspace/origin", "/workspace/clone")
    assert (cloned.returncode, cloned.stdout) == (0, b""), cloned.stderr
    tested = run(where, "--cwd", "clone", "--", "python3", "-m", "unittest", "discover", "-p", "test_*.py")
    assert tested.returncode == 0
    assert b"Ran 60 tests" in tested.stderr
    # What was written in there is a repository here, and the other way round.
    status = subprocess.run(["git", "-C", root / "clone", "status", "-s"], capture_output=True, text=True, check=True)
    assert status.stdout == "?? __pycache__/\n"
    (root / "clone" / "new").write_text("from here")
    assert run(where, *git, "--cwd", "clone", "--", "git", "status", "-s", "new").stdout == b"?? new\n"


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


# A shell gives up when it cannot fork; this does not.
BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.05)
"""


@pytest.mark.extended
def test_a_fork_bomb_stays_below_its_limit_and_ends_at_its_time(
    sandboxed: SandboxIt, python_image: str, podman: PodmanService
) -> None:
    workspace = sandboxed(image=python_image, pids_limit=80)
    root = Path(workspace.path)
    where = where_of(workspace, container_of(podman, workspace))
    with started(where, "--timeout", "4", "--", "python3", "-c", BOMB) as client:
        most = 0
        while client.poll() is None:
            most = max(most, processes_in(podman, workspace))
            (root / "f").write_text("the mount answers")  # and so does the daemon:
            assert workspace.status().files == 1
        assert client.returncode == 124
    assert 40 < most <= 81
    assert fs_exec(workspace, "cat f").stdout == b"the mount answers"
    assert where.running("os.fork") == 0


@pytest.mark.extended
def test_memory_beyond_its_limit_is_the_commands_loss_alone(sandboxed: SandboxIt, python_image: str) -> None:
    workspace = sandboxed(image=python_image, memory_bytes=96 << 20)
    take = "import sys; taken = bytearray(int(sys.argv[1]) << 20); print(len(taken))"
    assert workspace.executor.run(["python3", "-c", take, "16"]).exit_status == 0
    lost = workspace.executor.run(["python3", "-c", take, "400"])
    assert (lost.exit_status, lost.stdout) == (137, b"")
    assert workspace.executor.run(["echo", "fine"]).stdout == b"fine\n"


def processes_in(podman: PodmanService, workspace: Workspace) -> int:
    """How many processes are in the sandbox, as this machine sees them."""
    (state,) = sandboxes(podman, workspace)
    try:
        namespace = os.readlink(f"/proc/{state.pid}/ns/pid")
    except OSError:
        return 0
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/{name}/ns/pid") == namespace
    return count


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
