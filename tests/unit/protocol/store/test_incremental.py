"""An incremental snapshot equals a full scan: every change of an inode is found, whichever of its names was used."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.diff.tree_diff import changes
from protocol.linux.statx import is_racy
from protocol.store import DirectorySource, Store
from protocol.store.format.blobs import LARGE_BYTES, StoreSink
from tests.unit.protocol.store.states import Chaos, State, differences, state_of, state_of_tree


class Workspace:
    """One host workspace that lives through several daemons, as `vfsd mount` sets them up."""

    def __init__(self, store: Store, root: Path) -> None:
        self.root = root
        self._count = 0
        self._store = store
        self._source = DirectorySource(root)

    def remount(self) -> None:
        """Serve the directory from a new daemon: only what is on disk survives."""
        self._store.close()
        self._store = Store(self._store.directory)
        self._source = DirectorySource(self.root)

    def take(self) -> str:
        self._count += 1
        name = f"{self._count}"
        self._store.take("w", name, self._source)
        return name

    def settle(self) -> None:
        """Take a snapshot when no timestamp is so recent that the next scan reads the file again for that reason."""
        begin_ns = time.time_ns()
        while is_racy(begin_ns | 1, time.time_ns()):
            pass
        self.take()

    def collect_garbage(self) -> None:
        """Remove a dropped snapshot and what only it needed."""
        extra = self.root / "extra"
        extra.write_bytes(b"x" * 2 * LARGE_BYTES)
        self._store.drop("w", self.take())
        extra.unlink()
        assert self._store.collect_garbage().freed_contents

    def state(self, name: str) -> State:
        with self._store.tree("w", name) as tree:
            return state_of_tree(tree)

    def counts(self, name: str) -> tuple[int, int, int]:
        info = self._store.snapshot("w", name)
        return info.files, info.directories, info.size_bytes


@pytest.fixture
def workspace(store: Store, root: Path) -> Workspace:
    (root / "z").mkdir()
    (root / "z" / "f").write_bytes(b"before")
    (root / "q").mkdir()
    return Workspace(store, root)


def by_chmod(path: Path) -> None:
    path.chmod(0o1777)


def by_write(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"BEFORE")  # the same size


def by_mapping(path: Path) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[:3] = b"map"
        mapping.flush()


@contextmanager
def link_that_stays(root: Path) -> Iterator[Path]:
    os.link(root / "z" / "f", root / "a")
    yield root / "a"


@contextmanager
def link_that_is_removed(root: Path) -> Iterator[Path]:
    os.link(root / "z" / "f", root / "a")
    yield root / "a"
    os.unlink(root / "a")


@contextmanager
def link_in_a_directory_that_is_removed(root: Path) -> Iterator[Path]:
    os.mkdir(root / "new")
    os.link(root / "z" / "f", root / "new" / "a")
    yield root / "new" / "a"
    os.unlink(root / "new" / "a")
    os.rmdir(root / "new")


@contextmanager
def link_outside(root: Path) -> Iterator[Path]:
    os.link(root / "z" / "f", root.parent / "outside")
    yield root.parent / "outside"


@contextmanager
def descriptor_of_a_removed_name(root: Path) -> Iterator[Path]:
    descriptor = os.open(root / "z" / "f", os.O_RDWR)
    os.link(root / "z" / "f", root / "q" / "a")
    os.unlink(root / "z" / "f")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("change", [by_chmod, by_write, by_mapping])
@pytest.mark.parametrize(
    "name",
    [
        link_that_stays,
        link_that_is_removed,
        link_in_a_directory_that_is_removed,
        link_outside,
        descriptor_of_a_removed_name,
    ],
)
@pytest.mark.parametrize("remounted", [False, True], ids=["same daemon", "new daemon"])
def test_a_change_through_another_name_is_found(
    workspace: Workspace, name: Callable[[Path], object], change: Callable[[Path], None], remounted: bool
) -> None:
    if remounted:
        workspace.settle()
        workspace.remount()
    workspace.settle()

    with name(workspace.root) as path:  # type: ignore[attr-defined]
        workspace.settle()
        change(path)

    assert workspace.state(workspace.take()) == state_of(workspace.root)


def test_a_new_link_and_a_new_mode_are_both_in_the_diff(workspace: Workspace, store: Store) -> None:
    workspace.settle()
    old = workspace.take()
    os.link(workspace.root / "z" / "f", workspace.root / "a")
    (workspace.root / "z" / "f").chmod(0o1777)
    new = workspace.take()

    with store.tree("w", old) as before, store.tree("w", new) as after:
        found = {(change.path, change.kind) for change in changes(before, after)}

    assert found == {(b"a", "added"), (b"z/f", "metadata")}


def test_a_change_between_two_daemons_is_found(workspace: Workspace) -> None:
    workspace.settle()

    by_write(workspace.root / "z" / "f")
    workspace.remount()

    assert workspace.state(workspace.take()) == state_of(workspace.root)


def test_directories_that_change_places_are_not_taken_for_each_other(workspace: Workspace) -> None:
    (workspace.root / "q" / "f").write_bytes(b"BEFORE")
    workspace.settle()

    os.rename(workspace.root / "z", workspace.root / "aside")
    os.rename(workspace.root / "q", workspace.root / "z")
    os.rename(workspace.root / "aside", workspace.root / "q")

    assert workspace.state(workspace.take()) == state_of(workspace.root)
    by_chmod(workspace.root / "q" / "f")
    assert workspace.state(workspace.take()) == state_of(workspace.root)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(10))
def test_an_incremental_snapshot_equals_a_full_scan_by_a_new_store(
    store: Store, root: Path, tmp_path: Path, seed: int, runs_long: bool
) -> None:
    chaos, steps, workspace = Chaos(root, seed), random.Random(seed), Workspace(store, root)
    for step in range(80 if runs_long else 20):
        chaos.change(steps.randrange(5))
        if steps.random() < 0.2:
            workspace.remount()
        name = workspace.take()
        with Store(tmp_path / f"oracle-{step}") as fresh:
            full = Workspace(fresh, root)
            expected = full.take()
            assert workspace.counts(name) == full.counts(expected)
            assert differences(workspace.state(name), full.state(expected)) == []
            assert workspace.state(name).links == full.state(expected).links == state_of(root).links
        assert differences(workspace.state(name), state_of(root)) == []


def test_a_later_daemon_reads_no_unchanged_file_again_after_a_garbage_collection(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.collect_garbage()
    workspace.settle()
    workspace.remount()
    looked_up: list[bytes] = []
    has = StoreSink.has
    monkeypatch.setattr(StoreSink, "has", lambda self, digest: looked_up.append(digest) or has(self, digest))

    workspace.take()

    assert looked_up == []
