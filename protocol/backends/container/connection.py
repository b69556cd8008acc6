"""TransportConnection: keeps a volume connected to a container while the container stops and starts.

One loop inspects the container, opens the transport, waits until it is lost, closes it, and starts again.  While the
container is not running, the loop polls Podman.  A command (`protocol.backends.remote`) is run again in the same way.

`Transport` is the contract of a way to reach a directory that may come and go, such as that of a container.
Implementations: rootfs and agent for containers; `protocol.backends.remote` for the other end of a command.  `S` is the
state of the target: `ContainerState` for containers.  A transport serves one run of the container (or command) at a
time.  `TransportConnection` opens and closes it, and `ReconnectingVolume` makes one volume of the successive runs.
Threading: the serving loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

import trio

from protocol.backends.container.reconnecting_volume import ContinuedVolume, ReconnectingVolume
from protocol.volume import Volume
from protocol.volume_extensions import CacheInvalidation

if TYPE_CHECKING:
    from protocol.linux.shared_log import SharedLog

_logger = logging.getLogger(__name__)

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")

# Invalidates kernel caches.  It may wait for requests of the kernel, which the loop must go on answering.
InvalidateCaches: TypeAlias = Callable[[CacheInvalidation], Awaitable[None]]

_RETRY_FIRST_S: Final = 0.1
_RETRY_MOST_S: Final = 2.0
_INSPECT_TIMEOUT_S: Final = 10.0


class Target(Protocol[S_co]):
    """The other end of a connection: a container, or a command.  The methods block, for a worker thread."""

    @property
    def label(self) -> str:
        """In words: "container web"."""
        ...

    @property
    def no_answer(self) -> str:
        """The error if a method does not return in time."""
        ...

    def check(self) -> S_co:
        """The state of a container that runs.  OSError, with advice, if it cannot be connected to."""
        ...

    def describe(self) -> str:
        """The state in words: "running".  OSError."""
        ...

    def advice(self, reason: str) -> str:
        """Why there is no connection, and what to do.  `reason`: of the loss, or of the last attempt.  OSError."""
        ...


class TransportConnection(Generic[S]):
    """Serves the directory of `target` as `volume` while `attend` runs.

    `longest_pause_s`: between two attempts while there is no connection.
    """

    def __init__(
        self,
        target: Target[S],
        transport: Transport[S],
        *,
        read_only: bool = False,
        longest_pause_s: float = _RETRY_MOST_S,
    ) -> None:
        self.target: Final = target
        self.transport: Final = transport
        self._longest_pause_s = longest_pause_s
        self.volume: Final = ReconnectingVolume(
            read_only=read_only,
            supports_acl=transport.supports_acl,
            keep=lambda log, is_known: transport.keep_log(log, is_known=is_known),
            prepare=self._prepare,
            keeps_numbers=transport.keeps_numbers,
            label=target.label if transport.name == "rootfs" else f"the helper of {target.label}",
        )
        self._prepared: S | None = None  # the state whose volume `transport` has opened already
        self._last_error = ""
        self._reason = ""
        self._invalidate: InvalidateCaches | None = None
        self._has_misnumbered = trio.Event()

    async def attend(
        self, invalidate: InvalidateCaches, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Connect, report `started`, and stay connected until cancelled.  OSError if the first connection fails."""

        async def connected_first(_caches: CacheInvalidation) -> None:
            task_status.started()  # no kernel has cached anything yet

        async def connected_again(caches: CacheInvalidation) -> None:
            self._last_error = ""
            _logger.info("%s is running again and served", self.target.label, extra={"operation": "container"})
            await invalidate(caches)

        self._invalidate = invalidate
        prepared, self._prepared = self._prepared, None
        state = await self._asked(self.target.check) if prepared is None else prepared
        await self._attend_once(state, invalidate, connected_first)
        delay_s = _RETRY_FIRST_S
        while True:
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._longest_pause_s)
            try:
                state = await self._asked(self.target.check)
                await self._attend_once(state, invalidate, connected_again)
            except OSError as error:
                self._reason = error.strerror or str(error)
                self._log_once(error)
            else:
                delay_s = _RETRY_FIRST_S

    async def refresh(self) -> None:
        """Invalidate the kernel's caches, because the container changes files without notice."""
        if self._invalidate is not None:
            await self._invalidate(self.volume.cached_by_kernel())

    def tidy(self) -> None:
        """Do the upkeep of the volume.  To be called every second."""
        self.volume.tidy()
        if self.volume.misnumbered().entries:
            self._has_misnumbered.set()

    @property
    def transport_name(self) -> Literal["rootfs", "agent"]:
        """The name of the transport, as `vfsd status` shows it."""
        return self.transport.name

    @property
    def is_connected(self) -> bool:
        """Whether the volume answers."""
        return self.volume.connected

    @property
    def was_restarted(self) -> bool:
        """Whether a successor could not continue (`ReconnectingVolume.keep_log`), because of a restart."""
        return self.volume.is_translated

    async def describe(self) -> str:
        """The status of the container (or command) in words."""
        try:
            return await self._asked(self.target.describe)
        except OSError as error:
            return f"unknown: {error.strerror or error}"

    async def advice(self) -> str:
        """Why the volume is not connected, and what to do, in words."""
        try:
            return await self._asked(lambda: self.target.advice(self._reason))
        except OSError as error:
            return error.strerror or str(error)

    def _prepare(self) -> tuple[Volume, str]:
        """Open the first volume, which `attend` connects later; return it and its run.  Blocks.  OSError."""
        self._prepared = state = self.target.check()
        volume = self.transport.prepare(state)
        return volume, self.transport.run

    async def _asked(self, ask: Callable[[], T]) -> T:
        """Call a method of the target, which blocks, in a worker thread.  TimeoutError, and its errors."""
        with trio.move_on_after(_INSPECT_TIMEOUT_S):
            return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        raise TimeoutError(self.target.no_answer)

    async def _attend_once(self, state: S, invalidate: InvalidateCaches, connected: InvalidateCaches) -> None:
        """Serve one run of the container or command until the transport is lost.  OSError if connecting fails."""
        reason = "its transport failed"
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                volume = await self.transport.open(state, nursery)
                await connected(await self.volume.connect(volume, self.transport.run, self.transport.helper))
                nursery.start_soon(self._renumber, invalidate)
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
        self._reason = reason
        _logger.warning(
            "%s: %s; every request fails with EIO until it is running again", self.target.label, reason,
            extra={"operation": "container"},
        )  # fmt: skip
        await invalidate(stale)

    async def _renumber(self, invalidate: InvalidateCaches) -> None:
        """Have the kernel ask again for files that can have their own numbers now, so that a keeper can go on."""
        while True:
            await self._has_misnumbered.wait()
            self._has_misnumbered = trio.Event()
            await invalidate(self.volume.misnumbered())

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


S_contra = TypeVar("S_contra", contravariant=True)


class Transport(Protocol[S_contra]):
    """`open`, then `wait_lost` and `close`; then, when the container runs again, `open` once more."""

    @property
    def name(self) -> Literal["rootfs", "agent"]: ...

    @property
    def supports_acl(self) -> bool:
        """Whether the kernel should check permissions by the volume's ACLs.  Known before `open`."""
        ...

    @property
    def run(self) -> str:
        """Identifies the run of what `open` reached, for a successor."""
        ...

    @property
    def helper(self) -> bytes:
        """Identifies the process that owns the inodes of the last `open`.

        A volume that `open` returns later numbers them alike if it has the same one.  Empty: there is none.
        """
        ...

    @property
    def keeps_numbers(self) -> bool:
        """Whether an inode has the same number in every run, if it is there and the number is free."""
        ...

    is_left: Callable[[], bool]
    """Returns whether a successor continues with what `open` reached, when the nursery of `open` is cancelled."""

    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """Enable a successor to continue with the content of `log`; call it before `open`.

        `is_known`: the first `open` continues with what the dead daemon reached.
        """
        ...

    def prepare(self, state: S_contra) -> ContinuedVolume:
        """Make the volume of the next `open`, for the state that a predecessor hands over; blocks.  OSError."""
        ...

    async def open(self, state: S_contra, nursery: trio.Nursery) -> ContinuedVolume:
        """Open a volume of the workspace directory of the running container (or command) `state`.

        Creates a missing directory.

        `nursery` runs the transport's tasks: it is cancelled before `close`, and an exception in it counts as a loss.
        OSError with advice if the directory cannot be reached, or the container has stopped meanwhile.  The volume's
        methods may return awaitables; after a loss all requests fail with EIO, including those in flight.
        """
        ...

    def begin(self) -> None:
        """In an upgrade: take what `open` reached from the predecessor, which does not serve any more."""
        ...

    async def wait_lost(self) -> str:
        """Wait until the open volume is lost, and return the reason in words."""
        ...

    async def close(self) -> None:
        """Release the resources of `open`.  The volume must not be used any more.  Idempotent; raises nothing."""
        ...
