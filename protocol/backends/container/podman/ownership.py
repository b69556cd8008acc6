"""Containers that vfsd creates, owns and removes, with labels that identify the owner.

The owner is every process that holds the container's lease (`Lease`): the daemon, its keeper, and a daemon that takes
over from it.  A container whose owner is certainly dead is an orphan:

- The lease's name means something in its network namespace and boot only, so only a daemon in the same ones tests it.
- After a reboot of this machine every earlier owner is dead; a process that took the lease since then holds it.
  "This machine" is proven only for daemons in the initial pid namespace over a local service: images of containers
  share machine-ids, and a remote Podman serves several machines.
- Images that are committed from a container have its labels, and so have their containers.  So a label has the name of
  the container: one with another name is the user's own.
- All others stay; docs/backends.md says how to remove them by hand.

The content of an orphan decides what happens to it:

- A sandbox has nothing that outlives its mount.  The next daemon that creates a container on the same Podman removes
  it, unless it runs since a reboot (somebody has started it again).
- The container of an `image:` workspace has the user's files.  Nothing removes it unasked.  The next workspace of the
  same name and options continues in it (`open_owned`), and `vfsd doctor` lists it.

Earlier versions of vfsd labelled a container with the process that created it, and say nothing of its content.
Orphans of theirs are removed.  They see no owner in the labels of this version, so they leave these containers alone.

The processes that own a container hold its lease, so that others know that one of them is alive.  A lease is an
abstract Unix socket (unix(7)) that is bound to a random name.  The kernel frees the name when the last duplicate of the
descriptor is closed, however the processes end.  So a name is in use as long as one process, such as the keeper of a
daemon that died, holds the lease.  Names are those of one network namespace.

Threading: any thread may use a lease.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal, Self, TypeAlias

from protocol.backends.container.podman.address import podman_command
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.spec import ContainerSpec, ContainerState

_logger = logging.getLogger(__name__)

Purpose: TypeAlias = Literal["workspace", "sandbox"]

WORKSPACE_LABEL: Final = "vfsd.workspace"
_MACHINE_LABEL: Final = "vfsd.machine"
_PURPOSE_LABEL: Final = "vfsd.purpose"
_SPEC_LABEL: Final = "vfsd.spec"  # what `open_owned` compares
_NAME_LABEL: Final = "vfsd.container"
_LEASE_LABEL: Final = "vfsd.lease"
_SCOPE_LABEL: Final = "vfsd.scope"  # of the lease: boot, pid namespace, network namespace
# Of earlier versions, whose judgement needs both.
_BOOT_LABEL: Final = "vfsd.boot"
_DAEMON_LABEL: Final = "vfsd.daemon"
_LEASE_NAME: Final = re.compile("[0-9a-f]{32}")
_INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h: the same in every boot


class OwnedContainer:
    """A container of vfsd's own, and its lease.

    `is_kept`: whether `close` leaves the container, because another daemon continues with it or the user wants its
    files.  `note`: what the user should know of it.
    """

    def __init__(self, container: Container, lease: Lease, *, is_kept: bool) -> None:
        self.container: Final = container
        self.lease: Final = lease
        self.is_kept = is_kept
        self.note: str | None = None

    def remove(self) -> None:
        """Remove the container; a no-op if it is gone.  OSError; then the lease is still held."""
        self.container.remove()
        self.lease.close()

    def discard(self) -> str | None:
        """Remove the container even if it is kept.  If that fails, return a sentence on what stays, and log it."""
        self.is_kept = True  # `close` does not try again
        try:
            self.container.remove()
        except OSError as error:
            left = (
                f"the container {self.container.name} was not removed ({error.strerror or error}) and has the files:"
                f" `{removal(self.container)}` removes it; until then the next `vfsd mount` of the same name and"
                " options continues in it"
            )
            _logger.warning("%s", left, extra={"operation": "container"})
            return left
        return None

    def close(self) -> None:
        """Remove the container unless it is kept, and give up the lease."""
        try:
            if not self.is_kept:
                self.discard()
        finally:
            self.lease.close()


def removal(container: Container) -> str:
    """The command with which a user removes a container."""
    return f"{podman_command(container.service.address)} rm --force --volumes {container.name}"


def create_owned(service: PodmanService, spec: ContainerSpec, workspace: str, purpose: Purpose) -> OwnedContainer:
    """Create and start a container for `workspace`, with a name and labels of vfsd's; the caller closes it.

    Pulls a missing image.  ImageNotFoundError; OSError if the container cannot be started, after removing it.
    """
    remove_orphans(service)
    if not service.image_exists(spec.image):
        _logger.info("pulling %s", spec.image, extra={"operation": "container"})
        service.pull(spec.image)
    name = f"vfsd-{workspace}-{os.urandom(3).hex()}"  # for `podman ps`; the random part keeps names distinct
    lease = Lease.make()
    try:
        labels = {**_labels(workspace, spec, purpose), _NAME_LABEL: name, _LEASE_LABEL: lease.name}
        container = _started(service, replace(spec, name=name, labels=labels), lease.name)
    except BaseException:
        lease.close()
        raise
    return OwnedContainer(container, lease, is_kept=False)


def _started(service: PodmanService, spec: ContainerSpec, lease: str) -> Container:
    """Create and start a container; if a step fails, remove what the service has made of it."""
    try:
        container = service.create(spec)
        container.start()
    except BaseException:
        try:
            # By the lease: a call that failed may have created the container, and the name may be another's.
            for state in service.labelled({_LEASE_LABEL: lease}):
                Container(service, state.id, state.name).remove()
        except OSError as error:
            _logger.warning(
                "a container %s may be left (%s): `%s ps --all` lists it", spec.name, error,
                podman_command(service.address),
                extra={"operation": "container"},
            )  # fmt: skip
        raise
    return container


def continue_with(service: PodmanService, descriptor: int) -> OwnedContainer:
    """Return the container whose lease another daemon of the same mount has passed.  FileNotFoundError; OSError."""
    lease = Lease.of(descriptor)
    try:
        return OwnedContainer(_with_lease(service, lease.name), lease, is_kept=True)
    except BaseException:
        lease.close()
        raise


def _with_lease(service: PodmanService, lease: str) -> Container:
    for state in service.labelled({_LEASE_LABEL: lease}):
        if _is_labelled(state):
            return Container(service, state.id, state.name)
    raise FileNotFoundError(errno.ENOENT, "the container of the workspace was removed or renamed")


def open_owned(service: PodmanService, spec: ContainerSpec, workspace: str) -> OwnedContainer:
    """Return a running container of `spec` for `workspace`: one that its dead daemons left, or else a new one.

    Errors as for `create_owned`.
    """
    others = []
    for state in orphans(service):
        if state.labels.get(WORKSPACE_LABEL) != workspace:
            continue
        if state.labels.get(_SPEC_LABEL) != _spec_text(spec):
            others.append(Container(service, state.id, state.name))
        elif (lease := Lease.claim(state.labels[_LEASE_LABEL])) is not None:  # else another daemon was faster
            return _adopted(Container(service, state.id, state.name), state, lease)
    made = create_owned(service, spec, workspace, "workspace")
    if others:
        made.note = (
            f"earlier files of {workspace} are in {' and '.join(each.name for each in others)}, which an earlier daemon"
            f" left and which has other options: `vfsd mount DIRECTORY --backend container:{others[0].name}` shows"
            f" them, and `{removal(others[0])}` removes them"
        )
    return made


def _adopted(container: Container, state: ContainerState, lease: Lease) -> OwnedContainer:
    try:
        if not state.running:
            _start_again(container)
    except BaseException:
        lease.close()
        raise
    adopted = OwnedContainer(container, lease, is_kept=True)
    adopted.note = f"this mount continues in the container {container.name}, which an earlier daemon left"
    _logger.info("%s", adopted.note, extra={"operation": "container"})
    return adopted


def hold_lease(state: ContainerState, passed: int | None) -> Lease | None:
    """Take the lease of a container that vfsd made and that has no owner, so that no workspace adopts it meanwhile.

    `passed`: the lease, if another daemon of the same mount has passed it.
    """
    if passed is not None:
        return Lease.of(passed)
    return Lease.claim(state.labels[_LEASE_LABEL]) if _is_labelled(state) else None


def _start_again(container: Container) -> None:
    try:
        container.start()
    except OSError as error:
        raise OSError(
            error.errno,
            f"the container {container.name}, which has the files of this workspace, cannot be started"
            f" ({error.strerror}): give the workspace another --name, or give the files up with `{removal(container)}`",
        ) from None


def orphans(service: PodmanService, purpose: Purpose = "workspace") -> Iterator[ContainerState]:
    """Yield the containers for `purpose` that dead daemons left.  Those of earlier versions count as sandboxes."""
    for state in service.labelled({WORKSPACE_LABEL: "", _MACHINE_LABEL: _machine()}):
        is_wanted = state.labels.get(_PURPOSE_LABEL, "sandbox") == purpose
        if is_wanted and _is_orphan(state, is_local=service.is_local, is_removed=purpose == "sandbox"):
            yield state


def remove_orphans(service: PodmanService) -> list[str]:
    """Remove the sandboxes that dead daemons left, and return the names of their workspaces."""
    removed = []
    for state in orphans(service, "sandbox"):
        workspace = state.labels[WORKSPACE_LABEL]
        _logger.info(
            "removing container %s, left by the dead daemon of workspace %s", state.name, workspace,
            extra={"operation": "container"},
        )  # fmt: skip
        Container(service, state.id, state.name).remove()
        removed.append(workspace)
    return removed


def _is_orphan(state: ContainerState, *, is_local: bool, is_removed: bool) -> bool:
    """Whether the owner of the container is certainly dead.  `is_removed`: whether that ends the container."""
    lease = state.labels.get(_LEASE_LABEL)
    if lease is None:
        boot, _, pid_namespace = state.labels.get(_BOOT_LABEL, "").partition(":")
        if f"{boot}:{pid_namespace}" == _boot():
            return has_died(f"{_boot()} {state.labels.get(_DAEMON_LABEL, '')}")
    else:
        boot, pid_namespace, network = (state.labels.get(_SCOPE_LABEL, "").split(" ") + 3 * [""])[:3]
        if not _is_labelled(state) or not network or network != network_namespace() or is_held(lease):
            return False
        if boot == _boot_id():
            return True
    is_earlier_boot = boot != _boot_id() and pid_namespace == _pid_namespace() == _INITIAL_PID_NAMESPACE
    return is_local and is_earlier_boot and not (is_removed and state.running)


def this_daemon() -> str:
    """An identifier of this process, for `has_died` in another daemon."""
    return f"{_boot()} {os.getpid()}:{_start_ticks(os.getpid())}"


def has_died(daemon: str) -> bool:
    """Whether `daemon` was a process of this boot and this pid namespace that no longer runs."""
    boot, _, process = daemon.rpartition(" ")
    pid, _, started = process.partition(":")
    is_known = bool(_pid_namespace()) and boot == _boot()
    return is_known and pid.isdigit() and _start_ticks(int(pid)) != started


def _is_labelled(state: ContainerState) -> bool:
    """Whether the container is the one that vfsd labelled with a lease."""
    labels = state.labels
    return labels.get(_NAME_LABEL) == state.name and _LEASE_NAME.fullmatch(labels.get(_LEASE_LABEL, "")) is not None


def _labels(workspace: str, spec: ContainerSpec, purpose: Purpose) -> dict[str, str]:
    return {
        WORKSPACE_LABEL: workspace,
        _MACHINE_LABEL: _machine(),
        _PURPOSE_LABEL: purpose,
        _SPEC_LABEL: _spec_text(spec),
        _SCOPE_LABEL: f"{_boot_id()} {_pid_namespace()} {network_namespace()}",
    }


def _spec_text(spec: ContainerSpec) -> str:
    return json.dumps([spec.image, spec.network, spec.pids_limit, spec.memory_bytes])


def _machine() -> str:
    """machine-id(5) and the user: every user has a Podman storage of their own."""
    return f"{_read('/etc/machine-id') or os.uname().nodename}:{os.geteuid()}"


def _boot() -> str:
    """The scope of process ids: this boot, and this pid namespace."""
    return f"{_boot_id()}:{_pid_namespace()}"


def _boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


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


_PREFIX: Final = b"\0vfsd-container-"


class Lease:
    """A duplicate of the lease of a container.  `close` gives it up."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def make(cls) -> Self:
        """Make a lease with a name of its own."""
        return cls(_bound(os.urandom(16).hex()))

    @classmethod
    def claim(cls, name: str) -> Self | None:
        """Take the lease `name`, which no process holds; None if one does.  Two processes cannot both get it."""
        try:
            return cls(_bound(name))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Duplicate the lease that the predecessor has passed."""
        return cls(socket.socket(fileno=os.dup(descriptor)))

    @property
    def name(self) -> str:
        bound: bytes = self._sock.getsockname()
        return bound.removeprefix(_PREFIX).decode()

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def is_held(name: str) -> bool:
    """Whether a process of this network namespace holds the lease `name`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(_address(name)) != errno.ECONNREFUSED  # no socket has the name


def network_namespace() -> str:
    """The namespace of this process's leases; "" if it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _bound(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.bind(_address(name))
        sock.shutdown(socket.SHUT_RD)  # any process may send to an abstract name
    except BaseException:
        sock.close()
        raise
    return sock


def _address(name: str) -> bytes:
    return _PREFIX + name.encode()
