"""A program that applies an overlay, or recovers what an apply left, and kills itself where it is told to.

It reads lines from its standard input: "apply N DIRECTORY" or "recover N DIRECTORY"; for each it forks a process that
does that, and is killed by SIGKILL before its change number N on the disk (or not at all, if there are fewer); with
"moment N DIRECTORY" the apply is killed after N microseconds.  It answers with a line: "killed" or "done".  (A fork of
the test's own process would have its threads' locks.)
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.apply import apply
from protocol.backends.overlay.journal import recover
from protocol.testing.volume.driver import Driver

BLOCK = 128 * 1024


def work(fs: Driver, volume: OverlayVolume) -> None:
    """Some of everything."""
    volume.write(fs.at(b"big"), BLOCK + 3, b"changed")
    fs.file(b"src/new.c", b"new", mode=0o755)
    fs.rename(b"src/deep", b"moved")
    fs.set(b"src/main.c", mode=0o600)
    volume.setxattr(fs.at(b"src/main.c"), b"user.x", b"1", 0)
    fs.unlink(b"link")
    fs.directory(b"link")
    fs.symlink(b"link/back", b"../README")
    volume.write(fs.at(b"README"), 0, b"READ")
    fs.directory(b"a")
    fs.set(fs.file(b"a/sparse"), size=10 * BLOCK)
    fs.link(fs.at(b"a/sparse"), b"a/twin")
    fs.set(b"a", mode=0o555)
    fs.unlink(b"old/1")
    fs.unlink(b"old/2")
    fs.rmdir(b"old")
    fs.file(b"old", b"a file now")
    for number in range(4):
        fs.unlink(b"gone/%d" % number)
    fs.rmdir(b"gone")


def apply_work(root: str, before: Callable[[], None]) -> None:
    """Work in an overlay of `root`, with a clock that says the same each time, and apply it."""
    volume = OverlayVolume(root, clock=lambda: 1_700_000_000_000_000_000)
    work(Driver(volume), volume)
    with volume.base_tree() as base, volume.tree() as live:
        done = apply(volume.lower, base, live, known={}, before=before)
    assert not done.conflicts, done.conflicts
    if done.error is not None:
        raise done.error


def _killing(number: int) -> Callable[[], None]:
    left = number

    def before() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    return before


def _child(verb: str, number: int, root: str) -> None:
    status = 1
    try:
        if verb == "moment":
            apply_work(root, lambda: None)
        elif verb == "apply":
            apply_work(root, _killing(number))
        else:
            recover(root, _killing(number))
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def main() -> None:
    for line in sys.stdin:
        verb, number, root = line.rstrip("\n").split(" ", 2)
        child = os.fork()
        if child == 0:
            _child(verb, int(number), root)
        if verb == "moment":
            time.sleep(int(number) / 1e6)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        said = "killed" if os.WIFSIGNALED(status) else "done" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        print(said, flush=True)


if __name__ == "__main__":
    main()
