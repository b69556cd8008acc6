"""The changes of a workspace, sent to a copy of it: any two states of a volume survive the way."""

from __future__ import annotations

import errno
from contextlib import ExitStack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol import tree as trees
from protocol.backends.memory import MemoryVolume
from protocol.diff.tree_diff import changes
from protocol.tree import Tree, names_in
from protocol.volume import ROOT_INODE, SUPERUSER
from vfsd.daemon.merging.delta import DeltaReader, differences, write_delta
from vfsd.daemon.merging.trees import NEW_INODES, LayeredTree, PartialTree


def nothing() -> None:
    pass


class Place:
    """Where received content is kept."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.reserved = 0

    def store(self, data: bytes) -> int:
        self.content += data
        return len(self.content) - len(data)

    def reserve(self, size: int) -> None:
        self.reserved += size

    def read(self, at: int, size: int) -> bytes:
        return bytes(self.content[at : at + size])


def sent(old: Tree, new: Tree) -> bytes:
    stream = bytearray()
    write_delta(old, new, stream.extend, nothing)
    return bytes(stream)


def received(below: Tree, stream: bytes, piece: int = 1 << 20) -> LayeredTree:
    place = Place()
    reader = DeltaReader(place.store, place.reserve)
    for start in range(0, len(stream), piece):
        reader.feed(stream[start : start + piece])
    return LayeredTree(below, reader.finish(), place.read)


class Files:
    """A volume with calls by path."""

    def __init__(self) -> None:
        self.volume = MemoryVolume()

    def at(self, path: str) -> int:
        number = ROOT_INODE
        for name in filter(None, path.split("/")):
            number = self.volume.lookup(number, name.encode()).inode
        return number

    def place(self, path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        return self.at(above), name.encode()

    def write(self, path: str, data: bytes, offset: int = 0) -> None:
        parent, name = self.place(path)
        found = self.volume.find(parent, name) or self.volume.mknod(parent, name, 0o100644, 0, SUPERUSER)
        self.volume.write(found.inode, offset, data)

    def mkdir(self, path: str) -> None:
        self.volume.mkdir(*self.place(path), 0o755, SUPERUSER)

    def rename(self, old: str, new: str) -> None:
        self.volume.rename(*self.place(old), *self.place(new))

    def link(self, old: str, new: str) -> None:
        self.volume.link(self.at(old), *self.place(new))

    def unlink(self, path: str) -> None:
        self.volume.unlink(*self.place(path))

    def rmdir(self, path: str) -> None:
        self.volume.rmdir(*self.place(path))


def assert_equal(wanted: Tree, made: Tree) -> None:
    assert [each.path for each in wanted.walk()] == [each.path for each in made.walk()]
    assert [(each.path, each.kind) for each in changes(wanted, made)] == []
    for entry in wanted.walk():
        assert made.entry(entry.path).nlink == entry.nlink or entry.is_dir
        if entry.is_dir:
            assert names_in(made, entry.path) == names_in(wanted, entry.path)
        elif entry.is_file:
            assert b"".join(trees.filled(made.chunks(entry.path, 1000))) == wanted.read(entry.path, 0, entry.size)
    names = [[entry.inode for entry in tree.walk()] for tree in (wanted, made)]
    assert [names[0].index(number) for number in names[0]] == [names[1].index(number) for number in names[1]]


def filled() -> Files:
    files = Files()
    for path in ("d", "d/e", "x"):
        files.mkdir(path)
    files.write("a", b"a" * 300)
    files.write("d/b", b"b" * 300_000)
    files.write("d/e/c", b"c")
    files.link("a", "x/a2")
    return files


def test_a_renamed_directory_is_sent_without_its_content() -> None:
    files = filled()
    files.volume.take_snapshot("base")
    files.rename("d", "moved")
    with files.volume.tree("base") as old, files.volume.tree() as new:
        stream = sent(old, new)
        assert len(stream) < 2000
        made = received(old, stream)
        assert_equal(new, made)
        assert made.entry(b"moved/b").inode == old.entry(b"d/b").inode
        with pytest.raises(FileNotFoundError):
            made.entry(b"d/e/c")
        assert set(made.touched(LayeredTree(old)) or ()) >= {b"d", b"moved", b"moved/e/c"}


def test_holes_are_not_sent() -> None:
    files = filled()
    files.volume.take_snapshot("base")
    files.write("sparse", b"end", 40_000_000)
    with files.volume.tree("base") as old, files.volume.tree() as new:
        stream = sent(old, new)
        assert len(stream) < 200_000
        made = received(old, stream)
        assert made.read(b"sparse", 39_999_999, 100) == b"\0end"
        assert made.read(b"sparse", 10, 5) == bytes(5)


def test_new_inodes_have_numbers_of_their_own() -> None:
    files = filled()
    files.volume.take_snapshot("base")
    files.write("new", b"new")
    with files.volume.tree("base") as old, files.volume.tree() as new:
        made = received(old, sent(old, new))
        assert made.entry(b"new").inode >= NEW_INODES
        assert made.entry(b"a").inode == old.entry(b"a").inode


@pytest.mark.parametrize("cut", ["end", "byte", "hash"])
def test_a_damaged_stream_is_refused(cut: str) -> None:
    files = filled()
    files.volume.take_snapshot("base")
    files.write("new", b"new" * 100)
    with files.volume.tree("base") as old, files.volume.tree() as new:
        stream = bytearray(sent(old, new))
        if cut == "end":
            del stream[-1:]
        else:
            stream[-100 if cut == "byte" else -1] ^= 1
        with pytest.raises(OSError, match="arrived damaged") as raised:
            received(old, bytes(stream))
        assert raised.value.errno == errno.EIO


def test_a_part_of_a_tree_has_nothing_else() -> None:
    files = filled()
    files.write("d/other", b"")
    with files.volume.tree() as tree:
        part = PartialTree(tree, [b"d/e", b"gone/below", b"missing"], [b"x"])
        assert [entry.path for entry in part.walk()] == [b"", b"d", b"d/e", b"d/e/c", b"x"]
        for hidden in (b"a", b"d/b", b"x/a2"):
            with pytest.raises(FileNotFoundError):
                part.entry(hidden)


PATHS = st.sampled_from(["a", "b", "d", "d/b", "d/e", "d/e/c", "x", "x/a2", "x/y", "new", "new/a"])
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), PATHS, st.binary(min_size=1, max_size=5)),
        st.tuples(st.sampled_from(["mkdir", "unlink", "rmdir"]), PATHS),
        st.tuples(st.sampled_from(["rename", "link"]), PATHS, PATHS),
    ),
    max_size=12,
)


def apply(files: Files, calls: list[tuple[str, ...]]) -> None:
    for name, *arguments in calls:
        try:
            getattr(files, name)(*arguments)
        except OSError:
            continue  # there is no such path, or something else is there


@example([("rename", "a", "x/y"), ("write", "a", b"q")], [], 1)  # x/a2 is a link to x/y, and was one to a
@given(CALLS, CALLS, st.integers(1, 500))
def test_any_changes_arrive(first: list[tuple[str, ...]], second: list[tuple[str, ...]], piece: int) -> None:
    files = filled()
    files.volume.take_snapshot("base")
    apply(files, first)
    files.volume.take_snapshot("middle")
    apply(files, second)
    with ExitStack() as stack:
        base, middle, now = (stack.enter_context(files.volume.tree(name)) for name in ("base", "middle", None))
        one = received(base, sent(base, middle), piece)
        assert_equal(middle, one)
        two = received(one, sent(middle, now), piece)
        assert_equal(now, two)
        assert_equal(now, received(base, sent(base, now)))
        assert {each.path for each in changes(LayeredTree(base), two)} == {each.path for each in changes(base, now)}
        assert {each.path for each in changes(one, two)} == {each.path for each in changes(middle, now)}
        assert list(differences(two, two, nothing)) == []
