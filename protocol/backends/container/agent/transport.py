"""AgentTransport: a container anywhere, through a helper that vfsd starts in it over one exec stream.

It needs only a Podman service that can exec and a Python in the image.  The helper runs as the container's root, so it
may do everything that a mount may; the kernel checks the permissions of the mount's callers by the attributes shown.

Ids: a root daemon shows those of the container.  For another daemon its own user is the helper's, the container's root,
and vice versa.  So an unprivileged user who runs vfsd is root in a rootless container and owns the files there.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from protocol.backends.container.agent.link import TIMEOUT_S, AgentLink
from protocol.backends.container.agent.start import PYTHONS, helper_command, helper_program
from protocol.backends.container.agent.tree import AgentTree
from protocol.backends.container.agent.volume import AgentVolume
from protocol.backends.container.helper.wire import VERSION, Op
from protocol.backends.container.idmap import IDENTITY, IdMap, swapped
from protocol.backends.container.podman.exec_stream import ExecStream, open_exec
from protocol.backends.container.podman.service import PodmanService
from protocol.backends.container.podman.state import ContainerState
from protocol.errors import only_error, os_error

_logger = logging.getLogger(__name__)

_NOT_FOUND: Final = frozenset({126, 127})  # exit statuses of a command that could not be started
_ROOT: Final = "0:0"


class AgentTransport:
    """Implements `protocol.backends.container.transports.transport.Transport`."""

    name: Final = "agent"

    def __init__(
        self, service: PodmanService, workdir: str, *, read_only: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.supports_acl = False
        self._service = service
        self._workdir = workdir
        self._program = helper_program(workdir)
        self._read_only = read_only
        self._timeout_s = timeout_s
        self._python = ""
        self._link: AgentLink | None = None
        self._ids = IDENTITY
        self._ended = trio.Event()
        self._serving = trio.CancelScope()

    def probe(self, state: ContainerState) -> None:
        """Raise OSError with advice if this transport cannot reach the container; blocks, for a worker thread."""

        async def start_once() -> None:
            async with self._started(state.id) as link:
                ids, _, has_acls = await _hello(link)
                self.supports_acl = has_acls and ids.is_identity

        try:
            trio.run(start_once)
        except BaseExceptionGroup as group:
            raise only_error(group) from None

    async def open(self, state: ContainerState, nursery: trio.Nursery) -> AgentVolume:
        """See `Transport`, as for all that follow."""
        self._ended = trio.Event()
        self._serving = trio.CancelScope()
        link: AgentLink = await nursery.start(self._serve, state.id)
        self._link = link
        self._ids, user, _ = await _hello(link)
        return AgentVolume(
            link,
            read_only=self._read_only,
            ids=self._ids,
            user=user,
            supports_acl=self.supports_acl,
        )

    def tree(self) -> AgentTree:
        """The live state as a tree, for use in another thread than the serving one.  EIO while nothing is open."""
        if self._link is None:
            raise os_error(errno.EIO)
        return AgentTree(self._link, trio.lowlevel.current_trio_token(), self._ids)

    async def wait_lost(self) -> str:
        assert self._link is not None
        await self._link.lost.wait()
        return f"the helper in it is lost: {self._link.reason}"

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.lose("closed")
            self._serving.cancel()
            await self._ended.wait()

    async def _serve(self, container: str, *, task_status: trio.TaskStatus[AgentLink]) -> None:
        try:
            with self._serving:
                async with self._started(container) as link:
                    task_status.started(link)
                    await link.lost.wait()
        finally:
            self._ended.set()

    @asynccontextmanager
    async def _started(self, container: str) -> AsyncIterator[AgentLink]:
        """Start a helper in the container with the first Python that exists there."""
        for python in [self._python] if self._python else PYTHONS:
            command = helper_command(self._program, python)
            stream = await open_exec(self._service, container, command, user=_ROOT, cwd="/")
            link = AgentLink(stream, timeout_s=self._timeout_s)
            try:
                await link.start(self._program)
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


async def _hello(link: AgentLink) -> tuple[IdMap, tuple[int, int], bool]:
    """The ids to show, the container's own user and group, and whether the directory has ACLs."""
    numbers, _ = await link.call(Op.HELLO)
    if len(numbers) != 6 or numbers[0] != VERSION or min(numbers) < 0:
        raise OSError(errno.EPROTO, f"the helper in the container is not compatible: {numbers}")
    _, uid, gid, has_acls, user, group = numbers
    ids = IdMap(swapped(uid, os.geteuid()), swapped(gid, os.getegid()))
    return IDENTITY if os.geteuid() == 0 or ids.is_identity else ids, (user, group), bool(has_acls)


async def _status(stream: ExecStream) -> int:
    """The exit status of a helper that did not start; -1 if unknown."""
    with trio.move_on_after(1):
        try:
            return await stream.wait()
        except OSError:
            pass
    return -1
