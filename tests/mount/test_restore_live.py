"""Restore under running programs: what they have open, stand in, map and watch, on both engines."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mount.engine_child import Watcher
from tests.mount.programs import Program, succeeded, vfsd
from tests.support.rights import needs_root
from vfsd.client.workspace import Workspace

MountIt = Callable[..., Workspace]
IN_MEMORY_AND_IN_A_STORE = pytest.mark.workspaces(backends=["memory", "host"])  # where snapshots are kept


@pytest.fixture
def another(root: Path) -> Iterator[Callable[[], Program]]:
    with ExitStack() as stack:

        def start() -> Program:
            program = stack.enter_context(Program())
            program("pass", root=str(root))
            return program

        yield start


def listing(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


# -- open files ---------------------------------------------------------------------------------------
def test_an_open_file_has_the_restored_content_at_once(workspace: Workspace, root: Path, program: Program) -> None:
    (root / "file").write_text("old content")
    workspace.snapshot("one")
    program("fd = os.open(root + '/file', os.O_RDWR)")
    program("os.pwrite(fd, b'NEW AND LONGER content', 0)")
    assert program("os.pread(fd, 99, 0)") == b"NEW AND LONGER content"
    workspace.restore("one")
    assert program("os.pread(fd, 99, 0)") == b"old content"
    assert program("os.fstat(fd).st_size") == 11
    assert program("os.lseek(fd, 0, os.SEEK_END)") == 11
    program("os.pwrite(fd, b'OLD', 0)")
    assert (root / "file").read_text() == "OLD content"


def test_a_program_that_appends_goes_on_at_the_restored_end(workspace: Workspace, root: Path, program: Program) -> None:
    (root / "log").write_text("1\n")
    program("fd = os.open(root + '/log', os.O_WRONLY | os.O_APPEND)")
    workspace.snapshot("one")
    program("os.write(fd, b'2\\n' * 5000)")
    workspace.restore("one")
    program("os.write(fd, b'3\\n')")
    assert (root / "log").read_text() == "1\n3\n"
    assert program("os.fstat(fd).st_size") == 4


def test_a_file_made_since_and_open_goes_on_without_a_name(workspace: Workspace, root: Path, program: Program) -> None:
    workspace.snapshot("one")
    program("fd = os.open(root + '/new', os.O_RDWR | os.O_CREAT); os.write(fd, b'mine')")
    workspace.restore("one")
    assert os.listdir(root) == []
    assert program("os.pwrite(fd, b'MINE, still', 0), os.pread(fd, 99, 0)") == (11, b"MINE, still")
    assert program("os.fstat(fd).st_nlink") == 0
    # The name is free for another file, and neither sees the other.
    (root / "new").write_text("another")
    assert program("os.pread(fd, 99, 0)") == b"MINE, still"
    assert (root / "new").read_text() == "another"


def test_a_file_deleted_since_while_open_is_again_the_one_that_has_the_name(
    workspace: Workspace, root: Path, program: Program
) -> None:
    (root / "file").write_text("content")
    workspace.snapshot("one")
    program("fd = os.open(root + '/file', os.O_RDWR)")
    (root / "file").unlink()
    program("os.pwrite(fd, b'CONTENT', 0)")
    workspace.restore("one")
    assert (root / "file").read_text() == "content"
    assert program("os.pread(fd, 99, 0)") == b"content"
    assert program("os.fstat(fd).st_nlink") == 1
    program("os.pwrite(fd, b'x', 0)")
    assert (root / "file").read_text() == "xontent"


# -- mappings -----------------------------------------------------------------------------------------
def test_what_was_written_through_a_mapping_and_never_synced_is_in_a_snapshot(
    workspace: Workspace, root: Path, program: Program
) -> None:
    (root / "file").write_bytes(b"x" * 100_000)
    program("fd = os.open(root + '/file', os.O_RDWR)")
    program("m = mmap.mmap(fd, 0)")
    program("m[0:3] = b'one'; m[90000:90003] = b'one'")
    workspace.snapshot("one")
    program("m[0:3] = b'two'; m[90000:90003] = b'two'")
    workspace.snapshot("two")
    (root / "file").write_bytes(b"y")

    workspace.restore("one")
    content = (root / "file").read_bytes()
    assert (len(content), content[:3], content[90000:90003]) == (100_000, b"one", b"one")
    assert program("m[0:3], m[90000:90003], m[50000:50003]") == (b"one", b"one", b"xxx")
    workspace.restore("two")
    assert program("m[0:3], m[90000:90003]") == (b"two", b"two")
    # The mapping is still the file's: what is written through it is seen by those who read.
    program("m[0:3] = b'now'; m.flush()")
    assert (root / "file").read_bytes()[:3] == b"now"


def test_a_mapping_of_a_file_that_was_cut_off_reaches_all_of_the_restored_one(
    workspace: Workspace, root: Path, program: Program
) -> None:
    (root / "file").write_bytes(b"x" * 100_000)
    workspace.snapshot("one")
    program("fd = os.open(root + '/file', os.O_RDWR)")
    program("m = mmap.mmap(fd, 0)")
    os.truncate(root / "file", 1)
    workspace.restore("one")
    # Beyond the end that the kernel knows of, this would be SIGBUS.
    assert program("m[99999:100000]") == b"x"


def test_dirty_pages_do_not_come_back_over_a_restored_file(workspace: Workspace, root: Path, program: Program) -> None:
    (root / "file").write_bytes(b"old" * 10_000)
    workspace.snapshot("one")
    program("fd = os.open(root + '/file', os.O_RDWR)")
    program("m = mmap.mmap(fd, 0)")
    program("m[:] = b'new' * 10000")
    workspace.restore("one")
    os.sync()
    assert (root / "file").read_bytes() == b"old" * 10_000
    assert program("bytes(m[:])") == b"old" * 10_000
    workspace.undo()
    assert (root / "file").read_bytes() == b"new" * 10_000


# -- directories --------------------------------------------------------------------------------------
def test_standing_in_a_directory_that_a_restore_removes_harms_nobody(
    workspace: Workspace, root: Path, program: Program
) -> None:
    workspace.snapshot("one")
    (root / "new" / "inner").mkdir(parents=True)
    (root / "new" / "inner" / "file").touch()
    program("os.chdir(root + '/new/inner')")
    workspace.restore("one")
    assert os.listdir(root) == []
    assert program("os.listdir('.')") == []
    with pytest.raises(FileNotFoundError):
        program("open('made', 'w')")
    (root / "new").mkdir()
    assert os.listdir(root / "new") == []
    program("os.chdir(root + '/new')")


def test_a_directory_deleted_under_a_program_and_restored_works_for_everybody_by_its_path(
    workspace: Workspace, root: Path, program: Program, another: Callable[[], Program]
) -> None:
    """rmdir(2) marks what the kernel holds of a directory as dead for good: the old one must not come back."""
    (root / "dir" / "inner").mkdir(parents=True)
    (root / "dir" / "inner" / "file").write_text("content")
    os.link(root / "dir" / "inner" / "file", root / "linked")
    workspace.snapshot("one")
    program("os.chdir(root + '/dir/inner'); above = os.open('..', os.O_RDONLY); fd = os.open('file', os.O_RDWR)")
    shutil.rmtree(root / "dir")
    (root / "linked").unlink()

    def check_the_old_directories() -> None:
        for directory in ("'.'", "above"):
            assert program(f"os.listdir({directory}), os.stat({directory}).st_nlink") == ([], 0)
        for attempt in ("open('made', 'w')", "open('file')", "os.stat('file', dir_fd=above)"):
            with pytest.raises(FileNotFoundError):
                program(attempt)
        assert program("os.pread(fd, 9, 0)") == b"content"

    for at in range(3):
        workspace.restore("one", ["dir", "linked"] if at == 2 else ())
        check_the_old_directories()
        assert not workspace.diff("one").changes
        assert os.path.samefile(root / "linked", root / "dir" / "inner" / "file")
        workspace.undo()
        check_the_old_directories()
        assert listing(root) == []
        workspace.redo()
        check_the_old_directories()
        (root / "linked").unlink()
        assert listing(root) == ["dir", "dir/inner", "dir/inner/file"]
        other = another()
        assert other("open(root + '/dir/inner/file').read()") == "content"
        other("open(root + '/dir/inner/made', 'w').close(); os.mkdir(root + '/dir/inner/sub')")
        other(
            "os.rename(root + '/dir/inner', root + '/dir/moved'); os.rename(root + '/dir/moved', root + '/dir/inner')"
        )
        other("os.chdir(root + '/dir/inner')")
        assert sorted(os.listdir(root / "dir" / "inner")) == ["file", "made", "sub"]
        program("os.chdir(root + '/dir/inner')")
        assert program("os.getcwd()") == f"{root}/dir/inner"
        shutil.rmtree(root / "dir")


def test_a_program_in_a_directory_that_moves_back_knows_where_it_stands(
    workspace: Workspace, root: Path, program: Program
) -> None:
    """Nobody looks at the directory between the restore and getcwd: no lookup of the test's puts it right."""
    places = [f"{letter}/deep/deeper" for letter in "abcdefgh"]
    for place in places:
        (root / place).mkdir(parents=True)
    (root / "elsewhere").mkdir()
    workspace.snapshot("one")
    for _ in range(5):
        for number, place in enumerate(places):
            (root / place).rename(root / "elsewhere" / str(number))
        program("os.chdir(root + '/elsewhere/7')")
        workspace.restore("one")
        # While the rest of the changes is still being shown to watchers, too.
        assert {program("os.getcwd()") for _ in range(50)} == {f"{root}/h/deep/deeper"}
        program("os.chdir('/')")


# -- what was the same, and what is gone --------------------------------------------------------------
def test_unchanged_files_keep_inode_times_and_pages(workspace: Workspace, root: Path) -> None:
    files = [root / f"same{number}" for number in range(200)]
    contents = [os.urandom(10_000) for _ in files]
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content)
    (root / "changed").write_text("old")
    workspace.snapshot("one")

    def requests_of_reading() -> int:
        before = workspace.status().requests
        assert [path.read_bytes() for path in files] == contents
        return workspace.status().requests - before

    requests_of_reading()
    warm = requests_of_reading()
    before = [path.stat() for path in files]
    (root / "changed").write_text("new")
    (root / "added").touch()
    workspace.restore("one")
    # Pages that were lost would take a READ for each file; the replay for inotify takes a few requests, too.
    assert requests_of_reading() < warm + len(files) / 2
    for old, new in zip(before, [path.stat() for path in files], strict=True):
        assert (new.st_ino, new.st_mtime_ns, new.st_ctime_ns) == (old.st_ino, old.st_mtime_ns, old.st_ctime_ns)
    assert (root / "changed").read_text() == "old"


@needs_root
def test_modes_owners_times_and_attributes_come_back(workspace: Workspace, root: Path) -> None:
    (root / "f").write_text("x")
    (root / "d").mkdir()
    (root / "l").symlink_to("f")
    for name in ("f", "d"):
        os.setxattr(root / name, "user.note", b"old")
        os.utime(root / name, ns=(1_000_000_007, 2_000_000_009))
    os.chown(root / "f", 12, 34)
    (root / "f").chmod(0o4711)
    before = {path.name: path.lstat() for path in root.iterdir()}
    workspace.snapshot("one")
    for name in ("f", "d"):
        os.setxattr(root / name, "user.note", b"new")
        os.setxattr(root / name, "user.more", b"new")
        os.utime(root / name)
        (root / name).chmod(0o700)
    os.chown(root / "f", 0, 0)
    (root / "l").unlink()
    (root / "l").symlink_to("elsewhere")
    workspace.restore("one")
    after = {path.name: path.lstat() for path in root.iterdir()}
    for name, old in before.items():
        new = after[name]
        assert (new.st_mode, new.st_uid, new.st_gid, new.st_mtime_ns, new.st_ino) == (
            old.st_mode,
            old.st_uid,
            old.st_gid,
            old.st_mtime_ns,
            old.st_ino,
        )
    assert os.readlink(root / "l") == "f"
    assert [os.listxattr(root / name) for name in ("f", "d")] == [["user.note"]] * 2
    assert os.getxattr(root / "f", "user.note") == b"old"


# -- by path, dry run, undo ---------------------------------------------------------------------------
@IN_MEMORY_AND_IN_A_STORE
def test_a_path_alone_is_restored(workspace: Workspace, root: Path) -> None:
    for name in ("a", "b"):
        (root / "dir" / name).mkdir(parents=True)
        (root / "dir" / name / "file").write_text("old")
    (root / "top").write_text("old")
    workspace.snapshot("one")
    for path in ("dir/a/file", "dir/b/file", "top"):
        (root / path).write_text("new")
    (root / "dir" / "a" / "added").touch()
    restored = workspace.restore("one", ["dir/a"])
    assert (root / "dir" / "a" / "file").read_text() == "old"
    assert not (root / "dir" / "a" / "added").exists()
    assert (root / "dir" / "b" / "file").read_text() == (root / "top").read_text() == "new"
    assert {change.path for change in restored.changes if change.change != "metadata"} == {
        "dir/a/file",
        "dir/a/added",
    }
    shutil.rmtree(root / "dir")
    workspace.restore("one", ["dir/b/file"])
    assert listing(root) == ["dir", "dir/b", "dir/b/file", "top"]
    with pytest.raises(FileNotFoundError):
        workspace.restore("one", ["never"])


def _state(root: Path) -> dict[Path, tuple[int, ...]]:
    """What stat shows of everything, but for atime: looking changes that."""
    shown = {}
    for path in root.rglob("*"):
        found = path.lstat()
        times = (found.st_mtime_ns, found.st_ctime_ns)
        shown[path] = (found.st_ino, found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_size, *times)
    return shown


@IN_MEMORY_AND_IN_A_STORE
def test_a_dry_run_changes_nothing_and_says_exactly_what_a_restore_then_does(workspace: Workspace, root: Path) -> None:
    (root / "changed").write_text("old")
    (root / "removed").write_text("old")
    (root / "mode").touch()
    (root / "type").touch()
    (root / "same").touch()
    (root / "dir").mkdir()
    workspace.snapshot("one")
    (root / "changed").write_text("newer")
    (root / "removed").unlink()
    (root / "mode").chmod(0o600)
    (root / "type").unlink()
    (root / "type").mkdir()
    (root / "added").mkdir()
    (root / "added" / "file").touch()
    before = _state(root)
    for paths in ([], ["changed", "added"], ["dir"]):
        planned = workspace.restore("one", paths, dry_run=True)
        assert planned.safety_snapshot is None
        assert _state(root) == before
        assert len(workspace.snapshots()) == 1
        done = workspace.restore("one", paths)
        assert (planned.changes, planned.counts) == (done.changes, done.counts)
        assert bool(done.changes) == (paths != ["dir"])
        assert (done.safety_snapshot is None) == (paths == ["dir"])  # nothing to restore there, so nothing to undo
        if done.changes:
            workspace.undo()
        for info in workspace.snapshots()[1:]:
            workspace.drop(info.name)
        assert {path.relative_to(root) for path in root.rglob("*")} == {path.relative_to(root) for path in before}
        before = _state(root)
    shown = succeeded(vfsd("-w", workspace.name, "restore", "one", "--dry-run"))
    assert sorted(line.split() for line in shown.splitlines()) == sorted(
        [["M", "changed"], ["A", "removed"], ["m", "mode"], ["T", "type"], ["D", "added/"], ["D", "added/file"]]
    )


# -- watchers, archives, patches ----------------------------------------------------------------------
def test_an_inotify_watcher_is_told_of_what_a_restore_changed(workspace: Workspace, root: Path) -> None:
    (root / "changed").write_text("old")
    (root / "gone").touch()
    workspace.snapshot("one")
    (root / "changed").write_text("new")
    (root / "gone").unlink()
    (root / "new").touch()
    watcher = Watcher()
    try:
        watcher.add(str(root), "")
        workspace.restore("one")
        seen: set[str] = set()
        while not {"DELETE /new", "CREATE /gone", "MODIFY /changed"} <= seen:
            seen.update(watcher.events())
    finally:
        os.close(watcher.fd)
    assert not {event for event in seen if event.endswith("/changed") and ("CREATE" in event or "DELETE" in event)}


def test_an_archive_is_restored_to_the_letter_and_an_import_lays_over(
    workspace: Workspace, root: Path, workdir: Path, program: Program
) -> None:
    (root / "file").write_text("archived")
    (root / "same").write_text("same")
    (root / "dir").mkdir()
    (root / "dir" / "a").write_text("a")
    workspace.export(workdir / "a.zip")
    same = os.stat(root / "same")
    (root / "file").write_text("changed since")
    (root / "added").touch()
    (root / "dir" / "b").write_text("b")
    program("fd = os.open(root + '/file', os.O_RDONLY)")

    imported = workspace.import_archive(workdir / "a.zip")
    assert listing(root) == ["added", "dir", "dir/a", "dir/b", "file", "same"]
    assert (root / "file").read_text() == "archived"
    assert (imported.counts.added, imported.counts.removed) == (0, 0)
    workspace.undo()
    assert (root / "file").read_text() == "changed since"

    planned = workspace.restore(workdir / "a.zip", dry_run=True)
    done = workspace.restore(workdir / "a.zip")
    assert planned.changes == done.changes
    assert listing(root) == ["dir", "dir/a", "file", "same"]
    assert program("os.pread(fd, 99, 0)") == b"archived"
    now = os.stat(root / "same")
    assert (now.st_ino, now.st_mtime_ns, now.st_ctime_ns) == (same.st_ino, same.st_mtime_ns, same.st_ctime_ns)
    workspace.undo()
    assert listing(root) == ["added", "dir", "dir/a", "dir/b", "file", "same"]

    workspace.restore(workdir / "a.zip", ["dir"])
    assert listing(root) == ["added", "dir", "dir/a", "file", "same"]
    assert (root / "file").read_text() == "changed since"


@IN_MEMORY_AND_IN_A_STORE
def test_a_patch_applied_to_a_copy_of_the_old_state_gives_the_new_one(
    workspace: Workspace, root: Path, workdir: Path
) -> None:
    (root / "src").mkdir()
    (root / "src" / "main.c").write_text("".join(f"line {n}\n" for n in range(200)))
    (root / "removed").write_text("going\n")
    (root / "no newline").write_text("a\nb")
    (root / "empty").touch()
    workspace.snapshot("one")
    workspace.export(workdir / "one.zip", snapshot="one")
    text = (root / "src" / "main.c").read_text().replace("line 7\n", "LINE 7\n").replace("line 150\n", "")
    (root / "src" / "main.c").write_text(text)
    (root / "removed").unlink()
    (root / "no newline").write_text("a\nb\nc")
    (root / "new dir").mkdir()
    (root / "new dir" / "n\u00e4m\u00e9").write_text("new\n")

    patch = workspace.patch("one")
    workspace.snapshot("two")
    assert workspace.patch("one", "two") == patch
    assert not workspace.diff("two")
    assert workspace.diff().a == "two"
    assert patch.decode() == succeeded(vfsd("-w", workspace.name, "diff", "one", "--patch"))
    copy = workdir / "copy"
    copy.mkdir()
    subprocess.run(["unzip", "-q", workdir / "one.zip", "-d", copy], check=True)
    subprocess.run(["patch", "-p1", "--quiet"], cwd=copy / "files", input=patch, check=True)
    subprocess.run(["diff", "-r", root, copy / "files"], check=True)


def test_a_workspace_can_be_unmounted_right_after_a_restore(workdir: Path, engine: str) -> None:
    """What tells inotify watchers works on the mount: it must not be what keeps the mount busy."""
    with Workspace.mount(workdir / "m", engine=engine) as workspace:
        root = Path(workspace.path)
        for number in range(500):
            (root / f"f{number}").write_text("old")
        workspace.snapshot("one")
        for number in range(500):
            (root / f"f{number}").write_text("new")
        workspace.restore("one")
        assert workspace.unmount().holders == ()
