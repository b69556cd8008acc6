"""SearchContract: `glob` and `grep` of a `Filesystem`; a part of FilesystemContract."""

from __future__ import annotations

import pytest

from protocol.filesystem import Filesystem
from protocol.testing.checks import raises_os_error
from protocol.types import GrepMatch

_FILES = ("a.py", "b.txt", "src/a.py", "src/lib/c.py", "src/lib/d.js", "src/lib/deep/e.py", "tests/a.py")


class SearchContract:
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
