"""Any object with the Filesystem methods, mounted in process; programs of another process work in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import InMemoryFilesystem
from vfsd.inprocess import MountedFilesystem
from vfsd.workspace import Workspace


@pytest.fixture
def filesystem() -> InMemoryFilesystem:
    return InMemoryFilesystem()


@pytest.fixture
def mounted(filesystem: InMemoryFilesystem, engine: str, workdir: Path) -> Iterator[MountedFilesystem]:
    with Workspace.mount(workdir / "m", filesystem=filesystem, engine=engine) as mounted:
        yield mounted
    assert not mounted.mounted
    assert os.listdir(workdir / "m") == []


def shell(mounted: MountedFilesystem, script: str) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=mounted.path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_read_what_the_object_holds(mounted: MountedFilesystem, filesystem: InMemoryFilesystem) -> None:
    filesystem.write("dir/file.txt", "from python\n")
    assert shell(mounted, "cat dir/file.txt; ls; find . -type f") == "from python\ndir\n./dir/file.txt\n"
    filesystem.write("dir/file.txt", "changed by python\n")
    assert shell(mounted, "cat dir/file.txt; stat -c %s dir/file.txt") == "changed by python\n18\n"


def test_the_object_holds_what_programs_wrote(mounted: MountedFilesystem, filesystem: InMemoryFilesystem) -> None:
    shell(mounted, "mkdir d; echo one > d/a; echo two >> d/a; cp d/a d/b; sed -i s/one/1/ d/b; mv d/b c; rm d/a")
    assert filesystem.read("c").content == "1\ntwo\n"
    assert [entry.path for entry in filesystem.list("d")] == []
    assert not filesystem.exists("d/a")


def test_git_works_in_it(mounted: MountedFilesystem, filesystem: InMemoryFilesystem) -> None:
    shell(mounted, "git init -q . && echo x > f && git add f && git commit -q -m m && git fsck")
    assert shell(mounted, "git status --porcelain") == ""
    assert filesystem.exists(".git/HEAD")


def test_what_it_cannot_hold_is_refused_and_breaks_nothing(mounted: MountedFilesystem) -> None:
    assert shell(mounted, "ln -s a b 2>/dev/null || echo no symlinks; mkdir x; mv x y; ls") == "no symlinks\ny\n"


def test_an_unmount_of_a_busy_one_names_the_holder(mounted: MountedFilesystem) -> None:
    holder = subprocess.Popen(["sleep", "600"], cwd=mounted.path)
    try:
        with pytest.raises(OSError, match=rf"held by pid {holder.pid} \(sleep\)"):
            mounted.unmount()
    finally:
        holder.kill()
        holder.wait()


def test_arguments_of_a_backend_are_refused(filesystem: InMemoryFilesystem, workdir: Path) -> None:
    with pytest.raises(ValueError, match="takes no backend"):
        Workspace.mount(workdir / "m", filesystem=filesystem, max_bytes=1)  # type: ignore[call-overload]
