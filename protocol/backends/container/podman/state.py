"""ContainerState: the state of a container as Podman reports it at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ContainerMount", "ContainerState", "state_of"]


@dataclass(frozen=True, slots=True)
class ContainerMount:
    """A mount at `destination` in the container.  `source` is a path on the service's host, or "".

    `size_bytes` limits a tmpfs of a container to create.
    """

    kind: str  # "bind", "volume", "tmpfs"
    source: str
    destination: str
    read_only: bool = False
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ContainerState:
    """One container, as `podman inspect` shows it.

    `pid` is the init process's on the service's host, `conmon_pid` its monitor's; both are 0 if it is not running.
    `status` is Podman's: created, initialized, running, paused, stopping, exited, ...
    `user` is the default user of commands, as the image or `--user` names it ("" is root).
    """

    id: str
    name: str
    image: str
    status: str
    pid: int
    conmon_pid: int
    exit_code: int
    oom_killed: bool
    user: str
    working_dir: str
    pids_limit: int | None
    network: str
    mounts: tuple[ContainerMount, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

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
    state, config, host = shown["State"], shown.get("Config") or {}, shown.get("HostConfig") or {}
    running = state.get("Status") in {"running", "paused"}
    return ContainerState(
        id=shown["Id"],
        name=shown.get("Name", "").removeprefix("/"),
        image=shown.get("ImageName") or config.get("Image") or "",
        status=state.get("Status", "unknown"),
        pid=int(state.get("Pid") or 0) if running else 0,
        conmon_pid=int(state.get("ConmonPid") or 0) if running else 0,
        exit_code=int(state.get("ExitCode") or 0),
        oom_killed=bool(state.get("OOMKilled")),
        user=config.get("User") or "",
        working_dir=config.get("WorkingDir") or "/",
        pids_limit=_positive(host.get("PidsLimit")),
        network=host.get("NetworkMode") or "",
        mounts=tuple(_mounts(shown)),
        labels=dict(config.get("Labels") or {}),
        environment=dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry),
    )


def _positive(number: int | None) -> int | None:
    return number if number and number > 0 else None


def _mounts(shown: Mapping[str, Any]) -> list[ContainerMount]:
    found = [
        ContainerMount(
            kind=mount.get("Type", ""),
            source=mount.get("Source", ""),
            destination=mount.get("Destination", ""),
            read_only=not mount.get("RW", True),
        )
        for mount in shown.get("Mounts") or ()
    ]
    # Podman lists tmpfs mounts separately.
    tmpfs = (shown.get("HostConfig") or {}).get("Tmpfs") or {}
    return found + [ContainerMount("tmpfs", "", place, "ro" in options.split(",")) for place, options in tmpfs.items()]
