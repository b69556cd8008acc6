"""A host directory, mounted on each engine: programs work in it, and others may work in the directory meanwhile."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol.tool_messages import GlobParams, GrepParams
from tests.mount.conftest import MountIt, mounted, socket_of
from tests.support.rights import need_root, needs_root
from tests.support.waiting import wait_until
from vfsd.client.arguments import mount_options
from vfsd.client.connection import ControlClient, daemon_end
from vfsd.client.launch import launch
from vfsd.client.workspace import Workspace
from vfsd.operations.fs import FsLsParams, FsStatParams

TIMEOUT_S = 0.2
pytestmark = pytest.mark.workspaces(backend="host", cache_timeout_s=TIMEOUT_S)


def run(*command: object, cwd: Path | None = None) -> str:
    found = subprocess.run(
        [os.fspath(part) if isinstance(part, Path) else str(part) for part in command],
        cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def tree_of(place: Path) -> dict[str, tuple[object, ...]]:
    """All that there is to know of the files below `place`, but inode numbers and atime."""
    found: dict[str, tuple[object, ...]] = {}
    for base, directories, files in os.walk(place):
        for name in [*directories, *files]:
            path = os.path.join(base, name)
            seen = os.lstat(path)
            kind = stat.S_IFMT(seen.st_mode)
            content: object = None
            if kind == stat.S_IFREG:
                content = Path(path).read_bytes()
            elif kind == stat.S_IFLNK:
                content = os.readlink(path)
            xattrs = {
                key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)
            }
            found[os.path.relpath(path, place)] = (
                seen.st_mode, seen.st_uid, seen.st_gid, seen.st_nlink if kind != stat.S_IFDIR else 0, seen.st_rdev,
                seen.st_size if kind == stat.S_IFREG else 0, seen.st_mtime_ns, content, xattrs,
            )  # fmt: skip
    return found


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.extended
def test_git_works_in_it_and_finds_the_same_beside_it(root: Path, directory: Path, workdir: Path) -> None:
    origin = workdir / "origin"
    origin.mkdir()
    git = ("git", "-c", "user.email=a@b", "-c", "user.name=n")
    run("git", "init", "-q", origin)
    for at in range(100):
        (origin / f"dir{at % 7}").mkdir(exist_ok=True)
        (origin / f"dir{at % 7}" / f"file{at}").write_text(f"line {at}\n" * at)
    run(*git, "add", "-A", cwd=origin)
    run(*git, "commit", "-qm", "one", cwd=origin)

    run("git", "clone", "-q", origin, root / "clone")
    (root / "clone" / "new").write_text("new\n")
    (root / "clone" / "dir1" / "file1").unlink()
    run(*git, "add", "-A", cwd=root / "clone")
    run(*git, "commit", "-qm", "two", cwd=root / "clone")
    run(*git, "gc", "-q", cwd=root / "clone")
    assert run("git", "status", "--porcelain", cwd=root / "clone") == ""
    run("git", "fsck", "--strict", cwd=root / "clone")
    run("git", "fsck", "--strict", cwd=directory / "clone")
    assert run("git", "status", "--porcelain", cwd=directory / "clone") == ""
    assert run("git", "log", "--format=%s", cwd=directory / "clone").split() == ["two", "one"]


def rich_tree(place: Path) -> None:
    """A directory of every kind of thing."""
    place.mkdir()
    (place / "plain").write_bytes(b"content")
    (place / "empty").touch()
    (place / "dir" / "inner").mkdir(parents=True)
    (place / "dir" / "empty").mkdir(mode=0o2775)
    os.chmod(place / "dir" / "empty", 0o2775)
    os.link(place / "plain", place / "dir" / "hard")
    os.symlink("../plain", place / "dir" / "link")
    os.symlink("/nowhere", place / "dangling")
    os.mkfifo(place / "fifo", 0o640)
    with open(place / "sparse", "wb") as file:
        file.seek(50_000_000)
        file.write(b"end")
    (place / "script").write_text("#!/bin/sh\n")
    os.chmod(place / "script", 0o4755)
    os.setxattr(place / "plain", "user.note", b"\0value")
    run("setfacl", "-m", "u:1234:rw,g:4321:r", place / "plain")
    run("setfacl", "-d", "-m", "u:1234:rwx", place / "dir")
    os.utime(place / "plain", ns=(10**18 + 1, 10**18 + 2))
    os.utime(place / "dir" / "link", ns=(5, -7), follow_symlinks=False)
    if os.geteuid() == 0:
        os.chown(place / "empty", 1234, 4321)
        os.lchown(place / "dangling", 1234, 4321)
        os.mknod(place / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    # Of long ago: rsync takes times within one second for equal.
    for base, directories, files in os.walk(place, topdown=False):
        for at, name in enumerate([*files, *directories]):
            if name not in {"plain", "hard", "link"}:
                os.utime(os.path.join(base, name), ns=(10**17 + at, 10**17 + at), follow_symlinks=False)


@needs_root
def test_rsync_carries_everything_there_and_back(root: Path, directory: Path, workdir: Path) -> None:
    rich_tree(workdir / "source")
    command = ("rsync", "-aHAXS", "--numeric-ids")
    run(*command, f"{workdir}/source/", root / "copy")
    expected = tree_of(workdir / "source")
    assert tree_of(directory / "copy") == expected
    assert tree_of(root / "copy") == expected
    assert os.stat(directory / "copy" / "sparse").st_blocks < 1000
    run(*command, f"{root}/copy/", workdir / "back")
    assert tree_of(workdir / "back") == expected
    # Nothing to do the second time, on either side.
    assert run(*command, "-i", f"{workdir}/source/", root / "copy") == ""
    assert os.stat(root / "copy" / "plain").st_ino == os.stat(root / "copy" / "dir" / "hard").st_ino
    assert run("getfacl", "-nc", "dir", cwd=root / "copy") == run("getfacl", "-nc", "dir", cwd=workdir / "source")


def test_sqlite_in_wal_mode_with_readers_while_it_writes(root: Path, directory: Path) -> None:
    database = root / "db.sqlite"
    run("sqlite3", database, "PRAGMA journal_mode=WAL; CREATE TABLE t(n INTEGER);")
    writers = [
        subprocess.Popen(
            ["sqlite3", database], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("PRAGMA busy_timeout=20000;" + "INSERT INTO t VALUES(1);" * 100)
        writer.stdin.close()
    for writer in writers:
        assert writer.stderr is not None
        said = writer.stderr.read()
        assert writer.wait() == 0, said
        writer.stderr.close()
    assert run("sqlite3", database, "SELECT count(*) FROM t; PRAGMA integrity_check;").split() == ["200", "ok"]
    assert run("sqlite3", directory / "db.sqlite", "PRAGMA integrity_check;").strip() == "ok"


def test_a_compiled_program_runs_in_it_and_beside_it(root: Path, directory: Path) -> None:
    shutil.copy("/bin/echo", root / "program")
    assert run(root / "program", "hello") == "hello\n"

    def runs() -> bool:
        try:
            return run(directory / "program", "hello") == "hello\n"
        except OSError as error:
            if error.errno != errno.ETXTBSY:
                raise
            return False

    wait_until(runs)


# -- others --------------------------------------------------------------------------------------------


@pytest.mark.both_engines
def test_changes_beside_the_mount_are_seen(root: Path, directory: Path) -> None:
    (root / "f").write_bytes(b"old content")
    assert (root / "f").read_bytes() == b"old content"
    (directory / "f").write_bytes(b"changed")
    wait_until(lambda: (root / "f").read_bytes() == b"changed")
    assert (root / "f").stat().st_size == 7
    (directory / "replacement").write_bytes(b"replaced")
    os.rename(directory / "replacement", directory / "f")
    wait_until(lambda: (root / "f").read_bytes() == b"replaced")
    assert not (root / "g").exists()
    (directory / "g").write_bytes(b"new")
    wait_until((root / "g").exists)
    assert sorted(os.listdir(root)) == ["f", "g"]
    os.unlink(directory / "g")
    wait_until(lambda: not (root / "g").exists())
    os.chmod(directory / "f", 0o600)
    wait_until(lambda: stat.S_IMODE((root / "f").stat().st_mode) == 0o600)


@pytest.mark.both_engines
def test_an_append_is_at_the_real_end_and_every_reader_sees_it_there(mount: MountIt, directory: Path) -> None:
    log = directory / "log"
    log.write_bytes(b"x" * 100)
    roots = [Path(mount(backend=f"host:{directory}", cache_timeout_s=TIMEOUT_S).path) for _ in range(2)]
    with ExitStack() as stack:
        here, there = (stack.enter_context((root / "log").open("r+b", 0)) for root in roots)
        ours, theirs, below = (stack.enter_context((p / "log").open("ab", 0)) for p in (*roots, directory))
        mapped = stack.enter_context(mmap.mmap(here.fileno(), 100, prot=mmap.PROT_READ))
        assert here.read() == there.read() == mapped[:] == b"x" * 100
        expected = b"x" * 100
        for at, writer in enumerate((ours, below, ours, theirs, below, theirs, ours, theirs, ours)):
            record = b"%d\n" % at * (at + 1)
            assert writer.write(record) == len(record)
            expected += record
            assert log.read_bytes() == expected
            if writer is not below:  # a reader of the same mount sees it at once
                assert os.pread((here if writer is ours else there).fileno(), 1000, 0) == expected
        for reader in (here, there):
            wait_until(lambda: os.pread(reader.fileno(), 1000, 0) == expected)  # noqa: B023 (called at once)
        os.truncate(log, 0)
        ours.write(b"rotated\n")
        assert log.read_bytes() == os.pread(here.fileno(), 1000, 0) == b"rotated\n"
        wait_until(lambda: mapped[:8] == b"rotated\n")
        wait_until(lambda: os.pread(there.fileno(), 1000, 0) == b"rotated\n")
        # Neither a write elsewhere nor a page of a mapping is an append, though its descriptor can append.
        fcntl.fcntl(ours, fcntl.F_SETFL, os.O_RDWR)
        os.pwrite(ours.fileno(), b"R", 0)
        both = stack.enter_context((roots[0] / "log").open("a+b", 0))
        with mmap.mmap(both.fileno(), 8) as changed:
            changed[1] = ord("O")
            changed.flush()
        assert log.read_bytes() == b"ROtated\n"


@pytest.mark.both_engines
def test_a_directory_replaced_beside_the_mount_is_the_new_one(root: Path, directory: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "old").touch()
    os.rename(directory / "d", directory / "away")
    (directory / "d").mkdir()
    (directory / "d" / "new").touch()
    wait_until(lambda: os.listdir(root / "d") == ["new"])
    (root / "d" / "made").write_bytes(b"1")
    assert sorted(os.listdir(directory / "d")) == ["made", "new"]
    assert sorted(os.listdir(root / "away")) == ["old"]


def test_a_symlink_out_of_the_directory_is_the_callers_to_follow(root: Path, directory: Path, workdir: Path) -> None:
    (workdir / "secret").write_bytes(b"outside")
    os.symlink(workdir / "secret", directory / "out")
    # The caller's kernel follows it, with the caller's permissions: the daemon is not asked.
    assert os.readlink(root / "out") == str(workdir / "secret")
    assert (root / "out").read_bytes() == b"outside"


def test_status_says_what_can_be_said_without_a_walk(workspace: Workspace, root: Path) -> None:
    shown = workspace.status()
    assert (shown.files, shown.snapshots, shown.interrupted) == (None, 0, None)
    assert shown.backend.startswith("host:/")


@pytest.mark.both_engines
def test_another_users_files_are_his_and_permissions_hold(mount: MountIt, directory: Path) -> None:
    need_root()
    root = Path(mount(backend=f"host:{directory}", allow_other=True).path)
    os.chmod(directory, 0o1777)
    (root / "roots").write_bytes(b"private")
    os.chmod(root / "roots", 0o600)
    (root / "team").mkdir()
    os.chown(root / "team", 0, 4321)
    os.chmod(root / "team", 0o2777)
    program = (
        "import os\nos.setgroups([]); os.setresgid(1234,1234,1234); os.setresuid(1234,1234,1234); os.umask(0o027)\n"
        "open('mine','w').write('x'); os.mkdir('dir'); os.symlink('x','link'); os.mkfifo('fifo')\n"
        "open('team/f','w').close(); os.mkdir('team/d')\n"
        "os.chmod('mine', 0o4755); open('mine','a').write('y')\n"
        "for path in ('roots',):\n"
        "    try: open(path)\n"
        "    except PermissionError: pass\n"
        "    else: raise SystemExit('read what is not his')\n"
    )
    run(sys.executable, "-c", program, cwd=root)
    for name in ("mine", "dir", "link", "fifo"):
        seen = os.lstat(directory / name)
        assert (seen.st_uid, seen.st_gid) == (1234, 1234), name
    assert stat.S_IMODE(os.stat(directory / "dir").st_mode) == 0o750
    assert stat.S_IMODE(os.stat(directory / "mine").st_mode) == 0o755  # suid went with the second write
    for name, mode in (("team/f", 0o640), ("team/d", 0o2750)):
        seen = os.stat(directory / name)
        assert (seen.st_uid, seen.st_gid, stat.S_IMODE(seen.st_mode)) == (1234, 4321, mode), name


# Mounted by root, since not everybody may open /dev/fuse everywhere; what serves it is the user's.
UNPRIVILEGED = """
import ctypes, os, sys
import trio
from protocol.backends.host import HostVolume
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine
from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine
os.setgroups([]); os.setegid(1234); os.seteuid(1234)
volume = HostVolume(os.fsencode(sys.argv[2]))
os.seteuid(0); os.setegid(0)
engines = {"native": NativeEngine, "pyfuse3": Pyfuse3Engine}
settings = EngineSettings(sys.argv[1], "unprivileged", allow_other=True, cache_timeout_s=1.0)
engine = engines[sys.argv[3]](volume, settings)
engine.mount()
os.setresgid(1234, 1234, 1234); os.setresuid(1234, 1234, 1234)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after an exec
print("ready", flush=True)
trio.run(engine.serve)
volume.check_invariants()
"""

WORK = """
import os, subprocess, sys
os.setgroups([]); os.setresgid(1234, 1234, 1234); os.setresuid(1234, 1234, 1234)
os.chdir(sys.argv[1])
os.environ["HOME"] = sys.argv[1]
git = ["git", "-c", "user.email=a@b", "-c", "user.name=n", "-c", "safe.directory=*"]
os.mkdir("repo")
open("repo/file", "w").write("content")
for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"], ["fsck", "--strict"], ["gc", "-q"]):
    subprocess.run([*git, *command], cwd="repo", check=True)
try:
    open("roots")
except PermissionError:
    pass
else:
    raise SystemExit("read root's file")
"""


@pytest.mark.extended
@pytest.mark.both_engines
@needs_root
def test_a_daemon_without_privileges_serves_what_is_its_users(public: Path, engine: str) -> None:
    for name in ("mnt", "host"):
        (public / name).mkdir(mode=0o700)
        os.chown(public / name, 1234, 1234)
    (public / "host" / "roots").write_bytes(b"private")
    os.chmod(public / "host" / "roots", 0o600)
    program = [sys.executable, "-c", UNPRIVILEGED, public / "mnt", public / "host", engine]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == "ready\n"
            run(sys.executable, "-c", WORK, public / "mnt")
            assert os.stat(public / "host" / "repo" / "file").st_uid == 1234
            run("git", "-c", "safe.directory=*", "fsck", "--strict", cwd=public / "host" / "repo")
        finally:
            run("umount", "-l", public / "mnt")
            assert daemon.wait(20) == 0


def test_a_mount_of_a_directory_that_is_gone_is_refused(workdir: Path, engine: str) -> None:
    (workdir / "m").mkdir()
    with pytest.raises(FileNotFoundError), mounted(workdir / "m", backend=f"host:{workdir}/none", engine=engine):
        pass


def test_after_a_daemons_death_the_content_is_where_it_was(workdir: Path, directory: Path, engine: str) -> None:
    place = workdir / "m"
    place.mkdir()
    name = f"dies-{workdir.name}"
    options = mount_options(place, f"host:{directory}", name=name, engine=engine, keeper=False)  # type: ignore[arg-type]
    first = launch(options)
    (place / "f").write_bytes(b"kept")
    with daemon_end(first.pid) as wait_ended:
        os.kill(first.pid, signal.SIGKILL)
        wait_ended()
    second = launch(options)
    assert f"its content is in {directory}" in str(second.recovered)
    with Workspace.attach(second.name) as again:
        assert (place / "f").read_bytes() == b"kept"
        again.unmount()
    assert (directory / "f").read_bytes() == b"kept"


def test_vfsd_fs_searches_and_describes_what_is_there(workspace: Workspace, directory: Path) -> None:
    (directory / "sub").mkdir()
    (directory / "sub" / "file").write_text("needle\n")
    (directory / "dangling").symlink_to("nowhere")
    (directory / "link").symlink_to("sub")
    with ControlClient(socket_of(workspace)) as client:
        assert client.call("fs.stat", FsStatParams(path="dangling")).type == "symlink"
        assert client.call("fs.glob", GlobParams(pattern="*", path="link")).paths == ["link/file"]
        assert [match.path for match in client.call("fs.grep", GrepParams(pattern="needle")).matches] == ["sub/file"]
        types = [entry.type for entry in client.call("fs.ls", FsLsParams()).entries]
    assert types == ["symlink", "directory", "directory"]
