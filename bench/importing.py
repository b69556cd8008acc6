"""What taking an archive in costs the daemon of a memory workspace: CPU, memory, and how long others wait meanwhile.

    python -m bench.importing [--entries N] [--rounds N] [--shapes REGEX]

For each shape of archive, and each way to take it in (`vfsd import`, without and with `--persist`, `vfsd restore
FILE.zip`, `vfsd mount --from`):

- `CPU`: user and system time of the daemon, in seconds (utime and stime of /proc/PID/stat).  For `--from` that of its
  whole life so far, without that of a daemon that mounted nothing;
- `peak`, `after`: bytes for an entry by which the daemon's memory grew, at most and in the end (VmHWM and VmRSS of
  /proc/PID/status).  In the end the allocator may hold some of it that is free;
- `longest stat`: the longest time that another process waited for a stat of a new name in the mount meanwhile.

CPU time is not independent of what else runs: hyperthreads and caches are shared.  Compare versions in turn.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from bench._filesystems import end_cleanly
from protocol.archive import write_archive
from protocol.tree import TreeEntry
from vfsd.client.workspace import Workspace

_MTIME_NS: Final = 1_700_000_000_123_456_789
_TEXT: Final = b"".join(b"word%d_%d " % (number % 97, number * 7919 % 1000) for number in range(5000))
_VFSD: Final = Path(sys.executable).with_name("vfsd")
_numbers: Final = itertools.count()
Row = dict[str, float]


class Made:
    """A tree of `files` files of `size` bytes in `directories` directories.  Implements `protocol.tree.Tree`."""

    def __init__(self, files: int, directories: int, size: int) -> None:
        self._files = files
        self._directories = directories
        self._size = size

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        assert not path
        yield TreeEntry(b"", 0o40755, 0, _MTIME_NS)
        inside = self._files // self._directories
        for number in range(self._directories):
            above = b"directory%06d" % number
            yield TreeEntry(above, 0o40755, 0, _MTIME_NS)
            for each in range(inside):
                yield TreeEntry(b"%b/file%07d.txt" % (above, each), 0o100644, self._size, _MTIME_NS + each)

    def entry(self, path: bytes) -> TreeEntry:
        raise NotImplementedError

    def entries(self, path: bytes) -> list[TreeEntry]:
        raise NotImplementedError

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        at = hash(path) % (len(_TEXT) - self._size)
        return _TEXT[at + offset : at + offset + size]

    def chunks(self, path: bytes, size: int = 1 << 16) -> Iterator[bytes]:
        del size
        yield self.read(path, 0, self._size)

    def touched(self, other: object) -> Collection[bytes] | None:
        del other


def shapes(entries: int) -> dict[str, Made]:
    return {
        "500 B in 100s": Made(entries, max(1, entries // 100), 500),
        "500 B, one dir": Made(entries, 1, 500),
        "empty in 100s": Made(entries, max(1, entries // 100), 0),
    }


# -- what a daemon took ------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # proc(5): fields 14 and 15


def status_bytes(pid: int, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _stats(place: str, told: Connection) -> None:
    """Ask for new names until told to stop, then tell the longest time that one took."""
    longest = 0.0
    number = 0
    while not told.poll():
        began = time.perf_counter()
        os.path.lexists(f"{place}/absent{number}")
        longest = max(longest, time.perf_counter() - began)
        number += 1
        time.sleep(0.0005)
    told.send(longest)


@contextmanager
def asking(place: str) -> Iterator[list[float]]:
    """A process that stats new names in `place`; after the block the list has the longest time, in seconds."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_stats, args=(place, theirs))
    process.start()
    found: list[float] = []
    try:
        yield found
        ours.send(None)
        found.append(ours.recv())
    finally:
        process.terminate()
        process.join()


def mounted(scratch: Path, archive: Path | None = None, *, persist: bool = False) -> Workspace:
    """A memory workspace of its own, whatever became of the one before."""
    name = f"importing{next(_numbers)}"
    journal = scratch / f"{name}-journal" if persist else None
    return Workspace.mount(scratch / name, name=name, archive=archive, persist=persist, journal_dir=journal)


def of_command(scratch: Path, archive: Path, entries: int, *command: str, persist: bool = False) -> Row:
    with mounted(scratch, persist=persist) as workspace:
        pid = workspace.pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): VmHWM begins anew
        before, base = cpu_s(pid), status_bytes(pid, "VmRSS")
        with asking(str(workspace.path)) as longest:
            run = [_VFSD, *command, "-w", workspace.name, archive]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        used = cpu_s(pid) - before
        return {"CPU": used, **grown(pid, base, entries), "longest stat": longest[0]}


def grown(pid: int, base: int, entries: int) -> Row:
    """The memory of process `pid` beyond `base` bytes, at most and now, for each of `entries`."""
    return {key: (status_bytes(pid, of) - base) / entries for key, of in (("peak", "VmHWM"), ("after", "VmRSS"))}


def of_mount(scratch: Path, archive: Path, entries: int) -> Row:
    with mounted(scratch) as workspace:
        empty, base = cpu_s(workspace.pid), status_bytes(workspace.pid, "VmRSS")
    with mounted(scratch, archive) as workspace:
        pid = workspace.pid
        return {"CPU": cpu_s(pid) - empty, **grown(pid, base, entries), "longest stat": 0.0}


WAYS: Final[dict[str, Callable[[Path, Path, int], Row]]] = {
    "import": lambda scratch, archive, entries: of_command(scratch, archive, entries, "import"),
    "... --persist": lambda scratch, archive, entries: of_command(scratch, archive, entries, "import", persist=True),
    "restore": lambda scratch, archive, entries: of_command(scratch, archive, entries, "restore"),
    "mount --from": of_mount,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="", metavar="REGEX")
    options = parser.parse_args()
    end_cleanly()
    scratch = Path(tempfile.mkdtemp(prefix="vfsd-bench-"))
    os.environ["VFSD_RUNTIME_DIR"] = str(scratch)
    print(
        f"{'medians':16}{'':14}{'CPU':>10}{'peak':>10}{'after':>10}{'longest stat':>16}   load {os.getloadavg()[0]:.1f}"
    )
    try:
        for shape, tree in shapes(options.entries).items():
            if not re.search(options.shapes, shape):
                continue
            archive = scratch / "archive.zip"
            with archive.open("wb") as file:
                write_archive(tree, file, created_ns=_MTIME_NS)
            for way, measure in WAYS.items():
                rows = [measure(scratch, archive, options.entries) for _ in range(options.rounds)]
                cpu, peak, after, stat = (statistics.median(row[key] for row in rows) for key in rows[0])
                cells = f"{cpu:8.2f} s{peak:8.0f} B{after:8.0f} B{stat * 1e3:13.0f} ms"
                print(f"{shape:16}{way:14}{cells}", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
