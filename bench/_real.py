"""The real workloads: what developers and agents do, as whole commands."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench._filesystems import run

SOURCE_FILES = 3000
C_FILES = 60
WORDS = (
    "def",
    "class",
    "return",
    "import",
    "self",
    "value",
    "index",
    "result",
    "error",
    "path",
    "name",
    "open",
    "read",
)
GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "b",
    "GIT_AUTHOR_EMAIL": "b@example.org",
    "GIT_COMMITTER_NAME": "b",
    "GIT_COMMITTER_EMAIL": "b@example.org",
}


@dataclass(frozen=True, slots=True)
class Real:
    """`prepare` and `work` are given an empty directory of the file system and the folder with the inputs."""

    name: str
    work: Callable[[Path, Path], object]
    prepare: Callable[[Path, Path], object] = lambda _place, _inputs: None


def make_inputs(place: Path, share: float = 1.0) -> None:
    """A git repository of some thousand files with two branches, a tar of it and a C project; `share`: of all files."""
    sources, parts = int(SOURCE_FILES * share), int(C_FILES * share)
    chance = random.Random(1)
    repo = place / "repo"
    for number in range(sources):
        folder = repo / f"pkg{number % 40}" / f"sub{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{chance.choice(WORDS)}_{i} = {chance.choice(WORDS)!r}" for i in range(chance.randrange(5, 120))]
        (folder / f"module_{number}.py").write_text("\n".join(lines) + "\n")
    run("git", "init", "-q", "-b", "main", cwd=repo)
    run("git", "add", "-A", cwd=repo)
    run("git", "commit", "-q", "-m", "first", cwd=repo, env=GIT)
    run("git", "checkout", "-q", "-b", "side", cwd=repo)
    for path in sorted(repo.glob("pkg*/sub*/*.py"))[::3]:
        path.write_text(path.read_text() + "changed = 1\n")
    run("git", "commit", "-q", "-a", "-m", "second", cwd=repo, env=GIT)
    run("git", "checkout", "-q", "main", cwd=repo)
    run("tar", "-cf", place / "repo.tar", "--exclude", ".git", "repo", cwd=place)
    build = place / "build"
    build.mkdir()
    for number in range(parts):
        (build / f"part{number}.c").write_text(f"int part{number}(void) {{ return {number}; }}\n")
    objects = " ".join(f"part{number}.o" for number in range(parts))
    (build / "Makefile").write_text(f"all: {objects}\n%.o: %.c\n\t@cc -c -o $@ $<\n")


def clone(place: Path, inputs: Path) -> None:
    run("git", "clone", "-q", "--no-hardlinks", inputs / "repo", "clone", cwd=place, env=GIT)


def extract(place: Path, inputs: Path) -> None:
    run("tar", "-xf", inputs / "repo.tar", cwd=place)


def status(place: Path, _inputs: Path) -> None:
    assert run("git", "status", "--porcelain", cwd=place / "clone", env=GIT) == ""


def both(first: Callable[[Path, Path], object], second: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    def prepare(place: Path, inputs: Path) -> None:
        first(place, inputs)
        second(place, inputs)

    return prepare


def command(*words: str) -> Callable[[Path, Path], object]:
    return lambda place, inputs: run(*(word.format(inputs=inputs) for word in words), cwd=place)


def ripgrep(place: Path, _inputs: Path) -> None:
    run("rg", "-c", "--no-ignore", "index_1[0-9] = .result", "repo", cwd=place)


def checkout(place: Path, _inputs: Path) -> None:
    run("git", "checkout", "-q", "side", cwd=place / "clone", env=GIT)


def venv(place: Path, _inputs: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=place)


def pip_install(place: Path, _inputs: Path) -> None:
    # ensurepip installs the pip wheel that Python carries: some 500 files, and no network.
    run(place / "venv" / "bin" / "python", "-m", "ensurepip", cwd=place)


REAL = (
    Real("git clone", clone),
    Real("git status first", status, clone),
    Real("git status again", status, both(clone, status)),
    Real("git checkout", checkout, both(clone, status)),
    Real("ripgrep first", ripgrep, extract),
    Real("ripgrep again", ripgrep, both(extract, ripgrep)),
    Real(
        "find again",
        command("find", "repo", "-newer", "{inputs}"),
        both(extract, command("find", "repo", "-newer", "{inputs}")),
    ),
    Real("tar extract", extract),
    Real("cp -a", command("cp", "-a", "repo", "copy"), extract),
    Real("rm -rf", command("rm", "-rf", "repo"), extract),
    Real("compileall", command(sys.executable, "-m", "compileall", "-q", "repo"), extract),
    Real("pip install into a venv", pip_install, venv),
    Real("make", command("make", "-s", "-C", "build"), command("cp", "-r", "{inputs}/build", ".")),
)


def measure(real: Real, place: Path, inputs: Path, clock: Callable[[], float]) -> float:
    """Seconds, by `clock`, for one run.  `place` is an empty directory."""
    real.prepare(place, inputs)
    subprocess.run(["sync", "-f", str(place)], check=False)
    began = clock()
    real.work(place, inputs)
    return clock() - began
