"""The keeper and `vfsd upgrade` of `container:` workspaces: programs go on in the same run of the container."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.container.podman.service import PodmanService
from tests.container.conftest import MAPPED, StartContainer, control, inside
from tests.container.test_restart import is_served_again
from tests.container.workspaces import InContainer, KeptContainer, ended_after, keeper_that_gives_up
from tests.mount.conftest import check_invariants
from tests.mount.kept_workspaces import check_executed_once, end_kept
from tests.mount.programs import Program, failed, log_of, succeeded, vfsd
from tests.mount.test_upgrade import Dying
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_record

pytestmark = pytest.mark.fuse


@pytest.fixture
def keep(workdir: Path, start_container: StartContainer) -> Iterator[Callable[..., KeptContainer]]:
    def make(transport: str = "rootfs", **options: Any) -> KeptContainer:
        return KeptContainer(workdir, start_container(**options), transport)

    with ended_after(make, end_kept) as start:
        yield start


@pytest.fixture(params=["rootfs", "agent"])
def kept(keep: Callable[..., KeptContainer], python_image: str, request: pytest.FixtureRequest) -> KeptContainer:
    return keep(request.param, image=python_image)


def test_open_files_mappings_directories_and_locks_continue(kept: KeptContainer) -> None:
    root, container = kept.path, kept.container
    inside(container, "mkdir -p /workspace/dir/below; cd /workspace/dir; for n in $(seq 1000); do : > f$n; done")
    kept.mount()
    (root / "file").write_bytes(b"a" * 300_000)
    before = (root / "file").stat().st_ino
    with Program() as program, (root / "file").open("r+b") as file, os.scandir(root / "dir") as listing:
        program(f"os.chdir({str(root / 'dir' / 'below')!r})")
        program(f"held = open({str(root / 'file')!r}, 'r+b')")
        program("fcntl.flock(held, fcntl.LOCK_EX)")
        seen = [next(listing).name for _ in range(100)]
        for name in seen:
            if name != "below":
                (root / "dir" / name).unlink()
        with mmap.mmap(file.fileno(), 0) as mapping:
            mapping[0:1] = b"b"
            kept.kill()
            (root / "dir").rename(root / "moved")
            kept.kill()
            mapping[200_000:200_001] = b"c"
            mapping.flush()
            data = (root / "file").read_bytes()
            assert (data[0:2], data[199_999:200_002]) == (b"ba", b"aca")
        assert program("os.getcwd()") == str(root / "moved" / "below")
        program("open('new', 'w').close()")
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert (root / "file").stat().st_ino == os.fstat(file.fileno()).st_ino == before
        seen += [entry.name for entry in listing]
        assert len(seen) == len(set(seen)) == 1001
    assert inside(container, "ls /workspace/moved/below") == b"new\n"
    assert "keeper\tpid" in succeeded(vfsd("status", "-w", kept.name))
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
@pytest.mark.parametrize("change", ["exclusive create", "rename"])
def test_a_request_is_executed_once_at_whichever_step_the_daemon_dies(kept: KeptContainer, change: str) -> None:
    check_executed_once(kept, change)


@pytest.mark.extended
def test_an_owner_is_mapped_also_by_the_next_daemon(keep: Callable[..., KeptContainer]) -> None:
    kept = keep(options=MAPPED)
    check_executed_once(kept, "mkdir")
    assert {path.stat().st_uid for path in kept.path.rglob("*")} == {0}


@pytest.mark.extended
def test_programs_wait_for_a_podman_service_that_is_restarted_when_the_daemon_dies(
    keep: Callable[..., KeptContainer], workdir: Path
) -> None:
    kept = keep()
    service, address = kept.container.service.address.path, workdir / "podman.sock"
    address.symlink_to(service)
    mounted = kept.mount(podman_url=f"unix://{address}")
    with (kept.path / "file").open("wb", buffering=0) as file:
        address.unlink()
        assert "no Podman service is there" in (mounted.status().container or "")
        os.kill(kept.record.pid, signal.SIGKILL)
        wait_until(lambda: "waiting for Podman" in log_of(kept.name), "a daemon that waits")
        address.symlink_to(service)
        file.write(b"x")
    assert inside(kept.container, "cat /workspace/file") == b"x"
    assert mounted.status().container == "running"


@pytest.mark.extended
@pytest.mark.parametrize("is_running", [False, True], ids=["stopped", "restarted"])
def test_a_container_that_ended_while_no_daemon_ran_ends_the_mount(kept: KeptContainer, is_running: bool) -> None:
    kept.mount()
    (kept.path / "file").write_bytes(b"x")
    with keeper_that_gives_up(kept):
        kept.container.kill()
        if is_running:
            kept.container.start()
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(kept.path)
    restarted = {"rootfs": "was restarted since", "agent": "the helper that has the files open has ended"}[
        kept.transport
    ]
    assert (restarted if is_running else "is not running") in log_of(kept.name)


@pytest.mark.extended
def test_a_container_that_is_restarted_under_a_daemon_is_served_and_has_no_keeper_any_more(
    keep: Callable[..., KeptContainer],
) -> None:
    kept = keep()
    workspace = kept.mount()
    (kept.path / "file").write_bytes(b"x")
    control(kept.container, "restart", timeout=0)
    wait_until(is_served_again(workspace))
    assert (kept.path / "file").read_bytes() == b"x"
    assert "none any more: the container was restarted" in succeeded(vfsd("status", "-w", kept.name))
    wait_until(lambda: kept.record.lost_keeper is not None)
    assert f"the keeper of {kept.name} could not restart its daemon: the container was" in vfsd("doctor").stdout


@pytest.mark.extended
def test_a_container_that_is_restarted_is_served_and_the_helper_in_it_has_a_keeper_as_before(
    keep: Callable[..., KeptContainer], python_image: str
) -> None:
    kept = keep("agent", image=python_image)
    workspace = kept.mount()
    (kept.path / "file").write_bytes(b"x")
    with (kept.path / "file").open("r+b", buffering=0) as file:
        control(kept.container, "restart", timeout=0)
        wait_until(is_served_again(workspace))
        kept.kill()
        file.write(b"y")
        succeeded(vfsd("upgrade", kept.name))
        assert os.pread(file.fileno(), 9, 0) == b"y"
    assert inside(kept.container, "cat /workspace/file") == b"y"
    check_invariants(Workspace.attach(kept.name))


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
