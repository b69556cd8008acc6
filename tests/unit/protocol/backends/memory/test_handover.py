"""A memory volume is handed over to another one: at whichever moment, the other has the same state."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.journal.log import image_writer, read_image
from protocol.journal.records import JournalDamagedError
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges
from tests.support.journals import assert_same_volume

FILE = stat.S_IFREG | 0o644


def new_volume() -> MemoryVolume:
    volume = MemoryVolume(uid=1, gid=2)
    volume.mark_saved()  # as the opener of a backend does
    return volume


def handed_over(volume: MemoryVolume, *meanwhile: Callable[[], object]) -> MemoryVolume:
    """Hand `volume` over while the calls `meanwhile` are made; return the volume that took it over."""
    given = volume.handing_over()
    read_fd, write_fd = os.pipe()
    # The image is that of a forked process, which a thread before the first change replaces.
    taken_over = new_volume()
    taken = taken_over.taking_over()
    writer = threading.Thread(target=given.write_image, args=(write_fd,))
    writer.start()
    taken.read(read_fd, given.log_fd(), given.start)
    writer.join()
    for call in meanwhile:
        call()
        taken.follow(given.position().offset)
    taken.complete(given.rest())
    given.end()
    taken_over.check_invariants()
    volume.check_invariants()
    assert_same_volume(volume, taken_over)
    assert taken_over.lookup_counts() == volume.lookup_counts()
    assert taken_over.is_saved == volume.is_saved
    return taken_over


def made(volume: MemoryVolume, name: bytes, data: bytes = b"") -> int:
    number = volume.mknod(ROOT_INODE, name, FILE, 0, SUPERUSER).inode
    volume.write(number, 0, data)
    return number


def test_what_changes_meanwhile_is_there_and_the_old_volume_keeps_no_journal() -> None:
    volume = new_volume()
    first = made(volume, b"first", b"1" * 300_000)
    volume.take_snapshot("one")

    def change() -> None:
        volume.write(first, 5, b"22")
        gone = made(volume, b"gone", b"without a name")
        volume.unlink(ROOT_INODE, b"gone")
        assert volume.lookup_counts()[gone] == 1
        volume.take_snapshot("two")

    other = handed_over(volume, change, lambda: volume.restore_snapshot("one"), lambda: made(volume, b"last"))
    assert volume.journal is None
    gone = max(volume.lookup_counts()) - 1
    assert bytes(other.read(gone, 0, 100)) == b"without a name"
    other.forget(gone, 1)
    with pytest.raises(FileNotFoundError):
        other.getattr(gone)


def mark(volume: MemoryVolume) -> None:
    volume.mark()


def view(volume: MemoryVolume) -> None:
    with volume.tree():
        pass


def drop(volume: MemoryVolume) -> None:
    volume.take_snapshot("two")
    volume.drop_snapshot("two")


@pytest.mark.parametrize("meanwhile", [mark, view, drop])
def test_a_directory_that_was_made_and_removed_between_two_snapshots_leaves_nothing(
    meanwhile: Callable[[MemoryVolume], None],
) -> None:
    """An epoch begins and ends between, so that the entry is removed in another epoch than it was made in."""
    volume = new_volume()
    volume.take_snapshot("one")
    memory = volume.usage().snapshot_bytes
    for _ in range(2):
        directory = volume.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER).inode
        below = volume.mkdir(directory, b"below", 0o755, SUPERUSER).inode
        meanwhile(volume)
        volume.rmdir(directory, b"below")
        volume.rmdir(ROOT_INODE, b"d")
        volume.forget(below, 1)
        volume.forget(directory, 1)
        taken, memory = memory, volume.usage().snapshot_bytes
    assert taken == memory
    handed_over(volume)


def test_what_was_made_and_removed_while_a_view_was_open_does_not_prevent_a_handover() -> None:
    volume = new_volume()
    volume.take_snapshot("one")
    with volume.tree():
        directory = volume.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER).inode
        made(volume, b"f")
        volume.rmdir(ROOT_INODE, b"d")
        volume.unlink(ROOT_INODE, b"f")
        volume.forget(directory, 1)
        volume.forget(directory + 1, 1)
    handed_over(volume)


def test_access_times_and_serials_of_dropped_snapshots_are_kept() -> None:
    volume = new_volume()
    number = made(volume, b"f", b"data")
    for name in ("one", "two"):
        volume.take_snapshot(name)
    volume.drop_snapshot("two")

    other = handed_over(volume, lambda: volume.read(number, 0, 1))
    assert other.getattr(number).atime_ns == volume.getattr(number).atime_ns
    assert other.take_snapshot("three").serial == volume.take_snapshot("three").serial


def test_a_volume_that_was_handed_over_is_handed_over_again() -> None:
    choice = random.Random(1)
    volume = new_volume()
    for turn in range(6):
        for number in range(20):
            made(volume, b"%d-%d" % (turn, number), choice.randbytes(choice.randrange(300_000)))
        volume.take_snapshot(f"s{turn}")
        if turn > 2:
            volume.drop_snapshot(f"s{turn - 2}")
        volume = handed_over(volume, lambda: volume.unlink(ROOT_INODE, b"%d-3" % turn))  # noqa: B023 (called at once)


def test_a_saved_state_stays_saved_until_it_changes() -> None:
    volume = new_volume()
    made(volume, b"f")
    assert not handed_over(volume).is_saved
    volume.mark_saved()
    other = handed_over(volume)
    assert other.saved_ns == volume.saved_ns
    other.setattr(ROOT_INODE, AttributeChanges(mode=0o700))
    assert not other.is_saved


def test_a_state_that_is_not_complete_is_refused() -> None:
    volume = new_volume()
    made(volume, b"f")
    given = volume.handing_over()
    read_fd, write_fd = os.pipe()
    given.write_image(write_fd)
    taken = new_volume().taking_over()
    taken.read(read_fd, given.log_fd(), given.start)
    made(volume, b"missing")
    given.position()
    with pytest.raises(ValueError, match="not transferred completely"):
        taken.complete(given.rest())
    given.end()


def test_an_image_without_its_end_is_refused() -> None:
    read_fd, write_fd = os.pipe()
    log = image_writer(write_fd)
    log.append([b"some"])
    log.detach()  # the process was killed
    with pytest.raises(JournalDamagedError) as caught:
        list(read_image(read_fd))
    assert caught.value.errno == errno.EBADMSG
