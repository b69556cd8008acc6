"""What goes over the control socket, by number of files: snapshot, restore, diff, export, import; and the usual tools.

    python -m bench.control [--quick] [--json FILE]

Times are those of the client: from its request to its answer, with the kernel told.  The tools do the same job
on the same files in tmpfs.  Last come the memory for a file, the time of a start, and how long a stat through the
mount takes while the daemon has long work to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench._filesystems import end_cleanly, run, tmpfs
from bench._real import GIT, WORDS
from vfsd.client.workspace import Workspace

SIZES = (1_000, 10_000, 100_000)
FILE_BYTES = 4096
SMALL_BYTES = 1024
IN_A_DIRECTORY = 100
CHANGED = 10
STATS = 4000

Row = dict[str, float]


def fill(place: Path, count: int, size: int) -> None:
    """`count` files of `size` bytes of something like code."""
    text = " ".join(f"{WORDS[at % len(WORDS)]}_{at * 7919 % 1000}" for at in range(20_000)).encode()
    for number in range(count):
        if number % IN_A_DIRECTORY == 0:
            folder = place / f"directory{number}"
            folder.mkdir()
        begin = number * 37 % (len(text) - size)
        with open(folder / f"file{number}.txt", "wb") as file:
            file.write(text[begin : begin + size])


def median_s(runs: int, body: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(runs):
        before()
        began = time.perf_counter()
        body()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def change_some(place: Path) -> None:
    """Overwrite one file in each of ten directories."""
    folders = sorted(place.glob("directory*"))[:: max(1, len(list(place.glob("directory*"))) // CHANGED)][:CHANGED]
    for folder in folders:
        with open(min(folder.iterdir()), "r+b") as file:
            file.write(os.urandom(100))


def of_vfsd(count: int, scratch: Path, runs: int) -> Row:
    """The control rows of a workspace with `count` files."""
    row: Row = {}
    archive = scratch / "out.zip"
    with Workspace.mount(scratch / "mount", name=f"bench-control-{count}") as workspace:
        place = Path(workspace.path)
        fill(place, count, FILE_BYTES)
        names = iter(range(10**9))
        row["ping (what any call costs)"] = median_s(5 * runs, workspace.status)
        row["snapshot"] = median_s(5 * runs, lambda: workspace.snapshot(f"s{next(names)}"))
        workspace.snapshot("base")
        row["restore of 10 changes"] = median_s(runs, lambda: workspace.restore("base"), lambda: change_some(place))
        change_some(place)
        row["diff of 10 changes"] = median_s(runs, lambda: workspace.diff("base"))
        row["export"] = median_s(runs, lambda: workspace.export(archive, overwrite=True))
    with Workspace.mount(scratch / "mount", name=f"bench-control-{count}") as workspace:
        row["import"] = median_s(1, lambda: workspace.import_archive(archive))
        row["import over it again"] = median_s(1, lambda: workspace.import_archive(archive))
    archive.unlink()
    return row


def of_tools(count: int, scratch: Path, runs: int) -> Row:
    """What people use instead, on the same files in tmpfs."""
    with tmpfs(scratch / "tmpfs") as place:
        source = place / "source"
        source.mkdir()
        fill(source, count, FILE_BYTES)
        out = place / "out"
        row: Row = {}

        def again() -> None:
            out.unlink(missing_ok=True)
            shutil.rmtree(place / "copy", ignore_errors=True)
            shutil.rmtree(source / ".git", ignore_errors=True)

        def commit() -> None:
            run("git", "add", "-A", cwd=source, env=GIT)
            run("git", "commit", "-q", "-m", "all", cwd=source, env=GIT)

        def init() -> None:
            again()
            run("git", "init", "-q", cwd=source, env=GIT)

        row["zip -q -r"] = median_s(runs, lambda: run("zip", "-q", "-r", out, ".", cwd=source), again)
        row["unzip -q"] = median_s(1, lambda: run("unzip", "-q", out, "-d", place / "copy"))
        row["tar -c"] = median_s(runs, lambda: run("tar", "-cf", out, ".", cwd=source), again)
        row["cp -a"] = median_s(runs, lambda: run("cp", "-a", source, place / "copy"), again)
        row["git add -A && git commit"] = median_s(1, commit, init)
        row["the same, 10 changes"] = median_s(runs, commit, lambda: change_some(source))
        return row


def rss_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(count: int, scratch: Path) -> Row:
    with Workspace.mount(scratch / "mount", name="bench-memory") as workspace:
        before = rss_bytes(workspace.pid)
        fill(Path(workspace.path), count, SMALL_BYTES)
        return {"RSS bytes for a file of 1 KiB": (rss_bytes(workspace.pid) - before) / count}


def start(scratch: Path, runs: int) -> Row:
    def mount() -> None:
        with Workspace.mount(scratch / "mount", name="bench-start"):
            times.append(time.perf_counter() - began)

    times: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        mount()
    return {"start, to an answering mount": statistics.median(times)}


def percentile_99_s(place: Path) -> float:
    """How long one stat in a hundred takes at least.  Of absent names, each new: the kernel must ask."""
    times = []
    number = 0
    while number < STATS:
        began = time.perf_counter()
        try:
            os.stat(place / f"absent{number}-{began}")
        except FileNotFoundError:
            pass
        times.append(time.perf_counter() - began)
        number += 1
        time.sleep(0.0002)  # as a client that does something in between
    return statistics.quantiles(times, n=100)[98]


def latency(count: int, scratch: Path, rounds: int) -> Row:
    """The 99th percentile of a stat through the mount: idle, and while the daemon exports and greps; medians."""
    found: dict[str, list[float]] = {}
    with Workspace.mount(scratch / "mount", name="bench-latency") as workspace:
        place = Path(workspace.path)
        fill(place, count, FILE_BYTES)
        for _ in range(rounds):
            idle = percentile_99_s(place)
            found.setdefault("p99 of a stat, idle", []).append(idle)
            for name, work in (
                ("export", lambda: workspace.export(scratch / "busy.zip", overwrite=True)),
                ("grep", lambda: _grep(workspace)),
            ):
                with _again_and_again(work):
                    busy = percentile_99_s(place)
                found.setdefault(f"p99 of a stat, {name} running", []).append(busy)
                found.setdefault(f"  times idle ({name})", []).append(busy / idle)
    return {name: statistics.median(values) for name, values in found.items()}


@contextmanager
def _again_and_again(work: Callable[[], object]) -> Iterator[None]:
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _grep(workspace: Workspace) -> None:
    vfsd = Path(sys.executable).with_name("vfsd")
    run(vfsd, "-w", workspace.name, "fs", "grep", "no_such_word_[0-9]+x")


def show(title: str, columns: dict[str, Row]) -> None:
    print(f"\n{title:34}" + "".join(f"{name:>14}" for name in columns), flush=True)
    for name in next(iter(columns.values())):
        print(f"  {name:32}" + "".join(f"{_value(name, row[name]):>14}" for row in columns.values()), flush=True)


def _value(name: str, value: float) -> str:
    if "bytes" in name or "times" in name or " / " in name:
        return f"{value:,.2f}"
    return f"{value * 1e3:,.2f} ms" if value < 1 else f"{value:,.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 10,000 files, fewer runs")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("the benchmark mounts tmpfs: run it as root")
    end_cleanly()
    sizes = SIZES[:2] if options.quick else SIZES
    runs = 3 if options.quick else 5
    scratch = Path(tempfile.mkdtemp(prefix="vfsd-bench-", dir="/dev/shm"))
    os.environ["VFSD_RUNTIME_DIR"] = str(scratch)
    try:
        ours = {f"{size:,} files": of_vfsd(size, scratch, runs) for size in sizes}
        show("vfsd", ours)
        tools = {f"{size:,} files": of_tools(size, scratch, 1 if size > SIZES[1] else runs) for size in sizes}
        show("the usual tools, on tmpfs", tools)
        ratios = {
            size: {
                "zip -r / export": tools[size]["zip -q -r"] / ours[size]["export"],
                "git commit / snapshot": tools[size]["the same, 10 changes"] / ours[size]["snapshot"],
                "cp -a / snapshot": tools[size]["cp -a"] / ours[size]["snapshot"],
            }
            for size in ours
        }
        show("times as fast", ratios)
        rest = memory(sizes[-1], scratch) | start(scratch, runs) | latency(SIZES[1], scratch, runs)
        show("the daemon", {f"{sizes[-1]:,} files": rest})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        result = {"load": os.getloadavg()[0], "vfsd": ours, "tools": tools, "daemon": rest}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
