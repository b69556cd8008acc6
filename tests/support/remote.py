"""A volume at the other end of a command, driven from a thread without a loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from protocol.backends.remote.transport import open_remote
from protocol.volume_extensions import CacheInvalidation
from tests.support.agents import Driven, in_thread


@contextmanager
def remote_volume(command: str, directory: str) -> Iterator[Driven]:
    """The volume that the daemon serves for `exec:COMMAND`, connected; its invariants are checked at the end."""
    connection = open_remote(command, directory=directory)

    async def nothing(_: CacheInvalidation) -> None:
        """No kernel has cached anything."""

    async def serve(started: Callable[[Driven], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(connection.attend, nothing)
            await started(Driven(connection.volume, trio.lowlevel.current_trio_token()))
            nursery.cancel_scope.cancel()

    with in_thread(serve) as volume:
        yield volume
        connection.volume.check_invariants()
