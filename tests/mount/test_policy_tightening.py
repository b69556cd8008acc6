"""A policy that is tightened while programs run; forks, upgrades, and what each kind of mount does with its policy."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import ENGINES, MountIt, mounted
from tests.support.policed import (
    HIDDEN,
    HIDDEN_COUNT,
    POLICY,
    RAW_HIDDEN,
    creations,
    error_of,
    fails,
    fill,
    policed,
    state,
)
from tests.support.session_directories import new_directory
from vfsd import Workspace


def content(path: Path) -> bytes:
    """The content that a program sees.  After a failed write-back the kernel fails the next close(2), by whomever."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


# -- tightening -----------------------------------------------------------------------------------------
_numbers = itertools.count()


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, session_dir: str) -> Iterator[Workspace]:
    place = new_directory(session_dir, f"tightened-{request.param}")
    with policed(f"{request.param}-memory", place, protect=("nothing",), hide=()) as (workspace, _):
        yield workspace


@pytest.fixture
def own(served: Workspace) -> str:
    """The name of a directory of the test's own, with the content; patterns for it hold nowhere else."""
    name = f"d{next(_numbers)}"
    fill(Path(served.path, name))
    return name


@pytest.fixture
def root(served: Workspace, own: str) -> Path:
    return Path(served.path, own)


def test_tightening_holds_for_files_that_are_open_and_mapped(served: Workspace, own: str, root: Path) -> None:
    descriptor = os.open(root / "src/secret", os.O_RDWR)
    with mmap.mmap(descriptor, 6) as shared:
        shared[:2] = b"SE"
        assert served.policy(protect=[f"{own}/src/secret"]).open_files == (f"{own}/src/secret",)
        assert (root / "src/secret").read_bytes() == b"SEcret"  # written while that was allowed
        fails(errno.EPERM, lambda: os.pwrite(descriptor, b"x", 0))
        fails(errno.EPERM, lambda: os.ftruncate(descriptor, 0))
        fails(errno.EPERM, lambda: os.posix_fallocate(descriptor, 0, 100))
        with (root / "free").open("rb") as free:
            fails(errno.EPERM, lambda: os.copy_file_range(free.fileno(), descriptor, 4))
        shared[:2] = b"XX"
        deadline = time.monotonic() + 30
        while content(root / "src/secret") != b"SEcret":
            assert time.monotonic() < deadline, "a page of a refused write stays"
            time.sleep(0.05)
    with contextlib.suppress(OSError):
        os.close(descriptor)
    assert content(root / "src/secret") == content(root / "alias") == b"SEcret"
    assert served.policy().open_files == ()


def test_tightening_hides_what_the_kernel_has_cached(served: Workspace, own: str, root: Path) -> None:
    descriptor = os.open(root / ".env", os.O_RDONLY)
    inside = os.open(root / "private", os.O_PATH)
    assert (root / "envalias").read_text() == (root / "src/.env").read_text() == "TOKEN"
    os.stat("key", dir_fd=inside)
    served.snapshot(own)
    kept = Path(served.path, ".snapshots", own, own)
    assert (kept / ".env").read_text() == "TOKEN"
    patterns = (f"{own}/**/.env", f"/{own}/private/", f"{own}/r?serv{os.fsdecode(bytes([0xE9]))}")
    served.policy(hide=patterns)
    for path in (*(root / name for name in (*HIDDEN, "only/.env")), kept / ".env"):
        if path != root / "hidden/inside":
            fails(errno.ENOENT, path.lstat)
    fails(errno.ESTALE, lambda: os.pread(descriptor, 5, 0))
    assert error_of(lambda: os.stat("key", dir_fd=inside)) in {"ENOENT", "ESTALE"}
    os.close(descriptor)
    os.close(inside)
    for name in (".env", "private", "envalias", RAW_HIDDEN):
        for what, creation in creations(root, root / name).items():
            assert error_of(creation) == "EPERM", (what, name)
    assert served.policy().hide[-3:] == patterns


def test_a_restore_to_before_the_tightening_is_refused(served: Workspace, own: str, root: Path) -> None:
    served.snapshot(own)
    (root / "src/secret").write_text("later")
    (root / "free").write_text("later")
    served.policy(protect=[f"{own}/src/secret"])
    before, snapshots = state(root), served.snapshots()
    for dry_run in (True, False):
        with pytest.raises(PermissionError, match=f"{own}/src/secret"):
            served.restore(own, dry_run=dry_run)
        assert state(root) == before
        assert served.snapshots() == snapshots
    free = f"{own}/free"
    assert [change.path for change in served.restore(own, [free], dry_run=True).changes] == [free]
    served.restore(own, [free])
    assert (root / "free").read_text() == "free"
    assert (root / "src/secret").read_text() == "later"


def test_a_policy_is_never_loosened(served: Workspace, own: str, root: Path) -> None:
    before = served.policy().protect
    for _ in range(2):
        served.policy(protect=[f"{own}/src/secret", f"{own}/*.lock"])
    assert served.policy().protect == (*before, f"{own}/src/secret", f"{own}/*.lock")
    fails(errno.EINVAL, lambda: served.policy(protect=[f"!{own}/top.lock"]))
    for name in ("src/secret", "top.lock"):
        fails(errno.EPERM, (root / name).unlink)


def test_a_mount_without_a_policy_cannot_be_tightened(mount: MountIt) -> None:
    workspace = mount()
    assert workspace.policy() == type(workspace.policy())()
    fails(errno.EOPNOTSUPP, lambda: workspace.policy(protect=["x"]))


def test_a_fork_has_the_policy_of_its_source(workdir: Path) -> None:
    place = workdir / "f"
    place.mkdir()
    with policed("native-memory", place) as (workspace, _):
        workspace.policy(protect=["free"])
        with workspace.fork(workdir / "fork") as fork:
            root = Path(fork.path)
            fails(errno.ENOENT, (root / ".env").lstat)
            fails(errno.EPERM, lambda: (root / "src/secret").write_text("x"))
            fails(errno.EPERM, lambda: (root / "free").write_text("x"))
            assert fork.policy() == workspace.policy()
            (root / "src/new").write_text("of the fork")
            workspace.policy(protect=["src/new"])
            for dry_run in (True, False):
                with pytest.raises(PermissionError, match="src/new"):
                    workspace.merge(fork, dry_run=dry_run)


@pytest.mark.extended
def test_a_snapshot_and_a_fork_on_disk_leave_nothing_out(workdir: Path) -> None:
    """What stays on this machine is under the same policy, so it is whole."""
    place = workdir / "h"
    place.mkdir()
    with policed("native-host", place, store=workdir / "store") as (workspace, below):
        workspace.policy(hide=["free"])
        files = {Path(at, name).stat().st_ino for at, _, names in os.walk(below) for name in names}
        assert workspace.snapshot("kept").files == len(files)
        with workspace.fork(workdir / "fork") as fork:
            root = Path(fork.path)
            fails(errno.ENOENT, (root / ".env").lstat)
            fails(errno.ENOENT, (root / "free").lstat)
            fails(errno.EPERM, lambda: (root / "src/secret").write_text("x"))
            fails(errno.EPERM, (root / "private").mkdir)
            assert fork.policy() == workspace.policy()
            assert fork.export(workdir / "fork.zip").hidden == HIDDEN_COUNT + 2  # free and src/free


def test_an_unmount_with_an_export_loses_nothing_that_is_hidden(workdir: Path) -> None:
    place = workdir / "e"
    place.mkdir()
    with policed("native-overlay", place) as (workspace, below):
        command = [sys.executable, "-m", "vfsd.cli.main", "unmount", workspace.name, "--export"]
        (Path(workspace.path) / "notes").write_text("notes")
        workspace.policy(hide=["notes"])
        refused = subprocess.run([*command, workdir / "a.zip"], capture_output=True, text=True, check=False)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 2), refused.stderr
        assert f"lacks {HIDDEN_COUNT + 1} names that the policy hides" in refused.stderr
        assert "is still mounted" in refused.stderr
        assert os.path.ismount(workspace.path)
        assert (below / ".env").exists()


def test_a_backend_that_waits_for_its_answers_is_held_as_well(workdir: Path) -> None:
    below = workdir / "below"
    below.mkdir()
    fill(below)
    options: dict[str, Any] = {"workdir": str(below), "store": workdir / "store", **POLICY}
    with mounted(workdir / "x", backend=f"exec:{sys.executable}", name=f"{workdir.name}-x", **options) as workspace:
        root = Path(workspace.path)
        for name in ("src/secret", "alias", "top.lock", "vendor/lib"):
            fails(errno.EPERM, lambda name=name: (root / name).write_text("x"))  # type: ignore[misc]
            fails(errno.EPERM, (root / name).unlink)
            fails(errno.EPERM, lambda name=name: (root / "free").rename(root / name))  # type: ignore[misc]
        for name in (".env", "envalias", "private/key"):
            fails(errno.ENOENT, (root / name).read_text)
        fails(errno.EPERM, (root / ".env").mkdir)
        fails(errno.EPERM, lambda: (root / "src").rename(root / "moved"))
        (root / "empty").rename(root / "moved")
        workspace.snapshot("kept")
        workspace.policy(protect=["free"])
        (below / "free").write_text("outside")
        with pytest.raises(PermissionError, match="policy"):
            workspace.restore("kept")
        assert (below / "free").read_text() == "outside"
        assert [each.name for each in workspace.snapshots()] == ["kept"]


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["memory", "host", "exec"])
def test_a_pattern_for_all_dotfiles_is_not_for_the_names_under_which_vfsd_writes(workdir: Path, backend: str) -> None:
    (below := workdir / "below").mkdir()
    options: dict[str, Any] = {"hide": [".*"], "protect": [".?*"]}
    if backend != "memory":
        options["store"] = workdir / "store"
    if backend == "exec":
        options |= {"backend": f"exec:{sys.executable}", "workdir": str(below)}
    elif backend == "host":
        options["backend"] = f"host:{below}"
    with mounted(workdir / "x", name=f"{workdir.name}-x", **options) as workspace:
        root = Path(workspace.path)
        workspace.filesystem.write("file", "written")
        (root / "link").symlink_to("file")
        (root / "d").mkdir()
        os.link(root / "file", root / "d/linked")
        workspace.snapshot("one")
        workspace.export(workdir / "one.zip")
        for name in ("link", "d/linked", "file"):
            (root / name).unlink()
        assert workspace.restore("one").problems == {}
        assert (root / "d/linked").read_text() == (root / "link").read_text() == "written"
        assert (root / "file").stat().st_nlink == 2
        workspace.undo()
        assert workspace.import_archive(workdir / "one.zip").problems == {}
        assert (root / "link").read_text() == "written"
        fails(errno.EPERM, (root / "d/.own").touch)
        fails(errno.EPERM, (root / ".vfsd-restore").touch)
        (root / "d").rename(root / "e")
        assert sorted(os.listdir(root)) == ["e", "file", "link"]


@pytest.mark.extended
def test_an_upgraded_daemon_has_the_policy_with_what_was_added(workdir: Path) -> None:
    with Workspace.mount(workdir / "u", name=f"{workdir.name}-u", protect=["nothing"]) as workspace:
        root = Path(workspace.path)
        (root / "kept").write_text("kept")
        for name in ("gone", RAW_HIDDEN):
            (root / name).write_text("gone")
        hide = ("gone", RAW_HIDDEN[:-1] + "?")
        workspace.policy(protect=["kept"], hide=hide)
        subprocess.run([sys.executable, "-m", "vfsd.cli.main", "upgrade", workspace.name], check=True)
        assert workspace.policy().hide == hide
        fails(errno.EPERM, lambda: (root / "kept").write_text("x"))
        for name in ("gone", RAW_HIDDEN):
            fails(errno.ENOENT, (root / name).lstat)


@pytest.mark.extended
@pytest.mark.parametrize(
    "steps", [("kill", "kill"), ("upgrade", "kill", "kill"), ("kill", "upgrade", "kill")], ids="-".join
)
def test_what_was_added_survives_the_daemon_of_a_host_directory(workdir: Path, steps: tuple[str, ...]) -> None:
    (workdir / "below").mkdir()
    options: dict[str, Any] = {"backend": f"host:{workdir / 'below'}", "store": workdir / "store", "hide": ["nothing"]}
    with Workspace.mount(workdir / "k", name=f"{workdir.name}-k", **options) as workspace:
        root = Path(workspace.path)
        (root / "gone").write_text("gone")
        (root / "kept").write_text("kept")
        workspace.policy(protect=["kept"])
        workspace.policy(hide=["gone", os.fsdecode(b"caf\xe9")])
        expected = workspace.policy()
        for step in steps:
            if step == "upgrade":
                workspace.upgrade()
            else:
                os.kill(workspace.status().pid, signal.SIGKILL)
            assert os.listdir(root) == ["kept"]  # the next daemon answers
            fails(errno.EPERM, (root / "kept").unlink)
            assert workspace.policy() == expected
        with workspace.fork(workdir / "fork") as fork:
            assert fork.policy() == expected
        assert (workdir / "below" / "gone").exists()


def test_too_many_patterns_are_refused(mount: MountIt) -> None:
    with pytest.raises(ValueError, match="1,001 patterns"):
        mount(hide=[f"name-{number}" for number in range(1001)])
    workspace = mount(hide=[f"name-{number}" for number in range(1000)])
    fails(errno.EINVAL, lambda: workspace.policy(hide=["one-more"]))
    fails(errno.EPERM, lambda: Path(workspace.path, "name-999").touch())


def test_what_an_overlay_excludes_is_hidden_under_every_name(workdir: Path) -> None:
    place = workdir / "o"
    place.mkdir()
    with policed("native-overlay", place, hide=(), protect=(), exclude=(".env", "private/")) as (workspace, below):
        root = Path(workspace.path)
        fails(errno.ENOENT, (root / ".env").lstat)
        fails(errno.EPERM, lambda: (root / ".env").write_text("x"))
        assert workspace.policy().hide == (".env", "private/")
        for what, creation in creations(root, root / "private").items():  # else an apply would replace the directory
            assert error_of(creation) == "EPERM", what
        assert (below / ".env").read_text() == "TOKEN"
        assert (below / "private/key").read_text() == "key"


def test_an_apply_does_not_write_what_is_protected_below(workdir: Path) -> None:
    place = workdir / "a"
    place.mkdir()
    with policed("native-overlay", place) as (workspace, below):
        root = Path(workspace.path)
        (root / "free").write_text("changed")
        (root / "src/free").write_text("changed")
        workspace.policy(protect=["src/free"])
        with pytest.raises(PermissionError, match="src/free"):
            workspace.apply()
        assert (below / "free").read_text() == (below / "src/free").read_text() == "free"
        workspace.apply(["free"])
        assert (below / "free").read_text() == "changed"


def test_with_a_write_back_cache_no_refused_page_stays(workdir: Path) -> None:
    place = workdir / "w"
    place.mkdir()
    options = {"protect": ("nothing",), "hide": (), "cache": "writeback"}
    with policed("native-memory", place, **options) as (workspace, _):
        root = Path(workspace.path)
        descriptor = os.open(root / "src/secret", os.O_RDWR)
        os.write(descriptor, b"SE")
        workspace.policy(protect=["src/secret"])
        assert (root / "src/secret").read_bytes() == b"SEcret"
        with contextlib.suppress(PermissionError):  # at the write, if the page was dropped already
            os.pwrite(descriptor, b"XX", 0)
            os.fsync(descriptor)
        with contextlib.suppress(PermissionError):
            os.close(descriptor)
        deadline = time.monotonic() + 30
        while content(root / "src/secret") != b"SEcret":
            assert time.monotonic() < deadline, "a page of a refused write stays"
            time.sleep(0.05)
        fails(errno.EPERM, lambda: (root / "src/secret").write_bytes(b"x"))
        (root / "free").write_text("still works")


def test_the_policy_survives_the_daemon(workdir: Path) -> None:
    options: dict[str, Any] = {"persist": True, "journal_dir": workdir / "journal", "name": f"{workdir.name}-k"}
    with Workspace.mount(workdir / "k", protect=["*.lock"], hide=["private/"], **options) as workspace:
        root = Path(workspace.path)
        (root / "work/src").mkdir(parents=True)
        for name in ("work/free", "work/src/free", "work/src/secret"):
            (root / name).write_text(name.rpartition("/")[2])
        os.link(root / "work/src/secret", root / "work/alias")
        command = [sys.executable, "-m", "vfsd.cli.main", "-w", workspace.name, "--json", "policy"]
        raw = os.fsdecode(b"caf\xe9")
        (root / raw).write_text("raw")
        words = ["--protect", "free", "--protect", "secret", "--hide", "work/src/free", "--hide", raw]
        answer = json.loads(subprocess.run([*command, *words], capture_output=True, check=True).stdout)
        assert answer["hide"] == ["private/", "work/src/free", r"caf\xe9"]
        expected = workspace.policy()
        os.kill(workspace.pid, signal.SIGKILL)
        assert (root / "work/src/secret").read_text() == "secret"  # the next daemon answers
        for name in ("work/free", "work/alias", "work/src/secret"):
            fails(errno.EPERM, (root / name).unlink)
        fails(errno.ENOENT, (root / "work/src/free").lstat)
        fails(errno.ENOENT, (root / "work/private").lstat)
        fails(errno.ENOENT, (root / raw).lstat)
        fails(errno.EPERM, (root / "work/private").mkdir)
        assert workspace.policy() == expected
    # The next mount has the policy that its own options give, and says what it lacks.
    again = subprocess.run(
        [sys.executable, "-m", "vfsd.cli.main", "mount", workdir / "k", "--name", options["name"], "--persist",
         "--journal-dir", options["journal_dir"], "--hide", "private/"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert r"--protect *.lock --protect free --protect secret --hide work/src/free --hide caf\xe9" in again.stderr
    with mounted_already(options["name"]) as workspace:
        assert (Path(workspace.path) / "work/free").read_text() == "free"
        assert workspace.policy().hide == ("private/",)


@contextmanager
def mounted_already(name: str) -> Iterator[Workspace]:
    workspace = Workspace.attach(name)
    try:
        yield workspace
    finally:
        workspace.unmount(lazy=True)
