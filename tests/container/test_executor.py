"""Commands in containers: by the executor, by `vfsd exec`, and those of a RemoteFilesystem."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio

from protocol import RemoteFilesystem
from protocol.backends.container.exec.container_processes import ContainerProcesses
from protocol.backends.container.exec.runner import ContainerCommandRunner
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.workspace import AgentTransport
from protocol.execution.executor import Command, ExecResult
from protocol.execution.runner import BlockingExecutor
from protocol.testing import FilesystemContract
from tests.container.conftest import BUSYBOX, StartContainer, control, inside, running_container
from tests.mount.conftest import mounted, socket_of
from tests.support.exec_suite import ExecSuite, Where, line_of, run, started
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

SLEEPERS = 'ps -o args | grep "[s]leep [1-9]000" || true'


def prepared(container: Container) -> Container:
    inside(container, "mkdir -p /workspace/sub && chown dev /workspace && echo text > /workspace/file")
    return container


@pytest.fixture(scope="module")
def container(podman: PodmanService, busybox_image: str) -> Iterator[Container]:
    """One for all tests that leave it as it was."""
    with running_container(podman, busybox_image, pids_limit=200) as container:
        yield prepared(container)


@pytest.fixture
def own_container(start_container: StartContainer) -> Container:
    return prepared(start_container(pids_limit=200))


@pytest.fixture
def executor(container: Container) -> BlockingExecutor:
    return BlockingExecutor(ContainerCommandRunner(lambda: container))


@pytest.fixture(params=["from outside", "from inside"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How processes are found: through this machine's /proc, or as over a service of another machine."""
    if request.param == "from inside":
        monkeypatch.setattr(ContainerProcesses, "is_here", False)
    return str(request.param)


def sleepers(container: Container) -> list[str]:
    return inside(container, SLEEPERS).decode().splitlines()


@pytest.mark.extended
@pytest.mark.parametrize("size", [100, 200_000])
@pytest.mark.parametrize("script", ["exec <&-", "head -c 5 >/dev/null"])
def test_input_that_is_not_read_costs_no_output(executor: BlockingExecutor, script: str, size: int) -> None:
    for _ in range(5):
        done = executor.run(["sh", "-c", f"{script}; echo done; echo end >&2; exit 3"], stdin=b"x" * size)
        assert (done.exit_status, done.stdout, done.stderr) == (3, b"done\n", b"end\n")


def test_without_a_shell_a_container_runs_commands_all_the_same(own_container: Container) -> None:
    executor = BlockingExecutor(ContainerCommandRunner(lambda: own_container))
    inside(own_container, "rm /bin/sh")
    assert executor.run(["cat"], stdin=b"input").stdout == b"input"
    assert executor.run(["echo", "x"]).stdout == b"x\n"


def test_with_input_too_it_is_the_program_that_runs_with_its_own_errors(executor: BlockingExecutor) -> None:
    binary = bytes(range(256)) * 400
    done = executor.run(["sh", "-c", "tee /dev/stderr; printf '\\0'; kill -9 $$"], stdin=binary)
    assert (done.exit_status, done.stdout, done.stderr) == (137, binary + b"\0", binary)
    assert executor.run(["printf", "%s|", "a b", "", "*"], stdin=b"x").stdout == b"a b||*|"
    with pytest.raises(FileNotFoundError) as caught:
        executor.run(["no-such-program"], stdin=b"x")
    assert caught.value.filename == "no-such-program"


def test_a_signal_that_ends_a_command_is_told_as_the_runtime_does(executor: BlockingExecutor) -> None:
    assert executor.run(["sh", "-c", "kill -TERM $$"]).exit_status == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("argv", "cwd", "code", "about"),
    [
        (["no-such-program"], ".", errno.ENOENT, "no-such-program"),
        (["/workspace/file"], ".", errno.EACCES, "/workspace/file"),
        (["true"], "missing", errno.ENOENT, "/workspace/missing"),
        (["true"], "file", errno.ENOTDIR, "/workspace/file"),
        ([], ".", errno.EINVAL, "no command"),
    ],
)
def test_a_command_that_cannot_be_started_raises(
    executor: BlockingExecutor, argv: list[str], cwd: str, code: int, about: str
) -> None:
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        executor.run(argv, cwd=cwd)
    assert (caught.value.errno, caught.value.filename) == (code, about)


def test_what_only_looks_like_a_refusal_is_the_commands_own(executor: BlockingExecutor) -> None:
    done = executor.run(["sh", "-c", "echo 'Error: an OCI thing' >&2; exit 1"])
    assert (done.exit_status, done.stderr) == (1, b"Error: an OCI thing\n")
    assert executor.run(["sh", "-c", "no-such-program; exit 127"]).exit_status == 127


ESCAPING = "setsid sh -c 'sleep 1000 & exec sleep 2000' & (sleep 3000 &) ; sleep 0.2"


@pytest.mark.extended
@pytest.mark.parametrize("ending", ["", "; sleep 4000"], ids=["it ended", "its time was over"])
def test_nothing_is_left_of_a_command_not_even_in_other_sessions(
    executor: BlockingExecutor, container: Container, way: str, ending: str
) -> None:
    done = executor.run(["sh", "-c", ESCAPING + ending], timeout_s=2 if ending else 60)
    assert (done.timed_out, done.exit_status) == ((True, -signal.SIGKILL) if ending else (False, 0))
    assert sleepers(container) == []


@pytest.mark.extended
def test_another_command_and_the_containers_own_processes_stay(own_container: Container, way: str) -> None:
    container = own_container
    executor = BlockingExecutor(ContainerCommandRunner(lambda: container))
    inside(container, "setsid sleep 9000 >/dev/null 2>&1 &")
    thread = threading.Thread(target=executor.run, args=(["sh", "-c", "sleep 8000"],))
    thread.start()
    try:
        executor.run(["sh", "-c", f"until {SLEEPERS} | grep -q 8000; do :; done; sleep 1000 &"])
        assert sorted(sleepers(container)) == ["sleep 8000", "sleep 9000"]
    finally:
        inside(container, "ps -o pid,args | grep '[s]leep 8000' | while read pid args; do kill $pid; done")
        thread.join()
    assert sleepers(container) == ["sleep 9000"]


@pytest.mark.extended
def test_in_a_container_of_ours_a_process_that_throws_off_its_mark_is_found_too(
    own_container: Container, way: str
) -> None:
    executor = BlockingExecutor(ContainerCommandRunner(lambda: own_container, owned=True))
    executor.run(["sh", "-c", "env -i setsid sh -c '(env -i setsid sleep 1000 &)'; sleep 0.2"])
    assert sleepers(own_container) == []
    assert inside(own_container, "ps -o args").splitlines().count(b"sleep 86400") == 1  # its first process is at work


@pytest.mark.extended
def test_the_time_of_a_command_is_over_also_in_a_container_that_is_paused(own_container: Container) -> None:
    executor = BlockingExecutor(ContainerCommandRunner(lambda: own_container))
    done: list[ExecResult] = []
    argv = ["sh", "-c", "echo said; exec sleep 1000"]
    thread = threading.Thread(target=lambda: done.append(executor.run(argv, timeout_s=3)))
    thread.start()
    while not sleepers(own_container):
        pass
    control(own_container, "pause")
    try:
        thread.join(120)
        assert [(one.timed_out, one.stdout) for one in done] == [(True, b"said\n")]
        for stdin in (b"", b"x"):
            with pytest.raises(OSError, match=r"podman --url unix://.* unpause"):
                executor.run(["true"], stdin=stdin)
    finally:
        control(own_container, "unpause")
    thread.join(120)
    assert executor.run(["echo", "fine"]).stdout == b"fine\n"
    assert sleepers(own_container) == []


def test_a_command_whose_container_is_removed_was_killed(own_container: Container) -> None:
    executor = BlockingExecutor(ContainerCommandRunner(lambda: own_container))
    done: list[ExecResult] = []
    thread = threading.Thread(target=lambda: done.append(executor.run(["sleep", "1000"])))
    thread.start()
    while not sleepers(own_container):
        pass
    own_container.remove()
    thread.join(120)
    assert [(one.exit_status, one.timed_out) for one in done] == [(128 + signal.SIGKILL, False)]


def test_a_signal_reaches_the_command_and_what_it_runs(container: Container, way: str) -> None:
    place = ContainerCommandRunner(lambda: container)
    script = "trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.1; done"

    async def main() -> tuple[bytes, int]:
        said = b""
        async with place.started(Command(["sh", "-c", script])) as process:
            async for stream, data in process.output:
                said += data if stream == "stdout" else b""  # on the other the shell tells how `sleep` ended
                if data == b"ready\n":
                    await process.signal(signal.SIGUSR1)
            return said, await process.wait()

    assert trio.run(main) == (b"ready\ngot\n", 5)


BOMB = "bomb() { bomb | bomb & }; bomb & exec sleep 1000"  # one fork, then none: it cannot fail


@pytest.mark.extended
def test_a_fork_bomb_ends_at_its_time(own_container: Container, way: str) -> None:
    """From inside there is no process left to do it with: the container of ours is restarted."""
    executor = BlockingExecutor(ContainerCommandRunner(lambda: own_container, owned=True))
    done = executor.run(["sh", "-c", BOMB], timeout_s=2)
    assert done.timed_out
    left = inside(own_container, "ps -o args | grep -c '[b]omb' || true")
    assert left == b"0\n"
    assert executor.run(["echo", "fine"]).stdout == b"fine\n"


def monitors_of(container: Container) -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                count += words[0].endswith(b"conmon") and container.id.encode() in words
    return count


def wait_for_monitors(container: Container, most: int) -> None:
    """Return when at most so many are left: each ends after its command; pytest's limit ends the test if one stays."""
    while monitors_of(container) > most:
        time.sleep(0.1)


def test_podmans_monitors_of_commands_that_have_ended_do_not_pile_up(own_container: Container) -> None:
    executor = BlockingExecutor(ContainerCommandRunner(lambda: own_container))
    before = monitors_of(own_container)  # `own_container` has itself run a command in there
    for _ in range(6):
        assert executor.run(["true"]).exit_status == 0
    wait_for_monitors(own_container, before)


@pytest.mark.parametrize("image", ["busybox_image", "python_image"])  # no Python there; a helper that refuses
def test_an_agent_that_cannot_start_leaves_no_monitor_of_podmans(
    start_container: StartContainer, request: pytest.FixtureRequest, image: str
) -> None:
    container = start_container(request.getfixturevalue(image))
    with pytest.raises(OSError, match=r"no Python 3|not a directory"):
        AgentTransport(container.service, "/etc/passwd").probe(container.inspect())
    wait_for_monitors(container, 1)  # the container's own


_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def python_container(podman: PodmanService, python_image: str) -> Iterator[Container]:
    with running_container(podman, python_image, name="remote-filesystem") as container:
        inside(container, "mkdir -p /workspace /tmp")
        yield container
        assert inside(container, "ls /tmp") == b"", "a copy of the program is left"


@pytest.fixture
def remote(python_container: Container) -> Iterator[RemoteFilesystem]:
    directory = f"d{next(_numbers)}"
    inside(python_container, f"mkdir /workspace/{directory}")
    with RemoteFilesystem(BlockingExecutor(ContainerCommandRunner(lambda: python_container)), directory) as remote:
        yield remote


@pytest.mark.extended
def test_files_go_into_the_container_and_back(remote: RemoteFilesystem, python_container: Container) -> None:
    content = bytes(range(256)) * 3000
    remote.write("src/a.py", "print(1)\n# needle\n")
    remote.write_bytes("large", content)

    assert (
        inside(python_container, f"cd {remote.root} && cat src/a.py && wc -c < large")
        == b"print(1)\n# needle\n768000\n"
    )
    inside(python_container, f"echo more >> {remote.root}/src/a.py")
    assert remote.read("src/a.py").total_lines == 3
    assert remote.read_bytes("large").content == content
    assert [match.line_number for match in remote.grep("need.e", glob="*.py")] == [2]
    assert remote.delete("src", recursive=True) == 2


@pytest.mark.long
class TestFilesystem(FilesystemContract):
    @pytest.fixture
    def filesystem(self, remote: RemoteFilesystem) -> RemoteFilesystem:
        return remote


# Each byte that a word can have, with newlines at the end, which a shell's $() drops.
RAW = os.fsdecode(bytes(range(1, 256)) + b"\n\n")


@pytest.fixture
def raw_container(start_container: StartContainer) -> Container:
    raw_container = start_container()
    inside(raw_container, "mkdir -p /workspace")
    return raw_container


@pytest.fixture
def raw_executor(raw_container: Container) -> BlockingExecutor:
    return BlockingExecutor(ContainerCommandRunner(lambda: raw_container, "/workspace"))


@pytest.mark.extended
@pytest.mark.parametrize("stdin", [b"", b"input"], ids=["without input", "with input"])
def test_words_and_variables_arrive_with_every_byte(raw_executor: BlockingExecutor, stdin: bytes) -> None:
    script = 'printf %s "$1" "$PLAIN" "$RAW"; cat'
    env = {"PLAIN": "ä", "RAW": RAW}

    result = raw_executor.run(["sh", "-c", script, "sh", RAW], env=env, stdin=stdin)

    assert (result.exit_status, result.stderr) == (0, b"")
    assert result.stdout == os.fsencode(RAW) + "ä".encode() + os.fsencode(RAW) + stdin
    assert raw_executor.run(["printf", "%s", os.fsdecode(b"\xff")]).stdout == b"\xff"
    assert raw_executor.run(["sh", "-c", "exit 7", RAW]).exit_status == 7


@pytest.mark.extended
@pytest.mark.parametrize("stdin", [b"", b"input"], ids=["without input", "with input"])
def test_a_directory_and_a_program_may_have_any_name(raw_executor: BlockingExecutor, stdin: bytes) -> None:
    name = os.fsdecode(b"d\xff")
    raw_executor.run(["mkdir", name])

    assert raw_executor.run(["pwd"], cwd=name, stdin=stdin).stdout == b"/workspace/d\xff\n"
    raw_executor.run(["cp", "/bin/busybox", os.fsdecode(b"d\xff/echo")])
    assert raw_executor.run([os.fsdecode(b"./d\xff/echo"), "x"], stdin=stdin).stdout == b"x\n"


@pytest.mark.extended
@pytest.mark.parametrize("stdin", [b"", b"input"], ids=["without input", "with input"])
def test_what_is_missing_is_named(raw_executor: BlockingExecutor, stdin: bytes) -> None:
    program = os.fsdecode(b"no-\xff")
    with pytest.raises(FileNotFoundError) as caught:
        raw_executor.run([program], stdin=stdin)
    assert caught.value.filename == program
    with pytest.raises(FileNotFoundError) as caught:
        raw_executor.run(["pwd"], cwd=program, stdin=stdin)
    assert caught.value.filename == f"/workspace/{program}"


@pytest.mark.extended
@pytest.mark.parametrize(
    "env", [{"A-B": os.fsdecode(b"\xff")}, {os.fsdecode(b"N\xff"): "x"}], ids=["no name for a shell", "raw name"]
)
def test_a_variable_that_no_shell_can_set_is_refused(raw_executor: BlockingExecutor, env: Mapping[str, str]) -> None:
    with pytest.raises(OSError, match="needs a name of letters") as caught:
        raw_executor.run(["true"], env=env)
    assert caught.value.errno == errno.EILSEQ


def test_without_a_shell_such_a_command_is_refused(raw_container: Container, raw_executor: BlockingExecutor) -> None:
    inside(raw_container, "rm /bin/sh")
    with pytest.raises(OSError, match="started through /bin/sh") as caught:
        raw_executor.run(["/bin/echo", RAW])
    assert caught.value.errno == errno.EILSEQ
    assert raw_executor.run(["/bin/echo", "plain"]).stdout == b"plain\n"


def where_of(workspace: Workspace, container: Container, root: str = "/workspace") -> Where:
    def running(text: str) -> int:
        lines = inside(container, "ps -o args").decode().splitlines()
        return sum(text in line for line in lines)

    return Where(workspace.name, socket_of(workspace), Path(workspace.path), root, running)


def container_of(podman: PodmanService, workspace: Workspace) -> Container:
    """The one that its daemon has made."""
    (state,) = podman.labelled({"vfsd.workspace": workspace.name})
    return Container(podman, state.id, state.name)


def one_for_all(session_dir: str, podman: PodmanService, **options: Any) -> Iterator[Where]:
    """A workspace for a class of tests."""
    place = Path(tempfile.mkdtemp(dir=f"{session_dir}/work", prefix="x"))
    with mounted(place / "m", name=place.name, podman_url=podman.address.url, **options) as workspace:
        yield where_of(workspace, container_of(podman, workspace))


class TestInASandbox(ExecSuite):
    """Commands in a sandbox of a memory workspace."""

    options: ClassVar[dict[str, Any]] = {"sandbox": f"image:{BUSYBOX}"}

    @pytest.fixture(scope="class")
    @classmethod
    def where(cls, podman: PodmanService, busybox_image: str, session_dir: str) -> Iterator[Where]:
        yield from one_for_all(session_dir, podman, **cls.options)


@pytest.mark.long
class TestInASandboxOnPyfuse3(TestInASandbox):
    """The same by the other engine."""

    options: ClassVar[dict[str, Any]] = {"sandbox": f"image:{BUSYBOX}", "engine": "pyfuse3"}


@pytest.mark.long
class TestInAnImagesContainer(TestInASandbox):
    """Commands in the container of image:REF."""

    options: ClassVar[dict[str, Any]] = {"backend": f"image:{BUSYBOX}", "cache_timeout_s": 0}


@pytest.mark.extended
@pytest.mark.parametrize("keeper", [False, True], ids=["next mount", "keeper"])
def test_what_a_killed_daemon_left_in_a_container_that_stays_is_ended_by_the_next(
    start_container: StartContainer, podman: PodmanService, workdir: Path, keeper: bool
) -> None:
    container = start_container()
    inside(container, "mkdir /workspace; setsid sleep 9000 > /dev/null 2>&1 &")
    (workdir / "m").mkdir()
    options: dict[str, Any] = {"name": workdir.name, "podman_url": podman.address.url, "keeper": keeper}
    first = Workspace.mount(workdir / "m", f"container:{container.name}", **options)
    where = where_of(first, container)
    with started(where, "--", "sh", "-c", "setsid sleep 7005 & echo ready; exec sleep 7005") as client:
        assert line_of(client) == b"ready\n"
        os.kill(first.pid, signal.SIGKILL)
        assert client.wait(60) == 125
    assert keeper or where.running("sleep 7005") > 0
    if keeper:
        wait_until(lambda: Workspace.attach(workdir.name).pid != first.pid, "a replacement")
        following = Workspace.attach(workdir.name)
    else:
        following = Workspace.mount(workdir / "m", f"container:{container.name}", **options)
    with contextlib.ExitStack() as stack:
        stack.callback(following.unmount)
        wait_until(lambda: where.running("sleep 7005") == 0, "the end of the command")
        assert run(where, "--", "true").returncode == 0
        assert (where.running("sleep 7005"), where.running("sleep 9000")) == (0, 1)


@pytest.mark.extended
def test_commands_of_a_container_workspace_run_in_that_container(
    start_container: StartContainer, podman: PodmanService, workdir: Path
) -> None:
    container = start_container()
    inside(container, "mkdir -p /srv/app && echo here > /srv/app/f && chown dev /srv/app")
    options: dict[str, Any] = {"podman_url": podman.address.url, "workdir": "/srv/app", "cache_timeout_s": 0}
    (workdir / "m").mkdir()
    # Not `mounted`: the log has a warning of the container's stop.
    with Workspace.mount(workdir / "m", f"container:{container.name}", name=workdir.name, **options) as workspace:
        where = where_of(workspace, container, "/srv/app")
        done = run(where, "--", "sh", "-c", "cat f; hostname; pwd; echo new > made")
        assert done.stdout.decode().split() == ["here", container.id[:12], "/srv/app"]
        assert (Path(workspace.path) / "made").read_text() == "new\n"
        assert run(where, "--user", "dev", "--", "id", "-un").stdout == b"dev\n"
        inside(container, "setsid sleep 9000 > /dev/null 2>&1 &")
        run(where, "--", "sh", "-c", "setsid sleep 7004 &")
        assert (where.running("sleep 7004"), where.running("sleep 9000")) == (0, 1)
        container.kill()
        stopped = run(where, "--", "true")
        assert stopped.returncode == 125
        assert f"podman --url {container.service.address} start {container.name}" in stopped.stderr.decode()
        container.start()
        assert run(where, "--", "cat", "made").stdout == b"new\n"
