"""The life of a daemon, through the real command line: start, failed start, signals, unmount, sudden death."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.mount.programs import VFSD, Program, failed, left_behind, log_of, succeeded, vfsd, wait_ended, wait_logged
from tests.support.leaks import mounts
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import socket_dir, socket_path

MANIFEST = '{"version": "1", "created_at": "2020-01-01T00:00:00Z", "file_count": 1, "total_bytes": 1}'
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MountCli = Callable[..., "Mounted"]


class Mounted:
    """What `vfsd mount --json` said."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.name: str = said["name"]
        self.path = Path(said["mountpoint"])
        self.pid: int = said["pid"]
        self.recovered: str | None = said["recovered"]

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def die(self) -> None:
        """The daemon's sudden death."""
        self.kill(signal.SIGKILL)
        wait_ended(self.pid)


def is_mounted(path: Path) -> bool:
    """Asks no daemon."""
    return str(path) in {mount.mountpoint for mount in mounts()}


def complaints(name: str) -> list[str]:
    return [line for line in log_of(name).splitlines() if " warning " in line or " error " in line]


@pytest.fixture
def place(workdir: Path) -> Path:
    path = workdir / "work"
    path.mkdir()
    return path


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_mount_whose_answer_cannot_be_written_says_that_it_is_mounted(place: Path, options: tuple[str, ...]) -> None:
    command = [*VFSD, "mount", str(place), "--name", "unsaid", *options]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    try:
        assert is_mounted(place)
        assert done.returncode == 1
        assert done.stderr.decode() == (
            "vfsd: error: cannot write to standard output: No space left on device, but workspace unsaid is mounted at"
            f" {place}; `vfsd unmount unsaid` unmounts it\n"
        )
    finally:
        succeeded(vfsd("unmount", "unsaid"))


@pytest.fixture
def mount(place: Path, engine: str) -> Iterator[MountCli]:
    """`mount()`, `mount("--name", "x", at=path)`: through the command line; whatever lives is ended afterwards."""
    made: list[Mounted] = []

    def mount_it(*arguments: object, at: Path = place) -> Mounted:
        said = succeeded(vfsd("mount", at, "--engine", engine, "--json", *arguments))
        made.append(Mounted(json.loads(said)))
        return made[-1]

    yield mount_it
    for mounted in made:
        while is_mounted(mounted.path):
            subprocess.run(["umount", "-l", mounted.path], check=True)
        wait_ended(mounted.pid)


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    with ExitStack() as stack:
        yield lambda **popen: stack.enter_context(Program(**popen))


# -- starting -----------------------------------------------------------------------------------------
def test_mount_returns_when_the_mount_answers_and_unmount_when_all_is_gone(mount: MountCli, place: Path) -> None:
    workspace = mount()
    (place / "file").write_text("content")
    assert (place / "file").read_text() == "content"
    listed = json.loads(succeeded(vfsd("list", "--json")))["workspaces"]
    assert [(it["name"], it["mountpoint"], it["state"]) for it in listed] == [("work", str(place), "alive")]

    succeeded(vfsd("unmount", "work", "--discard"))
    assert not is_mounted(place)
    assert os.listdir(place) == []
    assert left_behind("work") == []
    wait_ended(workspace.pid)
    assert complaints("work") == []


def hostile_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", MANIFEST)
        archive.writestr("files/../../etc/passwd", "x")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("not empty", ("not empty", "'something'")),
        ("missing", ("does not exist",)),
        ("a file", ("not a directory",)),
        ("hostile archive", ("files/../../etc/passwd",)),
        ("no archive", ("none.zip",)),
        ("no Podman", ("/nowhere/podman.sock", "podman system service")),
    ],
)
def test_a_start_that_fails_says_why_on_the_terminal_and_leaves_nothing(
    workdir: Path, place: Path, case: str, words: tuple[str, ...]
) -> None:
    arguments: list[object] = []
    if case == "not empty":
        (place / "something").touch()
    elif case == "missing":
        place = workdir / "missing"
    elif case == "a file":
        place = workdir / "file"
        place.touch()
    elif case == "hostile archive":
        hostile_archive(workdir / "hostile.zip")
        arguments = ["--from", workdir / "hostile.zip"]
    elif case == "no archive":
        arguments = ["--from", workdir / "none.zip"]
    else:
        arguments = ["--backend", "container:box", "--podman-url", "unix:///nowhere/podman.sock"]

    said = failed(vfsd("mount", place, "--name", "failing", *arguments))
    for word in words:
        assert word in said
    assert not is_mounted(place)
    assert left_behind("failing") == []


def test_a_place_that_is_mounted_and_a_name_in_use_are_refused(mount: MountCli, workdir: Path, place: Path) -> None:
    mount("--name", "first")
    (place / "kept").touch()
    said = failed(vfsd("mount", place, "--name", "second"))
    assert "already a mountpoint" in said
    assert "'first'" in said
    (workdir / "other").mkdir()
    said = failed(vfsd("mount", workdir / "other", "--name", "first"))
    assert str(place) in said
    assert "--name" in said
    assert not is_mounted(workdir / "other")
    assert os.listdir(place) == ["kept"]
    assert "Traceback" not in log_of("first")


def test_of_two_daemons_that_race_for_a_name_one_wins(workdir: Path, engine: str) -> None:
    places = [workdir / "a", workdir / "b"]
    for path in places:
        path.mkdir()
    _race([["mount", path, "--name", "same", "--engine", engine] for path in places])
    assert sorted(is_mounted(path) for path in places) == [False, True]
    succeeded(vfsd("unmount", "same"))
    assert left_behind("same") == []


def test_of_two_daemons_that_race_for_a_place_one_wins(place: Path, engine: str) -> None:
    _race([["mount", place, "--name", name, "--engine", engine] for name in ("one", "two")])
    assert len([line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {place} " in line]) == 1
    succeeded(vfsd("unmount", place))
    assert left_behind("one") + left_behind("two") == []


def _race(commands: list[list[object]]) -> None:
    racing = [
        subprocess.Popen([*VFSD, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    ended = sorted((process.communicate()[1], process.returncode) for process in racing)
    assert [status for _, status in ended] == [0, 1], ended
    assert ended[1][0].startswith("vfsd: error: ")
    assert len(ended[1][0].splitlines()) == 1, ended[1][0]


# -- signals ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", END_SIGNALS)
def test_a_signal_unmounts_and_leaves_nothing(mount: MountCli, place: Path, number: signal.Signals) -> None:
    workspace = mount()
    (place / "file").touch()
    workspace.kill(number)
    wait_ended(workspace.pid)
    assert not is_mounted(place)
    assert left_behind("work") == []
    assert complaints("work") == []
    assert number.name in log_of("work")


@pytest.mark.parametrize("is_fork", [False, True])
def test_sigusr1_writes_the_stacks_of_all_threads_and_tasks_to_the_log(workdir: Path, is_fork: bool) -> None:
    with Workspace.mount(workdir / "m", engine="native") as source, ExitStack() as stack:
        workspace = stack.enter_context(source.fork(workdir / "fork")) if is_fork else source
        os.kill(workspace.pid, signal.SIGUSR1)
        wait_logged(workspace.name, " _handle_signals\n", workspace.pid)
        assert "most recent call first" in log_of(workspace.name)
        assert "\nTasks:\n" in log_of(workspace.name)
        Path(workspace.path, "file").write_bytes(b"it serves on")


@pytest.mark.parametrize("number", END_SIGNALS)
def test_in_the_foreground_it_stays_until_a_signal_and_then_ends_with_success(
    place: Path, engine: str, number: signal.Signals
) -> None:
    command = [*VFSD, "mount", str(place), "--foreground", "--engine", engine]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/") as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith("workspace work is mounted at ")
        (place / "file").write_text("x")
        daemon.send_signal(number)
        _, log = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, log
    assert "mounted, served by" in log
    assert not is_mounted(place)
    assert left_behind("work") == []


def test_in_the_foreground_a_failed_start_is_one_line_too(workdir: Path) -> None:
    assert "does not exist" in failed(vfsd("mount", workdir / "missing", "--foreground"))


def test_a_busy_mount_is_detached_on_a_signal_its_holder_is_named_and_gets_time(
    mount: MountCli, place: Path, program: Callable[..., Program]
) -> None:
    workspace = mount()
    (place / "file").write_text("content")
    holder = program()
    holder("fd = os.open(path, os.O_RDWR)", path=str(place / "file"))
    workspace.kill(signal.SIGTERM)
    wait_logged("work", "held by", workspace.pid)
    named = [line for line in complaints("work") if "held by" in line]
    assert len(named) == 1
    assert f"pid {holder.pid} (python" in named[0]
    wait_logged("work", "detached", workspace.pid)
    assert not is_mounted(place)
    # It goes on for the time that it is given, and then the daemon goes with it.
    assert holder("os.pwrite(fd, b'C', 0), os.pread(fd, 9, 0)") == (1, b"Content")
    holder("os.close(fd)")
    wait_ended(workspace.pid)
    assert "programs still use the mount" not in log_of("work")
    assert left_behind("work") == []


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_a_holder_that_does_not_let_go_keeps_no_daemon(
    mount: MountCli, place: Path, program: Callable[..., Program]
) -> None:
    workspace = mount()
    holder = program()
    holder("fd = os.open(path, os.O_RDWR | os.O_CREAT)", path=str(place / "file"))
    workspace.kill(signal.SIGTERM)
    wait_ended(workspace.pid)
    assert "programs still use the mount" in log_of("work")
    with pytest.raises(OSError, match=r"not connected|aborted"):
        holder("os.pwrite(fd, b'x', 0)")
    assert left_behind("work") == []


def test_a_second_signal_ends_it_at_once(mount: MountCli, place: Path, program: Callable[..., Program]) -> None:
    workspace = mount()
    holder = program()
    holder("fd = os.open(path, os.O_RDWR | os.O_CREAT)", path=str(place / "file"))
    workspace.kill(signal.SIGTERM)
    wait_logged("work", "held by", workspace.pid)
    workspace.kill(signal.SIGTERM)
    wait_ended(workspace.pid)
    assert not is_mounted(place)
    assert left_behind("work") == []
    assert "programs still use the mount" not in log_of("work")


# -- unmounting ---------------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_busy_mount_is_not_unmounted_and_the_error_names_who_holds_it(
    mount: MountCli, place: Path, program: Callable[..., Program]
) -> None:
    mount()
    (place / "file").write_text("content")
    opened, standing = program(), program()
    opened("fd = os.open(path, os.O_RDONLY)", path=str(place / "file"))
    standing("os.chdir(path)", path=str(place))
    said = failed(vfsd("unmount", "work"))
    assert "busy" in said
    assert f"pid {opened.pid} (python" in said
    assert f"open file {place}/file" in said
    assert f"pid {standing.pid} (python" in said
    assert "current directory" in said
    assert (place / "file").read_text() == "content"

    opened("os.close(fd)")
    standing("os.chdir('/')")
    succeeded(vfsd("unmount", "work", "--discard"))
    assert not is_mounted(place)


def test_a_lazy_unmount_lets_programs_go_on_with_what_they_have_open(
    mount: MountCli, place: Path, program: Callable[..., Program]
) -> None:
    workspace = mount()
    (place / "file").write_text("content")
    holder = program()
    holder("fd = os.open(path, os.O_RDWR)", path=str(place / "file"))
    done = vfsd("unmount", "work", "--lazy", "--discard")
    succeeded(done)
    assert f"pid {holder.pid} (python" in done.stderr
    assert not is_mounted(place)
    assert os.listdir(place) == []
    assert holder("os.pwrite(fd, b'C', 0), os.pread(fd, 9, 0)") == (1, b"Content")
    holder("os.close(fd)")
    wait_ended(workspace.pid)
    assert left_behind("work") == []
    assert complaints("work") == []


@pytest.mark.parametrize("command", [("fusermount3", "-u"), ("umount",), ("umount", "-l")], ids=" ".join)
def test_a_daemon_ends_when_somebody_else_unmounts(mount: MountCli, place: Path, command: tuple[str, ...]) -> None:
    workspace = mount()
    (place / "file").touch()
    subprocess.run([*command, place], check=True)
    wait_ended(workspace.pid)
    assert left_behind("work") == []
    assert complaints("work") == []


# -- sudden death -------------------------------------------------------------------------------------
def test_after_a_sudden_death_a_mount_at_the_same_place_works_and_says_what_was_lost(
    mount: MountCli, place: Path
) -> None:
    first = mount()
    (place / "file").touch()
    first.die()
    second = mount()
    assert second.pid != first.pid
    assert second.recovered is not None
    assert "'work'" in second.recovered
    assert "lost" in second.recovered
    assert os.listdir(place) == []
    (place / "file").touch()

    second.die()
    done = vfsd("mount", place)
    succeeded(done)
    assert "lost" in done.stderr
    succeeded(vfsd("unmount", "work"))


def test_a_dead_mount_stays_where_it_is_until_somebody_asks(mount: MountCli, workdir: Path, place: Path) -> None:
    """An empty directory in its place would make rsync --delete remove the copy elsewhere."""
    workspace = mount()
    workspace.die()
    (workdir / "other").mkdir()
    mount("--name", "other", at=workdir / "other")
    listed = json.loads(succeeded(vfsd("list", "--json")))["workspaces"]
    assert {it["name"]: it["state"] for it in listed} == {"work": "dead", "other": "alive"}
    assert is_mounted(place)
    with pytest.raises(OSError, match="not connected"):
        os.listdir(place)

    done = vfsd("unmount", "work")
    succeeded(done)
    assert "lost" in done.stderr
    assert not is_mounted(place)
    assert left_behind("work") == []


def test_a_daemon_that_fails_leaves_its_dead_mount_too_and_the_next_start_says_what_was_lost(
    mount: MountCli, place: Path, engine: str
) -> None:
    command = [sys.executable, "-m", "tests.mount.crashing_daemon", str(place), "work", engine]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        (place / "file").write_text("lost")
        daemon.send_signal(signal.SIGUSR1)
        _, said = daemon.communicate(timeout=60)
    assert daemon.returncode == 1
    assert "RuntimeError: a bug" in said
    with pytest.raises(OSError, match=r"not connected|aborted"):
        os.listdir(place)
    assert json.loads(succeeded(vfsd("list", "--json")))["workspaces"][0]["state"] == "dead"
    workspace = mount()
    assert workspace.recovered is not None
    assert "lost" in workspace.recovered
    assert os.listdir(place) == []


def test_the_name_of_a_dead_daemon_is_free_for_another_place(mount: MountCli, workdir: Path) -> None:
    mount("--name", "same").die()
    assert os.path.exists(socket_path("same"))
    (workdir / "other").mkdir()
    mount("--name", "same", at=workdir / "other")
    assert f"{workdir}/other" in succeeded(vfsd("status", "same"))


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native"])
def test_list_mount_and_status_do_not_hang_on_a_daemon_that_is_stopped(mount: MountCli, place: Path) -> None:
    workspace = mount()
    workspace.kill(signal.SIGSTOP)
    try:
        listed = json.loads(succeeded(vfsd("list", "--json")))["workspaces"]
        assert [it["state"] for it in listed] == ["alive"]
        assert "already a mountpoint" in failed(vfsd("mount", place, "--name", "other"))
        assert f"(pid {workspace.pid}) is stopped or hangs" in failed(vfsd("status", "work"))
    finally:
        workspace.kill(signal.SIGCONT)
    (place / "file").touch()


# -- what a daemon holds ------------------------------------------------------------------------------
def test_a_daemon_holds_no_directory_of_its_user(mount: MountCli, workdir: Path) -> None:
    with zipfile.ZipFile(workdir / "from.zip", "w") as archive:
        archive.writestr("manifest.json", MANIFEST)
        archive.writestr("files/a", "x")
    workspace = mount("--from", workdir / "from.zip")
    assert os.readlink(f"/proc/{workspace.pid}/cwd") == "/"
    opened = [os.readlink(f"/proc/{workspace.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{workspace.pid}/fd")]
    assert [path for path in opened if path.startswith(str(workdir))] == []
    # Nor a terminal, nor what its starter had open: only its log, in the runtime directory.
    files = {path for path in opened if path.startswith("/") and not path.startswith(("/dev/", "/proc/"))}
    assert files == {os.path.join(socket_dir(), "work.log")}


def test_systemd_is_told_that_it_is_ready_lives_and_stops(place: Path, workdir: Path, engine: str) -> None:
    address = str(workdir / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.settimeout(60)
        environment = {**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"}
        command = [*VFSD, "mount", str(place), "--foreground", "--engine", engine]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd="/") as daemon:
            messages: list[list[str]] = []

            def wait_for(assignment: str) -> list[str]:
                while True:
                    messages.append(systemd.recv(4096).decode().splitlines())
                    if assignment in messages[-1]:
                        return messages[-1]

            ready = wait_for("READY=1")
            assert f"MAINPID={daemon.pid}" in ready
            assert is_mounted(place)
            (place / "file").touch()
            for _ in range(3):
                wait_for("WATCHDOG=1")
            daemon.send_signal(signal.SIGTERM)
            wait_for("STOPPING=1")
            daemon.wait(60)
    assert daemon.returncode == 0
