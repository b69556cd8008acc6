"""PendingRequest: a request of the kernel that is answered later.

Threading: the serving loop.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from protocol.volume_durability import UNIQUE_RESEND, KernelRequest


def _nothing() -> None:
    pass


class PendingRequest(KernelRequest):
    """A request for which the volume returned an awaitable.

    `has_begun` is False while it waits for the network and has changed nothing.  `give_back`: called when the volume
    does not use the request's buffer any more.
    """

    __slots__ = ("done", "give_back", "has_begun", "scope")

    def __init__(self, unique: int, *, has_begun: bool = True) -> None:
        super().__init__(unique & ~UNIQUE_RESEND)
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.has_begun = has_begun
        self.give_back: Callable[[], None] = _nothing
