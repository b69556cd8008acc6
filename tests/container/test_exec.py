"""`vfsd exec` where a workspace's commands run in a container: a sandbox, and both kinds of container workspaces."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from protocol.backends.container.podman.service import Container, PodmanService
from tests.container.conftest import BUSYBOX, StartContainer, inside
from tests.mount.conftest import mounted, socket_of
from tests.support.exec_suite import ExecSuite, Where, line_of, run, started
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace


def where_of(workspace: Workspace, container: Container, root: str = "/workspace") -> Where:
    def running(text: str) -> int:
        lines = inside(container, "ps -o args").decode().splitlines()
        return sum(text in line for line in lines)

    return Where(workspace.name, socket_of(workspace), Path(workspace.path), root, running)


def container_of(podman: PodmanService, workspace: Workspace) -> Container:
    """The one that its daemon has made."""
    (state,) = podman.labelled({"vfsd.workspace": workspace.name})
    return Container(podman, state.id, state.name)


def one_for_all(session_dir: str, podman: PodmanService, **options: Any) -> Iterator[Where]:
    """A workspace for a class of tests."""
    place = Path(tempfile.mkdtemp(dir=f"{session_dir}/work", prefix="x"))
    with mounted(place / "m", name=place.name, podman_url=podman.address.url, **options) as workspace:
        yield where_of(workspace, container_of(podman, workspace))


class TestInASandbox(ExecSuite):
    """Commands in a sandbox of a memory workspace."""

    options: ClassVar[dict[str, Any]] = {"sandbox": f"image:{BUSYBOX}"}

    @pytest.fixture(scope="class")
    @classmethod
    def where(cls, podman: PodmanService, busybox_image: str, session_dir: str) -> Iterator[Where]:
        yield from one_for_all(session_dir, podman, **cls.options)


@pytest.mark.long
class TestInASandboxOnPyfuse3(TestInASandbox):
    """The same by the other engine."""

    options: ClassVar[dict[str, Any]] = {"sandbox": f"image:{BUSYBOX}", "engine": "pyfuse3"}


@pytest.mark.long
class TestInAnImagesContainer(TestInASandbox):
    """Commands in the container of image:REF."""

    options: ClassVar[dict[str, Any]] = {"backend": f"image:{BUSYBOX}", "cache_timeout_s": 0}


@pytest.mark.extended
@pytest.mark.parametrize("keeper", [False, True], ids=["next mount", "keeper"])
def test_what_a_killed_daemon_left_in_a_container_that_stays_is_ended_by_the_next(
    start_container: StartContainer, podman: PodmanService, workdir: Path, keeper: bool
) -> None:
    container = start_container()
    inside(container, "mkdir /workspace; setsid sleep 9000 > /dev/null 2>&1 &")
    (workdir / "m").mkdir()
    options: dict[str, Any] = {"name": workdir.name, "podman_url": podman.address.url, "keeper": keeper}
    first = Workspace.mount(workdir / "m", f"container:{container.name}", **options)
    where = where_of(first, container)
    with started(where, "--", "sh", "-c", "setsid sleep 7005 & echo ready; exec sleep 7005") as client:
        assert line_of(client) == b"ready\n"
        os.kill(first.pid, signal.SIGKILL)
        assert client.wait(60) == 125
    assert keeper or where.running("sleep 7005") > 0
    if keeper:
        wait_until(lambda: Workspace.attach(workdir.name).pid != first.pid, "a replacement")
        following = Workspace.attach(workdir.name)
    else:
        following = Workspace.mount(workdir / "m", f"container:{container.name}", **options)
    with contextlib.ExitStack() as stack:
        stack.callback(following.unmount)
        wait_until(lambda: where.running("sleep 7005") == 0, "the end of the command")
        assert run(where, "--", "true").returncode == 0
        assert (where.running("sleep 7005"), where.running("sleep 9000")) == (0, 1)


@pytest.mark.extended
def test_commands_of_a_container_workspace_run_in_that_container(
    start_container: StartContainer, podman: PodmanService, workdir: Path
) -> None:
    container = start_container()
    inside(container, "mkdir -p /srv/app && echo here > /srv/app/f && chown dev /srv/app")
    options: dict[str, Any] = {"podman_url": podman.address.url, "workdir": "/srv/app", "cache_timeout_s": 0}
    (workdir / "m").mkdir()
    # Not `mounted`: the log has a warning of the container's stop.
    with Workspace.mount(workdir / "m", f"container:{container.name}", name=workdir.name, **options) as workspace:
        where = where_of(workspace, container, "/srv/app")
        done = run(where, "--", "sh", "-c", "cat f; hostname; pwd; echo new > made")
        assert done.stdout.decode().split() == ["here", container.id[:12], "/srv/app"]
        assert (Path(workspace.path) / "made").read_text() == "new\n"
        assert run(where, "--user", "dev", "--", "id", "-un").stdout == b"dev\n"
        inside(container, "setsid sleep 9000 > /dev/null 2>&1 &")
        run(where, "--", "sh", "-c", "setsid sleep 7004 &")
        assert (where.running("sleep 7004"), where.running("sleep 9000")) == (0, 1)
        container.kill()
        stopped = run(where, "--", "true")
        assert stopped.returncode == 125
        assert f"podman --url {container.service.address} start {container.name}" in stopped.stderr.decode()
        container.start()
        assert run(where, "--", "cat", "made").stdout == b"new\n"
