"""Programs that use a mount until they are told to stop: `python -m tests.mount.surviving_programs PROGRAM DIRECTORY`.

PROGRAM is one of PROGRAMS.  It works in rounds in DIRECTORY, which it makes, until the file `--until` exists, or
`--rounds` times.  Then it prints the number of its rounds.  The same number of rounds leaves the same tree elsewhere
(`tree_facts`).  It fails with a traceback if a call fails, or if what it reads is not what it wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import sqlite3
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.mount.file_exerciser import FileExerciser

Round = Callable[[int], None]
_GIT_ENVIRONMENT: Final = {
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
       for what, value in (("NAME", "t"), ("EMAIL", "t@example.org"), ("DATE", "2026-01-01T00:00:00Z"))},
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}  # fmt: skip


# -- the programs -------------------------------------------------------------------------------------
@contextlib.contextmanager
def exercised_file(root: Path) -> Iterator[Round]:
    """Random operations on a file."""
    exerciser = FileExerciser(root / "file", seed=1)
    yield lambda _: exerciser.run(20)
    exerciser.close()


def _database(root: Path, mode: str) -> Iterator[Round]:
    with contextlib.closing(sqlite3.connect(root / "base.db", isolation_level=None, timeout=60)) as base:
        assert base.execute(f"pragma journal_mode={mode}").fetchone() == (mode,)
        base.execute("create table t (n integer primary key, data blob)")
        model: dict[int, bytes] = {}

        def change(number: int) -> None:
            choice = random.Random(number)
            after = dict(model)
            base.execute("begin immediate")
            for _ in range(choice.randrange(1, 8)):
                key, data = choice.randrange(300), choice.randbytes(choice.choice((10, 500, 9_000)))
                if choice.randrange(3):
                    base.execute("insert or replace into t values (?, ?)", (key, data))
                    after[key] = data
                else:
                    base.execute("delete from t where n = ?", (key,))
                    after.pop(key, None)
            if choice.randrange(5):
                base.execute("commit")
                model.clear()
                model.update(after)
            else:
                base.execute("rollback")
            assert dict(base.execute("select n, data from t")) == model
            if number % 100 == 0:
                assert base.execute("pragma integrity_check").fetchone() == ("ok",)

        yield change
        assert base.execute("pragma integrity_check").fetchone() == ("ok",)


@contextlib.contextmanager
def sqlite_wal(root: Path) -> Iterator[Round]:
    """SQLite with a write-ahead log."""
    yield from _database(root, "wal")


@contextlib.contextmanager
def sqlite_rollback(root: Path) -> Iterator[Round]:
    """SQLite with a rollback journal."""
    yield from _database(root, "delete")


@contextlib.contextmanager
def git(root: Path) -> Iterator[Round]:
    """Commits, branches, merges and checkouts."""

    def run(*arguments: str) -> bytes:
        return subprocess.run(
            ["git", "-C", root, *arguments], check=True, stdout=subprocess.PIPE, env={**os.environ, **_GIT_ENVIRONMENT}
        ).stdout

    run("init", "-q", "-b", "main")
    run("config", "gc.auto", "0")

    def change(number: int) -> None:
        choice = random.Random(number)
        for _ in range(5):
            path = root / f"d{choice.randrange(5)}" / f"f{choice.randrange(20)}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(choice.randbytes(choice.choice((10, 3_000, 30_000))))
        run("add", ".")
        run("commit", "-qm", f"round {number}")
        if number % 3 == 2:
            run("checkout", "-q", "-b", f"b{number}", "HEAD~1")
            (root / f"of-branch-{number}").write_bytes(choice.randbytes(2_000))
            run("add", ".")
            run("commit", "-qm", f"branch {number}")
            run("checkout", "-q", "main")
            run("merge", "-q", "--no-edit", f"b{number}")
        assert run("status", "--short") == b""

    yield change
    subprocess.run(["git", "-C", root, "fsck", "--strict"], check=True, capture_output=True)


@contextlib.contextmanager
def tar(root: Path) -> Iterator[Round]:
    """`tar x`, and `rm -r` of what the round before it extracted."""
    made, choice = io.BytesIO(), random.Random(5)
    with tarfile.open(fileobj=made, mode="w") as archive:
        for number in range(150):
            entry = tarfile.TarInfo(f"d{number % 10}/e{number % 3}/f{number}")
            entry.size = choice.choice((0, 100, 3_000, 50_000))
            archive.addfile(entry, io.BytesIO(choice.randbytes(entry.size)))
            link = tarfile.TarInfo(f"d{number % 10}/link{number}")
            link.type, link.linkname = choice.choice(((tarfile.SYMTYPE, "e0"), (tarfile.LNKTYPE, entry.name)))
            archive.addfile(link)

    def extract(number: int) -> None:
        directory = root / f"t{number % 2}"
        if directory.exists():
            subprocess.run(["rm", "-r", directory], check=True)
        directory.mkdir()
        subprocess.run(["tar", "x", "-C", directory], check=True, input=made.getvalue())
        with tarfile.open(fileobj=io.BytesIO(made.getvalue())) as archive:
            for entry in archive:
                if entry.isfile():
                    content = archive.extractfile(entry)
                    assert content is not None
                    assert (directory / entry.name).read_bytes() == content.read(), entry.name

    yield extract


PROGRAMS: Final[dict[str, Callable[[Path], contextlib.AbstractContextManager[Round]]]] = {
    "file": exercised_file,
    "sqlite-wal": sqlite_wal,
    "sqlite-rollback": sqlite_rollback,
    "tar": tar,
    **({"git": git} if shutil.which("git") else {}),
}


# -- the trees ----------------------------------------------------------------------------------------
def tree_facts(root: Path) -> dict[str, Any]:
    """The names, modes, link counts, targets and contents below `root` that the same rounds leave elsewhere, too.

    git's index has inode numbers and times.
    """
    found: dict[str, Any] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            links = 0 if path.is_dir() and not path.is_symlink() else status.st_nlink
            content: Any = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file() and name != "index":
                content = path.read_bytes()
            found[str(path.relative_to(root))] = (status.st_mode, links, content)
    return found


def run_program(name: str, root: Path, is_over: Callable[[int], bool]) -> int:
    """Run a program in the new directory `root` until `is_over(rounds)`; return the number of rounds."""
    root.mkdir()
    number = 0
    with PROGRAMS[name](root) as run_round:
        while not is_over(number):
            run_round(number)
            number += 1
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    os.umask(0o022)

    def is_over(rounds: int) -> bool:
        return rounds == arguments.rounds if arguments.until is None else rounds > 0 and arguments.until.exists()

    print(run_program(arguments.program, arguments.directory, is_over))


if __name__ == "__main__":
    main()
