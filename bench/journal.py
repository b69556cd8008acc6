"""The cost of a journal: `python -m bench.journal [--directory DIRECTORY]`.

Mounts three workspaces at a time, without a journal and with `--fsync everysec` and `no`, and takes turns between them
in one run, so that all have the same machine.  Prints medians in microseconds, and ratios to the workspace without.
"""

from __future__ import annotations

import argparse
import os
import statistics
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="where the journals are; by default a temporary directory")
    directory = parser.parse_args().directory
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


if __name__ == "__main__":
    main()
