"""What snapshots of a host directory cost, beside git doing the same to the same tree, in turn in the same run.

    python -m bench.store [--files N] [--rounds N] [--json FILE] [--place DIR]

Rows: the first snapshot (`git add -A && git commit`), one after ten files were changed (the same), a restore of ten
changed files (`git reset --hard`), and a restore into an empty directory (the same).  The library is called in this
process, as the daemon calls it; git is started, as one starts it.  A restore of
ours keeps the state before as a snapshot, which git's does not; the row "no safety snapshot" is without.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store

FILES_PER_DIRECTORY = 100
FILE_BYTES = 1024
CHANGED = 10
GIT_ENVIRONMENT = {
    **os.environ,
    "GIT_AUTHOR_NAME": "bench", "GIT_AUTHOR_EMAIL": "bench@localhost",
    "GIT_COMMITTER_NAME": "bench", "GIT_COMMITTER_EMAIL": "bench@localhost",
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip


class Tree:
    """A directory of small files."""

    def __init__(self, root: Path, files: int) -> None:
        self.root = root
        self.files = files
        self._stamp = 0

    def _path(self, number: int) -> Path:
        return self.root / f"directory-{number // FILES_PER_DIRECTORY:04d}" / f"file-{number:06d}"

    def fill(self) -> None:
        for number in range(self.files):
            path = self._path(number)
            if number % FILES_PER_DIRECTORY == 0:
                path.parent.mkdir(parents=True)
            path.write_bytes(os.urandom(FILE_BYTES // 2).hex().encode())

    def change(self) -> None:
        self._stamp += 1
        for number in range(0, self.files, self.files // CHANGED):
            self._path(number).write_bytes(b"%d " % self._stamp + os.urandom(FILE_BYTES // 2).hex().encode()[:-10])

    def empty(self) -> None:
        for directory in self.root.glob("directory-*"):
            shutil.rmtree(directory)


class Git:
    """Snapshots as commits."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._run("init", "-q")

    def _run(self, *arguments: str) -> None:
        command = ["git", "-C", str(self._tree.root), *arguments]
        subprocess.run(command, check=True, env=GIT_ENVIRONMENT, stdout=subprocess.DEVNULL)

    def take(self) -> None:
        self._run("add", "-A")
        self._run("commit", "-q", "-m", "snapshot")

    def restore(self) -> None:
        self._run("reset", "-q", "--hard")


class Ours:
    """Snapshots in the store."""

    def __init__(self, tree: Tree, store: Store) -> None:
        self._store = store
        self._source = DirectorySource(str(tree.root))
        self._target = DirectoryTarget(str(tree.root))
        self._count = 0

    def take(self) -> None:
        self._count += 1
        self._store.take("bench", f"{self._count}", self._source)

    def restore(self, *, safety: bool = True) -> None:
        self._count += safety
        wanted = f"{self._count - safety}"
        name = f"{self._count}" if safety else None
        done = self._store.restore("bench", self._target, RestoreRequest(wanted, safety=name))
        assert not done.problems
        if safety:
            self._store.drop("bench", f"{self._count}")
            self._count -= 1


def cpu_clock() -> float:
    """CPU time of this process and of those it has started, in seconds."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + spent.ru_utime + spent.ru_stime


def timed(body: Callable[[], None], clock: Callable[[], float]) -> float:
    begin = clock()
    body()
    return clock() - begin


Rows = dict[str, dict[str, list[float]]]


def a_round(place: Path, files: int, rows: Rows, clock: Callable[[], float]) -> None:
    """One round of all rows, on trees of its own."""
    places = {name: place / name for name in ("git", "vfsd")}
    trees = {name: Tree(path, files) for name, path in places.items()}
    for name, path in places.items():
        path.mkdir()
        trees[name].fill()
    os.sync()
    with Store(place / "store") as store:
        git, ours = Git(trees["git"]), Ours(trees["vfsd"], store)

        def row(name: str, git_does: Callable[[], None], we_do: Callable[[], None], before: str) -> None:
            cells = rows.setdefault(name, {"git": [], "vfsd": []})
            for who, body in (("git", git_does), ("vfsd", we_do)):
                if before:
                    getattr(trees[who], before)()
                cells[who].append(timed(body, clock))

        row("first snapshot", git.take, ours.take, "")
        for _ in range(3):
            row("snapshot after ten changes", git.take, ours.take, "change")
            row("restore of ten changes", git.restore, ours.restore, "change")
            row("- no safety snapshot", git.restore, lambda: ours.restore(safety=False), "change")
        row("restore of all files", git.restore, lambda: ours.restore(safety=False), "empty")
    shutil.rmtree(place, ignore_errors=True)


def summary(cells: dict[str, list[float]]) -> dict[str, float]:
    ratios = [git / ours for git, ours in zip(cells["git"], cells["vfsd"], strict=True)]
    return {
        "git_ms": statistics.median(cells["git"]) * 1e3,
        "vfsd_ms": statistics.median(cells["vfsd"]) * 1e3,
        "times_faster": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "best_git_ms": min(cells["git"]) * 1e3,
        "best_vfsd_ms": min(cells["vfsd"]) * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", help="a directory on the file system to measure on")
    parser.add_argument(
        "--cpu", action="store_true",
        help="CPU time of both, in place of the clock's: for a machine that has other work to do",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    rows: Rows = {}
    with tempfile.TemporaryDirectory(prefix="vfsd-bench-", dir=options.place) as scratch:
        for number in range(options.rounds):
            place = Path(scratch, f"round{number}")
            place.mkdir()
            a_round(place, options.files, rows, cpu_clock if options.cpu else time.perf_counter)
    found = {name: summary(cells) for name, cells in rows.items()}
    print(f"{options.files} files of {FILE_BYTES} bytes; medians of {options.rounds} rounds")
    print(f"{'':28}{'git':>10}{'vfsd':>10}{'faster':>9}   (lowest-highest)")
    for name, figures in found.items():
        print(
            f"{name:28}{figures['git_ms']:7.1f} ms{figures['vfsd_ms']:7.1f} ms{figures['times_faster']:8.1f}x"
            f"   ({figures['low']:.1f}-{figures['high']:.1f})"
        )
    if options.json:
        Path(options.json).write_text(json.dumps({"files": options.files, "rows": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
