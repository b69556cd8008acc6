"""open_container and open_image: the workspace of a container, over the best transport that reaches it.

Invariant: a container with files of the user is removed only by `discard`, which an unmount calls.

Both block, for a worker thread.  They check that the container can be reached; `TransportConnection.attend` connects.

`AgentTransport` reaches a container anywhere, through a helper that vfsd starts in it over one exec stream.  It needs
only a Podman service that can exec and a Python in the image.  The helper runs as the container's root, so it may do
everything that a mount may; the kernel checks the permissions of the mount's callers by the attributes shown.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import trio

from protocol.backends.container.agent.helper_transport import PYTHONS, HelperTransport, helper_command, helper_program
from protocol.backends.container.agent.link import TIMEOUT_S, AgentLink
from protocol.backends.container.connection import Transport, TransportConnection
from protocol.backends.container.podman.exec_stream import ExecStream, open_exec
from protocol.backends.container.podman.ownership import (
    Lease,
    OwnedContainer,
    continue_with,
    hold_lease,
    open_owned,
)
from protocol.backends.container.podman.service import DEFAULT_WORKDIR, ContainerTarget, PodmanService, check_workdir
from protocol.backends.container.podman.spec import PIDS_LIMIT, ContainerSpec, ContainerState
from protocol.backends.container.rootfs import RootfsTransport

_logger = logging.getLogger(__name__)

# Errors of the working directory itself (`open_workdir`), which a helper in the container would fail with as well.
_ALSO_IN_THE_CONTAINER: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EROFS})

TransportChoice: TypeAlias = Literal["auto", "rootfs", "agent"]


@dataclass(frozen=True, slots=True)
class ContainerWorkspace:
    """A workspace in a container.  `close` releases its resources, and removes a container that was created for it.

    `lease`: of a container that vfsd created, for the next daemon of the same mount.  `owned`: if that is for this
    workspace.
    """

    target: ContainerTarget
    connection: TransportConnection[ContainerState]
    close: Callable[[], None]
    lease: Lease | None = None
    owned: OwnedContainer | None = None

    @property
    def note(self) -> str | None:
        """A note for the user on the container."""
        return None if self.owned is None else self.owned.note

    def keep(self) -> None:
        """Have `close` leave a container that was created for the workspace: from now on it has the user's files."""
        if self.owned is not None:
            self.owned.is_kept = True


def open_container(
    name: str,
    *,
    podman_url: str | None = None,
    workdir: str = DEFAULT_WORKDIR,
    transport: TransportChoice = "auto",
    read_only: bool = False,
    lease: int | None = None,
) -> ContainerWorkspace:
    """Open the directory `workdir` of the running container `name`.  ContainerNotFoundError; OSError with advice.

    `lease`: that of the container, from another daemon of the same mount.
    """
    with contextlib.ExitStack() as stack:
        service = PodmanService(podman_url)
        stack.callback(service.close)
        target = ContainerTarget(service, name, check_workdir(workdir))
        state = target.check()
        held = hold_lease(state, lease)
        if held is not None:
            stack.callback(held.close)
        return replace(_opened(target, state, transport, read_only, stack), lease=held)


def open_image(
    image: str,
    workspace: str,
    *,
    podman_url: str | None = None,
    workdir: str = DEFAULT_WORKDIR,
    transport: TransportChoice = "auto",
    network: str = "none",
    pids_limit: int | None = None,
    memory_bytes: int | None = None,
    read_only: bool = False,
    lease: int | None = None,
) -> ContainerWorkspace:
    """Open the directory `workdir` of a container of `image`, which lives as long as the workspace.

    The container is the one whose `lease` another daemon of the same mount has passed, or one that dead daemons of a
    workspace of this name left, or a new one.
    """
    with contextlib.ExitStack() as stack:
        service = PodmanService(podman_url)
        stack.callback(service.close)
        directory = check_workdir(workdir)
        spec = ContainerSpec(image, network=network, pids_limit=pids_limit or PIDS_LIMIT, memory_bytes=memory_bytes)
        owned = open_owned(service, spec, workspace) if lease is None else continue_with(service, lease)
        stack.callback(owned.close)
        target = ContainerTarget(service, owned.container.id, directory)
        opened = _opened(target, target.check(), transport, read_only, stack)
        return replace(opened, lease=owned.lease, owned=owned)


def _opened(
    target: ContainerTarget,
    state: ContainerState,
    choice: TransportChoice,
    read_only: bool,
    stack: contextlib.ExitStack,
) -> ContainerWorkspace:
    """The workspace of a running container, which takes over what `stack` closes."""
    transport = _transport(target, state, choice, read_only=read_only)
    connection = TransportConnection(target, transport, read_only=read_only)
    return ContainerWorkspace(target, connection, stack.pop_all().close)


def _transport(
    target: ContainerTarget, state: ContainerState, choice: TransportChoice, *, read_only: bool
) -> Transport[ContainerState]:
    """The transport for `choice`.  "auto" prefers rootfs where it reaches every file: on this machine, as root."""
    if choice == "rootfs" and not target.service.is_local:
        reason = f"a container at {target.service.address} cannot be reached through /proc; use --transport agent"
        raise OSError(errno.EOPNOTSUPP, f"the transport rootfs cannot be used: {reason}", target.name)
    if choice == "rootfs" or (choice == "auto" and os.geteuid() == 0 and target.service.is_local):
        rootfs = RootfsTransport(target.workdir, read_only=read_only)
        try:
            rootfs.probe(state)
        except OSError as error:
            if choice == "rootfs" or error.errno in _ALSO_IN_THE_CONTAINER:
                raise
            _logger.info("not reached through /proc: %s", error, extra={"operation": "container"})
        else:
            return rootfs
    agent = AgentTransport(target.service, target.workdir, read_only=read_only)
    agent.probe(state)
    return agent


_NOT_FOUND: Final = frozenset({126, 127})  # exit statuses of a command that could not be started
_ROOT: Final = "0:0"


class AgentTransport(HelperTransport[ContainerState]):
    """Implements `protocol.backends.container.connection.Transport`."""

    def __init__(
        self, service: PodmanService, workdir: str, *, read_only: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        super().__init__(helper_program(workdir), place=" in it", read_only=read_only)
        self._service = service
        self._timeout_s = timeout_s
        self._python = ""

    @asynccontextmanager
    async def _started(self, state: ContainerState, program: bytes, magic: bytes) -> AsyncIterator[AgentLink]:
        """Start a program in the container with the first Python that exists there."""
        for python in [self._python] if self._python else PYTHONS:
            command = helper_command(program, python)
            stream = await open_exec(self._service, state.id, command, user=_ROOT, cwd="/")
            link = AgentLink(stream, timeout_s=self._timeout_s)
            try:
                await link.start(program, magic)
            except OSError as error:
                status = await _status(stream)
                await stream.aclose()
                if status not in _NOT_FOUND:
                    raise
                _logger.debug("no %s in the container: %s", python, error)
                continue
            except BaseException:
                await stream.aclose()
                raise
            self._python = python
            async with link.running():
                yield link
            return
        self._python = ""
        raise OSError(
            errno.ENOENT,
            "the image has no Python 3, which the agent transport needs: use an image that has python3, or, for a "
            "container on this machine, --transport rootfs as root",
        )


async def _status(stream: ExecStream) -> int:
    """The exit status of a helper that did not start; -1 if unknown."""
    with trio.move_on_after(1):
        try:
            return await stream.wait()
        except OSError:
            pass
    return -1
