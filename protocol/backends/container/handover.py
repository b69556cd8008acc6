"""Handover of a container's directory to another process, under the same kernel and in the same run of the container.

Invariant: what the old process gives is of the volume that it serves.  If the container stops meanwhile, `files` and
`rest` raise OSError, so the old process goes on.

Threading: the serving loop.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol.volume_durability import GivenState, JournalEnd


class ContainerGiving:
    """The state `given` of the volume of one run.  See `protocol.volume_durability.GivenState`.

    `is_served`: whether that volume is still connected.
    """

    has_image = False
    lock_fd = None

    def __init__(self, given: GivenState, run: str, is_served: Callable[[], bool]) -> None:
        self.start: JournalEnd = given.start
        self.below = in_run(run, given.below)
        self._given = given
        self._is_served = is_served

    def log_fd(self) -> int:
        return self._given.log_fd()

    def position(self) -> JournalEnd:
        return self._given.position()

    def write_image(self, descriptor: int) -> None:
        """Nothing: the log has everything."""

    def files(self) -> Iterator[tuple[int, int]]:
        self._check()
        for each in self._given.files():
            self._check()  # the loop may have run since the last one
            yield each

    def rest(self) -> bytes:
        self._check()
        return self._given.rest()

    def end(self) -> None:
        self._given.end()

    def _check(self) -> None:
        if not self._is_served():
            raise OSError(errno.EIO, "the container stopped during the upgrade, which was given up: try again")


def in_run(run: str, below: str) -> str:
    """Identify the directory `below` in the run `run` of a container."""
    return f"container {run}, {below}"
