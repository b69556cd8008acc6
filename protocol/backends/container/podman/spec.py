"""ContainerSpec, the description of a container to create, and ContainerState, its state as Podman reports it.

Resource limits are lowered to those that Podman can set on this machine (`permitted_ulimits`).  Podman gives a
container of root's a hard limit of 1048576 open files and processes unless containers.conf sets another.  If Podman
itself has a lower hard limit and may not raise it (a container without CAP_SYS_RESOURCE, as in CI services), the
container is created but does not start: "error setting rlimit type 7: operation not permitted".

Source: setrlimit(2), containers.conf(5) "default_ulimits".
"""

from __future__ import annotations

import resource
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


@dataclass(frozen=True, slots=True)
class ContainerState:
    """One container, as `podman inspect` shows it.

    `pid` is the init process's on the service's host, `conmon_pid` its monitor's; both are 0 if it is not running.
    `status` is Podman's: created, initialized, running, paused, stopping, exited, ...
    """

    id: str
    name: str
    status: str
    pid: int
    conmon_pid: int
    exit_code: int
    oom_killed: bool
    labels: Mapping[str, str]

    @property
    def running(self) -> bool:
        """Whether the container's processes exist; they may be paused."""
        return self.status in {"running", "paused"} and self.pid > 0

    @property
    def paused(self) -> bool:
        return self.status == "paused"

    def describe(self) -> str:
        """The status in words: "exited with status 137, out of memory"."""
        if self.status != "exited":
            return self.status
        return f"exited with status {self.exit_code}{', out of memory' if self.oom_killed else ''}"


def state_of(shown: Mapping[str, Any]) -> ContainerState:
    """The state in the document of GET /libpod/containers/NAME/json."""
    state = shown["State"]
    running = state.get("Status") in {"running", "paused"}
    return ContainerState(
        id=shown["Id"],
        name=shown.get("Name", "").removeprefix("/"),
        status=state.get("Status", "unknown"),
        pid=int(state.get("Pid") or 0) if running else 0,
        conmon_pid=int(state.get("ConmonPid") or 0) if running else 0,
        exit_code=int(state.get("ExitCode") or 0),
        oom_killed=bool(state.get("OOMKilled")),
        labels=dict((shown.get("Config") or {}).get("Labels") or {}),
    )


PODMAN_DEFAULT: Final = 1048576  # of open files and of processes, for root
# Only the limits that Podman sets by default; others were requested explicitly.
_NAMES: Final = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}


def own_hard_limits() -> dict[str, int]:
    """This process's finite hard limits, by Podman's names."""
    limits = {name: resource.getrlimit(number)[1] for name, number in _NAMES.items()}
    return {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}


def permitted_ulimits(container: Mapping[str, Any], hard_limits: Mapping[str, int]) -> list[dict[str, Any]]:
    """The limits with which to create `container` (as Podman inspects it) again; empty if its own can be set.

    Limits above `hard_limits` are lowered to them.
    """
    given = {
        str(limit["Name"]).lower().removeprefix("rlimit_"): limit
        for limit in container.get("HostConfig", {}).get("Ulimits") or ()
    }
    if not any(_exceeds(limit, hard_limits.get(name)) for name, limit in given.items()):
        return []
    return [
        {"Name": name, **{kind: _lowered(limit[kind], hard_limits.get(name)) for kind in ("Soft", "Hard")}}
        for name, limit in given.items()
    ]


def _exceeds(limit: Mapping[str, Any], most: int | None) -> bool:
    return int(limit["Hard"]) != _lowered(limit["Hard"], most)


def _lowered(value: int, most: int | None) -> int:
    if most is None:
        return value
    return most if value < 0 else min(value, most)  # -1: no limit
