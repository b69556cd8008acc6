"""kill -9 of who takes a snapshot, restores one or collects garbage: at a hundred system calls, and by the clock."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.linux.beneath import TEMPORARY_PREFIX
from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store
from tests.unit.protocol.store.states import Chaos, State, differences, state_of, state_of_tree

POINTS = 40
LONG_POINTS = 400
BY_THE_CLOCK = 10
LARGE = 300_000  # bytes: a content with a file of its own


class Mortal:
    """Somebody who dies when told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert not answer["failed"], order
        return answer


@pytest.fixture(scope="module")
def mortal() -> Iterator[Mortal]:
    command = [sys.executable, "-m", "tests.unit.protocol.store.mortal"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Mortal(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


class Scene:
    """A store with one snapshot, `early`, and a directory that has changed since."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.root = place / "root"
        self.root.mkdir(parents=True)
        chaos = Chaos(self.root, 5)
        (self.root / "large").write_bytes(bytes(range(256)) * (LARGE // 256 + 1))
        (self.root / "same").mkdir()
        (self.root / "same" / "file").write_bytes(b"same")
        (self.root / "one").write_bytes(b"linked")
        os.link(self.root / "one", self.root / "two")
        chaos.change(60)
        self.early = state_of(self.root)
        with Store(place / "store") as store:
            store.take("w", "early", DirectorySource(self.root))
            chaos.change(40)
            (self.root / "large").write_bytes(b"other" * (LARGE // 5 + 1))
            (self.root / "gone").write_bytes(b"only in the second")
            store.take("w", "second", DirectorySource(self.root))
            (self.root / "gone").unlink()
            chaos.change(20)
        self.late = state_of(self.root)

    def copy(self, to: Path) -> Path:
        """The same again.  Hard links and times are kept, inode numbers not: the stat cache knows nothing of it."""
        subprocess.run(["cp", "-a", str(self.place), str(to)], check=True)
        return to


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("killed") / "scene")


def points(calls: int, most: int) -> list[int]:
    """Some of so many calls, the same in each run; all of them where there are fewer."""
    if calls <= most:
        return list(range(1, calls + 1))
    # The last ones too, and beyond: what comes after a snapshot has its name is little, and how many calls there are
    # depends a little on the time they take.
    end = range(calls - 40, calls + 40, 3)
    return sorted({*end, *random.Random(calls).sample(range(1, calls - 40), most - len(end))})


def endings(
    mortal: Mortal, scene: Scene, tmp_path: Path, *, runs_long: bool, most: int = POINTS, **order: Any
) -> Iterator[tuple[Store, Path, int]]:
    """The store and the directory after each death, and the number of the death."""
    whole = scene.copy(tmp_path / "whole")
    calls = mortal.do(store=str(whole / "store"), root=str(whole / "root"), **order)["calls"]
    assert calls > 50
    deaths: list[dict[str, Any]] = [{"at": at} for at in points(calls, LONG_POINTS if runs_long else most)]
    deaths += [{"after_s": 0.001 * number} for number in range(BY_THE_CLOCK)]
    for number, death in enumerate(deaths):
        place = scene.copy(tmp_path / "place")
        answer = mortal.do(store=str(place / "store"), root=str(place / "root"), **order, **death)
        if not answer["killed"]:
            assert "after_s" in death or death["at"] > calls * 0.9
            shutil.rmtree(place)
            continue
        with Store(place / "store") as store:
            yield store, place / "root", number
        shutil.rmtree(place)


def assert_same(found: State, wanted: State) -> None:
    assert differences(found, wanted) == []
    assert found.links == wanted.links


def assert_whole(store: Store, name: str, wanted: State) -> None:
    with store.tree("w", name) as tree:
        assert_same(state_of_tree(tree), wanted)


def leftovers(root: Path) -> list[str]:
    return [name for _, below, names in os.walk(root) for name in below + names if name.startswith(".vfsd-restore-")]


def test_the_names_of_temporary_files_are_those_that_snapshots_leave_out() -> None:
    assert TEMPORARY_PREFIX == b".vfsd-restore-"


@pytest.mark.extended
def test_a_snapshot_that_was_killed_is_there_whole_or_not_at_all_and_the_others_are_whole(
    mortal: Mortal, scene: Scene, tmp_path: Path, runs_long: bool
) -> None:
    outcomes = set()
    for store, root, number in endings(mortal, scene, tmp_path, runs_long=runs_long, do="take", name="next"):
        assert store.check().damages == (), number
        assert_whole(store, "early", scene.early)
        names = [info.name for info in store.snapshots("w")]
        outcomes.add("next" in names)
        if "next" in names:
            assert_whole(store, "next", scene.late)
        assert_same(state_of(root), scene.late)
        again = store.take("w", "again", DirectorySource(root))
        assert again.serial > max(info.serial for info in store.snapshots("w") if info.name != "again")
        assert_whole(store, "again", scene.late)
        store.collect_garbage()
        assert_whole(store, "again", scene.late)
        assert store.check().leftover_bytes == 0
    assert outcomes == {True, False}


@pytest.mark.extended
@pytest.mark.slow
def test_a_restore_that_was_killed_is_finished_or_undone_by_the_next_one(
    mortal: Mortal, scene: Scene, tmp_path: Path, runs_long: bool
) -> None:
    outcomes = set()
    for store, root, number in endings(
        mortal, scene, tmp_path, runs_long=runs_long, do="restore", name="early", safety="safe"
    ):
        assert store.check().damages == (), number
        found = store.interrupted("w")
        outcomes.add(found is not None)
        if found is None:
            assert _is_one_of(state_of(root), scene)
            assert leftovers(root) == []
            continue
        assert (found.snapshot, found.safety) == ("early", "safe")
        assert_nothing_torn(root, scene)
        assert_whole(store, "safe", scene.late)
        if number % 2:
            store.restore("w", DirectoryTarget(root), RestoreRequest(found.snapshot, found.paths, safety="safe-2"))
            assert_same(state_of(root), scene.early)
        else:
            store.restore("w", DirectoryTarget(root), RestoreRequest(found.safety or "", safety=None))
            assert_same(state_of(root), scene.late)
        assert store.interrupted("w") is None
        assert leftovers(root) == []
        assert store.check().damages == ()
    assert outcomes == {True, False}


def _is_one_of(found: State, scene: Scene) -> bool:
    return any(not differences(found, state) and found.links == state.links for state in (scene.early, scene.late))


def assert_nothing_torn(root: Path, scene: Scene) -> None:
    """Each file has one of its two contents, and what is the same in both is there."""
    now = state_of(root)
    for path, facts in now.files.items():
        if path.rpartition(b"/")[2].startswith(TEMPORARY_PREFIX):
            continue
        contents = [state.files[path][5] for state in (scene.early, scene.late) if path in state.files]
        assert facts[5] in contents, path
    for path, facts in scene.early.files.items():
        if scene.late.files.get(path) == facts and facts[5] is not None:
            assert now.files[path][5] == facts[5]


@pytest.mark.extended
@pytest.mark.slow
def test_a_collection_that_was_killed_leaves_every_snapshot_whole_and_is_done_by_the_next(
    mortal: Mortal, scene: Scene, tmp_path: Path, runs_long: bool
) -> None:
    with Store(scene.copy(tmp_path / "dropped") / "store") as store:
        store.drop("w", "second")
        store.take("w", "third", DirectorySource(tmp_path / "dropped" / "root"))
        store.drop("w", "third")
    dropped = Scene.__new__(Scene)
    dropped.place, dropped.early, dropped.late = tmp_path / "dropped", scene.early, scene.late
    for store, root, number in endings(mortal, dropped, tmp_path, runs_long=runs_long, most=32, do="collect"):
        assert store.check().damages == (), number
        assert_whole(store, "early", scene.early)
        store.take("w", "next", DirectorySource(root))
        store.collect_garbage()
        assert_whole(store, "next", scene.late)
        assert_whole(store, "early", scene.early)
        assert store.check().damages == ()
