"""The tools that agents use work on the mount unchanged.  Each runs as its users run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from vfsd.client.workspace import Workspace

# What a tree is made of that the tools here must carry.
SOURCE_FILES = 200


def run(*command: str | Path, cwd: Path, text: str | None = None, **environ: str) -> str:
    """Run it; its standard output.  Fails the test with all that it said."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, f"{command} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_project(place: Path) -> Path:
    """A tree with directories, an executable, symlinks, hard links, odd names and a hole."""
    place.mkdir()
    for number in range(SOURCE_FILES):
        folder = place / f"pkg{number % 10}" / f"sub{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"mod_{number}.py").write_text(f"VALUE = {number}\n" * (number % 40 + 1))
    script = place / "run.sh"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    (place / "link").symlink_to("pkg1/sub1")
    (place / "dangling").symlink_to("nowhere")
    os.link(script, place / "run-too.sh")
    (place / "name with spaces and ünïcode").write_text("x")
    with (place / "sparse").open("wb") as file:
        file.seek(3_000_000)
        file.write(b"end")
    return place


def git(*arguments: str, cwd: Path) -> str:
    return run("git", *arguments, cwd=cwd)


@pytest.mark.extended
def test_git_clones_commits_checks_and_packs(root: Path, workdir: Path) -> None:
    origin = make_project(workdir / "origin")
    git("init", "-q", "-b", "main", cwd=origin)
    git("add", "-A", cwd=origin)
    git("commit", "-q", "-m", "first", cwd=origin)

    git("clone", "-q", str(origin), "clone", cwd=root)
    clone = root / "clone"
    assert git("status", "--porcelain", cwd=clone) == ""
    (clone / "pkg1" / "new.py").write_text("print('new')\n")
    git("rm", "-q", "run.sh", cwd=clone)
    git("mv", "pkg2", "renamed", cwd=clone)
    git("add", "-A", cwd=clone)
    git("commit", "-q", "-m", "second", cwd=clone)
    git("checkout", "-q", "-b", "side", "HEAD~1", cwd=clone)
    assert (clone / "run.sh").exists()
    git("checkout", "-q", "main", cwd=clone)
    git("gc", "-q", "--aggressive", "--prune=now", cwd=clone)
    git("fsck", "--full", "--strict", cwd=clone)
    git("worktree", "add", "-q", "../tree", "side", cwd=clone)
    git("stash", "list", cwd=clone)
    assert git("status", "--porcelain", cwd=clone) == ""
    assert git("rev-list", "--count", "HEAD", cwd=clone).strip() == "2"


@pytest.mark.extended
def test_a_git_index_is_still_fresh_after_a_restore(root: Path, workspace: Workspace) -> None:
    repo = make_project(root / "repo")
    git("init", "-q", cwd=repo)
    git("add", "-A", cwd=repo)
    git("commit", "-q", "-m", "first", cwd=repo)
    workspace.snapshot("clean")
    shutil.rmtree(repo / "pkg1")
    (repo / "pkg2" / "sub2" / "mod_2.py").write_text("damage")
    (repo / "litter").write_text("x")
    workspace.restore("clean")
    assert git("status", "--porcelain", cwd=repo) == ""
    # The index holds inode numbers and times: were they new, diff-files would see every file as changed.
    assert git("diff-files", cwd=repo) == ""


def make_wheel(folder: Path) -> Path:
    """A small pure package, so that pip needs no index."""
    folder.mkdir()
    wheel = folder / "tinypkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinypkg/__init__.py", "def hello():\n    return 'hello from tinypkg'\n")
        archive.writestr("tinypkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n")
        archive.writestr(
            "tinypkg-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(
            "tinypkg-1.0.dist-info/RECORD",
            "tinypkg/__init__.py,,\ntinypkg-1.0.dist-info/METADATA,,\n"
            "tinypkg-1.0.dist-info/WHEEL,,\ntinypkg-1.0.dist-info/RECORD,,\n",
        )
    return wheel


@pytest.mark.extended
@pytest.mark.slow
def test_a_virtual_environment_works_and_pip_installs_into_it(root: Path, workdir: Path, runs_long: bool) -> None:
    wheel = make_wheel(workdir / "wheels")
    python = root / "venv" / "bin" / "python"
    if runs_long:  # pip itself is installed there, and its 400 modules are compiled
        run(sys.executable, "-m", "venv", "venv", cwd=root)
        run(python, "-m", "pip", "install", "-q", "--no-index", wheel, cwd=root)
    else:
        run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=root)
        run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", wheel, cwd=root)
    assert run(python, "-c", "import tinypkg; print(tinypkg.hello())", cwd=root) == "hello from tinypkg\n"
    run(python, "-m", "compileall", "-q", "venv/lib", cwd=root)


def test_a_c_program_is_built_by_make_and_only_when_changed(root: Path) -> None:
    (root / "main.c").write_text('#include <stdio.h>\n#include "part.h"\nint main(void) { printf("%d\\n", part()); }\n')
    (root / "part.h").write_text("int part(void);\n")
    (root / "part.c").write_text('#include "part.h"\nint part(void) { return 42; }\n')
    (root / "Makefile").write_text(
        textwrap.dedent("""\
        prog: main.o part.o
        \tcc -o $@ $^
        %.o: %.c part.h
        \tcc -c -o $@ $<
        """)
    )
    run("make", cwd=root)
    assert run("./prog", cwd=root) == "42\n"
    assert "up to date" in run("make", cwd=root)
    (root / "part.c").write_text('#include "part.h"\nint part(void) { return 43; }\n')
    run("make", cwd=root)
    assert run("./prog", cwd=root) == "43\n"


WRITER = """
import sqlite3, sys
base = int(sys.argv[2])
db = sqlite3.connect(sys.argv[1], timeout=60)
for i in range(200):
    with db:
        db.execute("insert into t values (?, ?)", (base + i, "x" * (i % 50)))
"""


def test_sqlite_in_wal_mode_with_two_processes(root: Path) -> None:
    database = root / "db.sqlite"
    run("sqlite3", database, "pragma journal_mode=wal; create table t(a integer primary key, b);", cwd=root)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(database), str(base)]) for base in (0, 1000)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert run("sqlite3", database, "select count(*) from t;", cwd=root).strip() == "400"
    assert run("sqlite3", database, "pragma integrity_check;", cwd=root).strip() == "ok"
    assert run("sqlite3", database, "pragma journal_mode;", cwd=root).strip() == "wal"


@pytest.fixture
def project(workdir: Path) -> Path:
    place = make_project(workdir / "project")
    os.setxattr(place / "run.sh", "user.comment", b"kept")
    # Old times, all different: rsync leaves alone what differs by less than a second.
    for number, path in enumerate([place, *sorted(place.rglob("*"))]):
        os.utime(path, ns=(1, 1_111_111_111_000_000_001 + number * 3_000_000_007), follow_symlinks=False)
    return place


def listing(place: Path) -> str:
    return run(
        "find", ".", "-printf", "%P %y %m %n %s %l %T@\n", cwd=place, LC_ALL="C"
    )  # directories' sizes and link counts are the file system's own business


def comparable(place: Path) -> list[str]:
    lines = []
    for line in listing(place).splitlines():
        path, kind, rest = line.rsplit(" ", 6)[0], line.rsplit(" ", 6)[1], line.rsplit(" ", 6)[2:]
        lines.append(" ".join([path, kind, rest[0], rest[3], rest[4]] if kind == "d" else [path, kind, *rest]))
    return sorted(lines)


def test_tar_there_and_back_compares_equal(root: Path, project: Path) -> None:
    run("bash", "-c", f"tar -C {project} --xattrs --format=posix -cf - . | tar --xattrs -xpf - ", cwd=root)
    assert comparable(root) == comparable(project)
    run("diff", "-r", "--no-dereference", project, root, cwd=root)
    assert os.getxattr(root / "run.sh", "user.comment") == b"kept"
    run("bash", "-c", f"tar --xattrs --format=posix -C {root} -cf {project}.tar .", cwd=root)
    with tarfile.open(f"{project}.tar") as archive:
        assert len(archive.getmembers()) == len(comparable(project))


@pytest.mark.extended
def test_rsync_there_and_back_compares_equal(root: Path, project: Path, workdir: Path) -> None:
    run("rsync", "-aHAX", f"{project}/", "copy/", cwd=root)
    run("rsync", "-aHAX", f"{root}/copy/", "back/", cwd=workdir)
    assert comparable(root / "copy") == comparable(project)
    assert comparable(workdir / "back") == comparable(project)
    assert run("rsync", "-aHAXni", "--delete", "--checksum", f"{project}/", "copy/", cwd=root) == ""


@pytest.mark.extended
def test_cp_archive_keeps_everything(root: Path, project: Path) -> None:
    run("cp", "-a", project, "copy", cwd=root)
    assert comparable(root / "copy") == comparable(project)
    assert os.getxattr(root / "copy" / "run.sh", "user.comment") == b"kept"
    run("cp", "-a", "copy", "again", cwd=root)
    assert comparable(root / "again") == comparable(project)


@pytest.mark.extended
def test_sed_mv_and_find_do_what_they_do(root: Path) -> None:
    place = make_project(root / "project")
    run("sed", "-i", "s/VALUE/CHANGED/", "pkg1/sub1/mod_1.py", cwd=place)
    assert (place / "pkg1/sub1/mod_1.py").read_text().startswith("CHANGED = 1\n")
    run("mv", "pkg1", "moved", cwd=place)
    run("cp", "run-too.sh", "third.sh", cwd=place)
    run("mv", "-T", "third.sh", "run.sh", cwd=place)
    assert run("./run.sh", cwd=place) == "ran\n"
    found = run("find", ".", "-name", "mod_*.py", "-newer", "run.sh", "-o", "-name", "mod_*.py", cwd=place)
    assert len(found.splitlines()) == SOURCE_FILES
    run("find", ".", "-name", "*.py", "-delete", cwd=place)
    assert run("find", ".", "-name", "*.py", cwd=place) == ""
    run("rm", "-rf", str(place), cwd=root)
    assert os.listdir(root) == []


def test_ripgrep_finds_what_grep_finds(root: Path) -> None:
    place = make_project(root / "project")
    grep = run("grep", "-rlF", "VALUE = 7", ".", cwd=place)
    ripgrep = run("rg", "-lF", "--no-ignore", "VALUE = 7", ".", cwd=place)
    assert sorted(ripgrep.splitlines()) == sorted(grep.splitlines())
    assert len(grep.splitlines()) > 10


@pytest.mark.extended
def test_npm_installs_and_runs_a_local_package(root: Path, workdir: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is missing: install npm")
    package = workdir / "pkg"
    (package / "lib").mkdir(parents=True)
    (package / "package.json").write_text('{"name": "tiny", "version": "1.0.0", "main": "lib/index.js"}')
    (package / "lib" / "index.js").write_text("module.exports = () => 'tiny works';\n")
    run("npm", "pack", "--silent", str(package), cwd=workdir)
    (root / "package.json").write_text('{"name": "app", "version": "1.0.0", "private": true}')
    npm = ("npm", "--offline", "--no-audit", "--no-fund", "--silent", "--cache", str(workdir / "cache"))
    run(*npm, "install", str(workdir / "tiny-1.0.0.tgz"), cwd=root)
    assert run("node", "-e", "console.log(require('tiny')())", cwd=root) == "tiny works\n"
