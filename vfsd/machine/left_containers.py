"""Containers that daemons of `image:` workspaces left, and which nothing removes unasked: for `vfsd doctor`."""

from __future__ import annotations

from contextlib import closing
from typing import Final

from protocol.values import Value

_TIMEOUT_S: Final = 10.0


class LeftContainer(Value):
    """A container with the files of `workspace`."""

    name: str
    workspace: str


def left_containers(url: str) -> list[LeftContainer]:
    """List the containers with files that earlier daemons of this user left on the Podman service at `url`.  Blocks.

    ImportError without Podman's client; OSError if the service does not answer.
    """
    # Start-up: `vfsd doctor` only, and Podman's client is an optional dependency.
    from protocol.backends.container.podman.ownership import WORKSPACE_LABEL, orphans  # noqa: PLC0415
    from protocol.backends.container.podman.service import PodmanService  # noqa: PLC0415

    with closing(PodmanService(url, timeout_s=_TIMEOUT_S)) as service:
        return [LeftContainer(state.name, state.labels[WORKSPACE_LABEL]) for state in orphans(service)]
