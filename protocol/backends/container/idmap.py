"""IdMap: the translation between the ids inside a container and those of the host.

Source: user_namespaces(7), /proc/PID/uid_map.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from protocol.errors import os_error

_OVERFLOW_ID: Final = 65534  # the kernel shows this for an unmapped id
_KEEP: Final = 0xFFFFFFFF  # (uid_t) -1: chown(2) keeps the id


@dataclass(frozen=True, slots=True)
class Ids:
    """The ranges (first inside, first outside, count) of users or of groups; the first one that has an id counts."""

    ranges: tuple[tuple[int, int, int], ...]

    @property
    def is_identity(self) -> bool:
        return all(inside == outside for inside, outside, _ in self.ranges)

    def inside(self, outside: int) -> int:
        """The container's id of a host id."""
        for first, start, count in self.ranges:
            if start <= outside < start + count:
                return first + outside - start
        return _OVERFLOW_ID

    def outside(self, inside: int) -> int:
        """The host's id of a container id.  EOVERFLOW if it is not mapped."""
        if inside == _KEEP:
            return inside
        for first, start, count in self.ranges:
            if first <= inside < first + count:
                return start + inside - first
        raise os_error(errno.EOVERFLOW, f"id {inside} is not mapped in the container")


_EVERY_ID: Final = (0, 0, 1 << 32)


@dataclass(frozen=True, slots=True)
class IdMap:
    """The users and groups of a container."""

    users: Ids = Ids((_EVERY_ID,))
    groups: Ids = Ids((_EVERY_ID,))

    @property
    def is_identity(self) -> bool:
        return self.users.is_identity and self.groups.is_identity


IDENTITY: Final = IdMap()


def swapped(one: int, other: int) -> Ids:
    """A map that exchanges two ids and keeps all others."""
    return Ids(((one, other, 1), (other, one, 1), _EVERY_ID))


def parse_map(text: str) -> Ids:
    """The map of /proc/PID/uid_map or gid_map: lines of first inside, first outside, count."""
    rows = [tuple(map(int, line.split())) for line in text.splitlines()]
    return Ids(tuple((row[0], row[1], row[2]) for row in rows))
