"""The drafts' names and return types: one row for each difference between a draft and `protocol.Filesystem`."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import protocol
from protocol import Filesystem, HostFilesystem, InMemoryFilesystem
from protocol.drafts import (
    DraftFilesystem,
    FileEntry,
    FilesystemSnapshot,
    FilesystemSnapshotManager,
    FilesystemSnapshotRef,
    SecurityError,
    SnapshotInfo,
    TextWriter,
    ToolResult,
    WriteResult,
    call_tool,
)
from protocol.errors import ArchiveError, SnapshotExistsError
from protocol.tools import TOOLS, DirectoryCreated, FileDeleted, FileWritten, ToolContext
from protocol.types import GrepMatch


class ForeignFilesystem:
    """A third party's: the methods of `Filesystem`, and no snapshots."""

    def __init__(self) -> None:
        self._inner = InMemoryFilesystem()

    def __getattr__(self, name: str) -> Any:
        if name not in Filesystem.__dict__:
            raise AttributeError(name)
        return getattr(self._inner, name)


MADE: dict[str, Callable[[Path], Any]] = {
    "memory": lambda _directory: InMemoryFilesystem(),
    "host": HostFilesystem,
    "foreign": lambda _directory: ForeignFilesystem(),
}


@pytest.fixture(params=MADE)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> DraftFilesystem:
    root = tmp_path / "root"
    root.mkdir()
    return filled(MADE[request.param](root))


def filled(filesystem: Filesystem) -> DraftFilesystem:
    """Make two files and a directory."""
    filesystem.write("a.py", "import b\n")
    filesystem.write("src/b.py", "x = 1\nimport c\n")
    filesystem.mkdir("empty")
    return DraftFilesystem(filesystem)


A, B, EMPTY, SRC = (
    FileEntry("a.py", "file", 9),
    FileEntry("src/b.py", "file", 15),
    FileEntry("empty", "directory"),
    FileEntry("src", "directory"),
)
A_HASH, B_MATCH = hashlib.sha256(b"import b\n").hexdigest(), GrepMatch("src/b.py", 2, "import c", 0, 6)


@dataclass(frozen=True)
class Row:
    """A call, and its result in the drafts: a value, or the class of an exception."""

    name: str
    call: Callable[[DraftFilesystem, Path], Any]
    expected: Any

    def __str__(self) -> str:
        return self.name


def written_text(files: DraftFilesystem, *, fails: bool = False) -> Any:
    try:
        with files.open_text_writer("n/new.txt") as writer:
            counts = (writer.write("é\n"), writer.write_all(["a", "bc"]), writer.path, writer.encoding, writer.closed)
            assert isinstance(writer, TextWriter)
            if fails:
                raise KeyboardInterrupt  # noqa: TRY301
    except KeyboardInterrupt:
        return files.exists("n/new.txt"), writer.closed
    return counts, writer.closed, files.read("n/new.txt").content


def published(files: DraftFilesystem) -> list[object]:
    events: list[object] = []
    watched = DraftFilesystem(files.filesystem, events.append)
    watched.write("new", "1")
    watched.mkdir("d")
    watched.delete("new")
    watched.delete("missing")
    return events


def bad_line(files: DraftFilesystem) -> list[str]:
    files.filesystem.write_bytes("bad", b"good\nb\xffd\n")
    with files.open_text("bad") as reader:
        lines = [reader.readline()]
        with pytest.raises(UnicodeDecodeError):
            reader.readline()
    return lines


def bad_page(files: DraftFilesystem) -> Any:
    files.filesystem.write_bytes("bad", b"b\xffd\n")
    return files.read("bad")


def exported(files: DraftFilesystem, path: Path) -> Any:
    path = path / "made" / "state.fs.zip"
    first = files.export_archive(path)
    files.write("c", "12")
    second = files.export_archive(path)
    ref = files.snapshot(path)
    files.delete("src")
    files.write("a.py", "other")
    return (
        first,
        second,
        ref == FilesystemSnapshotRef(str(path), 3, 26),
        files.import_archive(path),
        files.read("a.py").content,
    )


def restored(files: DraftFilesystem, path: Path) -> Any:
    files.snapshot(path / "state")
    files.delete("src")
    return files.restore(path / "state"), files.list("src")


def kept_archive(files: DraftFilesystem, path: Path) -> Any:
    """An archive that cannot be written leaves the file in its place."""
    (path / "old").write_text("old")
    files.filesystem = None  # type: ignore[misc, assignment]
    with pytest.raises(AttributeError):
        files.export_archive(path / "old")
    return [each.name for each in path.iterdir() if each.name != "root"], (path / "old").read_text()


ROWS = [
    # the drafts with archives
    Row("write returns a number", lambda f, _: f.write("new/x", "é"), 2),
    Row("write creates only", lambda f, _: f.write("a.py", "", mode="create"), FileExistsError),
    Row(
        "write appends", lambda f, _: (f.write("a.py", "#", mode="append"), f.read("a.py").content), (1, "import b\n#")
    ),
    Row("write checks the mode", lambda f, _: f.write("new", "", mode="w"), ValueError),  # type: ignore[arg-type]
    Row("delete of nothing", lambda f, _: (f.delete("missing"), f.delete("a.py/x")), (0, 0)),
    Row("delete of a file", lambda f, _: (f.delete("a.py"), f.exists("a.py")), (1, False)),
    Row("delete of a directory, not counted", lambda f, _: (f.delete("src"), f.delete("empty/")), (1, 0)),
    Row("delete of a directory, not recursive", lambda f, _: f.delete("src", recursive=False), IsADirectoryError),
    Row("list", lambda f, _: f.list(), (A, EMPTY, SRC)),
    Row("list of a directory", lambda f, _: f.list("src/"), (B,)),
    Row("list of a file", lambda f, _: f.list("a.py"), NotADirectoryError),
    Row("glob across slashes, with sizes", lambda f, _: f.glob("*.py"), (A, B)),
    Row("glob of a whole path", lambda f, _: (f.glob("s*b.py"), f.glob("b.py")), ((B,), ())),
    Row("grep", lambda f, _: [each.path for each in f.grep("^import")], ["a.py", "src/b.py"]),
    Row("grep by file", lambda f, _: f.grep("import", file_glob="src*"), (B_MATCH,)),
    Row("export and import return numbers", exported, (2, 3, True, 3, "import b\n")),
    Row("an export that fails", kept_archive, (["old"], "old")),
    Row("snapshot and restore", restored, (None, (B,))),
    Row("restore of nothing", lambda f, path: f.restore(path / "missing"), FileNotFoundError),
    Row("a path that leads out", lambda f, _: f.read("../x"), ValueError),
    # the first draft
    Row("content_hash", lambda f, _: [each.content_hash for each in f.list()], [A_HASH, None, None]),
    Row("names", lambda f, _: (f.read_file("a.py").content, f.list_dir("src")), ("import b\n", (B,))),
    Row("kinds", lambda f, _: (f.exists("a.py"), f.is_file("src"), f.is_dir("src")), (True, False, True)),
    Row("created", lambda f, _: f.write_file("new", "1"), WriteResult("new", 1, created=True)),
    Row("replaced", lambda f, _: f.write_file("a.py", "1"), WriteResult("a.py", 1, created=False)),
    Row("create_only", lambda f, _: f.write_file("a.py", "1", create_only=True), FileExistsError),
    Row("mkdir with a parent", lambda f, _: f.mkdir("p/q"), FileNotFoundError),
    Row("mkdir again", lambda f, _: f.mkdir("empty"), FileExistsError),
    Row("glob's result", lambda f, _: (f.glob("*", path="src").pattern, f.glob("b*", path="src").matches), ("*", (B,))),
    Row("grep's result", lambda f, _: (f.grep("x", path="src").pattern, len(f.grep("x").matches)), ("x", 1)),
    Row("grep's limit", lambda f, _: len(f.grep("import", max_matches=1)), 1),
    Row("grep's filter", lambda f, _: f.grep("import", glob_filter="src/*").matches, (B_MATCH,)),
    Row("SecurityError", lambda f, _: f.write_file("src/../../x", ""), SecurityError),
    Row("an absolute path", lambda f, _: f.read(f"{f.root}/src/../a.py").content, "import b\n"),
    Row("an absolute path that leads out", lambda f, _: f.read(f"{f.root}/../x"), PermissionError),
    Row(
        "events",
        lambda f, _: published(f),
        [FileWritten("new", 1), DirectoryCreated("d"), FileDeleted("new", 1)],
    ),
    # streams
    Row("TextWriter", lambda f, _: written_text(f), ((2, 3, "n/new.txt", "utf-8", False), True, "é\nabc")),
    Row("TextWriter, discarded", lambda f, _: written_text(f, fails=True), (False, True)),
    Row("a bad byte in a later line", lambda f, _: bad_line(f), ["good\n"]),
    Row("a bad byte in a page", lambda f, _: bad_page(f), UnicodeDecodeError),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_calls_answer_as_in_the_drafts(row: Row, files: DraftFilesystem, tmp_path: Path) -> None:
    check(row, files, tmp_path)


def check(row: Row, files: DraftFilesystem, tmp_path: Path) -> None:
    """Compare the result of a row's call; `tmp_path` is for archives."""
    if isinstance(row.expected, type):
        with pytest.raises(row.expected):
            row.call(files, tmp_path)
    else:
        assert row.call(files, tmp_path) == row.expected


def test_a_symlink_that_leads_nowhere_is_listed_and_deleted(tmp_path: Path) -> None:
    (tmp_path / "l").symlink_to("nowhere")
    (tmp_path / "d").mkdir()
    (tmp_path / "to-d").symlink_to("d")
    (tmp_path / "d/f").write_text("")
    files = DraftFilesystem(HostFilesystem(tmp_path))
    assert files.list()[1] == FileEntry("l", "file", None)
    assert files.delete("l") == 1
    assert files.delete("to-d") == 1
    assert files.exists("d/f")


def test_the_manager(files: DraftFilesystem, tmp_path: Path) -> None:
    manager = FilesystemSnapshotManager(files, tmp_path / "kept")
    made = manager.snapshot("one")
    archive = tmp_path / "kept" / "one.fs.zip"
    assert made == SnapshotInfo("one", archive, 2, archive.stat().st_size, made.created_at)
    assert json.loads(zipfile.ZipFile(archive).read("manifest.json"))["file_count"] == 2
    assert manager.filesystem is files
    with pytest.raises(SnapshotExistsError):
        manager.snapshot("one")
    files.delete("src")
    assert manager.rollback("one") == 2
    assert files.read("src/b.py").content == "x = 1\nimport c\n"
    assert manager.list_snapshots() == (made,)
    assert (manager.get("one"), manager.get("two"), manager.get("../one")) == (made, None, None)
    with pytest.raises(KeyError):
        manager.rollback("two")
    moved = archive.rename(tmp_path / "elsewhere.zip")
    assert manager.restore(moved) == 2
    moved.rename(archive)
    assert (manager.delete("one"), manager.delete("one"), manager.delete("../one")) == (True, False, False)
    archive.write_text("damaged")
    with pytest.raises(ArchiveError, match=r"one\.fs\.zip"):
        manager.get("one")


def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    manager = FilesystemSnapshot(InMemoryFilesystem())
    assert manager.snapshot("one").archive_path == tmp_path / "wink-fs-snapshots" / "one.fs.zip"
    (tmp_path / "wink-fs-snapshots").rename(tmp_path / "elsewhere")
    (tmp_path / "wink-fs-snapshots").symlink_to(tmp_path / "elsewhere")  # of somebody else, perhaps
    with pytest.raises(PermissionError, match="pass a snapshot_dir"):
        FilesystemSnapshot(InMemoryFilesystem())


def test_tools_answer_with_an_object() -> None:
    context = ToolContext(InMemoryFilesystem())
    done = call_tool(TOOLS["write_file"], {"path": "a", "content": "x"}, context)
    assert done.success
    assert done.value is not None
    failed = call_tool(TOOLS["read_file"], '{"path": "b"}', context)
    assert (failed.success, failed.value) == (False, None)
    assert "No such file" in failed.message
    assert not call_tool(TOOLS["read_file"], {"nonsense": 1}, context).success
    assert call_tool(TOOLS["ls"], {}) == ToolResult("No filesystem available", None, success=False)


def test_result_types_are_exported() -> None:
    names = "FileEntry FileStat FilesystemSnapshot GlobMatch GrepMatch ReadBytesResult ReadResult WriteResult"
    assert all(getattr(protocol, name).__module__ == "protocol.types" for name in names.split())
