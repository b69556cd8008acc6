"""A container's directory, mounted through /proc: edited outside and used inside, and the other way round."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.backends.container.podman.service import Container
from protocol.backends.container.rootfs import ContainerInit
from protocol.backends.container.workspace import open_container
from tests.container.conftest import MAPPED, MountContainer, StartContainer, inside, tmpfs

pytestmark = [pytest.mark.fuse, pytest.mark.workspaces(transport="rootfs")]


@pytest.fixture
def container(start_container: StartContainer) -> Container:
    return start_container()


@pytest.mark.extended
def test_a_working_directory_of_ones_own_choice_is_made_when_missing(
    start_container: StartContainer, mount_container: MountContainer
) -> None:
    container = start_container()

    workspace = mount_container(container, workdir="/srv/app/work")

    Path(workspace.path, "f").write_text("x")
    assert inside(container, "cat /srv/app/work/f") == b"x"
    assert (workspace.status().transport, workspace.status().container) == ("rootfs", "running")


# -- the container changes beside the mount ----------------------------------------------------------
@pytest.mark.extended
@pytest.mark.both_engines
def test_a_file_that_grows_inside_while_it_is_read_outside_shows_what_is_there(
    container: Container, mount_container: MountContainer
) -> None:
    root = Path(mount_container(container, cache_timeout_s=0.05).path)
    inside(container, "echo start > /workspace/log")
    seen = b""
    with (root / "log").open("rb", buffering=0) as file:
        inside(
            container,
            "(for i in $(seq 200); do echo line $i; usleep 1000; done >> /workspace/log; echo end >> /workspace/log) &",
        )
        deadline_s = time.monotonic() + 30
        while not seen.endswith(b"end\n"):
            seen += file.read(4096) or b""
            assert time.monotonic() < deadline_s, seen[-100:]

    assert seen == b"start\n" + b"".join(b"line %d\n" % number for number in range(1, 201)) + b"end\n"


@pytest.mark.extended
def test_files_replaced_inside_while_they_are_read_outside_are_never_a_mixture(
    container: Container, mount_container: MountContainer
) -> None:
    root = Path(mount_container(container, cache_timeout_s=0).path)
    inside(container, "yes a | head -c 20000 > /workspace/f")
    script = "for i in $(seq 60); do for l in a b; do yes $l | head -c 20000 > .f; mv .f f; done; done; touch done"
    inside(container, f"(cd /workspace; {script}) &")

    seen = set()
    deadline_s = time.monotonic() + 30
    while not (root / "done").exists():
        assert time.monotonic() < deadline_s
        with suppress(OSError):  # ESTALE: replaced between the look-up and the read
            seen.add((root / "f").read_bytes())

    assert seen == {b"a\n" * 10000, b"b\n" * 10000}


# -- a hostile container ------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_working_directory_behind_links_is_the_containers_own(
    start_container: StartContainer, mount_container: MountContainer, workdir: Path
) -> None:
    container = start_container()
    host = workdir / "host"
    host.mkdir()
    (host / "secret").write_text("of the host")
    inside(
        container,
        f"mkdir -p /data /a && ln -s /data /workspace && ln -s ../../../../../..{host} /a/w && ln -s {host} /b",
    )

    root = Path(mount_container(container).path)
    (root / "f").write_text("x")
    assert inside(container, "cat /data/f") == b"x"
    for place in ("/a/w", "/b"):
        assert refused(container, place) == "the working directory is a dangling symlink in the container"
    inside(container, f"mkdir -p {host}")
    assert os.listdir(mount_container(container, workdir="/a/w", transport="rootfs").path) == []
    assert os.listdir(host) == ["secret"]


def refused(container: Container, workdir: str) -> str:
    """Why the rootfs transport does not serve `workdir`."""
    with pytest.raises(OSError, match=r".+") as caught:
        open_container(container.name, podman_url=container.service.address.url, workdir=workdir, transport="rootfs")
    return str(caught.value.strerror)


def test_a_working_directory_through_proc_is_refused(start_container: StartContainer) -> None:
    container = start_container()
    inside(container, "ln -s /proc/1/root/etc /x; ln -s /proc/1/cwd /workspace")

    for place in ("/x", "/workspace", "/proc/1/root/etc"):
        assert "symbolic links" in refused(container, place)


@pytest.mark.extended
def test_directories_moved_about_inside_lead_nowhere_else(
    container: Container, mount_container: MountContainer
) -> None:
    """A rename while the mount walks: ".." is the volume's own, and a directory moved out is not gone through."""
    root = Path(mount_container(container, cache_timeout_s=0).path)
    inside(container, "mkdir -p /workspace/a/b/c /outside; echo in > /workspace/a/b/c/f; echo out > /outside/f")
    script = "while [ ! -e /stop ]; do mv /workspace/a/b /outside/b; mv /outside/b /workspace/a/b; done; touch /stopped"
    inside(container, f"({script}) &")

    seen = set()
    for _ in range(200):
        for path in ("a/b/c/f", "a/b/c/../../../f", "a/b/../../../outside/f"):
            try:
                seen.add((root / path).read_text())
            except OSError as error:
                seen.add(errno.errorcode[error.errno])

    inside(container, "touch /stop; while [ ! -e /stopped ]; do usleep 1000; done")
    assert seen <= {"in\n", "ENOENT", "ESTALE", "ENOTDIR", "EIO"}, seen
    assert (root / "a/b/c/f").read_text() == "in\n"


@pytest.mark.extended
def test_set_uid_programs_and_devices_made_inside_do_nothing_on_this_host(container: Container, root: Path) -> None:
    inside(container, "cp /bin/busybox /workspace/su; chmod 4755 /workspace/su; mknod /workspace/null c 1 3")

    assert {"nosuid", "nodev"} <= mount_flags(root)
    with pytest.raises(PermissionError):
        (root / "null").read_bytes()


def mount_flags(mountpoint: Path) -> set[str]:
    """proc_pid_mountinfo(5): field 5 is the place, field 6 the mount's own options."""
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {flag for row in rows if row[4] == str(mountpoint) for flag in row[5].split(",")}


# -- what the container's file system is -------------------------------------------------------------
def test_what_is_mounted_below_is_not_entered(start_container: StartContainer, mount_container: MountContainer) -> None:
    container = start_container(options=tmpfs("/workspace/below"))
    root = Path(mount_container(container).path)

    with pytest.raises(OSError, match="cross-device"):
        os.listdir(root / "below")


# -- whose files they are --------------------------------------------------------------------------------
@pytest.mark.extended
def test_owners_are_shown_as_the_container_shows_them(
    start_container: StartContainer, mount_container: MountContainer
) -> None:
    """Its users are others to the host: 0 is 200000 there."""
    container = start_container(options=MAPPED)
    root = Path(mount_container(container).path)
    inside(
        container,
        "echo x > /workspace/root; echo y > /workspace/dev; chown dev:dev /workspace/dev; chmod 600 /workspace/*",
    )

    assert owner(root / "root") == (0, 0)
    assert owner(root / "dev") == (1000, 1000)
    (root / "made").write_text("by root here")
    (root / "made-directory").mkdir()
    os.symlink("x", root / "made-link")
    os.chown(root / "made-link", 1000, 1000, follow_symlinks=False)
    os.chown(root / "dev", 0, -1)

    shown = (
        inside(container, "cd /workspace; stat -c '%n %u:%g' dev made made-directory made-link").decode().split("\n")
    )
    assert shown[:-1] == ["dev 0:1000", "made 0:0", "made-directory 0:0", "made-link 1000:1000"]
    inside(container, "cd /workspace; echo more >> made; touch made-directory/f")
    assert (root / "made").read_text() == "by root heremore\n"
    with pytest.raises(OSError, match="too large"):
        os.chown(root / "made", 70000, -1)  # nobody in the container
    refused = subprocess.run(["setfacl", "-m", "u:1000:r", root / "made"], check=False, capture_output=True, text=True)
    assert "not supported" in refused.stderr  # ids in there would have to be translated


def owner(path: Path) -> tuple[int, int]:
    shown = path.lstat()
    return shown.st_uid, shown.st_gid


# -- whose process it is -----------------------------------------------------------------------------
def test_a_process_that_is_not_the_containers_is_not_looked_into(container: Container) -> None:
    """Podman may tell of another machine's processes, or of one that has ended since."""
    state = container.inspect()
    for wrong in (
        dataclasses.replace(state, pid=os.getpid()),
        dataclasses.replace(state, conmon_pid=os.getppid()),
        dataclasses.replace(state, id=state.id[::-1]),
        dataclasses.replace(state, pid=2**22 + 1),
    ):
        with pytest.raises(ProcessLookupError, match="processes of this machine"):
            ContainerInit(wrong)
    container.kill()
    with pytest.raises(ProcessLookupError):
        ContainerInit(state)


def test_nothing_of_a_container_stays_open_when_it_has_ended(
    start_container: StartContainer, mount_container: MountContainer
) -> None:
    container = start_container()
    workspace = mount_container(container, transport="rootfs", complaints=["it has stopped"])
    root = Path(workspace.path)
    (root / "d").mkdir()
    with (root / "d" / "f").open("w") as file:
        file.write("x")
        file.flush()
        pid = workspace.status().pid
        assert held(pid)

        container.kill()
        deadline_s = time.monotonic() + 30
        while held(pid):
            assert time.monotonic() < deadline_s, held(pid)
        with suppress(OSError):
            file.close()


def held(pid: int) -> list[str]:
    """What a daemon has open of the container's files, by their paths in there."""
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if path.startswith("/workspace"):
                found.append(path)
    return found
