"""How much memory a workspace may take: `--max-memory`, `--max-bytes`, and what they are by default.

The default is half of what the daemon may have: of the machine's memory, or of the limit of its cgroup, or of one above
it, if that is smaller.  The other half is for the interpreter, for requests under way, and for everybody else.

Source: memory.max of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst), memory.limit_in_bytes of v1; cgroups(7) for
/proc/self/cgroup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from vfsd.wire.option_rules import LEAST_MEMORY_BYTES

__all__ = ["available_memory", "default_max_memory"]

_SHARE: Final = 2
_CGROUPS: Final = "/sys/fs/cgroup"
_V1_UNLIMITED: Final = 1 << 60  # v1 says the largest number of pages where there is no limit


def default_max_memory(max_bytes: int | None = None) -> int:
    """Half of what this process may have, in bytes; `max_bytes` if that is more, because somebody asked for it."""
    return max(available_memory() // _SHARE, max_bytes or 0, LEAST_MEMORY_BYTES)


def available_memory(root: str = "/") -> int:
    """What this process may have: the machine's memory, or less if a cgroup limits it.

    `root`: where /proc and /sys are, for tests.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(root)])


def _limits(root: str) -> Iterator[int]:
    """The limits of this process's cgroups and of those above them."""
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8", errors="surrogateescape") as lines:
            memberships = [line.rstrip("\n").split(":", 2) for line in lines]
    except OSError:
        return
    top = os.path.join(root, _CGROUPS.lstrip("/"))
    for _, controllers, path in (each for each in memberships if len(each) == 3):
        if controllers == "":
            yield from _upwards(top, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _upwards(os.path.join(top, "memory"), path, "memory.limit_in_bytes")


def _upwards(top: str, path: str, name: str) -> Iterator[int]:
    """The limits in files `name` from the cgroup `path` up to the top.

    In a cgroup namespace, or a container that sees another part of the hierarchy, the path may not be there: then the
    limit of the top counts, which is the container's own.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    for end in range(len(parts), -1, -1):
        try:
            with open(os.path.join(top, *parts[:end], name), encoding="ascii") as file:
                limit = file.read().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if limit.isdigit() and int(limit) < _V1_UNLIMITED:
            yield int(limit)
