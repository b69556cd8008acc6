"""SnapshotEach: takes a snapshot after each command, named exec-1, exec-2, ... with the command as its tag."""

from __future__ import annotations

import itertools
from typing import Final

from protocol.errors import SnapshotExistsError
from vfsd.daemon.snapshots.base import UNOBSERVED, SnapshotService, free_name

__all__ = ["SnapshotEach"]

_PREFIX: Final = "exec-"


class SnapshotEach:
    """Takes a snapshot with a tag and returns its name."""

    def __init__(self, snapshots: SnapshotService) -> None:
        self._snapshots = snapshots
        self._numbers: itertools.count[int] | None = None

    async def __call__(self, tag: str) -> str:
        if self._numbers is None:
            first = free_name(_PREFIX, await self._snapshots.infos())
            self._numbers = itertools.count(int(first.removeprefix(_PREFIX)))
        while True:
            try:
                name = f"{_PREFIX}{next(self._numbers)}"
                return (await self._snapshots.take(name, tag, UNOBSERVED, kind="automatic")).name
            except SnapshotExistsError:
                pass  # a client used that name
