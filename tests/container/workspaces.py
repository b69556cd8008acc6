"""Workspaces in containers that tests end and continue: with a keeper, to be upgraded, or left by a killed daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from protocol.backends.container.podman.ownership import orphans, remove_orphans
from protocol.backends.container.podman.service import Container, PodmanService
from tests.container.conftest import containers_of
from tests.mount.conftest import socket_of
from tests.mount.kept_workspaces import Kept
from tests.mount.programs import wait_ended
from tests.mount.test_upgrade import Upgradable
from tests.support.processes import kill
from vfsd.client.connection import daemon_end
from vfsd.client.workspace import Workspace
from vfsd.machine.mounts import clear_dead_mount

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def ended_after(make: Callable[P, T], end: Callable[[T], object]) -> Iterator[Callable[P, T]]:
    """Yield `make`; at the end of the block, call `end` with all that it made."""
    made: list[T] = []

    def start(*arguments: P.args, **options: P.kwargs) -> T:
        made.append(make(*arguments, **options))
        return made[-1]

    yield start
    for each in made:
        end(each)


# -- a container of the user's -------------------------------------------------------------------------
class KeptContainer(Kept):
    """A container's directory with a keeper."""

    def __init__(self, workdir: Path, container: Container, transport: str) -> None:
        super().__init__(workdir)
        self.container = container
        self.transport = transport

    def wait_answered(self) -> None:
        (self.path / f"missing{self.kills}").exists()

    @property
    def options(self) -> dict[str, Any]:
        url = self.container.service.address.url
        return {"backend": f"container:{self.container.name}", "podman_url": url, "transport": self.transport}


class InContainer(Upgradable):
    """The directory of a container, to be upgraded."""

    def __init__(self, workdir: Path, container: Container, **options: Any) -> None:
        self.container = container
        url = container.service.address.url
        super().__init__(workdir, backend=f"container:{container.name}", podman_url=url, **options)


@contextlib.contextmanager
def keeper_that_gives_up(kept: Kept) -> Iterator[None]:
    """Kill the daemon; after the block, have the keeper start another one, and wait until it has given up."""
    record = kept.record
    assert record.keeper is not None
    os.kill(record.keeper, signal.SIGSTOP)
    os.kill(record.pid, signal.SIGKILL)
    try:
        yield
    finally:
        os.kill(record.keeper, signal.SIGCONT)
    wait_ended(record.keeper)


# -- a container that vfsd made ------------------------------------------------------------------------
class KeptImage(Kept):
    """A container of an image with a keeper."""

    def __init__(self, workdir: Path, podman: PodmanService, image: str) -> None:
        super().__init__(workdir)
        self.podman = podman
        self.options_of_image: dict[str, Any] = {"backend": f"image:{image}", "podman_url": podman.address.url}

    @property
    def options(self) -> dict[str, Any]:
        return self.options_of_image

    def one_container(self) -> OneContainer:
        return OneContainer(self.podman, self.name)

    def kill_both(self) -> None:
        """Kill the keeper and then the daemon."""
        record = self.record
        assert record.keeper is not None
        kill(record.keeper, record.pid)  # until they have ended, they hold the container's lease


class OneContainer:
    """The container of a workspace, which is to stay the only one; another daemon looks for orphans all the time."""

    def __init__(self, podman: PodmanService, workspace: str) -> None:
        self._podman = podman
        self._workspace = workspace
        (self.container,) = containers_of(podman, workspace)
        self._run = self.container.inspect().pid

    def check(self) -> None:
        (container,) = containers_of(self._podman, self._workspace)
        assert (container.id, container.inspect().pid) == (self.container.id, self._run)

    @contextlib.contextmanager
    def being_searched(self) -> Iterator[None]:
        stop, found = threading.Event(), []

        def search() -> None:
            while not stop.wait(0.1):
                found.extend(state.name for state in orphans(self._podman))
                found.extend(remove_orphans(self._podman))

        thread = threading.Thread(target=search)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert found == []
        self.check()


def check_removed(podman: PodmanService, workspace: str) -> None:
    """Check that an unmount has removed the container, whichever daemon made it."""
    left = containers_of(podman, workspace)
    for container in left:
        container.remove()  # not to fail the next tests as well
    assert left == []


@contextlib.contextmanager
def left_by_a_killed_daemon(place: Path, name: str, podman: PodmanService, image: str) -> Iterator[Container]:
    """Yield the container of a workspace `name` with the file `f`: its daemon was killed, and its mount is gone."""
    workspace = Workspace.mount(place, f"image:{image}", keeper=False, podman_url=podman.address.url, name=name)
    (place / "f").write_text("work")
    pid = workspace.status().pid
    with daemon_end(pid) as wait_ended:
        os.kill(pid, signal.SIGKILL)
        wait_ended()
    clear_dead_mount(str(place))
    (container,) = containers_of(podman, name)
    yield container
    for each in containers_of(podman, name):
        each.remove()
    for path in (socket_of(workspace), socket_of(workspace).removesuffix(".sock") + ".json"):
        Path(path).unlink(missing_ok=True)
