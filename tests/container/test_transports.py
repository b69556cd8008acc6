"""A container's directory through either transport: edited outside and used inside, and the other way round."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from protocol.backends.container.podman.service import Container
from tests.container.conftest import MountContainer, StartContainer, attempt, check_git_works, inside, tmpfs
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse


@pytest.fixture(params=["agent", pytest.param("rootfs", marks=pytest.mark.extended)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workspace(mount_container: MountContainer, container: Container, transport: str) -> Workspace:
    return mount_container(container, transport=transport)


@pytest.mark.extended
@pytest.mark.both_engines
def test_what_is_edited_outside_runs_inside_and_what_is_written_inside_is_read_outside(
    container: Container, workspace: Workspace, root: Path, transport: str
) -> None:
    assert (workspace.status().transport, workspace.status().container) == (transport, "running")
    (root / "bin").mkdir()
    for text in ("hello", "changed"):  # a program that is written to cannot be executed, one that was can
        (root / "bin" / "program").write_text(f"#!/bin/sh\necho {text}, $1 > /workspace/said\n")
        (root / "bin" / "program").chmod(0o755)
        inside(container, "/workspace/bin/program", "you")
        assert (root / "said").read_text() == f"{text}, you\n"
        (root / "said").unlink()
    shutil.copy("/bin/true", root / "bin" / "true")
    with (root / "bin" / "true").open("r+b") as program:
        program.write(b"\x7fELF")
    assert attempt(container, "/workspace/bin/true")[0] != 126, "its file is still open for writing (ETXTBSY)"

    inside(container, "cd /workspace; mkdir out; echo made inside > out/result; ln -s result out/link; mkfifo out/fifo")
    assert (root / "out" / "link").read_text() == "made inside\n"
    assert stat.S_ISFIFO((root / "out" / "fifo").lstat().st_mode)


@pytest.mark.extended
@pytest.mark.both_engines
def test_git_clones_into_it_and_commits_in_it(root: Path, workdir: Path, container: Container) -> None:
    check_git_works(root, workdir, container)
    shutil.rmtree(root / "clone")
    assert os.listdir(root) == []


def test_symlinks_lead_to_the_containers_own_files(container: Container, root: Path) -> None:
    """The daemon reads only the container's files; a program on this host that follows a link gets this host's file."""
    inside(
        container,
        "cd /workspace; echo inside > /secret; ln -s /secret absolute; ln -s ../secret up;"
        "mkdir d; ln -s ../../../secret d/up; ln -s /proc/1/root proc; ln -s . loop",
    )
    assert os.readlink(root / "absolute") == "/secret"
    assert not (root / "absolute").exists()  # on this host, where there is none
    assert not (root / "d" / "up").exists()
    assert inside(container, "cat /workspace/absolute /workspace/up") == b"inside\n" * 2
    shutil.rmtree(root / "d")  # removes the link, not what it leads to
    for name in ("absolute", "up", "proc", "loop"):
        (root / name).unlink()
    assert inside(container, "cat /secret") == b"inside\n"


def test_a_read_only_mount_changes_nothing_inside(
    container: Container, mount_container: MountContainer, transport: str
) -> None:
    inside(container, "mkdir /workspace; echo x > /workspace/f")
    root = Path(mount_container(container, transport=transport, read_only=True).path)

    assert (root / "f").read_text() == "x\n"
    for change in ((root / "f").unlink, (root / "d").mkdir, lambda: (root / "f").write_text("y")):
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EROFS):
            change()


def test_a_full_disk_is_enospc_and_has_room_again_when_something_is_removed(
    start_container: StartContainer, python_image: str, mount_container: MountContainer, transport: str
) -> None:
    container = start_container(python_image, options=tmpfs("/workspace", size=2**20))
    root = Path(mount_container(container, transport=transport).path)

    with pytest.raises(OSError, match="No space left"):
        (root / "big").write_bytes(b"x" * 2**21)
    assert os.statvfs(root).f_bavail == 0
    (root / "big").unlink()
    (root / "small").write_bytes(b"y" * 65536)

    assert inside(container, "wc -c < /workspace/small").strip() == b"65536"


def test_a_read_only_root_is_read_and_a_directory_that_cannot_be_made_is_named(
    start_container: StartContainer, python_image: str, mount_container: MountContainer, transport: str
) -> None:
    container = start_container(python_image, options={"read_only": True})
    root = Path(mount_container(container, transport=transport, workdir="/etc").path)

    assert (root / "passwd").read_text().startswith("root:")
    for change in (lambda: (root / "passwd").write_text("x"), (root / "new").mkdir):
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    with pytest.raises(OSError, match="read-only; name a volume"):
        mount_container(container, transport=transport, workdir="/workspace")


def test_what_root_makes_here_is_the_containers_own_users(
    start_container: StartContainer, python_image: str, mount_container: MountContainer, transport: str
) -> None:
    container = start_container(python_image, options={"user": "dev"})
    root = Path(mount_container(container, transport=transport).path)
    (root / "f").write_text("x")
    (root / "d").mkdir()

    assert inside(container, "stat -c '%u:%g' /workspace /workspace/f /workspace/d").split() == [b"1000:1000"] * 3
    assert (root / "f").stat().st_uid == 1000
    inside(container, "echo more >> /workspace/f; touch /workspace/d/new /workspace/new")
    os.chown(root / "f", 0, 0)
    assert (root / "f").stat().st_uid == 0
