"""Any two trees: `git apply` of the patch makes the second of the first, except for what the patch names."""

from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.diff.patch import Uncarried, write_patch
from protocol.diff.tree_diff import changes, is_below
from protocol.tree import TreeEntry
from tests.support.trees import DictTree
from tests.unit.protocol.diff.test_patch import ENVIRONMENT, Items, put

# What a patch may keep of an entry: git's mode (0o40000 is a directory) and the content or target.
Seen = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Trees:
    old: DictTree
    new: DictTree


# Few names, so that a file here is often a directory there; "-" and "." sort before the slash.
_names = st.sampled_from(
    [b"a", b"b", b"a-b", b"a.b", b"two words", b'say "hi"', b"new\nline", b"\xff\xfe", b"caf\xc3\xa9", b"back\\slash",
     b".git", b".GIT", b".gitignore", b".gitmodules", b" ", b"-p1", b"#", b"\x01", b"dev", b"null"]
)  # fmt: skip
# Not ".git" at the top: git would take the test's own directory for a repository.
_paths = st.lists(_names, min_size=1, max_size=3).filter(lambda names: names[0] != b".git").map(b"/".join)
_lines = st.sampled_from(
    [b"", b"a", b"b", b"\r", b"crlf\r", b"-- a/x", b"++ b/x", b"@@ -1 +1 @@", b"\xff\xfe", b"latin caf\xe9", b" ",
     b"\\ No newline at end of file", b"GIT binary patch", b"diff --git a/a b/a", b"x" * 5_000, b"# Not in this patch"]
)  # fmt: skip
_texts = st.builds(
    lambda lines, end: b"\n".join(lines) + end, st.lists(_lines, max_size=12), st.sampled_from([b"", b"\n"])
)
_binaries = st.one_of(
    st.binary(max_size=200).map(lambda content: b"\0" + content),
    st.builds(lambda seed, times: bytes([0, *seed]) * times, st.binary(min_size=1), st.integers(1, 2_000)),
)
_files = st.builds(
    lambda content, mode: (TreeEntry(b"", stat.S_IFREG | mode), content),
    st.one_of(_texts, _binaries),
    st.sampled_from([0o644, 0o755, 0o600, 0o744]),
)
_symlinks = st.sampled_from(["a", "../b", "new\nline", "é", "/nonexistent", "x" * 300])
_fifo: tuple[TreeEntry, bytes] = (TreeEntry(b"", stat.S_IFIFO | 0o644), b"")
_contents = st.one_of(_files, _files, _files, _symlinks, st.none(), st.just(_fifo))
_items = st.dictionaries(_paths, _contents, max_size=6)


def _tree(items: Items) -> DictTree:
    """A tree of those of `items` that do not lie below a file."""
    kept: Items = {}
    for path, content in items.items():
        above = [path[:at] for at in range(len(path)) if path[at : at + 1] == b"/"]
        is_free = path not in kept and not any(other.startswith(path + b"/") for other in kept)
        if is_free and all(kept.get(parent) is None for parent in above):
            kept[path] = content
    return DictTree(kept)


@st.composite
def two_trees(draw: st.DrawFn) -> Trees:
    both, only_old, only_new = draw(_items), draw(_items), draw(_items)
    changed = {path: draw(_contents) for path in both if draw(st.booleans())}
    renamed = {path: draw(_paths) for path in both if path not in changed and draw(st.booleans())}
    new: Items = {renamed.get(path, path): content for path, content in {**both, **changed}.items()}
    return Trees(_tree({**both, **only_old}), _tree({**new, **only_new}))


def _seen(mode: int, content: bytes) -> Seen:
    if stat.S_ISREG(mode):
        return stat.S_IFREG | (mode & stat.S_IXUSR), content
    return stat.S_IFMT(mode), content


def on_disk(root: bytes) -> dict[bytes, Seen]:
    found: dict[bytes, Seen] = {}
    for where, directories, files in os.walk(root):
        if where == root and b".git" in directories:
            directories.remove(b".git")
        for name in directories + files:
            path = os.path.join(where, name)
            mode = os.lstat(path).st_mode
            content = b""
            if stat.S_ISLNK(mode):
                content = os.readlink(path)
            elif stat.S_ISREG(mode):
                content = Path(os.fsdecode(path)).read_bytes()
            found[os.path.relpath(path, root)] = _seen(mode, content)
    return found


def in_tree(tree: DictTree) -> dict[bytes, Seen]:
    return {
        entry.path: _seen(entry.mode, entry.target if entry.is_symlink else tree.content.get(entry.path, b""))
        for entry in tree.walk()
        if entry.path
    }


def differences(found: dict[bytes, Seen], expected: dict[bytes, Seen], named: list[bytes]) -> list[bytes]:
    """Paths that are not as expected, and that nothing named explains."""

    def is_explained(path: bytes) -> bool:
        if any(is_below(path, name) for name in named):
            return True
        # A directory is there, or is not, because of something below it.
        kinds = {side[path][0] for side in (found, expected) if path in side}
        return kinds == {stat.S_IFDIR} and any(is_below(name, path) for name in named)

    return [
        path
        for path in sorted(found.keys() | expected.keys())
        if found.get(path) != expected.get(path) and not is_explained(path)
    ]


def patch_of(trees: Trees) -> tuple[bytes, list[Uncarried]]:
    out, missing = io.BytesIO(), list[Uncarried]()
    write_patch(trees.old, trees.new, changes(trees.old, trees.new), out, on_uncarried=missing.append)
    return out.getvalue(), missing


def git(where: bytes, *words: str | bytes, given: bytes = b"") -> None:
    done = subprocess.run(
        ["git", "-c", "core.autocrlf=false", *words],
        cwd=where,
        input=given,
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, (words, done.stderr, given)


@pytest.fixture(scope="module")
def empty_repository() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        path = os.fsencode(scratch) + b"/repository"
        os.mkdir(path)
        git(path, "init", "-q", "--template=")
        yield path


def check(trees: Trees, empty_repository: bytes | None) -> None:
    """Apply the patch, and take it back; in a repository with its index too."""
    text, missing = patch_of(trees)
    if b"diff --git" not in text:  # git calls a patch without any section an error
        return
    index = ["--index"] if empty_repository is not None else []
    named = [each.path for each in missing]
    with tempfile.TemporaryDirectory() as scratch:
        root = os.fsencode(scratch) + b"/tree"
        if empty_repository is not None:
            shutil.copytree(empty_repository, root)
        put(trees.old, root)
        if empty_repository is not None:
            git(root, "add", "--all", "--force")
        git(root, "apply", *index, "-", given=text)
        found = on_disk(root)
        assert differences(found, in_tree(trees.new), named) == [], (text, named)
        for each in missing:
            # What is named is missing indeed.
            assert found.get(each.path) != in_tree(trees.new).get(each.path) or any(
                is_below(path, each.path) for path in differences(found, in_tree(trees.new), [])
            ), (text, each)
        if not missing and not patch_of(Trees(trees.new, trees.old))[1]:
            git(root, "apply", "-R", *index, "-", given=text)
            lost = [path for path in in_tree(trees.old) if not _holds_files(trees.old, path)]
            assert differences(on_disk(root), in_tree(trees.old), lost) == [], text


def _holds_files(tree: DictTree, path: bytes) -> bool:
    return any(not entry.is_dir for entry in tree.walk(path))


@pytest.mark.extended
@settings(max_examples=2 * settings().max_examples)
@given(two_trees())
def test_git_apply_makes_the_second_tree_of_the_first(trees: Trees) -> None:
    check(trees, None)


@pytest.mark.extended
@settings(max_examples=settings().max_examples)
@given(trees=two_trees())
def test_git_apply_makes_the_second_index_of_the_first(empty_repository: bytes, trees: Trees) -> None:
    check(_without_git_names(trees), empty_repository)


def _without_git_names(trees: Trees) -> Trees:
    """Git adds no path with a component ".git" to its index, nor a symlink named .gitmodules."""

    def cleaned(tree: DictTree) -> DictTree:
        kept: Items = {}
        for entry in tree.walk():
            if not entry.path or b".git" in entry.path.lower().split(b"/") or b".gitmodules" in entry.path:
                continue
            path = entry.path
            is_leaf = not entry.is_dir or not tree.children(path)
            if is_leaf:
                kept[path] = (replace(entry, path=b""), tree.content.get(path, b"")) if not entry.is_dir else None
        return _tree(kept)

    return Trees(cleaned(trees.old), cleaned(trees.new))
