"""`--frozen`: an overlay over a snapshot of its directory, and applies that merge with what changed there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import click.testing
import pytest

from protocol.store import Store
from tests.mount.conftest import Fork, MountIt, forking, mounted, socket_of
from tests.support.host_directories import mounted_tmpfs
from tests.support.rights import need_root
from tests.support.seeds import campaign_seed
from tests.support.waiting import wait_until
from vfsd.cli.main import cli
from vfsd.client.arguments import mount_options
from vfsd.client.connection import ControlClient, daemon_end
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_record

pytestmark = pytest.mark.parametrize("engine", ["native"], indirect=True)
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
LINES = "".join(f"{number}\n" for number in range(20))


def git(place: Path, *words: str, status: int | None = 0) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run([*GIT, *words], cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert status in {None, done.returncode}, (words, done.stdout, done.stderr)
    return done.stdout


def vfsd(*words: str, status: int = 0) -> tuple[str, str]:
    result = click.testing.CliRunner().invoke(cli, [*words])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout, result.stderr


def contents(place: Path) -> dict[str, str]:
    """The text of each file, by path; without git's."""
    files = [path for path in place.rglob("*") if path.is_file() and ".git" not in path.relative_to(place).parts]
    return {str(path.relative_to(place)): path.read_text() for path in files}


def bases(directory: Path) -> list[str]:
    """The names of the snapshots of `directory` that are kept for frozen overlays, or for an apply."""
    with Store() as store:
        names = [info.name for info in store.snapshots(f"host:{directory}")]
    return [name for name in names if not name.startswith("safety-")]


@pytest.fixture
def project(directory: Path) -> Path:
    (directory / "text").write_text(LINES)
    (directory / "gone").write_text("gone")
    (directory / "sub").mkdir()
    (directory / "sub" / "file").write_text("file")
    (directory / "name").write_text("linked")
    os.link(directory / "name", directory / "other")
    os.mkfifo(directory / "pipe")
    return directory


@pytest.fixture
def frozen(workdir: Path, project: Path, engine: str) -> Iterator[Workspace]:
    (workdir / "m").mkdir()
    with mounted(workdir / "m", backend=f"overlay:{project}", frozen=True, engine=engine) as workspace:
        assert bases(project) == [f"frozen-{workspace.name}-1"]
        yield workspace
    assert bases(project) == []


def is_unsaved(workspace: Workspace) -> bool:
    with ControlClient(socket_of(workspace)) as client:
        return bool(client.call("unsaved").unsaved)


def test_what_changes_in_the_directory_is_not_shown(frozen: Workspace, project: Path) -> None:
    root = Path(frozen.path)
    before = contents(root)
    (project / "text").write_text("changed")
    (project / "gone").unlink()
    (project / "new").write_text("new")
    (project / "sub").rename(project / "moved")
    (project / "name").write_text("written in place")
    assert contents(root) == before
    assert (root / "name").samefile(root / "other")
    assert (root / "pipe").is_fifo()
    assert frozen.diff().changes == ()
    (root / "gone").write_text("still here")
    assert [change.path for change in frozen.diff().changes] == ["gone"]
    frozen.discard()
    assert contents(root) == before
    assert frozen.status().frozen


def test_an_apply_merges_as_git_does(mount: MountIt, directory: Path, workdir: Path) -> None:
    """The oracle is a repository with a branch for the directory and one for the workspace."""
    seed = campaign_seed()
    rng = random.Random(seed)
    for number in range(4):
        (directory / f"f{number}").write_text(LINES)
    oracle = workdir / "oracle"
    oracle.mkdir()
    git(oracle, "init", "-q", "-b", "directory")
    workspace = mount(backend=f"overlay:{directory}", frozen=True)
    sides = {"directory": directory, "workspace": Path(workspace.path)}
    commit(oracle, "directory", directory, is_new=True)
    git(oracle, "branch", "workspace")
    for step in range(3):
        for branch, place in sides.items():
            for _ in range(rng.randrange(3)):
                edit(rng, place, f"{branch} {step}")
            commit(oracle, branch, place)
        shown = contents(sides["workspace"])
        git(oracle, "checkout", "-q", "directory")
        git(oracle, "merge", "-q", "-m", "merged", "workspace", status=None)
        conflicts = set(git(oracle, "diff", "--name-only", "--diff-filter=U").split())
        before = contents(directory)
        applied = workspace.apply()
        assert set(applied.conflicts) == conflicts, seed
        assert applied.merged
        if conflicts:
            assert contents(directory) == before, seed
            assert workspace.apply(conflicts="markers").applied
            copy(directory, oracle)
            git(oracle, "add", "-A")
            git(oracle, "commit", "-qm", "resolved", "--allow-empty")
        assert contents(directory) == contents(oracle), seed
        assert contents(sides["workspace"]) == shown, seed
        assert workspace.diff().changes == (), seed
        assert workspace.apply().counts.total == 0, seed


def edit(rng: random.Random, place: Path, text: str) -> None:
    path = place / f"f{rng.randrange(5)}"
    if not path.exists():
        path.write_text(f"made by {text}\n" * 9)
        return
    lines = path.read_text().splitlines()
    if rng.random() < 0.15 or not lines:
        path.unlink()
        return
    lines[rng.randrange(len(lines))] = f"{text}, {rng.random()}"
    path.write_text("".join(f"{line}\n" for line in lines))


def copy(source: Path, target: Path) -> None:
    wanted = contents(source)
    for name in contents(target).keys() - wanted:
        (target / name).unlink()
    for name, text in wanted.items():
        (target / name).write_text(text)


def commit(oracle: Path, branch: str, place: Path, *, is_new: bool = False) -> None:
    if not is_new:
        git(oracle, "checkout", "-q", branch)
    copy(place, oracle)
    git(oracle, "add", "-A")
    git(oracle, "commit", "-qm", branch, "--allow-empty")


def test_conflicts_are_named_and_decided(frozen: Workspace, project: Path) -> None:
    root = Path(frozen.path)
    (project / "text").write_text(LINES.replace("7\n", "directory\n"))
    (root / "text").write_text(LINES.replace("7\n", "workspace\n").replace("15\n", "both\n"))
    (root / "gone").unlink()
    (project / "gone").write_text("kept")
    (root / "sub" / "more").write_text("more")
    before = contents(project)
    output, errors = vfsd("-w", frozen.name, "apply", status=1)
    assert output == ""
    assert "gone is in conflict (delete/modify)" in errors
    assert "text is in conflict (content)" in errors
    assert "2 conflicts in" in errors
    assert contents(project) == before
    vfsd("-w", frozen.name, "apply", "--dry-run", "--conflicts", "theirs", status=1)
    assert contents(project) == before
    assert "text" in vfsd("-w", frozen.name, "conflicts")[1]
    vfsd("-w", frozen.name, "apply", "sub")
    assert contents(project) == {**before, "sub/more": "more"}
    assert {change.path for change in frozen.diff().changes} == {"gone", "text"}
    vfsd("-w", frozen.name, "apply", "gone", "--conflicts", "ours")
    assert (project / "gone").read_text() == "kept"
    vfsd("-w", frozen.name, "apply", "--conflicts", "markers")
    assert "<<<<<<< ours\ndirectory\n=======\nworkspace\n>>>>>>> theirs\n" in (project / "text").read_text()
    assert "\nboth\n" in (project / "text").read_text()
    assert frozen.diff().changes == ()
    assert not is_unsaved(frozen)


def test_one_name_of_a_file_is_applied_alone(frozen: Workspace, project: Path) -> None:
    root = Path(frozen.path)
    (root / "name").write_text("both names")
    assert frozen.apply([root / "name"]).applied
    assert ((project / "name").read_text(), (project / "other").read_text()) == ("both names", "linked")
    assert frozen.apply().applied
    assert (project / "name").samefile(project / "other")
    assert (project / "other").read_text() == "both names"
    assert frozen.diff().changes == ()


def test_a_path_in_new_directories_is_applied_alone(frozen: Workspace, project: Path) -> None:
    deep = Path(frozen.path) / "new" / "deep"
    deep.mkdir(parents=True)
    for name in ("one", "two"):
        (deep / name).write_text(name)
    before = contents(project)
    assert frozen.apply([deep / "one"]).applied
    assert contents(project) == {**before, "new/deep/one": "one"}
    assert [change.path for change in frozen.diff().changes] == ["new/deep/two"]
    assert is_unsaved(frozen)
    (project / "new" / "deep" / "one").write_text("changed since")
    assert frozen.apply().applied
    assert contents(project) == {**before, "new/deep/one": "changed since", "new/deep/two": "two"}
    assert not is_unsaved(frozen)


def test_a_repository_that_both_changed_gets_the_branches(mount: MountIt, directory: Path) -> None:
    git(directory, "init", "-q", "-b", "main")
    (directory / "text").write_text(LINES)
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "first")
    workspace = mount(backend=f"overlay:{directory}", frozen=True)
    root = Path(workspace.path)
    for place, old, new in ((directory, "\n3\n", "\nthree\n"), (root, "15\n", "fifteen\n")):
        (place / "text").write_text(LINES.replace(old, new))
        git(place, "commit", "-qam", f"by {place.name}")
    assert git(root, "status", "--porcelain") == ""
    applied = workspace.apply()
    assert list(applied.repositories) == [".git"]
    assert (directory / "text").read_text() == LINES.replace("\n3\n", "\nthree\n").replace("15\n", "fifteen\n")
    assert git(directory, "log", "--format=%s", f"refs/vfsd/{workspace.name}/main").split("\n")[0] == (
        f"by {root.name}"
    )
    assert {change.path.split("/")[0] for change in workspace.diff().changes} == {".git"}


def test_what_is_written_in_the_directory_during_an_apply_stays(frozen: Workspace, project: Path) -> None:
    root, log = Path(frozen.path), project / "log"
    log.write_text("")
    stop, written = threading.Event(), 0

    def write() -> None:
        nonlocal written
        while not stop.is_set():
            with log.open("a") as file:
                file.write(f"{written}\n")
            written += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            (root / "text").write_text(f"apply {number}\n")
            (root / "sub" / f"n{number}").write_text("n")
            assert frozen.apply().applied
            assert (project / "text").read_text() == f"apply {number}\n"
    finally:
        stop.set()
        writer.join()
    assert log.read_text() == "".join(f"{number}\n" for number in range(written))


def test_an_apply_does_not_write_what_is_protected_in_the_directory(mount: MountIt, project: Path) -> None:
    before = contents(project)
    workspace = mount(backend=f"overlay:{project}", frozen=True, protect=["pipe"])
    for name in ("text", "gone"):
        (Path(workspace.path) / name).write_text("changed")
    workspace.policy(protect=["gone"])
    with pytest.raises(PermissionError, match="gone"):
        workspace.apply()
    assert contents(project) == before


def test_a_fork_of_a_frozen_workspace_is_frozen(frozen: Workspace, project: Path, workdir: Path) -> None:
    with forking(workdir, frozen) as fork:
        check_fork(fork, frozen, project)


def check_fork(fork: Fork, frozen: Workspace, project: Path) -> None:
    (project / "gone").write_text("changed")
    copy = fork("copy")
    root = Path(copy.path)
    assert copy.status().frozen
    assert (root / "gone").read_text() == "gone"
    (root / "sub" / "file").write_text("by the fork")
    frozen.merge(copy)
    assert (Path(frozen.path) / "sub" / "file").read_text() == "by the fork"
    assert copy.apply().applied
    assert ((project / "sub" / "file").read_text(), (project / "gone").read_text()) == ("by the fork", "changed")
    assert frozen.apply().counts.total == 0, "the directory has it"
    assert frozen.diff().changes == ()


@pytest.fixture
def kept(workdir: Path, project: Path, engine: str) -> dict[str, object]:
    """The options of a workspace with a journal."""
    (workdir / "m").mkdir()
    return {
        "path": workdir / "m", "backend": f"overlay:{project}", "persist": True, "name": workdir.name, "engine": engine,
    }  # fmt: skip


def is_served_by_another(workspace: Workspace) -> bool:
    record = read_record(workspace.name)
    return record is not None and record.alive and record.pid != workspace.pid


def test_a_journal_keeps_the_base(kept: dict[str, object], project: Path) -> None:
    name = str(kept["name"])
    with Workspace.mount(**kept, frozen=True) as workspace:  # type: ignore[arg-type]
        root = Path(workspace.path)
        (root / "sub" / "file").write_text("workspace")
        (project / "text").write_text("directory")
        os.kill(workspace.pid, signal.SIGKILL)
        wait_until(lambda: is_served_by_another(workspace))  # its keeper starts it
        assert contents(root)["text"] == LINES
    assert bases(project) == [f"frozen-{name}-1"]
    vfsd("store", "gc")
    assert f"journal, frozen\toverlay:{project}" in vfsd("persisted", "list")[0]
    with pytest.raises(OSError, match="of a frozen overlay over"):
        Workspace.mount(**{**kept, "backend": f"overlay:{project / 'sub'}"})  # type: ignore[arg-type]
    with Workspace.mount(**kept) as workspace:  # type: ignore[arg-type]  # the journal says that it is frozen
        assert workspace.status().frozen
        assert contents(root) == {**contents(project), "text": LINES, "sub/file": "workspace"}
        assert workspace.apply().applied
    assert contents(project)["text"] == "directory"
    assert contents(project)["sub/file"] == "workspace"
    vfsd("persisted", "drop", name)
    assert bases(project) == []


@pytest.mark.extended
def test_a_killed_apply_is_completed_by_the_next_mount(kept: dict[str, object], project: Path) -> None:
    count = 800
    for number in range(count):
        (project / f"f{number:04}").write_text("below")
    options = {**kept, "persist": False}
    with Workspace.mount(**options, frozen=True) as workspace:  # type: ignore[arg-type]
        root = Path(workspace.path)
        for number in range(count):
            (root / f"f{number:04}").write_text("workspace")
        with daemon_end(workspace.pid) as wait_ended:
            applying = threading.Thread(target=vfsd, args=("-w", workspace.name, "apply"), kwargs={"status": 1})
            applying.start()
            wait_until(lambda: (project / "f0000").read_text() == "workspace")
            os.kill(workspace.pid, signal.SIGKILL)
            wait_ended()
        applying.join()
        vfsd("unmount", workspace.name)
    (project / "gone").write_text("since")
    with Workspace.mount(**options, frozen=True) as workspace:  # type: ignore[arg-type]
        assert {(project / f"f{number:04}").read_text() for number in range(count)} == {"workspace"}
        assert (project / "gone").read_text() == "since"
        assert workspace.diff().changes == ()
        assert bases(project) == [f"frozen-{workspace.name}-1"]
    assert bases(project) == []


def test_a_collection_drops_the_base_of_a_killed_daemon(kept: dict[str, object], project: Path) -> None:
    options = {**kept, "persist": False}
    with Workspace.mount(**options, frozen=True) as workspace:  # type: ignore[arg-type]
        with daemon_end(workspace.pid) as wait_ended:
            vfsd("store", "gc")
            assert bases(project) == [f"frozen-{workspace.name}-1"]
            os.kill(workspace.pid, signal.SIGKILL)
            wait_ended()
        vfsd("store", "gc")
        assert bases(project) == []
        vfsd("unmount", workspace.name)


def test_a_mount_that_fails_leaves_nothing(
    workdir: Path, project: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "m").mkdir()
    before = contents(project)
    monkeypatch.setenv("VFSD_STORE_DIR", str(project / "store"))
    with pytest.raises(OSError, match="the snapshot store lies inside the directory"):
        Workspace.mount(workdir / "m", backend=f"overlay:{project}", frozen=True, engine=engine)
    assert not (project / "store").exists()
    need_root()
    (project / "large").write_bytes(os.urandom(1 << 20))
    with mounted_tmpfs(workdir / "small", max_bytes=400 << 10) as small:
        monkeypatch.setenv("VFSD_STORE_DIR", str(small / "store"))
        with pytest.raises(OSError, match="No space left on device for the snapshot store"):
            Workspace.mount(workdir / "m", backend=f"overlay:{project}", frozen=True, engine=engine, persist=True)
        assert bases(project) == []
        assert not list((small / "store" / "tmp").iterdir())
    assert not (workdir / "m").is_mount()
    (project / "large").unlink()
    assert contents(project) == before


@pytest.mark.extended
def test_an_upgrade_keeps_the_base(frozen: Workspace, project: Path) -> None:
    root = Path(frozen.path)
    (project / "gone").write_text("changed")
    (root / "text").write_text("workspace")
    frozen.upgrade()
    assert (root / "gone").read_text() == "gone"
    moved = project.rename(project.with_name("moved"))
    assert frozen.apply().applied
    assert ((moved / "text").read_text(), (moved / "gone").read_text()) == ("workspace", "changed")
    moved.rename(project)


def test_only_a_directory_can_be_frozen(workdir: Path, project: Path, mount: MountIt) -> None:
    for backend in ("memory", f"host:{project}", "overlay:snapshot:before"):
        with pytest.raises(ValueError, match="frozen goes with overlay:DIR of a directory"):
            mount_options(workdir / "m", backend, frozen=True)
    workspace = mount(backend=f"overlay:{project}")
    with pytest.raises(OSError, match="only an overlay that was mounted with --frozen is merged"):
        workspace.apply(conflicts="ours")
