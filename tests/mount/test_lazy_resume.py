"""`vfsd mount --from URL#NAME`: workspaces over a snapshot in an object store.

A real S3 server, behind a proxy that counts requests and bytes, and injects faults.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.store import DirectorySource, Store
from protocol.store.object_store import RemoteStore, open_storage
from tests.mount.conftest import MountIt, backend_over, check_invariants, complaints
from tests.mount.kept_workspaces import Kept, end_kept
from tests.mount.programs import git, succeeded, vfsd
from tests.support.lower_layers import damage_inodes
from tests.support.processes import children, is_running
from tests.support.s3_server import BUCKET, KEYS, FaultyProxy, options, s3_server
from tests.support.terminal import Shell
from tests.support.unmounting import unmount_when_idle
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse
BIG = os.urandom(9 << 20)
URL = f"s3://{BUCKET}/team/job"
OUTAGE_S = 3.0  # a --remote-timeout that reads keep on a busy machine while the network works


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with 200 files in 10 directories, a large file and a symlink."""
    place = tmp_path_factory.mktemp("lazy") / "project"
    for directory in range(10):
        (place / f"d{directory}").mkdir(parents=True)
        for file in range(20):
            (place / f"d{directory}" / f"f{file}").write_bytes(os.urandom(2000))
    (place / "big").write_bytes(BIG)
    (place / "link").symlink_to("big")
    for path in place.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
    git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "all")
    return place


@pytest.fixture(scope="module")
def server(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that has the project as the snapshot "one"."""
    with s3_server() as port:
        with Store(str(tmp_path_factory.mktemp("store"))) as local:
            local.take("host:x", "one", DirectorySource(str(project)))
            with RemoteStore(open_storage(URL, options(port))) as remote:
                remote.push(local, "host:x", "one")
        yield port


@pytest.fixture
def proxy(server: int, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """What this machine reaches the server through; the caches of this machine are empty."""
    with FaultyProxy(server) as proxy:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("XDG_CACHE_HOME", str(workdir / "cache"))
        yield proxy


def resume(mount: MountIt, name: str = "one", **arguments: Any) -> tuple[Workspace, Path]:
    workspace = mount(backend=f"overlay:{URL}#{name}", **arguments)
    return workspace, Path(workspace.path)


@contextmanager
def complaining(workdir: Path, engine: str, *, url: str = URL, **arguments: Any) -> Iterator[tuple[Workspace, Path]]:
    """As `resume`, for a test that accounts for warnings in the log itself."""
    place = workdir / "complaining"
    place.mkdir()
    name = f"{workdir.name}-complaining"
    with Workspace.mount(place, backend=f"overlay:{url}#one", engine=engine, name=name, **arguments) as workspace:
        yield workspace, place
        check_invariants(workspace)
        unmount_when_idle(workspace)


def equal(left: Path, right: Path) -> bool:
    found = filecmp.dircmp(left, right, ignore=[".snapshots"])
    if found.left_only or found.right_only or found.funny_files:
        return False
    _, different, errors = filecmp.cmpfiles(left, right, found.common_files, shallow=False)
    return not different and not errors and all(equal(left / name, right / name) for name in found.common_dirs)


@pytest.mark.extended
def test_all_content_is_that_of_the_snapshot(mount: MountIt, proxy: FaultyProxy, project: Path) -> None:
    workspace, root = resume(mount)
    at_mount = proxy.sent_bytes
    assert sorted(os.listdir(root)) == sorted(os.listdir(project))
    assert proxy.sent_bytes < 1 << 20, "a listing fetched contents"
    assert at_mount < 100_000
    assert os.readlink(root / "link") == "big"
    assert equal(root, project)
    status = workspace.status()
    assert status.source == f"{URL}#one"
    assert status.fetched_bytes
    check_invariants(workspace)


@pytest.mark.extended
def test_a_workspace_over_it_does_what_every_overlay_does(mount: MountIt, proxy: FaultyProxy, workdir: Path) -> None:
    workspace, root = resume(mount, exec_on_host=True)
    workspace.snapshot("before")
    with (root / "big").open("r+b") as file:
        file.write(b"changed")
    (root / "d1" / "new").write_text("new")
    os.rename(root / "d2", root / "moved")
    assert workspace.diff("before").counts.total >= 3
    assert (root / ".snapshots" / "before" / "d2" / "f7").stat().st_size == 2000
    assert (root / ".snapshots" / "before" / "big").read_bytes() == BIG
    workspace.export(workdir / "out.zip")
    workspace.restore("before")
    assert (root / "big").read_bytes() == BIG
    assert not (root / "moved").exists()
    with pytest.raises(OSError, match="vfsd export") as refused:
        workspace.apply()
    assert refused.value.errno == errno.EOPNOTSUPP
    check_invariants(workspace)


@pytest.mark.parametrize("engine", ["native"])
def test_a_fork_fetches_by_itself_and_is_merged(mount: MountIt, proxy: FaultyProxy, workdir: Path) -> None:
    workspace, root = resume(mount)
    assert (root / "d1" / "f1").stat().st_size == 2000
    with workspace.fork(workdir / "fork") as fork:
        assert len((Path(fork.path) / "d2" / "f3").read_bytes()) == 2000
        (Path(fork.path) / "d3" / "forked").write_text("fork")
        workspace.merge(fork.name)
    assert (root / "d3" / "forked").read_text() == "fork"


# -- the network -----------------------------------------------------------------------------------
def down(_method: str, _path: str) -> str:
    return "reset"


def up(_method: str, _path: str) -> None:
    return None


def corrupted_data(method: str, path: str) -> str | None:
    return "corrupt" if method == "GET" and path.endswith("data.pack") else None


@pytest.mark.extended
@pytest.mark.both_engines
def test_while_the_network_is_down_only_reads_of_what_is_not_cached_fail(
    engine: str, proxy: FaultyProxy, project: Path, workdir: Path
) -> None:
    with complaining(workdir, engine, remote_timeout_s=OUTAGE_S) as (workspace, root):
        assert (root / "d0" / "f0").read_bytes() == (project / "d0" / "f0").read_bytes()  # fetches its neighbours, too
        proxy.fault = down
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error") as failed:
                (root / "big").read_bytes()
            assert failed.value.errno == errno.EIO
        assert (root / "d0" / "f1").read_bytes() == (project / "d0" / "f1").read_bytes()
        (root / "d0" / "f1").write_text("written")
        (root / "new").mkdir()
        assert workspace.status().fetch_failure
        assert [("cannot fetch from" in line) for line in complaints(workspace.name)] == [True]
        proxy.fault = up
        assert (root / "big").read_bytes() == BIG
        assert workspace.status().fetch_failure is None
        assert len(complaints(workspace.name)) == 1


@pytest.mark.extended
def test_a_mount_ends_in_time_if_the_store_falls_silent(proxy: FaultyProxy, workdir: Path) -> None:
    go = threading.Event()

    def silent(_method: str, path: str) -> None:
        if "names" in path:
            go.wait(120)

    proxy.fault = silent
    (workdir / "here").mkdir()
    try:
        done = vfsd("mount", workdir / "here", "--from", f"{URL}#one", "--remote-timeout", "3")
    finally:
        go.set()
    assert done.returncode == 1
    *notes, error = done.stderr.splitlines()
    assert error.startswith("vfsd: error: the object store does not answer ")
    # A busy machine may take long to start the daemon.
    assert notes in ([], [f"vfsd: waiting for {URL}; --remote-timeout ends that after 3 s"])


def processes_with(variable: str) -> list[bytes]:
    """The command lines of the processes that have this in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes())
    return found


@pytest.mark.extended
def test_an_interrupted_mount_leaves_no_process_that_waits_for_the_store(proxy: FaultyProxy, workdir: Path) -> None:
    asked, go = threading.Event(), threading.Event()

    def silent(_method: str, _path: str) -> None:
        asked.set()
        go.wait(120)

    proxy.fault = silent
    (workdir / "here").mkdir()
    endpoint = f"AWS_ENDPOINT_URL=http://127.0.0.1:{proxy.port}"
    with Shell(cwd=workdir) as shell:
        try:
            shell.run(f"{sys.executable} -m vfsd.cli.main mount here --from '{URL}#one' --remote-timeout 100")
            shell.expect(f"vfsd: waiting for {URL}; --remote-timeout ends that after 100 s\n")
            assert asked.wait(60)
            shell.type("\x03")
            assert shell.status() == 130
            wait_until(lambda: not any(b"lazy.helper" in command for command in processes_with(endpoint)))
        finally:
            go.set()


@pytest.mark.both_engines
def test_the_mount_answers_while_a_read_waits_for_the_network(mount: MountIt, proxy: FaultyProxy) -> None:
    workspace, root = resume(mount, remote_timeout_s=60.0)
    os.listdir(root)
    asked, go = threading.Event(), threading.Event()

    def stuck(_method: str, _path: str) -> None:
        asked.set()
        go.wait(60)

    proxy.fault = stuck
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((root / "big").read_bytes()))
    reader.start()
    try:
        assert asked.wait(30)
        (root / "written").write_text("meanwhile")
        assert (root / "written").read_text() == "meanwhile"
        assert "big" in os.listdir(root)
        workspace.snapshot("meanwhile")
        workspace.restore("meanwhile")
        assert not found
    finally:
        go.set()
        reader.join()
    assert found == [BIG]


@pytest.mark.parametrize("engine", ["native"])
def test_damaged_content_is_named_and_never_returned(engine: str, proxy: FaultyProxy, workdir: Path) -> None:
    with complaining(workdir, engine) as (workspace, root):
        assert len((root / "d0" / "f0").read_bytes()) == 2000  # reads the indexes
        proxy.fault = corrupted_data
        with pytest.raises(OSError, match="Input/output error"):
            (root / "big").read_bytes()
        (line,) = complaints(workspace.name)
        assert "is damaged [path=big]" in line
        with pytest.raises(OSError, match=f"`vfsd store check --store {URL}` lists all damage"):
            workspace.export(workdir / "out.zip")
        proxy.fault = up
        assert (root / "big").read_bytes() == BIG


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_lost_inode_numbers_are_named_and_the_contents_are_there(
    engine: str, project: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(workdir / "cache"))
    url = f"file://{workdir}/remote"
    with Store(str(workdir / "store")) as local, RemoteStore(open_storage(url)) as remote:
        local.take("host:x", "one", DirectorySource(str(project)))
        remote.push(local, "host:x", "one")
        damage_inodes(remote, "one")
    with complaining(workdir, engine, url=url) as (workspace, root):
        assert equal(root, project)
        (line,) = complaints(workspace.name)
        assert "the inode numbers and ctimes below . are lost" in line
        assert "ctimes below . are lost" in (workspace.status().inode_failure or "")
    checked = vfsd("store", "check", "--store", url)
    assert checked.returncode == 1
    assert "  lost: only the inode numbers and ctimes below .\n" in checked.stderr
    assert "lost: .\n" not in checked.stderr


def is_served_by_another(workspace: Workspace, pid: int) -> bool:
    """Whether the keeper's daemon answers, after the daemon `pid` was killed."""
    try:
        return workspace.status().pid != pid
    except OSError:
        return False


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_a_killed_helper_is_replaced_and_a_killed_daemon_leaves_none(
    mount: MountIt, engine: str, proxy: FaultyProxy, workdir: Path
) -> None:
    with complaining(workdir, engine) as (workspace, root):
        assert len((root / "d0" / "f0").read_bytes()) == 2000
        pid = workspace.status().pid
        (first,) = children(pid)
        os.kill(first, signal.SIGKILL)
        assert (root / "big").read_bytes() == BIG
        (second,) = children(pid)
        assert second != first
    _, root = resume(mount)
    proxy.requests.clear()
    assert (root / "big").read_bytes() == BIG
    assert not [path for _, path in proxy.requests if path.endswith("data.pack")], "the cache was not used"


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_changes_persist_and_a_killed_daemon_leaves_no_helper(
    proxy: FaultyProxy, engine: str, project: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "store"))
    url = f"s3://{BUCKET}/{workdir.name}"
    with Store(str(workdir / "local")) as local, RemoteStore(open_storage(url, options(proxy.port))) as remote:
        local.take("host:x", "one", DirectorySource(str(project)))
        remote.push(local, "host:x", "one")
    given = {"persist": True, "journal_dir": str(workdir / "journal"), "name": f"{workdir.name}-kept"}
    place = workdir / "kept"
    place.mkdir()
    workspace = Workspace.mount(place, backend=f"overlay:{url}#one", engine=engine, **given)
    (place / "d1" / "f1").write_text("changed")
    with (place / "big").open("r+b") as file:
        file.write(b"12345")
        os.fsync(file.fileno())
    # Another state of the name in the store does not take the workspace its lower layer.
    replaced = [sys.executable, "-m", "vfsd.cli.main", "push", url, "--as", "one", "--replace", "-w", workspace.path]
    subprocess.run(replaced, check=True, capture_output=True)
    pid = workspace.status().pid
    (helper,) = children(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(helper))
    wait_until(lambda: is_served_by_another(workspace, pid))  # an unmount meanwhile would be refused
    unmount_when_idle(workspace)
    with Workspace.mount(place, backend=f"overlay:{url}#one", engine=engine, **given) as workspace:
        assert (place / "d1" / "f1").read_text() == "changed"
        assert (place / "big").read_bytes() == b"12345" + BIG[5:]
        assert (place / "d2" / "f2").read_bytes() == (project / "d2" / "f2").read_bytes()
        unmount_when_idle(workspace)


# -- a daemon that dies while the store does not answer ------------------------------------------------
@pytest.fixture
def kept(proxy: FaultyProxy, workdir: Path) -> Iterator[Kept]:
    """A workspace with a journal, which its test mounts and kills."""
    workspace = Kept(workdir)
    yield workspace
    proxy.fault = up
    end_kept(workspace)


def check_without_store(proxy: FaultyProxy, root: Path, project: Path) -> None:
    """Check that changes and what was read before are there, and the rest when the store answers again."""
    assert (root / "d1" / "f1").read_text() == "changed"
    assert (root / "d0" / "f0").read_bytes() == (project / "d0" / "f0").read_bytes()
    assert os.readlink(root / "link") == "big"
    (root / "later").write_text("later")
    with pytest.raises(OSError, match="Input/output error") as failed:
        (root / "big").read_bytes()
    assert failed.value.errno == errno.EIO
    proxy.fault = up
    assert (root / "big").read_bytes() == BIG
    assert (root / "later").read_text() == "later"


def change_and_lose_store(proxy: FaultyProxy, root: Path) -> None:
    (root / "d0" / "f0").read_bytes()
    os.listdir(root / "d2")
    os.stat(root / "d2" / "f3")
    os.readlink(root / "link")
    (root / "d1" / "f1").write_text("changed")
    proxy.fault = down


@pytest.mark.extended
@pytest.mark.parametrize("has_cache", [True, False])
def test_the_keeper_needs_no_answer_of_the_store(
    kept: Kept, proxy: FaultyProxy, project: Path, has_cache: bool
) -> None:
    root = kept.path
    given: dict[str, Any] = {} if has_cache else {"cache_bytes": 0}
    kept.mount(backend=f"overlay:{URL}#one", remote_timeout_s=OUTAGE_S, **given)
    with (root / "d0" / "f1").open("rb", buffering=0) as held:
        change_and_lose_store(proxy, root)
        kept.kill()
        os.chmod(root / "d2" / "f3", 0o600)  # the new daemon knows the file from the one before
        assert os.fstat(held.fileno()).st_size == 2000
        if has_cache:
            check_without_store(proxy, root, project)
        proxy.fault = up
        assert held.read() == (project / "d0" / "f1").read_bytes()
    assert equal(root / "d3", project / "d3")
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
@pytest.mark.parametrize("persist", [True, False])
def test_an_upgrade_needs_no_answer_of_the_store(kept: Kept, proxy: FaultyProxy, project: Path, persist: bool) -> None:
    root = kept.path
    # Without a name it is the newest snapshot, which may be another one by now.
    named = f"{URL}#one" if persist else URL
    given: dict[str, Any] = {} if persist else {"persist": False, "journal_dir": None}
    workspace = kept.mount(backend=f"overlay:{named}", remote_timeout_s=OUTAGE_S, **given)
    with (root / "d0" / "f1").open("rb", buffering=0) as held:
        change_and_lose_store(proxy, root)
        pid = workspace.status().pid
        succeeded(vfsd("upgrade", kept.name))
        assert workspace.status().pid != pid
        check_without_store(proxy, root, project)
        assert held.read() == (project / "d0" / "f1").read_bytes()
    assert workspace.status().source == f"{URL}#one"
    assert equal(root / "d3", project / "d3")
    check_invariants(Workspace.attach(kept.name))


@pytest.mark.extended
def test_a_new_mount_needs_no_answer_of_the_store(kept: Kept, proxy: FaultyProxy, project: Path) -> None:
    given = {"backend": f"overlay:{URL}#one", "remote_timeout_s": OUTAGE_S, "keeper": False}
    workspace = kept.mount(**given)
    change_and_lose_store(proxy, kept.path)
    os.kill(workspace.status().pid, signal.SIGKILL)
    unmount_when_idle(workspace)
    kept.mount(**given)
    check_without_store(proxy, kept.path, project)


@pytest.mark.extended
def test_a_damaged_record_of_the_snapshot_is_not_used(kept: Kept, proxy: FaultyProxy) -> None:
    given = {"backend": f"overlay:{URL}#one", "remote_timeout_s": OUTAGE_S, "keeper": False}
    with kept.mount(**given) as workspace:
        (kept.path / "new").write_text("new")
        unmount_when_idle(workspace)
    record = kept.journal / "below"
    good = record.read_bytes()
    record.write_bytes(good[:40] + bytes([good[40] ^ 1]) + good[41:])
    proxy.fault = down
    with pytest.raises(OSError, match="does not answer"):
        kept.mount(**given)
    proxy.fault = up
    with kept.mount(**given) as workspace:
        assert (kept.path / "new").read_text() == "new"
        assert any("is damaged: the object store is asked" in line for line in complaints(workspace.name))
        unmount_when_idle(workspace)
    assert record.read_bytes() == good
    assert succeeded(vfsd("persisted", "drop", "--journal-dir", kept.journal))
    assert not kept.journal.exists()


# -- two machines -----------------------------------------------------------------------------------
@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_an_index_of_git_is_valid_on_the_next_machine(
    mount: MountIt, proxy: FaultyProxy, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, root = resume(mount)
    assert git(root, "status", "--porcelain") == ""  # writes the index
    (root / "d1" / "f1").write_text("changed")
    pushed = [sys.executable, "-m", "vfsd.cli.main", "push", URL, "--as", f"on-{workdir.name}", "-w", first.path]
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "store"))
    subprocess.run(pushed, check=True, capture_output=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(workdir / "other"))
    _, there = resume(mount, f"on-{workdir.name}")
    proxy.sent_bytes = 0
    assert git(there, "diff-files", "--name-only") == "d1/f1\n"
    assert proxy.sent_bytes < 1 << 20, "contents were read"
    assert git(there, "status", "--porcelain") == " M d1/f1\n"
    assert (there / "d1" / "f1").read_text() == "changed"


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
@pytest.mark.parametrize("kind", ["host", "memory", "overlay"])
def test_an_index_of_git_is_valid_after_the_first_resume(
    mount: MountIt, proxy: FaultyProxy, project: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "store"))
    below = workdir / "below"
    shutil.copytree(project, below, symlinks=True)
    backend = backend_over(kind, below)
    first = mount(backend=backend)
    root = Path(first.path)
    if kind == "memory":
        shutil.copytree(project, root, symlinks=True, dirs_exist_ok=True)
    assert git(root, "status", "--porcelain") == ""  # writes the index
    indexed_s = int(os.stat(root / ".git" / "index").st_ctime)
    wait_until(lambda: int(time.time()) > indexed_s)  # git compares whole seconds
    (root / "d1" / "f1").write_bytes(b"x" * 2000)
    os.utime(root / "d1" / "f1", (1_600_000_000, 1_600_000_000))  # only the ctime shows the change
    numbers = {path.relative_to(root): path.lstat().st_ino for path in root.glob("d*/*")}
    name = f"first-{workdir.name}"
    succeeded(vfsd("push", URL, "--as", name, "-w", first.path))

    _, there = resume(mount, name)
    proxy.requests.clear()
    assert git(there, "diff-files", "--name-only") == "d1/f1\n"
    assert {path.relative_to(there): path.lstat().st_ino for path in there.glob("d*/*")} == numbers
    (there / "new").touch()
    assert (there / "new").lstat().st_ino not in numbers.values()
    assert git(there, "status", "--porcelain") == " M d1/f1\n?? new\n"
    # A change of the mode alone changes the ctime, also here.
    before = os.stat(there / "d2" / "f2").st_ctime_ns
    os.chmod(there / "d2" / "f2", 0o600)
    assert os.stat(there / "d2" / "f2").st_ctime_ns > before
    assert equal(root / "d3", there / "d3")


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_the_cache_is_bounded(mount: MountIt, proxy: FaultyProxy, project: Path, workdir: Path) -> None:
    _, root = resume(mount, cache_bytes=16 << 20)
    for _ in range(2):
        assert equal(root, project)
    used = subprocess.run(["du", "-sk", workdir / "cache" / "vfsd" / "blobs"], capture_output=True, check=True)
    assert int(used.stdout.split()[0]) <= 16 << 10


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_a_cache_that_cannot_be_written_is_named(engine: str, proxy: FaultyProxy, project: Path, workdir: Path) -> None:
    (workdir / "cache").write_text("not a directory")
    place, name = workdir / "complaining", f"{workdir.name}-complaining"
    place.mkdir()
    mounted = vfsd("mount", place, "--from", f"{URL}#one", "--name", name, "--engine", engine)
    succeeded(mounted)
    said = f"the cache {workdir}/cache/vfsd/blobs cannot be written (Not a directory)"
    assert said in mounted.stderr
    assert [said in line for line in complaints(name)] == [True]
    workspace = Workspace.attach(name)
    assert equal(place, project)
    assert workspace.status().cache_failure == "Not a directory"
    assert "cache failure" in succeeded(vfsd("status", "-w", name))
    unmount_when_idle(workspace)


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_without_a_cache_everything_can_be_read(
    mount: MountIt, proxy: FaultyProxy, project: Path, workdir: Path
) -> None:
    _, root = resume(mount, cache_bytes=0)
    assert equal(root, project)
    assert not (workdir / "cache" / "vfsd" / "blobs").exists()


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["native"])
def test_a_prefetch_makes_the_network_unnecessary(mount: MountIt, proxy: FaultyProxy, project: Path) -> None:
    workspace, root = resume(mount, prefetch=True, remote_timeout_s=OUTAGE_S)
    wait_until(lambda: (workspace.status().prefetch or "").startswith("done"))
    proxy.fault = down
    assert equal(root, project)


@pytest.mark.extended
def test_errors_are_one_line_that_says_what_to_do(
    proxy: FaultyProxy, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*words: str) -> str:
        command = [sys.executable, "-m", "vfsd.cli.main", "mount", str(workdir / "m"), *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode in {1, 2}
        # A busy machine may take long to start the daemon.
        lines = [line for line in done.stderr.splitlines() if not line.startswith(f"vfsd: waiting for {URL}")]
        assert len(lines) == 1, done.stderr
        return done.stderr

    (workdir / "m").mkdir()
    # The store of this module may have names of other tests, too.
    assert re.search("has no snapshot two; it has (.*, )?one", failed("--from", f"{URL}#two"))
    assert "no snapshot store here" in failed("--from", f"s3://{BUCKET}/nothing#one")
    assert "no such bucket" in failed("--from", "s3://no-such-bucket/x#one")
    assert "set AWS_SECRET_ACCESS_KEY" in failed("--from", URL, "--store-option", "secret_access_key=x")
    assert "credentials come from the environment" in failed("--from", URL, "--store-option", "endpoint=http://u:x@h")
    assert "lacks the store's place" in failed("--from", "s3://")
    assert "cannot have a user" in failed("--from", "s3://me:secret@bucket/x")
    assert "needs the snapshot's name" in failed("--from", URL, "--persist")
    assert "is not needed" in failed("--from", f"{URL}#one", "--backend", f"host:{workdir}")
    assert "goes with overlay:URL#NAME" in failed("--prefetch")
    assert "has no bucket: write s3://BUCKET/PREFIX" in failed("--from", "s3:///x#one")
    assert "write file:///DIRECTORY" in failed("--from", "file://relative#one")
    assert "write path_style=true or path_style=false" in failed("--from", URL, "--store-option", "path_style=ja")
    for name, content in (("format", b"\x00garbage"), ("names/one/0000000001", b"garbage")):
        with RemoteStore(open_storage(f"{URL}-{name[:5]}", options(proxy.port))) as broken:
            broken.storage.create(name, content).result()
            if name != "format":
                broken.create()
    assert "damaged, or not of a snapshot store: choose another prefix" in failed("--from", f"{URL}-forma#one")
    assert f"`vfsd store check --store {URL}-names` lists all damage" in failed("--from", f"{URL}-names#one")
    assert not (workdir / "typo").exists()
    failed("--from", f"file://{workdir}/typo#one")
    assert not (workdir / "typo").exists(), "a mount made a directory for a store"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "set AWS_ACCESS_KEY_ID" in failed("--from", f"{URL}#one", "--remote-timeout", "2")
