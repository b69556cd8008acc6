"""ContainerState: what vfsd needs of the state of a container, as Podman reports it at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
