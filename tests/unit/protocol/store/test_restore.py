"""Restoring a directory: only what differs is touched, and nothing is lost."""

from __future__ import annotations

import errno
import os
import stat
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.diff.tree_diff import changes
from protocol.errors import SnapshotNotFoundError
from protocol.linux.posix_acl import DEFAULT
from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store, TreeSource
from protocol.store.restore import Plan
from tests.support.rights import needs_root
from tests.support.trees import DictTree
from tests.unit.protocol.store.states import Chaos, differences, state_of


def take(store: Store, root: Path, name: str) -> None:
    store.take("w", name, DirectorySource(root))


@pytest.mark.extended
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rounds=st.lists(st.tuples(st.integers(1, 25), st.integers(0, 15), st.booleans()), min_size=1, max_size=8),
)
@pytest.mark.slow
def test_any_state_comes_back_whole_and_can_be_undone(seed: int, rounds: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as place, Store(os.path.join(place, "store")) as first:
        store, root = first, Path(place, "root")
        root.mkdir()
        chaos, states = Chaos(root, seed), []
        source, target = DirectorySource(root), DirectoryTarget(root)
        for number, (before, after, anew) in enumerate(rounds):
            chaos.change(before)
            store.take("w", f"{number}", source)
            states.append(state_of(root))
            chaos.change(after)
            left = state_of(root)
            wanted = chaos.random.randrange(number + 1)
            if anew:
                store = Store(first.directory)

            done = store.restore("w", target, RestoreRequest(f"{wanted}", safety=f"safety-{number}"))

            assert done.problems == ()
            assert differences(state_of(root), states[wanted]) == []
            assert state_of(root).links == states[wanted].links
            with store.tree("w", f"safety-{number}") as old, store.tree("w", f"{wanted}") as new:
                found = {(change.path, change.kind) for change in changes(old, new)}
            told = {(change.path, change.kind) for change in done.changes}
            # Also names that a diff leaves out: they lead to another file with the same content.
            assert found <= told
            assert {kind for _, kind in told - found} <= {"metadata"}
            if after % 2:
                store.restore("w", target, RestoreRequest(f"safety-{number}", safety=None))
                assert state_of(root) == left
        assert store.check().damages == ()


def test_only_what_differs_is_touched(store: Store, root: Path) -> None:
    for name in ("same", "changed", "gone", "mode"):
        (root / name).write_bytes(name.encode())
    take(store, root, "s")
    (root / "changed").write_bytes(b"other")
    (root / "gone").unlink()
    (root / "made").write_bytes(b"made")
    os.chmod(root / "mode", 0o600)
    inodes = {name: os.stat(root / name).st_ino for name in ("same", "mode")}
    ctime_ns = os.stat(root / "same").st_ctime_ns

    done = store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="before"))

    assert [(change.path, change.kind) for change in done.changes] == [
        (b"changed", "modified"), (b"gone", "added"), (b"made", "removed"), (b"mode", "metadata"),
    ]  # fmt: skip
    assert {name: os.stat(root / name).st_ino for name in ("same", "mode")} == inodes
    assert os.stat(root / "same").st_ctime_ns == ctime_ns
    assert done.safety is not None
    assert done.safety.kind == "safety"


def test_a_plan_reports_directories_of_which_only_the_mtime_changes(store: Store, root: Path) -> None:
    (root / "d").mkdir()
    os.utime(root / "d", ns=(0, 10**18))
    take(store, root, "s")
    root_mtime_ns = os.stat(root).st_mtime_ns
    (root / "d" / "made").write_bytes(b"x")
    plans: list[Plan] = []

    done = store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None), planned=plans.append)

    assert [(change.path, change.kind) for change in done.changes] == [(b"d/made", "removed")]
    assert [(change.path, change.kind) for change in plans[0].touched()] == [(b"d", "metadata")]
    assert (os.stat(root / "d").st_mtime_ns, os.stat(root).st_mtime_ns) == (10**18, root_mtime_ns)


def test_paths_alone_come_back(store: Store, root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(b"old")
    (root / "a" / "other").write_bytes(b"old")
    take(store, root, "s")
    for path in ("a/b/file", "a/other"):
        (root / path).unlink()
    (root / "a" / "b").rmdir()

    store.restore("w", DirectoryTarget(root), RestoreRequest("s", (b"a/b/file",), safety=None))

    assert (root / "a" / "b" / "file").read_bytes() == b"old"
    assert not (root / "a" / "other").exists()
    with pytest.raises(FileNotFoundError):
        store.restore("w", DirectoryTarget(root), RestoreRequest("s", (b"never",), safety=None))
    assert store.interrupted("w") is None


def test_nothing_gains_the_acl_of_the_directory_that_it_is_restored_to(store: Store, root: Path) -> None:
    (root / "file").write_bytes(b"")
    os.mkfifo(root / "fifo")
    (root / "directory").mkdir()
    names = ("file", "fifo", "directory")
    for name in names:
        (root / name).chmod(0o775)
    entries = ((1, 7, 2**32 - 1), (2, 7, 65534), (4, 7, 2**32 - 1), (16, 7, 2**32 - 1), (32, 0, 2**32 - 1))
    os.setxattr(root, DEFAULT, struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries))
    take(store, root, "s")
    (root / "file").unlink()
    (root / "fifo").unlink()
    (root / "directory").rmdir()

    store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))

    assert [(name, os.listxattr(root / name), stat.S_IMODE((root / name).stat().st_mode)) for name in names] == [
        (name, [], 0o775) for name in names
    ]


def test_names_of_one_file_are_linked_again_to_the_name_that_is_left(store: Store, root: Path) -> None:
    (root / "kept").write_bytes(b"content")
    os.link(root / "kept", root / "gone")
    take(store, root, "s")
    (root / "gone").unlink()
    os.link(root / "kept", root / "made")
    inode = os.stat(root / "kept").st_ino

    store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))

    assert sorted(os.listdir(root)) == ["gone", "kept"]
    assert {os.stat(root / name).st_ino for name in ("gone", "kept")} == {inode}


def test_a_name_of_a_file_that_was_replaced_by_an_equal_one_is_linked_again(store: Store, root: Path) -> None:
    (root / "first").write_bytes(b"content")
    os.link(root / "first", root / "second")
    os.utime(root / "first", ns=(0, 10**18))
    take(store, root, "s")
    inode = os.stat(root / "second").st_ino
    (root / "first").unlink()
    (root / "first").write_bytes(b"content")
    os.utime(root / "first", ns=(0, 10**18))
    os.link(root / "second", root / "third")

    store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))

    assert sorted(os.listdir(root)) == ["first", "second"]
    assert {os.stat(root / name).st_ino for name in ("first", "second")} == {inode}


def test_without_removal_what_is_there_stays(store: Store, root: Path) -> None:
    (root / "mine").write_bytes(b"mine")
    store.take("w", "archive", TreeSource(DictTree({b"file": b"new", b"directory/file": b"new"})))

    store.restore("w", DirectoryTarget(root), RestoreRequest("archive", safety=None, remove=False))

    assert (root / "mine").read_bytes() == b"mine"
    assert (root / "directory" / "file").read_bytes() == b"new"


def test_who_has_a_file_open_keeps_what_he_reads(store: Store, root: Path) -> None:
    (root / "file").write_bytes(b"first")
    take(store, root, "s")
    (root / "file").write_bytes(b"other")
    with open(root / "file", "rb") as reader:
        store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))
        assert reader.read() == b"other"
    assert (root / "file").read_bytes() == b"first"


def test_what_is_changed_while_it_is_restored_is_left_and_named(store: Store, root: Path) -> None:
    for name in ("a", "b", "c"):
        (root / name).write_bytes(b"old")
    (root / "directory").mkdir()
    take(store, root, "s")
    for name in ("a", "b", "c"):
        (root / name).write_bytes(b"new")
    (root / "made").mkdir()

    def interfere(_: object) -> None:
        (root / "b").write_bytes(b"newer, and in no snapshot")
        (root / "made" / "precious").write_bytes(b"in no snapshot")

    done = store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="before"), planned=interfere)

    assert [problem.path for problem in done.problems] == [b"b", b"made"]
    assert (root / "b").read_bytes() == b"newer, and in no snapshot"
    assert (root / "made" / "precious").read_bytes() == b"in no snapshot"
    assert (root / "a").read_bytes() == (root / "c").read_bytes() == b"old"
    assert [change.path for change in done.changes] == [b"a", b"c"]


def test_a_link_outside_the_directory_is_not_written_through(store: Store, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (root / "file").write_bytes(b"old")
    take(store, root, "s")
    os.link(root / "file", outside)
    os.chmod(outside, 0o600)
    before = os.stat(outside)

    store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))

    assert os.stat(outside).st_mode == before.st_mode
    assert os.stat(root / "file").st_mode & 0o777 == 0o644


def test_directories_swapped_for_symlinks_lead_nowhere(store: Store, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"not ours")
    (root / "directory").mkdir()
    (root / "directory" / "file").write_bytes(b"old")
    take(store, root, "s")
    (root / "directory" / "file").write_bytes(b"new")

    def swap(_: object) -> None:
        os.rename(root / "directory", tmp_path / "moved")
        os.symlink(outside, root / "directory")

    done = store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None), planned=swap)

    assert (outside / "file").read_bytes() == b"not ours"
    assert os.listdir(outside) == ["file"]
    assert done.problems


def test_a_restore_that_fails_half_way_says_so_until_it_is_finished(store: Store, root: Path) -> None:
    for number in range(10):
        (root / f"{number}").write_bytes(b"old")
    take(store, root, "s")
    for number in range(10):
        (root / f"{number}").write_bytes(b"new")

    class Full(Exception):
        pass

    def fail_at_five(done: int, total: int) -> None:
        if (done, total) == (5, 10):
            raise Full

    with pytest.raises(Full):
        store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="before"), progress=fail_at_five)
    found = store.interrupted("w")
    assert found is not None
    assert (found.snapshot, found.safety, found.paths) == ("s", "before", ())
    # Another path's restore does not end it.
    store.restore("w", DirectoryTarget(root), RestoreRequest("s", (b"9",), safety=None))
    assert store.interrupted("w") is not None
    store.restore("w", DirectoryTarget(root), RestoreRequest("before", safety=None))
    assert store.interrupted("w") is None
    assert {(root / f"{number}").read_bytes() for number in range(10)} == {b"new"}


def test_a_snapshot_that_is_not_there_is_not_restored(store: Store, root: Path) -> None:
    with pytest.raises(SnapshotNotFoundError):
        store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety="before"))
    assert store.snapshots("w") == []


@needs_root
def test_a_device_comes_back(store: Store, root: Path) -> None:
    os.mknod(root / "null", 0o020666, os.makedev(1, 3))
    take(store, root, "s")
    (root / "null").unlink()

    store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))

    assert os.stat(root / "null").st_rdev == os.makedev(1, 3)


@needs_root
def test_what_is_in_read_only_directories_comes_back_without_being_root(tmp_path: Path) -> None:
    for at in [tmp_path, *tmp_path.parents]:
        if at.stat().st_mode & 0o055 != 0o055:
            os.chmod(at, at.stat().st_mode | 0o055)
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, 65534, 65534)
    os.seteuid(65534)
    try:
        root = own / "root"
        (root / "cache" / "deep").mkdir(parents=True)
        (root / "cache" / "deep" / "file").write_bytes(b"was")
        for path in ("cache/deep", "cache"):
            (root / path).chmod(0o555)
        with Store(own / "store") as store:
            store.take("w", "before", DirectorySource(root))
            before = state_of(root)
            (root / "cache" / "deep").chmod(0o755)
            (root / "cache" / "deep" / "file").write_bytes(b"changed")
            (root / "cache" / "deep" / "new").write_bytes(b"new")
            (root / "cache" / "deep").chmod(0o555)
            (root / "gone").mkdir()
            (root / "gone" / "file").write_bytes(b"file")
            (root / "gone").chmod(0o555)

            done = store.restore(
                "w", DirectoryTarget(root), RestoreRequest("before", (b"cache/deep/file",), safety=None)
            )
            assert done.problems == ()
            assert (root / "cache" / "deep" / "file").read_bytes() == b"was"
            assert (root / "cache" / "deep").stat().st_mode & 0o777 == 0o555

            done = store.restore("w", DirectoryTarget(root), RestoreRequest("before", safety=None))
            assert done.problems == ()
            assert state_of(root) == before
    finally:
        os.seteuid(0)


@needs_root
def test_a_foreign_program_that_set_its_user_comes_back_without_that_where_its_owner_cannot_be_set(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "program").write_bytes(b"#!")
    os.chown(root / "program", 1234, 1234)
    (root / "program").chmod(0o6755)
    take(store, root, "s")
    (root / "program").unlink()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not yours to give away")

    monkeypatch.setattr(os, "chown", refuse)
    done = store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None))

    assert (root / "program").stat().st_mode & 0o7777 == 0o755
    assert "owner 1234:1234" in str(done.problems)
