"""CommandProcesses: signals and kills the processes of one command in a container.

A variable in their environment marks them (`container_processes`).  If /proc of this machine does not show the
container's processes (a remote service, or missing rights), a shell in the container finds them.  In a container of
vfsd's own (`owned`), orphans without the mark are killed too; if such a container cannot start that shell (a fork bomb
at the process limit), it is restarted: its files stay, and every command in it ends.

Limits: in a container that is not vfsd's, a process with a new session, a new parent *and* a new environment
survives.  A killed daemon kills nothing: the next daemon of a workspace in the same container, on this machine, kills
what the dead daemon's commands left (`kill_abandoned`).
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Mapping
from typing import Final

import trio

from protocol.backends.container.exec.container_processes import (
    DAEMON,
    KILL_SCRIPT,
    MARK,
    SIGNAL_SCRIPT,
    ContainerProcesses,
)
from protocol.backends.container.podman.errors import ContainerNotFoundError
from protocol.backends.container.podman.exec_stream import exec_status
from protocol.backends.container.podman.ownership import has_died, this_daemon
from protocol.backends.container.podman.service import Container

_logger = logging.getLogger(__name__)

_KILL_S: Final = 10.0
_SHELL_S: Final = 5.0


def _visible_processes(container: Container) -> ContainerProcesses | None:
    """The container's processes, if this machine's /proc shows them."""
    if not container.service.is_local:
        return None
    state = container.inspect()
    outside = ContainerProcesses(state)
    return outside if outside.is_here else None


def kill_abandoned(container: Container) -> None:
    """Kill the processes of commands whose daemons have died.  Blocks.  OSError."""
    outside = _visible_processes(container)
    if outside is None:
        return
    for value, daemon in outside.values(MARK, DAEMON).items():
        if has_died(daemon):
            _logger.info("killing processes that a dead daemon's command left", extra={"operation": "exec"})
            outside.kill(f"{MARK}={value}", with_orphans=False, timeout_s=_KILL_S)


class CommandProcesses:
    """The processes of one command in `container`."""

    def __init__(self, container: Container, *, owned: bool) -> None:
        self._container = container
        self._owned = owned
        self._value = secrets.token_hex(16)

    @property
    def env(self) -> Mapping[str, str]:
        """The mark, as variables for the command's environment."""
        return {MARK: self._value, DAEMON: this_daemon()}

    @property
    def _mark(self) -> str:
        return f"{MARK}={self._value}"

    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group; a no-op after the command has ended."""
        if not await trio.to_thread.run_sync(self._signal_from_outside, number):
            await self._in_shell(SIGNAL_SCRIPT, str(number), self._mark)

    async def kill(self, *, is_alone: bool) -> None:
        """Kill all; `is_alone`: no other command runs in the container.  OSError if processes remain."""
        # An orphan may belong to another running command.
        orphans = self._owned and is_alone
        if await trio.to_thread.run_sync(self._kill_from_outside, orphans):
            return
        if await self._in_shell(KILL_SCRIPT, self._mark, str(int(orphans))):
            return
        if not self._owned:
            raise OSError(errno.EBUSY, f"processes in the container {self._container.name} cannot be killed")
        await trio.to_thread.run_sync(self._restart)

    async def is_paused(self) -> bool:
        """Whether the container is paused: killed processes end when it is unpaused."""
        try:
            return (await trio.to_thread.run_sync(self._container.inspect)).paused
        except OSError:
            return False

    # -- from outside: in a worker thread ------------------------------------------------------------
    def _signal_from_outside(self, number: int) -> bool:
        outside = _visible_processes(self._container)
        if outside is not None:
            outside.signal(self._mark, number)
        return outside is not None

    def _kill_from_outside(self, orphans: bool) -> bool:
        try:
            outside = _visible_processes(self._container)
        except ContainerNotFoundError:
            return True  # its processes are gone too
        return outside is not None and outside.kill(self._mark, with_orphans=orphans, timeout_s=_KILL_S)

    # -- from inside ---------------------------------------------------------------------------------
    async def _in_shell(self, script: str, *arguments: str) -> bool:
        """Run a script in the container; whether it succeeded or the container is not running."""
        argv = ["/bin/sh", "-c", script, "sh", *arguments]
        try:
            with trio.fail_after(_SHELL_S):
                return await exec_status(self._container.service, self._container.id, argv, user="0") == 0
        except trio.TooSlowError:
            return False
        except OSError as error:
            return error.errno in {errno.ENOTCONN, errno.ENOENT}  # not running, so no process is left

    def _restart(self) -> None:
        self._container.kill()
        self._container.start()
