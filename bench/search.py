"""How fast `protocol.search` is against the loop that one would write: 10,000 files of 1 KiB in memory.

Two baselines: "loop" asks the same tree as the search does (walk, read, decode, `re.search` over `splitlines()`;
or walk and `fnmatch`); "in hand" is the same loop over texts or paths that somebody has already put in a list,
so it has no tree to ask: the strictest there is.  All take turns; a cell is the median over the rounds.

    python -m bench.search [--rounds N] [--files N] [--tree memory|dict] [--json FILE]
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from protocol.backends.memory import MemoryVolume
from protocol.search.grep import grep_tree
from protocol.search.walk import glob_paths
from protocol.tree import Tree
from protocol.types import GrepMatch
from tests.support.trees import DictTree

FILE_BYTES = 1024
NO_LIMIT = 1_000_000
FACTOR = 2.0  # what is promised, against "loop"

EXPRESSIONS = {
    "a word, nowhere": "needle",
    "a word, in 1 of 100 files": "haystack",
    "an expression, nowhere": r"\bneedle_\d+\b",
    "an expression without a literal": r"[A-Z]{3,}\d",
    "alternatives, nowhere": r"(?:import|export) needle|require",
    "anchored": r"^def \w+\(x\):$",
    "in every file, the first 1,000": r"return \w+",
    "in every file, all": r"return \w+",
}
LIMITS = {"in every file, the first 1,000": 1_000}
# For fnmatch "*" goes over slashes too, so these ask it for the same files.
GLOBS = {
    "by suffix": ("*.py", "*.py"),
    "by name": ("mod_00042.py", "*/mod_00042.py"),
    "everywhere, a class": ("**/mod_*[13579].py", "*/mod_*[13579].py"),
    "below one directory": ("dir_03/**/*.py", "dir_03/*.py"),
    "one level down": ("dir_0*/*/*.json", "dir_0*/*/*.json"),
}


def text_of_source(chance: random.Random) -> bytes:
    """About what source code is: short lines, indented, some empty."""
    names = ["value", "index", "result", "path", "entry", "count", "total", "buffer", "offset", "node"]
    lines: list[str] = []
    size = 0
    while size < FILE_BYTES:
        a, b, c = chance.choices(names, k=3)
        line = chance.choice(
            [f"def {a}_{b}({c}):", f"    {a} = {b}.{c}({a})", f"    if {a} > {b}:", f"        return {c}", ""]
        )
        lines.append(line)
        size += len(line) + 1
    return ("\n".join(lines) + "\n").encode()[:FILE_BYTES]


def content(files: int) -> dict[bytes, bytes]:
    chance = random.Random(1)
    made: dict[bytes, bytes] = {}
    for number in range(files):
        directory = f"dir_{number // 1000:02}/sub_{number // 50 % 20:02}"
        suffix = "json" if number % 20 == 0 else "py"
        text = text_of_source(chance)
        if number % 100 == 0:
            text = text[:500] + b"\n# haystack\n" + text[512:]
        made[f"{directory}/mod_{number:05}.{suffix}".encode()] = text
    return made


@contextmanager
def tree_of(kind: str, files: dict[bytes, bytes]) -> Iterator[Tree]:
    plain = DictTree({**files})
    if kind == "dict":
        yield plain
        return
    volume = MemoryVolume()
    volume.import_tree(plain, replace=True)
    with volume.tree() as tree:
        yield tree


# -- the loops -----------------------------------------------------------------------------------------
def grep_loop(tree: Tree, pattern: str, limit: int) -> int:
    search = re.compile(pattern).search
    found = []
    for entry in tree.walk():
        if entry.is_file:
            for number, line in enumerate(tree.read(entry.path, 0, entry.size).decode().splitlines(), 1):
                if match := search(line):
                    found.append(GrepMatch(entry.path.decode(), number, line, *match.span()))
        if len(found) >= limit:
            break
    return min(len(found), limit)


def grep_in_hand(files: dict[str, bytes], pattern: str, limit: int) -> int:
    search = re.compile(pattern).search
    found = []
    for path, text in files.items():
        for number, line in enumerate(text.decode().splitlines(), 1):
            if match := search(line):
                found.append(GrepMatch(path, number, line, *match.span()))
        if len(found) >= limit:
            break
    return min(len(found), limit)


def glob_loop(tree: Tree, pattern: str) -> int:
    found = [entry.path for entry in tree.walk() if entry.is_file and fnmatch.fnmatch(entry.path.decode(), pattern)]
    return len(found)


def glob_in_hand(paths: list[str], pattern: str) -> int:
    return len([path for path in paths if fnmatch.fnmatch(path, pattern)])


# -- measuring -----------------------------------------------------------------------------------------
def in_turns(rounds: int, works: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Median milliseconds of each; all must count the same."""
    times: dict[str, list[float]] = {name: [] for name in works}
    counts = set()
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            counts.add(work())
            times[name].append((time.perf_counter() - start) * 1e3)
    if len(counts) != 1:
        raise SystemExit(f"the ways to search disagree: {counts}")
    return {name: statistics.median(each) for name, each in times.items()} | {"found": counts.pop()}


def measure(tree: Tree, files: dict[bytes, bytes], rounds: int) -> list[dict[str, object]]:
    in_hand = {path.decode(): text for path, text in files.items()}
    rows: list[dict[str, object]] = []
    for name, pattern in EXPRESSIONS.items():
        limit = LIMITS.get(name, NO_LIMIT)
        works = {
            "ours": lambda pattern=pattern, limit=limit: len(grep_tree(tree, pattern, max_matches=limit).matches),
            "loop": lambda pattern=pattern, limit=limit: grep_loop(tree, pattern, limit),
            "in hand": lambda pattern=pattern, limit=limit: grep_in_hand(in_hand, pattern, limit),
        }
        rows.append({"search": "grep", "row": name, "pattern": pattern, **in_turns(rounds, works)})
    for name, (pattern, plain) in GLOBS.items():
        works = {
            "ours": lambda pattern=pattern: len(glob_paths(tree, pattern).paths),
            "loop": lambda plain=plain: glob_loop(tree, plain),
            "in hand": lambda plain=plain: glob_in_hand(list(in_hand), plain),
        }
        rows.append({"search": "glob", "row": name, "pattern": pattern, **in_turns(rounds, works)})
    return rows


def show(rows: list[dict[str, object]]) -> None:
    print(f"{'':5}{'':33}{'found':>7}{'ours':>10}{'loop':>10}{'in hand':>10}{'loop/ours':>11}{'in hand/ours':>14}")
    for row in rows:
        ours, loop, in_hand = (float(str(row[name])) for name in ("ours", "loop", "in hand"))
        mark = "" if loop / ours >= FACTOR else f"  below {FACTOR:g}"
        print(
            f"{row['search']:5}{row['row']:33}{row['found']:7}{ours:7.1f} ms{loop:7.1f} ms{in_hand:7.1f} ms"
            f"{loop / ours:10.1f}x{in_hand / ours:13.1f}x{mark}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--tree", choices=["memory", "dict"], default="memory")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    files = content(options.files)
    with tree_of(options.tree, files) as tree:
        print(f"{len(files)} files of {FILE_BYTES} bytes; tree: {options.tree}")
        rows = measure(tree, files, options.rounds)
    show(rows)
    if options.json:
        about = {"python": platform.python_version(), "machine": platform.machine(), "tree": options.tree}
        options.json.write_text(json.dumps({**about, "files": len(files), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
