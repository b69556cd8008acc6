"""Snapshots of a container's workspace: by either transport, of what is in it now, and back."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from protocol.backends.container.podman.service import Container
from tests.container.conftest import MountContainer, inside
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse


@pytest.fixture(params=["agent", "rootfs"])
def workspace(request: pytest.FixtureRequest, mount_container: MountContainer, container: Container) -> Workspace:
    return mount_container(container, transport=request.param)


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
