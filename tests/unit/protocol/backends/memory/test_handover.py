"""A memory volume is handed over to another one, or continues with the kernel that a volume before it served."""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.directory_cookies import AscendingCookies
from protocol.journal import effects
from protocol.journal.log import image_writer, read_image
from protocol.journal.records import JournalDamagedError
from protocol.volume import ROOT_INODE, SUPERUSER, AttributeChanges
from protocol.volume_durability import UNIQUE_RESEND
from tests.support.journals import JournalInMemory, assert_same_volume, replayed

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


NUMBER = 1234  # of a request


def begun() -> tuple[MemoryVolume, JournalInMemory]:
    volume, journal = MemoryVolume(), JournalInMemory()
    journal.keep(volume)
    volume.connect(is_known=False)
    return volume, journal


def continued(journal: JournalInMemory) -> MemoryVolume:
    again = replayed(journal.batches())
    following = JournalInMemory()
    following.keep(again)
    again.connect(is_known=True)
    again.check_invariants()
    return again


def file(volume: MemoryVolume, name: bytes) -> int:
    return volume.mknod(ROOT_INODE, name, FILE, 0, SUPERUSER).inode


def request(volume: MemoryVolume, number: int, call: Callable[[], Any]) -> Any:
    volume.answering(number)
    try:
        return call()
    finally:
        volume.answering(0)


@pytest.mark.parametrize("image", [False, True])
def test_a_listing_continues_at_its_cookie(image: bool) -> None:
    volume, journal = begun()
    for each in range(40):
        file(volume, b"n%d" % each)
    volume.unlink(ROOT_INODE, b"n3")
    seen = list(volume.entries(ROOT_INODE, 0))[:20]
    for each in (0, 5, 30):
        volume.unlink(ROOT_INODE, b"n%d" % each)
    file(volume, b"new")
    if image:
        again_journal = JournalInMemory()
        again_journal.keep(volume)  # begins with an image
        journal = again_journal
    again = continued(journal)
    cookie = seen[-1][3]
    assert list(again.entries(ROOT_INODE, cookie)) == list(volume.entries(ROOT_INODE, cookie))


def test_a_listing_that_an_earlier_vfsd_began_continues_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    volume, journal = begun()
    names = [b"n%02d" % (each * 7 % 40) for each in range(40)]
    for name in names:
        file(volume, name)
    root = volume.getattr(ROOT_INODE)
    monkeypatch.setattr(effects, "listed", lambda number: struct.pack("<BQ", effects.LISTED, number))
    list(volume.entries(ROOT_INODE, 0))
    monkeypatch.undo()
    root.cookies = AscendingCookies(root.children or ())
    file(volume, b"added")
    volume.unlink(ROOT_INODE, b"n03")
    names = [name for name in (*names, b"added") if name != b"n03"]
    again, following = replayed(journal.batches()), JournalInMemory()
    following.keep(again)  # begins with an image
    again.connect(is_known=True)
    file(again, b"before")
    position = 3 + 19  # of the twentieth name: that vfsd gave cookies from 3 on, in the order of creation
    seen = []
    for name, _, _, _ in again.entries(ROOT_INODE, position):
        seen.append(name)
        file(again, name + b".new")
    assert seen == [*names[20:], b"before"]
    third = continued(following)
    for cookie in (0, position, list(again.entries(ROOT_INODE, position))[5][3]):
        assert list(third.entries(ROOT_INODE, cookie)) == list(again.entries(ROOT_INODE, cookie))


@pytest.mark.parametrize("kind", ["rename", "restore of a path", "restore"])
def test_a_replaced_name_stays_where_it_was_in_a_listing_also_after_a_replay(kind: str) -> None:
    volume, journal = begun()
    for each in range(40):
        file(volume, b"n%02d" % each)
    volume.take_snapshot("s")
    for each in range(0, 40, 2):
        volume.unlink(ROOT_INODE, b"n%02d" % each)
        file(volume, b"n%02d" % each)
    before = list(volume.entries(ROOT_INODE, 0))
    if kind == "rename":
        for each in range(0, 40, 2):
            file(volume, b"t")
            volume.rename(ROOT_INODE, b"t", ROOT_INODE, b"n%02d" % each)
    elif kind == "restore":
        volume.restore_snapshot("s")
    else:
        volume.restore_snapshot("s", paths=[b"n%02d" % each for each in range(40)])
    after = list(volume.entries(ROOT_INODE, 0))
    assert [(name, cookie) for name, _, _, cookie in after] == [(name, cookie) for name, _, _, cookie in before]
    assert after != before
    file(volume, b"new")
    assert list(continued(journal).entries(ROOT_INODE, 0)) == list(volume.entries(ROOT_INODE, 0))


def test_a_request_that_comes_again_has_its_recorded_result() -> None:
    volume, journal = begun()
    made = request(volume, NUMBER, lambda: volume.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER))
    again = continued(journal)
    found = request(again, NUMBER | UNIQUE_RESEND, lambda: again.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER))
    assert found.inode == made.inode
    with pytest.raises(FileExistsError):  # its second call
        request(again, NUMBER | UNIQUE_RESEND, lambda: again.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER))
    with pytest.raises(FileExistsError):
        request(again, NUMBER + 2, lambda: again.mkdir(ROOT_INODE, b"d", 0o755, SUPERUSER))
    again.forget(made.inode, 1)
    again.check_invariants()


def test_a_request_that_was_executed_in_part_is_completed() -> None:
    volume, journal = begun()
    number = file(volume, b"f")
    request(volume, NUMBER, lambda: volume.setxattr(number, b"user.a", b"1", 0))
    again = continued(journal)

    def both() -> int:
        again.setxattr(number, b"user.a", b"1", 1)  # XATTR_CREATE
        return again.setattr(number, AttributeChanges(0o600)).mode

    assert stat.S_IMODE(request(again, NUMBER, both)) == 0o600
    assert again.getxattr(number, b"user.a") == b"1"


def test_requests_of_a_mount_before_do_not_count() -> None:
    volume, journal = begun()
    request(volume, NUMBER, lambda: file(volume, b"f"))
    volume.connect(is_known=False)  # another kernel: its requests have the same numbers
    again = continued(journal)
    with pytest.raises(FileExistsError):
        request(again, NUMBER, lambda: file(again, b"f"))


def test_a_file_without_a_name_lives_until_the_kernel_forgets_it() -> None:
    volume, journal = begun()
    number = file(volume, b"f")
    volume.write(number, 0, b"content")
    volume.unlink(ROOT_INODE, b"f")
    again = continued(journal)
    assert again.read(number, 0, 10) == b"content"
    again.forget(number, 3)
    with pytest.raises(FileNotFoundError) as raised:
        again.getattr(number)
    assert raised.value.errno in {errno.ENOENT, errno.ESTALE}
    again.check_invariants()


def test_a_file_that_is_unlinked_after_the_recovery_is_freed_by_the_next_forget() -> None:
    volume, journal = begun()
    number = file(volume, b"f")
    again = continued(journal)
    again.lookup(ROOT_INODE, b"f")
    again.unlink(ROOT_INODE, b"f")
    again.getattr(number)
    again.forget(number, 2)  # those before the recovery, too
    with pytest.raises(FileNotFoundError):
        again.getattr(number)
    again.check_invariants()


def test_what_changed_without_a_request_is_invalidated_unless_that_was_done() -> None:
    volume, journal = begun()
    request(volume, NUMBER, lambda: file(volume, b"by the kernel"))
    assert not replayed_invalidation(journal).entries
    file(volume, b"not by the kernel")
    found = replayed_invalidation(journal)
    assert [change.name for change in found.entries] == [b"not by the kernel"]
    assert ROOT_INODE in {change.inode for change in found.inodes}
    volume.invalidated()
    request(volume, NUMBER + 2, lambda: file(volume, b"later"))
    assert not replayed_invalidation(journal).entries


def replayed_invalidation(journal: JournalInMemory) -> Any:
    again = replayed(journal.batches())
    JournalInMemory().keep(again)
    return again.connect(is_known=True)


def test_a_recovery_of_a_recovery_gives_the_same_state() -> None:
    volume, journal = begun()
    for each in range(5):
        request(volume, NUMBER + each, lambda each=each: file(volume, b"%d" % each))  # type: ignore[misc]
    again = continued(journal)
    assert_same_volume(volume, again)
