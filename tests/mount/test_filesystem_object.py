"""Any object with the Filesystem methods, mounted in process; programs of another process work in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import Filesystem, HostFilesystem, InMemoryFilesystem
from tests.mount.programs import elsewhere
from tests.support.rights import need_root, needs_root
from vfsd.client.workspace import Workspace
from vfsd.kernel.in_process import MountedFilesystem


@pytest.fixture
def filesystem() -> InMemoryFilesystem:
    return InMemoryFilesystem()


@pytest.fixture
def mounted(filesystem: InMemoryFilesystem, engine: str, workdir: Path) -> Iterator[MountedFilesystem]:
    with Workspace.mount(workdir / "m", filesystem=filesystem, engine=engine) as mounted:
        yield mounted
    assert not mounted.mounted
    assert os.listdir(workdir / "m") == []


class OnlyTheMethods:
    """Somebody else's: it has what `Filesystem` names, and nothing that ours have beside."""

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name not in Filesystem.__dict__:
            raise AttributeError(name)
        return getattr(self._filesystem, name)


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


def test_a_mount_of_one_in_memory_serves_its_volume(
    mounted: MountedFilesystem, filesystem: InMemoryFilesystem, workdir: Path
) -> None:
    deep, long = "/".join(["d"] * 20), "n" * 200
    shell(
        mounted,
        "echo one > a; chmod 640 a; touch -d @1000 a; ln a hard; ln -s a soft; mkdir x; mv x y; mkfifo pipe;"
        f" mkdir -p {deep}; echo deep > {deep}/{long}",
    )
    os.setxattr(f"{mounted.path}/a", "user.key", b"value")
    assert filesystem.read(f"{deep}/{long}").content == "deep\n"
    assert filesystem.read("soft").content == "one\n"
    with pytest.raises(ValueError, match="80"):
        filesystem.write(long, "x")
    look = "stat -c '%n %a %h %Y %s' a hard; readlink soft; cat a; find . -maxdepth 1 | sort"
    before, kept = shell(mounted, look), filesystem.snapshot()

    shell(mounted, "rm -r a hard soft y pipe d; echo other > a; chmod 777 a; touch -d @1000 a; ln -s nowhere soft")
    assert filesystem.stat("a").mode & 0o777 == 0o777
    filesystem.restore(kept)

    assert shell(mounted, look) == before
    assert before.startswith("a 640 2 1000 4\nhard 640 2 1000 4\na\none\n")
    assert os.getxattr(f"{mounted.path}/a", "user.key") == b"value"
    filesystem.export_archive(f"{mounted.path}/all.zip")
    filesystem.delete("y")
    filesystem.import_archive(f"{mounted.path}/all.zip")
    assert shell(mounted, look) == before


def test_a_file_that_a_program_has_open_shows_what_the_object_appends_and_restores(
    mounted: MountedFilesystem, filesystem: InMemoryFilesystem
) -> None:
    filesystem.write("f", "one")
    kept = filesystem.snapshot()
    with open(f"{mounted.path}/f", "rb", buffering=0) as file:
        assert file.read() == b"one"
        filesystem.write("f", " two", mode="append")
        assert os.pread(file.fileno(), 100, 0) == b"one two"
        filesystem.restore(kept)
        assert os.pread(file.fileno(), 100, 0) == b"one"


def test_the_object_and_programs_change_it_at_the_same_time(
    mounted: MountedFilesystem, filesystem: InMemoryFilesystem
) -> None:
    program = subprocess.Popen(
        ["bash", "-e", "-c", "for i in $(seq 200); do echo $i > p$i; mv p$i q$i; done"], cwd=mounted.path
    )
    for number in range(200):
        filesystem.write(f"o{number}", str(number))
        filesystem.list()
    assert program.wait(60) == 0
    assert {entry.name for entry in filesystem.list()} == {f"q{n}" for n in range(1, 201)} | {
        f"o{n}" for n in range(200)
    }
    assert set(os.listdir(mounted.path)) == {entry.name for entry in filesystem.list()}


def test_after_the_unmount_nothing_is_kept_for_the_kernel(
    filesystem: InMemoryFilesystem, engine: str, workdir: Path
) -> None:
    for _ in range(2):  # it can be mounted again
        with Workspace.mount(workdir / "m", filesystem=filesystem, engine=engine) as mounted:
            shell(mounted, "mkdir -p d; head -c 100000 /dev/zero > d/f; ls -lR; cat d/f > d/g")
            with pytest.raises(OSError, match="mounted already"):
                Workspace.mount(workdir / "again", filesystem=filesystem, engine=engine)
            reader = filesystem.open_read("d/f")
        filesystem.delete("d", recursive=True)
        assert len(reader.read()) == 100_000
        reader.close()
        usage = filesystem.volume.usage()  # type: ignore[attr-defined]  # of a volume in memory
        assert (usage.files, usage.size_bytes) == (0, 0)
        filesystem.volume.check_invariants()  # type: ignore[attr-defined]


def test_what_an_object_with_only_the_methods_cannot_hold_is_refused(engine: str, workdir: Path) -> None:
    inner = OnlyTheMethods(InMemoryFilesystem())
    with Workspace.mount(workdir / "m", filesystem=inner, engine=engine) as mounted:  # type: ignore[call-overload]
        script = "ln -s a b 2>/dev/null || echo no symlinks; mkdir x; mv x y; ls"
        assert shell(mounted, script) == "no symlinks\ny\n"


STARTED_HERE = """
import os, subprocess, sys
from protocol import InMemoryFilesystem
from vfsd.client.workspace import Workspace

files = InMemoryFilesystem()
with Workspace.mount(sys.argv[1], filesystem=files, engine=sys.argv[2]) as mounted:
    files.write("program", "#!/bin/sh\\necho here\\n")
    os.chmod(mounted.path + "/program", 0o755)
    for close_fds in (True, False):
        subprocess.run([mounted.path + "/program"], close_fds=close_fds, check=True)
        subprocess.run(["pwd"], cwd=mounted.path, close_fds=close_fds, check=True)
"""


@pytest.mark.extended
def test_the_process_that_serves_it_starts_programs_on_it_and_in_it(engine: str, workdir: Path) -> None:
    # In a process of its own: one that waits for itself would hold up all tests that follow.
    place = workdir / "m"
    place.mkdir()
    command = [sys.executable, "-c", STARTED_HERE, str(place), engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.returncode) == (["here", str(place)] * 2, 0), done.stderr


def test_an_unmount_of_a_busy_one_names_the_holder(mounted: MountedFilesystem) -> None:
    holder = subprocess.Popen(["sleep", "600"], cwd=mounted.path)
    try:
        with pytest.raises(OSError, match=rf"held by pid {holder.pid} \(sleep\)"):
            mounted.unmount()
    finally:
        holder.kill()
        holder.wait()


def test_arguments_of_a_backend_are_refused(filesystem: InMemoryFilesystem, workdir: Path) -> None:
    with pytest.raises(ValueError, match="cannot be given with a filesystem object"):
        Workspace.mount(workdir / "m", filesystem=filesystem, max_bytes=1)  # type: ignore[call-overload]


def test_an_object_with_only_the_methods_is_served(engine: str, workdir: Path) -> None:
    inner = InMemoryFilesystem()
    with Workspace.mount(workdir / "m", filesystem=OnlyTheMethods(inner), engine=engine) as mounted:  # type: ignore[call-overload]
        shell(mounted, "mkdir -p a/b; seq 1000 > a/b/c; mv a/b/c a/d; rm -r a/b; head -c 3000000 /dev/zero > z; df . z")
        assert shell(mounted, "tail -1 a/d; stat -c %s z") == "1000\n3000000\n"
        agent = HostFilesystem(mounted.path)
        agent.write("by-agent", "through the mount")
    assert inner.read("by-agent").content == "through the mount"
    assert sorted(entry.path for entry in inner.list("a")) == ["a/d"]


def test_programs_that_append_to_one_file_lose_no_line(
    mounted: MountedFilesystem, filesystem: InMemoryFilesystem
) -> None:
    shell(
        mounted,
        "for i in 1 2 3; do"
        "  (exec 3>>log; for j in $(seq 100); do echo $i-$j >&3; echo $i-$j >> log2; done) &"
        " done; wait",
    )
    expected = sorted(f"{i}-{j}" for i in (1, 2, 3) for j in range(1, 101))
    assert sorted(filesystem.read("log").content.split()) == expected
    assert sorted(filesystem.read("log2").content.split()) == expected


def test_what_programs_had_written_is_there_when_the_connection_is_cut(engine: str, workdir: Path) -> None:
    need_root()
    filesystem = InMemoryFilesystem()
    mounted = Workspace.mount(workdir / "m", filesystem=OnlyTheMethods(filesystem), engine=engine)  # type: ignore[call-overload]
    file = os.open(os.path.join(mounted.path, "f"), os.O_CREAT | os.O_WRONLY)
    os.write(file, b"never closed")
    # By force: the kernel cuts the connection, then finds the mount busy.
    subprocess.run(["umount", "-f", mounted.path], check=False, capture_output=True)
    mounted.unmount(lazy=True)
    assert filesystem.read("f").content == "never closed"
    with pytest.raises(OSError, match="not connected"):
        os.close(file)


@pytest.mark.extended
@pytest.mark.parametrize("lazy", [False, True])
@needs_root
def test_an_unmount_ends_although_another_mount_namespace_has_a_copy_of_the_mount(
    engine: str, workdir: Path, lazy: bool
) -> None:
    filesystem = InMemoryFilesystem()
    for content in ("one", "two"):  # and another mount of this process works
        mounted = Workspace.mount(workdir / "m", filesystem=OnlyTheMethods(filesystem), engine=engine)  # type: ignore[call-overload]
        with elsewhere(workdir / "m"):
            (workdir / "m" / "f").write_text(content)
            mounted.unmount(lazy=lazy)
            assert not mounted.mounted
        assert filesystem.read("f").content == content


@needs_root
def test_a_program_in_another_mount_namespace_is_served_until_it_ends(engine: str, workdir: Path) -> None:
    filesystem = InMemoryFilesystem()
    mounted = Workspace.mount(workdir / "m", filesystem=filesystem, engine=engine)
    with elsewhere(workdir / "m", f"cd {workdir}/m; exec 3> f"):
        with pytest.raises(OSError, match=r"busy: held by pid \d+ \(sh\)"):
            mounted.unmount()
        assert mounted.mounted
    mounted.unmount()
    assert not mounted.mounted
