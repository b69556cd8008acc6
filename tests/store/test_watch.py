"""A watch spares the walk what is quiet, and misses nothing that happens in the directory."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from protocol.store import DirectorySource, Store, Watch
from protocol.store import watch as watch_module
from tests.store.states import Chaos, differences, state_of, state_of_tree


class Looks:
    """Which directories a walk has looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[bytes] = []
        entered = Watch.entered

        def noting(watch: Watch, descriptor: int, path: bytes) -> None:
            self.paths.append(path)
            entered(watch, descriptor, path)

        monkeypatch.setattr(Watch, "entered", noting)

    def taken(self) -> set[bytes]:
        found, self.paths = set(self.paths), []
        return found


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def quiet_tree(root: Path) -> None:
    for number in range(5):
        (root / f"{number}" / "below").mkdir(parents=True)
        (root / f"{number}" / "below" / "file").write_bytes(b"%d" % number)


def taken(store: Store, source: DirectorySource, count: list[int] = [0]) -> str:  # noqa: B006 -- a counter
    count[0] += 1
    name = f"{count[0]}"
    store.take("w", name, source)
    return name


def settled(store: Store, source: DirectorySource) -> None:
    """Until nothing is looked at again for having changed a moment ago."""
    for _ in range(50):
        taken(store, source)


def test_only_where_something_happened_is_looked_at(store: Store, root: Path, looks: Looks) -> None:
    quiet_tree(root)
    source = DirectorySource(root, Watch())
    settled(store, source)
    looks.taken()

    (root / "3" / "below" / "file").write_bytes(b"other")
    name = taken(store, source)

    assert looks.taken() == {b"", b"3", b"3/below"}
    with store.tree("w", name) as tree:
        assert state_of_tree(tree) == state_of(root)


def test_a_directory_in_anothers_place_is_not_taken_for_it(store: Store, root: Path) -> None:
    quiet_tree(root)
    source = DirectorySource(root, Watch())
    settled(store, source)

    os.rename(root / "1", root / "aside")
    os.rename(root / "2", root / "1")
    os.rename(root / "aside", root / "2")
    name = taken(store, source)

    with store.tree("w", name) as tree:
        assert tree.read(b"1/below/file", 0, 1) == b"2"
        assert tree.read(b"2/below/file", 0, 1) == b"1"
    (root / "1" / "below" / "file").write_bytes(b"after the move")
    with store.tree("w", taken(store, source)) as tree:
        assert state_of_tree(tree) == state_of(root)


def test_a_file_of_several_names_is_always_looked_at(store: Store, root: Path, tmp_path: Path) -> None:
    quiet_tree(root)
    os.link(root / "1" / "below" / "file", tmp_path / "outside")
    source = DirectorySource(root, Watch())
    settled(store, source)

    (tmp_path / "outside").write_bytes(b"by another name")

    with store.tree("w", taken(store, source)) as tree:
        assert tree.read(b"1/below/file", 0, 100) == b"by another name"


def test_when_too_much_has_happened_everything_is_looked_at(
    store: Store, root: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet_tree(root)
    watch = Watch()
    source = DirectorySource(root, watch)
    settled(store, source)
    looks.taken()
    with open("/proc/sys/fs/inotify/max_queued_events", encoding="ascii") as file:
        most = int(file.read())
    with open(root / "1" / "one", "wb"), open(root / "2" / "two", "wb"):
        pass
    for number in range(most // 2 + 1):
        # Two in turn: equal events that follow each other are told once.
        os.utime(root / "1" / "one", ns=(number, number))
        os.utime(root / "2" / "two", ns=(number, number))
    (root / "4" / "below" / "file").write_bytes(b"after the last that was told")

    with store.tree("w", taken(store, source)) as tree:
        assert state_of_tree(tree) == state_of(root)
    assert b"0/below" in looks.taken()


def test_now_and_then_everything_is_looked_at(
    store: Store, root: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet_tree(root)
    source = DirectorySource(root, Watch())
    settled(store, source)
    looks.taken()
    monkeypatch.setattr(watch_module, "FULL_WALK_S", -1.0)

    taken(store, source)

    assert len(looks.taken()) == 11


def test_where_there_are_more_directories_than_may_be_watched_all_is_looked_at(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet_tree(root)
    monkeypatch.setattr(watch_module, "_most_watches", lambda: 3)
    source = DirectorySource(root, Watch())
    for number in range(3):
        (root / "4" / "below" / "file").write_bytes(b"%d" % number)
        with store.tree("w", taken(store, source)) as tree:
            assert state_of_tree(tree) == state_of(root)


def counted(root: Path) -> tuple[int, int, int]:
    """Files, directories and bytes below a directory, each inode once."""
    paths = [os.path.join(at, name) for at, below, names in os.walk(root) for name in below + names]
    seen = {found.st_ino: found for found in map(os.lstat, paths)}
    directories = sum(stat.S_ISDIR(found.st_mode) for found in seen.values())
    size_bytes = sum(found.st_size for found in seen.values() if stat.S_ISREG(found.st_mode))
    return len(seen) - directories, directories, size_bytes


@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_happens_is_missed(store: Store, root: Path, seed: int) -> None:
    chaos = Chaos(root, seed)
    source = DirectorySource(root, Watch())
    steps = random.Random(seed)
    for _ in range(40):
        chaos.change(steps.randrange(4))
        name = taken(store, source)
        with store.tree("w", name) as tree:
            found = state_of_tree(tree)
        info = store.snapshot("w", name)
        assert (info.files, info.directories, info.size_bytes) == counted(root)
        assert differences(found, state_of(root)) == []
        assert found.links == state_of(root).links
