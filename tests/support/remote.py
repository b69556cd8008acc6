"""A volume at the other end of a command, driven from a thread without a loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from protocol.backends.remote.transport import open_remote
from protocol.volume_extensions import CacheInvalidation
from tests.support.agents import Driven


@contextmanager
def remote_volume(command: str, directory: str) -> Iterator[Driven]:
    """The volume that the daemon serves for `exec:COMMAND`, connected; its invariants are checked at the end."""
    connection = open_remote(command, directory=directory)
    ready: list[trio.lowlevel.TrioToken] = []
    failed: list[BaseException] = []
    event = threading.Event()
    stop = trio.Event()

    async def nothing(_: CacheInvalidation) -> None:
        """No kernel has cached anything."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(connection.attend, nothing)
            ready.append(trio.lowlevel.current_trio_token())
            event.set()
            await stop.wait()
            nursery.cancel_scope.cancel()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            failed.append(error)
        finally:
            event.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        event.wait()
        if failed:
            raise failed[0]
        yield Driven(connection.volume, ready[0])
        connection.volume.check_invariants()
    finally:
        if ready:
            trio.from_thread.run_sync(stop.set, trio_token=ready[0])
        thread.join()
    if failed:
        raise failed[0]
