"""ContainerTarget: which container a workspace is in, and which directory of it."""

from __future__ import annotations

import errno
import posixpath
from dataclasses import dataclass
from typing import Final

from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.state import ContainerState

__all__ = ["DEFAULT_WORKDIR", "ContainerTarget", "check_running", "check_workdir"]

DEFAULT_WORKDIR: Final = "/workspace"


@dataclass(frozen=True, slots=True)
class ContainerTarget:
    """The directory `workdir` of a container.

    `name` is what the service is asked for each time: a name, so that a container that was removed and made anew is
    found again, or the id of one that is ours.
    """

    service: PodmanService
    name: str
    workdir: str = DEFAULT_WORKDIR

    def inspect(self) -> ContainerState:
        """The container as it is now.  ContainerNotFoundError."""
        return self.service.inspect(self.name)

    def container(self) -> Container:
        """A handle of the container that is there now.  ContainerNotFoundError."""
        return self.service.container(self.name)


def check_workdir(workdir: str) -> str:
    """`workdir` without what means nothing in it.  ValueError for one that is not absolute, or goes up."""
    if not workdir.startswith("/") or "\0" in workdir or ".." in workdir.split("/"):
        raise ValueError(f"the working directory must be an absolute path in the container, without ..: {workdir!r}")
    return "/" + posixpath.normpath(workdir).lstrip("/")


def check_running(state: ContainerState) -> ContainerState:
    """`state`, of a container that runs.  OSError (EIO) with what to do where it does not."""
    if not state.running:
        raise OSError(errno.EIO, f"the container is not running ({state.describe()}): podman start {state.name}")
    return state
