"""HelperTransport: a directory anywhere, through a helper that a subclass starts there.

Ids: a root daemon shows those of the other end.  For another daemon its own user is the helper's, and vice versa.  So
an unprivileged user owns the files that the helper's user owns: with rootless Podman, those of the container's root.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Generic, TypeVar

import trio

from protocol.backends.container.agent.link import AgentLink
from protocol.backends.container.agent.tree import AgentTree
from protocol.backends.container.agent.volume import AgentVolume
from protocol.backends.container.helper.wire import VERSION, Op
from protocol.backends.container.idmap import IDENTITY, IdMap, swapped
from protocol.errors import only_error, os_error
from protocol.volume import Volume

S = TypeVar("S")
_WATCH_S: Final = 0.1


class HelperTransport(ABC, Generic[S]):
    """Implements `protocol.backends.container.transports.transport.Transport`, except for starting the helper.

    `place` says where the helper runs, for messages: " in it".
    """

    name: Final = "agent"
    is_recoverable: Final = False
    run: Final = ""

    def __init__(self, *, place: str = "", read_only: bool = False) -> None:
        self.supports_acl = False
        self._place = place
        self._read_only = read_only
        self._link: AgentLink | None = None
        self._ids = IDENTITY
        self._ended = trio.Event()
        self._serving = trio.CancelScope()

    @abstractmethod
    def _started(self, state: S) -> AbstractAsyncContextManager[AgentLink]:
        """Start a helper for the length of a block.  OSError with advice."""

    def prepare(self, state: S) -> Volume:  # noqa: ARG002
        """See `Transport`: files that the helper has open cannot be handed over."""
        raise OSError(errno.EOPNOTSUPP, "the helper cannot be handed over")

    def probe(self, state: S, keep_going: Callable[[], None] = lambda: None) -> None:
        """Raise OSError with advice if this transport cannot reach the directory; blocks, for a worker thread.

        `keep_going` is called all the time; an exception from it ends the attempt, and is raised.
        """
        stopped: list[BaseException] = []

        async def watch(scope: trio.CancelScope) -> None:
            while not stopped:
                try:
                    keep_going()
                except BaseException as error:  # noqa: BLE001 (raised below: it may be of another loop)
                    stopped.append(error)
                    scope.cancel()
                await trio.sleep(_WATCH_S)

        async def start_once() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, nursery.cancel_scope)
                async with self._started(state) as link:
                    ids, _, has_acls = await _hello(link)
                    self.supports_acl = has_acls and ids.is_identity
                nursery.cancel_scope.cancel()

        try:
            trio.run(start_once)
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        if stopped:
            raise stopped[0]

    async def open(self, state: S, nursery: trio.Nursery) -> AgentVolume:
        """See `Transport`, as for all that follow."""
        self._ended = trio.Event()
        self._serving = trio.CancelScope()
        link: AgentLink = await nursery.start(self._serve, state)
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
        return f"the helper{self._place} is lost: {self._link.reason}"

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.lose("closed")
            self._serving.cancel()
            await self._ended.wait()

    async def _serve(self, state: S, *, task_status: trio.TaskStatus[AgentLink]) -> None:
        try:
            with self._serving:
                async with self._started(state) as link:
                    task_status.started(link)
                    await link.lost.wait()
        finally:
            self._ended.set()


async def _hello(link: AgentLink) -> tuple[IdMap, tuple[int, int], bool]:
    """The ids to show, user and group of the first process there, and whether the directory has ACLs."""
    numbers, _ = await link.call(Op.HELLO)
    if len(numbers) != 6 or numbers[0] != VERSION or min(numbers) < 0:
        raise OSError(errno.EPROTO, f"the helper is not compatible: {numbers}")
    _, uid, gid, has_acls, user, group = numbers
    ids = IdMap(swapped(uid, os.geteuid()), swapped(gid, os.getegid()))
    return IDENTITY if os.geteuid() == 0 or ids.is_identity else ids, (user, group), bool(has_acls)
