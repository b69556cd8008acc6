"""The benchmark of snapshots: its changes, and the comparison of trees that each restore has to pass."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench._results import Budget
from bench._snapshot_systems import Copy, Git, System
from bench.rewind import Figures, change, differences, document, fill, measure, one_round, read_tree

FILES = 200


class FakeSystem(System):
    """Keeps snapshots as copies with shutil; restores without `damage`."""

    def __init__(self, live: Path, damage: str = "") -> None:
        super().__init__(live)
        self._damage = damage

    def snapshot(self, name: str) -> None:
        shutil.copytree(self.live, self.live.with_name(name), symlinks=True)

    def restore(self, name: str) -> None:
        shutil.rmtree(self.live)
        self.fork(name, self.live)
        if self._damage:
            victim = next(path for path in sorted(self.live.glob("*/*")) if not path.is_symlink())
            if self._damage == "content":
                victim.write_text("other")
            if self._damage == "left behind":
                (self.live / "left").touch()

    def fork(self, name: str, place: Path) -> None:
        shutil.copytree(self.live.with_name(name), place, symlinks=True)

    def forget(self, name: str, place: Path | None) -> None:
        shutil.rmtree(self.live.with_name(name))
        if place:
            shutil.rmtree(place)


def live(place: Path) -> Path:
    made = place / "live"
    made.mkdir(parents=True)
    return made


def test_two_equal_trees_get_the_same_changes(tmp_path: Path) -> None:
    one, other = live(tmp_path / "one"), live(tmp_path / "other")
    for place in (one, other):
        fill(place, FILES)
    before = read_tree(one)
    for seed in ("0a", "0b", "1a"):
        for place in (one, other):
            change(place, seed)
        assert differences(read_tree(one), read_tree(other)) == []
        assert len(differences(before, read_tree(one))) > 10


@pytest.mark.parametrize("damage", ["content", "mode", "absence", "link"])
def test_a_tree_differs_by_content_mode_kind_and_existence(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, FILES)
    before = read_tree(tmp_path)
    path = tmp_path / "directory1" / "file150.txt"
    if damage == "mode":
        path.chmod(0o755)
    else:
        path.unlink()
    if damage == "content":
        path.write_text("other")
    elif damage == "link":
        path.symlink_to("file151.txt")
    assert differences(before, read_tree(tmp_path)) == ["directory1/file150.txt"]


@pytest.mark.extended
def test_each_system_is_measured_once_a_round_and_cleans_up(tmp_path: Path) -> None:
    system = FakeSystem(live(tmp_path))
    figures = measure({"fake": system}, FILES, 2, Budget(None))
    found = document(figures)["fake"]
    assert [found[step]["rounds"] for step in ("snapshot", "restore", "fork")] == [2, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["live"]


@pytest.mark.extended
@pytest.mark.parametrize("damage", ["content", "left behind"])
def test_a_system_that_restores_something_else_has_no_figures(tmp_path: Path, damage: str) -> None:
    right, wrong = FakeSystem(live(tmp_path / "right")), FakeSystem(live(tmp_path / "wrong"), damage)
    figures = measure({"right": right, "wrong": wrong}, FILES, 1, Budget(None))
    found = document(figures)
    assert "after the restore, 1 paths differ" in str(found["wrong"]["snapshot"]["gap"])
    assert "seconds" in found["right"]["restore"]


@pytest.mark.extended
def test_git_and_cp_restore_the_tree(tmp_path: Path) -> None:
    for system in (Git(live(tmp_path / "git")), Copy(live(tmp_path / "cp"))):
        fill(system.live, FILES)
        system.begin()
        figures = Figures()
        for number in range(2):
            one_round(system, number, figures)
        assert not figures.gaps
        assert all(len(seconds) == 2 for seconds in figures.seconds.values())
