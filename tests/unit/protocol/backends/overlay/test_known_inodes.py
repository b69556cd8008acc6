"""KnownInodes: an overlay finds again, in another process, what its kernel knows of the lower layer."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.backends.overlay import OverlayVolume
from protocol.linux.shared_log import SharedLog
from protocol.volume import ROOT_INODE, SUPERUSER
from tests.support.journals import JournalInMemory


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

    def find(self, path: bytes) -> int:
        at = ROOT_INODE
        for name in path.split(b"/"):
            at = self.volume.lookup(at, name).inode
        return at

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
    numbers = {path: served.find(path) for path in (b"dir", b"dir/below", b"dir/f3", b"gone")}
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
    assert {path: served.find(path) for path in numbers} == numbers


def test_a_file_that_is_open_outlives_its_name(served: Served) -> None:
    number = served.find(b"gone")
    served.restart().unlink(ROOT_INODE, b"gone")
    assert served.restart().read(number, 0, 10) == b"gone"
    served.volume.forget(number, 1)
    with pytest.raises(FileNotFoundError):
        served.volume.getattr(number)


def test_an_inode_that_the_kernel_forgot_is_not_kept(served: Served) -> None:
    number = served.find(b"gone")
    volume = served.restart()
    volume.forget(number, 1)
    assert not volume.has_lookups(number)
    volume.unlink(ROOT_INODE, b"gone")
    with pytest.raises(FileNotFoundError):
        volume.getattr(number)


def test_a_change_below_between_two_processes_is_noticed(served: Served, tmp_path: Path) -> None:
    number = served.find(b"gone")
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
    directory = served.find(b"dir")
    listed = entries(served.volume, directory)
    served.volume.unlink(directory, listed[3][0])
    served.volume.end_journal()
    served.journal = JournalInMemory()
    served.journal.keep(served.volume)
    assert entries(served.restart(), directory, listed[4][2]) == listed[5:]
