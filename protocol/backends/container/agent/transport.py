"""AgentTransport: a container anywhere, through a helper that vfsd starts in it over one exec stream.

It needs only a Podman service that can exec and a Python in the image.  The helper runs as the container's root, so it
may do everything that a mount may; the kernel checks the permissions of the mount's callers by the attributes shown.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from protocol.backends.container.agent.helper_transport import HelperTransport
from protocol.backends.container.agent.link import TIMEOUT_S, AgentLink
from protocol.backends.container.agent.start import PYTHONS, helper_command, helper_program
from protocol.backends.container.podman.exec_stream import ExecStream, open_exec
from protocol.backends.container.podman.service import PodmanService
from protocol.backends.container.podman.state import ContainerState

_logger = logging.getLogger(__name__)

_NOT_FOUND: Final = frozenset({126, 127})  # exit statuses of a command that could not be started
_ROOT: Final = "0:0"


class AgentTransport(HelperTransport[ContainerState]):
    """Implements `protocol.backends.container.transports.transport.Transport`."""

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
