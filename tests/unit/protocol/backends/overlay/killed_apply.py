"""A program that applies an overlay, or recovers what an apply left, and kills itself where it is told to.

It reads lines from its standard input, "apply N SEED LOG DIRECTORY" or "recover N 0 LOG DIRECTORY"; for each it forks a
process that does that, and is killed by SIGKILL before its change number N on the disk (or not at all, if there are
fewer).  It answers with a line: "killed" or "done".  (A fork of the test's own process would have its threads' locks.)
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.apply import Applied
from protocol.backends.overlay.host_lower import INTENT_LOG_NAME, MachineLower
from protocol.backends.overlay.intent_log import recover
from protocol.testing.volume.driver import ALICE, Driver
from protocol.volume import Caller

BLOCK = 128 * 1024
RANDOM_STEPS = 30
# Only root can give what is applied to another user.
WORKER = ALICE if os.geteuid() == 0 else Caller(os.geteuid(), os.getegid())


def make_tree(root: Path) -> Path:
    """The directory that `some_work` changes."""
    (root / "src" / "deep").mkdir(parents=True)
    (root / "src" / "main.c").write_bytes(b"main")
    (root / "src" / "deep" / "x").write_bytes(b"x" * 10)
    (root / "big").write_bytes(b"b" * (3 * BLOCK))
    (root / "README").write_bytes(b"read me")
    os.link(root / "README", root / "src" / "README.too")
    os.symlink("src/main.c", root / "link")
    return root


def some_work(fs: Driver, volume: OverlayVolume) -> None:
    """Changes of each kind."""
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


def work(fs: Driver, volume: OverlayVolume) -> None:
    """The changes of `some_work`, and removed directories."""
    some_work(fs, volume)
    fs.unlink(b"old/1")
    fs.unlink(b"old/2")
    fs.rmdir(b"old")
    fs.file(b"old", b"a file now")
    for number in range(4):
        fs.unlink(b"gone/%d" % number)
    fs.rmdir(b"gone")


def random_step(chance: random.Random, volume: OverlayVolume, fs: Driver) -> None:
    """Something that a user might do, drawn by `chance`; nothing where it is refused."""
    with volume.tree() as tree:
        entries = [entry for entry in tree.walk() if entry.path]
    directories = [b"", *(entry.path for entry in entries if entry.is_dir)]
    some = chance.choice(entries) if entries else None
    at = chance.choice(directories)
    target = (at + b"/" if at else b"") + chance.choice([b"p", b"q", b"r", b"README", b"src"])
    try:
        match chance.randrange(9):
            case 0:
                fs.file(target, chance.randbytes(3) * chance.randrange(1, 50_000))
            case 1:
                fs.directory(target)
            case 2:
                fs.symlink(target, b"to/" + b"x" * chance.randrange(1, 9))
            case 3 if some is not None:
                fs.rename(some.path, target)
            case 4 if some is not None and not some.is_dir:
                fs.unlink(some.path)
            case 5 if some is not None and some.is_dir:
                fs.rmdir(some.path)
            case 6 if some is not None and some.is_file:
                volume.write(fs.at(some.path), chance.randrange(0, 3 * BLOCK), b"w" * chance.randrange(1, 9000))
            case 7 if some is not None and not some.is_symlink:
                fs.set(some.path, mode=chance.choice([0o700, 0o755, 0o644]), mtime_ns=chance.randrange(10**18))
            case 8 if some is not None and not some.is_dir:
                fs.link(fs.at(some.path), target)
    except OSError:
        pass  # exists, is not empty, is below itself: another step then


def written(volume: OverlayVolume, before: Callable[[], None] = lambda: None, *, dry_run: bool = False) -> Applied:
    """Apply `volume` to the directory below it; the volume does not take note of that."""
    with volume.applying((), force=False, dry_run=dry_run) as run:
        return run.write(lambda: None, before)


def apply_work(root: str, before: Callable[[], None], seed: int = 0, log: bytes = INTENT_LOG_NAME) -> None:
    """Work in an overlay of `root`, with a clock that says the same each time, and apply it.

    With a `seed` it is random work, the same for the same seed.  `log` is the path of the intent log.
    """
    volume = OverlayVolume(MachineLower(root, [], [], log), clock=lambda: 1_700_000_000_000_000_000)
    fs = Driver(volume, WORKER)
    if seed:
        chance = random.Random(seed)
        for _ in range(RANDOM_STEPS):
            random_step(chance, volume, fs)
    else:
        work(fs, volume)
    done = written(volume, before)
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


def _child(verb: str, number: int, seed: int, log: bytes, root: str) -> None:
    status = 1
    try:
        if verb == "apply":
            apply_work(root, _killing(number), seed, log)
        else:
            recover(root, _killing(number), log)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def main() -> None:
    for line in sys.stdin:
        verb, number, seed, log, root = line.rstrip("\n").split(" ", 4)
        child = os.fork()
        if child == 0:
            _child(verb, int(number), int(seed), os.fsencode(log), root)
        _, status = os.waitpid(child, 0)
        said = "killed" if os.WIFSIGNALED(status) else "done" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        print(said, flush=True)


if __name__ == "__main__":
    main()
