"""ContainerTarget: the container of a workspace and the directory in it."""

from __future__ import annotations

import errno
import posixpath
from dataclasses import dataclass
from typing import Final

from protocol.backends.container.podman.advice import podman
from protocol.backends.container.podman.errors import ContainerNotFoundError
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.state import ContainerState

DEFAULT_WORKDIR: Final = "/workspace"


@dataclass(frozen=True, slots=True)
class ContainerTarget:
    """The directory `workdir` of a container.

    Each call asks the service for `name`: a name, so that a container that was removed and created again is found, or
    the id of a container of vfsd's own.
    """

    service: PodmanService
    name: str
    workdir: str = DEFAULT_WORKDIR

    def inspect(self) -> ContainerState:
        """The container's current state.  ContainerNotFoundError."""
        return self.service.inspect(self.name)

    # -- `protocol.backends.container.connection.Target` ---------------------------------------------------
    @property
    def label(self) -> str:
        return f"container {self.name}"

    @property
    def no_answer(self) -> str:
        return f"Podman does not answer at {self.service.address}"

    def check(self) -> ContainerState:
        state = self.inspect()
        if not state.running:
            start = f"{podman(self.service.address)} start {state.name}"
            raise OSError(errno.EIO, f"the container is not running ({state.describe()}): {start}")
        return state

    def describe(self) -> str:
        try:
            return self.inspect().describe()
        except ContainerNotFoundError:
            return "removed"

    def advice(self, reason: str) -> str:  # noqa: ARG002 (Podman's answer says more)
        try:
            self.check()
        except ContainerNotFoundError:
            return f"the container {self.name} was removed: `vfsd unmount`, or create it again under this name"
        return "the container is running, but is not connected yet: try again"

    def container(self) -> Container:
        """A handle of the current container.  ContainerNotFoundError."""
        return self.service.container(self.name)


def check_workdir(workdir: str) -> str:
    """Normalise `workdir`.  ValueError if it is not absolute or contains ".."."""
    if not workdir.startswith("/") or "\0" in workdir or ".." in workdir.split("/"):
        raise ValueError(f"the working directory must be an absolute path in the container, without ..: {workdir!r}")
    return "/" + posixpath.normpath(workdir).lstrip("/")
