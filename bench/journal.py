"""The cost of a journal: `python -m bench.journal [--directory DIRECTORY]`.

Mounts three workspaces at a time, without a journal and with `--fsync everysec` and `no`, and takes turns between them
in one run, so that all have the same machine.  Prints medians in microseconds, and ratios to the workspace without.
Then kills the daemon of a workspace with many files (`--files`), and prints how long the next mount takes until it
answers: from a journal of all calls, and from an image that a compaction has written.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from vfsd.client.workspace import Workspace

_ROUNDS: Final = 3
_MIB: Final = 1 << 20


def _created(root: Path, rounds: int) -> None:
    descriptor = os.open(root / f"f{rounds}", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, bytes(1000))
    os.close(descriptor)


def _written(root: Path, size: int) -> Callable[[int], object]:
    descriptor = os.open(root / "large", os.O_CREAT | os.O_RDWR)
    data = os.urandom(size)
    return lambda number: os.pwrite(descriptor, data, number % 16 * size)


def _read(root: Path) -> Callable[[int], object]:
    descriptor = os.open(root / "large", os.O_RDONLY)

    def read(number: int) -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(descriptor, 65536, number % 16 * _MIB)

    return read


def _median_us(call: Callable[[int], object], numbers: range) -> float:
    times = []
    for number in numbers:
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def fill(root: Path, files: int) -> None:
    for number in range(files):
        if number % 1000 == 0:
            directory = root / str(number)
            directory.mkdir()
        (directory / str(number)).write_bytes(bytes(1000))


def _recovery_s(root: Path, journal: Path, workspace: Workspace) -> tuple[float, Workspace]:
    """Kill the daemon; return how long the next mount takes, and that mount."""
    pidfd = os.pidfd_open(workspace.pid)
    os.kill(workspace.pid, signal.SIGKILL)
    select.select([pidfd], [], [])
    os.close(pidfd)
    start = time.perf_counter()
    again = Workspace.mount(root, name=workspace.name, persist=True, journal_dir=journal, keeper=False)
    os.stat(root / "0" / "0")
    return time.perf_counter() - start, again


def _print_recovery(place: Path, files: int) -> None:
    root, journal = place / "recovered", place / "recovered-journal"
    root.mkdir()
    name = f"bench-journal-{os.getpid()}-recovered"
    workspace = Workspace.mount(root, name=name, persist=True, journal_dir=journal, keeper=False)
    try:
        fill(root, files)
        from_log, workspace = _recovery_s(root, journal, workspace)
        command = [sys.executable, "-m", "vfsd.cli.main", "compact", "-w", name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        from_image, workspace = _recovery_s(root, journal, workspace)
    finally:
        workspace.unmount()
    print(f"recovery of {files:,} files: {from_log:.2f} s from the log, {from_image:.2f} s from an image")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="where the journals are; by default a temporary directory")
    parser.add_argument("--files", type=int, default=100_000, help="how many files are recovered")
    arguments = parser.parse_args()
    directory = arguments.directory
    modes: dict[str, dict[str, Any]] = {
        "without": {},
        "everysec": {"persist": True, "fsync": "everysec"},
        "no": {"persist": True, "fsync": "no"},
    }
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        roots: dict[str, Path] = {}
        for name, options in modes.items():
            root = roots[name] = place / name
            root.mkdir()
            if options:
                options = {**options, "journal_dir": place / f"{name}-journal"}  # noqa: PLW2901
            stack.enter_context(Workspace.mount(root, name=f"bench-journal-{os.getpid()}-{name}", **options))
        found: dict[str, dict[str, list[float]]] = {}
        for turn in range(_ROUNDS):
            for name, root in roots.items():
                numbers = range(turn * 200, turn * 200 + 200)
                results = {
                    "create + 1 KB": _median_us(lambda number, root=root: _created(root, number), numbers),  # type: ignore[misc]
                    "write 4 KiB": _median_us(_written(root, 4096), range(200)),
                    "write 1 MiB": _median_us(_written(root, _MIB), range(32)),
                    "read 64 KiB": _median_us(_read(root), range(200)),
                }
                for what, median in results.items():
                    found.setdefault(what, {}).setdefault(name, []).append(median)
        print(f"{'':14}" + "".join(f"{name:>20}" for name in modes))
        for what, by_name in found.items():
            base = statistics.median(by_name["without"])
            cells = [
                f"{statistics.median(each):9.1f} ({statistics.median(each) / base:4.2f})" for each in by_name.values()
            ]
            print(f"{what:14}" + "".join(f"{cell:>20}" for cell in cells))
        _print_recovery(place, arguments.files)


if __name__ == "__main__":
    main()
