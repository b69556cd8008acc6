"""Containers that vfsd makes, owns and removes: labelled with the daemon that they are for.

A daemon removes its container when it ends.  A daemon that is killed leaves it behind.  The next daemon that uses the
same Podman removes such a container if it can prove that the owner is dead:

- The owner is identified by machine, user, boot, pid namespace, pid and start time.  A pid means something only in its
  pid namespace during its boot, so only a daemon in the same namespace and boot looks for the process.
- After a reboot of this machine every earlier owner is dead.  "This machine" is proven only for daemons in the initial
  pid namespace over a local service: images of containers share machine-ids, and a remote Podman serves several
  machines.  Such a container is removed unless it runs (somebody has started it again).
- All others are left alone; docs/containers.md says how to remove them by hand.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from protocol.backends.container.podman.service import PIDS_LIMIT, Container, PodmanService
from protocol.backends.container.podman.state import ContainerMount, ContainerState

__all__ = ["WORKSPACE_LABEL", "create_owned", "has_died", "remove_orphans", "this_daemon"]

_logger = logging.getLogger(__name__)

WORKSPACE_LABEL: Final = "vfsd.workspace"
_MACHINE_LABEL: Final = "vfsd.machine"
_BOOT_LABEL: Final = "vfsd.boot"
_DAEMON_LABEL: Final = "vfsd.daemon"
_INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h: the same in every boot


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
        if _is_orphan(state, is_local=service.is_local):
            workspace = state.labels[WORKSPACE_LABEL]
            _logger.info(
                "removing container %s, left by the daemon of %s, which had died", state.name, workspace,
                extra={"operation": "container"},
            )  # fmt: skip
            Container(service, state.id, state.name).remove()
            removed.append(workspace)
    return removed


def _is_orphan(state: ContainerState, *, is_local: bool) -> bool:
    """Whether the daemon that made the container is certainly dead."""
    boot, _, namespace = state.labels.get(_BOOT_LABEL, "").partition(":")
    if not namespace or namespace != _pid_namespace():
        return False
    if boot != _boot_id():
        return is_local and namespace == _INITIAL_PID_NAMESPACE and not state.running
    pid, _, started = state.labels.get(_DAEMON_LABEL, "").partition(":")
    return pid.isdigit() and _start_ticks(int(pid)) != started


def this_daemon() -> str:
    """This process, for `has_died` in another."""
    return f"{_boot()} {os.getpid()}:{_start_ticks(os.getpid())}"


def has_died(daemon: str) -> bool:
    """Whether it was a process of this boot and this process namespace, and is one no more."""
    boot, _, process = daemon.rpartition(" ")
    pid, _, started = process.partition(":")
    is_known = bool(_pid_namespace()) and boot == _boot()
    return is_known and pid.isdigit() and _start_ticks(int(pid)) != started


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
    """The scope of process ids: this boot, and this pid namespace."""
    return f"{_boot_id()}:{_pid_namespace()}"


def _boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    """This process's; "" where /proc is of another one (unshare(1) without --mount-proc): it shows other pids."""
    is_ours = os.readlink("/proc/self") == str(os.getpid())
    return os.readlink("/proc/self/ns/pid") if is_ours else ""


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
