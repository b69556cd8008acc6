"""History of the memory backend: snapshots, what is saved, and imports that are prepared in steps."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.history.prepare import Preparation
from protocol.backends.overlay import OverlayVolume
from protocol.diff.tree_diff import Change, changes, count, summary, went_back
from protocol.tree import Tree, TreeEntry, filled
from protocol.volume import ROOT_INODE, AttributeChanges, Caller
from protocol.volume_extensions import EntryChange, InodeChange
from tests.support.trees import DictTree

CALLER = Caller(0, 0)


@pytest.fixture
def volume() -> Iterator[MemoryVolume]:
    volume = MemoryVolume(max_bytes=100 * 4096, clock=iter(range(1_000, 10**9)).__next__)
    yield volume
    volume.check_invariants()


def make(volume: MemoryVolume, parent: int, name: bytes, data: bytes | None = None) -> int:
    """A file with `data`, or a directory; nobody holds it."""
    if data is None:
        number = volume.mkdir(parent, name, 0o755, CALLER).inode
    else:
        number = volume.mknod(parent, name, stat.S_IFREG | 0o644, 0, CALLER).inode
        volume.write(number, 0, data)
    volume.forget(number, 1)
    return number


def at(volume: MemoryVolume, path: bytes) -> int:
    number = ROOT_INODE
    for name in path.split(b"/") if path else ():
        number = volume.lookup(number, name).inode
        volume.forget(number, 1)
    return number


def read(volume: MemoryVolume, path: bytes) -> bytes:
    return bytes(volume.read(at(volume, path), 0, 1 << 20))


def state(volume: MemoryVolume) -> list[object]:
    with volume.tree() as tree:
        return [(entry, b"".join(filled(tree.chunks(entry.path))) if entry.is_file else b"") for entry in tree.walk()]


@pytest.mark.parametrize("paths", [(), (b"d", b"linked", b"moved")])
def test_a_directory_removed_while_it_was_held_comes_back_with_another_number(
    volume: MemoryVolume, paths: Sequence[bytes]
) -> None:
    number = make(volume, ROOT_INODE, b"d")
    below = make(volume, number, b"below")
    file = make(volume, below, b"file", b"x")
    volume.link(file, ROOT_INODE, b"linked")
    for parent, name in ((ROOT_INODE, b"d"), (number, b"below")):
        volume.lookup(parent, name)
    volume.take_snapshot("s")
    before = volume.getattr(number)
    for _ in range(2):
        below = volume.lookup(volume.lookup(ROOT_INODE, b"d").inode, b"below").inode
        volume.rename(below, b"file", ROOT_INODE, b"moved")
        volume.rmdir(volume.lookup(ROOT_INODE, b"d").inode, b"below")
        volume.rmdir(ROOT_INODE, b"d")
        coherence = volume.restore_snapshot("s", paths)
        volume.check_invariants()
        made = volume.lookup(ROOT_INODE, b"d")
        assert EntryChange(ROOT_INODE, b"d", 0, made.inode) in coherence.entries
        assert volume.getattr(number).nlink == 0
        assert list(volume.readdir(number, 2)) == []
        assert (made.inode != number, made.mode, made.mtime_ns, made.birth_ns) == (
            True, before.mode, before.mtime_ns, before.birth_ns,
        )  # fmt: skip
        below = volume.lookup(made.inode, b"below").inode
        assert volume.lookup(below, b"file").inode == file
        assert sorted(volume.getattr(file).links) == [(ROOT_INODE, b"linked"), (below, b"file")]
        with volume.tree("s") as old, volume.tree() as new:
            assert list(changes(old, new)) == []


def test_the_copy_of_a_directory_that_was_held_stays_in_later_restores(volume: MemoryVolume) -> None:
    number = make(volume, ROOT_INODE, b"d")
    make(volume, make(volume, number, b"below"), b"file", b"x")
    make(volume, number, b"empty")
    held = [volume.lookup(ROOT_INODE, b"d"), volume.lookup(number, b"below"), volume.lookup(number, b"empty")]
    volume.take_snapshot("s")
    volume.unlink(held[1].inode, b"file")
    for name in (b"below", b"empty"):
        volume.rmdir(number, name)
    volume.rmdir(ROOT_INODE, b"d")
    volume.restore_snapshot("s")
    copies = [volume.lookup(ROOT_INODE, b"d").inode]
    copies += [volume.lookup(copies[0], name).inode for name in (b"below", b"empty")]
    assert not set(copies) & {one.inode for one in held}
    volume.take_snapshot("later")
    for at in range(3):
        if at:
            make(volume, copies[1], b"new", b"y")
            make(volume, copies[2], b"new", b"y")
            volume.rename(copies[1], b"file", ROOT_INODE, b"moved")
            volume.setattr(copies[0], AttributeChanges(mode=0o700))
        if at == 2:
            for each in held:
                volume.forget(each.inode, volume.lookup_counts()[each.inode])  # the old numbers are free
        volume.restore_snapshot("s")
        volume.check_invariants()
        again = [volume.lookup(ROOT_INODE, b"d").inode]
        again += [volume.lookup(copies[0], name).inode for name in (b"below", b"empty")]
        assert again == copies
        with volume.tree("s") as old, volume.tree() as new:
            assert list(changes(old, new)) == []
    volume.restore_snapshot("later")
    assert volume.lookup(ROOT_INODE, b"d").inode == copies[0]
    volume.check_invariants()


def test_a_transaction_that_fails_gives_a_directory_that_it_removed_its_number_back(volume: MemoryVolume) -> None:
    number = make(volume, ROOT_INODE, b"d")
    volume.lookup(ROOT_INODE, b"d")

    def fail() -> None:
        with volume.changes():
            volume.rmdir(ROOT_INODE, b"d")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert volume.lookup(ROOT_INODE, b"d").inode == number
    volume.check_invariants()


@pytest.mark.parametrize("path", [b"latin\xe9", b"f/latin\xe9"])
def test_an_error_names_a_missing_path_that_is_not_utf_8_exactly(volume: MemoryVolume, path: bytes) -> None:
    make(volume, ROOT_INODE, b"f", b"content")
    volume.take_snapshot("s")
    with pytest.raises(OSError, match="latin") as restored:
        volume.restore_snapshot("s", [path])
    assert os.fsencode(restored.value.filename) == path
    with volume.tree("s") as old, volume.tree() as new, pytest.raises(FileNotFoundError) as compared:
        list(changes(old, new, paths=[path]))
    assert os.fsencode(compared.value.filename) == path


@pytest.mark.parametrize("paths", [[b"d", b"missing"], [b"f", b"missing"], [b"d", b"f", b"moved", b"missing"]])
def test_a_restore_that_fails_half_way_leaves_everything_as_it_was(volume: MemoryVolume, paths: list[bytes]) -> None:
    directory = make(volume, ROOT_INODE, b"d")
    make(volume, directory, b"inside", b"1")
    number = make(volume, ROOT_INODE, b"f", b"then")
    moved = make(volume, ROOT_INODE, b"to be moved")
    for name in (b"d", b"f", b"to be moved"):
        volume.lookup(ROOT_INODE, name)
    volume.take_snapshot("s")
    volume.unlink(directory, b"inside")
    volume.rmdir(ROOT_INODE, b"d")
    volume.unlink(ROOT_INODE, b"f")
    volume.write(number, 0, b"when unlinked")
    volume.rename(ROOT_INODE, b"to be moved", ROOT_INODE, b"moved")
    before = state(volume)
    with pytest.raises(FileNotFoundError):
        volume.restore_snapshot("s", paths)
    assert state(volume) == before
    assert volume.read(number, 0, 100) == b"when unlinked"
    assert [volume.getattr(each).generation for each in (directory, moved)] == [0, 0]
    assert volume.getattr(directory).nlink == volume.getattr(number).nlink == 0


def test_restoring_a_path_whose_directory_was_moved_copies_and_does_not_link(volume: MemoryVolume) -> None:
    number = make(volume, make(volume, ROOT_INODE, b"d"), b"f", b"then")
    volume.write(number, 4, b"!")  # in place: the block is one that can be changed
    volume.take_snapshot("s")
    volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"e")
    make(volume, ROOT_INODE, b"d")
    volume.restore_snapshot("s", [b"d"])
    volume.drop_snapshot("s")
    volume.write(at(volume, b"e/f"), 0, b"X")
    assert (read(volume, b"d/f"), read(volume, b"e/f")) == (b"then!", b"Xhen!")
    assert at(volume, b"d/f") != at(volume, b"e/f") == number


def test_an_import_does_not_write_through_hard_links_that_its_tree_keeps_apart(volume: MemoryVolume) -> None:
    number = make(volume, ROOT_INODE, b"a", b"live")
    for name in (b"b", b"outside"):
        volume.link(number, ROOT_INODE, name)
        volume.forget(number, 1)
    file = stat.S_IFREG | 0o644
    tree = DictTree(
        {
            b"a": (TreeEntry(b"a", file, nlink=2, inode=7), b"first"),
            b"b": (TreeEntry(b"b", file, nlink=2, inode=8), b"second"),
            b"c": (TreeEntry(b"c", file, nlink=2, inode=7), b"first"),
            b"d": (TreeEntry(b"d", file, nlink=2, inode=8), b"second"),
        }
    )
    volume.import_tree(tree, replace=False)
    assert [read(volume, name) for name in (b"a", b"b", b"c", b"d", b"outside")] == [
        b"first",
        b"second",
        b"first",
        b"second",
        b"live",
    ]
    assert at(volume, b"a") == at(volume, b"c") != at(volume, b"b") == at(volume, b"d")


def test_a_device_whose_number_differs_is_another_inode(volume: MemoryVolume) -> None:
    number = volume.mknod(ROOT_INODE, b"null", stat.S_IFCHR | 0o666, os.makedev(1, 3), CALLER).inode
    entry = TreeEntry(b"null", stat.S_IFCHR | 0o666, rdev=os.makedev(1, 5))
    coherence = volume.import_tree(DictTree({b"null": (entry, b"")}), replace=True)
    assert volume.getattr(at(volume, b"null")).rdev == os.makedev(1, 5)
    assert [(change.old, change.new) for change in coherence.entries] == [(number, at(volume, b"null"))]


def test_room_that_an_import_makes_late_counts(volume: MemoryVolume) -> None:
    make(volume, ROOT_INODE, b"z", b"z" * 80 * 4096)
    volume.import_tree(DictTree({b"a": b"a" * 80 * 4096}), replace=True)
    assert read(volume, b"a") == b"a" * 80 * 4096


def test_trees_deeper_than_the_recursion_limit_are_diffed_and_restored(volume: MemoryVolume) -> None:
    parent = ROOT_INODE
    for _ in range(3_000):
        parent = make(volume, parent, b"d")
    volume.take_snapshot("s")
    number = make(volume, parent, b"f", b"x")
    path = b"d/" * 3_000 + b"f"
    with volume.tree("s") as old, volume.tree() as new:
        assert [(change.path, change.kind) for change in changes(old, new)] == [(path, "added")]
    coherence = volume.restore_snapshot("s")
    assert coherence.entries == [EntryChange(parent, b"f", number, 0)]


def test_an_unchanged_file_is_not_touched_by_a_restore(volume: MemoryVolume) -> None:
    number = make(volume, ROOT_INODE, b"same", b"same")
    changed = make(volume, ROOT_INODE, b"changed", b"then")
    volume.take_snapshot("s")
    before = volume.getattr(number)
    volume.setattr(changed, AttributeChanges(size=1))
    coherence = volume.restore_snapshot("s")
    assert volume.getattr(number) is before
    assert coherence.inodes == [InodeChange(changed, content=True)]


def test_a_tree_finds_what_it_has_folder_by_folder_and_nothing_else(volume: MemoryVolume) -> None:
    a = make(volume, ROOT_INODE, b"a")
    make(volume, a, b"f", b"1")
    make(volume, ROOT_INODE, b"f", b"22")
    with volume.tree() as tree:
        # Where one is found in the folder of the last one, and where not.
        for path, size in ((b"a/f", 1), (b"f", 2), (b"a/f", 1), (b"a", 0), (b"", 0), (b"f", 2)):
            assert tree.entry(path).size == size
        for missing in (b"/", b"/a", b"/f", b"//a", b"a/", b"a//f", b"b", b"b/f", b"a/g"):
            with pytest.raises(FileNotFoundError):
                tree.entry(missing)
        for below_a_file in (b"f/", b"f/g", b"a/f/g"):
            with pytest.raises(NotADirectoryError):
                tree.entry(below_a_file)


@pytest.fixture(params=["memory", "overlay"])
def marked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryVolume]:
    """With the file "f" and the empty directory "d" in it, all saved."""
    if request.param == "memory":
        marked = MemoryVolume()
        make(marked, ROOT_INODE, b"f", b"data")
        marked.forget(marked.mkdir(ROOT_INODE, b"d", 0o755, CALLER).inode, 1)
    else:
        (tmp_path / "f").write_bytes(b"data")
        (tmp_path / "d").mkdir()
        marked = OverlayVolume(tmp_path)
    marked.mark_saved()
    yield marked
    marked.check_invariants()


def number_at(marked: MemoryVolume, name: bytes) -> int:
    return marked.lookup(ROOT_INODE, name).inode


def link_it(marked: MemoryVolume) -> None:
    marked.link(number_at(marked, b"f"), number_at(marked, b"d"), b"too")


CHANGES: dict[str, Callable[[MemoryVolume], object]] = {
    "create": lambda marked: make(marked, ROOT_INODE, b"new", b"data"),
    "write": lambda marked: marked.write(number_at(marked, b"f"), 0, b"D"),
    "truncate": lambda marked: marked.setattr(number_at(marked, b"f"), AttributeChanges(size=1)),
    "fallocate": lambda marked: marked.fallocate(number_at(marked, b"f"), 0, 0, 9000),
    "chmod": lambda marked: marked.setattr(number_at(marked, b"f"), AttributeChanges(mode=0o600)),
    "chown of a directory": lambda marked: marked.setattr(number_at(marked, b"d"), AttributeChanges(uid=7)),
    "utimes": lambda marked: marked.setattr(number_at(marked, b"f"), AttributeChanges(mtime_ns=5)),
    "setxattr": lambda marked: marked.setxattr(number_at(marked, b"f"), b"user.x", b"1", 0),
    "rename": lambda marked: marked.rename(ROOT_INODE, b"f", ROOT_INODE, b"g"),
    "rename of a directory": lambda marked: marked.rename(ROOT_INODE, b"d", ROOT_INODE, b"e"),
    "link_it": link_it,
    "symlink": lambda marked: marked.symlink(ROOT_INODE, b"s", b"f", CALLER),
    "unlink": lambda marked: marked.unlink(ROOT_INODE, b"f"),
    "rmdir": lambda marked: marked.rmdir(ROOT_INODE, b"d"),
    "mkdir": lambda marked: marked.mkdir(number_at(marked, b"d"), b"in", 0o755, CALLER),
}


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_one_before_and_after_each_mark(marked: MemoryVolume, change: str, *, with_snapshot: bool) -> None:
    if with_snapshot:
        marked.take_snapshot("s")
    assert marked.is_saved
    CHANGES[change](marked)
    assert not marked.is_saved
    marked.mark_saved()
    assert marked.is_saved


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_each_write_after_a_mark_counts_though_the_file_was_changed_before(
    marked: MemoryVolume, *, with_snapshot: bool
) -> None:
    if with_snapshot:
        marked.take_snapshot("s")
    number = number_at(marked, b"f")
    for _ in range(3):
        marked.write(number, 0, b"D")
        mark = marked.mark()
        assert not marked.changed_since(mark)
        marked.write(number, 0, b"E")
        assert marked.changed_since(mark)


def test_looking_snapshots_and_views_are_no_changes(marked: MemoryVolume) -> None:
    number = number_at(marked, b"f")
    marked.read(number, 0, 10)
    list(marked.readdir(ROOT_INODE, 0))
    marked.take_snapshot("s")
    with marked.tree() as tree:
        list(tree.walk())
    marked.restore_snapshot("s")
    marked.drop_snapshot("s")
    marked.take_snapshot("t")
    assert marked.is_saved


def test_a_file_without_a_name_is_nothing_to_lose_until_it_gets_one(marked: MemoryVolume) -> None:
    number = marked.tmpfile(ROOT_INODE, 0o600, CALLER).inode
    marked.write(number, 0, b"data")
    assert marked.is_saved
    marked.mark_saved()
    marked.write(number, 0, b"more")
    assert marked.is_saved
    marked.link(number, ROOT_INODE, b"named")
    assert not marked.is_saved


def test_restores_undone_changes_and_imports_are_changes(marked: MemoryVolume) -> None:
    marked.take_snapshot("s")
    marked.write(number_at(marked, b"f"), 0, b"D")
    marked.mark_saved()
    marked.restore_snapshot("s")
    assert not marked.is_saved
    marked.mark_saved()
    marked.import_tree(DictTree({b"new": b"data"}), replace=False)
    assert not marked.is_saved


def test_what_changes_while_a_view_is_saved_is_not_saved(marked: MemoryVolume) -> None:
    make(marked, ROOT_INODE, b"new", b"data")
    with marked.tree() as tree:
        marked.write(number_at(marked, b"f"), 0, b"D")
        marked.mark_saved(tree)
        assert not marked.is_saved
    with marked.tree() as tree:
        marked.mark_saved(tree)
    assert marked.is_saved


def test_saving_a_snapshot_saves_the_live_state_if_that_is_the_same(marked: MemoryVolume) -> None:
    make(marked, ROOT_INODE, b"new", b"data")
    marked.take_snapshot("s")
    with marked.tree("s") as tree:
        marked.mark_saved(tree)
        assert marked.is_saved
        make(marked, ROOT_INODE, b"newer", b"data")
        marked.mark_saved(tree)
        assert not marked.is_saved


def test_an_older_state_that_is_saved_later_takes_nothing_back(marked: MemoryVolume) -> None:
    marked.take_snapshot("s")
    make(marked, ROOT_INODE, b"new", b"data")
    marked.mark_saved()
    with marked.tree("s") as tree:
        marked.mark_saved(tree)
    assert marked.is_saved


def test_a_view_of_another_volume_saves_nothing(marked: MemoryVolume) -> None:
    make(marked, ROOT_INODE, b"new", b"data")
    other = MemoryVolume()
    for _ in range(10):
        other.mark()
    with other.tree() as tree:
        marked.mark_saved(tree)
    assert not marked.is_saved


ME = Caller(1, 2)
NAMES = (b"a", b"b", b"c", b"d")


def change(volume: MemoryVolume, draw: random.Random) -> None:
    """One random change of a small tree; an error of the volume's is one outcome of it."""
    above = b"/".join(draw.choices(NAMES, k=draw.randrange(3)))
    name, other = draw.choice(NAMES), draw.choice(NAMES)
    what = draw.randrange(8)
    with suppress(OSError):
        parent = at(volume, above)
        if what == 0:
            volume.forget(volume.mkdir(parent, name, 0o755, ME).inode, 1)
        elif what in (1, 2):
            node = volume.mknod(parent, name, stat.S_IFREG | 0o644, 0, ME)
            volume.write(node.inode, 0, b"x" * draw.randrange(1, 9000))
            volume.forget(node.inode, 1)
        elif what == 3:
            volume.forget(volume.symlink(parent, name, b"to", ME).inode, 1)
        elif what == 4:
            volume.rename(parent, name, at(volume, draw.choice(NAMES)), other)
        elif what == 5:
            node = volume.lookup(parent, name)
            volume.forget(node.inode, 1)
            volume.forget(volume.link(node.inode, at(volume, b""), other).inode, 1)
        elif what == 6:
            number = at(volume, above + b"/" + name if above else name)
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


def state_of(volume: MemoryVolume, name: str | None = None) -> list[object]:
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
    assert state_of(staged) == facts(tree)
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
    first = state_of(live)
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
        before = state_of(twin)
        twin.take_snapshot("before")
        assert failed == attempt(lambda: twin.import_tree(tree, replace=replace, paths=paths)), seed
    live.check_invariants()
    assert state_of(live) == state_of(twin), seed
    assert sizes(live)[:3] == sizes(twin)[:3], seed
    assert state_of(live, "before") == before, seed
    live.restore_snapshot("before")
    live.check_invariants()
    assert state_of(live) == before, seed
    if seed % 3:
        live.restore_snapshot("first")
        live.check_invariants()
        assert state_of(live) == first, seed


def test_what_was_prepared_and_given_up_leaves_nothing(staging: Staging) -> None:
    for seed in range(100):
        live = made(seed, 12)
        before = (state_of(live), *sizes(live))
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
        assert (state_of(live), *sizes(live)) == before


def test_what_does_not_fit_leaves_nothing(staging: Staging) -> None:
    live = made(1, 12, max_inodes=30)
    before = state_of(live)
    with MemoryVolume().tree() as _, made(5001, 300).tree() as tree, staging.tree(live, tree) as staged:
        live._limits.max_inodes = len(before) + 2
        preparation = live.preparation(staged, replace=False)
        with live.tree(), pytest.raises(OSError, match="No space"):
            prepare_and_put(live, preparation)
        for _ in preparation.discard():
            pass
    live.check_invariants()
    assert state_of(live) == before


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
        assert state_of(live) == wanted
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
