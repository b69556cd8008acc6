"""A container's directory, mounted through a helper inside it: as through /proc, wherever the container is."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.container.podman.service import Container, PodmanService
from protocol.testing import FilesystemContract, StreamingContract
from tests.container.conftest import (
    MAPPED,
    MountContainer,
    StartContainer,
    attempt,
    inside,
    running_container,
)
from tests.mount.conftest import edit_on_two_mounts
from tests.support.contracts_on_mounts import OnMount
from tests.support.waiting import wait_until
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace

PATIENCE_S = 60.0
LOST = ["the helper in it is lost"]
pytestmark = [pytest.mark.fuse, pytest.mark.workspaces(transport="agent", complaints=LOST)]


# -- inside and outside ------------------------------------------------------------------------------
@pytest.mark.extended
@pytest.mark.parametrize("transports", [("agent", "agent"), ("agent", "rootfs")])
def test_edits_on_two_mounts_of_one_directory_at_the_same_time_are_all_kept(
    container: Container, mount_container: MountContainer, transports: tuple[str, str]
) -> None:
    expected = edit_on_two_mounts(*(mount_container(container, transport=transport) for transport in transports))
    assert inside(container, "cat", "/workspace/f").decode() == expected


@pytest.mark.extended
@pytest.mark.both_engines
def test_files_of_every_kind_keep_what_they_are(root: Path, container: Container) -> None:
    (root / "f").write_text("content")
    os.link(root / "f", root / "hard")
    os.symlink("f", root / "soft")
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
    os.setxattr(root / "f", "user.note", b"kept")
    os.chown(root / "f", 1234, 567)
    os.chmod(root / "f", 0o4711)
    os.utime(root / "f", ns=(10**18 + 1, 10**18 + 2))

    shown = inside(container, "cd /workspace; stat -c '%n %a %u %g %h %t,%T %F' *").decode().splitlines()
    assert shown == [
        "f 4711 1234 567 2 0,0 regular file",
        "fifo 640 0 0 1 0,0 fifo",
        "hard 4711 1234 567 2 0,0 regular file",
        "null 600 0 0 1 1,3 character special file",
        "socket 755 0 0 1 0,0 socket",
        "soft 777 0 0 1 0,0 symbolic link",
    ]
    assert os.getxattr(root / "hard", "user.note") == b"kept"
    assert (root / "hard").stat().st_mtime_ns == 10**18 + 2
    assert os.readlink(root / "soft") == "f"


@pytest.mark.both_engines
def test_an_unlinked_file_and_a_removed_directory_stay_while_they_are_open(root: Path) -> None:
    (root / "d").mkdir()
    directory = os.open(root / "d", os.O_RDONLY | os.O_DIRECTORY)
    with (root / "f").open("w+b", buffering=0) as file:
        file.write(b"before")
        (root / "f").unlink()
        (root / "d").rmdir()
        file.write(b" and after")
        assert os.pread(file.fileno(), 100, 0) == b"before and after"
        assert os.fstat(file.fileno()).st_nlink == 0
        assert os.listdir(root) == os.listdir(directory) == []
    os.close(directory)


def test_ids_are_the_containers_own_where_its_user_namespace_maps_them(
    start_container: StartContainer, python_image: str, mount_container: MountContainer
) -> None:
    container = start_container(python_image, options=MAPPED)
    root = Path(mount_container(container, transport="agent").path)
    (root / "f").write_text("x")
    os.chown(root / "f", 1000, 1000)

    assert inside(container, "stat -c '%u:%g' /workspace /workspace/f").split() == [b"0:0", b"1000:1000"]
    with pytest.raises(OSError, match="too large"):
        os.chown(root / "f", 5_000_000, -1)


# -- many at once --------------------------------------------------------------------------------------
@pytest.mark.both_engines
def test_many_files_made_read_and_removed_by_many_at_once_are_all_right(
    root: Path, container: Container, runs_long: bool
) -> None:
    count = 1000 if runs_long else 200

    def work(number: int) -> bytes:
        file = root / f"d{number % 7}" / f"f{number}"
        file.write_bytes(b"%d " % number * number)
        file.rename(file.with_suffix(".done"))
        return file.with_suffix(".done").read_bytes()

    for number in range(7):
        (root / f"d{number}").mkdir()
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert list(pool.map(work, range(count))) == [b"%d " % number * number for number in range(count)]

        assert int(inside(container, "find /workspace -name '*.done' -type f | wc -l")) == count
        list(pool.map(os.unlink, [path for path in root.rglob("*.done")]))  # noqa: C416
    assert inside(container, "find /workspace -type f | wc -l") == b"0\n"


# -- what is interrupted, and what ends ------------------------------------------------------------------
def helper_of(container: Container) -> int:
    found = []
    for process in Path("/proc").glob("[1-9]*"):
        with contextlib.suppress(OSError):  # one that has ended, such as a helper of another worker
            is_helper = (process / "cmdline").read_bytes().split(b"\0")[1:4] == [b"-I", b"-S", b"-c"]
            if is_helper and container.id.encode() in (process / "cgroup").read_bytes():
                found.append(int(process.name))
    (pid,) = found
    return pid


def is_stopped(pid: int) -> bool:
    """Whether each thread of a process is stopped."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended
            states.append("\nState:\tT" in (task / "status").read_text())
    return all(states)


@pytest.mark.both_engines
def test_a_helper_that_is_killed_is_replaced_and_open_files_go_on(
    container: Container, workspace: Workspace, root: Path
) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").write_text("0123456789")
    with (root / "d" / "f").open("r+b", buffering=0) as file:
        assert file.read(5) == b"01234"
        for times in (1, 2):
            os.kill(helper_of(container), signal.SIGKILL)
            log = Path(log_path(workspace.name))
            wait_until(lambda: log.read_text().count("is running again and served") == times)  # noqa: B023
        assert file.read() == b"56789"
        file.write(b"!")
    assert inside(container, "cat /workspace/d/f") == b"0123456789!"
    assert workspace.status().connected


def test_while_the_helper_is_gone_all_is_eio_and_nobody_waits(
    container: Container, workspace: Workspace, root: Path
) -> None:
    (root / "f").write_text("x")
    pid = helper_of(container)
    os.kill(pid, signal.SIGSTOP)  # it does not even end
    wait_until(lambda: is_stopped(pid), "all threads of the helper stopped, so that it answers nothing")
    failed: list[int] = []

    def ask() -> None:
        try:
            os.stat(root / "not cached")
        except OSError as error:
            failed.append(error.errno or 0)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    container.kill()  # takes the stopped helper along
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failed == [errno.EIO] * 5

    container.start()
    log = Path(log_path(workspace.name))
    wait_until(lambda: "is running again and served" in log.read_text())
    assert (root / "f").read_text() == "x"


@pytest.mark.extended
@pytest.mark.both_engines
def test_a_program_that_waits_for_a_helper_that_does_not_answer_can_be_killed(
    container: Container, workspace: Workspace, root: Path
) -> None:
    pid = helper_of(container)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), "all threads of the helper stopped, so that it answers nothing")
    try:
        waiting = subprocess.Popen(
            [sys.executable, "-c", "import os, sys; print('go', flush=True); os.stat(sys.argv[1])", str(root / "x")],
            stdout=subprocess.PIPE,
        )
        assert waiting.stdout is not None
        assert waiting.stdout.read(2) == b"go"
        time.sleep(0.5)  # until its request is under way
        waiting.kill()
        if workspace.status().engine == "native":
            assert waiting.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        os.kill(pid, signal.SIGCONT)
    # The kernel ends a request that was read when it is answered: pyfuse3 is not told that one is interrupted.
    assert waiting.wait(PATIENCE_S) == -signal.SIGKILL
    waiting.stdout.close()
    (root / "y").write_text("and it goes on")


# Signals of its own, all the time, as the Go runtime sends itself; mkdir(2) and stat(2) are not tried again by Python.
RESTLESS = """
import os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for number in range(200):
    os.mkdir(os.path.join(sys.argv[1], str(number)))
    os.stat(os.path.join(sys.argv[1], str(number)))
signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.extended
@pytest.mark.both_engines
def test_a_program_that_is_interrupted_all_the_time_sees_no_eintr(root: Path) -> None:
    subprocess.run([sys.executable, "-c", RESTLESS, str(root)], check=True, timeout=PATIENCE_S)
    assert len(os.listdir(root)) == 200


def test_no_helper_stays_when_the_mount_ends(container: Container, workspace: Workspace, root: Path) -> None:
    pid = helper_of(container)
    workspace.unmount()
    wait_until(lambda: not Path("/proc", str(pid)).exists())


# -- images and helpers that are none ----------------------------------------------------------------------
def test_an_image_without_python_is_refused_with_what_to_do(
    start_container: StartContainer, mount_container: MountContainer
) -> None:
    with pytest.raises(OSError, match=r"no Python 3.*--transport rootfs"):
        mount_container(start_container(), transport="agent")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("cat > /dev/null & head -c 100000000 /dev/zero", "not a helper"),
        ("exec cat", "not a helper"),
        ("echo no python today >&2; cat > /dev/null & sleep 1; exit 1", "no python today"),
        ("printf 'vfsd-helper 1\\n'; head -c 200000000 /dev/urandom", "."),
    ],
    ids=["zeros", "echo", "an error", "noise"],
)
def test_a_hostile_helper_is_refused_and_costs_the_host_nothing(
    start_container: StartContainer, mount_container: MountContainer, script: str, said: str
) -> None:
    container = start_container()
    inside(
        container,
        "mkdir -p /usr/bin && cat > /usr/bin/python3 <<'END'\n#!/bin/sh\n"
        + script
        + "\nEND\nchmod 755 /usr/bin/python3",
    )

    with pytest.raises(OSError, match=said):
        mount_container(container, transport="agent")


def test_a_fork_bomb_at_its_limit_leaves_the_mount_served(
    start_container: StartContainer, python_image: str, mount_container: MountContainer
) -> None:
    container = start_container(python_image, pids_limit=64)
    root = Path(mount_container(container, transport="agent").path)
    (root / "f").write_text("x")
    inside(container, "b() { while :; do sleep 1000 & done; }; (b; b) > /dev/null 2>&1 &")
    wait_until(lambda: attempt(container, "/bin/true")[0] != 0)

    for number in range(50):
        (root / f"f{number}").write_text("y")
    assert (root / "f").read_text() == "x"
    with (root / "f").open("a") as file:
        os.fsync(file.fileno())


# -- the contract ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def shared(podman: PodmanService, python_image: str, session_dir: str) -> Iterator[Path]:
    """One mount for all tests of the contract."""
    place = Path(session_dir, "work", "agent-contract")
    options: dict[str, Any] = {"transport": "agent", "podman_url": podman.address.url, "name": "agent-contract"}
    with (
        running_container(podman, python_image, name="agent-contract") as container,
        Workspace.mount(place, backend=f"container:{container.name}", **options),
    ):
        yield place


@pytest.mark.extended
class TestFilesystem(OnMount, FilesystemContract):
    pass


@pytest.mark.extended
class TestStreaming(OnMount, StreamingContract):
    pass
