"""`--protect` and `--hide`: every system call that could get around them, as root."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from protocol.store import Store
from protocol.tree import names_in
from protocol.volume import RENAME_EXCHANGE
from tests.mount.conftest import BACKENDS, ENGINES
from tests.mount.programs import succeeded, vfsd
from tests.support.lower_layers import make
from tests.support.policed import (
    HIDDEN,
    HIDDEN_COUNT,
    PROTECTED,
    RAW_HIDDEN,
    RAW_PROTECTED,
    attempts,
    creations,
    error_of,
    fails,
    new,
    policed,
    renameat2,
    state,
)
from tests.support.session_directories import new_directory
from vfsd import Workspace
from vfsd.integrations.mcp.session import Session
from vfsd.integrations.mcp.tools import SERVED_TOOLS

PLACES = [f"{engine}-{backend}" for engine in ENGINES for backend in BACKENDS]


@pytest.fixture(scope="module", params=PLACES)
def shared(request: pytest.FixtureRequest, session_dir: str) -> Iterator[tuple[Workspace, Path]]:
    place = new_directory(session_dir, f"policy-{request.param}")
    with policed(str(request.param), place) as found:
        yield found


@pytest.fixture
def root(shared: tuple[Workspace, Path]) -> Path:
    return Path(shared[0].path)


def test_no_system_call_changes_a_protected_file(root: Path) -> None:
    before = state(root)
    for name in PROTECTED:
        for what, attempt in attempts(root, name).items():
            # Some file systems below know no whiteouts.
            expected = {"EPERM", "EINVAL"} if what == "RENAME_WHITEOUT" else {"EPERM"}
            assert error_of(attempt) in expected, (what, name)
            (root / "new").unlink(missing_ok=True)
        assert state(root) == before, name


def test_a_protected_file_can_be_read_executed_and_mapped(root: Path) -> None:
    assert (root / "src/secret").read_text() == "secret"
    with (root / "src/secret").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as private:
        private[:3] = b"own"  # a private mapping is the program's own memory
    with (root / "src/secret").open("rb") as file:
        fails(errno.EACCES, lambda: mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
    assert (root / "alias").read_text() == "secret"


def test_no_directory_with_something_protected_in_it_is_moved_replaced_or_removed(root: Path) -> None:
    before = state(root)
    for name in ("src", "vendor", "vendor/deep"):
        path = root / name
        fails(errno.EPERM, lambda path=path: path.rename(root / "moved"))
        fails(errno.EPERM, lambda path=path: renameat2(path, root / "empty", RENAME_EXCHANGE))
        fails(errno.EPERM, lambda path=path: renameat2(root / "empty", path, RENAME_EXCHANGE))
        assert error_of(path.rmdir) in {"EPERM", "ENOTEMPTY"}
        assert error_of(lambda path=path: (root / "empty").rename(path)) in {"EPERM", "ENOTEMPTY"}  # type: ignore[misc]
    fails(errno.EPERM, lambda: shutil.rmtree(root / "vendor"))
    assert state(root) == before


def test_nothing_is_made_in_a_protected_directory_or_at_a_protected_path(root: Path) -> None:
    before = state(root)
    for name in ("vendor/new", "new.lock", "src/new.lock"):
        for what, creation in creations(root, root / name).items():
            assert error_of(creation) == "EPERM", (what, name)
    fails(errno.EPERM, lambda: (root / "vendor").chmod(0o700))
    assert state(root) == before


def test_no_symlink_stands_in_for_a_directory_that_a_pattern_names(root: Path) -> None:
    (root / "elsewhere").mkdir(exist_ok=True)
    (root / "pointer").symlink_to("elsewhere")
    fails(errno.EEXIST, lambda: (root / "src").symlink_to("elsewhere"))
    fails(errno.EPERM, lambda: (root / "elsewhere" / "vendor").symlink_to("../elsewhere"))
    fails(errno.EPERM, lambda: (root / "pointer").rename(root / "elsewhere" / "vendor"))
    (root / "pointer").unlink()
    (root / "elsewhere").rmdir()


def test_what_is_hidden_is_absent_for_every_system_call(root: Path) -> None:
    listed = {name for _, directories, files in os.walk(root) for name in (*directories, *files)}
    assert not listed & {".env", "private", "key", "inside", RAW_HIDDEN}
    for name in HIDDEN:
        path = root / name
        for look in (
            path.lstat, path.read_bytes, lambda path=path: os.listxattr(path), lambda path=path: os.readlink(path),
            lambda path=path: os.truncate(path, 0), lambda path=path: path.chmod(0o777), path.unlink,
            lambda path=path: path.rename(root / "shown"), lambda path=path: os.link(path, root / "shown"),
            lambda path=path: os.close(os.open(path, os.O_PATH)),
        ):  # fmt: skip
            fails(errno.ENOENT, look)
    listing = subprocess.run(["find", ".", "-name", "*env"], cwd=root, capture_output=True, text=True, check=False)
    assert ".env" not in listing.stdout.split("/")


def test_every_call_that_makes_a_hidden_name_fails_alike_whether_it_exists_or_not(root: Path) -> None:
    """A directory `private`, and a further name of a hidden file, are where something visible could be made."""
    before = state(root)
    for name in (".env", "empty/.env", "only/.env", "hidden/inside", "private", "envalias", RAW_HIDDEN):
        for what, creation in creations(root, root / name).items():
            assert error_of(creation) == "EPERM", (what, name)
        fails(errno.ENOENT, lambda name=name: renameat2(root / "free", root / name, RENAME_EXCHANGE))  # type: ignore[misc]
    for creation in (creations(root, root / "empty/private")[what] for what in ("mkdir", "rename of a directory")):
        fails(errno.EPERM, creation)
    assert state(root) == before


def test_a_name_that_is_hidden_as_a_directory_only_is_free_for_files(root: Path) -> None:
    path = root / "empty/private"
    path.write_text("a file")
    fails(errno.EEXIST, path.mkdir)
    new(root).rename(path)
    assert path.read_text() == "new"
    path.unlink()


def test_a_directory_with_hidden_entries_is_empty_and_not_removed(root: Path) -> None:
    assert list((root / "only").iterdir()) == []
    fails(errno.ENOTEMPTY, (root / "only").rmdir)


def test_a_directory_is_not_moved_to_where_something_hidden_becomes_visible(root: Path) -> None:
    fails(errno.EPERM, lambda: (root / "hidden").rename(root / "moved"))
    (root / "only").rename(root / "moved")  # .env is hidden there as well
    assert list((root / "moved").iterdir()) == []
    (root / "moved").rename(root / "only")


def test_everything_else_is_as_without_a_policy(root: Path) -> None:
    directory = root / "work"
    directory.mkdir()
    (directory / "a").write_text("a")
    os.link(directory / "a", directory / "b")
    with (directory / "a").open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        shared[:1] = b"A"
        shared.flush()
    assert (directory / "b").read_text() == "A"
    (directory / "b").unlink()
    (directory / "a").rename(directory / "c")
    directory.rename(root / "renamed")
    renameat2(root / "renamed", root / "empty", RENAME_EXCHANGE)
    renameat2(root / "renamed", root / "empty", RENAME_EXCHANGE)
    os.setxattr(root / "renamed", "user.note", b"1")
    descriptor = os.open(root / "renamed" / "c", os.O_RDWR | os.O_TRUNC)
    os.posix_fallocate(descriptor, 0, 100)
    os.close(descriptor)
    shutil.rmtree(root / "renamed")


def test_the_tools_of_agents_respect_it(shared: tuple[Workspace, Path]) -> None:
    workspace, _ = shared
    files = workspace.filesystem
    with pytest.raises(PermissionError):
        files.write("src/secret", "new")
    with pytest.raises(PermissionError):
        files.write(".env", "new")
    for name in ("vendor/lib", "vendor/new"):
        with pytest.raises(PermissionError, match=name):  # not the name of an unfinished file
            files.write(name, "new")
    with pytest.raises(PermissionError):
        files.delete("top.lock")
    with pytest.raises(FileNotFoundError):
        files.read(".env")
    with pytest.raises(FileNotFoundError):
        files.read("envalias")
    found = subprocess.run(
        [sys.executable, "-m", "vfsd.cli.main", "fs", "grep", "TOKEN", "-w", workspace.name],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ".env" not in found.stdout


def test_snapshots_show_nothing_hidden(shared: tuple[Workspace, Path]) -> None:
    workspace, _ = shared
    workspace.snapshot("kept")
    state = Path(workspace.path, ".snapshots", "kept")
    assert (state / "src" / "secret").read_text() == "secret"
    assert (state / RAW_PROTECTED).read_text() == "figure"
    assert not {".env", "private", "envalias", RAW_HIDDEN} & set(os.listdir(state))
    fails(errno.ENOENT, (state / ".env").read_bytes)
    fails(errno.ENOENT, (state / "envalias").read_bytes)
    fails(errno.ENOENT, (state / "private" / "key").read_bytes)
    workspace.drop("kept")


def test_denied_attempts_are_in_the_log(shared: tuple[Workspace, Path]) -> None:
    workspace, _ = shared
    root = Path(workspace.path)
    for act in ((root / "src/secret").unlink, (root / ".env").mkdir, lambda: (root / "alias").write_text("")):
        fails(errno.EPERM, act)
    denied = [change for change in workspace.log() if change.change == "denied"]
    assert [change.attempt for change in denied[-3:]] == ["unlink", "mkdir", "open"]
    assert [change.path for change in denied[-3:-1]] == ["src/secret", ".env"]
    assert denied[-1].path in {"alias", "src/secret"}  # one of its names
    assert all(change.process is not None and change.process.pid == os.getpid() for change in denied[-3:])


# -- what the daemon itself changes and sends -----------------------------------------------------------
def test_an_export_and_a_diff_leave_out_what_is_hidden(shared: tuple[Workspace, Path], tmp_path: Path) -> None:
    workspace, _ = shared
    assert workspace.export(tmp_path / "out.zip").hidden == HIDDEN_COUNT
    listed = subprocess.run(["unzip", "-l", tmp_path / "out.zip"], capture_output=True, text=True, check=True).stdout
    assert "src/secret" in listed
    assert not any(name in listed for name in (".env", "envalias", "private/", "hidden/inside"))


@pytest.mark.extended
def test_what_leaves_the_workspace_says_how_many_names_it_lacks(shared: tuple[Workspace, Path], tmp_path: Path) -> None:
    workspace, _ = shared

    def run(*words: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "vfsd.cli.main", "-w", workspace.name, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    remark = f"vfsd: {HIDDEN_COUNT} hidden names left out: the policy of the workspace hides them\n"
    url = f"file://{tmp_path}/store"
    workspace.snapshot("sent")
    assert json.loads(run("push", url, "--json", "--snapshot", "sent")[0])["hidden"] == HIDDEN_COUNT
    assert run("push", url, "--as", "live")[1].endswith(remark)
    assert run("export", str(tmp_path / "sent.zip"), "--snapshot", "sent")[1].endswith(remark)
    workspace.drop("sent")
    run("pull", f"{url}#live", "--store", str(tmp_path / "pulled"))
    with Store(tmp_path / "pulled") as store:
        (key,) = store.workspaces()
        with store.tree(key, "live") as tree:
            names = set(names_in(tree, b""))
    assert b"alias" in names
    assert not {b".env", b"envalias", b"private", os.fsencode(RAW_HIDDEN)} & names


def test_a_change_by_the_daemon_respects_it_and_changes_nothing(shared: tuple[Workspace, Path], tmp_path: Path) -> None:
    workspace, _ = shared
    root = Path(workspace.path)
    for name in ("src/secret", ".env", "new.lock"):
        content = tmp_path / name.replace("/", "-")
        (content / name).parent.mkdir(parents=True)
        (content / name).write_text("from the archive")
        (content / "imported").write_text("from the archive")
        make("archive", content, tmp_path / f"a-{content.name}.zip")
        before, snapshots = state(root), [each.name for each in workspace.snapshots()]
        with pytest.raises(PermissionError, match="policy"):
            workspace.import_archive(tmp_path / f"a-{content.name}.zip")
        assert state(root) == before
        assert [each.name for each in workspace.snapshots()] == snapshots
    assert any(each.change == "denied" and each.attempt == "import" for each in workspace.log())
    assert "(several paths, or hidden ones)" in succeeded(vfsd("log", "-w", workspace.name))
    shown = anyio.run(SERVED_TOOLS["log"].call, {"limit": 10}, Session(workspace.name), lambda _: None)
    assert "  denied import  (several paths, or hidden ones)  by " in shown


def copied(name: str, root: Path, content: Path) -> Path:
    """A copy of one file with its times, below `content`."""
    copy = content / name
    copy.parent.mkdir(parents=True)
    shutil.copy2(root / name, copy)
    return copy


def test_an_archive_brings_no_other_content_of_the_same_size_and_time(
    shared: tuple[Workspace, Path], tmp_path: Path
) -> None:
    workspace, content = shared[0], tmp_path / "content"
    secret = copied("src/secret", Path(workspace.path), content)
    was = secret.stat()
    secret.write_text("FORGED")
    os.utime(secret, ns=(was.st_atime_ns, was.st_mtime_ns))
    make("archive", content, tmp_path / "forged.zip")
    with pytest.raises(PermissionError, match="policy"):
        workspace.import_archive(tmp_path / "forged.zip")
    assert Path(workspace.path, "src/secret").read_text() == "secret"


def test_an_archive_brings_no_symlink_in_place_of_a_directory_that_a_pattern_names(
    shared: tuple[Workspace, Path], tmp_path: Path
) -> None:
    workspace, content = shared[0], tmp_path / "content"
    content.mkdir()
    (content / "private").symlink_to("free")
    make("archive", content, tmp_path / "symlink.zip")
    with pytest.raises(PermissionError, match="policy"):
        workspace.import_archive(tmp_path / "symlink.zip")


def test_a_name_that_an_archive_gives_to_a_protected_file_is_protected(
    shared: tuple[Workspace, Path], tmp_path: Path
) -> None:
    workspace, content = shared[0], tmp_path / "content"
    root = Path(workspace.path)
    fails(errno.EPERM, lambda: (root / "alias").write_text("x"))  # the daemon knows all names now
    library = copied("vendor/lib", root, content)
    (content / "further").mkdir()
    os.link(library, content / "further/lib")
    make("archive", content, tmp_path / "linked.zip")
    workspace.import_archive(tmp_path / "linked.zip")
    assert (root / "further/lib").stat().st_nlink == 2
    fails(errno.EPERM, lambda: (root / "further/lib").write_text("x"))
    assert (root / "vendor/lib").read_text() == "lib"
    workspace.undo()


def test_a_restore_goes_back_where_nothing_protected_changed(shared: tuple[Workspace, Path]) -> None:
    workspace, _ = shared
    root = Path(workspace.path)
    workspace.snapshot("before")
    (root / "extra").write_text("1")
    workspace.restore("before")
    assert not (root / "extra").exists()
    assert (root / "src/secret").read_text() == "secret"
    workspace.undo()
    assert (root / "extra").read_text() == "1"
    (root / "extra").unlink()
    workspace.drop("before")
