"""`vfsd upgrade` of `container:` workspaces: programs go on in the same run of the container."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.container.podman.service import PodmanService
from tests.container.conftest import StartContainer, control, inside
from tests.container.test_restart import is_served_again
from tests.container.workspaces import InContainer, ended_after
from tests.mount.conftest import check_invariants
from tests.mount.programs import Program, failed, succeeded, vfsd
from tests.mount.test_upgrade import Dying
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_record

pytestmark = pytest.mark.fuse


@pytest.fixture
def upgradable(workdir: Path, start_container: StartContainer) -> Iterator[Callable[..., InContainer]]:
    def make(image: str | None = None, **options: Any) -> InContainer:
        return InContainer(workdir, start_container() if image is None else start_container(image=image), **options)

    with ended_after(make, InContainer.end) as start:
        yield start


@pytest.mark.extended
@pytest.mark.parametrize("keeper", [True, False], ids=["keeper", "no keeper"])
@pytest.mark.parametrize("transport", ["rootfs", "agent"])
def test_programs_snapshots_and_the_container_go_on(
    upgradable: Callable[..., InContainer], python_image: str, transport: str, keeper: bool
) -> None:
    workspace = upgradable(image=python_image, transport=transport, keeper=keeper)
    root, run = workspace.path, workspace.container.inspect().pid
    inside(workspace.container, "mkdir -p /workspace/dir/below; echo one > /workspace/changed")
    attached = workspace.mount()
    attached.snapshot("one")
    (root / "changed").write_text("two\n")
    attached.restore("one")
    snapshots = attached.snapshots()
    (root / "file").write_bytes(b"a" * 300_000)
    for name in ("gone", "removed"):
        (root / name).write_bytes(name.encode())
    temporary = os.open(root, os.O_TMPFILE | os.O_RDWR)
    os.write(temporary, b"temporary")
    before = (root / "file").stat().st_ino
    with (
        Program() as program,
        (root / "file").open("r+b") as file,
        (root / "gone").open("r+b", buffering=0) as gone,
        (root / "removed").open("rb", buffering=0) as removed,
    ):
        (root / "gone").unlink()
        program(f"os.chdir({str(root / 'dir' / 'below')!r})")
        program(f"held = open({str(root / 'file')!r}, 'r+b')")
        program("fcntl.flock(held, fcntl.LOCK_EX)")
        assert removed.read(7) == b"removed"
        inside(workspace.container, "rm /workspace/removed")
        with mmap.mmap(file.fileno(), 0) as mapping:
            mapping[0:1] = b"b"
            workspace.upgrade()
            gone.write(b"GO")
            workspace.upgrade()
            mapping[200_000:200_001] = b"c"
            mapping.flush()
        assert inside(workspace.container, "head -c 2 /workspace/file") == b"ba"
        assert program("os.getcwd()") == str(root / "dir" / "below")
        program("open('new', 'w').close()")
        assert (os.pread(gone.fileno(), 9, 0), os.pread(removed.fileno(), 9, 0)) == (b"GOne", b"removed")
        assert os.pread(temporary, 9, 0) == b"temporary"
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if keeper:
            pid = workspace.record.pid
            os.kill(pid, 9)
            assert os.pread(file.fileno(), 2, 0) == b"ba"
            wait_until(lambda: workspace.record.pid != pid, "a replacement")
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert (root / "file").stat().st_ino == os.fstat(file.fileno()).st_ino == before
    os.close(temporary)
    assert inside(workspace.container, "ls /workspace/dir/below") == b"new\n"
    assert attached.snapshots() == snapshots
    succeeded(vfsd("restore", "--undo", "-w", workspace.name))
    assert (root / "changed").read_text() == "two\n"
    assert succeeded(vfsd("exec", "-w", workspace.name, "--", "cat", "changed")) == "two\n"
    assert workspace.container.inspect().pid == run
    check_invariants(attached)


def test_tar_goes_on(upgradable: Callable[..., InContainer], workdir: Path) -> None:
    workspace = upgradable()
    workspace.mount()
    source = workdir / "source"
    for number in range(100):
        (source / f"d{number % 10}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 10}" / f"f{number}").write_bytes(os.urandom(3000))
    subprocess.run(["tar", "cf", workdir / "a.tar", "-C", source, "."], check=True)
    turns = 0
    with workspace.being_upgraded() as is_over:
        while not is_over():
            turns += 1
            target = workspace.path / str(turns % 2)
            target.mkdir(exist_ok=True)
            subprocess.run(["tar", "xf", workdir / "a.tar", "-C", target], check=True)
            subprocess.run(["diff", "-r", source, target], check=True)
    check_invariants(Workspace.attach(workspace.name))


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["rootfs", "agent"])
def test_either_daemon_is_killed_at_the_last_steps(
    upgradable: Callable[..., InContainer],
    workdir: Path,
    monkeypatch: pytest.MonkeyPatch,
    python_image: str,
    transport: str,
) -> None:
    """The other steps do not depend on the backend: see `tests.mount.test_upgrade`."""
    workspace = upgradable(image=python_image, transport=transport)
    inside(workspace.container, "mkdir /workspace; echo held > /workspace/held")
    run = workspace.container.inspect().pid
    dying = Dying(workspace, workdir, monkeypatch)
    with (workspace.path / "held").open("rb", buffering=0) as held, dying.being_written():
        for step in ("after Finish", "before Go", "after Go", "before Serving"):
            dying.upgrade_at(step)
            dying.check()
            wait_until(lambda: workspace.record.is_kept, "a keeper")
            assert os.pread(held.fileno(), 9, 0) == b"held\n"
    assert workspace.container.inspect().pid == run


@pytest.mark.extended
def test_a_container_that_was_restarted_is_refused_and_served_on(upgradable: Callable[..., InContainer]) -> None:
    workspace = upgradable()
    attached = workspace.mount()
    (workspace.path / "file").write_bytes(b"x")
    pid = workspace.record.pid
    control(workspace.container, "restart", timeout=0)
    wait_until(is_served_again(attached))
    assert "was restarted since the mount was made" in failed(vfsd("upgrade", workspace.name))
    assert (workspace.path / "file").read_bytes() == b"x"
    assert workspace.record.pid == pid


@pytest.mark.extended
def test_an_image_with_the_agent_goes_on(workdir: Path, podman: PodmanService, python_image: str) -> None:
    root, name, url = workdir / "image", f"{workdir.name}-image", podman.address.url
    root.mkdir()
    with Workspace.mount(root, f"image:{python_image}", name=name, podman_url=url, transport="agent") as attached:
        with (root / "file").open("w+b", buffering=0) as file:
            file.write(b"one")
            (root / "file").unlink()
            record = read_record(name)
            assert record is not None
            os.kill(record.pid, 9)
            assert os.pread(file.fileno(), 9, 0) == b"one"
            wait_until(lambda: read_record(name) not in {record, None}, "a replacement")
            succeeded(vfsd("upgrade", name))
            assert os.pread(file.fileno(), 9, 0) == b"one"
        (root / "new").write_text("new")
        assert succeeded(vfsd("exec", "-w", name, "--", "cat", "new")) == "new"
        check_invariants(attached)
