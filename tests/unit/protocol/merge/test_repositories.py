"""A git repository is one unit of a merge, and its branches are fetched without executing anything from it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from protocol.merge.git import Fetched, fetch_repository
from protocol.merge.three_way import Merge, Policy, merge
from tests.support.trees import DictTree
from tests.unit.protocol.merge.test_rules import Items, shown


def git(place: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=place, check=True, capture_output=True, text=True).stdout


def commit(place: Path, name: str, content: str = "content\n") -> str:
    (place / name).write_text(content)
    git(place, "add", "-A")
    git(place, "commit", "-qm", name)
    return git(place, "rev-parse", "HEAD").strip()


def items(place: Path) -> Items:
    """The files and directories below a directory, for a `DictTree`."""
    found: Items = {}
    for directory, directories, names in os.walk(place):
        found |= {os.fsencode(Path(directory, name).relative_to(place)): None for name in directories}
        paths = [Path(directory, name) for name in names]
        found |= {os.fsencode(path.relative_to(place)): path.read_bytes() for path in paths}
    return found


REPOSITORY: Items = {
    b"r/.git/HEAD": b"ref: refs/heads/x\n",
    b"r/.git/refs/heads/x": b"1\n",
    b"r/.git/logs/HEAD": b"1\n",
    b"r/file": b"1\n",
}


def changed(mark: str, *paths: bytes) -> Items:
    return {**REPOSITORY, **{path: REPOSITORY.get(path, b"") + mark.encode() for path in paths}}


def merged(base: Items, ours: Items, theirs: Items, policy: Policy = "fail") -> Merge:
    return merge(DictTree(base), DictTree(ours), DictTree(theirs), policy=policy, now_ns=1)


def test_a_repository_that_one_side_changed_is_that_of_this_side() -> None:
    theirs = changed("2", b"r/.git/refs/heads/x", b"r/.git/logs/HEAD", b"r/.git/objects/00")
    ours = changed("2", b"r/file")

    assert shown(merged(REPOSITORY, ours, theirs).tree) == shown(DictTree({**theirs, b"r/file": b"1\n2"}))
    assert shown(merged(REPOSITORY, theirs, ours).tree) == shown(DictTree({**theirs, b"r/file": b"1\n2"}))
    assert merged(REPOSITORY, ours, theirs).repositories == ()


@pytest.mark.parametrize("policy", ["fail", "ours", "theirs", "markers"])
def test_a_repository_that_both_changed_stays_and_is_no_conflict(policy: Policy) -> None:
    ours = changed("ours", b"r/.git/refs/heads/x", b"r/.git/logs/HEAD")
    theirs = changed("theirs", b"r/.git/refs/heads/x", b"r/.git/packed-refs", b"r/file")

    result = merged(REPOSITORY, ours, theirs, policy)

    assert not result.conflicts
    assert shown(result.tree) == shown(DictTree({**ours, b"r/file": b"1\ntheirs"}))
    assert result.repositories == (b"r/.git",)
    assert result.paths == (b"r/file",)


def test_the_same_change_of_a_repository_on_both_sides_is_nothing_to_say() -> None:
    both = changed("2", b"r/.git/refs/heads/x")

    assert merged(REPOSITORY, both, both).repositories == ()


def test_a_repository_made_or_removed_on_both_sides_stays() -> None:
    made: Items = {b"new/.git/HEAD": b"1\n", **REPOSITORY}
    assert merged(REPOSITORY, made, {**made, b"new/.git/HEAD": b"2\n"}).repositories == (b"new/.git",)
    removed: Items = {b"r/file": b"1\n"}
    result = merged(REPOSITORY, changed("2", b"r/.git/HEAD"), removed)
    assert shown(result.tree) == shown(DictTree(changed("2", b"r/.git/HEAD")))
    assert result.repositories == (b"r/.git",)


@pytest.mark.parametrize("place", [b"bare/", b""])
def test_a_bare_repository_and_the_git_file_of_a_work_tree_are_repositories(place: bytes) -> None:
    def bare(content: bytes) -> Items:
        return {place + b"HEAD": content, place + b"objects": None, place + b"refs": None, b"work/.git": content}

    result = merged(bare(b"1\n"), bare(b"2\n"), bare(b"3\n"), "markers")

    assert not result.conflicts
    assert shown(result.tree) == shown(DictTree(bare(b"2\n")))
    assert result.repositories == ((b"bare", b"work/.git") if place else (b"",))


@pytest.mark.parametrize("options", [(), ("--object-format=sha256",)], ids=["sha1", "sha256"])
@pytest.mark.parametrize("version", ["2", "3", "4"])
def test_an_index_that_git_status_wrote_is_no_change(tmp_path: Path, version: str, options: tuple[str, ...]) -> None:
    git(tmp_path, "init", "-q", *options, "r")
    place = tmp_path / "r"
    for name in ("a", "directory", "directory-2"):
        commit(place, name)
    git(place, "update-index", "--index-version", "4" if version == "4" else "2")
    if version == "3":
        git(place, "update-index", "--skip-worktree", "a")
    base = items(tmp_path)
    os.utime(place / "directory", (1, 1))
    git(place, "status")
    looked = items(tmp_path)
    assert {path for path in base if base[path] != looked[path]} == {b"r/.git/index"}
    commit(place, "b")
    committed = items(tmp_path)
    (place / "c").touch()
    git(place, "add", "c")
    staged = items(tmp_path)

    assert shown(merged(base, looked, committed).tree) == shown(DictTree(committed))
    assert shown(merged(base, committed, looked).tree) == shown(DictTree(committed))
    assert merged(base, committed, looked).repositories == ()
    assert merged(committed, {**committed, b"r/.git/index": staged[b"r/.git/index"]}, looked).repositories == (
        b"r/.git",
    )


def test_a_damaged_index_is_a_change(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "r")
    commit(tmp_path / "r", "a")
    base = items(tmp_path)
    index = base[b"r/.git/index"]
    assert isinstance(index, bytes)
    for damaged in (b"", b"DIRC", index[:-1], index + b"x", index[:8] + b"\xff\xff\xff\xff" + index[12:], index[:60]):
        ours: Items = {**base, b"r/.git/index": damaged}
        assert merged(base, ours, {**base, b"r/.git/HEAD": b"x"}).repositories == (b"r/.git",)


# -- fetching the branches -------------------------------------------------------------------------------------
@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories with a repository `r` of one origin, each with a commit of its own."""
    git(tmp_path, "init", "-q", "-b", "main", "ours/r")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    commit(ours / "r", "base")
    subprocess.run(["cp", "-a", ours, theirs], check=True)
    commit(ours / "r", "ours")
    commit(theirs / "r", "theirs")
    return ours, theirs


def fetch(pair: tuple[Path, Path]) -> Fetched:
    return fetch_repository(b"r/.git", str(pair[1]), str(pair[0]), "fork")


def refs(place: Path) -> dict[str, str]:
    lines = git(place, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    return dict(line.split() for line in lines)


def test_branches_tags_stashes_and_detached_heads_are_fetched_and_nothing_else_changes(
    pair: tuple[Path, Path],
) -> None:
    ours, theirs = pair[0] / "r", pair[1] / "r"
    git(theirs, "branch", "side/{}")
    git(theirs, "tag", "-am", "tagged", "v1")
    (theirs / "base").write_text("stashed\n")
    git(theirs, "stash")
    git(theirs, "worktree", "add", "-q", "--detach", str(pair[1] / "tree"))
    in_tree = commit(pair[1] / "tree", "in tree")
    git(theirs, "checkout", "-q", "--detach")
    detached = commit(theirs, "detached")
    git(theirs, "gc", "-q")
    before, files = refs(ours), items(ours)
    there = refs(theirs)

    found = fetch(pair)

    assert found.problem == ""
    assert found.refs == "refs/vfsd/fork"
    assert refs(ours) == before | {
        "refs/vfsd/fork/main": there["refs/heads/main"],
        "refs/vfsd/fork/side/{}": there["refs/heads/side/{}"],
        "refs/vfsd/fork/refs/tags/v1": there["refs/tags/v1"],
        "refs/vfsd/fork/refs/stash": there["refs/stash"],
        "refs/vfsd/fork/HEAD": detached,
        "refs/vfsd/fork/worktrees/tree/HEAD": in_tree,
    }
    now = items(ours)
    assert {path: now[path] for path in files} == files
    new = sorted(path for path in now.keys() - files.keys() if now[path] is not None)
    assert all(path.startswith((b".git/objects/pack/", b".git/refs/vfsd/")) for path in new)


def test_earlier_commits_of_a_fork_of_the_same_name_are_not_lost(pair: tuple[Path, Path]) -> None:
    ours, theirs = pair[0] / "r", pair[1] / "r"
    assert fetch(pair).refs == "refs/vfsd/fork"
    first = refs(ours)["refs/vfsd/fork/main"]
    commit(theirs, "more")
    assert fetch(pair).refs == "refs/vfsd/fork"
    second = refs(ours)["refs/vfsd/fork/main"]
    git(theirs, "commit", "-q", "--amend", "-m", "again")

    found = fetch(pair)

    assert found.refs == "refs/vfsd/fork.2"
    assert "refs/vfsd/fork.2/main" in found.commands[-1]
    assert refs(ours)["refs/vfsd/fork/main"] == second
    assert git(ours, "merge-base", first, second).strip() == first


def test_nothing_is_executed_that_is_written_into_a_repository(pair: tuple[Path, Path], tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\nexit 1\n")
    trap.chmod(0o755)
    settings = (
        "core.fsmonitor core.sshCommand core.alternateRefsCommand core.pager core.editor uploadpack.packObjectsHook"
        " gpg.program credential.helper remote.origin.uploadpack alias.fetch"
    )
    for place in (pair[0] / "r", pair[1] / "r"):
        for hook in ("reference-transaction", "post-index-change", "pre-auto-gc", "update", "post-merge"):
            (place / ".git/hooks" / hook).symlink_to(trap)
        for name in settings.split():
            git(place, "config", name, str(trap))
        for name, value in {"core.hooksPath": str(place / ".git/hooks"), "remote.origin.promisor": "true"}.items():
            git(place, "config", name, value)
        git(place, "config", "remote.origin.url", str(pair[0] / "r"))
        (place / ".git/objects/info/alternates").write_text(f"{pair[1]}/r/.git/objects\n")
        (place / ".gitattributes").write_text("* filter=x\n")
        git(place, "config", "filter.x.clean", str(trap))
    (tmp_path / "executed").unlink(missing_ok=True)

    assert fetch(pair).problem == ""
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["refs", "refs/vfsd", "objects", "objects/pack", ""])
def test_a_symlink_in_a_repository_does_not_lead_a_fetch_out_of_the_workspace(
    pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    inside = pair[0] / "r/.git" / name
    inside.rename(outside) if inside.exists() else outside.mkdir()
    inside.symlink_to(outside)
    before = items(outside)

    found = fetch(pair)

    assert "is a symlink" in found.problem
    assert found.refs == ""
    assert items(outside) == before


@pytest.mark.parametrize(
    "name", ["", "objects", "objects/pack", "refs", "refs/heads/main", "packed-refs", "alternates"]
)
def test_a_fork_does_not_have_git_read_what_is_outside_of_it(
    pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    git(tmp_path, "init", "-q", "-b", "main", "outside")
    commit(tmp_path / "outside", "secret")
    git(tmp_path / "outside", "pack-refs", "--all", "--no-prune")
    outside, theirs = tmp_path / "outside/.git", pair[1] / "r/.git"
    if name == "alternates":  # through a directory of the fork
        (pair[1] / "objects/info").mkdir(parents=True)
        (pair[1] / "objects/info/alternates").write_text(f"{outside}/objects\n")
        (theirs / "objects/info/alternates").write_text("../../../objects\n")
    else:
        subprocess.run(["rm", "-rf", theirs / name], check=True)
        (theirs / name).symlink_to(outside / name)
    before = items(pair[0])

    found = fetch(pair)

    assert "out of the workspace" in found.problem
    assert items(pair[0]) == before


def test_without_git_the_branches_are_not_fetched_and_the_answer_says_so(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = items(pair[0])
    monkeypatch.setenv("PATH", str(tmp_path))

    found = fetch(pair)

    assert (found.refs, found.problem) == ("", "git is not installed")
    assert items(pair[0]) == before


@pytest.mark.parametrize("broken", ["text", "missing", "no tree"])
def test_a_ref_that_git_cannot_read_keeps_no_other_from_being_fetched(pair: tuple[Path, Path], broken: str) -> None:
    ours, theirs = pair[0] / "r", pair[1] / "r"
    git(theirs, "checkout", "-q", "-b", "a/broken")
    commit(theirs, "lost")
    tree = git(theirs, "rev-parse", "HEAD^{tree}").strip()
    git(theirs, "checkout", "-q", "main")
    git(theirs, "tag", "kept")
    if broken == "no tree":
        (theirs / ".git/objects" / tree[:2] / tree[2:]).unlink()
    else:
        (theirs / ".git/refs/heads/a/broken").write_text("x\n" if broken == "text" else "1" * 40 + "\n")
    main = git(theirs, "rev-parse", "main").strip()

    found = fetch(pair)

    assert (found.problem, found.refs, found.left) == ("", "refs/vfsd/fork", ("refs/heads/a/broken",))
    fetched = {ref: value for ref, value in refs(ours).items() if ref.startswith("refs/vfsd/")}
    assert fetched == {"refs/vfsd/fork/main": main, "refs/vfsd/fork/refs/tags/kept": main}
    (theirs / ".git/refs/heads/main").write_text("x\n")
    git(theirs, "tag", "-d", "kept")
    none = fetch(pair)
    assert (none.refs, none.nothing) == ("", "")
    assert none.left == ("refs/heads/a/broken", "refs/heads/main")


def test_no_branches_are_promised_where_the_fork_has_no_repository(pair: tuple[Path, Path]) -> None:
    theirs = pair[1] / "r/.git"
    theirs.rename(pair[1] / "elsewhere")
    assert fetch(pair).nothing == "no repository"
    theirs.write_text("gitdir: ../elsewhere\n")

    found = fetch(pair)

    assert (found.refs, found.commands, found.problem) == ("", (), "")
    assert found.nothing == "only a file that names a repository elsewhere"


def test_the_commands_refuse_while_a_file_has_conflict_markers(pair: tuple[Path, Path]) -> None:
    ours = pair[0] / "r"
    head = git(ours, "rev-parse", "HEAD")
    marked = [b"r/base", b"r/no\xffutf-8 '", b"other/file"]
    for path in marked[:2]:
        Path(os.fsdecode(os.fsencode(pair[0]) + b"/" + path)).write_bytes(b"<<<<<<< ours\n=======\n>>>>>>> theirs\n")

    found = fetch_repository(b"r/.git", str(pair[1]), str(pair[0]), "fork", marked)

    def run() -> str:
        return subprocess.run(["sh", "-ec", "\n".join(found.commands)], check=False, capture_output=True).stdout.decode(
            errors="replace"
        )

    assert run().count("\n") == 2
    assert git(ours, "rev-parse", "HEAD") == head
    (ours / "base").write_text("resolved\n")
    assert "no" in run()
    assert git(ours, "rev-parse", "HEAD") == head
    Path(os.fsdecode(os.fsencode(ours) + b"/no\xffutf-8 '")).unlink()
    assert run() == ""
    assert git(ours, "rev-parse", "HEAD^") == head
    assert git(ours, "show", "HEAD:base") == "resolved\n"
