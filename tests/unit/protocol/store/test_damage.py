"""Damaged contents do not leave the store, and a killed process leaves nothing torn in it or in the directory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.archive import open_archive, write_archive
from protocol.backends.memory import MemoryVolume
from protocol.diff.tree_diff import changes
from protocol.linux.beneath import TEMPORARY_PREFIX
from protocol.store import DamagedError, DirectorySource, DirectoryTarget, RestoreRequest, Store
from protocol.store.format import objects as objects_module
from protocol.store.format.blobs import LARGE_BYTES
from protocol.store.format.digests import CHUNK_BYTES
from protocol.tree import Tree, filled
from tests.unit.protocol.store.states import Chaos, State, differences, state_of, state_of_tree

FLIPS = 1
FLIPS_LONG = 150
SPARSE_BYTES = 3 * CHUNK_BYTES + 5000


class Scene:
    """A directory in state "late", and a store that has "early" and "late" of it."""

    def __init__(self, place: Path) -> None:
        self.root = place / "root"
        self.root.mkdir()
        self.place = place / "store"
        numbers = random.Random(7)
        (self.root / "directory" / "below").mkdir(parents=True)
        (self.root / "same").write_bytes(b"same in both" * 20)
        (self.root / "directory" / "below" / "small").write_bytes(numbers.randbytes(3000))
        (self.root / "large").write_bytes(numbers.randbytes(LARGE_BYTES + 5))
        (self.root / "larger").write_bytes(numbers.randbytes(CHUNK_BYTES + 77))
        with open(self.root / "directory" / "sparse", "wb") as file:
            file.truncate(SPARSE_BYTES)
            file.seek(CHUNK_BYTES + 10)
            file.write(numbers.randbytes(5000))
        (self.root / "was a file").write_bytes(numbers.randbytes(LARGE_BYTES + 6))
        with self.store() as store:
            self.early = self._taken(store, "early")
            for name in ("same", "directory/below/small", "large", "larger", "directory/sparse"):
                with open(self.root / name, "ab") as file:
                    file.write(b"late")
            (self.root / "was a file").unlink()
            (self.root / "was a file").mkdir()
            (self.root / "was a file" / "precious").write_bytes(b"only here" * 10)
            (self.root / "directory" / "new").write_bytes(b"new")
            self.late = self._taken(store, "late")

    def _taken(self, store: Store, name: str) -> State:
        store.take("w", name, DirectorySource(self.root))
        return state_of(self.root)

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """The store, as a process that just started has it."""
        with Store(self.place) as store:
            yield store

    def files(self) -> list[Path]:
        return sorted(path for path in self.place.rglob("*") if path.is_file() and path.stat().st_size)

    def reset(self) -> None:
        """Make the directory what "late" is, from the store, which is whole again."""
        with self.store() as store:
            assert store.restore("w", DirectoryTarget(self.root), RestoreRequest("late", safety=None)).problems == ()
            assert differences(state_of(self.root), self.late) == []


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("damage"))


@contextlib.contextmanager
def replaced(path: Path, data: bytes | None) -> Iterator[None]:
    """The file with other content, or (None) not there at all, for the length of a block."""
    aside = path.with_name(path.name + ".aside.new")
    shutil.copy2(path, aside)
    try:
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        yield
    finally:
        with contextlib.suppress(IsADirectoryError, FileNotFoundError):
            path.unlink()
        with contextlib.suppress(NotADirectoryError, FileNotFoundError):
            path.rmdir()
        os.rename(aside, path)


# -- what every way out must hold to ---------------------------------------------------------------
def restores_right_or_says_so(scene: Scene, paths: tuple[bytes, ...] = ()) -> None:
    """Each path is restored, or named in the problems and as it was; an error leaves everything as it was."""
    before = state_of(scene.root)
    with scene.store() as store:
        try:
            done = store.restore("w", DirectoryTarget(scene.root), RestoreRequest("early", tuple(paths), safety=None))
        except OSError:
            assert differences(state_of(scene.root), before) == []
            return
    now = state_of(scene.root)
    named = {problem.path for problem in done.problems}
    for path in differences(now, scene.early):
        if not is_within(path, paths):
            assert content_at(path, now) == content_at(path, before), path
            continue
        above = {path, *(path[:at] for at in range(len(path)) if path[at : at + 1] == b"/"), b""}
        assert above & named or is_above(path, named), (path, done.problems)
        if path in named:
            assert content_at(path, now) == content_at(path, before), path


def content_at(path: bytes, state: State) -> object:
    return state.files[path][5] if path in state.files else None


def is_within(path: bytes, paths: tuple[bytes, ...]) -> bool:
    return not paths or any(path == one or path.startswith(one + b"/") for one in paths)


def is_above(path: bytes, named: set[bytes]) -> bool:
    """A directory's times move with what is in it."""
    return any(one.startswith(path + b"/") or not path for one in named)


def reads_right_or_says_so(scene: Scene) -> None:
    """Each file that can be read is right, in pieces and as a whole; an error names its path."""
    with scene.store() as store, contextlib.suppress(OSError), store.tree("w", "early") as tree:
        for entry in tree.walk():
            if entry.is_file:
                read_right(tree, entry.path, scene.early.files[entry.path][5])


def read_right(tree: Tree, path: bytes, content: bytes) -> None:
    reads: list[tuple[Callable[[], bytes], bytes]] = [(lambda: b"".join(filled(tree.chunks(path, 100_000))), content)]
    for offset, size in ((0, 10), (len(content) // 2, 70_000), (max(0, len(content) - 5), 100)):
        end = offset + size
        reads.append((functools.partial(tree.read, path, offset, size), content[offset:end]))
    for read, wanted in reads:
        found: bytes | str = b""
        try:
            found = read()
        except DamagedError as error:
            found = os.fsdecode(error.filename)
        assert found in {wanted, os.fsdecode(path)}


def leaves_for_elsewhere_right_or_says_so(scene: Scene, archive: Path) -> None:
    """Into an archive and into a volume: all of it right, or an error."""
    with scene.store() as store:
        with contextlib.suppress(OSError), store.tree("w", "early") as tree:
            volume = MemoryVolume()
            volume.import_tree(tree, replace=True)
            with volume.tree() as taken:
                assert contents(state_of_tree(taken)) == contents(scene.early)
        with contextlib.suppress(OSError), store.tree("w", "early") as tree:
            with open(archive, "wb") as file:
                write_archive(tree, file, level=0)
            with open_archive(archive) as written:
                assert contents(state_of_tree(written)) == contents(scene.early)


def contents(state: State) -> dict[bytes, object]:
    return {path: facts[5] for path, facts in state.files.items()}


def all_ways_out(scene: Scene, archive: Path | None = None) -> None:
    reads_right_or_says_so(scene)
    if archive is not None:
        leaves_for_elsewhere_right_or_says_so(scene, archive)
    restores_right_or_says_so(scene, (b"larger", b"directory/below"))
    restores_right_or_says_so(scene)
    with scene.store() as store, contextlib.suppress(OSError):
        with store.tree("w", "early") as old, store.tree("w", "late") as new:
            found = {change.path for change in changes(old, new)}
        assert found >= {b"same", b"large", b"larger", b"directory/new", b"directory/sparse"}


# -- damage ----------------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_bit_flipped_anywhere_in_the_store_gives_the_right_content_or_an_error(
    scene: Scene, tmp_path: Path, runs_long: bool
) -> None:
    numbers = random.Random(11)
    for path in scene.files():
        data = path.read_bytes()
        for _ in range(FLIPS_LONG if runs_long else FLIPS):
            at, bit = numbers.randrange(len(data)), numbers.randrange(8)
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with replaced(path, bytes(flipped)):
                all_ways_out(scene, tmp_path / "archive.zip")
            scene.reset()


def damages(data: bytes) -> dict[str, bytes | None]:
    return {
        "shorter": data[:-1],
        "empty": b"",
        "longer": data + b"\0",
        "another": bytes(len(data)),
        "gone": None,
    }


@pytest.mark.extended
def test_a_file_of_the_store_that_is_cut_or_appended_to_or_gone_gives_the_right_content_or_an_error(
    scene: Scene, runs_long: bool
) -> None:
    for number, path in enumerate(scene.files()):
        found = list(damages(path.read_bytes()).values())
        # Two kinds of damage for each file in a short run; neighbours of the same kind of file get others.
        for data in found if runs_long else (found[number % 5], found[(number + 2) % 5]):
            with replaced(path, data):
                all_ways_out(scene)
            scene.reset()


@pytest.mark.extended
def test_files_of_the_store_that_changed_places_give_the_right_content_or_an_error(
    scene: Scene,
) -> None:
    kinds: dict[str, list[Path]] = {}
    for path in scene.files():
        kinds.setdefault(path.relative_to(scene.place).parts[0], []).append(path)
    for files in (kinds["objects"], kinds["packs"]):
        for one, other in zip(files, files[1:] + files[:1], strict=True):
            with replaced(one, other.read_bytes()), replaced(other, one.read_bytes()):
                all_ways_out(scene)
            scene.reset()


def objects_and_packs(scene: Scene) -> list[Path]:
    return [path for path in scene.files() if path.relative_to(scene.place).parts[0] in {"objects", "packs"}]


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["fifo", "symlink", "directory"])
def test_a_fifo_or_symlink_or_directory_in_the_place_of_a_file_is_neither_waited_for_nor_followed(
    scene: Scene, tmp_path: Path, kind: str, runs_long: bool
) -> None:
    files = scene.files()
    # Every third file in a short run; neighbours of the same kind of file are replaced by something else.
    first = ("fifo", "symlink", "directory").index(kind)
    for path in files if runs_long else files[first::3]:
        elsewhere = tmp_path / "elsewhere"
        shutil.copy2(path, elsewhere)
        with replaced(path, None):
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "symlink":
                path.symlink_to(elsewhere)
            else:
                path.mkdir()
            all_ways_out(scene)
        scene.reset()


def test_a_fifo_in_the_place_of_a_lock_is_an_error(scene: Scene, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(scene.place, place)
    (place / "lock").unlink()
    os.mkfifo(place / "lock")

    with Store(place) as store, pytest.raises(OSError, match="not a regular file"), store.tree("w", "early"):
        pass


@pytest.mark.parametrize("cloning", [True, False], ids=["where files are cloned", "where files are copied"])
def test_a_damaged_large_file_is_named_and_the_file_there_stays_as_it_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, cloning: bool
) -> None:
    cloned: list[int] = []

    def clone(source: int, target: int) -> bool:
        """What FICLONE does: the whole content at once, unread."""
        if cloning:
            cloned.append(os.sendfile(target, source, 0, os.fstat(source).st_size))
        return cloning

    monkeypatch.setattr(objects_module, "clone", clone)
    path = object_of(scene, scene.early.files[b"larger"][5])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    with replaced(path, bytes(data)), scene.store() as store:
        done = store.restore("w", DirectoryTarget(scene.root), RestoreRequest("early", safety=None))

        now = state_of(scene.root)
        assert [problem.path for problem in done.problems] == [b"larger"]
        assert "is damaged" in done.problems[0].reason
        assert now.files[b"larger"] == scene.late.files[b"larger"]
        assert set(differences(now, scene.early)) == {b"larger"}
        assert b"larger" not in {change.path for change in done.changes}
        assert store.interrupted("w") is None
        assert bool(cloned) is cloning
    scene.reset()


def object_of(scene: Scene, content: bytes) -> Path:
    return next(path for path in objects_and_packs(scene) if path.read_bytes() == content)


def test_a_directory_that_a_damaged_file_is_to_replace_stays(scene: Scene) -> None:
    path = object_of(scene, scene.early.files[b"was a file"][5])
    with replaced(path, path.read_bytes()[:-1] + b"?"), scene.store() as store:
        done = store.restore("w", DirectoryTarget(scene.root), RestoreRequest("early", safety=None))

    assert [problem.path for problem in done.problems] == [b"was a file"]
    assert (scene.root / "was a file" / "precious").read_bytes() == b"only here" * 10
    scene.reset()


def test_an_object_that_was_cut_short_is_stored_anew_by_the_next_snapshot(scene: Scene, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(scene.place, place)
    path = place / object_of(scene, scene.late.files[b"larger"][5]).relative_to(scene.place)
    os.truncate(path, 1000)
    os.utime(scene.root / "larger")

    with Store(place) as store:
        store.take("w", "again", DirectorySource(scene.root))
        assert store.check().damages == ()
    os.utime(scene.root / "larger", ns=(0, scene.late.files[b"larger"][3]))


def test_a_snapshot_whose_file_is_damaged_is_not_said_to_be_unknown(scene: Scene) -> None:
    path = min((scene.place / "packs").iterdir())
    with replaced(path, path.read_bytes()[:-1] + b"?"), scene.store() as store:
        with pytest.raises(DamagedError, match="damaged") as caught, store.tree("w", "early"):
            pass
        assert caught.value.filename == str(path)
        assert list(store.damaged_snapshots()) == [str(path)]


def test_damage_that_occurs_between_two_reads_of_a_large_file_is_noticed(scene: Scene) -> None:
    path = object_of(scene, scene.early.files[b"larger"][5])
    data = path.read_bytes()
    with replaced(path, data), scene.store() as store, store.tree("w", "early") as tree:
        assert tree.read(b"larger", 0, 100) == data[:100]
        with open(path, "r+b") as file:
            file.seek(CHUNK_BYTES + 5)
            file.write(bytes([data[CHUNK_BYTES + 5] ^ 1]))
        with pytest.raises(DamagedError):
            tree.read(b"larger", CHUNK_BYTES, 50)


def test_a_hole_of_a_terabyte_is_verified_and_restored_without_being_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with open(root / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.write(b"beginning")
    with Store(tmp_path / "store") as store:
        store.take("w", "s", DirectorySource(root))
        (root / "sparse").unlink()
        assert store.restore("w", DirectoryTarget(root), RestoreRequest("s", safety=None)).problems == ()
        with store.tree("w", "s") as tree:
            assert tree.read(b"sparse", 0, 12) == b"beginning\0\0\0"
            assert tree.read(b"sparse", (1 << 40) - 4, 12) == bytes(4)
    seen = os.stat(root / "sparse")
    assert (seen.st_size, seen.st_blocks * 512 < 1 << 20) == (1 << 40, True)


def test_damage_of_the_root_names_no_path() -> None:
    assert DamagedError("the stored content 0123 is damaged").at("").filename is None


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


class KilledScene:
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
def killed_scene(tmp_path_factory: pytest.TempPathFactory) -> KilledScene:
    return KilledScene(tmp_path_factory.mktemp("killed") / "scene")


def points(calls: int, most: int) -> list[int]:
    """Some of so many calls, the same in each run; all of them where there are fewer."""
    if calls <= most:
        return list(range(1, calls + 1))
    # The last ones too, and beyond: what comes after a snapshot has its name is little, and how many calls there are
    # depends a little on the time they take.
    end = range(calls - 40, calls + 40, 3)
    return sorted({*end, *random.Random(calls).sample(range(1, calls - 40), most - len(end))})


def endings(
    mortal: Mortal, killed_scene: KilledScene, tmp_path: Path, *, runs_long: bool, most: int = POINTS, **order: Any
) -> Iterator[tuple[Store, Path, int]]:
    """The store and the directory after each death, and the number of the death."""
    whole = killed_scene.copy(tmp_path / "whole")
    calls = mortal.do(store=str(whole / "store"), root=str(whole / "root"), **order)["calls"]
    assert calls > 50
    deaths: list[dict[str, Any]] = [{"at": at} for at in points(calls, LONG_POINTS if runs_long else most)]
    deaths += [{"after_s": 0.001 * number} for number in range(BY_THE_CLOCK)]
    for number, death in enumerate(deaths):
        place = killed_scene.copy(tmp_path / "place")
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
    mortal: Mortal, killed_scene: KilledScene, tmp_path: Path, runs_long: bool
) -> None:
    outcomes = set()
    for store, root, number in endings(mortal, killed_scene, tmp_path, runs_long=runs_long, do="take", name="next"):
        assert store.check().damages == (), number
        assert_whole(store, "early", killed_scene.early)
        names = [info.name for info in store.snapshots("w")]
        outcomes.add("next" in names)
        if "next" in names:
            assert_whole(store, "next", killed_scene.late)
        assert_same(state_of(root), killed_scene.late)
        again = store.take("w", "again", DirectorySource(root))
        assert again.serial > max(info.serial for info in store.snapshots("w") if info.name != "again")
        assert_whole(store, "again", killed_scene.late)
        store.collect_garbage()
        assert_whole(store, "again", killed_scene.late)
        assert store.check().leftover_bytes == 0
    assert outcomes == {True, False}


@pytest.mark.extended
@pytest.mark.slow
def test_a_restore_that_was_killed_is_finished_or_undone_by_the_next_one(
    mortal: Mortal, killed_scene: KilledScene, tmp_path: Path, runs_long: bool
) -> None:
    outcomes = set()
    for store, root, number in endings(
        mortal, killed_scene, tmp_path, runs_long=runs_long, do="restore", name="early", safety="safe"
    ):
        assert store.check().damages == (), number
        found = store.interrupted("w")
        outcomes.add(found is not None)
        if found is None:
            assert _is_one_of(state_of(root), killed_scene)
            assert leftovers(root) == []
            continue
        assert (found.snapshot, found.safety) == ("early", "safe")
        assert_nothing_torn(root, killed_scene)
        assert_whole(store, "safe", killed_scene.late)
        if number % 2:
            store.restore("w", DirectoryTarget(root), RestoreRequest(found.snapshot, found.paths, safety="safe-2"))
            assert_same(state_of(root), killed_scene.early)
        else:
            store.restore("w", DirectoryTarget(root), RestoreRequest(found.safety or "", safety=None))
            assert_same(state_of(root), killed_scene.late)
        assert store.interrupted("w") is None
        assert leftovers(root) == []
        assert store.check().damages == ()
    assert outcomes == {True, False}


def _is_one_of(found: State, killed_scene: KilledScene) -> bool:
    return any(
        not differences(found, state) and found.links == state.links
        for state in (killed_scene.early, killed_scene.late)
    )


def assert_nothing_torn(root: Path, killed_scene: KilledScene) -> None:
    """Each file has one of its two contents, and what is the same in both is there."""
    now = state_of(root)
    for path, facts in now.files.items():
        if path.rpartition(b"/")[2].startswith(TEMPORARY_PREFIX):
            continue
        contents = [state.files[path][5] for state in (killed_scene.early, killed_scene.late) if path in state.files]
        assert facts[5] in contents, path
    for path, facts in killed_scene.early.files.items():
        if killed_scene.late.files.get(path) == facts and facts[5] is not None:
            assert now.files[path][5] == facts[5]


@pytest.mark.extended
@pytest.mark.slow
def test_a_collection_that_was_killed_leaves_every_snapshot_whole_and_is_done_by_the_next(
    mortal: Mortal, killed_scene: KilledScene, tmp_path: Path, runs_long: bool
) -> None:
    with Store(killed_scene.copy(tmp_path / "dropped") / "store") as store:
        store.drop("w", "second")
        store.take("w", "third", DirectorySource(tmp_path / "dropped" / "root"))
        store.drop("w", "third")
    dropped = KilledScene.__new__(KilledScene)
    dropped.place, dropped.early, dropped.late = tmp_path / "dropped", killed_scene.early, killed_scene.late
    for store, root, number in endings(mortal, dropped, tmp_path, runs_long=runs_long, most=32, do="collect"):
        assert store.check().damages == (), number
        assert_whole(store, "early", killed_scene.early)
        store.take("w", "next", DirectorySource(root))
        store.collect_garbage()
        assert_whole(store, "next", killed_scene.late)
        assert_whole(store, "early", killed_scene.early)
        assert store.check().damages == ()
