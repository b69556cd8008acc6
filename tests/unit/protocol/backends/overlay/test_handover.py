"""An overlay is handed over to another one: at whichever moment, the other has the same state and the same numbers."""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from protocol.backends.overlay import OverlayVolume
from protocol.linux.shared_log import SharedLog
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges, PlainEntry
from protocol.volume_extensions import CacheInvalidation
from tests.support.journals import load_all

FILE = stat.S_IFREG | 0o644


@pytest.fixture
def below(tmp_path: Path) -> Path:
    for number in range(30):
        directory = tmp_path / f"d{number % 3}" / "below"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}").write_bytes(b"%d" % number * 50_000)
    os.link(tmp_path / "d0" / "below" / "f0", tmp_path / "d1" / "hard link")
    return tmp_path


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while made_volumes:
        made_volumes.pop().lower.close()


made_volumes: list[OverlayVolume] = []


def new_volume(below: Path) -> OverlayVolume:
    volume = OverlayVolume(os.fsencode(below))
    volume.mark_saved()
    made_volumes.append(volume)
    return volume


def numbers(volume: OverlayVolume) -> dict[bytes, int]:
    """The number of each path, which are loaded by that, without lookups."""
    found = {b"": ROOT_INODE}
    todo = [b""]
    while todo:
        path = todo.pop()
        for name, number, kind, _ in volume.entries(found[path], 2):
            found[path + b"/" + name] = number
            if stat.S_ISDIR(kind):
                todo.append(path + b"/" + name)
    return found


def find(volume: OverlayVolume, path: bytes) -> int:
    at = ROOT_INODE
    for name in path.split(b"/"):
        at = volume.lookup(at, name).inode
    return at


def handed_over(volume: OverlayVolume, below: Path, *meanwhile: Callable[[], object]) -> OverlayVolume:
    """Hand `volume` over while the calls `meanwhile` are made; return the volume that took it over."""
    given = volume.handing_over()
    read_fd, write_fd = os.pipe()
    other = new_volume(below)
    other.keep_log(SharedLog.create(), is_known=False)
    taken = other.taking_over()
    assert taken.below == given.below
    # A forked process writes the image, from a copy of the state of now.
    writer = os.fork()
    if not writer:
        try:
            given.write_image(write_fd)
        finally:
            os._exit(0)
    os.close(write_fd)
    taken.read(read_fd, given.log_fd(), given.start)
    os.waitpid(writer, 0)
    for call in meanwhile:
        call()
        taken.follow(given.position().offset)
    taken.complete(given.rest())
    other.check_invariants()
    volume.check_invariants()
    assert other.lookup_counts() == volume.lookup_counts()
    given.end()
    assert other.snapshots() == volume.snapshots()
    with volume.base_tree() as base, other.base_tree() as its:
        assert [(each.path, each.mode, each.size) for each in base.walk()] == [
            (each.path, each.mode, each.size) for each in its.walk()
        ]
    load_all(volume)
    load_all(other)
    volume.check_invariants()
    other.check_invariants()
    assert numbers(other) == numbers(volume)
    for number in numbers(volume).values():
        assert facts(other, number) == facts(volume, number), number
    return other


def cookies(entries: Iterable[PlainEntry]) -> list[tuple[bytes, int, int]]:
    return [(name, number, cookie) for name, number, _, cookie in entries]


def facts(volume: OverlayVolume, number: int) -> list[object]:
    inode = volume.getattr(number)
    content = bytes(volume.read(number, 0, inode.size)) if stat.S_ISREG(inode.mode) else None
    names = ("mode", "nlink", "uid", "gid", "size", "mtime_ns", "ctime_ns", "generation", "blocks")
    return [*(getattr(inode, name) for name in names), content, list(volume.entries(number, 0)) if inode.is_dir else []]


def made(volume: OverlayVolume, parent: int, name: bytes, data: bytes = b"") -> int:
    number = volume.mknod(parent, name, FILE, 0, SUPERUSER).inode
    volume.write(number, 0, data)
    return number


def test_what_changed_before_and_changes_meanwhile_is_there(below: Path) -> None:
    volume = new_volume(below)
    first = find(volume, b"d0/below/f0")
    volume.setattr(first, AttributeChanges(mode=0o600))
    volume.write(first, 5, b"22")
    directory = find(volume, b"d1")
    made(volume, directory, b"new", b"1" * 300_000)
    volume.take_snapshot("one")

    def change() -> None:
        volume.write(find(volume, b"d2/below/f2"), 10_000, b"changed")
        volume.setattr(first, AttributeChanges(mode=0o640))  # had changed before
        volume.unlink(find(volume, b"d2/below"), b"f5")
        volume.rename(ROOT_INODE, b"d1", ROOT_INODE, b"moved")
        volume.take_snapshot("two")

    other = handed_over(volume, below, change, lambda: volume.restore_snapshot("one"), lambda: find(volume, b"d1/new"))
    other.discard([b"d0"])
    assert other.getattr(find(other, b"d0/below/f0")).mode == (below / "d0" / "below" / "f0").stat().st_mode


def test_a_file_without_a_name_lives_until_it_is_forgotten(below: Path) -> None:
    volume = new_volume(below)
    early, late = find(volume, b"d0/below/f0"), find(volume, b"d0/below/f3")
    volume.unlink(find(volume, b"d0/below"), b"f0")
    other = handed_over(volume, below, lambda: volume.unlink(find(volume, b"d0/below"), b"f3"))
    assert bytes(other.read(late, 0, 3)) == b"333"
    assert bytes(other.read(early, 0, 3)) == b"000"
    other.forget(late, 1)
    with pytest.raises(FileNotFoundError):
        other.getattr(late)


def test_the_kernel_may_forget_what_the_new_process_has_not_loaded(below: Path) -> None:
    volume = new_volume(below)
    number = find(volume, b"d0/below/f6")
    given = volume.handing_over()
    other = new_volume(below)
    taken = other.taking_over()
    read_fd, write_fd = os.pipe()
    writer = os.fork()
    if not writer:
        given.write_image(write_fd)
        os._exit(0)
    os.close(write_fd)
    taken.read(read_fd, given.log_fd(), given.start)
    os.waitpid(writer, 0)
    taken.complete(given.rest())
    other.check_invariants()
    assert other.has_lookups(number)
    (below / "d0" / "below" / "f6").unlink()
    other.forget(number, 1)
    assert not other.has_lookups(number)
    other.check_invariants()


def test_a_change_below_is_noticed_by_the_new_process(below: Path) -> None:
    volume = new_volume(below)
    number = find(volume, b"d0/below/f6")
    size = volume.getattr(number).size
    given = volume.handing_over()
    other = new_volume(below)
    taken = other.taking_over()
    read_fd, write_fd = os.pipe()
    writer = threading.Thread(target=lambda: given.write_image(write_fd))
    writer.start()
    taken.read(read_fd, given.log_fd(), given.start)
    writer.join()
    taken.complete(given.rest())
    (below / "d0" / "below" / "f6").write_bytes(b"another content")
    changes: list[CacheInvalidation] = []
    other.on_change = changes.append
    assert other.getattr(number).size == size
    other.tidy()
    other.tidy()
    assert [change.inode for change in changes[0].inodes] == [number]
    other.invalidation_done(changes[0])
    assert other.read(number, 0, 100) == b"another content"


def test_listings_go_on_where_they_were(below: Path) -> None:
    volume = new_volume(below)
    directory = find(volume, b"d0/below")
    listed = list(volume.entries(directory, 0))
    late = find(volume, b"d1/below")

    def read() -> None:
        listed_late.extend(volume.entries(late, 0))

    listed_late: list[PlainEntry] = []
    other = handed_over(volume, below, read, lambda: volume.unlink(late, listed_late[-1][0]))
    assert cookies(other.entries(directory, listed[4][3])) == cookies(listed[5:])
    assert cookies(other.entries(late, listed_late[4][3])) == cookies(listed_late[5:-1])


def test_an_overlay_that_was_handed_over_is_handed_over_again(below: Path) -> None:
    choice = random.Random(1)
    volume = new_volume(below)
    for turn in range(4):
        for number in range(10):
            made(volume, ROOT_INODE, b"%d-%d" % (turn, number), choice.randbytes(choice.randrange(300_000)))
        find(volume, b"d1/below/f%d" % (1 + 3 * turn))
        volume.take_snapshot(f"s{turn}")
        if turn > 2:
            volume.drop_snapshot(f"s{turn - 2}")
        file = find(volume, b"d0/below/f%d" % (3 * turn))
        volume = handed_over(volume, below, lambda: volume.write(file, turn, b"x"))  # noqa: B023 (called at once)
