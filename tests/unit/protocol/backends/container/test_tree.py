"""A container's directory as a tree: what is there, in order, with many requests under way together."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.container.helper.wire import TREE_ENTRY, Op, pack
from protocol.tree import Tree, TreeEntry, filled, names_in
from tests.support.agents import Agent, local_agent, served
from tests.unit.protocol.backends.container.test_agent import Scripted


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    return place


@pytest.fixture
def agent(place: Path) -> Iterator[Agent]:
    with local_agent(str(place)) as agent:
        yield agent


def walked(place: Path) -> list[tuple[bytes, int, int, int, int]]:
    """Path, mode, size, mtime and ctime of all there is, as a walk has it."""
    found = []

    def visit(path: bytes) -> None:
        seen = os.lstat(os.path.join(os.fsencode(place), path))
        size = 0 if stat.S_ISDIR(seen.st_mode) else seen.st_size
        found.append((path, seen.st_mode, size, seen.st_mtime_ns, seen.st_ctime_ns))
        if stat.S_ISDIR(seen.st_mode):
            for name in sorted(os.listdir(os.path.join(os.fsencode(place), path))):
                visit(path + b"/" + name if path else name)

    visit(b"")
    return found


def shape(entries: Iterator[TreeEntry]) -> list[tuple[bytes, int, int, int, int]]:
    return [(entry.path, entry.mode, entry.size, entry.mtime_ns, entry.ctime_ns) for entry in entries]


def test_a_walk_shows_everything_in_order_with_what_a_snapshot_keeps(place: Path, agent: Agent) -> None:
    (place / "a" / "b").mkdir(parents=True)
    (place / "a" / "b" / "f").write_text("content")
    (place / "a-b").write_text("sorts before a/b, but comes after it")
    (place / "link").symlink_to("a/b/f")
    os.link(place / "a" / "b" / "f", place / "hard")
    os.mkfifo(place / "fifo", 0o600)
    os.setxattr(place / "hard", "user.note", b"\0\xff")
    os.mkdir(os.fsencode(place) + b"/\xff\xfe")

    tree: Tree = agent.tree()

    assert shape(tree.walk()) == walked(place)
    assert shape(tree.walk(b"a")) == [one for one in walked(place) if one[0] == b"a" or one[0].startswith(b"a/")]
    entries = {entry.path: entry for entry in tree.walk()}
    assert entries[b"link"].target == b"a/b/f"
    assert entries[b"hard"].inode == entries[b"a/b/f"].inode != 0
    assert entries[b"hard"].nlink == 2
    assert entries[b"hard"].xattrs == {b"user.note": b"\0\xff"}
    assert tree.entry(b"hard") == entries[b"hard"]
    assert tree.entry(b"") == entries[b""]
    assert names_in(tree, b"") == sorted(os.listdir(os.fsencode(place)))
    assert names_in(tree, b"a") == [b"b"]
    assert tree.read(b"a/b/f", 3, 2) == b"te"
    assert tree.read(b"a/b/f", 100, 2) == b""
    for ask, code in (
        (lambda: tree.entry(b"none"), errno.ENOENT),
        (lambda: tree.entry(b"hard/none"), errno.ENOTDIR),
        (lambda: names_in(tree, b"hard"), errno.ENOTDIR),
        (lambda: tree.read(b"a", 0, 1), errno.EISDIR),
        (lambda: tree.read(b"link", 0, 1), errno.ELOOP),
    ):
        with pytest.raises(OSError, check=lambda error, code=code: error.errno == code):
            ask()


def test_a_thousand_files_are_listed_and_read_in_few_trips(place: Path, agent: Agent) -> None:
    for at in range(1000):
        directory = place / f"d{at % 10}"
        directory.mkdir(exist_ok=True)
        (directory / f"f{at}").write_bytes(b"%d" % at * (at % 50))
    tree = agent.tree()
    most = 0
    real = agent.agent_link.post

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal most
        pending = real(*args, **options)
        most = max(most, len(agent.agent_link._pending))
        return pending

    agent.agent_link.post = counted  # type: ignore[method-assign]

    found = {entry.path: b"".join(filled(tree.chunks(entry.path))) for entry in tree.walk() if entry.is_file}

    assert found == {b"d%d/f%d" % (at % 10, at): b"%d" % at * (at % 50) for at in range(1000)}
    assert most >= 50, "they were read one by one"


def test_files_are_read_whole_whatever_their_size_and_whatever_they_became(place: Path, agent: Agent) -> None:
    sizes = [0, 1, 65536, 65537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000]
    for size in sizes:
        (place / f"{size:08}").write_bytes(os.urandom(size))
    tree = agent.tree()

    for entry in tree.walk():
        if entry.is_file:
            pieces = list(filled(tree.chunks(entry.path, 10_000)))  # a byte of zero is a hole
            assert b"".join(pieces) == (place / os.fsdecode(entry.path)).read_bytes()
            assert all(len(piece) <= 10_000 for piece in pieces)

    entries = iter(tree.walk())
    next(entries)
    names = [entry.path for entry in entries if entry.size]
    (place / os.fsdecode(names[2])).write_bytes(b"grown" * 100_000)
    (place / os.fsdecode(names[3])).write_bytes(b"cut")
    (place / os.fsdecode(names[4])).unlink()
    assert b"".join(filled(tree.chunks(names[2]))) == b"grown" * 100_000
    assert b"".join(filled(tree.chunks(names[3]))) == b"cut"
    with pytest.raises(FileNotFoundError):
        list(tree.chunks(names[4]))
    assert b"".join(filled(tree.chunks(names[1]))) == (place / os.fsdecode(names[1])).read_bytes()  # out of turn


def test_the_holes_of_a_file_are_not_read(place: Path, agent: Agent) -> None:
    with (place / "sparse").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"data")
    tree = agent.tree()
    for _ in tree.walk():
        pass

    chunks = list(tree.chunks(b"sparse"))  # a tebibyte of zeros would take minutes
    assert sum(map(len, chunks)) == 1 << 40
    assert sum(len(chunk) for chunk in chunks if isinstance(chunk, bytes)) <= 1 << 20
    assert tree.read(b"sparse", (1 << 30) - 100_000, 100_004) == bytes(100_000) + b"data"
    assert tree.read(b"sparse", (1 << 30) - 10, 20) == bytes(10) + b"data" + bytes(6)
    assert tree.read(b"sparse", (1 << 40) - 5, 10) == bytes(5)


def test_many_entries_come_in_many_pages(place: Path, agent: Agent) -> None:
    names = sorted(b"%05d-%s" % (at, b"x" * 180) for at in range(8000))
    for name in names:
        os.mknod(os.path.join(os.fsencode(place), name))
    tree = agent.tree()

    assert names_in(tree, b"") == names
    assert [entry.path for entry in tree.walk()][1:] == names


def tree_entry(path: bytes, mode: int = stat.S_IFREG | 0o644, target: bytes = b"", **values: int) -> bytes:
    times = {"mtime": 0, "mtime_ns": 0, "ctime": 0, "ctime_ns": 0}
    fields = {"size": 1, **times, "uid": 0, "gid": 0, "nlink": 1, "inode": 7, "rdev": 0, **values}
    head = TREE_ENTRY.pack(mode, *fields.values(), len(path), len(target), values.get("xattrs", 0))
    return head + path + target


ROOT = tree_entry(b"", stat.S_IFDIR | 0o755)
LINK = stat.S_IFLNK | 0o777
LIES = {
    "another root": tree_entry(b"elsewhere", stat.S_IFDIR | 0o755),
    "a path that goes up": ROOT + tree_entry(b".."),
    "an absolute path": ROOT + tree_entry(b"/etc/passwd"),
    "a path below a file": ROOT + tree_entry(b"f") + tree_entry(b"f/g"),
    "a path below nothing": ROOT + tree_entry(b"d/f"),
    "a name twice": ROOT + tree_entry(b"f") + tree_entry(b"f"),
    "names out of order": ROOT + tree_entry(b"g") + tree_entry(b"f"),
    "an empty name": ROOT + tree_entry(b""),
    "a NUL": ROOT + tree_entry(b"a\0b"),
    "a ctime with too many nanoseconds": ROOT + tree_entry(b"f", ctime_ns=10**9),
    "a negative size": ROOT + tree_entry(b"f", size=-1),
    "no type": ROOT + tree_entry(b"f", 0o644),
    "a symlink to nothing": ROOT + tree_entry(b"l", LINK),
    "a file with a target": ROOT + tree_entry(b"f", target=b"x"),
    "half an entry": ROOT + tree_entry(b"f")[:-1],
    "no entries, and more": b"",
}


@pytest.mark.parametrize("page", LIES.values(), ids=list(LIES))
def test_a_walk_that_makes_no_sense_is_eio_and_ends_the_link(page: bytes) -> None:
    def answer(number: int, op: int, _numbers: tuple[int, ...], _strings: list[bytes]) -> bytes:
        if op == Op.TREE_NEXT:
            return pack(number, 0, (int(not page),), (page,))
        return pack(number, 0, (1,) if op == Op.TREE_WALK else ())

    async def opened(_nursery: Any) -> Scripted:
        return Scripted(answer)

    with served(opened, b"the program") as agent:
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
            list(agent.tree().walk())
        assert agent.agent_link.lost.is_set()


@pytest.mark.parametrize("way", ["a walk", "its children"])
def test_a_directory_without_an_end_is_eio_and_costs_no_more_than_its_limit(way: str) -> None:
    pages = itertools.count()

    def answer(number: int, op: int, _numbers: tuple[int, ...], _strings: list[bytes]) -> bytes:
        if op == Op.TREE_WALK:
            return pack(number, 0, (1,))
        first = 100 * next(pages)
        assert first < 100_000, "asked for more and more"
        names = [b"%09d" % at for at in range(first, first + 100)]
        if op == Op.TREE_CHILDREN:
            return pack(number, 0, (1,), (b"".join(name + b"\0" for name in names),))
        entries = b"".join(map(tree_entry, names))
        return pack(number, 0, (1,), ((b"" if first else ROOT) + entries,))

    async def opened(_nursery: Any) -> Scripted:
        return Scripted(answer)

    with served(opened, b"the program") as agent:
        tree = agent.tree(most_listed_bytes=1 << 20)
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
            list(tree.walk() if way == "a walk" else names_in(tree, b""))
        assert "too many entries" in agent.agent_link.reason


def test_many_directories_of_many_entries_are_within_the_limit(place: Path, agent: Agent) -> None:
    for number in range(20):
        (place / str(number)).mkdir()
        for name in range(20):
            (place / str(number) / str(name)).touch()
    tree = agent.tree(most_listed_bytes=70 * 45)  # of two directories of them, not of all
    assert len(list(tree.walk())) == 1 + 20 + 400
