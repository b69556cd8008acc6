"""Patterns decide as `git check-ignore` does, and in a time that no pattern makes long."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.adapters.git_patterns import GitPatterns, PathFilter

Entries = dict[str, bool]  # path -> whether it is a directory
NAMES = ("a", "b", "ab", "ba", "c", "a ", "*", "[", "aab", "]", "-")
PIECES = (
    "a", "b", "*", "?", "**", "a*", "*b", "[ab]", "[!a]", "\\a", "ab", "[a-c]", "\\*", " ", "a ", "[", "[]a]",
    "[[:alpha:]]", "[^]]", "[a-]", "[/a]", "[[:foo:]]", "***", "-", "[\\]a]",
)  # fmt: skip


@st.composite
def patterns(draw: st.DrawFn) -> str:
    component = st.lists(st.sampled_from(PIECES), min_size=1, max_size=2).map("".join)
    text = "/".join(draw(st.lists(component, min_size=1, max_size=4)))
    return (
        draw(st.sampled_from(("", "", "!")))
        + draw(st.sampled_from(("", "", "", "/", "/", "//")))
        + text
        + draw(st.sampled_from(("", "", "/")))
    )


@st.composite
def trees(draw: st.DrawFn) -> Entries:
    found: Entries = {}
    paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)
    for names in draw(st.lists(paths, min_size=4, max_size=14)):
        above = ["/".join(names[:end]) for end in range(1, len(names))]
        path = "/".join(names)
        if path in found or any(found.get(each) is False for each in above):
            continue
        found |= dict.fromkeys(above, True)
        found[path] = draw(st.booleans())
    return found


def ignored_by_git(lines: list[str], entries: Entries) -> set[str]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        subprocess.run(["git", "init", "-q", root], check=True)
        (root / ".git/info/exclude").write_text("\n".join(lines) + "\n")
        for path, is_directory in entries.items():
            if is_directory:
                (root / path).mkdir(parents=True, exist_ok=True)
            else:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).touch()
        asked = "\0".join(entries) + "\0"
        command = ["git", "-C", directory, "check-ignore", "-z", "--stdin", "--no-index"]
        done = subprocess.run(command, input=os.fsencode(asked), capture_output=True, check=False)
        return set(os.fsdecode(done.stdout).split("\0")) - {""}


@settings(max_examples=settings().max_examples // 2, deadline=None)
@given(st.lists(patterns(), min_size=1, max_size=3), trees())
@example(["*", "!/a/"], {"a": True, "a/b": False, "b": False})
@example(["a/**"], {"a": True, "a/b": False})
@example(["ab**/c"], {"ab": True, "ab/b": True, "ab/b/c": False, "aab": True, "aab/c": False})
@example(["a/", "!a/b"], {"a": True, "a/b": False})
@example(["//**", "//**/b"], {"a": True, "a/b": False, "b": False})
@example(["/a/b", "[!a]"], {"a": True, "a/b": False, "b": True, "b/a": False})
def test_the_answer_is_that_of_git(lines: list[str], entries: Entries) -> None:
    valid = []
    for line in lines:
        try:
            GitPatterns([line])
        except ValueError:
            # It matches nothing in git either, so that who gives it is wrong about what it does.
            assert line.startswith("!") or not ignored_by_git([line], entries)
        else:
            valid.append(line)
    found = GitPatterns(valid)
    ours = {path for path, is_dir in entries.items() if found.matches(path.encode(), is_directory=is_dir)}
    assert ours == ignored_by_git(valid, entries)


@pytest.mark.parametrize("line", ["", " ", "#", "# comment", "!", "/", "!/", "[", "a[b", "a\\", "a\0b", "a\nb"])
def test_a_pattern_that_matches_nothing_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is not a pattern"):
        GitPatterns([line])


def test_names_may_have_any_bytes() -> None:
    found = GitPatterns(["*.key", "\udcff?", "\\#x", "é?"])
    assert found.matches(b"\xfe\xff.key", is_directory=False)
    assert found.matches(b"d/\xff\xfe", is_directory=False)
    assert found.matches(b"#x", is_directory=False)
    assert found.matches("éa".encode(), is_directory=False)
    assert found.matches(b"x" * 251 + b".key", is_directory=False)
    assert not found.matches(b"", is_directory=True)
    assert GitPatterns(["*"]).matches(b"a\nb", is_directory=False)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("*a" * 60 + "*b", "a" * 255),
        ("?*" * 100 + "q", "b" * 255),
        ("[!a]*[!a]*" * 20 + "z", "b" * 255),
        ("**/*a/" * 8 + "c", "/".join(["aa"] * 1300)),
        ("**/a" * 40 + "/b", "/".join(["a"] * 1500)),
        ("x/**/" + "*a" * 30 + "/**/b", "x/" + "/".join(["a" * 250] * 16)),
    ],
)
def test_no_pattern_takes_long(line: str, path: str) -> None:
    found = GitPatterns([line])
    begun = time.process_time()
    assert not found.matches_here(path.encode(), is_directory=False)
    assert time.process_time() - begun < 1  # a backtracking matcher takes longer than the universe exists


def test_deep_directories_are_decided_without_recursion() -> None:
    path = b"/".join([b"d"] * 3000)
    assert not GitPatterns(["x"]).matches(path, is_directory=True)
    assert GitPatterns(["/d/d/"]).matches(path, is_directory=False)


def test_the_last_of_many_patterns_decides() -> None:
    many = [f"name-{number}" for number in range(500)] + [f"*.{number}" for number in range(499)]
    found = GitPatterns([*many, "!name-7"])
    assert found.matches(b"a/name-499", is_directory=False)
    assert found.matches(b"x.3", is_directory=False)
    assert not found.matches(b"name-7", is_directory=False)


def test_a_byte_that_is_not_utf8_matches_as_one_character() -> None:
    exclude = PathFilter(exclude=["*.log", "n?", "[!a-z].c"])
    assert exclude.hides(b"d\xff/\xff.log", is_directory=False)
    assert exclude.hides(b"n\xff", is_directory=False)
    assert exclude.hides(b"\xfe.c", is_directory=False)
    assert not exclude.hides(b"n\xff\xff", is_directory=False)
    include = PathFilter(include=["new/"])
    assert not include.lists(b"d\xff", is_directory=True)
    assert include.lists(b"\xff/new", is_directory=True)
    assert include.hides(b"\xff", is_directory=False)
