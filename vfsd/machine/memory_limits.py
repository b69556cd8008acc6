"""The memory that the daemon may use, and what is left of it.  Half of the first is the default of `--max-memory`.

The daemon may use the machine's memory, or less if its cgroup or a parent of that has a smaller limit.  The other half
is for the interpreter, for pending requests and for other programs.

Source: memory.max, memory.current and memory.stat of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst),
memory.limit_in_bytes and memory.usage_in_bytes of v1; cgroups(7) for /proc/self/cgroup; proc(5) for /proc/meminfo.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from vfsd.wire.option_rules import LEAST_MEMORY_BYTES

_SHARE: Final = 2
_CGROUPS: Final = "/sys/fs/cgroup"
_OOM_SCORE: Final = "/proc/self/oom_score_adj"
_V1_UNLIMITED: Final = 1 << 60  # v1 reports the largest number of pages if there is no limit


def default_max_memory(max_bytes: int | None = None) -> int:
    """Return half of the memory that this process may use, in bytes, or `max_bytes` if the user asked for more."""
    return max(available_memory() // _SHARE, max_bytes or 0, LEAST_MEMORY_BYTES)


def available_memory(root: str = "/") -> int:
    """Return the memory in bytes that this process may use: the machine's, or less if a cgroup limits it.

    `root`: the directory that contains /proc and /sys, for tests.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for _, _, limit in _limits(root))])


def free_memory(root: str = "/") -> int | None:
    """Return the memory in bytes that this process may still take; None if the kernel does not tell.

    File pages that the kernel can drop count as free.  `root`: as for `available_memory`.
    """
    machine = _lines(os.path.join(root, "proc/meminfo"))
    found = [int(line.split()[1]) * 1024 for line in machine if line.startswith("MemAvailable:")]
    for directory, version, limit in _limits(root):
        used = _number(os.path.join(directory, version.usage))
        if used is not None:
            statistics = dict(line.split(" ", 1) for line in _lines(os.path.join(directory, "memory.stat")))
            droppable = sum(int(statistics.get(name, "0")) for name in version.droppable)
            found.append(max(0, limit - max(0, used - droppable)))
    return min(found, default=None)


class KilledFirst:
    """Has the kernel end this process before any other one when memory runs out, until `end`."""

    def __init__(self) -> None:
        self._before = "".join(_lines(_OOM_SCORE)).strip()
        self._set("1000")

    def end(self) -> None:
        """Have the kernel choose as before."""
        self._set(self._before)

    def _set(self, value: str) -> None:
        with contextlib.suppress(OSError), open(_OOM_SCORE, "w", encoding="ascii") as file:
            file.write(value)


class _Version(NamedTuple):
    """The names of a version of cgroups: of two files, and of the lines of memory.stat that count file pages."""

    limit: str
    usage: str
    droppable: tuple[str, ...]


_V1: Final = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2: Final = _Version("memory.max", "memory.current", ("inactive_file", "active_file"))


def _limits(root: str) -> Iterator[tuple[str, _Version, int]]:
    """Yield the directories of this process's cgroups, and of their parents, that have a limit, with the limit."""
    top = os.path.join(root, _CGROUPS.lstrip("/"))
    memberships = (line.split(":", 2) for line in _lines(os.path.join(root, "proc/self/cgroup")))
    for _, controllers, path in (each for each in memberships if len(each) == 3):
        if controllers == "":
            yield from _upwards(top, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _upwards(os.path.join(top, "memory"), path, _V1)


def _upwards(top: str, path: str, version: _Version) -> Iterator[tuple[str, _Version, int]]:
    """Yield those from the cgroup `path` up to the top.

    In a cgroup namespace or a container the path may not exist; then only the limit at the top applies, which is the
    container's own.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    for end in range(len(parts), -1, -1):
        directory = os.path.join(top, *parts[:end])
        limit = _number(os.path.join(directory, version.limit))
        if limit is not None and limit < _V1_UNLIMITED:
            yield directory, version, limit


def _number(path: str) -> int | None:
    """Return the number in a file; None if there is none ("max")."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []
