"""An import that is prepared in steps ends as one in a single step does, whatever programs do between the steps."""

from __future__ import annotations

import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.history.prepare import Preparation
from protocol.diff.tree_diff import Change, changes, count, summary, went_back
from protocol.tree import Tree
from protocol.volume import ROOT_INODE, Caller

ME = Caller(1, 2)
NAMES = (b"a", b"b", b"c", b"d")


def directory_of(volume: MemoryVolume, path: bytes) -> int:
    number = ROOT_INODE
    for name in path.split(b"/") if path else ():
        number = volume.lookup(number, name).inode
        volume.forget(number, 1)
    return number


def change(volume: MemoryVolume, draw: random.Random) -> None:
    """One random change of a small tree; an error of the volume's is one outcome of it."""
    above = b"/".join(draw.choices(NAMES, k=draw.randrange(3)))
    name, other = draw.choice(NAMES), draw.choice(NAMES)
    what = draw.randrange(8)
    with suppress(OSError):
        parent = directory_of(volume, above)
        if what == 0:
            volume.forget(volume.mkdir(parent, name, 0o755, ME).inode, 1)
        elif what in (1, 2):
            node = volume.mknod(parent, name, stat.S_IFREG | 0o644, 0, ME)
            volume.write(node.inode, 0, b"x" * draw.randrange(1, 9000))
            volume.forget(node.inode, 1)
        elif what == 3:
            volume.forget(volume.symlink(parent, name, b"to", ME).inode, 1)
        elif what == 4:
            volume.rename(parent, name, directory_of(volume, draw.choice(NAMES)), other)
        elif what == 5:
            node = volume.lookup(parent, name)
            volume.forget(node.inode, 1)
            volume.forget(volume.link(node.inode, directory_of(volume, b""), other).inode, 1)
        elif what == 6:
            number = directory_of(volume, above + b"/" + name if above else name)
            volume.write(number, draw.randrange(100), b"changed")
        else:
            volume.unlink(parent, name)


def made(seed: int, changes: int, **limits: int) -> MemoryVolume:
    ticks = iter(range(1_000, 10**9))
    volume = MemoryVolume(clock=ticks.__next__, uid=1, gid=1, **limits)  # type: ignore[arg-type]
    draw = random.Random(seed)
    for _ in range(changes):
        change(volume, draw)
    return volume


def facts(tree: Tree) -> list[object]:
    """What a tree holds; times apart, which are those of the steps that made it."""
    groups: dict[int, int] = {}
    return [
        (
            entry.path, entry.mode, entry.size, entry.uid, entry.gid, entry.target, dict(entry.xattrs),
            entry.is_dir or entry.nlink,
            entry.is_dir or groups.setdefault(entry.inode, len(groups)),
            tree.read(entry.path, 0, entry.size) if entry.is_file else None,
        )
        for entry in tree.walk()
    ]  # fmt: skip


def state(volume: MemoryVolume, name: str | None = None) -> list[object]:
    with volume.tree(name) as tree:
        return facts(tree)


def imported_in_steps(
    volume: MemoryVolume, tree: Tree, between: Callable[[], None], *, replace: bool, paths: tuple[bytes, ...]
) -> None:
    preparation = volume.preparation(tree, replace=replace, paths=paths)
    with volume.tree():
        for _ in preparation.steps():
            between()
        volume.take_snapshot("before")
        if preparation.is_valid:
            volume.import_prepared(preparation)
        else:
            for _ in preparation.discard():
                pass
            volume.import_tree(tree, replace=replace, paths=paths)


def sizes(volume: MemoryVolume) -> tuple[int | None, ...]:
    usage = volume.usage()
    return usage.files, usage.directories, usage.size_bytes, usage.used_bytes


def prepare_and_put(volume: MemoryVolume, preparation: Preparation) -> None:
    for _ in preparation.steps():
        pass
    volume.import_prepared(preparation)


def attempt(work: Callable[[], object]) -> int | None:
    """The errno that `work` fails with, if it does."""
    try:
        work()
    except OSError as error:
        return error.errno
    return None


def staged_for(volume: MemoryVolume, tree: Tree) -> MemoryVolume:
    """A volume with the content of `tree`, filled so that `volume` can take its inodes over."""
    staged = MemoryVolume()
    staged.fill(tree, volume.reserve_inodes(sum(1 for _ in tree.walk())))
    staged.check_invariants()
    assert state(staged) == facts(tree)
    return staged


class Staging:
    """What makes the tree that `live` imports: a view of another volume, or one of a volume filled for it."""

    def __init__(self, *, taken_over: bool) -> None:
        self.taken_over = taken_over

    @contextmanager
    def tree(self, live: MemoryVolume, tree: Tree) -> Iterator[Tree]:
        if not self.taken_over:
            yield tree
            return
        with staged_for(live, tree).tree() as view:
            yield view


@pytest.fixture(params=[False, True], ids=["copied", "taken over"])
def staging(request: pytest.FixtureRequest) -> Staging:
    return Staging(taken_over=request.param)


@pytest.mark.extended
@pytest.mark.parametrize("replace", [False, True])
def test_it_ends_as_a_single_step_does_whatever_happens_between_the_steps(replace: bool, staging: Staging) -> None:
    for seed in range(400):
        compare_with_a_single_step(seed, staging, replace=replace)


def compare_with_a_single_step(seed: int, staging: Staging, *, replace: bool) -> None:
    draw = random.Random(seed)
    paths = draw.choice([(), (), (b"a",), (b"b/c", b"d")])
    live, twin = made(seed, 12), made(seed, 12)
    if seed % 3:
        live.take_snapshot("first")
        twin.take_snapshot("first")
    first = state(live)
    log: list[int] = []

    def between() -> None:
        if draw.random() < 0.2:
            log.append(draw.randrange(10**9))
            change(live, random.Random(log[-1]))

    with made(seed + 5000, 30).tree() as tree:
        with staging.tree(live, tree) as staged:
            failed = attempt(lambda: imported_in_steps(live, staged, between, replace=replace, paths=paths))
        for each in log:
            change(twin, random.Random(each))
        before = state(twin)
        twin.take_snapshot("before")
        assert failed == attempt(lambda: twin.import_tree(tree, replace=replace, paths=paths)), seed
    live.check_invariants()
    assert state(live) == state(twin), seed
    assert sizes(live)[:3] == sizes(twin)[:3], seed
    assert state(live, "before") == before, seed
    live.restore_snapshot("before")
    live.check_invariants()
    assert state(live) == before, seed
    if seed % 3:
        live.restore_snapshot("first")
        live.check_invariants()
        assert state(live) == first, seed


def test_what_was_prepared_and_given_up_leaves_nothing(staging: Staging) -> None:
    for seed in range(100):
        live = made(seed, 12)
        before = (state(live), *sizes(live))
        with made(seed + 5000, 30).tree() as tree, staging.tree(live, tree) as staged, live.tree():
            wanted = facts(tree)
            preparation = live.preparation(staged, replace=True)
            for count, _ in enumerate(preparation.steps()):
                assert sizes(live)[:3] == before[1:4]
                if count == seed % 20:
                    break
            for _ in preparation.discard():
                pass
            assert facts(staged) == wanted
        live.check_invariants()
        assert (state(live), *sizes(live)) == before


def test_what_does_not_fit_leaves_nothing(staging: Staging) -> None:
    live = made(1, 12, max_inodes=30)
    before = state(live)
    with MemoryVolume().tree() as _, made(5001, 300).tree() as tree, staging.tree(live, tree) as staged:
        live._limits.max_inodes = len(before) + 2
        preparation = live.preparation(staged, replace=False)
        with live.tree(), pytest.raises(OSError, match="No space"):
            prepare_and_put(live, preparation)
        for _ in preparation.discard():
            pass
    live.check_invariants()
    assert state(live) == before


def test_what_is_already_there_is_left_alone() -> None:
    with made(7, 40).tree() as tree:
        live = MemoryVolume()
        live.import_tree(tree, replace=False)
        with live.tree() as was:
            seen = {entry.path: entry.inode for entry in was.walk()}
            preparation = live.preparation(tree, replace=True)
            assert list(preparation.steps())
            coherence = live.import_prepared(preparation)
        assert (list(coherence.entries), list(coherence.inodes)) == ([], [])
        with live.tree() as now:
            assert {entry.path: entry.inode for entry in now.walk()} == seen


def test_inodes_that_were_taken_over_can_be_changed_and_undone_as_others() -> None:
    for seed in range(100):
        live = made(seed, 12)
        with made(seed + 5000, 30).tree() as tree, staged_for(live, tree).tree() as staged:
            imported_in_steps(live, staged, lambda: None, replace=True, paths=())
            wanted = facts(tree)
        live.check_invariants()
        live.take_snapshot("imported")
        for each in range(30):
            change(live, random.Random(seed * 1000 + each))
        live.check_invariants()
        live.restore_snapshot("imported")
        live.check_invariants()
        assert state(live) == wanted
        live.restore_snapshot("before")
        live.drop_snapshot("imported")
        live.check_invariants()
        live.drop_snapshot("before")
        live.check_invariants()


def test_the_summary_of_two_states_is_that_of_their_changes() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        volume = made(seed, 12)
        with volume.tree() as first, made(seed + 5000, 20).tree() as tree, staged_for(volume, tree).tree() as staged:
            imported_in_steps(volume, staged, lambda: None, replace=bool(seed % 2), paths=())
            with volume.tree() as second:
                for _ in range(12):
                    change(volume, draw)
                with volume.tree() as third:
                    for old, new in ((first, second), (second, third), (first, third), (third, first)):
                        found = list(changes(old, new))
                        most = draw.randrange(8)
                        older = sum(map(went_back, found))
                        assert summary(old, new, most) == (count(found), found[:most], older), seed
                        assert found == walked(old, new), seed


class Unknowing:
    """A tree that does not know what was touched."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    def touched(self, other: Tree) -> None:
        """Nothing is known."""


def walked(old: Tree, new: Tree) -> list[Change]:
    """The changes as a walk over both trees finds them."""
    return list(changes(cast(Tree, Unknowing(old)), cast(Tree, Unknowing(new))))
