"""Workspaces over an archive or a stored snapshot: remounts, forks, crashes, collections, a layer that fails."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.store import DirectorySource, Store
from tests.mount.conftest import MountIt, check_invariants
from tests.mount.programs import git, succeeded, vfsd
from tests.support import lower_layers
from tests.support.lower_layers import Layer
from tests.support.unmounting import unmount_when_idle
from vfsd.client.arguments import mount_options
from vfsd.client.connection import daemon_end
from vfsd.client.launch import launch, log_path
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.workspaces(engines=["native"])

BIG = os.urandom(3 << 20)
Below = Callable[[Path], str]


@pytest.fixture
def project(workdir: Path) -> Path:
    """A repository whose files are older than its index, so that git trusts their times."""
    place = workdir / "project"
    (place / "src").mkdir(parents=True)
    (place / "src" / "big").write_bytes(BIG)
    (place / "README").write_text("read me")
    (place / "link").symlink_to("README")
    for path in (place / "src" / "big", place / "README"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "all")
    return place


@pytest.fixture
def store(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "store"))
    return workdir / "store"


@pytest.fixture
def backend(layer: Layer, project: Path, store: Path, workdir: Path) -> str:
    """The backend string of a layer with the content of `project`."""
    if layer == "archive":
        lower_layers.make("archive", project, workdir / "layer.zip")
        return f"overlay:{workdir / 'layer.zip'}"
    with Store(store) as opened:
        opened.take(f"host:{project}", "v1", DirectorySource(str(project)))
    return f"overlay:snapshot:v1@{project}"


@pytest.mark.extended
@pytest.mark.parametrize("is_on_directory", [False, True])
def test_the_index_of_git_is_valid_at_the_next_mount(
    mount: MountIt, backend: str, project: Path, workdir: Path, is_on_directory: bool
) -> None:
    if is_on_directory:
        backend = f"overlay:{project}"
    index = workdir / "index"
    for number in range(2):
        workspace = mount(backend=backend)
        root = Path(workspace.path)
        if number == 0:
            os.environ["GIT_INDEX_FILE"] = str(index)
            try:
                git(root, "read-tree", "HEAD")
                git(root, "update-index", "--refresh")
            finally:
                del os.environ["GIT_INDEX_FILE"]
        else:
            (root / "other").touch()
            list(os.walk(root / ".git"))  # looks files up in another order
        os.environ["GIT_INDEX_FILE"] = str(index)
        try:
            # Lists files whose stat data differ from the index, and reads no content to find out why.
            assert git(root, "diff-files") == ""
        finally:
            del os.environ["GIT_INDEX_FILE"]
        check_invariants(workspace)


@pytest.mark.extended
def test_a_workspace_over_a_layer_does_what_one_over_a_directory_does(
    mount: MountIt, backend: str, workdir: Path
) -> None:
    workspace = mount(backend=backend, exec_on_host=True, max_bytes=8 << 20)
    root = Path(workspace.path)
    assert (root / "src" / "big").read_bytes() == BIG
    assert git(root, "status", "--short") == ""
    workspace.snapshot("before")
    assert workspace.executor.run(["sh", "-c", "echo changed >> README; rm link; ln README hard"]).exit_status == 0
    assert workspace.diff("before").counts.total >= 3
    workspace.export(workdir / "out.zip")
    workspace.restore("before")
    assert git(root, "status", "--short") == ""
    with pytest.raises(OSError, match="No space"):
        (root / "much").write_bytes(bytes(9 << 20))
    (root / "much").unlink()
    (root / "README").write_text("again")
    with pytest.raises(OSError, match="vfsd export") as caught:
        workspace.apply()
    assert caught.value.errno == errno.EOPNOTSUPP
    workspace.discard()
    assert (root / "README").read_text() == "read me"
    assert str(workspace.status().backend) == backend
    again = mount(backend=f"overlay:{workdir / 'out.zip'}")
    assert (Path(again.path) / "README").read_text() == "read mechanged\n"


@pytest.mark.extended
def test_a_fork_reads_the_layer_of_its_source_after_that_has_ended(
    workdir: Path, backend: str, store: Path, layer: Layer
) -> None:
    (workdir / "source").mkdir()
    source = Workspace.mount(workdir / "source", backend, name="layer-source", engine="native")
    fork = source.fork(workdir / "fork", name="layer-fork")
    try:
        with open(workdir / "source" / "src" / "big", "rb") as one, open(workdir / "fork" / "src" / "big", "rb") as two:
            for at in range(0, len(BIG), 500_000):  # in turns: they share a file description
                assert one.read(500_000) == BIG[at : at + 500_000] == two.read(500_000)
    finally:
        unmount_when_idle(source)
    try:
        if layer == "snapshot":
            with Store(store) as opened:
                opened.drop(f"host:{workdir / 'project'}", "v1")
                opened.collect_garbage()
        assert git(workdir / "fork", "status", "--short") == ""
        assert (workdir / "fork" / "README").read_text() == "read me"
    finally:
        check_invariants(fork)
        unmount_when_idle(fork)


def test_a_collection_frees_the_snapshot_of_a_daemon_that_was_killed(workdir: Path, project: Path, store: Path) -> None:
    with Store(store) as opened:
        opened.take(f"host:{project}", "v1", DirectorySource(str(project)))
        (workdir / "m").mkdir()
        workspace = Workspace.mount(workdir / "m", "overlay:snapshot:v1", name="killed-layer", engine="native")
        opened.drop(f"host:{project}", "v1")
        assert opened.collect_garbage().freed_contents == 0
        assert (workdir / "m" / "src" / "big").read_bytes() == BIG
        with daemon_end(workspace.status().pid) as end:
            os.kill(workspace.status().pid, signal.SIGKILL)
            end()
        assert opened.collect_garbage().kept_contents == 0
    succeeded(vfsd("unmount", "killed-layer", "--discard"))


def test_an_archive_that_fails_later_is_eio_in_the_log_and_the_changes_stay(workdir: Path, project: Path) -> None:
    archive = workdir / "layer.zip"
    lower_layers.make("archive", project, archive)
    (workdir / "m").mkdir()
    workspace = Workspace.mount(workdir / "m", f"overlay:{archive}", name="failing-layer", engine="native")
    try:
        (workdir / "m" / "new").write_text("kept")
        os.truncate(archive, 1000)
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output error"):
                (workdir / "m" / "src" / "big").read_bytes()
        assert (workdir / "m" / "new").read_text() == "kept"
        workspace.snapshot("after")
        log = Path(log_path(workspace.name)).read_text()
        assert log.count("cannot be read") == 1
        assert "Traceback" not in log
    finally:
        unmount_when_idle(workspace)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("overlay:{}/missing.zip", "there is no such archive"),
        ("overlay:{}/fifo.zip", "not a regular file"),
        ("overlay:{}/text.zip", "not a ZIP archive"),
        ("overlay:snapshot:none", "no workspace has a snapshot 'none' in the store"),
        ("overlay:snapshot:none@{}", "has no snapshot 'none' in the store"),
        ("overlay:snapshot:v1", "2 workspaces have a snapshot v1"),
        ("overlay:{}/missing", "no such directory"),
    ],
)
def test_a_layer_that_cannot_be_opened_is_one_line(
    workdir: Path, project: Path, store: Path, backend: str, message: str
) -> None:
    os.mkfifo(workdir / "fifo.zip")
    (workdir / "text.zip").write_text("text" * 100)
    with Store(store) as opened:
        for key in ("host:/one", "host:/two"):
            opened.take(key, "v1", DirectorySource(str(project / "src")))
    (workdir / "m").mkdir()
    with pytest.raises((OSError, ValueError)) as caught:
        launch(mount_options(workdir / "m", backend.format(workdir)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_layer_that_takes_too_much_of_the_memory_limit_is_refused(workdir: Path, project: Path, store: Path) -> None:
    with Store(store) as opened:
        opened.take(f"host:{project}", "v1", DirectorySource(str(project)))
    (workdir / "m").mkdir()
    with pytest.raises(OSError, match=r"use --max-memory \d+M") as refused:
        launch(mount_options(workdir / "m", "overlay:snapshot:v1", max_memory=8 << 20))
    (advised,) = re.findall(r"--max-memory (\d+)M", str(refused.value))
    with Workspace.mount(workdir / "m", "overlay:snapshot:v1", max_memory=int(advised) << 20):
        (workdir / "m" / "new").write_bytes(BIG)
        assert (workdir / "m" / "src" / "big").read_bytes() == BIG
