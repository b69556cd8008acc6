"""SnapshotEach: a snapshot after each command, named exec-1, exec-2, ... and tagged with what was run."""

from __future__ import annotations

import itertools
from typing import Final

from protocol.errors import SnapshotExistsError
from protocol.volume import TAG_MAX_BYTES
from vfsd.daemon.snapshots.base import UNOBSERVED, SnapshotService, free_name

__all__ = ["SnapshotEach"]

_PREFIX: Final = "exec-"


class SnapshotEach:
    """Called with a tag, takes a snapshot and gives its name."""

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
                return (await self._snapshots.take(name, _short(tag), UNOBSERVED, kind="automatic")).name
            except SnapshotExistsError:
                pass  # somebody chose that name


def _short(tag: str) -> str:
    """As much of a command as a tag may have."""
    return tag.encode("utf-8", "replace")[:TAG_MAX_BYTES].decode("utf-8", "ignore")
