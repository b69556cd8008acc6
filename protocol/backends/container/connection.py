"""ContainerConnection: keeps a volume connected to a container while the container stops and starts.

One loop inspects the container, opens the transport, waits until it is lost, closes it, and starts again.  While the
container is not running, the loop polls Podman.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeAlias

import trio

from protocol.backends.container.podman.state import ContainerState
from protocol.backends.container.podman.target import ContainerTarget, check_running
from protocol.backends.container.reconnecting_volume import ReconnectingVolume
from protocol.backends.container.transports.transport import Transport
from protocol.volume import CacheInvalidation

_logger = logging.getLogger(__name__)

# Invalidates kernel caches.  It may wait for requests of the kernel, which the loop must go on answering.
InvalidateCaches: TypeAlias = Callable[[CacheInvalidation], Awaitable[None]]

_RETRY_FIRST_S: Final = 0.1
_RETRY_MOST_S: Final = 2.0
_INSPECT_TIMEOUT_S: Final = 10.0


class ContainerConnection:
    """Serves the container as `volume` while `attend` runs."""

    def __init__(self, target: ContainerTarget, transport: Transport, *, read_only: bool = False) -> None:
        self.target: Final = target
        self.transport: Final = transport
        self.volume: Final = ReconnectingVolume(read_only=read_only, supports_acl=transport.supports_acl)
        self._last_error = ""
        self._invalidate: InvalidateCaches | None = None

    async def attend(
        self, invalidate: InvalidateCaches, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Connect, report `started`, and stay connected until cancelled.  OSError if the first connection fails."""

        async def connected_first(_caches: CacheInvalidation) -> None:
            task_status.started()  # no kernel has cached anything yet

        async def connected_again(caches: CacheInvalidation) -> None:
            self._last_error = ""
            _logger.info("container %s is running again and served", self.target.name, extra={"operation": "container"})
            await invalidate(caches)

        self._invalidate = invalidate
        await self._attend_once(await self._running(), invalidate, connected_first)
        delay_s = _RETRY_FIRST_S
        while True:
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_MOST_S)
            try:
                state = await self._running()
                await self._attend_once(state, invalidate, connected_again)
            except OSError as error:
                self._log_once(error)
            else:
                delay_s = _RETRY_FIRST_S

    async def refresh(self) -> None:
        """Invalidate the kernel's caches, because the container changes files without notice."""
        if self._invalidate is not None:
            await self._invalidate(self.volume.cached_by_kernel())

    async def inspect(self) -> ContainerState:
        """The container's current state.  ContainerNotFoundError, TimeoutError, and the errors of `PodmanService`."""
        with trio.move_on_after(_INSPECT_TIMEOUT_S):
            return await trio.to_thread.run_sync(self.target.inspect, abandon_on_cancel=True)
        raise TimeoutError(f"Podman does not answer at {self.target.service.address}")

    @property
    def transport_name(self) -> Literal["rootfs", "agent"]:
        """The name of the transport, as `vfsd status` shows it."""
        return self.transport.name

    @property
    def is_connected(self) -> bool:
        """Whether the container runs and its volume answers."""
        return self.volume.connected

    async def describe(self) -> str:
        """The container's status in words."""
        try:
            return (await self.inspect()).describe()
        except FileNotFoundError:
            return "removed"
        except OSError as error:
            return f"unknown: {error.strerror or error}"

    async def advice(self) -> str:
        """Why the volume is not connected, and what to do, in words."""
        try:
            await self._running()
        except FileNotFoundError:
            return f"the container {self.target.name} was removed: `vfsd unmount`, or create it again under this name"
        except OSError as error:
            return error.strerror or str(error)
        return "the container is running, but is not connected yet: try again"

    async def _running(self) -> ContainerState:
        return check_running(await self.inspect())

    async def _attend_once(
        self, state: ContainerState, invalidate: InvalidateCaches, connected: InvalidateCaches
    ) -> None:
        """Serve one run of the container until the transport is lost.  OSError if connecting fails."""
        reason = "its transport failed"
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                volume = await self.transport.open(state, nursery)
                await connected(await self.volume.connect(volume))
                reason = await self.transport.wait_lost()
                nursery.cancel_scope.cancel()
        except* Exception as group:
            if self.volume.connected:
                _logger.exception("the %s transport failed", self.transport.name, exc_info=_first(group))
            else:  # raised below: Python 3.11.2 puts what is raised here into a group
                failure = _first(group)
        finally:
            stale = self.volume.disconnect() if self.volume.connected else CacheInvalidation()
            with trio.CancelScope(shield=True):
                await self.transport.close()
        if failure is not None:
            raise failure from None
        _logger.warning(
            "container %s: %s; every request fails with EIO until it is running again", state.name, reason,
            extra={"operation": "container"},
        )  # fmt: skip
        await invalidate(stale)

    def _log_once(self, error: OSError) -> None:
        """Log an error unless it is the same as the last one."""
        if str(error) != self._last_error:
            self._last_error = str(error)
            _logger.info("not connected: %s", error, extra={"operation": "container"})


def _first(group: BaseException) -> Exception:
    error = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
