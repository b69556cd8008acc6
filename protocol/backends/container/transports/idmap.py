"""IdMap: what a container's user namespace calls the users and groups of the host.

Source: user_namespaces(7), /proc/PID/uid_map.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from protocol.errors import os_error

__all__ = ["IdMap", "Ids", "parse_map"]

_OVERFLOW_ID: Final = 65534  # what the kernel shows for an id that a namespace has no name for
_KEEP: Final = 0xFFFFFFFF  # (uid_t) -1: chown(2) leaves it alone


@dataclass(frozen=True, slots=True)
class Ids:
    """One map.  `ranges` are (first inside, first outside, count)."""

    ranges: tuple[tuple[int, int, int], ...]

    @property
    def is_identity(self) -> bool:
        return all(inside == outside for inside, outside, _ in self.ranges)

    def inside(self, outside: int) -> int:
        """What the container calls the host's id."""
        for first, start, count in self.ranges:
            if start <= outside < start + count:
                return first + outside - start
        return _OVERFLOW_ID

    def outside(self, inside: int) -> int:
        """What the host calls the container's id.  EOVERFLOW for one that means nothing in the container."""
        if inside == _KEEP:
            return inside
        for first, start, count in self.ranges:
            if first <= inside < first + count:
                return start + inside - first
        raise os_error(errno.EOVERFLOW, f"id {inside} is not mapped in the container")


@dataclass(frozen=True, slots=True)
class IdMap:
    """The users and groups of one user namespace."""

    users: Ids
    groups: Ids

    @property
    def is_identity(self) -> bool:
        return self.users.is_identity and self.groups.is_identity


def parse_map(text: str) -> Ids:
    """The map of /proc/PID/uid_map or gid_map: lines of first inside, first outside, count."""
    rows = [tuple(map(int, line.split())) for line in text.splitlines()]
    return Ids(tuple((row[0], row[1], row[2]) for row in rows))
