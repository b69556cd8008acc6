"""ContainerSpec: the description of a container to create."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PIDS_LIMIT: Final = 2048  # the default of `podman run`: containers.conf(5)
# The first process of vfsd's own containers: it waits, and reaps orphans (wait waits for every child).
INIT_COMMAND: Final = ("/bin/sh", "-c", 'trap "exit 0" TERM INT; while :; do sleep 86400 & wait $!; done')
# The values of --network that are not names of networks: podman-run(1).
_NETWORK_MODES: Final = ("none", "bridge", "host", "private", "slirp4netns", "pasta", "container:", "ns:")


@dataclass(frozen=True, slots=True)
class ContainerMount:
    """The directory `source` of the service's host, to be mounted at `destination`."""

    source: str
    destination: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A container of `image`.

    `command` replaces the image's entrypoint and command; None keeps both.  `options` are passed to
    `podman.domain.containers_create.CreateMixin.create` unchanged.
    """

    image: str
    name: str | None = None
    command: Sequence[str] | None = INIT_COMMAND
    network: str = "none"
    pids_limit: int = PIDS_LIMIT
    memory_bytes: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[ContainerMount] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of podman-py's `create`."""
        arguments: dict[str, Any] = {
            "name": self.name,
            "pids_limit": self.pids_limit,
            "mem_limit": self.memory_bytes,
            "labels": dict(self.labels),
            "mounts": [
                {"type": "bind", "source": mount.source, "target": mount.destination, "read_only": mount.read_only}
                for mount in self.mounts
            ],
            **_network_options(self.network),
            **self.options,
        }
        if self.command is not None:
            arguments["entrypoint"], arguments["command"] = [self.command[0]], list(self.command[1:])
        return {key: value for key, value in arguments.items() if value not in (None, [], {})}


def _network_options(network: str) -> dict[str, Any]:
    if any(network == mode or (network.startswith(mode) and mode.endswith(":")) for mode in _NETWORK_MODES):
        return {"network_mode": network}
    return {"network_mode": "bridge", "networks": {network: {}}}
