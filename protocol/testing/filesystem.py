"""FilesystemContract: the behaviour of every `Filesystem`; and the base and the helpers of the other suites."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, get_args

import pytest

from protocol.filesystem import Filesystem
from protocol.types import DEFAULT_READ_LINES, READ_ENTIRE_FILE, GrepMatch, WriteMode

_CALL_LIMIT: Final = 32 << 20
_READS: Final[list[Callable[[Filesystem, str], Any]]] = [
    lambda filesystem, path: filesystem.read(path),
    lambda filesystem, path: filesystem.read_bytes(path),
    lambda filesystem, path: filesystem.open_read(path),
    lambda filesystem, path: filesystem.open_text(path),
]
_ANY_FILE_CALL: Final = pytest.mark.parametrize(
    "call",
    [
        *_READS,
        lambda filesystem, path: filesystem.stat(path),
        lambda filesystem, path: filesystem.list(path),
        lambda filesystem, path: filesystem.delete(path),
        lambda filesystem, path: filesystem.glob("*", path=path),
        lambda filesystem, path: filesystem.grep("x", path=path),
    ],
    ids=["read", "read_bytes", "open_read", "open_text", "stat", "list", "delete", "glob", "grep"],
)
_PATH_CALLS: Final[list[Callable[[Filesystem, str], Any]]] = [
    *_READS,
    lambda filesystem, path: filesystem.exists(path),
    lambda filesystem, path: filesystem.is_file(path),
    lambda filesystem, path: filesystem.is_dir(path),
    lambda filesystem, path: filesystem.stat(path),
    lambda filesystem, path: filesystem.list(path),
    lambda filesystem, path: filesystem.delete(path, recursive=True),
    lambda filesystem, path: filesystem.glob("*", path=path),
    lambda filesystem, path: filesystem.grep("x", path=path),
    lambda filesystem, path: filesystem.write(path, "x"),
    lambda filesystem, path: filesystem.write_bytes(path, b"x", mode="append"),
    lambda filesystem, path: filesystem.open_write(path, mode="create"),
    lambda filesystem, path: filesystem.mkdir(path),
]
_READING: Final = pytest.mark.parametrize("call", _READS, ids=["read", "read_bytes", "open_read", "open_text"])


class FilesystemSuite:
    """Base of the suites over a filesystem.  A subclass overrides the fixture `filesystem`."""

    @pytest.fixture
    def filesystem(self) -> Any:
        raise NotImplementedError("override the fixture `filesystem`")


@contextmanager
def raises_os_error(kind: type[OSError], path: str) -> Iterator[None]:
    """Check that the block raises `kind`, with an errno and the normalised `path` as its file name."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.errno, f"{caught.value!r} has no errno"
    assert caught.value.filename == path


def contents(filesystem: Filesystem, path: str = ".") -> dict[str, bytes | None]:
    """Return everything below `path`: the content of each file, None for each directory."""
    found: dict[str, bytes | None] = {}
    for entry in filesystem.list(path):
        if entry.is_directory:
            found[entry.path] = None
            found.update(contents(filesystem, entry.path))
        else:
            with filesystem.open_read(entry.path) as reader:
                found[entry.path] = reader.read()
    return found


class _Reading:
    """Text and bytes, page by page."""

    def test_text_is_read_as_it_was_written(self, filesystem: Filesystem) -> None:
        text = "first\nsecond\n\tthird, ünïcode \U0001f600\n"
        filesystem.write("notes.txt", text)

        result = filesystem.read("notes.txt")

        assert (result.content, result.path, result.total_lines) == (text, "notes.txt", 3)
        assert (result.offset, result.limit, result.truncated) == (0, 3, False)

    @pytest.mark.parametrize(
        ("text", "lines"),
        [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("\n\n", 2), ("a\r\nb\rc\n", 2), ("a\x0bb\x0cc\u2028d\x85e", 1)],
    )
    def test_only_newlines_end_lines_and_nothing_is_altered(
        self, filesystem: Filesystem, text: str, lines: int
    ) -> None:
        filesystem.write("file", text)

        result = filesystem.read("file")

        assert (result.content, result.total_lines) == (text, lines)

    def test_a_page_begins_at_its_offset_and_ends_after_its_limit(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "".join(f"line {number}\r\n" for number in range(10)))

        result = filesystem.read("file", offset=3, limit=2)

        assert result.content == "line 3\r\nline 4\r\n"
        assert (result.offset, result.limit, result.total_lines, result.truncated) == (3, 2, 10, True)

    def test_the_last_page_is_not_truncated(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "0\n1\n2")

        result = filesystem.read("file", offset=1, limit=2)

        assert (result.content, result.truncated) == ("1\n2", False)

    def test_a_page_past_the_end_is_empty(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "0\n1\n")

        result = filesystem.read("file", offset=5)

        assert (result.content, result.offset, result.limit, result.truncated) == ("", 2, 0, False)

    def test_pages_together_are_the_file(self, filesystem: Filesystem) -> None:
        text = "".join(f"{number} {'x' * (number % 300)}\n" for number in range(2_000))
        filesystem.write("file", text)

        pages = [filesystem.read("file", offset=start, limit=7).content for start in range(0, 2_000, 7)]

        assert "".join(pages) == text

    def test_without_a_limit_a_read_returns_two_thousand_lines(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x\n" * (DEFAULT_READ_LINES + 1))

        result = filesystem.read("file")

        assert (result.limit, result.truncated) == (DEFAULT_READ_LINES, True)
        assert result.content == "x\n" * DEFAULT_READ_LINES

    def test_read_entire_file_returns_all_lines(self, filesystem: Filesystem) -> None:
        text = "x\n" * (DEFAULT_READ_LINES + 1)
        filesystem.write("file", text)

        result = filesystem.read("file", limit=READ_ENTIRE_FILE)

        assert (result.content, result.truncated) == (text, False)

    @pytest.mark.parametrize(("offset", "limit"), [(-1, None), (0, -2)])
    def test_negative_lines_are_refused(self, filesystem: Filesystem, offset: int, limit: int | None) -> None:
        filesystem.write("file", "x")

        with pytest.raises(ValueError, match="-"):
            filesystem.read("file", offset=offset, limit=limit)

    @pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"ok\n" * 100_000 + b"\xc3", b"caf\xe9\n"])
    def test_a_file_that_is_not_text_is_refused_in_favour_of_read_bytes(
        self, filesystem: Filesystem, data: bytes
    ) -> None:
        filesystem.write_bytes("file", data)

        with pytest.raises(ValueError, match="read_bytes"):
            filesystem.read("file")

    def test_a_character_across_two_chunks_is_decoded_whole(self, filesystem: Filesystem) -> None:
        text = "a" + "€" * 100_000
        filesystem.write("file", text)

        assert filesystem.read("file").content == text

    def test_other_encodings_can_be_named(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", "naïve\n".encode("utf-16"))

        assert filesystem.read("file", encoding="utf-16").content == "naïve\n"

    def test_an_unknown_encoding_is_refused(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x")

        with pytest.raises(ValueError, match="no-such-encoding"):
            filesystem.read("file", encoding="no-such-encoding")

    def test_bytes_are_read_as_they_were_written(self, filesystem: Filesystem) -> None:
        data = bytes(range(256)) * 1_000
        filesystem.write_bytes("file", data)

        result = filesystem.read_bytes("file")

        assert (result.content, result.path, result.size_bytes) == (data, "file", len(data))
        assert (result.offset, result.limit, result.truncated) == (0, len(data), False)

    def test_a_page_of_bytes_has_the_requested_offset_and_limit(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", b"0123456789")

        middle = filesystem.read_bytes("file", offset=2, limit=3)
        end = filesystem.read_bytes("file", offset=8, limit=10)
        past = filesystem.read_bytes("file", offset=20)

        assert (middle.content, middle.offset, middle.limit, middle.truncated) == (b"234", 2, 3, True)
        assert (end.content, end.limit, end.truncated) == (b"89", 2, False)
        assert (past.content, past.offset, past.truncated) == (b"", 10, False)

    @pytest.mark.parametrize(("offset", "limit"), [(-1, None), (0, -1)])
    def test_negative_bytes_are_refused(self, filesystem: Filesystem, offset: int, limit: int | None) -> None:
        filesystem.write("file", "x")

        with pytest.raises(ValueError, match="-"):
            filesystem.read_bytes("file", offset=offset, limit=limit)

    def test_a_file_over_the_limit_is_read_only_in_pages(self, filesystem: Filesystem) -> None:
        with filesystem.open_write("big") as writer:
            writer.write_all([b"x" * (1 << 20)] * 33)

        with pytest.raises(ValueError, match="limited"):
            filesystem.read_bytes("big")
        with pytest.raises(ValueError, match="limited"):
            filesystem.read("big")
        assert filesystem.read_bytes("big", limit=10).content == b"x" * 10
        assert len(filesystem.read_bytes("big", offset=1 << 20).content) == _CALL_LIMIT


class _Looking:
    """Attributes, listings and paths."""

    def test_stat_of_a_file_has_its_size(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("some/file", b"12345")

        seen = filesystem.stat("some/file")

        assert (seen.path, seen.is_file, seen.is_directory, seen.size_bytes) == ("some/file", True, False, 5)
        assert seen.modified_at is not None
        assert abs((datetime.now(UTC) - seen.modified_at).total_seconds()) < 3_600

    def test_stat_of_a_directory(self, filesystem: Filesystem) -> None:
        filesystem.mkdir("some/directory")

        seen = filesystem.stat("some/directory")

        assert (seen.path, seen.is_file, seen.is_directory) == ("some/directory", False, True)

    def test_every_spelling_of_the_root_is_a_directory(self, filesystem: Filesystem) -> None:
        for path in (".", "/", "", "..", "a/.."):
            seen = filesystem.stat(path)
            assert (seen.path, seen.is_directory) == (".", True)

    def test_exists_is_file_and_is_dir(self, filesystem: Filesystem) -> None:
        filesystem.write("directory/file", "x")

        assert [filesystem.exists(path) for path in ("directory/file", "directory", "other")] == [True, True, False]
        assert [filesystem.is_file(path) for path in ("directory/file", "directory", "other")] == [True, False, False]
        assert [filesystem.is_dir(path) for path in ("directory/file", "directory", "other")] == [False, True, False]
        assert not filesystem.exists("directory/file/below")

    def test_a_directory_lists_its_entries_sorted_by_name(self, filesystem: Filesystem) -> None:
        for path in ("d/b.txt", "d/a/inner", "d/C", "other"):
            filesystem.write(path, "x")

        entries = filesystem.list("d")

        assert [(each.name, each.path, each.is_file, each.is_directory) for each in entries] == [
            ("C", "d/C", True, False),
            ("a", "d/a", False, True),
            ("b.txt", "d/b.txt", True, False),
        ]

    def test_list_without_a_path_lists_the_root(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x")

        assert [each.path for each in filesystem.list()] == ["file"]

    def test_unusual_names_are_kept(self, filesystem: Filesystem) -> None:
        names = sorted([" leading", "new\nline", 'quo"te', "ünïcode", "*?[x]{a,b}", "-rf", "back\\slash", ".hidden"])
        for name in names:
            filesystem.write(f"odd/{name}", name)

        assert sorted(entry.name for entry in filesystem.list("odd")) == names
        assert [filesystem.read(f"odd/{name}").content for name in names] == names

    @pytest.mark.parametrize("path", ["/a/b", "a//b", "./a/./b", "a/x/../b", "../../a/b", "a/b/", "/../a/b"])
    def test_paths_are_relative_to_the_root_and_cannot_leave_it(self, filesystem: Filesystem, path: str) -> None:
        filesystem.write("a/b", "here")

        result = filesystem.read(path)

        assert (result.content, result.path) == ("here", "a/b")

    def test_nothing_is_written_outside_the_root(self, filesystem: Filesystem) -> None:
        result = filesystem.write("../../outside", "x")

        assert result.path == "outside"
        assert contents(filesystem) == {"outside": b"x"}

    def test_a_path_with_nul_is_refused(self, filesystem: Filesystem) -> None:
        with pytest.raises(ValueError, match="NUL"):
            filesystem.read("a\0b")


class _Errors:
    """Built-in exceptions, each with an errno and a file name."""

    @_ANY_FILE_CALL
    def test_a_missing_path_is_not_found(
        self, filesystem: Filesystem, call: Callable[[Filesystem, str], object]
    ) -> None:
        with raises_os_error(FileNotFoundError, "no/such"):
            call(filesystem, "/no/./such")

    @_ANY_FILE_CALL
    def test_a_path_below_a_file_is_not_a_directory(
        self, filesystem: Filesystem, call: Callable[[Filesystem, str], object]
    ) -> None:
        filesystem.write("file", "x")

        with raises_os_error(NotADirectoryError, "file/below"):
            call(filesystem, "file/below")

    @_READING
    def test_a_directory_cannot_be_read(
        self, filesystem: Filesystem, call: Callable[[Filesystem, str], object]
    ) -> None:
        filesystem.mkdir("directory")

        with raises_os_error(IsADirectoryError, "directory"):
            call(filesystem, "directory")

    def test_a_file_cannot_be_listed(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x")

        with raises_os_error(NotADirectoryError, "file"):
            filesystem.list("file")

    @pytest.mark.parametrize("name", ["n" * 256, "\U0001f600" * 64], ids=["256 characters", "64 characters of 4 bytes"])
    def test_a_name_over_255_bytes_is_refused_by_every_call(self, filesystem: Filesystem, name: str) -> None:
        for call in _PATH_CALLS:
            for path in (name, f"above/{name}/below"):
                with pytest.raises(ValueError, match="255"):
                    call(filesystem, path)

        assert contents(filesystem) == {}

    def test_a_name_of_255_bytes_is_a_name(self, filesystem: Filesystem) -> None:
        name = "\U0001f600" * 63 + "abc"
        filesystem.write(name, "x")

        assert filesystem.read(name).content == "x"
        assert not filesystem.exists("n" * 255)
        with raises_os_error(FileNotFoundError, "n" * 255):
            filesystem.stat("n" * 255)

    def test_a_directory_with_entries_is_deleted_only_with_recursive(self, filesystem: Filesystem) -> None:
        filesystem.write("directory/file", "x")

        with pytest.raises(IsADirectoryError, match="Directory not empty") as caught:
            filesystem.delete("directory")

        assert (caught.value.errno, caught.value.filename) == (errno.ENOTEMPTY, "directory")
        assert filesystem.exists("directory/file")


_FILES = ("a.py", "b.txt", "src/a.py", "src/lib/c.py", "src/lib/d.js", "src/lib/deep/e.py", "tests/a.py")


class _Searching:
    """The contract of searches."""

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*.py", ["a.py", "src/a.py", "src/lib/c.py", "src/lib/deep/e.py", "tests/a.py"]),
            ("src/*", ["src/a.py"]),
            ("src/*/*.py", ["src/lib/c.py"]),
            ("src/**/*.py", ["src/a.py", "src/lib/c.py", "src/lib/deep/e.py"]),
            ("**/lib/*", ["src/lib/c.py", "src/lib/d.js"]),
            ("{src,tests}/a.py", ["src/a.py", "tests/a.py"]),
            ("*.{js,txt}", ["b.txt", "src/lib/d.js"]),
            ("?.txt", ["b.txt"]),
            ("[ab].py", ["a.py", "src/a.py", "tests/a.py"]),
            ("nothing", []),
            ("src", []),
        ],
    )
    def test_glob_returns_the_matching_files_sorted(
        self, filesystem: Filesystem, pattern: str, expected: list[str]
    ) -> None:
        for path in _FILES:
            filesystem.write(path, "x")

        found = filesystem.glob(pattern)

        assert [match.path for match in found] == expected
        assert all(match.is_file for match in found)

    def test_glob_below_a_directory_is_relative_to_it(self, filesystem: Filesystem) -> None:
        for path in _FILES:
            filesystem.write(path, "x")

        assert [match.path for match in filesystem.glob("lib/*.py", path="/src/")] == ["src/lib/c.py"]

    def test_grep_returns_the_first_match_of_each_line(self, filesystem: Filesystem) -> None:
        filesystem.write("b", "none\nüber foo and foo\n")
        filesystem.write("a/c", "foo\nbar")

        assert list(filesystem.grep("fo+")) == [
            GrepMatch("a/c", 1, "foo", 0, 3),
            GrepMatch("b", 2, "über foo and foo", 5, 8),
        ]

    def test_grep_takes_a_directory_a_file_and_a_pattern_of_files(self, filesystem: Filesystem) -> None:
        for path in _FILES:
            filesystem.write(path, "needle\n")

        assert [match.path for match in filesystem.grep("needle", path="src/lib", glob="*.py")] == [
            "src/lib/c.py",
            "src/lib/deep/e.py",
        ]
        assert [match.path for match in filesystem.grep("needle", path="src/a.py")] == ["src/a.py"]

    def test_grep_returns_at_most_a_thousand_matches_or_max_matches(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x\n" * 1_500)

        assert len(filesystem.grep("x")) == 1_000
        assert [match.line_number for match in filesystem.grep("x", max_matches=3)] == [1, 2, 3]
        assert len(filesystem.grep("x", max_matches=1_200)) == 1_200

    def test_grep_skips_files_that_are_not_text(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("binary", b"needle\0")
        filesystem.write_bytes("latin", b"needle caf\xe9\n")
        filesystem.write("text", "needle")

        assert [match.path for match in filesystem.grep("needle")] == ["text"]

    def test_grep_refuses_an_invalid_expression(self, filesystem: Filesystem) -> None:
        with pytest.raises(ValueError, match=r".+"):
            filesystem.grep("(")

    def test_grep_refuses_a_negative_count(self, filesystem: Filesystem) -> None:
        with pytest.raises(ValueError, match="-1"):
            filesystem.grep("x", max_matches=-1)

    def test_glob_below_a_file_is_an_error(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x")

        with raises_os_error(NotADirectoryError, "file"):
            filesystem.glob("*", path="file")


_MODES: Final = pytest.mark.parametrize("mode", get_args(WriteMode))


class _Writing:
    """The contract of changes."""

    @_MODES
    def test_every_mode_makes_a_new_file_and_its_parents(self, filesystem: Filesystem, mode: WriteMode) -> None:
        result = filesystem.write("deep/down/file", "grün", mode=mode)

        assert (result.path, result.bytes_written, result.mode) == ("deep/down/file", 5, mode)
        assert contents(filesystem) == {"deep": None, "deep/down": None, "deep/down/file": "grün".encode()}

    def test_overwrite_replaces_what_was_there(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", b"a long old content")

        filesystem.write_bytes("file", b"new")

        assert contents(filesystem) == {"file": b"new"}

    def test_append_adds_to_what_was_there(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "one\n")

        result = filesystem.write("file", "two\n", mode="append")

        assert result.bytes_written == 4
        assert contents(filesystem) == {"file": b"one\ntwo\n"}

    def test_create_leaves_a_file_that_is_there_alone(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "old")

        with raises_os_error(FileExistsError, "file"):
            filesystem.write("file", "new", mode="create")

        assert contents(filesystem) == {"file": b"old"}

    @_MODES
    def test_an_empty_file_is_a_file(self, filesystem: Filesystem, mode: WriteMode) -> None:
        assert filesystem.write("file", "", mode=mode).bytes_written == 0
        assert contents(filesystem) == {"file": b""}

    @_MODES
    def test_a_directory_cannot_be_written(self, filesystem: Filesystem, mode: WriteMode) -> None:
        filesystem.mkdir("directory")

        with raises_os_error(IsADirectoryError, "directory"):
            filesystem.write("directory", "x", mode=mode)

    @_MODES
    def test_nothing_can_be_written_below_a_file(self, filesystem: Filesystem, mode: WriteMode) -> None:
        filesystem.write("file", "x")

        for path in ("file/below", "file/far/below"):
            with raises_os_error(NotADirectoryError, path):
                filesystem.write(path, "x", mode=mode)

    @_MODES
    def test_the_root_cannot_be_written(self, filesystem: Filesystem, mode: WriteMode) -> None:
        for path in (".", "/", "a/.."):
            with pytest.raises(ValueError, match="root"):
                filesystem.write(path, "x", mode=mode)

    def test_an_unknown_mode_is_refused(self, filesystem: Filesystem) -> None:
        with pytest.raises(ValueError, match="truncate"):
            filesystem.write("file", "x", mode="truncate")  # type: ignore[arg-type]

        assert contents(filesystem) == {}

    @_MODES
    def test_a_missing_parent_is_made_only_when_allowed(self, filesystem: Filesystem, mode: WriteMode) -> None:
        with raises_os_error(FileNotFoundError, "no/file"):
            filesystem.write("no/file", "x", mode=mode, create_parents=False)

        assert contents(filesystem) == {}

    def test_a_write_over_the_limit_changes_nothing(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "old")

        with pytest.raises(ValueError, match="limited"):
            filesystem.write_bytes("file", bytes(_CALL_LIMIT + 1))
        with pytest.raises(ValueError, match="limited"):
            filesystem.write("new/file", "é" * (_CALL_LIMIT // 2 + 1))

        assert contents(filesystem) == {"file": b"old"}

    def test_text_that_utf8_cannot_say_is_refused_and_changes_nothing(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "old")

        with pytest.raises(ValueError, match="surrogates"):
            filesystem.write("file", "\udcff")

        assert contents(filesystem) == {"file": b"old"}

    def test_too_deep_a_path_is_not_created(self, filesystem: Filesystem) -> None:
        deepest = "/".join("d" * 16)
        filesystem.write(deepest, "x")

        with pytest.raises(ValueError, match="deep"):
            filesystem.write("new/" + deepest, "x")
        with pytest.raises(ValueError, match="deep"):
            filesystem.mkdir("new/" + deepest)

        assert not filesystem.exists("new")

    def test_too_long_a_name_is_not_created(self, filesystem: Filesystem) -> None:
        filesystem.write("n" * 80, "x")

        with pytest.raises(ValueError, match="80"):
            filesystem.write("new/" + "n" * 81, "x")

        assert not filesystem.exists("new")

    # -- directories -------------------------------------------------------------------------
    def test_a_directory_is_made_with_its_parents(self, filesystem: Filesystem) -> None:
        filesystem.mkdir("a/b/c")

        assert contents(filesystem) == {"a": None, "a/b": None, "a/b/c": None}

    def test_a_directory_that_is_there_is_fine_unless_it_must_be_new(self, filesystem: Filesystem) -> None:
        filesystem.write("directory/file", "x")

        filesystem.mkdir("directory")
        with raises_os_error(FileExistsError, "directory"):
            filesystem.mkdir("directory", exist_ok=False)

        assert contents(filesystem) == {"directory": None, "directory/file": b"x"}

    def test_a_directory_is_not_made_over_or_below_a_file(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x")

        with raises_os_error(FileExistsError, "file"):
            filesystem.mkdir("file")
        with raises_os_error(NotADirectoryError, "file/below"):
            filesystem.mkdir("file/below")

    def test_without_parents_the_parent_must_be_there(self, filesystem: Filesystem) -> None:
        with raises_os_error(FileNotFoundError, "a/b"):
            filesystem.mkdir("a/b", parents=False)

        assert contents(filesystem) == {}

    def test_the_root_is_there_already(self, filesystem: Filesystem) -> None:
        filesystem.mkdir(".")

        with raises_os_error(FileExistsError, "."):
            filesystem.mkdir("/", exist_ok=False)

    # -- deleting ----------------------------------------------------------------------------
    def test_a_file_is_deleted_and_counted(self, filesystem: Filesystem) -> None:
        filesystem.write("d/file", "x")
        filesystem.write("d/other", "y")

        assert filesystem.delete("d/file") == 1
        assert contents(filesystem) == {"d": None, "d/other": b"y"}

    def test_an_empty_directory_is_deleted_without_recursive(self, filesystem: Filesystem) -> None:
        filesystem.mkdir("directory")

        assert filesystem.delete("directory") == 1
        assert contents(filesystem) == {}

    def test_a_directory_is_deleted_with_all_that_is_in_it_and_each_entry_counted(self, filesystem: Filesystem) -> None:
        for path in ("d/a", "d/b/c", "d/b/e/f", "other"):
            filesystem.write(path, "x")

        assert filesystem.delete("d", recursive=True) == 6
        assert contents(filesystem) == {"other": b"x"}

    def test_the_root_is_not_deleted(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x")

        with pytest.raises(ValueError, match="root"):
            filesystem.delete("/", recursive=True)

        assert contents(filesystem) == {"file": b"x"}

    # -- a write that fails --------------------------------------------------------------------
    @pytest.mark.parametrize("mode", ["create", "overwrite"])
    def test_a_writer_that_fails_leaves_no_trace(self, filesystem: Filesystem, mode: WriteMode) -> None:
        filesystem.write("d/other", "x")
        if mode == "overwrite":
            filesystem.write("d/file", "old")
        before = contents(filesystem)

        with contextlib.suppress(ZeroDivisionError), filesystem.open_write("d/file", mode=mode) as writer:
            writer.write(b"half")
            raise ZeroDivisionError

        assert contents(filesystem) == before


class FilesystemContract(_Reading, _Looking, _Errors, _Writing, _Searching, FilesystemSuite):
    """The contract of `Filesystem`.  `filesystem` is new, empty and writable."""

    def test_it_has_every_method_of_the_contract(self, filesystem: Filesystem) -> None:
        assert isinstance(filesystem, Filesystem)
        assert isinstance(filesystem.root, str)
        assert filesystem.read_only is False
