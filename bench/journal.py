"""The cost of a journal: `python -m bench.journal [--directory DIRECTORY] [--files N]`.

Mounts workspaces without a journal and with one (`--fsync everysec` with its journal on a disk and on tmpfs, with and
without a keeper; `no`; `always`), and takes turns between them in one run, so that all have the same machine.  Prints
medians in microseconds, ratios to the workspace without, and which targets are met.

Then it fills a workspace with `--files` files of 1 KB, kills its daemon, and prints how long the next mount takes until
it answers, and the CPU time of the new daemon until then: from the log as the daemon left it (a log of more than 64 MB
is compacted by itself, so it may be an image and a log), from an image that `vfsd compact` has written, and of a
replacement that the keeper starts under the mount.
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
from vfsd.machine.runtime import read_record

_ROUNDS: Final = 5
_CALLS: Final = 200
_MIB: Final = 1 << 20
_TMPFS: Final = "/dev/shm"
WITHOUT: Final = "without"
EVERYSEC: Final = "everysec"
TMPFS: Final = "everysec on tmpfs"
_MODES: Final[dict[str, dict[str, Any]]] = {
    WITHOUT: {},
    EVERYSEC: {"persist": True, "fsync": "everysec"},
    TMPFS: {"persist": True, "fsync": "everysec"},
    "without keeper": {"persist": True, "fsync": "everysec", "keeper": False},
    "no": {"persist": True, "fsync": "no"},
    "always": {"persist": True, "fsync": "always"},
}
CREATE: Final = "create + 1 KB"
WRITE_MIB: Final = "write 1 MiB"
READ: Final = "read 64 KiB"
# The most of the ratio to the workspace without a journal.
TARGETS: Final = {CREATE: 1.4, WRITE_MIB: 1.6, READ: 1.05}
JUDGED: Final = (EVERYSEC, TMPFS)  # with a keeper, as is the default
RECOVERY_S: Final = 2.0


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


def _kill(workspace: Workspace) -> None:
    """Kill the daemon, and wait for its end."""
    pidfd = os.pidfd_open(workspace.pid)
    os.kill(workspace.pid, signal.SIGKILL)
    select.select([pidfd], [], [])
    os.close(pidfd)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _files(journal: Path) -> str:
    sizes = {path.name: path.stat().st_blocks * 512 for path in sorted(journal.iterdir()) if path.name != "lock"}
    return ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())


class _Recovered:
    """A workspace with many files whose daemon is killed again and again."""

    def __init__(self, place: Path) -> None:
        self.root, self.journal = place / "recovered", place / "recovered-journal"
        self.root.mkdir()
        self.workspace = self._mount(keeper=False)

    def _mount(self, *, keeper: bool) -> Workspace:
        name = f"bench-journal-{os.getpid()}-recovered"
        return Workspace.mount(self.root, name=name, persist=True, journal_dir=self.journal, keeper=keeper)

    def print_mount(self, what: str, *, keeper: bool = False) -> None:
        """Kill the daemon, and print how long the next mount takes until it answers."""
        _kill(self.workspace)
        files = _files(self.journal)
        start = time.perf_counter()
        self.workspace = self._mount(keeper=keeper)
        os.stat(self.root / "0" / "0")
        self._print(what, time.perf_counter() - start, files, self.workspace.pid)

    def print_replacement(self) -> None:
        """Kill the daemon below its keeper, and print how long a call waits."""
        files = _files(self.journal)
        killed = self.workspace.pid
        start = time.perf_counter()
        _kill(self.workspace)
        os.statvfs(self.root)
        waited_s = time.perf_counter() - start
        while (record := read_record(self.workspace.name)) is None or record.pid == killed:
            time.sleep(0.01)  # the new daemon answers first
        self._print("by the keeper", waited_s, files, record.pid)

    def _print(self, what: str, seconds: float, files: str, pid: int) -> None:
        cpu_s = _cpu_s(pid)
        verdict = "met" if seconds <= RECOVERY_S else "not met"
        print(f"  {what:14} {seconds:6.2f} s, CPU {cpu_s:5.2f} s (target {RECOVERY_S:.0f} s: {verdict}); {files}")


def _print_recovery(place: Path, files: int) -> None:
    print(f"recovery of {files:,} files:")
    recovered = _Recovered(place)
    try:
        fill(recovered.root, files)
        recovered.print_mount("from the log")
        command = [sys.executable, "-m", "vfsd.cli.main", "compact", "-w", recovered.workspace.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        recovered.print_mount("from an image", keeper=True)
        recovered.print_replacement()
    finally:
        recovered.workspace.unmount()


Times = dict[str, dict[str, list[float]]]  # work -> workspace -> a median of each round, in microseconds


def lines(found: Times) -> list[str]:
    """Return the table: medians, and ratios to the workspace without a journal."""
    names = list(next(iter(found.values())))
    table = [f"{'':14}" + "".join(f"{name:>20}" for name in names)]
    for what, by_name in found.items():
        base = statistics.median(by_name[WITHOUT])
        cells = [f"{statistics.median(each):9.1f} ({statistics.median(each) / base:4.2f})" for each in by_name.values()]
        table.append(f"{what:14}" + "".join(f"{cell:>20}" for cell in cells))
    return table


def verdicts(found: Times) -> list[str]:
    """Return a line for each target and workspace that it is for."""
    said = []
    for what, most in TARGETS.items():
        base = statistics.median(found[what][WITHOUT])
        for name in JUDGED:
            ratio = statistics.median(found[what][name]) / base
            word = "met" if ratio <= most else "not met"
            said.append(f"{what}, {name}: {ratio:.2f} times, target at most {most:.2f}: {word}")
    return said


def _measured(roots: dict[str, Path]) -> Times:
    found: Times = {}
    for turn in range(_ROUNDS):
        for name, root in roots.items():
            numbers = range(turn * _CALLS, (turn + 1) * _CALLS)
            results = {
                CREATE: _median_us(lambda number, root=root: _created(root, number), numbers),  # type: ignore[misc]
                "write 4 KiB": _median_us(_written(root, 4096), range(_CALLS)),
                WRITE_MIB: _median_us(_written(root, _MIB), range(32)),
                READ: _median_us(_read(root), range(_CALLS)),
            }
            for what, median in results.items():
                found.setdefault(what, {}).setdefault(name, []).append(median)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where the journals are; by default a temporary directory")
    parser.add_argument("--files", type=int, default=100_000, help="how many files are recovered")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        in_memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_TMPFS)))
        roots: dict[str, Path] = {}
        for name, options in _MODES.items():
            root = roots[name] = place / name.replace(" ", "-")
            root.mkdir()
            if options:
                where = in_memory if name == TMPFS else place
                options = {**options, "journal_dir": where / f"{root.name}-journal"}  # noqa: PLW2901
            stack.enter_context(Workspace.mount(root, name=f"bench-journal-{os.getpid()}-{root.name}", **options))
        found = _measured(roots)
        print(*lines(found), "", *verdicts(found), "", sep="\n", flush=True)
        _print_recovery(place, arguments.files)


if __name__ == "__main__":
    main()
