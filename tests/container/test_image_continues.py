"""`image:` workspaces whose daemon dies or is upgraded: the container goes on, and only an unmount removes it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.container.podman.ownership import orphans, remove_orphans
from protocol.backends.container.podman.service import PodmanService
from tests.container.conftest import containers_of, inside
from tests.container.workspaces import KeptImage, OneContainer, check_removed, ended_after, keeper_that_gives_up
from tests.mount.conftest import check_invariants
from tests.mount.kept_workspaces import (
    change_at_random,
    end_kept,
    facts,
    kill_replacements,
)
from tests.mount.programs import failed, log_of, succeeded, vfsd
from tests.mount.test_unit_keeper import STARTED, UNIT, kill, upgrade
from tests.mount.test_upgrade import Dying, Upgradable
from tests.support.service_manager import Unit
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse


@pytest.fixture
def kept(workdir: Path, podman: PodmanService, busybox_image: str) -> Iterator[KeptImage]:
    made = KeptImage(workdir, podman, busybox_image)
    yield made
    end_kept(made)
    check_removed(podman, made.name)


@pytest.fixture
def upgradable(workdir: Path, podman: PodmanService, busybox_image: str) -> Iterator[Callable[..., Upgradable]]:
    def make(**options: Any) -> Upgradable:
        return Upgradable(workdir, backend=f"image:{busybox_image}", podman_url=podman.address.url, **options)

    def end(each: Upgradable) -> None:
        each.end()
        check_removed(podman, each.name)

    with ended_after(make, end) as start:
        yield start


# -- a keeper ----------------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_random_writer_sees_what_its_twin_sees(kept: KeptImage, workdir: Path, runs_long: bool) -> None:
    workspace = kept.mount()
    twin = workdir / "twin"
    twin.mkdir()
    deadline = time.monotonic() + (300 if runs_long else 1)
    with kept.one_container().being_searched(), kept.being_killed(1):
        change_at_random([kept.path, twin], 1, lambda: time.monotonic() > deadline and kept.kills > 3)
    assert facts(kept.path) == facts(twin)
    assert "restarted the daemon" in succeeded(vfsd("status", "-w", kept.name))
    assert succeeded(vfsd("exec", "-w", kept.name, "--", "echo", "in the container")) == "in the container\n"
    check_invariants(workspace)


def test_replacements_are_killed_while_they_take_the_container_over(kept: KeptImage) -> None:
    kept.mount()
    (kept.path / "f").write_bytes(b"x")
    with kept.one_container().being_searched():
        record = kept.record
        os.kill(record.pid, signal.SIGKILL)
        kill_replacements(kept, 3)
        assert (kept.path / "f").read_bytes() == b"x"
        wait_until(lambda: kept.record.alive and kept.record.pid != record.pid, "a replacement")


def test_daemon_and_keeper_are_killed_and_the_next_mount_continues(kept: KeptImage, podman: PodmanService) -> None:
    kept.mount()
    (kept.path / "f").write_bytes(b"hours of work")
    one = kept.one_container()
    for _ in range(2):
        kept.kill_both()
        assert "in its container, where the same `vfsd mount` continues" in failed(vfsd("status", "-w", kept.name))
        assert [state.id for state in orphans(podman)] == [one.container.id]
        assert remove_orphans(podman) == []
        options = ["--backend", kept.options["backend"], "--podman-url", podman.address.url, "--name", kept.name]
        again = vfsd("mount", str(kept.path), *options)
        assert f"had died; this mount continues in the container {one.container.name}" in again.stderr
        assert (kept.path / "f").read_bytes() == b"hours of work"
        with one.being_searched():
            kept.kill()
            assert (kept.path / "f").read_bytes() == b"hours of work"


@pytest.mark.extended
def test_a_keeper_that_gives_up_leaves_the_container_to_the_next_mount(kept: KeptImage) -> None:
    kept.mount()
    (kept.path / "f").write_bytes(b"x")
    one = kept.one_container()
    with keeper_that_gives_up(kept):
        one.container.kill()
    assert "is not running" in log_of(kept.name)
    kept.mount()
    assert (kept.path / "f").read_bytes() == b"x"
    assert [each.id for each in containers_of(kept.podman, kept.name)] == [one.container.id]


@pytest.mark.extended
def test_a_container_that_was_removed_while_no_daemon_ran_ends_the_mount_and_the_next_one_is_new(
    kept: KeptImage,
) -> None:
    kept.mount()
    one = kept.one_container()
    with keeper_that_gives_up(kept):
        one.container.remove()
    assert "the container of the workspace was removed or renamed" in log_of(kept.name)
    kept.mount()
    assert os.listdir(kept.path) == []


# -- upgrades ----------------------------------------------------------------------------------------
@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [{"protect": ("secret",), "memory_bytes": 64 << 20}, {"keeper": False}],
    ids=["keeper", "no keeper"],
)
def test_an_upgrade_hands_the_container_over(
    upgradable: Callable[..., Upgradable], podman: PodmanService, options: dict[str, Any]
) -> None:
    workspace = upgradable(**options)
    attached = workspace.mount()
    one = OneContainer(podman, workspace.name)
    inside(one.container, "echo one > /workspace/secret")
    attached.snapshot("one")
    (workspace.path / "f").write_bytes(b"x")
    with one.being_searched(), (workspace.path / "f").open("rb", buffering=0) as file:
        workspace.upgrade()
        assert file.read(1) == b"x"
        file.seek(0)
        assert inside(one.container, "cat /workspace/f") == b"x"
        if "protect" in options:
            with pytest.raises(PermissionError):
                (workspace.path / "secret").write_text("two")
        if options.get("keeper", True):
            pid = workspace.record.pid
            os.kill(pid, signal.SIGKILL)
            assert file.read(1) == b"x"
            wait_until(lambda: workspace.record.pid != pid, "a replacement")
        attached.restore("one")
    assert os.listdir(workspace.path) == ["secret"]
    assert succeeded(vfsd("exec", "-w", workspace.name, "--", "cat", "secret")) == "one\n"
    check_invariants(Workspace.attach(workspace.name))


@pytest.mark.extended
def test_either_daemon_is_killed_at_the_last_steps_of_an_upgrade(
    upgradable: Callable[..., Upgradable], podman: PodmanService, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other steps do not depend on the backend: see `tests.mount.test_upgrade`."""
    workspace = upgradable()
    dying = Dying(workspace, workdir, monkeypatch)
    one = OneContainer(podman, workspace.name)
    with one.being_searched(), dying.being_written():
        for step in ("after Loaded", "before Go", "after Go"):
            dying.upgrade_at(step)
            dying.check()
            wait_until(lambda: workspace.record.is_kept, "a keeper")


@pytest.mark.extended
def test_an_upgraded_workspace_whose_processes_are_all_killed_continues(
    upgradable: Callable[..., Upgradable], podman: PodmanService
) -> None:
    workspace = upgradable()
    workspace.mount()
    (workspace.path / "f").write_bytes(b"x")
    one = OneContainer(podman, workspace.name)
    workspace.upgrade()
    record = workspace.record
    assert record.keeper is not None
    os.kill(record.keeper, signal.SIGKILL)
    os.kill(record.pid, signal.SIGKILL)
    # The daemon before the upgrade has the lease until it has ended.
    wait_until(lambda: [state.id for state in orphans(podman)] == [one.container.id], "the end of all daemons")
    workspace.mount()
    assert (workspace.path / "f").read_bytes() == b"x"
    one.check()


# -- systemd -----------------------------------------------------------------------------------------
@pytest.mark.extended
def test_in_a_unit_the_container_goes_on_with_the_next_daemon(
    workdir: Path, podman: PodmanService, busybox_image: str
) -> None:
    options = f"--backend image:{busybox_image} --podman-url {podman.address.url}"
    service = Unit(UNIT, workdir, STARTED, options)
    with service.managed() as manager:
        one = OneContainer(podman, service.name)
        (service.mountpoint / "f").write_bytes(b"x")
        with one.being_searched(), (service.mountpoint / "f").open("rb", buffering=0) as file:
            kill(service)
            assert os.pread(file.fileno(), 1, 0) == b"x"
            upgrade(service, manager)
            kill(service)
            assert os.pread(file.fileno(), 1, 0) == b"x"
        manager.stop()
    check_removed(podman, service.name)
