"""The summary of changes: which are shown one by one, and which lines stand for many."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vfsd.cli.common.summary import ChangeGroup, IgnoreRules, summarize
from vfsd.cli.run import selected
from vfsd.operations.declaration import ChangeRecord


def change(kind: str, path: str, **fields: Any) -> ChangeRecord:
    type_ = "directory" if path.endswith("/") else "file"
    return ChangeRecord(path.rstrip("/"), kind, type_, **fields)  # type: ignore[arg-type]


def added(*paths: str) -> list[ChangeRecord]:
    return [change("added", path) for path in paths]


@pytest.fixture
def rules(tmp_path: Path) -> IgnoreRules:
    (tmp_path / ".gitignore").write_text(".venv/\n*.log\n.env\n")
    return IgnoreRules(str(tmp_path))


def test_files_come_first_and_directories_are_one_line_each(rules: IgnoreRules) -> None:
    changes = [
        *added(".venv/", ".venv/bin/", ".venv/bin/python", ".venv/lib", "feature/", "feature/sub/"),
        *(change("added", f"feature/sub/{name}", lines_added=2) for name in "ab"),
        *added("sub/.git/objects/", "sub/.git/objects/1", "src/x.log", "single/", "single/file"),
        change("modified", "sub/.git/index"),
        change("modified", "src/a.py"),
        *(change("removed", path) for path in ("old/", "old/1", "old/2")),
    ]
    summary = summarize(changes, rules)
    assert [record.path for record in summary.files] == ["single/file", "src/a.py"]
    assert summary.groups == [
        ChangeGroup("feature/", "new", added=2, lines_added=4),
        ChangeGroup("old/", "removed", removed=2),
        ChangeGroup(".venv/", "ignored", added=2),
        ChangeGroup("src/x.log", "ignored", added=1),
        ChangeGroup("sub/.git/", "git", added=1, modified=1),
    ]
    texts = ["2 new, 4 insertions(+)", "2 removed", "2 new, ignored", "1 new, ignored", "1 new, 1 modified"]
    assert [group.describe() for group in summary.groups] == texts
    assert summary.paths[:3] == ["single/file", "src/a.py", "feature"]
    assert summary.left_out_of_patches == ["/.venv/", "/src/x.log", "/sub/.git/"]


def test_an_ignored_file_that_existed_is_shown_and_so_is_an_empty_directory(rules: IgnoreRules) -> None:
    changes = [change("modified", ".env"), change("removed", "a.log"), *added("empty/"), change("metadata", "src/")]
    summary = summarize(changes, rules)
    assert [record.path for record in summary.files] == [".env", "a.log", "empty", "src"]
    assert summary.groups == []


PATTERNS = {
    "": "*.o\n!keep.o\nbuild/\n/top\ndocs/*.html\n\n# a comment\n!docs/index.html\n",
    "a/": "!x.o\n*.tmp\n",
    "a/b/": "*\n!c\n",
}
PATHS = (
    "x.o", "keep.o", "build/", "build/keep.o", "top", "a/top", "docs/a.html", "docs/index.html", "docs/sub/a.html",
    "a/x.o", "a/y.o", "a/build/", "a/z.tmp", "z.tmp", "a/b/", "a/b/d", "a/b/x.o", "a/b/c/", "a/b/c/e",
    "excluded",
)  # fmt: skip


@pytest.mark.parametrize("place", ["", "a"])
def test_a_path_is_ignored_as_git_says(place: str, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".git/info/exclude").write_text("excluded\n")
    for directory, text in PATTERNS.items():
        (tmp_path / directory).mkdir(exist_ok=True)
        (tmp_path / directory / ".gitignore").write_text(text)
    for path in PATHS:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).mkdir(exist_ok=True) if path.endswith("/") else (tmp_path / path).touch()
    rules = IgnoreRules(str(tmp_path / place))
    paths = [os.path.relpath(path, place or ".") for path in PATHS]
    inside = [path for path in paths if not path.startswith(".")]
    git = ["git", "-C", tmp_path / place, "check-ignore", "--no-index", *inside]
    ignored = subprocess.run(git, capture_output=True, text=True, check=False).stdout.splitlines()
    assert [path for path in inside if is_ignored(rules, path, tmp_path / place)] == ignored


def is_ignored(rules: IgnoreRules, path: str, root: Path) -> bool:
    parts = path.split("/")
    prefixes = ["/".join(parts[: number + 1]) for number in range(len(parts))]
    return any(rules.ignores(each.encode(), is_directory=(root / each).is_dir()) for each in prefixes)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("", []),
        ("1 3-4", ["a", "src/x", "src/y"]),
        ("src/ a", ["a", "src/x", "src/y"]),
        ("2", ["2"]),
        ("1,3-4", ["a", "src/x", "src/y"]),
        ("1, 3", ["a", "src/x"]),
    ],
)
def test_paths_are_selected_by_number_range_and_path(words: str, chosen: Sequence[str]) -> None:
    assert selected(words, ["a", "2", "src/x", "src/y"]) == chosen


@pytest.mark.parametrize("words", ["5", "0", "3-9", "4-3", "sr", "b", ","])
def test_a_word_that_selects_nothing_is_named(words: str) -> None:
    with pytest.raises(ValueError, match=f"{words} is neither one of the paths nor a number from 1 to 4"):
        selected(words, ["a", "2", "src/x", "src/y"])
