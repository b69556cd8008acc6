"""What a user feels: builds and installations, on ext4, tmpfs, vfsd and bindfs in turn.

    python -m bench.builds [--rounds N] [--cache DIR] [--only NAMES] [--json FILE]

Each round runs these steps in an empty directory of each file system; the order of file systems changes with the round:

- `git clone` of a repository of 3,000 files
- `pip install` of django, numpy and pandas from wheels (with the compilation to bytecode)
- `npm ci` of a project with vite, react, eslint, typescript and jest, from npm's cache
- `vite build` of it, and `jest`, which runs ten test files
- `make -j2` of a C project
- `pytest` of attrs, from its source distribution
- `rm -rf node_modules`

Every cell is the ratio to ext4 in the same round: median, lowest and highest.  bindfs, `vfsd host` and the lower layer
of `vfsd overlay` are directories of the same ext4.  Wheels, packages and sources are fetched once, into `--cache`
(~/.cache/vfsd-bench); after that no network is used.  Needs root, npm, git, make and cc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import _machine, _results
from bench._filesystems import GapError, end_cleanly, run, scratch_directory, tmpfs
from bench._real import make_inputs
from bench.neighbours import make_project
from vfsd.client.workspace import Workspace

LIMIT = "ext4"
NAMES = (LIMIT, "tmpfs", "vfsd memory", "vfsd overlay", "vfsd host", "bindfs")
WHEELS = ("django", "numpy", "pandas")
PACKAGES = ("vite@6", "@vitejs/plugin-react@4", "react@19", "react-dom@19", "typescript@5", "eslint@9", "jest@29")
GIT = {"GIT_CONFIG_GLOBAL": "/dev/null"}

Step = Callable[[Path, Path], object]


# -- what is built -----------------------------------------------------------------------------------
def fetch(cache: Path) -> None:
    """Put what the steps need into `cache`, unless it is there."""
    for name, make in (("project", project), ("wheels", wheels), ("attrs", attrs), ("sources", sources)):
        if (cache / name).exists():
            continue
        print(f"fetching {name}", file=sys.stderr)
        part = cache / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(cache / name)


def npm(place: Path, cache: Path, *words: str) -> None:
    run("npm", *words, "--no-audit", "--no-fund", "--loglevel=error", f"--cache={cache}", cwd=place)


def project(place: Path) -> None:
    """A project in JavaScript with a lock file, and npm's cache with all packages of it."""
    (place / "src").mkdir()
    (place / "package.json").write_text(json.dumps({"name": "bench", "private": True, "type": "commonjs"}))
    modules = range(200)
    for number in modules:
        (place / "src" / f"part{number}.jsx").write_text(
            f"import React from 'react';\nexport default function Part{number}() {{ return <p>{{'{number}'}}</p>; }}\n"
        )
    imports = "".join(f"import Part{number} from './part{number}.jsx';\n" for number in modules)
    parts = ", ".join(f"Part{number}" for number in modules)
    (place / "src" / "main.jsx").write_text(
        f"import React from 'react';\nimport {{ createRoot }} from 'react-dom/client';\n{imports}"
        f"createRoot(document.body).render([{parts}].map((Part, at) => <Part key={{at}} />));\n"
    )
    (place / "index.html").write_text('<body><script type="module" src="/src/main.jsx"></script></body>\n')
    (place / "vite.config.mjs").write_text(
        "import react from '@vitejs/plugin-react';\nexport default { plugins: [react()] };\n"
    )
    for number in range(10):
        (place / f"case{number}.test.js").write_text(f"test('{number}', () => expect({number}).toBe({number}));\n")
    for words in (("install", "--save-dev", *PACKAGES), ("ci",)):
        npm(place, place / "npm-cache", *words)
        shutil.rmtree(place / "node_modules")


def wheels(place: Path) -> None:
    run(sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", place, *WHEELS)


def attrs(place: Path) -> None:
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", place, "attrs")
    (archive,) = place.glob("attrs-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
    archive.unlink()


def sources(place: Path) -> None:
    make_inputs(place)
    make_project(place / "c")


# -- the steps ---------------------------------------------------------------------------------------
def clone(place: Path, cache: Path) -> None:
    run("git", "clone", "-q", "--no-hardlinks", cache / "sources" / "repo", "clone", cwd=place, env=GIT)


def pip_install(place: Path, cache: Path) -> None:
    run(
        sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--find-links",
        cache / "wheels", "--target", "site", *WHEELS, cwd=place,
    )  # fmt: skip


def npm_ci(place: Path, cache: Path) -> None:
    kept = shutil.ignore_patterns("npm-cache")
    shutil.copytree(cache / "project", place / "project", ignore=kept)
    npm(place / "project", cache / "project" / "npm-cache", "ci", "--prefer-offline")


def vite(place: Path, _cache: Path) -> None:
    run("npx", "vite", "build", "--logLevel", "error", cwd=place / "project")


def jest(place: Path, _cache: Path) -> None:
    run("npx", "jest", "--silent", "--cacheDirectory", ".jest", cwd=place / "project")


def make(place: Path, cache: Path) -> None:
    shutil.copytree(cache / "sources" / "c", place / "c")
    run("make", "-s", "-j2", cwd=place / "c")


def pytest(place: Path, cache: Path) -> None:
    (unpacked,) = (cache / "attrs").iterdir()
    shutil.copytree(unpacked, place / "attrs")
    paths = {"PYTHONPATH": str(place / "attrs" / "src"), "HOME": str(place)}
    ours = ("--ignore=tests/test_mypy.yml", "--ignore=tests/test_pyright.py", "-p", "no:cacheprovider")
    run(sys.executable, "-m", "pytest", "-q", *ours, "tests/test_make.py", cwd=place / "attrs", env=paths)


def remove(place: Path, _cache: Path) -> None:
    run("rm", "-rf", place / "project" / "node_modules")


STEPS: dict[str, Step] = {
    "git clone": clone,
    "pip install": pip_install,
    "npm ci": npm_ci,
    "vite build": vite,
    "jest": jest,
    "make -j2": make,
    "pytest": pytest,
    "rm -rf node_modules": remove,
}


# -- the file systems --------------------------------------------------------------------------------
@contextmanager
def mounted(name: str, place: Path) -> Iterator[Path]:
    """An empty directory of a file system; all but tmpfs and memory store it below `place`, which is on ext4."""
    below, top = place / "below", place / "mount"
    below.mkdir(parents=True)
    if name == LIMIT:
        yield below
        return
    if name == "tmpfs":
        with tmpfs(top) as path:
            yield path
        return
    top.mkdir()
    if name == "bindfs":
        if shutil.which("bindfs") is None:
            raise GapError("bindfs is missing")
        run("bindfs", below, top)
        try:
            yield top
        finally:
            run("umount", "-l", top)
        return
    kind = name.removeprefix("vfsd ")
    backend = kind if kind == "memory" else f"{kind}:{below}"
    with Workspace.mount(top, backend, name=f"bench-{kind}-{os.getpid()}"):
        yield top


def measure(name: str, scratch: Path, cache: Path) -> dict[str, float]:
    """Seconds of each step on the file system `name`."""
    place = scratch / name.replace(" ", "-")
    found = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        path = stack.enter_context(mounted(name, place))
        for step, work in STEPS.items():
            subprocess.run(["sync", "-f", path], check=False)
            began = time.perf_counter()
            work(path, cache)
            found[step] = time.perf_counter() - began
    return found


def table(cells: dict[str, dict[str, list[float]]], names: list[str]) -> str:
    """The results in Markdown; `cells` has the seconds of each step, by file system and round."""
    lines = ["| step | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for step, seconds in cells.items():
        row = [f"{statistics.median(seconds[LIMIT]):.2f} s"]
        for name in names[1:]:
            ratios = _results.ratios(seconds[name], seconds[LIMIT])
            row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {step} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "vfsd-bench")
    parser.add_argument(
        "--only", default=",".join(NAMES), help="file systems, separated by commas; ext4 is always there"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [name for name in NAMES if name == LIMIT or name in options.only.split(",")]
    end_cleanly()
    fetch(options.cache.absolute())
    cells: dict[str, dict[str, list[float]]] = {step: {name: [] for name in names} for step in STEPS}
    load = os.getloadavg()[0]
    with scratch_directory() as scratch:
        for turn in range(options.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                print(f"round {turn + 1}: {name}", file=sys.stderr)
                for step, seconds in measure(name, scratch, options.cache.absolute()).items():
                    cells[step][name].append(seconds)
    print(f"{_machine.describe()}; load {load:.1f} at the start; {options.rounds} rounds\n")
    print(table(cells, names))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": _machine.machine(), "load": load, "steps": cells}, indent=1))


if __name__ == "__main__":
    main()
