"""The default of `--max-memory`: half of the memory that the daemon may use.

The daemon may use the machine's memory, or less if its cgroup or a parent of that has a smaller limit.  The other half
is for the interpreter, for pending requests and for other programs.

Source: memory.max of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst), memory.limit_in_bytes of v1; cgroups(7) for
/proc/self/cgroup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from vfsd.wire.option_rules import LEAST_MEMORY_BYTES

_SHARE: Final = 2
_CGROUPS: Final = "/sys/fs/cgroup"
_V1_UNLIMITED: Final = 1 << 60  # v1 reports the largest number of pages if there is no limit


def default_max_memory(max_bytes: int | None = None) -> int:
    """Return half of the memory that this process may use, in bytes, or `max_bytes` if the user asked for more."""
    return max(available_memory() // _SHARE, max_bytes or 0, LEAST_MEMORY_BYTES)


def available_memory(root: str = "/") -> int:
    """Return the memory in bytes that this process may use: the machine's, or less if a cgroup limits it.

    `root`: the directory that contains /proc and /sys, for tests.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(root)])


def _limits(root: str) -> Iterator[int]:
    """Yield the limits of this process's cgroups and of their parents."""
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
    """Yield the limits in the files `name` from the cgroup `path` up to the top.

    In a cgroup namespace or a container the path may not exist; then only the limit at the top applies, which is the
    container's own.
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
