"""The memory of a daemon before, at and after a peak, and how long others wait while it is returned.

    python -m bench.memory [--snapshots N] [--size-mib N]

A file is rewritten and a snapshot taken, N times; then all snapshots are dropped.  Resident memory in MiB (VmRSS of
/proc/PID/status) when idle, at the peak, and after the drop as soon as it stays the same for ten seconds.  `longest
stat`: the longest time that another process waited for a stat of a new name in the mount, before the drop and after it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vfsd.client.workspace import Workspace

_CALM_S = 10.0


def resident_mib(pid: int) -> int:
    """VmRSS of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024


def longest_stat_ms(directory: str, until: Callable[[], bool]) -> float:
    """The longest stat of a name that the kernel does not know, one each millisecond."""
    longest = 0.0
    for number in itertools.count():
        began = time.perf_counter()
        os.path.exists(f"{directory}/absent{number}-{began}")
        longest = max(longest, time.perf_counter() - began)
        if until():
            return 1e3 * longest
        time.sleep(0.001)
    raise AssertionError


def calm(pid: int) -> Callable[[], bool]:
    """Return a function: whether the memory of `pid` has stayed the same for ten seconds."""
    last, since = resident_mib(pid), time.monotonic()

    def is_calm() -> bool:
        nonlocal last, since
        now = resident_mib(pid)
        if abs(now - last) > 1:
            last, since = now, time.monotonic()
        return time.monotonic() - since > _CALM_S

    return is_calm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=20)
    parser.add_argument("--size-mib", type=int, default=64)
    arguments = parser.parse_args()
    piece = os.urandom(1 << 20)
    with tempfile.TemporaryDirectory() as place, Workspace.mount(Path(place)) as workspace:
        pid = workspace.status().pid
        idle = resident_mib(pid)
        names = [f"s{number}" for number in range(arguments.snapshots)]
        writing = 0.0
        for name in names:
            began = time.perf_counter()
            with open(f"{workspace.path}/file", "r+b" if name != "s0" else "wb") as file:
                file.writelines(itertools.repeat(piece, arguments.size_mib))
            writing += time.perf_counter() - began
            workspace.snapshot(name)
        peak, before = resident_mib(pid), longest_stat_ms(str(workspace.path), calm(pid))
        began = time.perf_counter()
        workspace.drop(*names)
        dropping = time.perf_counter() - began
        dropped = resident_mib(pid)
        after = longest_stat_ms(str(workspace.path), calm(pid))
        print(f"load {os.getloadavg()[0]:.1f}; {arguments.snapshots} snapshots of {arguments.size_mib} MiB")
        print(f"MiB: idle {idle}, peak {peak}, after the drop {dropped}, in the end {resident_mib(pid)}")
        print(f"write {arguments.snapshots * arguments.size_mib / writing:.0f} MiB/s, drop {1e3 * dropping:.0f} ms")
        print(f"longest stat: {before:.1f} ms before the drop, {after:.1f} ms after it")


if __name__ == "__main__":
    main()
