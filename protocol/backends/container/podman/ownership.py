"""Containers that vfsd creates, owns and removes, with labels that identify the owning daemon.

A daemon removes its container when it ends.  A daemon that is killed leaves it behind.  The next daemon that uses the
same Podman removes such a container if it can prove that the owner is dead:

- The owner is identified by machine, user, boot, pid namespace, pid and start time.  A pid means something only in its
  pid namespace during its boot, so only a daemon in the same namespace and boot looks for the process.
- After a reboot of this machine every earlier owner is dead.  "This machine" is proven only for daemons in the initial
  pid namespace over a local service: images of containers share machine-ids, and a remote Podman serves several
  machines.  Such a container is removed unless it runs (somebody has started it again).
- All others stay; docs/containers.md says how to remove them by hand.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Final

from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.spec import ContainerSpec
from protocol.backends.container.podman.state import ContainerState

_logger = logging.getLogger(__name__)

WORKSPACE_LABEL: Final = "vfsd.workspace"
_MACHINE_LABEL: Final = "vfsd.machine"
_BOOT_LABEL: Final = "vfsd.boot"
_DAEMON_LABEL: Final = "vfsd.daemon"
_INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h: the same in every boot


def create_owned(service: PodmanService, spec: ContainerSpec, workspace: str) -> Container:
    """Create and start a container for `workspace`, with a name and labels of vfsd's; the caller removes it.

    Pulls a missing image.  ImageNotFoundError; OSError if the container cannot be started, after removing it.
    """
    remove_orphans(service)
    if not service.image_exists(spec.image):
        _logger.info("pulling %s", spec.image, extra={"operation": "container"})
        service.pull(spec.image)
    name = f"vfsd-{workspace}-{os.urandom(3).hex()}"  # for `podman ps`; the random part keeps names distinct
    container = service.create(replace(spec, name=name, labels=_labels(workspace)))
    try:
        container.start()
    except BaseException:
        container.remove()
        raise
    return container


def remove_orphans(service: PodmanService) -> list[str]:
    """Remove the containers that dead daemons left, and return the names of their workspaces."""
    removed = []
    for state in service.labelled({WORKSPACE_LABEL: "", _MACHINE_LABEL: _machine()}):
        if _is_orphan(state, is_local=service.is_local):
            workspace = state.labels[WORKSPACE_LABEL]
            _logger.info(
                "removing container %s, left by the dead daemon of workspace %s", state.name, workspace,
                extra={"operation": "container"},
            )  # fmt: skip
            Container(service, state.id, state.name).remove()
            removed.append(workspace)
    return removed


def _is_orphan(state: ContainerState, *, is_local: bool) -> bool:
    """Whether the daemon that made the container is certainly dead."""
    boot = state.labels.get(_BOOT_LABEL, "")
    if boot == _boot():
        return has_died(f"{boot} {state.labels.get(_DAEMON_LABEL, '')}")
    namespace = boot.partition(":")[2]
    is_earlier_boot = namespace == _pid_namespace() == _INITIAL_PID_NAMESPACE
    return is_local and is_earlier_boot and not state.running


def this_daemon() -> str:
    """An identifier of this process, for `has_died` in another process."""
    return f"{_boot()} {os.getpid()}:{_start_ticks(os.getpid())}"


def has_died(daemon: str) -> bool:
    """Whether `daemon` was a process of this boot and this pid namespace that no longer runs."""
    boot, _, process = daemon.rpartition(" ")
    pid, _, started = process.partition(":")
    is_known = bool(_pid_namespace()) and boot == _boot()
    return is_known and pid.isdigit() and _start_ticks(int(pid)) != started


def _labels(workspace: str) -> dict[str, str]:
    boot, _, daemon = this_daemon().rpartition(" ")
    return {WORKSPACE_LABEL: workspace, _MACHINE_LABEL: _machine(), _BOOT_LABEL: boot, _DAEMON_LABEL: daemon}


def _machine() -> str:
    """machine-id(5) and the user: every user has a Podman storage of their own."""
    return f"{_read('/etc/machine-id') or os.uname().nodename}:{os.geteuid()}"


def _boot() -> str:
    """The scope of process ids: this boot, and this pid namespace."""
    return f"{_read('/proc/sys/kernel/random/boot_id')}:{_pid_namespace()}"


def _pid_namespace() -> str:
    """This process's pid namespace; "" if /proc shows another one (unshare(1) without --mount-proc)."""
    is_ours = os.readlink("/proc/self") == str(os.getpid())
    return os.readlink("/proc/self/ns/pid") if is_ours else ""


def _start_ticks(pid: int) -> str:
    """The start time of a process in clock ticks after boot; "" for none or a zombie (proc_pid_stat(5))."""
    shown = _read(f"/proc/{pid}/stat")
    fields = shown[shown.rfind(")") + 2 :].split()
    return fields[19] if len(fields) > 19 and fields[0] not in {"Z", "X"} else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().strip()
    except OSError:
        return ""
