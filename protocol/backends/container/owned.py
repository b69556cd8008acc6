"""Containers that vfsd makes, owns and removes: labelled with the daemon that they are for.

A daemon removes its container when it ends.  One that was killed leaves it; the next daemon that uses the same Podman
removes it, by the labels: where the owner was a process of this boot and this process namespace, and is dead, or
where the machine was started anew since and the container does not run.  What it cannot judge, it leaves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from protocol.backends.container.podman import PIDS_LIMIT, Container, PodmanService
from protocol.backends.container.state import ContainerMount, ContainerState

__all__ = ["WORKSPACE_LABEL", "create_owned", "has_died", "remove_orphans", "this_daemon"]

_logger = logging.getLogger(__name__)

WORKSPACE_LABEL: Final = "vfsd.workspace"
_MACHINE_LABEL: Final = "vfsd.machine"
_BOOT_LABEL: Final = "vfsd.boot"
_DAEMON_LABEL: Final = "vfsd.daemon"


def create_owned(
    service: PodmanService,
    image: str,
    workspace: str,
    *,
    network: str = "none",
    pids_limit: int = PIDS_LIMIT,
    memory_bytes: int | None = None,
    mounts: Sequence[ContainerMount] = (),
    working_dir: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Container:
    """A running container of `image` for `workspace`, which its maker has to remove.

    An image that is not there is pulled.  ImageNotFoundError; OSError where it cannot be started, with nothing left.
    """
    remove_orphans(service)
    if not service.image_exists(image):
        _logger.info("pulling %s", image, extra={"operation": "container"})
        service.pull(image)
    container = service.create(
        image,
        name=f"vfsd-{workspace}-{os.urandom(3).hex()}",  # for `podman ps`; no two ever meet
        network=network,
        pids_limit=pids_limit,
        memory_bytes=memory_bytes,
        labels=_labels(workspace),
        mounts=mounts,
        working_dir=working_dir,
        options=options,
    )
    try:
        container.start()
    except BaseException:
        container.remove()
        raise
    return container


def remove_orphans(service: PodmanService) -> list[str]:
    """Remove the containers that dead daemons left; the names of the workspaces they were for."""
    removed = []
    for state in service.labelled({WORKSPACE_LABEL: "", _MACHINE_LABEL: _machine()}):
        if _is_orphan(state):
            workspace = state.labels[WORKSPACE_LABEL]
            _logger.info(
                "removing container %s, left by the daemon of %s, which had died", state.name, workspace,
                extra={"operation": "container"},
            )  # fmt: skip
            Container(service, state.id, state.name).remove()
            removed.append(workspace)
    return removed


def _is_orphan(state: ContainerState) -> bool:
    daemon = state.labels.get(_DAEMON_LABEL, "")
    if state.labels.get(_BOOT_LABEL) != _boot():
        return not state.running
    pid, _, started = daemon.partition(":")
    return pid.isdigit() and _start_ticks(int(pid)) != started


def this_daemon() -> str:
    """This process, for `has_died` in another."""
    return f"{_boot()} {os.getpid()}:{_start_ticks(os.getpid())}"


def has_died(daemon: str) -> bool:
    """Whether it was a process of this boot and this process namespace, and is one no more."""
    boot, _, process = daemon.rpartition(" ")
    pid, _, started = process.partition(":")
    return boot == _boot() and pid.isdigit() and _start_ticks(int(pid)) != started


def _labels(workspace: str) -> dict[str, str]:
    return {
        WORKSPACE_LABEL: workspace,
        _MACHINE_LABEL: _machine(),
        _BOOT_LABEL: _boot(),
        _DAEMON_LABEL: f"{os.getpid()}:{_start_ticks(os.getpid())}",
    }


def _machine() -> str:
    """machine-id(5), and the user: his Podman is his."""
    return f"{_read('/etc/machine-id') or os.uname().nodename}:{os.geteuid()}"


def _boot() -> str:
    """Where a process id means something: this boot, and this namespace of processes."""
    return f"{_read('/proc/sys/kernel/random/boot_id')}:{os.readlink('/proc/self/ns/pid')}"


def _start_ticks(pid: int) -> str:
    """When the process started, in clock ticks after boot; "" for none, or a zombie.  proc_pid_stat(5)."""
    shown = _read(f"/proc/{pid}/stat")
    fields = shown[shown.rfind(")") + 2 :].split()
    return fields[19] if len(fields) > 19 and fields[0] not in {"Z", "X"} else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().strip()
    except OSError:
        return ""
