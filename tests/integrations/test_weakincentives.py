"""weakincentives (WINK): its validation suites and its own tests on real mounts, and what the adapter promises besides.

WINK needs Python 3.12: `make test-weakincentives` runs this file with such an interpreter.  Its tests come from its
source distribution, unpacked at $VFSD_WINK_SDIST; nothing of them is in this repository.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

if sys.version_info < (3, 12):
    pytest.skip("weakincentives needs Python 3.12: make test-weakincentives", allow_module_level=True)
pytest.importorskip("weakincentives")

from weakincentives.errors import RestoreFailedError, SnapshotError, SnapshotRestoreError
from weakincentives.filesystem import Filesystem, FilesystemSnapshot, HostFilesystem
from weakincentives.prompt import HostMount, Prompt, PromptTemplate
from weakincentives.prompt.tool import ToolContext
from weakincentives.prompt.workspace import WorkspaceBudgetExceededError, WorkspaceSecurityError
from weakincentives.runtime import Session
from weakincentives.runtime.session import append_all
from weakincentives.runtime.session.snapshots import Snapshot
from weakincentives.runtime.transactions import CompositeSnapshot, tool_transaction
from weakincentives.serde import dump, parse

from protocol.tools import DirectoryCreated, FileDeleted, FileEdited, FileWritten
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.integrations.weakincentives import (
    FilesystemSnapshotManager,
    FilesystemSnapshotRef,
    VfsdFilesystem,
    VfsdWorkspaceSection,
    WorkspaceUnavailableError,
    dump_session_tree,
)
from vfsd.machine.runtime import process_start_ticks

SDIST = os.environ.get("VFSD_WINK_SDIST", "")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def temporary_files(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files of each test: the default one for archives and checkpoints is in it."""
    place = workdir / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.fixture(scope="module")
def shared(session_dir: str) -> Iterator[Workspace]:
    place = Path(session_dir, "work", "wink")
    with Workspace.mount(place, exec_on_host=True) as workspace:
        workspace.snapshot("empty")
        yield workspace


@pytest.fixture
def files(shared: Workspace) -> VfsdFilesystem:
    shared.restore("empty")
    return VfsdFilesystem(shared)


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def section(session: Session) -> Iterator[VfsdWorkspaceSection]:
    made = VfsdWorkspaceSection(session=session, exec_on_host=True)
    yield made
    made.cleanup()


# -- WINK's own suites ----------------------------------------------------------------------------
def suites() -> Any:
    """WINK's module of validation suites, from its source distribution."""
    if not SDIST:
        return None
    path = Path(SDIST, "tests", "helpers", "filesystem.py")
    spec = importlib.util.spec_from_file_location("wink_validation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if (SUITES := suites()) is not None:

    class TestFilesystem(SUITES.FilesystemValidationSuite):
        @pytest.fixture(autouse=True)
        def absent_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
            """A module of limits, which two tests lower.  WINK's distributions lack it; they lower WINK's own too."""
            package, module = ModuleType("weakincentives.contrib.tools"), ModuleType("filesystem_memory")
            module.MAX_WRITE_LENGTH = module.MAX_WRITE_BYTES = 0  # type: ignore[attr-defined]
            package.filesystem_memory = module  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, package.__name__, package)
            monkeypatch.setitem(sys.modules, f"{package.__name__}.{module.__name__}", module)

        @pytest.fixture
        def fs(self, files: VfsdFilesystem) -> VfsdFilesystem:
            return files

    class TestReadOnlyFilesystem(SUITES.ReadOnlyFilesystemValidationSuite):
        @pytest.fixture
        def fs_readonly(self, shared: Workspace) -> VfsdFilesystem:
            return VfsdFilesystem(shared, read_only=True)

    class TestSnapshotableFilesystem(SUITES.SnapshotableFilesystemValidationSuite):
        @pytest.fixture
        def fs_snapshotable(self, files: VfsdFilesystem) -> VfsdFilesystem:
            return files


needs_sdist = pytest.mark.skipif(not SDIST, reason="VFSD_WINK_SDIST names no source distribution of weakincentives")


@needs_sdist
def test_the_suites_have_129_tests() -> None:
    classes = (TestFilesystem, TestReadOnlyFilesystem, TestSnapshotableFilesystem)
    assert sum(name.startswith("test_") for each in classes for name in dir(each)) == 129


@needs_sdist
@pytest.mark.slow
@pytest.mark.timeout(1200)  # 140 s on two busy cores
def test_wink_s_tests_of_files_have_the_same_outcomes_with_the_class_replaced(workdir: Path) -> None:
    before, used_before = outcomes(workdir, swap=False)
    after, used = outcomes(workdir, swap=True)
    assert before.keys() == after.keys()
    assert used == used_before
    assert [name for name, outcome in after.items() if outcome != before[name]] == []
    passed = sum(outcome == "passed" for outcome in after.values())
    passed_using = sum(after[name] == "passed" for name in used)
    print(f"{passed} of {len(after)} tests of WINK pass with and without the class replaced")
    print(f"{passed_using} of the {len(used)} of them that make a filesystem do")
    assert passed > 590
    assert passed_using > 180


def outcomes(workdir: Path, *, swap: bool) -> tuple[dict[str, str], set[str]]:
    """Run WINK's tests in the files that mention a filesystem.

    Return the outcome of each by its node id, and the node ids of those that made one.
    """
    mentioning = [
        str(path.relative_to(SDIST))
        for path in sorted(Path(SDIST, "tests").rglob("test_*.py"))
        if "ilesystem" in path.read_text(encoding="utf-8")
    ]
    written = workdir / f"outcomes-{swap}.json"
    (workdir / f"tmp-{swap}").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "wink"),
        "TMPDIR": str(workdir / f"tmp-{swap}"),
        "VFSD_WINK_TMP": str(workdir / f"tmp-{swap}"),
        "VFSD_WINK_OUTCOMES": str(written),
        "VFSD_WINK_SWAP": "1" if swap else "0",
    }
    # WINK's plugin for dataclasses imports what its distributions lack.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:tests.plugins.dataclass_serde", "-p", "vfsd_wink_plugin"]
    settings = ["-o", "addopts=", "--continue-on-collection-errors", "-W", "ignore"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *settings, *mentioning],
        cwd=SDIST,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert written.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(written.read_text())
    return found["outcomes"], set(found["used"])


# -- the filesystem -------------------------------------------------------------------------------
def test_it_is_the_class_that_adapters_take_the_directory_from(section: VfsdWorkspaceSection) -> None:
    prompt = Prompt(PromptTemplate(ns="test", key="cwd", sections=[section]))
    with prompt.resources:
        found = prompt.filesystem()
        assert isinstance(found, HostFilesystem)
        assert found.root == section.workspace.path == str(section.temp_dir)


def test_snapshots_include_what_git_ignores_and_what_programs_wrote(files: VfsdFilesystem) -> None:
    files.write(".gitignore", "*.log\n")
    files.write("a.log", "1")
    taken = files.snapshot(tag="before")
    subprocess.run(["sh", "-c", "echo 2 > a.log; rm .gitignore; ln -s a.log b"], cwd=files.root, check=True)
    files.restore(taken)
    assert sorted(os.listdir(files.root)) == [".gitignore", "a.log"]
    assert files.read("a.log").content == "1"
    assert [each.tag for each in files.workspace.snapshots() if each.name == taken.commit_ref] == ["before"]


def test_a_later_session_restores_a_snapshot(files: VfsdFilesystem) -> None:
    files.write("a.txt", "1")
    taken = files.snapshot(tag="kept")
    files.cleanup()
    stored = json.dumps(dump(taken))
    files.write("a.txt", "2")
    later = VfsdFilesystem(files.workspace.name)
    assert later.get(taken.commit_ref) == taken
    later.restore(parse(FilesystemSnapshot, json.loads(stored)))
    assert later.read("a.txt").content == "1"


def test_failures_are_winks_errors(files: VfsdFilesystem) -> None:
    taken = files.snapshot()
    with pytest.raises(SnapshotRestoreError, match="no-such"):
        files.restore(replace(taken, commit_ref="no-such"))
    with pytest.raises(SnapshotError, match="no-such"):
        files.get("no-such")
    files.workspace.drop(taken.commit_ref)
    with pytest.raises(SnapshotRestoreError):
        files.restore(taken)


def test_nothing_reaches_the_host_after_an_unmount(workdir: Path) -> None:
    workspace = Workspace.mount(workdir / "ws")
    files = VfsdFilesystem(workspace)
    taken = files.snapshot()
    workspace.unmount(lazy=True)
    for use in (
        lambda: files.write("a.txt", "x"),
        lambda: files.read("a.txt"),
        lambda: files.mkdir("d"),
        lambda: files.delete("a.txt"),
        lambda: files.exists("a.txt"),
        lambda: files.open_write("a.txt"),
        files.list,
    ):
        with pytest.raises(WorkspaceUnavailableError, match="not mounted"):
            use()
    with pytest.raises(SnapshotError):
        files.snapshot()
    with pytest.raises(SnapshotRestoreError):
        files.restore(taken)
    assert os.listdir(workspace.path) == []


def test_a_dead_daemon_is_winks_error(workdir: Path) -> None:
    workspace = Workspace.mount(workdir / "ws")
    files = VfsdFilesystem(workspace)
    os.kill(workspace.pid, signal.SIGKILL)
    wait_until(lambda: process_start_ticks(workspace.pid) is None, "the daemon's end")
    with pytest.raises(SnapshotError):
        files.snapshot()
    with pytest.raises((WorkspaceUnavailableError, OSError)):
        files.write("a.txt", "x")
    subprocess.run(["umount", "-l", workspace.path], check=True)
    with pytest.raises(WorkspaceUnavailableError):
        files.write("a.txt", "x")
    with pytest.raises(ConnectionError):
        VfsdFilesystem(workspace.name)


# -- events ---------------------------------------------------------------------------------------
def test_each_write_is_published(section: VfsdWorkspaceSection, session: Session) -> None:
    files, own = section.filesystem, section.workspace.filesystem
    files.write("a", "1")
    files.write_bytes("b", b"22")
    with files.open_write("c") as writer:
        writer.write(b"333")
    own.write("d", "4444")
    with own.open_write("e", mode="append") as mine:
        mine.write(b"55555")
    call(section, "write_file", path="f", content="666666")
    call(section, "edit_file", path="f", old_text="666666", new_text="7777777")
    assert [(event.path, event.bytes_written) for event in session[FileWritten].all()] == [
        ("a", 1),
        ("b", 2),
        ("c", 3),
        ("d", 4),
        ("e", 5),
        ("f", 6),
        ("f", 7),
    ]
    assert [event.path for event in session[FileEdited].all()] == ["f"]


def test_only_changes_that_were_made_are_published(section: VfsdWorkspaceSection, session: Session) -> None:
    for files in (section.filesystem, section.workspace.filesystem):
        with contextlib.suppress(ZeroDivisionError), files.open_write("a") as writer:
            writer.write(b"x")
            raise ZeroDivisionError
        with pytest.raises(FileNotFoundError):
            files.delete("a")
        with pytest.raises(FileNotFoundError):
            files.write("no/parent", "x", create_parents=False)
    assert session[FileWritten].all() == session[FileDeleted].all() == ()
    with contextlib.suppress(ZeroDivisionError), section.filesystem.open_write("b", mode="append") as writer:
        writer.write(b"stays")
        raise ZeroDivisionError
    assert session[FileWritten].all() == (FileWritten("b", 5),)


def test_deletions_and_new_directories_are_published(section: VfsdWorkspaceSection, session: Session) -> None:
    call(section, "write_file", path="d/e/f", content="x")
    section.filesystem.delete("d/e", recursive=True)
    call(section, "rm", path="d")
    assert session[DirectoryCreated].all() == (DirectoryCreated("d"), DirectoryCreated("d/e"))
    assert session[FileDeleted].all() == (FileDeleted("d/e", 2), FileDeleted("d", 1))


# -- the section ----------------------------------------------------------------------------------
def call(section: VfsdWorkspaceSection, name: str, **arguments: Any) -> Any:
    """Call a tool of the section as WINK's adapters do."""
    (tool,) = [tool for tool in section.tools() if tool.name == name]
    context = ToolContext(prompt=None, rendered_prompt=None, adapter=None, session=section.session)
    return tool.handler(parse(tool.params_type, arguments, extra="forbid"), context=context)


def test_the_tools_answer_as_vfsd_s_do(section: VfsdWorkspaceSection) -> None:
    assert call(section, "write_file", path="a.txt", content="one\n").render() == "Wrote a.txt (4 bytes)"
    assert call(section, "read_file", path="a.txt").render() == "     1\tone"
    assert "one" in call(section, "shell", command="cat a.txt").render()
    failed = call(section, "read_file", path="missing")
    assert (failed.success, failed.value) == (False, None)
    assert "missing" in failed.message
    with pytest.raises(ValueError, match="limit"):
        call(section, "read_file", path="a.txt", limit=0)


def test_tools_are_those_that_the_workspace_can_run(session: Session) -> None:
    section = VfsdWorkspaceSection(session=session)
    assert {tool.name for tool in section.tools()} >= {"read_file", "grep"}
    assert not {tool.name for tool in section.tools()} & {"shell", "python"}
    section.cleanup()
    section = VfsdWorkspaceSection(session=session, tools=False)
    assert section.tools() == ()
    section.cleanup()


def test_host_mounts_are_copied(session: Session, workdir: Path) -> None:
    project = workdir / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "main.py").write_text("print()")
    (project / "notes.log").write_text("x")
    mount = HostMount(host_path=str(project), mount_path="work", exclude_glob=("*.log",))
    section = VfsdWorkspaceSection(session=session, mounts=[mount], allowed_host_roots=[workdir])
    assert [match.path for match in section.filesystem.glob("*")] == ["work/src/main.py"]
    assert section.mount_previews[0].entries == ("src/main.py",)
    assert "src/main.py" in section.render(None, 0, "1")
    section.cleanup()
    assert (project / "src" / "main.py").exists()


@pytest.mark.parametrize(
    ("mount", "error"),
    [
        ({"mount_path": "../out"}, WorkspaceSecurityError),
        ({"host_path": "/etc"}, WorkspaceSecurityError),
        ({"host_path": "missing"}, FileNotFoundError),
        ({"max_bytes": 1}, WorkspaceBudgetExceededError),
    ],
)
def test_a_host_mount_that_fails_leaves_nothing_behind(
    session: Session, workdir: Path, temporary_files: Path, mount: dict[str, Any], error: type[Exception]
) -> None:
    (workdir / "project").mkdir()
    (workdir / "project" / "a").write_text("long")
    arguments = {"host_path": str(workdir / "project"), **mount}
    with pytest.raises(error):
        VfsdWorkspaceSection(session=session, mounts=[HostMount(**arguments)], allowed_host_roots=[workdir])
    assert [name for name in os.listdir(temporary_files) if name.startswith("vfsd")] == []


def test_a_running_workspace_keeps_its_files_and_stays_mounted(
    session: Session, workspace: Workspace, workdir: Path
) -> None:
    workspace.filesystem.write("project/a", "own")
    (workdir / "project").mkdir()
    (workdir / "project" / "a").write_text("host")
    (workdir / "other").write_text("host")
    mounts = [HostMount(host_path=str(workdir / name)) for name in ("other", "project")]
    with pytest.raises(FileExistsError, match="project"):
        VfsdWorkspaceSection(session=session, workspace=workspace, mounts=mounts)
    assert os.listdir(workspace.path) == ["project"]
    section = VfsdWorkspaceSection(session=session, workspace=workspace.name, mounts=mounts[:1])
    section.cleanup()
    assert workspace.filesystem.read("project/a").content == "own"
    assert workspace.filesystem.read("other").content == "host"
    with pytest.raises(TypeError):
        VfsdWorkspaceSection(session=session, workspace=workspace, backend="memory")


def test_a_host_mount_does_not_replace_what_the_backend_s_directory_has(session: Session, workdir: Path) -> None:
    for name in ("below", "project"):
        (workdir / name / "src").mkdir(parents=True)
        (workdir / name / "src" / "a").write_text(name)
    mount = HostMount(host_path=str(workdir / "project" / "src"))
    for backend in ("host", "overlay"):
        with pytest.raises(FileExistsError, match="src"):
            VfsdWorkspaceSection(session=session, mounts=[mount], backend=f"{backend}:{workdir / 'below'}")
    assert (workdir / "below" / "src" / "a").read_text() == "below"


def test_a_session_can_get_what_other_programs_write(session: Session) -> None:
    section = VfsdWorkspaceSection(session=session, mount_events=True)
    subprocess.run(["sh", "-c", "echo 12345 > made"], cwd=section.temp_dir, check=True)
    section.filesystem.write("a", "1")
    wait_until(lambda: len(session[FileWritten].all()) == 2, "the event of the other program")
    assert set(session[FileWritten].all()) == {FileWritten("a", 1), FileWritten("made", 6)}
    section.cleanup()


def test_clones_share_the_workspace_until_the_last_is_cleaned_up(session: Session) -> None:
    section = VfsdWorkspaceSection(session=session)
    other = Session()
    with pytest.raises(TypeError, match="session is required"):
        section.clone()
    with pytest.raises(TypeError, match="dispatcher"):
        section.clone(session=other, dispatcher=session.dispatcher)
    clone = section.clone(session=other)
    assert clone.filesystem is section.filesystem
    assert (clone.session, clone.snapshots) == (other, section.snapshots)
    clone.filesystem.write("a", "1")
    assert session[FileWritten].all() == other[FileWritten].all() == (FileWritten("a", 1),)
    section.cleanup()
    section.cleanup()
    clone.filesystem.write("b", "2")
    assert len(session[FileWritten].all()) == 1
    assert len(other[FileWritten].all()) == 2
    clone.cleanup()
    assert not section.temp_dir.exists()
    with pytest.raises(RuntimeError, match="cleaned up"):
        section.clone(session=other)


def test_several_sections_of_a_session_record_each_write_once(session: Session) -> None:
    first, second = VfsdWorkspaceSection(session=session), VfsdWorkspaceSection(session=session)
    clone = first.clone(session=session)
    first.filesystem.write("a", "1")
    second.filesystem.write("b", "2")
    assert [event.path for event in session[FileWritten].all()] == ["a", "b"]
    for each in (first, second, clone):
        each.cleanup()


def test_a_section_leaves_nothing_behind(session: Session, temporary_files: Path) -> None:
    section = VfsdWorkspaceSection(session=session)
    section.cleanup()
    assert os.listdir(temporary_files / "wink-fs-snapshots") == []
    assert not section.temp_dir.exists()
    section.cleanup()


def test_export_and_restore_follow_the_session(section: VfsdWorkspaceSection, session: Session, workdir: Path) -> None:
    with pytest.raises(SnapshotRestoreError, match="export_snapshot"):
        section.restore_from_snapshot()
    section.filesystem.write("a", "1")
    first = section.export_snapshot(workdir / "first.fs.zip")
    assert first == FilesystemSnapshotRef(str(workdir / "first.fs.zip"), 1, 1)
    state = session.snapshot()
    section.filesystem.write("a", "2")
    section.export_snapshot()
    assert len(session[FilesystemSnapshotRef].all()) == 1
    session.restore(state)
    assert section.restore_from_snapshot() == 1
    assert section.filesystem.read("a").content == "1"
    with pytest.raises(SnapshotError, match="exists"):
        section.export_snapshot(workdir / "first.fs.zip")
    (workdir / "bad.zip").write_bytes(b"PK")
    for path in (workdir / "bad.zip", workdir / "missing.zip"):
        with pytest.raises(SnapshotRestoreError):
            section.restore_from_snapshot(path)
    assert section.filesystem.read("a").content == "1"


def test_winks_tool_transaction_restores_session_and_files(section: VfsdWorkspaceSection, session: Session) -> None:
    prompt = Prompt(PromptTemplate(ns="test", key="transaction", sections=[section]))
    with prompt.resources:
        prompt.filesystem().write("a", "1")
        session[Turn].append(Turn(1))
        transaction = tool_transaction(session, prompt.resources.context, tag="tool")
        with contextlib.suppress(ZeroDivisionError), transaction as kept:
            prompt.filesystem().write("a", "2")
            session[Turn].append(Turn(2))
            raise ZeroDivisionError
        assert prompt.filesystem().read("a").content == "1"
        assert session[Turn].all() == (Turn(1),)
        assert CompositeSnapshot.from_json(kept.to_json()).resources == kept.resources


# -- checkpoints ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Turn:
    number: int


def test_one_id_restores_session_and_files(section: VfsdWorkspaceSection, session: Session) -> None:
    for number in (1, 2, 3):
        session[Turn].append(Turn(number))
        section.filesystem.write("a", str(number))
        section.checkpoints.snapshot(f"turn-{number}")
    assert section.checkpoints.ids() == ("turn-1", "turn-2", "turn-3")
    section.checkpoints.restore("turn-1")
    assert (session[Turn].all(), section.filesystem.read("a").content) == ((Turn(1),), "1")
    section.checkpoints.restore("turn-3")
    assert (session[Turn].latest(), section.filesystem.read("a").content) == (Turn(3), "3")
    assert len(session[FileWritten].all()) == 3  # a log stays
    with pytest.raises(SnapshotError, match="exists"):
        section.checkpoints.snapshot("turn-1")
    with pytest.raises(KeyError, match="turn-9"):
        section.checkpoints.restore("turn-9")
    with pytest.raises(ValueError, match="id"):
        section.checkpoints.snapshot("../out")


def test_a_later_program_restores_a_checkpoint(session: Session, workspace: Workspace, workdir: Path) -> None:
    section = VfsdWorkspaceSection(session=session, workspace=workspace, snapshot_dir=workdir / "kept")
    session[Turn].append(Turn(1))
    section.filesystem.write("a", "1")
    section.checkpoints.snapshot("turn-1")
    section.filesystem.write("a", "2")
    section.cleanup()
    later = Session()
    section = VfsdWorkspaceSection(session=later, workspace=workspace.name, snapshot_dir=workdir / "kept")
    with pytest.raises(RestoreFailedError, match="Turn"):  # a session has to know the types of its state
        section.checkpoints.restore("turn-1")
    assert section.filesystem.read("a").content == "2"
    later[Turn].register(Turn, append_all)
    section.checkpoints.restore("turn-1")
    assert (later[Turn].all(), section.filesystem.read("a").content) == ((Turn(1),), "1")
    section.cleanup()


def test_a_restore_of_a_checkpoint_does_both_or_neither(section: VfsdWorkspaceSection, session: Session) -> None:
    session[Turn].append(Turn(1))
    kept = section.checkpoints.snapshot("turn-1")
    session[Turn].append(Turn(2))
    section.filesystem.write("a", "2")
    section.workspace.drop(kept.resources[Filesystem].commit_ref)
    with pytest.raises(RestoreFailedError, match="files"):
        section.checkpoints.restore("turn-1")
    assert (session[Turn].latest(), section.filesystem.read("a").content) == (Turn(2), "2")
    assert section.checkpoints.delete("turn-1")
    assert not section.checkpoints.delete("turn-1")
    assert section.checkpoints.get("turn-1") is None


def test_deleting_a_checkpoint_drops_its_snapshot(section: VfsdWorkspaceSection) -> None:
    section.checkpoints.snapshot("turn-1")
    assert len(section.workspace.snapshots()) == 1
    assert section.checkpoints.delete("turn-1")
    assert section.workspace.snapshots() == []


# -- archives -------------------------------------------------------------------------------------
def test_the_manager_has_the_specified_semantics(files: VfsdFilesystem, temporary_files: Path) -> None:
    manager = FilesystemSnapshotManager(files)
    assert manager.filesystem is files
    files.write("a", "1")
    files.write("d/b", "2")
    first = manager.snapshot("first")
    assert (first.snapshot_id, first.file_count) == ("first", 2)
    assert first.archive_path == temporary_files / "wink-fs-snapshots" / "first.fs.zip"
    assert first.total_bytes == first.archive_path.stat().st_size
    files.delete("d", recursive=True)
    second = manager.snapshot("second")
    assert manager.list_snapshots() == (first, second)
    assert manager.rollback("first") == 2
    assert files.read("d/b").content == "2"
    assert manager.restore(second.archive_path) == 1
    assert not files.exists("d")
    assert manager.get("first") == first
    assert manager.get("third") is manager.get("../first") is None
    with pytest.raises(KeyError):
        manager.rollback("third")
    assert (manager.delete("first"), manager.delete("first")) == (True, False)
    assert not first.archive_path.exists()


def test_the_manager_replaces_nothing_and_refuses_damaged_archives(files: VfsdFilesystem, workdir: Path) -> None:
    manager = FilesystemSnapshotManager(files, workdir / "kept")
    files.write("a", os.urandom(2_000).hex())  # the middle of the archive, which is damaged below
    kept = manager.snapshot("first")
    files.write("a", "2")
    with pytest.raises(SnapshotError, match="exists"):
        manager.snapshot("first")
    with pytest.raises(ValueError, match="id"):
        manager.snapshot("../first")
    content = bytearray(kept.archive_path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    kept.archive_path.write_bytes(content)
    with pytest.raises(SnapshotRestoreError):
        manager.rollback("first")
    assert files.read("a").content == "2"
    with pytest.raises(ValueError, match="outside"):
        FilesystemSnapshotManager(files, Path(files.root, "kept"))


def test_an_archive_goes_to_another_kind_of_filesystem(files: VfsdFilesystem, workdir: Path) -> None:
    files.write("src/a", "1")
    archive = FilesystemSnapshotManager(files, workdir / "kept").snapshot(str(uuid4())).archive_path
    (workdir / "plain").mkdir()
    plain = HostFilesystem(_root=str(workdir / "plain"))
    assert FilesystemSnapshotManager(plain, workdir / "other").restore(archive) == 1
    assert plain.read("src/a").content == "1"


def test_a_dump_has_the_session_and_its_files(section: VfsdWorkspaceSection, session: Session, workdir: Path) -> None:
    child = Session(parent=session)
    child[Turn].append(Turn(7))
    assert dump_session_tree(Session(), workdir / "dump") is None
    for number in (1, 2):  # the second replaces the first
        section.filesystem.write("a", str(number))
        path = dump_session_tree(session, workdir / "dump", filesystem_section=section)
    assert path == workdir / "dump" / f"{session.session_id}.jsonl"
    archive = path.with_suffix(".fs.zip")
    assert sorted(os.listdir(path.parent)) == sorted([path.name, archive.name])
    first, second = [Snapshot.from_json(line) for line in path.read_text().splitlines()]
    assert first.slices[FilesystemSnapshotRef] == (FilesystemSnapshotRef(str(archive), 1, 1),)
    assert second.slices[Turn] == (Turn(7),)
    section.filesystem.delete("a")
    assert section.snapshots.restore(archive) == 1
    assert section.filesystem.read("a").content == "2"


def test_the_example_runs(workdir: Path, temporary_files: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "weakincentives_agent.py"
    (workdir / "project").mkdir()
    (workdir / "project" / "notes.txt").write_text("draft")
    environment = {**os.environ, "TMPDIR": str(temporary_files)}
    done = subprocess.run(
        [sys.executable, example, workdir / "project"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "notes.txt: draft, turns: 1"
    assert os.listdir(temporary_files / "wink-fs-snapshots") == []
