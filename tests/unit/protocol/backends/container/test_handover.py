"""Handover of a container's directory to another process, with a host directory in the place of the container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from protocol.backends.container.reconnecting_volume import ReconnectingVolume
from protocol.backends.host import HostVolume
from protocol.linux.shared_log import SharedLog
from protocol.volume import ROOT_INODE, SUPERUSER


class Processes:
    """The volumes of successive processes, which serve the same kernel."""

    def __init__(self, directory: Path, *, is_kept: bool) -> None:
        self.directory = directory
        self.is_kept = is_kept
        self.run = "first run"
        self._opened: list[HostVolume] = []
        self.volume = self._made()
        self._connect(self._open())

    def _open(self) -> HostVolume:
        self._opened.append(HostVolume(str(self.directory)))
        return self._opened[-1]

    def _made(self) -> ReconnectingVolume:
        volume = ReconnectingVolume(keep=lambda _log, _is_known: None, prepare=lambda: (self._open(), self.run))
        if self.is_kept:
            self.log = SharedLog.create()
            volume.keep_log(self.log, is_known=False)
        return volume

    def _connect(self, beneath: HostVolume) -> None:
        trio.run(self.volume.connect, beneath, self.run)

    def restart(self, run: str) -> None:
        """The container is restarted."""
        self.volume.disconnect()
        self.run = run
        self._connect(self._open())

    def hand_over(self) -> ReconnectingVolume:
        given, following = self.volume.handing_over(), self._made()
        taken = following.taking_over()
        if taken.below != given.below:
            given.end()
            raise OSError("another run")
        taken.read(-1, given.log_fd(), given.start)
        taken.follow(given.position().offset)
        taken.take_files({number: os.dup(descriptor) for number, descriptor in given.files()})
        taken.complete(given.rest())
        self.volume = following
        self._connect(self._opened[-1])
        return following

    def die(self) -> ReconnectingVolume:
        """The process dies, and its keeper starts another one."""
        self.volume = ReconnectingVolume(keep=lambda _log, _is_known: None, prepare=lambda: (self._open(), self.run))
        self.volume.keep_log(self.log, is_known=True)
        self._connect(self._open())
        return self.volume

    def close(self) -> None:
        self.volume.check_invariants()
        for volume in self._opened:
            volume.close()


@pytest.fixture(params=[False, True], ids=["without a keeper", "with a keeper"])
def processes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Processes]:
    (tmp_path / "dir" / "below").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "dir" / f"f{number}").write_bytes(b"%d" % number)
    made = Processes(tmp_path, is_kept=request.param)
    yield made
    made.close()


def found(volume: ReconnectingVolume, *names: bytes) -> int:
    at = ROOT_INODE
    for name in names:
        at = volume.lookup(at, name).inode  # type: ignore[union-attr]
    return at


def test_numbers_names_and_files_without_names_go_on(processes: Processes) -> None:
    volume = processes.volume
    directory = found(volume, b"dir")
    numbers = {number: found(volume, b"dir", b"f%d" % number) for number in range(10)}
    volume.unlink(directory, b"f4")
    temporary = volume.tmpfile(ROOT_INODE, 0o600, SUPERUSER).inode  # type: ignore[union-attr]
    volume.write(temporary, 0, b"temporary")
    for _ in range(2):
        volume = processes.hand_over()
        volume.check_invariants()
        assert {number: volume.read(inode, 0, 10) for number, inode in numbers.items()} == {
            number: b"%d" % number for number in range(10)
        }
        assert volume.read(temporary, 0, 10) == b"temporary"
        assert volume.path_of(numbers[3]) == b"dir/f3"
        assert found(volume, b"dir", b"f3") == numbers[3]
    volume.rename(directory, b"f5", ROOT_INODE, b"moved")
    volume = processes.hand_over()
    assert volume.path_of(numbers[5]) == b"moved"
    volume.write(numbers[5], 1, b"!")
    assert (processes.directory / "moved").read_bytes() == b"5!"
    if processes.is_kept:
        volume = processes.die()
        assert volume.read(numbers[5], 0, 10) == b"5!"


def test_what_the_kernel_forgets_after_a_handover_is_forgotten(processes: Processes) -> None:
    for _ in range(3):
        number = found(processes.volume, b"dir", b"f1")
    volume = processes.hand_over()
    volume.forget(number, 2)
    assert volume.path_of(number) == b"dir/f1"
    volume.forget(number, 1)
    assert volume.path_of(number) is None
    volume.check_invariants()


def test_a_container_that_was_restarted_is_not_handed_over(processes: Processes) -> None:
    found(processes.volume, b"dir", b"f1")
    processes.restart("second run")
    with pytest.raises(OSError, match="was restarted since the mount was made"):
        processes.volume.handing_over()


def test_a_container_that_restarts_during_a_handover_ends_it(processes: Processes) -> None:
    number = found(processes.volume, b"dir", b"f1")
    given = processes.volume.handing_over()
    processes.restart("first run")
    for give in (given.rest, lambda: list(given.files())):
        with pytest.raises(OSError, match="stopped during the upgrade"):
            give()
    given.end()
    assert processes.volume.read(number, 0, 10) == b"1"


def test_another_run_is_not_what_was_handed_over(processes: Processes) -> None:
    found(processes.volume, b"dir", b"f1")
    processes.run = "second run"
    with pytest.raises(OSError, match="another run"):
        processes.hand_over()


def test_a_container_that_does_not_run_is_not_handed_over(processes: Processes) -> None:
    processes.volume.disconnect()
    with pytest.raises(OSError, match="does not run"):
        processes.volume.handing_over()


def test_the_log_of_a_keeper_stays_small(processes: Processes) -> None:
    volume = processes.volume
    number, names = found(volume, b"dir", b"f1"), [b"a" * 250, b"b" * 250]
    directory = found(volume, b"dir")
    volume.rename(directory, b"f1", directory, names[0])
    for turn in range(5000):
        volume.rename(directory, names[turn % 2], directory, names[1 - turn % 2])
    volume.tidy()
    if processes.is_kept:
        assert processes.log.end - processes.log.start < 2**20
        assert processes.die().read(number, 0, 10) == b"1"
