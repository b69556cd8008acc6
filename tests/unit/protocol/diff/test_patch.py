"""Patches, applied by the real `patch -p1` and `git apply`; line edits are correct for any two texts."""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import re
import stat
import subprocess
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.diff.patch import (
    TEXT_LIMIT_LINES,
    Edit,
    LineStat,
    Uncarried,
    edits,
    is_refused_by_git,
    line_stat,
    write_patch,
)
from protocol.diff.tree_diff import changes
from protocol.tree import TreeEntry
from tests.support.suites import one_of
from tests.support.trees import DictTree

Items: TypeAlias = dict[bytes, bytes | str | tuple[TreeEntry, bytes] | None]
Tool: TypeAlias = Literal["patch", "git"]
TOOLS: tuple[Tool, ...] = ("patch", "git")
COMMANDS = {"patch": ["patch", "-p1", "--batch", "--no-backup-if-mismatch", "-i"], "git": ["git", "apply"]}
# Nothing of a developer's git configuration, nor a repository around the scratch directory.
ENVIRONMENT = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent", "LC_ALL": "C"}

# What a patch keeps of a file: a symlink's target, or the executable bit and the content.
Kept: TypeAlias = str | tuple[bool, bytes]


def executable(content: bytes) -> tuple[TreeEntry, bytes]:
    return TreeEntry(b"", stat.S_IFREG | 0o755), content


def tree_with(tree: DictTree, path: bytes, content: bytes) -> None:
    added = DictTree({path: content})
    tree.by_path |= added.by_path
    tree.content |= added.content


def fifo() -> tuple[TreeEntry, bytes]:
    return TreeEntry(b"", stat.S_IFIFO | 0o644), b""


def patch_of(old: DictTree, new: DictTree) -> bytes:
    out = io.BytesIO()
    write_patch(old, new, changes(old, new), out)
    return out.getvalue()


def put(tree: DictTree, root: bytes) -> None:
    """Write `tree` below the directory `root`."""
    for entry in tree.walk():
        path = os.path.join(root, entry.path)
        if entry.is_dir:
            os.makedirs(path, exist_ok=True)
        elif entry.is_symlink:
            os.symlink(entry.target, path)
        elif entry.is_file:
            Path(os.fsdecode(path)).write_bytes(tree.content[entry.path])
            os.chmod(path, entry.mode & 0o777)
        elif stat.S_ISFIFO(entry.mode):
            os.mkfifo(path)


def kept_on_disk(root: bytes) -> dict[bytes, Kept]:
    found: dict[bytes, Kept] = {}
    for where, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(where, name)
            relative = os.path.relpath(path, root)
            if os.path.islink(path):
                found[relative] = os.fsdecode(os.readlink(path))
            elif os.path.isfile(path):
                content = Path(os.fsdecode(path)).read_bytes()
                found[relative] = (bool(os.stat(path).st_mode & 0o100), content)
    return found


def kept_of(tree: DictTree) -> dict[bytes, Kept]:
    return {
        entry.path: os.fsdecode(entry.target)
        if entry.is_symlink
        else (bool(entry.mode & 0o100), tree.content[entry.path])
        for entry in tree.walk()
        if entry.is_symlink or entry.is_file
    }


def apply_fails(tool: Tool, old: DictTree, text: bytes) -> bool:
    try:
        apply(tool, old, text)
    except AssertionError:
        return True
    return False


def apply(tool: Tool, old: DictTree, text: bytes, *options: str) -> dict[bytes, Kept]:
    """What is on the disk after `tool` applied the patch `text` to `old`."""
    with tempfile.TemporaryDirectory() as scratch:
        root = os.fsencode(scratch) + b"/tree"
        put(old, root)
        file = Path(scratch) / "change.patch"
        file.write_bytes(text)
        done = subprocess.run(
            [*COMMANDS[tool], str(file), *options],
            cwd=root,
            env=ENVIRONMENT,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, (text, done.stdout, done.stderr)
        # A hunk that had to be searched for, or a reject, is not what an exact patch gives.
        assert b"fuzz" not in done.stdout
        return kept_on_disk(root)


tool = one_of(TOOLS)


LONG = b"".join(b"line %d\n" % n for n in range(100))

CASES: dict[str, tuple[Items, Items]] = {
    "modified": ({b"a": b"one\ntwo\nthree\n"}, {b"a": b"one\n2\nthree\n"}),
    "two hunks": ({b"a": LONG}, {b"a": b"first\n" + LONG.replace(b"line 90", b"changed")}),
    "no newline in old": ({b"a": b"one\ntwo"}, {b"a": b"one\ntwo\n"}),
    "no newline in new": ({b"a": b"one\ntwo\n"}, {b"a": b"one\ntwo"}),
    "no newline in either": ({b"a": b"one\ntwo"}, {b"a": b"1\ntwo"}),
    "carriage returns": ({b"a": b"one\r\ntwo\r\n"}, {b"a": b"one\r\n2\r\nthree\rfour\n"}),
    "line ends only": ({b"a": b"one\r\ntwo\r\n"}, {b"a": b"one\ntwo\n"}),
    "trailing blanks": ({b"a": b"x\n"}, {b"a": b"x \t \n\n\n"}),
    "not UTF-8": ({b"a": b"\xff\xfe\x80\n"}, {b"a": b"\xff\x81\n"}),
    "NUL past the probe": ({b"a": b"x" * 8000 + b"\n\0\n"}, {b"a": b"x" * 8000 + b"\n\0y\n"}),
    "looks like a patch": ({b"a": b"x\n"}, {b"a": b"-- a/x\n++ b/x\n@@ -1 +1 @@\ndiff --git a/x b/x\n"}),
    "added": ({}, {b"d/e/f": b"text\n"}),
    "removed": ({b"d/e/f": b"text\n", b"keep": b""}, {b"keep": b""}),
    "empty added": ({b"keep": b""}, {b"keep": b"", b"d/new": b""}),
    "empty removed": ({b"keep": b"", b"gone": b""}, {b"keep": b""}),
    "emptied": ({b"a": b"text\n"}, {b"a": b""}),
    "filled": ({b"a": b""}, {b"a": b"text\n"}),
    "made executable": ({b"a b": b"x\n"}, {b"a b": executable(b"x\n")}),
    "executable no more, modified": ({b"a": executable(b"x\n")}, {b"a": b"y\n"}),
    "executable added": ({}, {b"a": executable(b"#!/bin/sh\n")}),
    "binary made executable": ({b"a": b"\0"}, {b"a": executable(b"\0")}),
    "symlink added": ({}, {b"s": "some/where"}),
    "symlink removed": ({b"s": "some/where", b"x": b""}, {b"x": b""}),
    "symlink moved": ({b"s": "some/where"}, {b"s": "else where"}),
    "file to symlink": ({b"x": b"file\n"}, {b"x": "target"}),
    "symlink to file": ({b"x": "target"}, {b"x": b"file\n"}),
    "empty to symlink": ({b"x": b""}, {b"x": "t"}),
    "symlink to empty": ({b"x": "t"}, {b"x": b""}),
    # Executable is a file whose owner may execute it.
    **{
        f"mode {mode:o}": ({}, {b"a": (TreeEntry(b"", stat.S_IFREG | mode), b"x\n")})
        for mode in (0o744, 0o700, 0o655, 0o611)
    },
}

ODD_NAMES = [
    b"two words", b" lead", b"trail ", b"tab\there", b'say "hi"', b"new\nline", b"return\r", b"back\\slash",
    b"\xff\xfe", "é".encode(), b"'", b"#", b"-p1", b"a/b c/d", b"\x01\x7f", b"b", b"dev/null", b"{a,b}", b"$(x)",
]  # fmt: skip


for name in ODD_NAMES:
    CASES[repr(name)] = (
        {name: b"old\n", name + b".gone": b"", name + b".mode": b"x"},
        {name: b"new\n", name + b".empty": b"", name + b".mode": executable(b"x"), name + b".text": b"t\n"},
    )


@pytest.mark.parametrize("case", CASES)
def test_an_applied_patch_makes_the_new_tree(case: str, tool: Tool) -> None:
    before, after = CASES[case]
    old, new = DictTree(before), DictTree(after)
    assert apply(tool, old, patch_of(old, new)) == kept_of(new)


def uncarried_of(old: DictTree, new: DictTree) -> tuple[bytes, list[Uncarried]]:
    """The patch, and what it says it lacks."""
    out, found = io.BytesIO(), list[Uncarried]()
    write_patch(old, new, changes(old, new), out, on_uncarried=found.append)
    return out.getvalue(), found


def test_what_a_patch_cannot_carry_is_named_and_skipped_by_both_tools(tool: Tool) -> None:
    old = DictTree({b"text": b"one\n", b"mode": b"x", b"empty": None, b"two words": fifo(), b"was/here": b"x"})
    after: Items = {b"text": b"two\n", b"mode": executable(b"x"), b"was": None}
    new = DictTree({**after, b"hollow": None, b"pipe": fifo(), b"two words": b"no fifo"})
    text, found = uncarried_of(old, new)
    named = [line for line in text.split(b"\n") if line.startswith(b"#")]
    assert named == [
        b"# Not in this patch: empty (an empty directory)",
        b"# Not in this patch: hollow (an empty directory)",
        b"# Not in this patch: pipe (a special file)",
        b'# Not in this patch: "two words" (a special file)',
        b"# Not in this patch: was (a directory that is empty now)",
    ]
    assert [(each.path, each.is_usual) for each in found] == [
        (b"empty", True),
        (b"hollow", True),
        (b"pipe", False),
        (b"two words", False),
        (b"was", True),
    ]
    assert apply(tool, old, text) == {b"text": (False, b"two\n"), b"mode": (True, b"x")}


BINARY = b"\0" + bytes(range(256)) * 3
GIT_CASES: dict[str, tuple[Items, Items]] = {
    "changed": ({b"a": BINARY}, {b"a": BINARY[::-1] + b"\0"}),
    "added": ({b"keep": b""}, {b"keep": b"", b"d/a b": BINARY}),
    "removed": ({b"keep": b"", b"a": BINARY}, {b"keep": b""}),
    "of text": ({b"a": b"text\n"}, {b"a": b"\0"}),
    "to text": ({b"a": b"\0"}, {b"a": b"text"}),
    "to empty": ({b"a": b"\0"}, {b"a": b""}),
    "of empty": ({b"a": b""}, {b"a": b"\0"}),
    "made executable": ({b"a": BINARY}, {b"a": executable(BINARY + b"!")}),
    "to symlink": ({b"a": BINARY}, {b"a": "target"}),
    "of symlink": ({b"a": "target"}, {b"a": BINARY}),
    "to directory": ({b"a": BINARY}, {b"a/b": BINARY}),
    "of directory": ({b"a/b": BINARY, b"a/c": b"text\n"}, {b"a": BINARY}),
    # GNU patch deletes only after it has looked at all files.
    "file to directory": ({b"x": b"file\n"}, {b"x/y": b"below\n"}),
    "directory to file": ({b"x/y": b"below\n", b"x/z/w": b"more\n"}, {b"x": b"file\n"}),
    "directory to symlink": ({b"x/y": b"below\n"}, {b"x": "target"}),
    "symlink to directory": ({b"x": "target"}, {b"x/y": b"below\n"}),
    "next to text": ({b"a": BINARY, b"t": b"1"}, {b"a": BINARY[1:], b"t": b"2"}),
}


@pytest.mark.parametrize("case", GIT_CASES)
def test_git_applies_what_gnu_patch_refuses_and_takes_it_back(case: str) -> None:
    before, after = GIT_CASES[case]
    old, new = DictTree(before), DictTree(after)
    text = patch_of(old, new)
    assert apply("git", old, text) == kept_of(new)
    assert apply("git", new, text, "-R") == kept_of(old)


@pytest.mark.parametrize("size", [0, 1, 3, 25, 26, 27, 51, 52, 53, 103, 104, 105, 5_000, 300_000])
def test_binary_content_of_any_length_is_carried(size: int) -> None:
    # Random, so that the deflated length is near the length itself and meets every line length.
    noise = random.Random(size)
    old, new = DictTree({b"a": b"\0old"}), DictTree({b"a": b"\0" + noise.randbytes(size)})
    text = patch_of(old, new)
    assert apply("git", old, text) == kept_of(new)
    assert apply("git", new, text, "-R") == kept_of(old)


def test_gnu_patch_says_that_it_does_not_apply_a_binary_change() -> None:
    old, new = DictTree({b"a": b"\0", b"t": b"1\n"}), DictTree({b"a": b"\0!", b"t": b"2\n"})
    with tempfile.TemporaryDirectory() as scratch:
        put(old, os.fsencode(scratch))
        done = subprocess.run(
            COMMANDS["patch"][:-1], input=patch_of(old, new), cwd=scratch, capture_output=True, check=False, timeout=60
        )
        assert done.returncode == 1
        assert b"git binary diffs are not supported" in done.stdout
        assert kept_on_disk(os.fsencode(scratch))[b"t"] == (False, b"2\n")


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        # What a patch cannot remove stays, and keeps its place from what is to be there or below.
        ({b"x": fifo()}, {b"x": b"file"}, [b"x"]),
        ({b"x": fifo()}, {b"x/y": b"file", b"x/z/w": b""}, [b"x", b"x/y", b"x/z/w"]),
        ({b"x/p": fifo(), b"x/f": b"1"}, {b"x": b"file"}, [b"x", b"x/p"]),
        ({b"x/d": None, b"x/f": b"1"}, {b"x": b"file"}, [b"x", b"x/d"]),
        ({b"x/.git/HEAD": b"1"}, {b"x": b"file"}, [b"x", b"x/.git"]),
        ({b"x": b"file"}, {b"x": fifo()}, [b"x"]),
        ({b"x/f": b"1"}, {b"x": fifo()}, [b"x"]),
        ({b".gitmodules": "x"}, {b".gitmodules/a": b"file"}, [b".gitmodules", b".gitmodules/a"]),
        # git looks below a symlink that it is about to remove.
        ({b"x": "x"}, {b"x/y": b"file"}, [b"x", b"x/y"]),
        ({b"x": "y", b"y": "./x"}, {b"x/y": b"file", b"y": "x"}, [b"x", b"x/y"]),
        ({b"x": "n" * 256}, {b"x/y": b"file"}, [b"x", b"x/y"]),
        # What it can remove does not.
        ({b"x": "y", b"y/y": b"1"}, {b"x/y": b"file", b"y/y": b"1"}, []),
        ({b"x": "nowhere"}, {b"x/y": b"file"}, []),
        ({b"x": None}, {b"x": b"file"}, []),
        ({b"x": b"file"}, {b"x": None}, [b"x"]),
        ({b"x/y/z": b"file"}, {b"x": None}, [b"x"]),
    ],
)  # fmt: skip
def test_a_patch_with_something_missing_still_applies(before: Items, after: Items, named: list[bytes]) -> None:
    old, new = DictTree({b"t": b"1\n", **before}), DictTree({b"t": b"2\n", **after})
    text, found = uncarried_of(old, new)
    assert [each.path for each in found] == named
    result = apply("git", old, text)
    assert result[b"t"] == (False, b"2\n")
    if not named:
        assert result == kept_of(new)


@pytest.mark.parametrize(
    "name",
    [b"d/.git", b".GIT", b".Git ", b".git.", b"git~1", b".git:x", b".git\\x", b"x\\.git", b"d/.git/x"],
    ids=repr,
)  # fmt: skip
def test_a_path_that_git_rejects_is_left_out_and_named_unless_asked_for(name: bytes) -> None:
    old, new = DictTree({name: b"1\n", b"t": b"1\n"}), DictTree({name: b"2\n", b"t": b"2\n"})
    assert is_refused_by_git(name)
    text, found = uncarried_of(old, new)
    assert [each.path for each in found] == [name.removesuffix(b"/x")]
    assert found[0].is_usual == (name.rpartition(b"/")[2] in (b".git", b"x"))
    assert apply("git", old, text) == {name: (False, b"1\n"), b"t": (False, b"2\n")}
    out = io.BytesIO()
    write_patch(old, new, changes(old, new), out, include_git=True)
    assert not apply_fails("patch", old, out.getvalue())
    assert apply_fails("git", old, out.getvalue())


@pytest.mark.parametrize("name", [b".gitx", b"git", b".gitignore", b"x.git", b".git~1", b"git~2", b".gi"], ids=repr)
def test_a_path_that_git_takes_is_in_the_patch(name: bytes) -> None:
    old, new = DictTree({name: b"1\n"}), DictTree({name: b"2\n"})
    assert not is_refused_by_git(name)
    assert apply("git", old, patch_of(old, new)) == kept_of(new)


@pytest.mark.parametrize("name", [b".gitmodules", b"d/.GitModules", b"gitmod~1"])
def test_git_rejects_symlinks_of_some_names(name: bytes) -> None:
    old, new = DictTree({b"t": b"1\n"}), DictTree({b"t": b"2\n", name: "target"})
    text, found = uncarried_of(old, new)
    assert [each.path for each in found] == [name]
    assert apply("git", old, text) == {b"t": (False, b"2\n")}
    assert not is_refused_by_git(name)


def test_a_file_past_the_size_limit_is_named_and_not_read() -> None:
    class Huge(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            raise AssertionError("a huge file was read")

        def chunks(self, path: bytes, size: int = 0) -> Iterator[bytes]:
            raise AssertionError("a huge file was read")

    def tree(size: int) -> DictTree:
        made = Huge({b"big": b""})
        made.by_path[b"big"] = replace(made.by_path[b"big"], size=size)
        return made

    old, new = tree(10**15), tree(10**15 + 1)
    assert patch_of(old, new) == b"\n# Not in this patch: big (larger than 268,435,456 bytes)\n"
    assert line_stat(old, new, next(changes(old, new))) == LineStat(0, 0, binary=True)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_read_is_named(error: int) -> None:
    class Broken(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            if path == b"a":
                raise OSError(error, os.strerror(error))
            return super().read(path, offset, size)

    old, new = Broken({b"a": b"1", b"t": b"1\n"}), DictTree({b"a": b"22", b"t": b"2\n"})
    text, (missing,) = uncarried_of(old, new)
    assert missing.path == b"a"
    assert not missing.is_usual
    assert apply("git", old, text) == {b"a": (False, b"1"), b"t": (False, b"2\n")}
    assert line_stat(old, new, next(changes(old, new))) == LineStat(0, 0, binary=True)


def test_text_that_is_too_much_to_compare_by_lines_is_carried_as_binary() -> None:
    old, new = DictTree({b"a": b""}), DictTree({b"a": b"\n" * (TEXT_LIMIT_LINES + 1)})
    text = patch_of(old, new)
    assert b"GIT binary patch" in text
    assert apply("git", old, text) == kept_of(new)


def test_a_binary_file_is_streamed() -> None:
    class Wide(DictTree):
        """A file of 40 MiB that nobody holds."""

        def read(self, path: bytes, offset: int, size: int) -> bytes:
            assert size <= 8000
            return bytes(size)

        def chunks(self, path: bytes, size: int = 0) -> Iterator[bytes]:
            return itertools.repeat(bytes(1 << 20), 40)

    old, new = DictTree(), Wide({b"big": b""})
    new.by_path[b"big"] = replace(new.by_path[b"big"], size=40 << 20)
    size = 0

    def count(data: bytes) -> None:
        nonlocal size
        size += len(data)

    tracemalloc.start()
    try:
        write_patch(old, new, changes(old, new), count)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert size < 100_000


def test_nothing_is_written_for_what_a_patch_does_not_know() -> None:
    old = DictTree({b"d/f": (TreeEntry(b"", stat.S_IFREG | 0o644, uid=1, mtime_ns=1), b"x")})
    new = DictTree({b"d/f": (TreeEntry(b"", stat.S_IFREG | 0o600, uid=2, mtime_ns=2), b"x")})
    new.by_path[b"d"] = replace(new.by_path[b"d"], mode=stat.S_IFDIR | 0o700)
    assert len(list(changes(old, new))) == 2
    assert patch_of(old, new) == b""


def test_the_patch_is_what_git_would_write() -> None:
    odd = b"\x01\t\n\r\"\\'\x7f\xc3\xa9\xff"
    old = DictTree({b"a.txt": LONG, b"gone": b"x", b"run": b"same", b"s": "here", b"t": b"text\n", odd: b"1\n"})
    after: Items = {b"a.txt": LONG.replace(b"line 50\n", b"fifty\n"), b"d/new": b"y\n", b"run": executable(b"same")}
    new = DictTree({**after, b"s": "there", b"t": "target", odd: executable(b"2\n"), b"e": b""})
    for gap in (5, 6, 7, 8):  # equal lines between two edits: where one hunk becomes two
        lines = [b"%d\n" % n for n in range(30)]
        for tree in (old, new):
            tree_with(tree, b"gap%d" % gap, b"".join(lines))
            lines[10] = lines[11 + gap] = b"edited\n"
    with tempfile.TemporaryDirectory() as scratch:

        def git(*arguments: str) -> bytes:
            done = subprocess.run(["git", *arguments], cwd=scratch, env=ENVIRONMENT, capture_output=True, check=True)
            return done.stdout

        git("init", "-q")
        trees = []
        for tree in (old, new):
            for name in kept_on_disk(os.fsencode(scratch)):
                if not name.startswith(b".git/"):
                    os.unlink(os.path.join(os.fsencode(scratch), name))
            put(tree, os.fsencode(scratch))
            git("add", "--all")
            trees.append(git("write-tree").decode().strip())
        expected = git("diff", "--full-index", "--no-renames", *trees)
    hunk_heading = re.compile(rb"^(@@ .* @@).*$", re.MULTILINE)  # git adds the function's name
    assert hunk_heading.sub(rb"\1", patch_of(old, new)) == hunk_heading.sub(rb"\1", expected)


def test_out_may_be_a_function() -> None:
    old, new = DictTree({b"a": b"1\n"}), DictTree({b"a": b"2\n"})
    written: list[bytes] = []
    write_patch(old, new, changes(old, new), written.append)
    assert b"".join(written) == patch_of(old, new)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({b"a": b"1\n2\n3\n"}, {b"a": b"1\ntwo\n3\n4"}, LineStat(2, 1)),
        ({}, {b"a": b"1\n2"}, LineStat(2, 0)),
        ({b"a": b"1\n2\n"}, {}, LineStat(0, 2)),
        ({b"a": b"1"}, {b"a": b"1\n"}, LineStat(1, 1)),
        ({b"a": b"1"}, {b"a": executable(b"1")}, LineStat(0, 0)),
        ({b"a": b"\0"}, {b"a": b"x"}, LineStat(0, 0, binary=True)),
        ({b"a": "here"}, {b"a": "there"}, LineStat(1, 1)),
        ({b"a": "here"}, {b"a": b"1\n2\n"}, LineStat(2, 1)),
        ({b"a": None}, {}, LineStat(0, 0)),
        ({b"a": None}, {b"a": b"1\n"}, LineStat(1, 0)),
        ({}, {b"a": fifo()}, LineStat(0, 0)),
    ],
)
def test_line_stat_counts_lines(before: Items, after: Items, expected: LineStat) -> None:
    old, new = DictTree(before), DictTree(after)
    (change,) = changes(old, new)
    assert line_stat(old, new, change) == expected


# --- any two trees ------------------------------------------------------------------------------------------

# Names that clash neither with git's own (.git) nor between file and directory: directories end in "d".
_bytes_of_names = st.sampled_from([bytes([n]) for n in range(1, 256) if n not in b"./"])
_stem = st.lists(_bytes_of_names, min_size=1, max_size=4).map(b"".join)
_file_name = st.one_of(st.sampled_from([b"f", b"a b", b"new\n"]), _stem).map(lambda stem: stem + b"f")
_directories = st.lists(st.one_of(st.just(b"d"), _stem.map(lambda stem: stem + b"d")), max_size=2)
_path = st.builds(lambda above, name: b"/".join([*above, name]), _directories, _file_name)
_line = st.sampled_from(
    [b"", b"a", b"b", b"}", b"\r", b"-- a/x", b"++ b/x", b"@@ -1 +1 @@", b"\xff\xfe", b" ", b"\\ No"]
)
_text = st.builds(
    lambda lines, end: b"\n".join(lines) + end, st.lists(_line, max_size=20), st.sampled_from([b"", b"\n"])
)
_target = st.sampled_from(["f", "../x", "new\nline", "é"])
_content = st.one_of(_text, _text, _text.map(executable), _target)


@st.composite
def _edited(draw: st.DrawFn) -> bytes:
    """A long text with edits here and there, for hunks that have context, touch, and stand apart."""
    lines = [b"%d" % (n % 30) for n in range(60)]
    for place in draw(st.lists(st.integers(0, 60), max_size=6)):
        lines[place : place + draw(st.integers(0, 3))] = draw(st.lists(_line, max_size=3))
    return b"\n".join(lines) + draw(st.sampled_from([b"", b"\n"]))


@st.composite
def two_trees(draw: st.DrawFn) -> tuple[DictTree, DictTree]:
    items = st.dictionaries(_path, _content, max_size=5)
    both, only_old, only_new = draw(items), draw(items), draw(items)
    changed = {path: draw(_content) for path in both if draw(st.booleans())}
    long_before, long_after = {b"long": draw(_edited())}, {b"long": draw(_edited())}
    return DictTree({**both, **only_old, **long_before}), DictTree({**both, **only_new, **changed, **long_after})


@pytest.mark.extended
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(two_trees())
def test_a_patch_of_any_two_trees_of_text_applies_with_both_tools(trees: tuple[DictTree, DictTree]) -> None:
    old, new = trees
    text = patch_of(old, new)
    if text:  # git calls an empty patch an error
        for tool in TOOLS:
            assert apply(tool, old, text) == kept_of(new), tool
    else:
        assert kept_of(old) == kept_of(new)


def applied(old: Sequence[bytes], new: Sequence[bytes], found: Sequence[Edit]) -> list[bytes]:
    result: list[bytes] = []
    place = 0
    for edit in found:
        result += [*old[place : edit.old_start], *new[edit.new_start : edit.new_end]]
        place = edit.old_end
    return [*result, *old[place:]]


_lines = st.lists(st.sampled_from([b"%d\n" % n for n in range(12)]), max_size=40)


@given(_lines, _lines, st.sampled_from([0, 30, 300, 10**6]))
def test_edits_make_the_new_of_the_old_whatever_they_may_cost(old: list[bytes], new: list[bytes], limit: int) -> None:
    found = list(edits(old, new, cost_limit=limit))
    assert applied(old, new, found) == new
    place_old = place_new = 0
    for edit in found:
        # Places agree on both sides, and something equal lies before all but the first.
        assert edit.old_start - place_old == edit.new_start - place_new
        assert edit is found[0] or edit.old_start > place_old
        assert edit.old_end > edit.old_start or edit.new_end > edit.new_start
        place_old, place_new = edit.old_end, edit.new_end


def test_equal_texts_have_no_edits() -> None:
    assert list(edits([b"a\n"], [b"a\n"])) == []
    assert list(edits([], [])) == []


def test_every_second_line_changed_in_a_large_file_is_seen_line_by_line() -> None:
    old = [b"line %d\n" % n for n in range(50_000)]
    new = [line if n % 2 else b"changed %d\n" % n for n, line in enumerate(old)]
    assert list(edits(old, new)) == [Edit(n, n + 1, n, n + 1) for n in range(0, 50_000, 2)]


def test_a_moved_block_keeps_the_longer_part_in_place() -> None:
    old = [b"%d\n" % n for n in range(10)]
    assert list(edits(old, old[7:] + old[:7])) == [Edit(0, 0, 0, 3), Edit(7, 10, 10, 10)]


def test_repeated_lines_between_changes_are_matched() -> None:
    old = [b"a\n", b"}\n", b"b\n", b"}\n", b"c\n"]
    new = [b"x\n", b"}\n", b"y\n", b"}\n", b"z\n"]
    assert [edit.old_start for edit in edits(old, new)] == [0, 2, 4]


def test_what_would_cost_too_much_is_replaced_as_a_whole() -> None:
    # Without one line that is unique to match by, difflib is cubic here.
    count = 50_000
    old = [line for n in range(count) for line in (b"old %d\n" % n, b"}\n")]
    new = [line for n in range(count) for line in (b"new %d\n" % n, b"}\n")]
    assert list(edits([b"top\n", *old], [b"top\n", *new])) == [Edit(1, 2 * count, 1, 2 * count)]
