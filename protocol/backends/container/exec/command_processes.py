"""CommandProcesses: the processes of one command in a container, to be signalled, and to be ended whatever they did.

They are marked, and found by their mark (`processes`).  Over a service of another machine, or as a user who may
not see the container's processes, a shell in the container finds them.  In a container of vfsd's own (`owned`) it
does not help to throw the mark off; and where such a container has no room for that shell (a fork bomb at its limit),
it is restarted: its files stay, and every command in it ends.

What holds in a container that is not vfsd's: a process that takes itself a new session, a new parent *and* a new
environment is the container's then, and stays.  A daemon that is itself killed can kill nothing: what its commands
left in a container that stays is ended by the next one that runs any there (`kill_abandoned`), on this machine.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Mapping, Sequence
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
from protocol.backends.container.podman.exec_stream import open_exec
from protocol.backends.container.podman.ownership import has_died, this_daemon
from protocol.backends.container.podman.service import Container

__all__ = ["CommandProcesses", "kill_abandoned"]

_logger = logging.getLogger(__name__)

_KILL_S: Final = 10.0
_SHELL_S: Final = 5.0


def _outside(container: Container) -> ContainerProcesses | None:
    """The container's processes, where this machine's /proc has them."""
    if not container.service.is_local:
        return None
    state = container.inspect()
    outside = ContainerProcesses(state.id, state.pid)
    return outside if outside.is_here else None


def kill_abandoned(container: Container) -> None:
    """End what runs in `container` of commands whose daemons were killed.  Blocks.  OSError."""
    outside = _outside(container)
    if outside is None:
        return
    for value, daemon in outside.values(MARK, DAEMON).items():
        if has_died(daemon):
            _logger.info("ending what a daemon that died had left running", extra={"operation": "exec"})
            outside.kill(f"{MARK}={value}", with_orphans=False, timeout_s=_KILL_S)


class CommandProcesses:
    """The processes of one command in `container`."""

    def __init__(self, container: Container, *, owned: bool) -> None:
        self._container = container
        self._owned = owned
        self._value = secrets.token_hex(16)

    @property
    def env(self) -> Mapping[str, str]:
        """The mark: what the command's environment must have."""
        return {MARK: self._value, DAEMON: this_daemon()}

    @property
    def _mark(self) -> str:
        return f"{MARK}={self._value}"

    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group; nothing when it has ended."""
        if not await trio.to_thread.run_sync(self._signal_from_outside, number):
            await self._in_shell(SIGNAL_SCRIPT, str(number), self._mark)

    async def kill(self, *, is_alone: bool) -> None:
        """End them all; `is_alone`: no other command runs in the container.  OSError where that cannot be done."""
        # While others run, an orphan may be one of theirs.
        orphans = self._owned and is_alone
        if await trio.to_thread.run_sync(self._kill_from_outside, orphans):
            return
        if await self._in_shell(KILL_SCRIPT, self._mark, str(int(orphans))):
            return
        if not self._owned:
            raise OSError(errno.EBUSY, f"processes in the container {self._container.name} cannot be killed")
        await trio.to_thread.run_sync(self._restart)

    async def is_held_still(self) -> bool:
        """Whether the container is paused: what is killed in it may end when it goes on."""
        try:
            return (await trio.to_thread.run_sync(self._container.inspect)).paused
        except OSError:
            return False

    # -- from outside: in a worker thread ------------------------------------------------------------
    def _outside(self) -> ContainerProcesses | None:
        return _outside(self._container)

    def _signal_from_outside(self, number: int) -> bool:
        outside = self._outside()
        if outside is not None:
            outside.signal(self._mark, number)
        return outside is not None

    def _kill_from_outside(self, orphans: bool) -> bool:
        try:
            outside = self._outside()
        except ContainerNotFoundError:
            return True  # and nothing in it
        return outside is not None and outside.kill(self._mark, with_orphans=orphans, timeout_s=_KILL_S)

    # -- from inside ---------------------------------------------------------------------------------
    async def _in_shell(self, script: str, *arguments: str) -> bool:
        """Whether a shell in the container could do it, or there was nothing to do."""
        argv: Sequence[str] = ["/bin/sh", "-c", script, "sh", *arguments]
        container = self._container
        try:
            with trio.fail_after(_SHELL_S):
                # Its end is not waited for by `async with`, which kills: this is what kills.
                shell = await open_exec(container.service, container.id, argv, user="0", cwd="/")
                try:
                    while await shell.receive():
                        pass
                    return await shell.wait() == 0
                finally:
                    await shell.disconnect()
        except trio.TooSlowError:
            return False
        except OSError as error:
            return error.errno in {errno.ENOTCONN, errno.ENOENT}  # it does not run: nothing in it does

    def _restart(self) -> None:
        self._container.kill()
        self._container.start()
