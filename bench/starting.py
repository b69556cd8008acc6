"""What a start costs: CPU and wall time of a daemon until its mount answers, next to Python and its libraries alone.

    python -m bench.starting [--rounds N]

Medians in milliseconds; the rows take turns.

- `CPU`: user and system time.  Of a program: until it ends (wait4).  Of a daemon: of its whole process at the moment
  when its mount answers (/proc/PID/task/*/schedstat), its imports in the background after
  that moment excluded.  Commands that it starts, such as fusermount3, are not in it.
- `wall`: from the start until the program ended or `launch` returned.

The directory `__pycache__` must be writable (without PYTHONDONTWRITEBYTECODE), or every start compiles all modules.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vfsd.client.arguments import mount_options
from vfsd.client.launch import launch
from vfsd.client.workspace import Workspace


class Cost(NamedTuple):
    """Milliseconds."""

    cpu: float
    wall: float


def program(code: str) -> Cost:
    """The cost of `python -c CODE`."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", code])
    _, status, used = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"python -c {code!r} failed with status {child.returncode}")
    return Cost(1e3 * (used.ru_utime + used.ru_stime), 1e3 * wall)


def daemon(backend: str, *, fork_server: bool = False) -> Cost:
    """The cost of a daemon until its mount answers; with `fork_server`, of one that it forks (after the first)."""
    with tempfile.TemporaryDirectory() as place:
        for name in ("m", "below"):
            os.mkdir(f"{place}/{name}")
        began = time.perf_counter()
        ready = launch(mount_options(Path(place) / "m", backend.format(place=place)), fork_server=fork_server)
        wall = time.perf_counter() - began
        cpu = sum(_run_ns(thread) for thread in os.scandir(f"/proc/{ready.pid}/task"))
        Workspace.attach(ready.mountpoint).unmount()
    return Cost(cpu / 1e6, 1e3 * wall)


def _run_ns(thread: os.DirEntry[str]) -> int:
    try:
        return int(Path(thread.path, "schedstat").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return 0  # the thread has ended


ROWS: dict[str, Callable[[], Cost]] = {
    "python -c pass": lambda: program("pass"),
    "python -c 'import trio, msgspec'": lambda: program("import trio, msgspec"),
    "a daemon: memory": lambda: daemon("memory"),
    "a daemon: overlay": lambda: daemon("overlay:{place}/below"),
    "a daemon: host": lambda: daemon("host:{place}/below"),
    "a forked daemon: memory": lambda: daemon("memory", fork_server=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    if sys.dont_write_bytecode:
        print("PYTHONDONTWRITEBYTECODE is set: unless __pycache__ is complete, starts include compiling")
    costs: dict[str, list[Cost]] = {name: [] for name in ROWS}
    for number in range(rounds + 1):
        for name, measure in ROWS.items():
            cost = measure()
            if number:  # the first round fills the page cache
                costs[name].append(cost)
    print(f"load {os.getloadavg()[0]:.1f}, {rounds} rounds, medians in ms (lowest)")
    print(f"{'':36}{'CPU':>18}{'wall':>18}")
    for name, found in costs.items():
        cells = (f"{statistics.median(each):8.0f} ({min(each):.0f})" for each in zip(*found, strict=True))
        print(f"{name:36}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
