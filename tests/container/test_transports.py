"""A container's directory through either transport: used inside and outside at once, and its snapshots."""

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


def listed(container: Container) -> list[bytes]:
    """Everything in the workspace, as the container has it: kind, mode, owner, links, time, and content."""
    script = "cd /workspace; find . ! -name . | sort | while read -r f; do stat -c '%n %f %u:%g %h %Y' \"$f\"; done"
    return inside(
        container, script + "; find . -type f | sort | xargs md5sum; find . -type l | sort | xargs -n1 readlink"
    ).splitlines()


def fill(root: Path) -> None:
    (root / "d" / "deep").mkdir(parents=True)
    for number in range(30):
        (root / "d" / f"f{number}").write_bytes(b"%d " % number * number)
    (root / "large").write_bytes(os.urandom(1 << 20) * 3)
    os.link(root / "d" / "f1", root / "hard")
    os.symlink("d/f2", root / "soft")
    os.mkfifo(root / "fifo")
    (root / "script").write_text("#!/bin/sh\n")
    (root / "script").chmod(0o4755)
    os.chown(root / "d" / "f3", 1234, 567)
    os.setxattr(root / "d" / "f4", "user.note", b"kept")


def spoil(root: Path, container: Container) -> None:
    shutil.rmtree(root / "d" / "deep")
    (root / "d" / "f5").write_text("changed outside")
    (root / "d" / "f6").unlink()
    (root / "script").chmod(0o600)
    os.removexattr(root / "d" / "f4", "user.note")
    inside(
        container,
        "cd /workspace; echo changed inside > d/f7; rm soft fifo; mkdir soft new; echo > new/f; mv large d/;"
        "ln -s x fifo",
    )


@pytest.mark.extended
def test_a_restore_brings_back_everything_that_was_there_and_nothing_else(
    workspace: Workspace, root: Path, container: Container
) -> None:
    fill(root)
    expected = listed(container)
    workspace.snapshot("one")
    spoil(root, container)
    spoiled = listed(container)

    workspace.restore("one")

    assert listed(container) == expected
    assert os.getxattr(root / "d" / "f4", "user.note") == b"kept"
    assert stat.S_IMODE((root / "script").stat().st_mode) == 0o4755
    workspace.undo()
    assert listed(container) == spoiled


@pytest.mark.extended
def test_what_was_just_written_inside_is_in_the_snapshot_whatever_the_kernel_has_cached(
    container: Container, mount_container: MountContainer
) -> None:
    for transport in ("agent", "rootfs"):
        workspace = mount_container(container, transport=transport, cache_timeout_s=3600.0)
        root = Path(workspace.path)
        (root / "f").write_text("old")
        (root / "gone").write_text("old")
        assert (root / "f").read_text() == "old"
        inside(container, "cd /workspace; echo written inside > f; rm gone; echo new > new")

        workspace.snapshot(transport)

        inside(container, "cd /workspace; echo later > f; rm new")
        workspace.restore(transport)
        assert inside(container, "cd /workspace; cat f new; ls").split() == [
            b"written",
            b"inside",
            b"new",
            b"f",
            b"new",
        ]
        assert (root / "f").read_text() == "written inside\n"
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.extended
def test_a_container_goes_into_an_archive_and_another_comes_out_of_it(
    workspace: Workspace, root: Path, container: Container, workdir: Path
) -> None:
    fill(root)
    expected = listed(container)
    workspace.export(workdir / "out.zip")
    spoil(root, container)
    (root / "another").write_text("x")

    workspace.restore(workdir / "out.zip")

    assert listed(container) == expected


@pytest.mark.extended
def test_snapshots_outlive_the_mount(container: Container, mount_container: MountContainer) -> None:
    first = mount_container(container, transport="agent")
    (Path(first.path) / "f").write_text("kept")
    first.snapshot("before")
    first.unmount()
    inside(container, "echo lost > /workspace/f")

    again = mount_container(container, transport="rootfs")

    assert [one.name for one in again.snapshots()] == ["before"]
    again.restore("before")
    assert inside(container, "cat /workspace/f") == b"kept"
