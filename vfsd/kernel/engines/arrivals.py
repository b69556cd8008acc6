"""Repeats calls on a volume that needed something from the network (`protocol.errors.NotReadyError`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import trio

from protocol.errors import NotReadyError

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


async def arrived(error: NotReadyError) -> object:
    """Wait for what the call needs; return what keeps it in memory.  OSError if it cannot be fetched."""
    event = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def notify(_arrival: Future[object]) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(event.set)

    error.arrival.add_done_callback(notify)
    await event.wait()
    return error.arrival.result()


async def repeated(call: Callable[[], T | Awaitable[T]], error: NotReadyError | None = None) -> T:
    """Call `call` until it has all that it needs; `error` is from its first attempt."""
    held: list[object] = []
    while True:
        try:
            if error is not None:
                held.append(await arrived(error))
            answer = call()
            return await answer if isinstance(answer, Awaitable) else answer
        except NotReadyError as again:
            error = again
