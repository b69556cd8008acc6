"""`vfsd mount --from URL#NAME`: workspaces over a snapshot in an object store.

A real S3 server, behind a proxy that counts requests and bytes, and injects faults.
"""

from __future__ import annotations

import errno
import filecmp
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.store import DirectorySource, Store
from protocol.store.object_store import RemoteStore, open_storage
from tests.mount.conftest import MountIt, check_invariants
from tests.support.s3_server import BUCKET, KEYS, FaultyProxy, options, s3_server
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse
BIG = os.urandom(9 << 20)
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
URL = f"s3://{BUCKET}/team/job"


def git(root: Path, *command: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run([*GIT, *command], cwd=root, capture_output=True, check=True, env=environment).stdout.decode()


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


def equal(left: Path, right: Path) -> bool:
    found = filecmp.dircmp(left, right, ignore=[".snapshots"])
    if found.left_only or found.right_only or found.funny_files:
        return False
    _, different, errors = filecmp.cmpfiles(left, right, found.common_files, shallow=False)
    return not different and not errors and all(equal(left / name, right / name) for name in found.common_dirs)


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


def test_a_workspace_over_it_does_what_every_overlay_does(mount: MountIt, proxy: FaultyProxy, workdir: Path) -> None:
    workspace, root = resume(mount, exec_on_host=True)
    workspace.snapshot("before")
    with (root / "big").open("r+b") as file:
        file.write(b"changed")
    (root / "d1" / "new").write_text("new")
    os.rename(root / "d2", root / "moved")
    assert workspace.diff("before").counts.total >= 3
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
