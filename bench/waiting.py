"""What it gains to stay awake for the next request: two daemons in turn, and one of them sleeps at once.

    python -m bench.waiting [--rounds N] [--hogs 0,1,2,4]

Microseconds for an operation, medians, lowest tenth and mean of the rounds; beside so many threads that compute without
end.  See `vfsd.kernel.engines.native.wakeups`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio

from bench._filesystems import end_cleanly
from bench._micro import create
from protocol.backends.memory import MemoryVolume
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine, wakeups
from vfsd.machine import interpreter

FILES = 400
ROWS: tuple[tuple[str, Callable[[str], object]], ...] = (
    ("create + write 1 KB", create),
    ("chmod", lambda path: os.chmod(path, 0o600)),
    ("rename", lambda path: os.rename(path, path + "x")),
    ("unlink", lambda path: os.unlink(path + "x")),
)


def serve(mountpoint: str, spin_us: float) -> None:
    """A daemon that spins for so long."""
    wakeups._SPIN_S = spin_us * 1e-6  # type: ignore[misc]
    interpreter.set_up("bench")
    engine = NativeEngine(MemoryVolume(), EngineSettings(mountpoint, "waiting"))
    engine.mount()
    try:
        trio.run(engine.serve)
    finally:
        engine.unmount()


@contextmanager
def served(place: Path, spin_us: float) -> Iterator[Path]:
    place.mkdir()
    command = [sys.executable, "-m", "bench.waiting", "--serve", place, str(spin_us)]
    daemon = subprocess.Popen(command, start_new_session=True)  # as `vfsd mount` starts one
    try:
        while not place.is_mount():
            if daemon.poll() is not None:
                sys.exit("the daemon did not start")
            time.sleep(0.02)
        yield place
    finally:
        subprocess.run(["fusermount3", "-u", "-z", place], check=False)
        daemon.wait()


@contextmanager
def hogs(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(0.2)
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def one_round(place: Path) -> dict[str, float]:
    found = {}
    for name, operation in ROWS:
        began = time.perf_counter()
        for number in range(FILES):
            operation(f"{place}/f{number}")
        found[name] = (time.perf_counter() - began) / FILES * 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--hogs", default="0,1,2,4", help="how many threads compute beside it, one run for each")
    parser.add_argument("--serve", nargs=2, metavar=("MOUNTPOINT", "SPIN_US"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], float(options.serve[1]))
        return
    end_cleanly()
    scratch = Path(tempfile.mkdtemp(prefix="vfsd-bench-"))
    try:
        with ExitStack() as stack:
            places = {
                name: stack.enter_context(served(scratch / name, spin_us))
                for name, spin_us in (("asleep", 0.0), ("awake", wakeups._SPIN_S * 1e6))
            }
            print(f"{'hogs':>4} {'':20}" + "".join(f"{name:>26}" for name in places))
            for count in map(int, options.hogs.split(",")):
                compare(places, count, options.rounds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def compare(places: dict[str, Path], count: int, rounds: int) -> None:
    times: dict[str, dict[str, list[float]]] = {name: {row: [] for row, _ in ROWS} for name in places}
    with hogs(count):
        for _ in range(rounds):
            for name, place in places.items():
                for row, microseconds in one_round(place).items():
                    times[name][row].append(microseconds)
    for row, _ in ROWS:
        cells = [times[name][row] for name in places]
        shown = [
            f"{statistics.median(cell):.1f} ({sorted(cell)[len(cell) // 10]:.1f}, {statistics.mean(cell):.1f})"
            for cell in cells
        ]
        print(f"{count:4} {row:20}" + "".join(f"{each:>26}" for each in shown), flush=True)


if __name__ == "__main__":
    main()
