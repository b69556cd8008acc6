"""Three-way merges of random trees: what holds for every merge, and comparisons with git and with plain models."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from typing import Literal

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from protocol.backends.memory import MemoryVolume
from protocol.diff.tree_diff import changes, is_below, outermost
from protocol.merge.three_way import Merge, merge
from protocol.tree import Tree, TreeEntry, filled
from tests.model.merge_trees import ALL_EDITS, Edit, File, PlainTree, directory, edited, edits

Three = tuple[PlainTree, PlainTree, PlainTree]
EXAMPLES = settings(
    max_examples=min(500, settings().max_examples), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
EDIT_LISTS = st.lists(edits(), max_size=6)


@st.composite
def three_trees(draw: st.DrawFn) -> Three:
    """A base and two edits of it; `theirs` has inode numbers of its own, and may know what it changed."""
    base = edited({}, draw(st.lists(edits(), max_size=10)))
    before = PlainTree(base)
    ours = PlainTree(edited(base, draw(EDIT_LISTS)))
    theirs = PlainTree(edited(base, draw(EDIT_LISTS)), 1000, before if draw(st.booleans()) else None)
    return before, ours, theirs


Seen = dict[bytes, tuple[object, ...]]


def seen(tree: Tree, *, with_mtime: bool = True) -> Seen:
    """Everything that a merge decides about each path, with the names of the same file."""
    entries = list(tree.walk())
    names: dict[int, list[bytes]] = {}
    for entry in entries:
        if not entry.is_dir and entry.nlink > 1:
            names.setdefault(entry.inode, []).append(entry.path)
    found: Seen = {}
    for entry in entries:
        assert tree.entry(entry.path) == entry
        content = b"".join(filled(tree.chunks(entry.path))) if entry.is_file else b""
        assert len(content) == entry.size or not entry.is_file
        links = tuple(names.get(entry.inode, [])) if entry.nlink > 1 and not entry.is_dir else ()
        found[entry.path] = (
            *(entry.mode, entry.uid, entry.gid, tuple(sorted(entry.xattrs.items()))),
            *(content, entry.target, entry.rdev),
            links if len(links) > 1 else (),
            entry.mtime_ns if with_mtime and not entry.is_dir else 0,
        )
    return found


def merged(three: Three, policy: Literal["fail", "ours", "theirs", "markers"] = "fail") -> Merge:
    base, ours, theirs = three
    return merge(base, ours, theirs, policy=policy, now_ns=77)


def reasons(result: Merge) -> list[tuple[bytes, str]]:
    return [(conflict.path, conflict.reason) for conflict in result.conflicts]


# --- what holds for every merge -------------------------------------------------------------------------------


@EXAMPLES
@given(three_trees())
def test_a_side_without_changes_takes_the_other_side(three: Three) -> None:
    base, ours, theirs = three

    forward, backward, both = merge(base, base, theirs), merge(base, ours, base), merge(base, ours, ours)

    assert seen(forward.tree) == seen(theirs)
    assert seen(backward.tree) == seen(both.tree) == seen(ours)
    assert backward.paths == both.paths == ()
    assert forward.conflicts == backward.conflicts == both.conflicts == ()


@EXAMPLES
@given(three_trees())
def test_a_merge_is_symmetric(three: Three) -> None:
    base, ours, theirs = three
    forward, backward = merged(three), merged((base, theirs, ours))

    event("conflicts" if forward.conflicts else "no conflicts")
    assert sorted(reasons(forward)) == sorted(reasons(backward))
    if not forward.conflicts:
        assert seen(forward.tree) == seen(backward.tree)


@EXAMPLES
@given(three_trees(), st.sampled_from(["fail", "ours", "theirs", "markers"]))
def test_paths_are_the_outermost_differences(
    three: Three, policy: Literal["fail", "ours", "theirs", "markers"]
) -> None:
    result = merged(three, policy)

    before, after = seen(three[1]), seen(result.tree)
    # A name that is gone changes nothing for the other names of its file.
    left = {path: (*what[:7], _of(what[7], after), what[8]) for path, what in before.items()}
    differing = [path for path in {*before, *after} if left.get(path) != after.get(path)]
    assert list(result.paths) == outermost(differing)
    changed = {change.path for change in result.changes}
    assert changed >= {change.path for change in changes(three[1], result.tree)}
    assert changed <= {path for path in {*before, *after} if any(is_below(path, top) for top in result.paths)}


def _of(names: object, tree: Seen) -> tuple[bytes, ...]:
    assert isinstance(names, tuple)
    left = tuple(name for name in names if name in tree and stat.S_IFMT(int(str(tree[name][0]))) != stat.S_IFDIR)
    return left if len(left) > 1 else ()


@EXAMPLES
@given(three_trees())
def test_conflicts_do_not_depend_on_the_policy(three: Three) -> None:
    expected = reasons(merged(three))

    assert reasons(merged(three, "ours")) == reasons(merged(three, "theirs")) == expected
    assert reasons(merged(three, "markers")) == expected


@EXAMPLES
@given(three_trees())
def test_the_policies_leave_no_conflict_open(three: Three) -> None:
    _, ours, theirs = three
    for policy, side in (("ours", ours), ("theirs", theirs)):
        result = merged(three, policy)  # type: ignore[arg-type]
        was, now = seen(side, with_mtime=False), seen(result.tree, with_mtime=False)
        for conflict in result.conflicts:
            assert not conflict.kept_as
            at, reason = conflict.path, conflict.reason
            if reason == "directory/file":
                assert _at(result.tree, at) is _at(side, at)
            elif reason in {"content", "binary", "large", "symlink", "device", "type", "created"}:
                assert now[at][4:7] == was[at][4:7]
            elif reason == "delete/modify" and not (at in now and at not in was and stat.S_ISDIR(int(str(now[at][0])))):
                assert (at in now) is (at in was)
            elif reason == "mode":
                assert now[at][0] == was[at][0]
        assert not any(b"~theirs" in path or b"<<<<<<<" in bytes(str(what[4]), "ascii") for path, what in now.items())


def _at(tree: Tree, path: bytes) -> bool:
    return tree.entry(path).is_dir


@EXAMPLES
@given(three_trees())
def test_markers_lose_no_version(three: Three) -> None:
    """Where a content cannot have markers, both versions are in the tree."""
    _, _, theirs = three
    result = merged(three, "markers")

    for conflict in result.conflicts:
        if conflict.kept_as:
            kept, original = result.tree.entry(conflict.kept_as), theirs.entry(conflict.path)
            assert (kept.mode, kept.size, kept.target) == (original.mode, original.size, original.target)
        elif conflict.reason in {"content", "created"}:
            assert b"<<<<<<< ours\n" in b"".join(result.tree.chunks(conflict.path))


UNLINKED = st.lists(edits(*(kind for kind in ALL_EDITS if kind != "link")), max_size=6)


@EXAMPLES
@given(st.tuples(UNLINKED, UNLINKED, UNLINKED, UNLINKED, UNLINKED))
def test_a_second_merge_brings_only_what_changed_since_the_first(steps: tuple[list[Edit], ...]) -> None:
    """Its base is the state of `theirs` that was merged."""
    before, here, there, later_here, later_there = steps
    base = edited({}, before)
    theirs = PlainTree(edited(base, there), 1000)
    first = merged((PlainTree(base), PlainTree(edited(base, here)), theirs), "ours")
    ours = PlainTree(edited(copied(first.tree), later_here))
    later = PlainTree(edited(theirs.files, later_there), 1000)

    second = merge(theirs, ours, later, policy="ours", now_ns=77)

    since = {change.path for change in changes(theirs, later)}
    above = {each for path in since for each in later.files if is_below(path, each)}
    assert {change.path for change in second.changes} <= since | above
    assert not merge(later, ours, later).paths


def copied(tree: Tree) -> dict[bytes, File]:
    found = {}
    for entry in tree.walk():
        content = b"".join(filled(tree.chunks(entry.path))) if entry.is_file else entry.target
        found[entry.path] = File(entry.mode, content, entry.uid, entry.gid, entry.mtime_ns, dict(entry.xattrs))
    return found


# --- memory volumes -------------------------------------------------------------------------------------------


def _volume(base: Tree, now: Tree) -> MemoryVolume:
    """A volume with the snapshot "base" and the live state `now`."""
    volume = MemoryVolume()
    volume.import_tree(base, replace=True)
    volume.take_snapshot("base")
    volume.import_tree(now, replace=True)
    return volume


@EXAMPLES
@given(three_trees(), st.sampled_from(["ours", "theirs", "markers"]), st.booleans())
def test_an_import_of_the_paths_makes_a_volume_equal_to_the_tree(
    three: Three, policy: Literal["ours", "theirs", "markers"], prepared: bool
) -> None:
    volume, other = _volume(three[0], three[1]), _volume(three[0], three[2])
    with volume.tree() as ours, other.tree() as theirs, other.tree("base") as base:
        assert theirs.touched(base) is not None
        result = merge(base, ours, theirs, policy=policy, now_ns=77)
        expected = merged(three, policy)
        assert seen(result.tree) == seen(expected.tree)
        assert reasons(result) == reasons(expected)

        if result.paths and prepared:
            preparation = volume.preparation(result.tree, replace=True, paths=result.paths)
            assert sum(preparation.steps()) >= 0
            volume.import_prepared(preparation)
        elif result.paths:
            volume.import_tree(result.tree, replace=True, paths=result.paths)

    with volume.tree() as live:
        assert seen(live) == seen(expected.tree)
    volume.check_invariants()
    other.check_invariants()


# --- git ------------------------------------------------------------------------------------------------------


def _git(repository: str, *arguments: str, stdin: bytes = b"", fine: Iterable[int] = (0,)) -> bytes:
    environment = {"PATH": os.environ["PATH"], "GIT_DIR": repository, "HOME": repository, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], input=stdin, capture_output=True, env=environment, check=False)
    assert done.returncode in fine, done.stderr
    return done.stdout


def _quoted(path: bytes) -> bytes:
    return b'"' + b"".join(b"\\%03o" % byte for byte in path) + b'"'


def _commit(branch: bytes, tree: PlainTree) -> bytes:
    lines = [b"commit refs/heads/%s\ncommitter a <a> 0 +0000\ndata 0\n" % branch]
    lines.append(b"" if branch == b"base" else b"from refs/heads/base\ndeleteall\n")
    for path, file in tree.files.items():
        if file.kind != stat.S_IFDIR:
            mode = b"120000" if file.kind == stat.S_IFLNK else b"100755" if file.mode & 0o100 else b"100644"
            lines.append(b"M %s inline %s\ndata %d\n%s\n" % (mode, _quoted(path), len(file.content), file.content))
    return b"".join(lines)


def merged_by_git(three: Three) -> tuple[dict[bytes, tuple[bytes, bytes]], set[bytes]]:
    """{path: (mode, content)} of `git merge-tree`, and the paths in conflict."""
    with tempfile.TemporaryDirectory() as repository:
        _git(repository, "init", "--bare", "--quiet", repository)
        commits = zip((b"base", b"ours", b"theirs"), three, strict=True)
        _git(repository, "fast-import", "--quiet", stdin=b"".join(_commit(name, tree) for name, tree in commits))
        options = ["--write-tree", "-z", "--name-only", "--no-messages"]
        out = _git(repository, "merge-tree", *options, "ours", "theirs", fine=(0, 1))
        tree, *conflicts = out.rstrip(b"\0").split(b"\0")
        found = {}
        for row in _git(repository, "ls-tree", "-r", "-z", tree.decode()).split(b"\0")[:-1]:
            about, _, path = row.partition(b"\t")
            mode, _, name = about.split()
            found[path] = (mode, _git(repository, "cat-file", "blob", name.decode()))
        # Of two types in conflict git gives one another name.
        return found, {path.removesuffix(b"~ours").removesuffix(b"~theirs") for path in conflicts}


GIT_EDITS = st.lists(edits("write", "write", "symlink", "remove", "chmod", "rename"), max_size=5)


@settings(EXAMPLES, max_examples=min(200, settings().max_examples // 2))
@given(st.lists(edits("write", "write", "symlink", "chmod"), max_size=8), GIT_EDITS, GIT_EDITS)
def test_a_merge_is_that_of_git(before: list[Edit], here: list[Edit], there: list[Edit]) -> None:
    base = edited({}, before)
    three = (_as_in_git(base), _as_in_git(edited(base, here)), _as_in_git(edited(base, there)))

    expected, in_conflict = merged_by_git(three)
    result = merged(three)

    event("conflicts" if in_conflict else "no conflicts")
    # git has no directories: their metadata, and their removal, are compared with a plain model below.
    found = {c for c in result.conflicts if not _is_about_a_directory(three, c.path) or c.reason == "directory/file"}
    assert bool(found) is bool(in_conflict)
    if not found:
        files = [entry for entry in result.tree.walk() if not entry.is_dir]
        assert {entry.path: _git_file(result.tree, entry) for entry in files} == expected
    elif not any(c.reason == "directory/file" for c in found):
        assert {c.path for c in found} == in_conflict


def _as_in_git(files: dict[bytes, File]) -> PlainTree:
    """Without empty directories, and with the permissions that git knows.

    git 2.39 always looks for renames.  It finds none here, because contents at different paths are not similar.
    """
    found = {b"": directory()}
    for path, file in files.items():
        if file.kind != stat.S_IFDIR:
            permissions = {stat.S_IFLNK: 0o777, stat.S_IFREG: 0o755 if file.mode & 0o100 else 0o644}
            name = hashlib.sha256(path).hexdigest().encode()
            found[path] = File(file.kind | permissions[file.kind], b"%s\n" % name * 9 + file.content)
            parts = path.split(b"/")
            found |= {b"/".join(parts[:end]): directory() for end in range(1, len(parts))}
    return PlainTree(found)


def _is_about_a_directory(three: Three, path: bytes) -> bool:
    return any(path in tree.files and tree.files[path].kind == stat.S_IFDIR for tree in three[1:])


def _git_file(tree: Tree, entry: TreeEntry) -> tuple[bytes, bytes]:
    if entry.is_symlink:
        return b"120000", entry.target
    return b"100755" if entry.mode & 0o100 else b"100644", b"".join(filled(tree.chunks(entry.path)))


# --- plain models -----------------------------------------------------------------------------------------------

PLACES = [b"a", b"b", b"a/b", b"a/b/c", b"a/d", b"b/e"]


@EXAMPLES
@given(*[st.sets(st.sampled_from(PLACES))] * 3)
def test_empty_directories(before: set[bytes], here: set[bytes], there: set[bytes]) -> None:
    """A directory exists if the merge of "does it exist?" says so, or if something below it exists."""

    def tree(places: set[bytes]) -> PlainTree:
        paths = {
            b"",
            *(place[:end] for place in places for end in range(1, len(place) + 1) if place[end : end + 1] in b"/"),
        }
        return PlainTree({path: directory() for path in paths})

    three = (tree(before), tree(here), tree(there))
    base, ours, theirs = (set(each.files) for each in three)

    result = merged(three)

    kept = (ours & theirs) | ((ours | theirs) - base)
    assert not result.conflicts
    assert {entry.path for entry in result.tree.walk()} == {
        path for path in ours | theirs if any(is_below(each, path) for each in kept)
    }


ATTRIBUTES = st.fixed_dictionaries(
    {
        "mode": st.sampled_from([0o644, 0o600, 0o755]),
        "uid": st.integers(0, 2),
        "x": st.sampled_from([None, b"1", b"2"]),
        "y": st.sampled_from([None, b"1", b"2"]),
        "target": st.sampled_from([b"p", b"q", b"r"]),
    }
)


@EXAMPLES
@given(st.sampled_from([stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO]), *[ATTRIBUTES] * 3)
def test_each_kind_of_metadata_is_merged_by_itself(
    kind: int, base: dict[str, object], ours: dict[str, object], theirs: dict[str, object]
) -> None:
    def tree(what: dict[str, object]) -> PlainTree:
        xattrs = {b"user." + name.encode(): bytes(str(what[name]), "ascii") for name in "xy" if what[name] is not None}
        content = bytes(str(what["target"]), "ascii") if kind == stat.S_IFLNK else b""
        mode, uid = what["mode"], what["uid"]
        assert isinstance(mode, int)
        assert isinstance(uid, int)
        return PlainTree({b"": directory(), b"f": File(kind | mode, content, uid, xattrs=xattrs)})

    names = [name for name in base if name != "target" or kind == stat.S_IFLNK]
    expected = {
        name: theirs[name] if ours[name] == base[name] else ours[name]
        for name in names
        if ours[name] == theirs[name] or base[name] in (ours[name], theirs[name])
    }
    labels = {"mode": "mode", "uid": "owner", "x": "xattrs", "y": "xattrs", "target": "symlink"}
    for policy, side in (("ours", ours), ("theirs", theirs)):
        result = merged((tree(base), tree(ours), tree(theirs)), policy)  # type: ignore[arg-type]

        assert {reason for _, reason in reasons(result)} == {labels[name] for name in names if name not in expected}
        due = tree({**side, **expected}).files[b"f"]
        entry = result.tree.entry(b"f")
        assert (entry.mode, entry.uid, dict(entry.xattrs)) == (due.mode, due.uid, due.xattrs)
        assert kind != stat.S_IFLNK or entry.target == due.content
