"""Many workspaces at once: how long 50 mounts take, and what memory and start-up cost with 1,000 that run.

    python -m bench.many [--workspaces 50 1000]

Mounts empty memory workspaces one after the other from one process, with a fork server that runs already.  For each
number of workspaces:

- `mounts`: wall time of all mounts, and of the last one.
- `private`: memory of one daemon that no other process shares (/proc/PID/smaps_rollup), the median.
- `all`: memory of all daemons and the fork server together (proportional set size).
- `unmounts`: wall time of all unmounts.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from vfsd.client.arguments import mount_options
from vfsd.client.launch import launch
from vfsd.client.workspace import Workspace
from vfsd.wire.options import Ready

_SETTLE_S = 3.0  # a daemon imports modules and trims its heap after its mount answers


def memory(pid: int) -> dict[str, int]:
    """Bytes of each field of /proc/PID/smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(size.split()[0]) * 1024 for name, _, size in (line.partition(":") for line in lines)}


def mount_one(place: Path) -> Ready:
    place.mkdir()
    return launch(mount_options(place))


def measure(count: int, directory: Path) -> str:
    """Mount `count` workspaces, and return a row of the table."""
    began = time.perf_counter()
    running = []
    last_s = 0.0
    try:
        for number in range(count):
            started = time.perf_counter()
            running.append(mount_one(directory / f"{count}-{number}"))
            last_s = time.perf_counter() - started
        mounts_s = time.perf_counter() - began
        time.sleep(_SETTLE_S)
        used = [memory(each.pid) for each in running]
        server = memory(int(Path(f"/proc/{running[0].pid}/stat").read_text().rpartition(")")[2].split()[1]))
    finally:
        began = time.perf_counter()
        for each in running:
            Workspace.attach(each.mountpoint).unmount()
        unmounts_s = time.perf_counter() - began
    private = statistics.median(each["Private_Clean"] + each["Private_Dirty"] for each in used)
    total = sum(each["Pss"] for each in used) + server["Pss"]
    return (
        f"{count:>10} {mounts_s:8.2f} s {1e3 * last_s:6.0f} ms {private / 2**20:7.1f} MiB {total / 2**20:8.0f} MiB"
        f" {unmounts_s:8.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspaces", type=int, nargs="+", default=[50, 1000])
    counts = parser.parse_args().workspaces
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # unmounts what is mounted
    with tempfile.TemporaryDirectory() as base:
        os.environ["VFSD_RUNTIME_DIR"] = f"{base}/run"
        first = mount_one(Path(base, "first"))  # starts the fork server
        deadline = time.monotonic() + 30
        while not any(Path(base, "run/vfsd").glob(".fork-server-????????????????")):
            if time.monotonic() > deadline:
                sys.exit("no fork server starts here (docs/backends.md, The fork server)")
            time.sleep(0.1)
        print(f"load {os.getloadavg()[0]:.1f}")
        print(f"{'workspaces':>10} {'mounts':>10} {'the last':>9} {'private':>11} {'all':>12} {'unmounts':>10}")
        for count in counts:
            print(measure(count, Path(base)), flush=True)
        Workspace.attach(first.mountpoint).unmount()


if __name__ == "__main__":
    main()
