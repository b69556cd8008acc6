"""Mounts: the list parsed, dead told from hung, holders found, and nothing touched that is not ours."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.rights import need_root, needs_root
from tests.support.waiting import wait_until
from vfsd.machine import mountinfo, mounts
from vfsd.machine.mountinfo import parse_mountinfo
from vfsd.machine.mounts import is_dead
from vfsd.machine.processes import holders
from vfsd.machine.runtime import RUNTIME_VARIABLE, WorkspaceNotFoundError, find_workspace

TINY_FUSE = Path(__file__).with_name("tiny_fuse.py")
FuseMount = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def fuse_mount() -> Iterator[FuseMount]:
    """Mount a tiny file system named "tiny"; teardown kills the daemons and detaches what is left."""
    started: list[tuple[subprocess.Popen[str], Path]] = []

    def mount(path: Path) -> subprocess.Popen[str]:
        path.mkdir(exist_ok=True)
        daemon = subprocess.Popen(
            [sys.executable, str(TINY_FUSE), str(path), "tiny"], stdout=subprocess.PIPE, text=True
        )
        started.append((daemon, path))
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "mounted\n"
        return daemon

    yield mount
    for daemon, path in started:
        kill(daemon)
        while any(m.mountpoint == str(path) for m in mountinfo.mounts()):
            subprocess.run(["fusermount3", "-u", "-z", str(path)], check=True)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    need_root()
    path = tmp_path / "tmpfs"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "a source", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def kill(daemon: subprocess.Popen[str]) -> None:
    daemon.kill()
    daemon.wait()
    if daemon.stdout is not None:
        daemon.stdout.close()


@pytest.fixture
def process_in() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that waits, in a directory or with code run first."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str = "", cwd: Path | str = "/") -> subprocess.Popen[str]:
        script = f"import os, mmap, sys\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.communicate("")


# -- the list ---------------------------------------------------------------------------------------
def test_mountinfo_is_parsed_with_optional_fields_and_octal_escapes() -> None:
    content = (
        rb"36 35 98:3 /sub /mnt/two\040words\012x rw,noatime master:1 shared:2 - fuse.vfsd vfsd:a\134b rw,user_id=5"
        b"\n22 27 0:21 / /proc rw - proc proc rw\n"
    )
    first, second = parse_mountinfo(content)
    assert first.mountpoint == "/mnt/two words\nx"
    assert first.device == os.makedev(98, 3)
    assert (first.mount_id, first.parent_id, first.root) == (36, 35, "/sub")
    assert first.is_vfsd
    assert first.workspace == "a\\b"
    assert first.options == "rw,user_id=5"
    assert (second.filesystem, second.source, second.is_fuse, second.workspace) == ("proc", "proc", False, None)


@needs_root
def test_a_mountpoint_that_is_no_utf8_is_found(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9 \\x")
    os.mkdir(path)
    subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
    try:
        found = mountinfo.mount_at(os.fsdecode(path))
        assert found is not None
        assert os.fsencode(found.mountpoint) == path
    finally:
        subprocess.run(["umount", path], check=True)


def test_find_mount_gives_the_innermost_mount_and_mount_at_only_the_mountpoint(tmpfs: Path) -> None:
    below = tmpfs / "a" / "b"
    below.mkdir(parents=True)
    found = mountinfo.find_mount(str(below))
    assert found is not None
    assert found.mountpoint == str(tmpfs)
    assert found.device == below.stat().st_dev
    assert mountinfo.mount_at(str(below)) is None
    assert mountinfo.mount_at(str(tmpfs)) == found
    sibling = tmpfs.parent / "tmpfs-not-below"
    sibling.mkdir()
    other = mountinfo.find_mount(str(sibling))
    assert other is not None
    assert other.device == sibling.stat().st_dev != found.device


def test_a_mount_is_found_through_symlinks_and_dots(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmpfs.parent / "link"
    link.symlink_to("tmpfs/../tmpfs")
    monkeypatch.chdir(tmpfs.parent)
    assert mountinfo.resolve("./link/x/../y") == str(tmpfs / "y")
    assert mountinfo.mount_at("link") == mountinfo.mount_at(str(tmpfs)) is not None


def test_a_symlink_loop_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links") as caught:
        mountinfo.resolve(str(tmp_path / "loop"))
    assert caught.value.errno == errno.ELOOP


def test_resolve_agrees_with_realpath_where_no_fuse_is(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "l").symlink_to(tmp_path / "d")
    (tmp_path / "d" / "up").symlink_to("../l/e")
    for path in ("l/up/../x", "l/e/../../d", "missing/y", "//l//up/.", "d/up/../../.."):
        assert mountinfo.resolve(f"{tmp_path}/{path}") == os.path.realpath(f"{tmp_path}/{path}")


def test_nested_mounts_are_those_below(tmpfs: Path) -> None:
    (tmpfs / "inner").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmpfs / "inner")], check=True)
    try:
        assert [m.mountpoint for m in mountinfo.nested_mounts(str(tmpfs))] == [str(tmpfs / "inner")]
        assert mountinfo.nested_mounts(str(tmpfs / "inner")) == []
    finally:
        subprocess.run(["umount", str(tmpfs / "inner")], check=True)


# -- dead or alive ----------------------------------------------------------------------------------
@pytest.mark.fuse
def test_a_live_mount_is_not_dead_and_a_killed_ones_is(tmp_path: Path, fuse_mount: FuseMount) -> None:
    daemon = fuse_mount(tmp_path / "m")
    found = [m for m in mountinfo.vfsd_mounts() if m.mountpoint.startswith(str(tmp_path))]  # not those of other tests
    assert [(m.mountpoint, m.workspace) for m in found] == [(str(tmp_path / "m"), "tiny")]
    assert not is_dead(str(tmp_path / "m"))
    kill(daemon)
    assert is_dead(str(tmp_path / "m"))


@pytest.mark.extended
@pytest.mark.fuse
def test_a_dead_mount_is_recognised_although_the_machine_is_overloaded(
    tmp_path: Path, fuse_mount: FuseMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "m")
    kill(fuse_mount(tmp_path / "m"))
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\ni=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; exec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr("vfsd.machine.mounts.sys.executable", str(slow))
    assert is_dead(path, timeout_s=0.05)
    monkeypatch.undo()
    mounts.clear_dead_mount(path)


@pytest.mark.extended
@pytest.mark.fuse
@pytest.mark.timeout(60)  # a call that waits for the stopped daemon would never return
def test_a_daemon_that_does_not_answer_is_alive_and_nothing_hangs_on_it(tmp_path: Path, fuse_mount: FuseMount) -> None:
    path = str(tmp_path / "m")
    daemon = fuse_mount(tmp_path / "m")
    daemon.send_signal(signal.SIGSTOP)
    try:
        assert not is_dead(path, timeout_s=0.2)
        assert holders(path) == []
        found = mountinfo.find_mount(path + "/below/it")
        assert found is not None
        assert found.mountpoint == path
        with pytest.raises(OSError, match="workspace 'tiny'") as caught:
            mounts.clear_dead_mount(path)
        assert caught.value.errno == errno.EBUSY
        with pytest.raises(OSError, match="already a mountpoint, of workspace 'tiny'"):
            mounts.check_mountpoint(path)
        # `vfsd doctor` of another test looks at every mount, and waits for this one until its time is over.
        wait_until(lambda: _is_unmounted(path), "the end of other looks at the mount")
        assert mountinfo.mount_at(path) is None
    finally:
        daemon.send_signal(signal.SIGCONT)


def _is_unmounted(path: str) -> bool:
    try:
        mounts.unmount(path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def test_what_is_no_fuse_mount_is_not_dead(tmpfs: Path) -> None:
    assert not is_dead(str(tmpfs))
    assert not is_dead(str(tmpfs.parent))


@pytest.mark.fuse
@needs_root
def test_root_recognises_the_dead_mount_of_another_user(tmp_path: Path) -> None:
    # Without allow_other the kernel answers root with zeros, not with ENOTCONN.
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=65534,group_id=65534"
    command = ["mount", "-i", "-t", mountinfo.VFSD_TYPE, "-o", options, "vfsd:nobodys", str(tmp_path)]
    try:
        subprocess.run(command, pass_fds=[device], check=True)
    finally:
        os.close(device)
    try:
        os.statvfs(tmp_path)
        assert is_dead(str(tmp_path))
    finally:
        mounts.unmount(str(tmp_path), lazy=True)


# -- before mounting --------------------------------------------------------------------------------
def test_an_empty_directory_can_be_mounted_on(tmp_path: Path) -> None:
    assert mounts.check_mountpoint(str(tmp_path)) is None


def test_a_missing_mountpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        mounts.check_mountpoint(str(tmp_path / "missing"))


def test_a_mountpoint_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="not a directory"):
        mounts.check_mountpoint(str(tmp_path / "file"))


def test_a_mountpoint_with_content_is_refused_naming_some_of_it(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(OSError, match=r"not empty.*'precious'") as caught:
        mounts.check_mountpoint(str(tmp_path))
    assert caught.value.errno == errno.ENOTEMPTY


def test_a_mountpoint_in_use_is_refused_naming_what_is_mounted(tmpfs: Path) -> None:
    with pytest.raises(OSError, match=r"tmpfs \(a source\)") as caught:
        mounts.check_mountpoint(str(tmpfs))
    assert caught.value.errno == errno.EBUSY


@pytest.mark.fuse
def test_a_dead_mount_is_recognised_cleared_and_can_be_used_again(tmp_path: Path, fuse_mount: FuseMount) -> None:
    path = str(tmp_path / "m")
    kill(fuse_mount(tmp_path / "m"))
    dead = mounts.check_mountpoint(path)
    assert dead is not None
    assert dead.workspace == "tiny"
    assert mounts.clear_dead_mount(path) == dead
    assert mounts.check_mountpoint(path) is None
    assert mounts.clear_dead_mount(path) is None
    fuse_mount(tmp_path / "m")


@pytest.mark.extended
@pytest.mark.fuse
def test_dead_mounts_on_top_of_each_other_are_all_cleared(tmp_path: Path, fuse_mount: FuseMount) -> None:
    first = fuse_mount(tmp_path / "m")
    second = fuse_mount(tmp_path / "m")
    kill(second)
    kill(first)
    mounts.clear_dead_mount(str(tmp_path / "m"))
    assert mountinfo.mount_at(str(tmp_path / "m")) is None


@pytest.mark.fuse
def test_a_live_mount_and_a_foreign_one_are_never_cleared(tmp_path: Path, tmpfs: Path, fuse_mount: FuseMount) -> None:
    fuse_mount(tmp_path / "m")
    for path in (tmp_path / "m", tmpfs):
        before = mountinfo.mount_at(str(path))
        with pytest.raises(OSError, match="not a dead workspace") as caught:
            mounts.clear_dead_mount(str(path))
        assert caught.value.errno == errno.EBUSY
        assert mountinfo.mount_at(str(path)) == before is not None


# -- holders and unmounting -------------------------------------------------------------------------
def test_holders_are_found_by_directory_file_and_mapping(
    tmpfs: Path, process_in: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmpfs / "file").write_bytes(b"x" * 10)
    in_directory = process_in(cwd=tmpfs)
    with_file = process_in(f"file = open({str(tmpfs / 'file')!r})")
    with_mapping = process_in(
        f"with open({str(tmpfs / 'file')!r}, 'r+b') as file: keep = mmap.mmap(file.fileno(), {mmap.PAGESIZE // 4096})"
    )
    process_in()  # holds nothing
    found = {holder.pid: holder for holder in holders(str(tmpfs))}
    assert set(found) == {in_directory.pid, with_file.pid, with_mapping.pid}
    assert found[in_directory.pid].what == "current directory"
    assert found[with_file.pid].what == f"open file {tmpfs / 'file'}"
    assert f"mapped file {tmpfs / 'file'}" in found[with_mapping.pid].what
    assert all("python" in holder.command or "pytest" in holder.command for holder in found.values())


def test_holders_that_umount_does_not_see_use_another_mount(
    tmpfs: Path, tmp_path: Path, process_in: Callable[..., subprocess.Popen[str]]
) -> None:
    process_in(cwd=tmpfs)  # umount(2) fails with EBUSY
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"cd {tmpfs} && echo ready; read line"]
    with subprocess.Popen(unshare, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as elsewhere:
        assert elsewhere.stdin is not None
        assert elsewhere.stdout is not None
        assert elsewhere.stdout.readline() == b"ready\n"
        (unseen,) = holders(str(tmpfs), unseen_by_umount=True)
        assert (unseen.pid, unseen.what) == (elsewhere.pid, "current directory")
        elsewhere.stdin.close()
    bind = tmp_path / "bind"
    bind.mkdir()
    subprocess.run(["mount", "--bind", tmpfs, bind], check=True)
    try:
        in_bind = process_in(cwd=bind)
        assert [holder.pid for holder in holders(str(tmpfs), unseen_by_umount=True)] == [in_bind.pid]
        in_bind.kill()
        in_bind.wait()
    finally:
        subprocess.run(["umount", "--lazy", bind], check=True)


def test_nobody_holds_what_is_not_mounted(tmp_path: Path) -> None:
    assert holders(str(tmp_path)) == []


@pytest.mark.fuse
def test_a_busy_unmount_names_the_holders_and_a_lazy_one_detaches(
    tmp_path: Path, fuse_mount: FuseMount, process_in: Callable[..., subprocess.Popen[str]]
) -> None:
    path = str(tmp_path / "m")
    fuse_mount(tmp_path / "m")
    holder = process_in(cwd=path)
    with pytest.raises(OSError, match=rf"pid {holder.pid} \(.*\), current directory") as caught:
        mounts.unmount(path)
    assert caught.value.errno == errno.EBUSY
    assert caught.value.filename == path
    assert mountinfo.mount_at(path) is not None
    mounts.unmount(path, lazy=True)
    assert mountinfo.mount_at(path) is None


@pytest.mark.fuse
def test_a_program_that_looks_at_every_mount_for_a_moment_does_not_make_unmount_fail(
    tmp_path: Path, fuse_mount: FuseMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "m")
    fuse_mount(tmp_path / "m")
    looking = [os.open(path, os.O_PATH)]
    monkeypatch.setattr("vfsd.machine.mounts.time.sleep", lambda _: [os.close(looking.pop()) for _ in looking[:]])
    mounts.unmount(path)
    assert mountinfo.mount_at(path) is None
    assert looking == []


@pytest.mark.fuse
def test_a_workspace_without_a_record_is_unmounted_with_fusermount3_say_the_errors(
    tmp_path: Path, fuse_mount: FuseMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "run"))
    path = str(tmp_path / "m")
    fuse_mount(tmp_path / "m")
    advice = rf"no control socket in {tmp_path}/run/vfsd: set \$VFSD_RUNTIME_DIR .* `fusermount3 -u {path}`"
    with pytest.raises(OSError, match=f"already a mountpoint, of workspace 'tiny', which has {advice}"):
        mounts.check_mountpoint(path)
    for selector in (path, f"{path}/below"):
        with pytest.raises(WorkspaceNotFoundError, match=f"workspace 'tiny' at {path} has {advice}"):
            find_workspace(selector, "/")
    with pytest.raises(WorkspaceNotFoundError, match=r"workspace 'tiny' at /.* has no control socket"):
        find_workspace("tiny", "/")  # of another test, maybe


@pytest.mark.fuse
def test_unmount_takes_an_idle_mount_away(tmp_path: Path, fuse_mount: FuseMount) -> None:
    daemon = fuse_mount(tmp_path / "m")
    mounts.unmount(str(tmp_path / "m"))
    assert mountinfo.mount_at(str(tmp_path / "m")) is None
    assert daemon.wait(30) == 0


def test_unmount_refuses_what_is_not_a_workspace(tmpfs: Path) -> None:
    with pytest.raises(OSError, match="not a workspace but tmpfs") as caught:
        mounts.unmount(str(tmpfs))
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="nothing is mounted"):
        mounts.unmount(str(tmpfs.parent))
    assert mountinfo.mount_at(str(tmpfs)) is not None
