"""Forks of a memory workspace: how long they take, and what memory they need, for trees of several sizes.

    python -m bench.forks [--files 1000 100000] [--forks 64] [--used N] [--others]

For each number of files of 1 KB:

- `fork`: median wall time of `Workspace.fork`, until the mount answers; `all`: of all forks, one after the other.
- `pause`: the longest stat(2) in the source while the forks are made.
- `memory`: the sum of the proportional set sizes of the source and all forks, as a multiple of the source's resident
  set before; right after the forks, and after `git status` and `rg` ran in `--used` of them.
- `private`: memory of one fork that it shares with no process, the median; right after, and of a fork that was used.

One program in each fork then writes the same file at the same time; each must find what it wrote itself.

`--others` measures what gives an agent a copy of such a tree, once, on a tmpfs: `vfsd fork`, `git worktree add`, `cp -a
--reflink=auto`, and `podman commit` with `podman run` of a container that has the tree (`-`: Podman cannot run here).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench._filesystems import tmpfs
from bench.many import memory
from tests.container.conftest import BUSYBOX, import_image
from tests.container.service import NoPodmanError, running_service, write_busybox_image
from vfsd.client.workspace import Workspace

_IN_A_DIRECTORY = 1000


def fill(top: Path, files: int) -> None:
    for number in range(files):
        folder = top / f"d{number // _IN_A_DIRECTORY}"
        if number % _IN_A_DIRECTORY == 0:
            folder.mkdir()
        (folder / f"f{number}").write_bytes(b"x" * 1000)


def git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], check=True, capture_output=True)


def use(top: str, repository: Path) -> None:
    """Run `git status` and `rg`, which together look at each file and read each; the repository is outside."""
    git("--git-dir", str(repository), "--work-tree", top, "status", "--porcelain")
    subprocess.run(["rg", "-q", "no such text", top], check=False)


def write_at_once(forks: list[Workspace]) -> None:
    """Write one file in all forks at the same time; raise AssertionError if one has another's content."""
    start = threading.Barrier(len(forks))

    def write(number: int) -> bool:
        place = Path(forks[number].path, "who")
        start.wait()
        for step in range(50):
            place.write_text(f"{number} {step}")
        return place.read_text() == f"{number} 49"

    with ThreadPoolExecutor(len(forks)) as threads:
        assert all(threads.map(write, range(len(forks))))


class LongestStat:
    """The longest stat(2) of a path during a block, in seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds = 0.0

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.perf_counter()
            os.statvfs(self._path)
            self.seconds = max(self.seconds, time.perf_counter() - began)
            time.sleep(0.001)

    def __enter__(self) -> LongestStat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def private(pid: int) -> float:
    """MiB of memory of a process that no other shares."""
    used = memory(pid)
    return (used["Private_Clean"] + used["Private_Dirty"]) / 2**20


def measure(files: int, forks: int, used: int, base: Path) -> str:
    """Measure one size, and return a row of the table."""
    with Workspace.mount(base / f"source-{files}", engine="native") as source:
        fill(Path(source.path), files)
        repository = base / f"repository-{files}"
        if used:
            git("init", "-q", "--bare", str(repository))
            git("--git-dir", str(repository), "--work-tree", source.path, "add", "-A", source.path)
        resident = memory(source.pid)["Rss"]
        made: list[Workspace] = []
        times = []
        try:
            with LongestStat(Path(source.path)) as longest:
                began = time.perf_counter()
                for number in range(forks):
                    started = time.perf_counter()
                    made.append(source.fork(base / f"fork-{files}-{number}"))
                    times.append(time.perf_counter() - started)
                all_s = time.perf_counter() - began
            pids = [source.pid, *(each.pid for each in made)]
            right_after = sum(memory(pid)["Pss"] for pid in pids) / resident
            private_after = statistics.median(private(each.pid) for each in made)
            for each in made[:used]:
                use(each.path, repository)
            when_used = sum(memory(pid)["Pss"] for pid in pids) / resident
            private_used = statistics.median(private(each.pid) for each in made[: used or None])
            write_at_once(made)
        finally:
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(Workspace.unmount, made))
    return (
        f"{files:>9,} {1e3 * statistics.median(times):7.0f} ms {all_s:7.2f} s {1e3 * longest.seconds:7.0f} ms"
        f" {resident / 2**20:7.0f} MiB {right_after:9.2f} {when_used:9.2f}"
        f" {private_after:7.1f} MiB {private_used:7.1f} MiB"
    )


def seconds(*commands: list[str]) -> float:
    began = time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def podman_seconds(source: Path, place: Path) -> float | None:
    """The time of `podman commit` and `podman run` of a container that has the tree; None where there is no Podman."""
    try:
        with running_service(place) as url:
            archive = place / "image.tar"
            write_busybox_image(archive)
            import_image(url, archive, BUSYBOX)
            podman = ["podman", "--remote", "--url", url]
            stay = ["sleep", "100000"]
            seconds([*podman, "run", "--detach", "--name", "source", BUSYBOX, *stay])
            try:
                seconds([*podman, "cp", f"{source}/.", "source:/work"])
                return seconds(
                    [*podman, "commit", "--quiet", "source", "copy"],
                    [*podman, "run", "--detach", "--name", "copy", "localhost/copy", *stay],
                )
            finally:
                seconds([*podman, "rm", "--force", "--ignore", "--time", "0", "source", "copy"])
    except NoPodmanError:
        return None


def measure_others(files: int, base: Path) -> str:
    """Measure the copies that vfsd and other programs make, and return a row of the table."""
    source = base / f"tree-{files}"
    source.mkdir()
    fill(source, files)
    with Workspace.mount(base / f"source-{files}", engine="native") as workspace:
        fill(Path(workspace.path), files)
        began = time.perf_counter()
        with workspace.fork(base / f"fork-{files}"):
            fork_s = time.perf_counter() - began
    podman_s = podman_seconds(source, base / "podman")
    copy_s = seconds(["cp", "-a", "--reflink=auto", str(source), f"{source}-copy"])
    git("init", "-q", str(source))
    git("-C", str(source), "add", "-A")
    git("-C", str(source), "commit", "-qm", "x")
    worktree_s = seconds(["git", "-C", str(source), "worktree", "add", "-q", f"{source}-worktree", "HEAD", "--detach"])
    podman = f"{podman_s:20.2f} s" if podman_s is not None else f"{'-':>22}"
    return f"{files:>9,} {fork_s:10.2f} s {worktree_s:12.2f} s {copy_s:10.2f} s {podman}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--forks", type=int, default=64)
    parser.add_argument("--used", type=int, default=2)
    parser.add_argument("--others", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, tmpfs(Path(place, "memory")) as base:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        python_s = time.perf_counter() - began
        print(f"load {os.getloadavg()[0]:.1f}, `python -c pass` {1e3 * python_s:.0f} ms", end="")
        if arguments.others:
            print(f"\n{'files':>9} {'vfsd fork':>12} {'git worktree':>14} {'cp -a':>12} {'podman commit + run':>22}")
            for files in arguments.files:
                print(measure_others(files, base), flush=True)
            return
        print(f", {arguments.forks} forks, {arguments.used} of them used")
        titles = f"{'files':>9} {'fork':>10} {'all':>9} {'pause':>10} {'source':>11} {'memory':>9} {'used':>9}"
        print(titles + f" {'private':>11} {'of a used':>11}")
        for files in arguments.files:
            print(measure(files, arguments.forks, arguments.used, base), flush=True)


if __name__ == "__main__":
    main()
