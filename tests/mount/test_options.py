"""The options of a mount, on the mount: limits, read-only, other users, an archive to begin with."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.programs import Program, failed, succeeded, vfsd
from tests.support.leaks import mounts
from tests.support.rights import need_root
from vfsd.client.connection import ControlClient
from vfsd.client.workspace import Workspace

MountIt = Callable[..., Workspace]
NOBODY = 65534
# The interpreter may lie where only its owner comes: the user is let through to it, and to nothing else of root's.
_AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search", "--",
)  # fmt: skip
MIB = 1 << 20


@pytest.fixture
def as_nobody(workdir: Path) -> Iterator[Program]:
    """A program of another user, standing beside the mounts."""
    need_root()
    workdir.chmod(0o755)
    with Program(cwd=workdir) as program:
        program(f"os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY})")
        program(f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY})")
        yield program


# -- limits -------------------------------------------------------------------------------------------
def test_what_a_snapshot_alone_holds_is_not_counted_against_max_bytes(mount: MountIt) -> None:
    workspace = mount(max_bytes=4 * MIB)
    root = Path(workspace.path)
    (root / "a").write_bytes(b"a" * 3 * MIB)
    workspace.snapshot("one")
    (root / "a").unlink()
    (root / "b").write_bytes(b"b" * 3 * MIB)
    workspace.restore("one")
    assert (root / "a").read_bytes() == b"a" * 3 * MIB
    assert os.listdir(root) == ["a"]


def test_an_import_beyond_the_limits_changes_nothing(mount: MountIt, workdir: Path) -> None:
    big = mount()
    (Path(big.path) / "big").write_bytes(os.urandom(3 * MIB))
    big.export(workdir / "big.zip")
    small = mount(max_bytes=2 * MIB)
    (Path(small.path) / "kept").write_text("kept")
    with pytest.raises(OSError, match=r"2,097,152 bytes \(--max-bytes\); nothing was changed: .*/big\.zip") as raised:
        small.import_archive(workdir / "big.zip")
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(small.path) == ["kept"]
    assert small.snapshots() == []


# -- read-only ----------------------------------------------------------------------------------------
def test_nothing_changes_a_read_only_workspace(mount: MountIt, workdir: Path) -> None:
    writable = mount()
    (Path(writable.path) / "file").write_text("content")
    writable.export(workdir / "a.zip")

    workspace = mount(archive=workdir / "a.zip", read_only=True)
    root = Path(workspace.path)
    before = os.stat(root / "file")
    assert (root / "file").read_text() == "content"
    changes: list[Callable[[], object]] = [
        (root / "new").touch,
        (root / "new").mkdir,
        lambda: (root / "file").write_text("other"),
        (root / "file").unlink,
        lambda: (root / "file").chmod(0o600),
        lambda: (root / "file").rename(root / "other"),
        lambda: os.utime(root / "file"),
        lambda: os.setxattr(root / "file", "user.x", b"y"),
    ]
    workspace.snapshot("one")
    changes += [
        lambda: workspace.restore("one"),
        lambda: workspace.restore(workdir / "a.zip"),
        lambda: workspace.import_archive(workdir / "a.zip"),
    ]
    for change in changes:
        with pytest.raises(OSError, match=r"[Rr]ead-only") as raised:
            change()
        assert raised.value.errno == errno.EROFS
    assert os.listdir(root) == ["file"]
    assert os.stat(root / "file") == before
    assert [info.name for info in workspace.snapshots()] == ["one"]
    assert workspace.status().read_only


def test_the_command_line_says_that_a_workspace_is_read_only(mount: MountIt) -> None:
    workspace = mount(read_only=True)
    workspace.snapshot("one")
    said = failed(vfsd("-w", workspace.name, "restore", "one"))
    assert "read-only" in said
    assert succeeded(vfsd("-w", workspace.name, "restore", "one", "--dry-run")) == ""


# -- other users --------------------------------------------------------------------------------------
def test_another_user_is_not_let_in(mount: MountIt, as_nobody: Program) -> None:
    root = Path(mount().path)
    root.chmod(0o777)
    (root / "file").write_text("content")
    for attempt in ("os.stat(name + '/file')", "os.listdir(name)", "open(name + '/new', 'w')"):
        with pytest.raises(PermissionError):
            as_nobody(attempt, name=root.name)


# -- an unprivileged mount ----------------------------------------------------------------------------
@pytest.fixture
def everybodys_fuse() -> Iterator[None]:
    """/dev/fuse as udev makes it (50-udev-default.rules), where a machine without udev has it otherwise."""
    with open("/dev/fuse", "rb") as device:
        fcntl.flock(device, fcntl.LOCK_EX)  # one test at a time, of all workers
        before = stat.S_IMODE(os.fstat(device.fileno()).st_mode)
        os.chmod("/dev/fuse", 0o666)
        yield
        os.chmod("/dev/fuse", before)


@pytest.fixture
def home_of_nobody() -> Iterator[Path]:
    """A directory of nobody's, which every path leads to."""
    home = Path(tempfile.mkdtemp(prefix="vfsd-nobody-"))
    os.chown(home, NOBODY, NOBODY)
    yield home
    for mount in mounts():
        if mount.mountpoint.startswith(str(home)):
            subprocess.run(["umount", "-l", mount.mountpoint], check=False)
    shutil.rmtree(home)


@pytest.mark.extended
def test_a_user_without_privileges_mounts_works_and_unmounts(
    everybodys_fuse: None, home_of_nobody: Path, engine: str
) -> None:
    home = home_of_nobody
    environment = {**os.environ, "VFSD_RUNTIME_DIR": f"{home}/run", "HOME": str(home), "VFSD_WORKSPACE": "work"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return vfsd(*arguments, before=_AS_NOBODY, env=environment)

    with Program(before=_AS_NOBODY) as program:
        assert program("os.getuid(), os.access('/etc', os.W_OK)") == (NOBODY, False)
        program("os.mkdir(home + '/work'); os.mkdir(home + '/other')", home=str(home))
        succeeded(run("mount", home / "work", "--engine", engine))
        found = [mount for mount in mounts() if mount.mountpoint == f"{home}/work"]
        assert [(it.fs_type, it.source) for it in found] == [("fuse.vfsd", "vfsd:work")]
        program("f = open(home + '/work/file', 'w'); f.write('one'); f.close()")
        assert program("os.stat(home + '/work/file').st_uid") == NOBODY
        succeeded(run("snapshot", "one"))
        program("f = open(home + '/work/file', 'w'); f.write('two'); f.close()")
        succeeded(run("restore", "one"))
        assert program("open(home + '/work/file').read()") == "one"
        succeeded(run("export", home / "out.zip"))
        program("fd = os.open(home + '/work/file', os.O_RDONLY)")
        assert f"pid {program.pid}" in failed(run("unmount"))
        program("os.close(fd)")
        if "user_allow_other" not in _fuse_conf():
            refused = run("mount", home / "other", "--allow-other", "--engine", engine)
            assert refused.returncode == 1
            assert "user_allow_other" in refused.stderr
        succeeded(run("unmount"))
        assert [mount for mount in mounts() if mount.mountpoint.startswith(str(home))] == []
        left = program("os.listdir(home + '/run/vfsd')")
        assert [name for name in left if name.endswith((".sock", ".json"))] == []


def _fuse_conf() -> list[str]:
    path = Path("/etc/fuse.conf")
    return [line.strip() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.extended
def test_root_controls_another_users_workspace_and_a_third_user_does_not(
    everybodys_fuse: None, home_of_nobody: Path
) -> None:
    home = home_of_nobody
    environment = {**os.environ, "VFSD_RUNTIME_DIR": f"{home}/run"}
    (home / "work").mkdir()
    os.chown(home / "work", NOBODY, NOBODY)
    succeeded(vfsd("mount", home / "work", before=_AS_NOBODY, env=environment))
    address = f"{home}/run/vfsd/work.sock"
    os.chmod(address, 0o666)  # so that only the check of the peer is in the way
    for path in (home, f"{home}/run", f"{home}/run/vfsd"):
        os.chmod(path, 0o755)
    with ControlClient(address) as client:
        client.call("snapshot")
    with Program() as third:
        third("os.setresuid(12345, 12345, 12345); s = socket.socket(socket.AF_UNIX); s.connect(path)", path=address)
        assert b"only its owner and root" in third("s.recv(4096)")
    succeeded(vfsd("unmount", "work", before=_AS_NOBODY, env=environment))


# -- an archive to begin with -------------------------------------------------------------------------
# -- no_xattrs ------------------------------------------------------------------------------------------
def _is_refused(call: Callable[..., object], *arguments: object) -> bool:
    with pytest.raises(OSError, match=r".") as raised:
        call(*arguments)
    return raised.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize("allow_other", [False, True])
def test_without_xattrs_they_are_refused_and_everything_else_works(mount: MountIt, allow_other: bool) -> None:
    root = Path(mount(xattrs=False, allow_other=allow_other).path)
    (root / "f").write_bytes(b"1")
    assert _is_refused(os.getxattr, root / "f", "user.a")
    assert _is_refused(os.setxattr, root / "f", "user.a", b"1")
    assert _is_refused(os.setxattr, root / "f", "system.posix_acl_access", b"\2\0\0\0")
    assert _is_refused(os.listxattr, root / "f")
    assert _is_refused(os.removexattr, root / "f", "user.a")
    os.chmod(root / "f", 0o4755)
    (root / "f").write_bytes(b"22")
    before = os.umask(0o027)
    try:
        (root / "d").mkdir()
    finally:
        os.umask(before)
    assert (root / "d").stat().st_mode & 0o777 == 0o750
    script = "set -e; ls -lR > /dev/null; cp -a d e; cp -a f g; tar -cf - d f | tar -xf - -C e; rm -r d; test -e e/f"
    subprocess.run(["sh", "-c", script], cwd=root, check=True)
    assert (root / "g").read_bytes() == b"22"


def test_what_has_attributes_keeps_them_while_the_mount_shows_none(mount: MountIt, workdir: Path) -> None:
    first = mount()
    path = Path(first.path) / "f"
    path.write_bytes(b"1")
    os.setxattr(path, "user.kept", b"yes")
    first.export(workdir / "a.zip")
    second = mount(xattrs=False, archive=workdir / "a.zip")
    assert _is_refused(os.getxattr, Path(second.path) / "f", "user.kept")
    (Path(second.path) / "f").write_bytes(b"22")
    second.export(workdir / "b.zip")
    third = mount(archive=workdir / "b.zip")
    assert os.getxattr(Path(third.path) / "f", "user.kept") == b"yes"


@pytest.mark.extended
def test_without_xattrs_a_new_file_costs_a_request_less_and_a_copy_of_it_four(mount: MountIt) -> None:
    def requests(workspace: Workspace) -> tuple[int, int]:
        before = workspace.status().requests
        (folder := Path(workspace.path) / "d").mkdir()
        for number in range(100):
            (folder / str(number)).write_bytes(b"1")
        made = workspace.status().requests
        subprocess.run(["cp", "-a", "d", "e"], cwd=workspace.path, check=True)
        return made - before, workspace.status().requests - made

    (made, copied), (made_without, copied_without) = requests(mount()), requests(mount(xattrs=False))
    assert made - made_without > 90
    assert copied - copied_without > 390


# -- wakeups ---------------------------------------------------------------------------------------------
def test_the_status_says_whether_idle_cpus_are_kept_awake(mount: MountIt, engine: str) -> None:
    state = mount(wakeups="off").status().wakeups
    assert state == (None if engine == "pyfuse3" else "idle CPUs may halt: --wakeups off")


def test_wakeups_that_cannot_work_are_reported_by_the_mount(engine: str, workdir: Path) -> None:
    place = workdir / "m"
    place.mkdir()
    name = f"{workdir.name}-wakeups"
    said = json.loads(succeeded(vfsd("mount", place, "--name", name, "--wakeups", "on", "--engine", engine, "--json")))
    succeeded(vfsd("unmount", name))
    if engine == "pyfuse3":
        assert said["warnings"] == ["--wakeups on has no effect with the pyfuse3 engine"]
    elif os.access("/dev/cpu_dma_latency", os.W_OK):
        assert said["warnings"] == []
    else:
        assert "cannot open /dev/cpu_dma_latency" in said["warnings"][0]
