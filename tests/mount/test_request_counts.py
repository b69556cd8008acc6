"""How many requests the kernel sends for each operation in the table of bench/NOTES.md.

A change that adds a request to an operation makes that operation slower by a third or more on a virtual machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.requests import COLD, FORGETS, OPERATIONS

pytestmark = pytest.mark.fuse

ROOT = Path(__file__).parents[2]
FILES = 3
LIMIT_S = 60
ATTEMPTS = 5  # the kernel may drop a cache at any time, when memory is short

# The requests that a program waits for, for one file.  Measured with Linux 6.18; another kernel may send fewer.
COUNTS = {
    "create a file, write 1 KB": 4,
    "stat it": 1,
    "open, read, close": 1,
    "open, read, close again": 0,
    "overwrite (O_TRUNC)": 4,
    "overwrite in place": 1,
    "stat an absent name": 1,
    "stat it again": 0,
    "chmod": 1,
    "utimens": 1,
    "save by rename": 6,
    "rename": 2,
    "link": 2,
    "symlink": 2,
    "unlink": 1,
    "mkdir": 2,
    "create in a new directory": 4,
    "listdir": 3,
    "listdir again": 1,  # GETATTR: the first listing has changed the atime
    "write 1 MiB to a new file": 4,
}
# For each entry of a tree of small directories; `rm -rf` also lists them: three requests for each.
TAR_X, RM_RF = 8, 1.4


class Daemon:
    """A mount whose daemon counts the requests that programs wait for."""

    def __init__(self, top: Path, report: Path, process: subprocess.Popen[bytes]) -> None:
        self.top = top
        self._report = report
        self._process = process

    def requests_of(self, work: Callable[[], object]) -> int:
        self._counted()
        work()
        return self._counted()

    def _counted(self) -> int:
        self._report.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + LIMIT_S
        while not self._report.exists():
            assert self._process.poll() is None, "the daemon has ended"
            assert time.monotonic() < until, "the daemon does not answer"
            time.sleep(0.001)
        counts = json.loads(self._report.read_text())
        return sum(count for name, count in counts.items() if name not in FORGETS)


@pytest.fixture(name="daemon", scope="module")
def a_counting_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    place = tmp_path_factory.mktemp("requests")
    top, report = place / "mount", place / "report"
    top.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "bench.requests", "--serve", top, report], cwd=ROOT)
    try:
        while not top.is_mount():
            assert process.poll() is None, "the daemon did not start"
            time.sleep(0.01)
        yield Daemon(top, report, process)
    finally:
        subprocess.run(["fusermount3", "-u", "-z", top], check=False)
        process.wait()


def test_no_operation_sends_more_requests_than_documented(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    fewest: dict[str, float] = {}
    for attempt in range(ATTEMPTS):
        directory = daemon.top / f"attempt{attempt}"
        directory.mkdir()
        monkeypatch.chdir(directory)
        for warm in OPERATIONS:  # also the requests that the kernel sends once for each mount
            warm[1](99)
        for name, operation in OPERATIONS:
            count = daemon.requests_of(lambda operation=operation: [operation(n) for n in range(FILES)]) / FILES
            fewest[name] = min(count, fewest.get(name, count))
        if all(fewest[name] <= most for name, most in COUNTS.items()):
            break
    monkeypatch.chdir(ROOT)
    # The kernel asks for the directory's attributes before each change: bench/NOTES.md.
    more = {name: 0 if os.geteuid() == 0 else 2 if name == "save by rename" else 1 for name in fewest}
    assert {name: count for name, count in fewest.items() if count > COUNTS[name] + more[name]} == {}


def test_every_operation_of_the_benchmark_has_a_number() -> None:
    assert {name for name, _ in OPERATIONS} == COUNTS.keys()
    assert {name for name, _ in COLD} & COUNTS.keys() == set()


def test_a_listing_of_cached_entries_sends_no_request_the_third_time(daemon: Daemon) -> None:
    directory = daemon.top / "listed"
    directory.mkdir()
    (directory / "f").touch()
    counts = [daemon.requests_of(lambda: os.listdir(directory)) for _ in range(ATTEMPTS)]
    assert min(counts[2:]) == 0


def test_a_tree_is_unpacked_and_removed_with_the_requests_that_are_documented(daemon: Daemon, tmp_path: Path) -> None:
    for folder in range(4):
        (tmp_path / f"tree/d{folder}").mkdir(parents=True)
        for number in range(20):
            (tmp_path / f"tree/d{folder}/f{number}").write_bytes(b"x" * 1000)
    entries = 4 * 21 + 1
    subprocess.run(["tar", "-cf", tmp_path / "tree.tar", "-C", tmp_path, "tree"], check=True)
    directory = daemon.top / "unpacked"
    directory.mkdir()
    tar = ["tar", "-xf", str(tmp_path / "tree.tar"), "-C", str(directory)]
    user = 0 if os.geteuid() == 0 else 1
    assert daemon.requests_of(lambda: subprocess.run(tar, check=True)) <= (TAR_X + user) * entries
    remove = ["rm", "-rf", str(directory)]
    assert daemon.requests_of(lambda: subprocess.run(remove, check=True)) <= (RM_RF + user) * entries
