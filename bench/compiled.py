"""CPU time of the daemon for each change on a real mount, interpreted and compiled in turn (`make compiled` first).

    python -m bench.compiled [--count N] [--rounds N] [--overlay]

Two daemons, each with the log of changes, as a mount without options has it.  The figure is the CPU time of the thread
that serves, divided by the number of changes, the lowest of the rounds: on a busy machine, the round that other work
disturbed least.  It includes the requests that come with a change, such as the LOOKUP before a MKNOD, and the kernel's
part of reading and answering them.  Memory is what only this daemon has (Private_Dirty), before the first round.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

BUILDS = ("0", "1")  # of VFSD_COMPILED


class Daemon(NamedTuple):
    """A mounted workspace."""

    directory: str
    pid: int

    def cpu_ns(self) -> int:
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0])

    def private_kib(self) -> int:
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return int(re.findall(r"Private_Dirty: *(\d+)", rollup)[0])


@contextmanager
def mounted(build: str, scratch: str, *, overlay: bool) -> Iterator[Daemon]:
    """Mount a workspace whose daemon is of this build."""
    directory, runtime = os.path.join(scratch, f"m{build}"), os.path.join(scratch, f"run{build}")
    os.makedirs(directory)
    os.makedirs(runtime)
    environment = {**os.environ, "VFSD_COMPILED": build, "VFSD_RUNTIME_DIR": runtime}

    def vfsd(*words: str) -> str:
        command = [sys.executable, "-m", "vfsd.cli.main", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    lower = os.path.join(scratch, f"lower{build}")
    os.makedirs(lower)
    vfsd("mount", "--name", "compiled", *([f"overlay:{lower}"] if overlay else []), directory)
    try:
        daemon = Daemon(directory, int(re.findall(r'"pid": ?(\d+)', vfsd("-w", "compiled", "status", "--json"))[0]))
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        if ("vfsd_compiled" in maps) != (build == "1"):
            raise SystemExit("the compiled modules are missing or out of date: make compiled")
        yield daemon
    finally:
        vfsd("-w", "compiled", "unmount", "--discard")


def changes(directory: str) -> list[tuple[str, Callable[[str], object]]]:
    """Return the kinds of changes in their order, each as a call for one path."""
    data, big = b"x" * 1024, os.path.join(directory, "big")
    with open(big, "wb") as file:
        file.write(data)

    def create(path: str) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))

    def write(path: str) -> None:
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, data)
        os.close(descriptor)

    return [
        ("create", create),
        ("write 1 KB", write),
        ("chmod", lambda path: os.chmod(path, 0o600)),
        ("utimes", lambda path: os.utime(path, (1, 2))),
        ("rename", lambda path: os.rename(path, path + "r")),
        ("unlink", lambda path: os.unlink(path + "r")),
        ("mkdir", os.mkdir),
        ("rmdir", os.rmdir),
        ("symlink", lambda path: os.symlink("target", path)),
        ("unlink symlink", os.unlink),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="changes of each kind in a round")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--overlay", action="store_true", help="an overlay instead of a workspace in memory")
    options = parser.parse_args()
    lowest: dict[tuple[str, str], float] = {}
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-compiled-"))
        daemons = {each: stack.enter_context(mounted(each, scratch, overlay=options.overlay)) for each in BUILDS}
        memory = {build: daemon.private_kib() for build, daemon in daemons.items()}
        for at in range(options.rounds):
            for build in BUILDS if at % 2 else BUILDS[::-1]:
                daemon = daemons[build]
                paths = [os.path.join(daemon.directory, f"f{n:04d}") for n in range(options.count)]
                for name, change in changes(daemon.directory):
                    started = daemon.cpu_ns()
                    for path in paths:
                        change(path)
                    cpu_us = (daemon.cpu_ns() - started) / 1000 / options.count
                    lowest[name, build] = min(cpu_us, lowest.get((name, build), cpu_us))
    print(f"{'change':16}{'interpreted us':>16}{'compiled us':>16}{'ratio':>8}")
    for name in dict.fromkeys(name for name, _ in lowest):
        interpreted, compiled = (lowest[name, build] for build in BUILDS)
        print(f"{name:16}{interpreted:16.1f}{compiled:16.1f}{interpreted / compiled:8.2f}")
    interpreted, compiled = (sum(cost for (_, each), cost in lowest.items() if each == build) for build in BUILDS)
    print(f"{'all':16}{interpreted:16.1f}{compiled:16.1f}{interpreted / compiled:8.2f}")
    print(f"{'private KiB':16}{memory['0']:16}{memory['1']:16}{memory['0'] / memory['1']:8.2f}")


if __name__ == "__main__":
    main()
