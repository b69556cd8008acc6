"""`--backend exec:COMMAND`, mounted: `python3` here, `podman exec` into a container, `ssh` to an sshd."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from protocol.backends.container.podman.service import PodmanService
from protocol.backends.container.podman.spec import ContainerSpec
from protocol.testing import FilesystemContract, StreamingContract
from tests.container.conftest import attempt, control
from tests.container.sshd import NoSshdError, running_sshd
from tests.mount.conftest import check_invariants, complaints
from tests.mount.programs import succeeded, vfsd, wait_ended
from tests.support.contracts_on_mounts import OnMount
from tests.support.processes import children, running
from tests.support.unmounting import unmount_when_idle
from tests.support.verbs import check_a_range_is_reverted, check_conflicts_of_forks
from tests.support.waiting import wait_until
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_record

pytestmark = [pytest.mark.fuse, pytest.mark.extended]

PATIENCE_S = 60.0
LOST = "the helper is lost"


@dataclass(frozen=True, slots=True)
class End:
    """The other end of a command."""

    command: str
    directory: str
    shell: Callable[[str], bytes]  # runs a shell line there
    programs: Path | None = None  # for PATH
    is_far: bool = True  # the helper outlives the command

    def inside(self, line: str) -> bytes:
        return self.shell(f"cd {self.directory} && {line}")


def _shell(line: str) -> bytes:
    return subprocess.run(["sh", "-c", line], check=True, capture_output=True).stdout


@contextmanager
def _python_end(place: Path) -> Iterator[End]:
    yield End(shlex.quote(sys.executable), str(place / "there"), _shell, is_far=False)


@contextmanager
def _ssh_end(place: Path) -> Iterator[End]:
    try:
        with running_sshd(place / "sshd") as server:
            host, _, port = server.host.rpartition(":")
            command = f"ssh -p {port} {host} {shlex.quote(sys.executable)}"
            yield End(command, str(place / "over-ssh"), _shell, server.programs)
    except NoSshdError as error:
        pytest.skip(f"no sshd can be run here: {error}")


@contextmanager
def _podman_end(podman: PodmanService, image: str) -> Iterator[End]:
    container = podman.create(ContainerSpec(image, name="remote-end"))

    def shell(line: str) -> bytes:
        status, out, error = attempt(container, "/bin/sh", "-c", line)
        assert status == 0, (line, status, out, error)
        return out

    try:
        container.start()
        command = f"podman --url {podman.address.url} exec -i {container.name} python3"
        yield End(command, "/srv/work", shell)
    finally:
        container.remove()


@pytest.fixture(scope="module", params=["python3", "podman exec", "ssh"])
def shared_end(request: pytest.FixtureRequest, session_dir: str, no_leaks_of_the_session: None) -> Iterator[End]:
    # A selection of modules may set the fixture up more than once for a parameter.
    place = Path(tempfile.mkdtemp(prefix="remote-", dir=session_dir))
    with ExitStack() as stack:
        if request.param == "podman exec":
            podman = request.getfixturevalue("podman")
            yield stack.enter_context(_podman_end(podman, request.getfixturevalue("python_image")))
        else:
            yield stack.enter_context((_python_end if request.param == "python3" else _ssh_end)(place))


@pytest.fixture
def end(shared_end: End, workdir: Path) -> End:
    """The same end with a directory of the test's own, whatever tests ran there before."""
    return replace(shared_end, directory=f"{shared_end.directory}-{workdir.name}")


@contextmanager
def mounted(end: End, place: Path, *expected: str, **options: object) -> Iterator[Workspace]:
    with pytest.MonkeyPatch.context() as patch:
        if end.programs is not None:
            patch.setenv("PATH", f"{end.programs}:{os.environ['PATH']}")
        name = place.parent.name + "-" + place.name
        arguments = {"name": name, "workdir": end.directory, **options}
        with Workspace.mount(place, f"exec:{end.command}", **arguments) as workspace:  # type: ignore[arg-type]
            yield workspace
            check_invariants(workspace)
            unmount_when_idle(workspace)
    unexpected = [line for line in complaints(workspace.name) if not any(part in line for part in expected)]
    assert unexpected == []


@pytest.fixture
def workspace(end: End, workdir: Path) -> Iterator[Workspace]:
    with mounted(end, workdir / "m", LOST) as workspace:
        yield workspace


def test_both_ends_see_one_directory_and_its_snapshots(end: End, workspace: Workspace, root: Path) -> None:
    status = workspace.status()
    assert (status.remote, status.connected, status.container) == ("connected", True, None)
    (root / "d").mkdir()
    (root / "d" / "f").write_text("from here")
    (root / "link").symlink_to("d/f")
    assert end.inside("cat link") == b"from here"

    workspace.snapshot("one")
    end.inside("echo from there > d/g; rm d/f; chmod 750 d")
    assert (root / "d" / "g").read_text() == "from there\n"
    with (root / "d" / "g").open("ab", 0) as appending:
        end.inside("echo again >> d/g")
        appending.write(b"from here\n")
    assert end.inside("cat d/g") == (root / "d" / "g").read_bytes() == b"from there\nagain\nfrom here\n"
    assert {change.path for change in workspace.diff("one").changes} >= {"d/f", "d/g"}
    workspace.restore("one")
    assert end.inside("ls d; cat d/f") == b"f\nfrom here"

    for name in ("d/f", "link"):
        (root / name).unlink()
    (root / "d").rmdir()
    assert end.inside("ls -A") == b""


def test_a_range_is_reverted_and_conflicts_of_forks_are_found(workspace: Workspace, workdir: Path) -> None:
    check_a_range_is_reverted(workspace)
    check_conflicts_of_forks(workspace, workdir)


def command_of(workspace: Workspace) -> int:
    """The process that the daemon runs for its command."""
    pid = workspace.status().pid
    (child,) = children(pid)
    return child


def served_again(workspace: Workspace, times: int = 1) -> None:
    log = Path(log_path(workspace.name))
    wait_until(lambda: log.read_text().count("is running again and served") == times)


def test_a_command_that_ends_is_run_again_and_open_files_go_on(workspace: Workspace, root: Path) -> None:
    (root / "f").write_text("0123456789")
    with (root / "f").open("r+b", buffering=0) as file:
        assert file.read(5) == b"01234"
        for times in (1, 2):
            os.kill(command_of(workspace), signal.SIGKILL)
            served_again(workspace, times)
        assert file.read() == b"56789"
        file.write(b"!")
    assert (root / "f").read_text() == "0123456789!"
    (root / "f").unlink()


def test_requests_under_way_fail_with_eio_when_the_command_ends(workspace: Workspace, root: Path, end: End) -> None:
    pid = command_of(workspace)
    os.kill(pid, signal.SIGSTOP)
    failed: list[int] = []

    def ask() -> None:
        try:
            os.stat(root / "not cached")
        except OSError as error:
            failed.append(error.errno or 0)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
    # A request that the kernel sends after the command runs again is answered.
    assert set(failed) <= {errno.EIO, errno.ENOENT}
    served_again(workspace)
    with pytest.raises(FileNotFoundError):
        os.stat(root / "not cached")


def test_a_file_that_got_the_number_of_one_that_is_still_open_is_served(
    workspace: Workspace, root: Path, end: End
) -> None:
    (root / "f").write_text("mine")
    with (root / "f").open("rb", buffering=0) as before:
        pid = command_of(workspace)
        os.kill(pid, signal.SIGSTOP)
        end.inside("mv f other; mkdir f")  # as if "f" was removed, and the file system gave its number to "other"
        os.kill(pid, signal.SIGKILL)
        served_again(workspace)
        with (root / "other").open("r+") as after:
            assert after.read() == "mine"
            after.write("!")
        assert end.inside("cat other") == b"mine!"
        if end.is_far:
            assert before.read() == b"mine!", "the helper has the file open"
        else:
            with pytest.raises(OSError, match="Stale file handle"):
                before.read()
        (root / "other").unlink()
        (root / "f").rmdir()


def test_over_ssh_programs_go_on_after_deaths_cuts_and_upgrades(workdir: Path) -> None:
    """A program that tries again when it gets EIO loses nothing."""
    with _ssh_end(workdir) as end, mounted(end, workdir / "m", LOST, "its keeper starts another one") as workspace:
        root, stop, answered = Path(workspace.path), threading.Event(), 0
        errors: set[int | None] = set()

        def daemon() -> int:
            record = read_record(workspace.name)
            assert record is not None
            return record.pid

        def kill() -> None:
            pid = daemon()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: daemon() != pid, "a replacement")

        def cut() -> None:
            times = Path(log_path(workspace.name)).read_text().count("is running again and served")
            os.kill(command_of(workspace), signal.SIGKILL)
            served_again(workspace, times + 1)

        def write(file: int) -> None:
            nonlocal answered
            while not stop.is_set():
                try:
                    os.pwrite(file, b"%d\n" % answered, 0)
                    (root / f"d{answered}").mkdir(exist_ok=True)  # a mkdir that failed with EIO may have been made
                except OSError as error:
                    errors.add(error.errno)
                else:
                    answered += 1

        file = os.open(root / "nameless", os.O_CREAT | os.O_RDWR)
        (root / "nameless").unlink()
        thread = threading.Thread(target=write, args=[file])
        thread.start()
        try:
            for step in (kill, cut, workspace.upgrade, cut, kill):
                step()
                before = answered
                wait_until(lambda: answered > before + 1, "more changes")  # noqa: B023 (called at once)
        finally:
            stop.set()
            thread.join()
        assert errors <= {errno.EIO}
        assert os.read(file, 99) == b"%d\n" % (answered - 1)
        os.close(file)
        made = {f"d{number}" for number in range(answered)}
        assert set(os.listdir(root)) == set(end.inside("ls -A").decode().split()) == made
        for name in made:
            (root / name).rmdir()


def test_over_ssh_a_workspace_whose_daemon_and_keeper_were_killed_is_mounted_again(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mountpoint := workdir / "m").mkdir()
    name = f"{workdir.name}-m"
    (python := workdir / "python").symlink_to(os.path.realpath(sys.executable))
    with _ssh_end(workdir) as ssh_end:
        end = replace(ssh_end, command=ssh_end.command.replace(sys.executable, str(python)))
        monkeypatch.setenv("PATH", f"{end.programs}:{os.environ['PATH']}")
        options = ("--name", name, "--backend", f"exec:{end.command}", "--workdir", end.directory)
        succeeded(vfsd("mount", mountpoint, *options))
        (mountpoint / "f").write_text("kept")
        record = read_record(name)
        assert record is not None
        assert record.keeper is not None
        (ssh,), helpers = children(record.pid), running(python)
        for pid in (record.keeper, record.pid):
            os.kill(pid, signal.SIGKILL)
            wait_ended(pid)
        for helper in helpers:  # which would wait for another daemon for five minutes
            os.kill(helper, signal.SIGKILL)
        wait_ended(ssh)
        with mounted(end, mountpoint) as again:
            assert (mountpoint / "f").read_text() == "kept"
            assert "pid" in (again.status().keeper or "")


@pytest.fixture(scope="module")
def shared(shared_end: End, session_dir: str) -> Iterator[Path]:
    """One mount for all tests of the contract."""
    with mounted(shared_end, Path(session_dir, "work", "contract")) as workspace:
        yield Path(workspace.path)


class TestFilesystem(OnMount, FilesystemContract):
    pass


class TestStreaming(OnMount, StreamingContract):
    pass


# -- an end that goes away -------------------------------------------------------------------------------
def test_while_a_container_is_stopped_all_is_eio_and_vfsd_says_why(
    podman: PodmanService, python_image: str, workdir: Path
) -> None:
    with _podman_end(podman, python_image) as end, mounted(end, workdir / "m", LOST) as workspace:
        container = podman.container("remote-end")
        (Path(workspace.path) / "f").write_text("kept")
        control(container, "stop", timeout=0)
        wait_until(lambda: not workspace.status().connected)
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
            os.listdir(workspace.path)
        wait_until(lambda: "has ended with status" in (workspace.status().remote or ""))
        assert end.command in (workspace.status().remote or "")
        with pytest.raises(OSError, match="goes on running it until it answers"):
            workspace.snapshot()

        container.start()
        served_again(workspace)
        assert (Path(workspace.path) / "f").read_text() == "kept"


def test_a_mount_of_a_command_that_starts_no_python_is_refused_in_one_line(workdir: Path) -> None:
    with pytest.raises(OSError, match="has ended with status 255: no route"):
        Workspace.mount(workdir / "m", "exec:sh -c 'echo no route >&2; exit 255'")
    with pytest.raises(ValueError, match="No closing quotation"):
        Workspace.mount(workdir / "m", "exec:ssh 'open")
