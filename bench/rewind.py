"""Snapshot, restore and fork of the same tree of files: vfsd, git, `cp -a --reflink=auto`, and btrfs.

    python -m bench.rewind [--files N] [--rounds N] [--budget SECONDS] [--only REGEX] [--json FILE]

All systems get the same changes and take turns.  In each round some files are changed, a snapshot is taken, more is
changed (files are written, created, removed, renamed, made executable), and the snapshot is restored.  After each
restore the tree is compared with the tree at the snapshot: a system that restores something else has no figures.  A
fork is a second, independent copy of the snapshot.

- `vfsd call` and `vfsd command`: a memory workspace, through the Python API, and with `vfsd snapshot`, `vfsd restore`.
- `git`: `add -A` and `commit`; `reset --hard` and `clean -fdx`; `worktree add`.  On tmpfs.
- `cp -a`: a copy with `--reflink=auto`; `rm -rf` and a copy; a copy.  On tmpfs, which has no reflinks.
- `cp --reflink`: the same on btrfs, which has them.
- `btrfs`: `subvolume snapshot`; `subvolume delete` and `snapshot`; `snapshot`.  In a loop-mounted image in memory.

Times are those of all commands of a step; milliseconds, medians, lowest and highest.  Needs root.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import _machine, _results
from bench._filesystems import GapError, end_cleanly, scratch_directory
from bench._results import Budget
from bench._snapshot_systems import SYSTEMS, System, systems

STEPS: Final = ("snapshot", "restore", "fork")
IN_A_DIRECTORY: Final = 100
CHANGES: Final = 40


@dataclass(frozen=True, slots=True)
class Entry:
    """What a restore has to bring back.  git keeps no other permissions, no times and no empty directories."""

    kind: str  # "file" or "link"
    is_executable: bool
    digest: bytes


Tree = Mapping[str, Entry]  # by path


def differences(one: Tree, other: Tree) -> list[str]:
    """Return the paths that are missing in one of both, or have other entries."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def read_tree(top: Path) -> Tree:
    """Read the files and symlinks below `top`, without git's own."""
    entries = {}
    for folder, directories, names in os.walk(top):
        directories[:] = [name for name in directories if name != ".git"]
        links = [name for name in directories if os.path.islink(os.path.join(folder, name))]
        for name in [*names, *links]:
            if name == ".git":  # a worktree has a file of that name
                continue
            path = os.path.join(folder, name)
            key = os.path.relpath(path, top)
            if os.path.islink(path):
                entries[key] = Entry("link", False, os.fsencode(os.readlink(path)))
                continue
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                entries[key] = Entry("file", bool(found.st_mode & 0o100), hashlib.blake2b(file.read()).digest())
    return entries


def fill(top: Path, count: int) -> None:
    """Make `count` files of 0.5 to 4 KB in directories of 100."""
    chance = random.Random(1)
    for number in range(count):
        folder = top / f"directory{number // IN_A_DIRECTORY}"
        if number % IN_A_DIRECTORY == 0:
            folder.mkdir()
        (folder / f"file{number}.txt").write_bytes(chance.randbytes(chance.randrange(256, 2048)).hex().encode())


def change(top: Path, seed: str) -> None:
    """Change some files below `top`: the same changes for the same tree and `seed`, whatever order it is listed in."""
    chance = random.Random(seed)
    folders = sorted(path for path in top.iterdir() if path.is_dir() and not path.is_symlink() and path.name != ".git")
    for number in range(CHANGES):
        folder = chance.choice(folders)
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
        path = chance.choice(files)
        kind = number % 5
        if kind == 0:
            with path.open("r+b") as file:
                file.write(chance.randbytes(100))
        elif kind == 1:
            (folder / f"new-{seed}-{number}").write_bytes(chance.randbytes(1000))
        elif kind == 2 and len(files) > IN_A_DIRECTORY // 2:
            path.unlink()
        elif kind == 3:
            path.chmod(path.stat().st_mode ^ 0o111)
        else:
            path.rename(folder / f"renamed-{seed}-{number}")
    (chance.choice(folders) / f"link-{seed}").symlink_to("file1.txt")
    folder = chance.choice(folders)
    folder.rename(top / f"moved-{seed}-{folder.name[-40:]}")


class WrongTreeError(Exception):
    """A restore or a fork did not give the tree of the snapshot."""


@dataclass(slots=True)
class Figures:
    """Seconds of each step, a value a round; and why a step has none."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {step: [] for step in STEPS})
    gaps: dict[str, str] = field(default_factory=dict)


def check(what: str, before: Tree, after: Tree) -> None:
    """Raise WrongTreeError unless `after` has the entries of `before`."""
    if wrong := differences(before, after):
        raise WrongTreeError(f"after the {what}, {len(wrong)} paths differ from the snapshot: {', '.join(wrong[:3])}")


def one_round(system: System, number: int, figures: Figures) -> None:
    """Measure each step once.  WrongTreeError: the restore or the fork is wrong."""
    name, place = f"round{number}", system.live.with_name(f"fork{number}")

    def timed(step: str, body: Callable[[], None]) -> None:
        began = time.perf_counter()
        body()
        figures.seconds[step].append(time.perf_counter() - began)

    change(system.live, f"{number}a")
    before = read_tree(system.live)
    timed("snapshot", lambda: system.snapshot(name))
    change(system.live, f"{number}b")
    if not differences(before, read_tree(system.live)):
        raise AssertionError("the changes changed nothing, so the restore would not be tested")
    timed("restore", lambda: system.restore(name))
    check("restore", before, read_tree(system.live))
    forked: Path | None = place
    try:
        timed("fork", lambda: system.fork(name, place))
        check("fork", before, read_tree(place))
    except GapError as gap:
        figures.gaps["fork"] = str(gap)
        forked = None
    system.forget(name, forked)


def measure(found: dict[str, System], files: int, rounds: int, budget: Budget) -> dict[str, Figures]:
    """Measure all systems in turn.  A system that fails keeps no figures, only the reason."""
    figures = {name: Figures() for name in found}
    for system in found.values():
        fill(system.live, files)
        system.begin()
    longest_s = 0.0
    for number in range(rounds):
        if number and not budget.allows(longest_s):
            break
        began = time.monotonic()
        names = [name for name in found if "restore" not in figures[name].gaps]
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            try:
                one_round(found[name], number, figures[name])
            except (WrongTreeError, RuntimeError, OSError) as error:
                why = " ".join(str(error).split())[:200]
                figures[name] = Figures(gaps=dict.fromkeys(STEPS, why))
        longest_s = max(longest_s, time.monotonic() - began)
    return figures


def document(figures: dict[str, Figures]) -> dict[str, dict[str, dict[str, object]]]:
    """Return the figures as JSON has them: system -> step -> median, lowest and highest seconds, or a gap."""
    return {
        name: {
            step: {
                "seconds": statistics.median(each.seconds[step]),
                "low": min(each.seconds[step]),
                "high": max(each.seconds[step]),
                "rounds": len(each.seconds[step]),
            }
            if each.seconds[step]
            else {"gap": each.gaps.get(step, "not measured")}
            for step in STEPS
        }
        for name, each in figures.items()
    }


def show(figures: dict[str, Figures]) -> None:
    print(f"{'ms':16}" + "".join(f"{step:>30}" for step in STEPS))
    for name, steps in document(figures).items():
        cells = [
            "gap"
            if "gap" in step
            else f"{step['seconds'] * 1e3:.2f} ({step['low'] * 1e3:.2f}-{step['high'] * 1e3:.2f})"  # type: ignore[operator]
            for step in steps.values()
        ]
        print(f"{name:16}" + "".join(f"{each:>30}" for each in cells))
        for why in dict.fromkeys(figures[name].gaps.values()):
            print(f"{'':16}gap: {why}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="fewer rounds where the time is short")
    parser.add_argument("--only", default="", help="only systems that match this expression")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.files < 2 * IN_A_DIRECTORY or options.rounds < 1:
        parser.error(f"--files: at least {2 * IN_A_DIRECTORY}; --rounds: at least 1")
    if options.budget is not None and not options.budget > 0:
        parser.error("--budget: more than 0 seconds")
    try:
        if not any(re.search(options.only, name) for name in SYSTEMS):
            parser.error(f"--only: no system matches; there are {', '.join(SYSTEMS)}")
    except re.error as error:
        parser.error(f"--only: not a regular expression: {error}")
    return options


def main() -> None:
    options = arguments()
    if os.geteuid() != 0:
        sys.exit("the benchmark mounts tmpfs and btrfs: run it as root")
    try:
        if options.json:
            _results.check_writable(options.json)
    except (OSError, ValueError) as error:
        sys.exit(f"--json: {error}")
    end_cleanly()
    budget = Budget(options.budget)
    load = os.getloadavg()[0]
    print(f"{_machine.describe()}\nload at the start: {load:.1f}; {options.files:,} files, {CHANGES} changes a step")
    with (
        scratch_directory() as scratch,
        systems(scratch, lambda name: re.search(options.only, name) is not None) as (found, gaps),
    ):
        for name, why in gaps.items():
            print(f"gap: {name}: {why}")
        figures = measure(found, options.files, options.rounds, budget)
    show(figures)
    if options.json:
        machine = {
            **_machine.machine(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "load_before": load, "load_after": os.getloadavg()[0],
        }  # fmt: skip
        _results.save(
            options.json,
            {
                "machine": machine,
                "files": options.files,
                "changes": CHANGES,
                "gaps": gaps,
                "systems": document(figures),
            },
        )
    failed = {name: each.gaps["restore"] for name, each in figures.items() if "restore" in each.gaps}
    if failed:
        sys.exit("; ".join(f"{name}: {why}" for name, why in failed.items()))


if __name__ == "__main__":
    main()
