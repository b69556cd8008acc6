"""Which requests the kernel sends for what a user does: the table of bench/NOTES.md.

    python -m bench.requests [--no-xattrs] [--json FILE]

A daemon of its own, with the native engine over a volume in memory, counts opcodes.  Requests are exact, whatever else
the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import trio

from bench._filesystems import end_cleanly, run
from bench._micro import DATA, drop_caches
from bench._real import GIT
from protocol.backends.memory import MemoryVolume
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine, wire
from vfsd.kernel.engines.native.wire import Opcode

TIMES = 100
PROJECT = (20, 20)  # directories, files in each
FORGETS = frozenset({"FORGET", "BATCH_FORGET"})  # nobody waits for these


class CountingEngine(NativeEngine):
    """Counts what it is asked."""

    counts: Counter[str] = Counter()  # noqa: RUF012 (one engine a process)

    def _respond(self, descriptor: int, length: int, may_postpone: bool = True) -> None:
        opcode = wire.IN_HEADER_ROUTE.unpack_from(self._buffer, 0)[0]
        name = Opcode(opcode).name
        if opcode == Opcode.GETXATTR:
            name += f"({bytes(self._buffer[48 : length - 1]).decode()})"
        self.counts[name] += 1
        super()._respond(descriptor, length, may_postpone)


def serve(mountpoint: str, report: str, *, xattrs: bool) -> None:
    """The daemon: writes what it counted to `report` on SIGUSR1, and begins anew."""
    engine = CountingEngine(MemoryVolume(), EngineSettings(mountpoint, "requests", xattrs=xattrs))

    def tell(*_: object) -> None:
        with open(report + ".new", "w") as file:
            json.dump(engine.counts, file)
        os.rename(report + ".new", report)
        engine.counts.clear()

    signal.signal(signal.SIGUSR1, tell)
    engine.mount()
    try:
        trio.run(engine.serve)
    finally:
        engine.unmount()


def write(path: str, flags: int, size: int = 1024) -> None:
    descriptor = os.open(path, flags, 0o644)
    os.write(descriptor, DATA[:size])
    os.close(descriptor)


def read(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.read(descriptor, 4096)
    os.close(descriptor)


def save(path: str) -> None:
    """As editors do."""
    write(path + "~", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.rename(path + "~", path)


NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY
OPERATIONS: tuple[tuple[str, Callable[[int], object]], ...] = (
    ("create a file, write 1 KB", lambda n: write(f"f{n}", NEW)),
    ("stat it", lambda n: os.stat(f"f{n}")),
    ("stat it again", lambda n: os.stat(f"f{n}")),
    ("open, read, close", lambda n: read(f"f{n}")),
    ("open, read, close again", lambda n: read(f"f{n}")),
    ("overwrite (O_TRUNC)", lambda n: write(f"f{n}", os.O_TRUNC | os.O_WRONLY)),
    ("overwrite in place", lambda n: write(f"f{n}", os.O_WRONLY)),
    ("stat an absent name", lambda n: os.path.exists(f"absent{n}")),
    ("stat it again", lambda n: os.path.exists(f"absent{n}")),
    ("chmod", lambda n: os.chmod(f"f{n}", 0o600)),
    ("utimens", lambda n: os.utime(f"f{n}", ns=(1, 2))),
    ("save by rename", lambda n: save(f"f{n}")),
    ("rename", lambda n: os.rename(f"f{n}", f"g{n}")),
    ("link", lambda n: os.link(f"g{n}", f"l{n}")),
    ("symlink", lambda n: os.symlink("target", f"s{n}")),
    ("unlink", lambda n: os.unlink(f"g{n}")),
    ("mkdir", lambda n: os.mkdir(f"d{n}")),
    ("create in a new directory", lambda n: write(f"d{n}/f", NEW)),
    ("listdir", lambda n: os.listdir(f"d{n}")),
    ("listdir again", lambda n: os.listdir(f"d{n}")),
    ("write 1 MiB to a new file", lambda n: write(f"big{n}", NEW, 1 << 20)),
)
COLD: tuple[tuple[str, Callable[[int], object]], ...] = (
    ("stat, cold", lambda n: os.stat(f"l{n}")),
    ("open, read, close, cold", lambda n: read(f"l{n}")),
)


def commands(tar: Path) -> tuple[tuple[str, str], ...]:
    git = "git -c core.fsync=none"
    return (
        ("tar x", f"mkdir x && tar -xf {tar} -C x"),
        ("cp -a", "cp -a x y"),
        ("find, first", "find y"),
        ("find again", "find y"),
        ("git add and commit", f"cd y && {git} init -q && {git} add -A && {git} commit -qm all"),
        ("git status, first", f"cd y && {git} status"),
        ("git status again", f"cd y && {git} status"),
        ("git clone", f"{git} clone -q --no-hardlinks y z"),
        ("git checkout, all changed", f"cd z && for f in p*/*; do echo >>$f; done && {git} checkout -q ."),
        ("rm -rf", "rm -rf x"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-xattrs", dest="xattrs", action="store_false", help="of a mount without them")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", nargs=2, metavar=("MOUNTPOINT", "REPORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve, xattrs=options.xattrs)
        return
    end_cleanly()
    scratch = Path(tempfile.mkdtemp(prefix="vfsd-bench-"))
    place, report = scratch / "mount", scratch / "report"
    place.mkdir()
    without = [] if options.xattrs else ["--no-xattrs"]
    daemon = subprocess.Popen([sys.executable, "-m", "bench.requests", *without, "--serve", place, report])
    try:
        while not place.is_mount():
            if daemon.poll() is not None:
                sys.exit("the daemon did not start")
            time.sleep(0.02)
        table = measure(place, report, daemon.pid, project(scratch))
    finally:
        os.chdir("/")
        subprocess.run(["fusermount3", "-u", "-z", place], check=False)
        daemon.wait()
        shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        Path(options.json).write_text(json.dumps(table, indent=1) + "\n")


def project(scratch: Path) -> Path:
    """A tar of some directories of small files, as a package is one."""
    folders, files = PROJECT
    for folder in range(folders):
        (scratch / f"project/p{folder}").mkdir(parents=True)
        for number in range(files):
            (scratch / f"project/p{folder}/m{number}.js").write_bytes(b"%d.%d" % (folder, number) + DATA[:1000])
    run("tar", "-cf", scratch / "project.tar", "-C", scratch / "project", ".")
    return scratch / "project.tar"


def measure(place: Path, report: Path, daemon: int, tar: Path) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}

    def counted() -> Counter[str]:
        report.unlink(missing_ok=True)
        os.kill(daemon, signal.SIGUSR1)
        while not report.exists():
            time.sleep(0.001)
        return Counter(json.loads(report.read_text()))

    def row(name: str, counts: Counter[str], per: int) -> None:
        each = {request: round(count / per, 2) for request, count in sorted(counts.items()) if count / per >= 0.005}
        table[name] = each
        waited = sum(count for request, count in counts.items() if request not in FORGETS) / per
        print(f"{name:28}{waited:6.2f}  " + ", ".join(f"{n:g} {request}" for request, n in each.items()), flush=True)

    os.chdir(place)
    print(f"{'one':28}{'waited':>6}  requests")
    for operations, cold in ((OPERATIONS, False), (COLD, True)):
        for name, operation in operations:
            if cold:
                drop_caches()
            counted()
            for number in range(TIMES):
                operation(number)
            row(name if name not in table else name + " (2)", counted(), TIMES)
    entries = PROJECT[0] * (PROJECT[1] + 1)
    print(f"\nfor each of {entries} entries")
    for name, command in commands(tar):
        counted()
        run("sh", "-c", command, cwd=place, env=GIT)
        row(name, counted(), entries)
    return table


if __name__ == "__main__":
    main()
