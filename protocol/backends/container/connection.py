"""ContainerConnection: keeps a volume connected to a container, through stops and starts.

One loop: inspect the container, open the transport, wait until it is lost, close it, and look again.  While it is lost
Podman is asked every now and then whether the container runs again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import trio

from protocol.backends.container.podman.state import ContainerState
from protocol.backends.container.podman.target import ContainerTarget, check_running
from protocol.backends.container.reconnecting_volume import ReconnectingVolume
from protocol.backends.container.transports.transport import Transport
from protocol.volume import CacheInvalidation

__all__ = ["ContainerConnection", "Tell"]

_logger = logging.getLogger(__name__)

# What makes the kernel forget what it knows: it may wait for requests, which the loop goes on answering.
Tell: TypeAlias = Callable[[CacheInvalidation], Awaitable[None]]

_RETRY_FIRST_S: Final = 0.1
_RETRY_MOST_S: Final = 2.0
_INSPECT_TIMEOUT_S: Final = 10.0


class ContainerConnection:
    """`volume` is served; `attend` must run meanwhile."""

    def __init__(self, target: ContainerTarget, transport: Transport, *, read_only: bool = False) -> None:
        self.target: Final = target
        self.transport: Final = transport
        self.volume: Final = ReconnectingVolume(read_only=read_only, supports_acl=transport.supports_acl)
        self._complaint = ""
        self._tell: Tell | None = None

    async def attend(self, tell: Tell, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect, say `started`, and keep connected until cancelled.  OSError where the first connection fails."""

        async def connected_first(_known: CacheInvalidation) -> None:
            task_status.started()  # no kernel knows anything yet

        async def connected_again(known: CacheInvalidation) -> None:
            self._complaint = ""
            _logger.info("container %s runs again, and is served", self.target.name, extra={"operation": "container"})
            await tell(known)

        self._tell = tell
        await self._attend_once(await self._running(), tell, connected_first)
        delay_s = _RETRY_FIRST_S
        while True:
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_MOST_S)
            try:
                state = await self._running()
                await self._attend_once(state, tell, connected_again)
            except OSError as error:
                self._complain(error)
            else:
                delay_s = _RETRY_FIRST_S

    async def refresh(self) -> None:
        """Have the kernel forget what it knows: it may be of a moment ago, and the container goes on."""
        if self._tell is not None:
            await self._tell(self.volume.all_known())

    async def inspect(self) -> ContainerState:
        """The container as it is now.  ContainerNotFoundError, TimeoutError, and as `PodmanService`."""
        with trio.move_on_after(_INSPECT_TIMEOUT_S):
            return await trio.to_thread.run_sync(self.target.inspect, abandon_on_cancel=True)
        raise TimeoutError(f"Podman does not answer at {self.target.service.address}")

    async def describe(self) -> str:
        """What Podman says of the container, in words."""
        try:
            return (await self.inspect()).describe()
        except FileNotFoundError:
            return "removed"
        except OSError as error:
            return f"unknown: {error.strerror or error}"

    async def _running(self) -> ContainerState:
        return check_running(await self.inspect())

    async def _attend_once(self, state: ContainerState, tell: Tell, connected: Tell) -> None:
        """Serve one run of the container, until it is lost.  OSError where it cannot be connected to."""
        reason = "its transport failed"
        try:
            async with trio.open_nursery() as nursery:
                volume = await self.transport.open(state, nursery)
                await connected(await self.volume.connect(volume))
                reason = await self.transport.wait_lost()
                nursery.cancel_scope.cancel()
        except* Exception as group:
            if not self.volume.connected:
                raise _first(group) from None
            _logger.exception("the %s transport failed", self.transport.name, exc_info=_first(group))
        finally:
            forgotten = self.volume.disconnect() if self.volume.connected else CacheInvalidation()
            with trio.CancelScope(shield=True):
                await self.transport.close()
        _logger.warning(
            "container %s: %s; every request fails with EIO until it runs again", state.name, reason,
            extra={"operation": "container"},
        )  # fmt: skip
        await tell(forgotten)

    def _complain(self, error: OSError) -> None:
        """Once for each reason, however often it is met."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            _logger.info("not connected: %s", error, extra={"operation": "container"})


def _first(group: BaseException) -> Exception:
    error = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
