"""An overlay is handed over while it is served, or continues from its journal: same state, same numbers."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.lower import AbsentLower
from protocol.linux.shared_log import SharedLog
from protocol.tree import filled
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges, PlainEntry
from protocol.volume_extensions import CacheInvalidation
from tests.support.journals import HEADER, JournalInMemory, load_all, replayed_over
from tests.unit.protocol.journal.power import UnreliableFile

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


class Served:
    """An overlay that several processes serve to one kernel, one after the other."""

    def __init__(self, below: Path) -> None:
        self._below = os.fsencode(below)
        self._log = SharedLog.create()
        self.journal = JournalInMemory()
        self.volume = OverlayVolume(self._below)
        self.journal.keep(self.volume)
        self.volume.keep_log(self._log, is_known=False)
        self.volume.connect(is_known=False)

    def restart(self) -> OverlayVolume:
        volume = OverlayVolume(self._below)
        volume.replay(self.journal.batches())
        volume.keep_journal(self.journal, is_new=False)  # type: ignore[arg-type]
        volume.keep_log(SharedLog(self._log.descriptor), is_known=True)
        volume.connect(is_known=True)
        self.volume = volume
        return volume

    def close(self) -> None:
        self.volume.check_invariants()
        os.close(self._log.descriptor)


def entries(volume: OverlayVolume, directory: int, cookie: int = 0) -> list[tuple[bytes, int, int]]:
    """Name, number and cookie of each entry after a cookie."""
    return [(name, number, at) for name, number, _, at in volume.entries(directory, cookie)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "dir" / "below").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "dir" / f"f{number}").write_bytes(b"%d" % number)
    (tmp_path / "gone").write_bytes(b"gone")
    made = Served(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_numbers_content_and_cookies_are_those_of_the_process_before(served: Served, is_rewritten: bool) -> None:
    numbers = {path: find(served.volume, path) for path in (b"dir", b"dir/below", b"dir/f3", b"gone")}
    listed = entries(served.volume, numbers[b"dir"])
    for _ in range(2):
        if is_rewritten and served.volume._overlay.known is not None:
            served.volume._overlay.known.rewrite()
        volume = served.restart()
        assert volume.getattr(numbers[b"dir/f3"]).size == 1
        assert volume.read(numbers[b"dir/f3"], 0, 10) == b"3"
        assert entries(volume, numbers[b"dir"], listed[4][2]) == listed[5:]
        volume.check_invariants()
    volume.mknod(numbers[b"dir/below"], b"new", stat.S_IFREG | 0o644, 0, SUPERUSER)
    volume.unlink(numbers[b"dir"], listed[3][0])
    volume = served.restart()
    assert entries(volume, numbers[b"dir"], listed[4][2]) == listed[5:]
    assert {path: find(served.volume, path) for path in numbers} == numbers


def test_a_file_that_is_open_outlives_its_name(served: Served) -> None:
    number = find(served.volume, b"gone")
    served.restart().unlink(ROOT_INODE, b"gone")
    assert served.restart().read(number, 0, 10) == b"gone"
    served.volume.forget(number, 1)
    with pytest.raises(FileNotFoundError):
        served.volume.getattr(number)


def test_an_inode_that_the_kernel_forgot_is_not_kept(served: Served) -> None:
    number = find(served.volume, b"gone")
    volume = served.restart()
    volume.forget(number, 1)
    assert not volume.has_lookups(number)
    volume.unlink(ROOT_INODE, b"gone")
    with pytest.raises(FileNotFoundError):
        volume.getattr(number)


def test_a_change_below_between_two_processes_is_noticed(served: Served, tmp_path: Path) -> None:
    number = find(served.volume, b"gone")
    (tmp_path / "gone").write_bytes(b"another content")
    volume = served.restart()
    changes = []
    volume.on_change = changes.append
    assert volume.getattr(number).size == 4
    volume.tidy()
    volume.tidy()  # the first one begins a round
    assert [change.inode for change in changes[0].inodes] == [number]
    volume.invalidation_done(changes[0])
    assert volume.read(number, 0, 100) == b"another content"


def test_a_compacted_journal_keeps_the_cookies_of_changed_directories(served: Served) -> None:
    directory = find(served.volume, b"dir")
    listed = entries(served.volume, directory)
    served.volume.unlink(directory, listed[3][0])
    served.volume.end_journal()
    served.journal = JournalInMemory()
    served.journal.keep(served.volume)
    assert entries(served.restart(), directory, listed[4][2]) == listed[5:]


Shown = dict[bytes, tuple[int, int, bytes]]


@pytest.fixture
def small_below(tmp_path: Path) -> Path:
    place = tmp_path / "small_below"
    (place / "d" / "deep").mkdir(parents=True)
    (place / "d" / "deep" / "file").write_bytes(b"deep" * 20)
    (place / "d" / "f").write_bytes(b"content" * 10)
    os.link(place / "d" / "f", place / "second")
    (place / "link").symlink_to("d/f")
    return place


def shown(volume: OverlayVolume) -> Shown:
    with volume.tree() as tree:
        return {
            entry.path: (
                entry.inode,
                entry.mode,
                b"".join(filled(tree.chunks(entry.path))) if entry.is_file else entry.target,
            )
            for entry in tree.walk()
        }


def number(volume: OverlayVolume, *names: bytes) -> int:
    at = ROOT_INODE
    for name in names:
        at = volume.lookup(at, name).inode
    return at


def steps(volume: OverlayVolume) -> Iterator[None]:
    """Change the overlay, a record at a time."""
    volume.setattr(number(volume, b"d", b"deep", b"file"), AttributeChanges(mode=0o600))
    yield
    volume.write(number(volume, b"d", b"f"), 5, b"partly")
    yield
    volume.take_snapshot("s")
    yield
    volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"moved")
    yield
    volume.unlink(ROOT_INODE, b"second")
    yield
    volume.fallocate(number(volume, b"moved", b"f"), 3, 0, 30)  # a hole
    yield
    volume.mkdir(number(volume, b"moved", b"deep"), b"new", 0o755, SUPERUSER)
    yield
    volume.restore_snapshot("s", [b"d"])
    yield
    volume.discard()
    yield


def history(volume: OverlayVolume, journal: JournalInMemory) -> list[tuple[int, Shown]]:
    """Make all steps; return where the log ended after each, and what the overlay showed."""
    found = [(journal.log.end, shown(volume))]
    for _ in steps(volume):
        volume.flush_journal()
        found.append((journal.log.end, shown(volume)))
    return found


def test_a_journal_that_is_torn_at_any_byte_gives_the_state_before(small_below: Path) -> None:
    volume = OverlayVolume(bytes(small_below))
    journal = JournalInMemory()
    journal.keep(volume)
    states = history(volume, journal)
    whole = bytes(journal.file.content)
    before: list[list[bytes]] = []
    for end in range(states[-5][0], states[-1][0] + 1):
        journal.file.content = bytearray(whole[:end])
        batches = journal.batches()
        if batches != before:  # most ends leave the same batches
            replayed_over(AbsentLower(), batches).check_invariants()
            before = batches
        if any(end in (at, at - 1, at + 40) for at, _ in states):
            wanted = [state for at, state in states if at <= end][-1]
            assert shown(replayed_over(bytes(small_below), batches)) == wanted, end


@pytest.mark.parametrize("seed", range(20))
def test_after_a_power_failure_the_overlay_is_in_a_state_that_was_synced_or_a_later_one(
    small_below: Path, seed: int
) -> None:
    volume = OverlayVolume(bytes(small_below))
    journal = JournalInMemory()
    journal.file = UnreliableFile(HEADER.encoded())  # type: ignore[assignment]
    journal.log._file = journal.file
    journal.keep(volume)
    choice = random.Random(seed)
    states = [shown(volume)]
    journal.log.sync()
    synced = 0
    for _ in steps(volume):
        states.append(shown(volume))
        if choice.random() < 0.3:
            volume.fsync(ROOT_INODE, data_only=False)
            synced = len(states) - 1
    journal.file.content = bytearray(journal.file.after_power_failure(choice))  # type: ignore[attr-defined]
    batches = journal.batches()
    replayed_over(AbsentLower(), batches).check_invariants()
    assert shown(replayed_over(bytes(small_below), batches)) in states[synced:]


def test_on_a_full_disk_a_refused_change_leaves_no_trace_and_works_later(small_below: Path) -> None:
    volume = OverlayVolume(bytes(small_below))
    journal = JournalInMemory()
    journal.keep(volume)
    before = shown(volume)
    journal.file.limit = journal.log.end
    journal.log._allocated = journal.log.end
    for change in (
        lambda: volume.setattr(number(volume, b"d", b"f"), AttributeChanges(mode=0o600)),
        lambda: volume.write(number(volume, b"d", b"f"), 3, b"data"),
        lambda: volume.unlink(number(volume, b"d"), b"f"),
        lambda: volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"moved"),
    ):
        with pytest.raises(OSError, match="no space left"):
            change()
    assert shown(volume) == before
    assert not volume._overlay.recorded
    journal.file.limit = None
    for _ in steps(volume):
        assert shown(replayed_over(bytes(small_below), journal.batches())) == shown(volume)


def test_a_disk_that_fails_at_a_record_tears_nothing_and_has_the_state_when_it_works_again(small_below: Path) -> None:
    volume = OverlayVolume(bytes(small_below))
    journal = JournalInMemory()
    journal.keep(volume)
    for code, change in (
        (errno.EROFS, lambda: volume.setattr(number(volume, b"d", b"deep", b"file"), AttributeChanges(mode=0o600))),
        (errno.EIO, lambda: volume.write(number(volume, b"d", b"f"), 5, b"partly")),
        (errno.EROFS, lambda: volume.take_snapshot("s")),
        (errno.EIO, lambda: volume.rename(ROOT_INODE, b"d", ROOT_INODE, b"moved")),
        (errno.EROFS, lambda: volume.unlink(ROOT_INODE, b"second")),
        (errno.EIO, lambda: volume.fallocate(number(volume, b"moved", b"f"), 3, 0, 30)),
        (errno.EROFS, lambda: volume.restore_snapshot("s", [b"d"])),
        (errno.EIO, volume.discard),
    ):
        before = shown(volume)
        journal.file.error = code
        for each in (change, lambda: volume.mkdir(ROOT_INODE, b"refused", 0o755, SUPERUSER)):
            with pytest.raises(OSError, match=os.strerror(code)):
                each()
        assert shown(replayed_over(bytes(small_below), journal.batches())) == before
        journal.file.error = 0
        journal.log.mend()
        assert shown(replayed_over(bytes(small_below), journal.batches())) == shown(volume)
        volume.check_invariants()


def test_a_hole_over_parts_of_two_blocks_needs_no_lower_layer_later(small_below: Path) -> None:
    (small_below / "large").write_bytes(os.urandom(266_241))
    volume = OverlayVolume(bytes(small_below))
    journal = JournalInMemory()
    journal.keep(volume)
    volume.fallocate(number(volume, b"large"), 3, 10_000, 131_072)
    replayed_over(AbsentLower(), journal.batches()).check_invariants()
    assert shown(replayed_over(bytes(small_below), journal.batches())) == shown(volume)


@pytest.mark.parametrize("change", ["unlink", "replace"])
def test_an_image_has_what_was_removed_so_a_replay_needs_no_lower_layer(small_below: Path, change: str) -> None:
    volume = OverlayVolume(bytes(small_below))
    directory = number(volume, b"d")
    if change == "unlink":
        volume.unlink(directory, b"f")
        volume.unlink(ROOT_INODE, b"second")
    else:
        volume.rename(ROOT_INODE, b"link", directory, b"f")
        volume.rename(number(volume, b"d", b"deep"), b"file", ROOT_INODE, b"second")
    journal = JournalInMemory()
    journal.keep(volume)
    replayed_over(AbsentLower(), journal.batches()).check_invariants()
    (small_below / "d" / "f").unlink()
    assert shown(replayed_over(bytes(small_below), journal.batches())) == shown(volume)


def test_an_import_whose_files_are_recorded_ahead_is_there_with_its_places_in_the_lower_layer(
    small_below: Path,
) -> None:
    volume = OverlayVolume(bytes(small_below))
    journal = JournalInMemory()
    journal.keep(volume)
    other = MemoryVolume()
    above = other.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER).inode  # is in the lower layer, and what follows is new
    new = other.mkdir(above, b"new", 0o755, SUPERUSER).inode
    for at in range(100):
        other.write(other.mknod(new, b"%d" % at, 0o100644, 0, SUPERUSER).inode, 0, b"%d" % at * 30)
    other.write(other.mknod(above, b"f", 0o100644, 0, SUPERUSER).inode, 0, b"another content")
    before = len(journal.batches())
    with other.tree() as tree, volume.tree():
        preparation = volume.preparation(tree, replace=False)
        for _ in preparation.steps():
            pass
        volume.import_prepared(preparation)
    batches = journal.batches()
    assert len(batches) == before + 1
    replayed_over(AbsentLower(), batches).check_invariants()
    assert shown(replayed_over(bytes(small_below), batches)) == shown(volume)
