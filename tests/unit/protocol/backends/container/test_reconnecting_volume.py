"""ReconnectingVolume over volumes in memory: numbers stay true over a change of the volume, or become stale."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from protocol.backends.container.reconnecting_volume import ReconnectingVolume
from protocol.backends.host import HostVolume
from protocol.backends.memory import MemoryVolume
from protocol.linux.shared_log import SharedLog
from protocol.volume import RENAME_EXCHANGE, ROOT_INODE, SUPERUSER, Caller, Volume
from protocol.volume_extensions import CacheInvalidation

ME = Caller(0, 0)


def failing(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=r".+") as caught:
        call()
    assert caught.value.errno == code


class Shifted:
    """A volume in memory that gives other numbers than its neighbour for the same files."""

    def __init__(self, by: int) -> None:
        self.volume = MemoryVolume(2**20)
        for number in range(by):
            self.make(f"filler{number}".encode())

    def make(self, path: bytes, data: bytes = b"", kind: int = stat.S_IFREG) -> int:
        *above, name = path.split(b"/")
        at = ROOT_INODE
        for part in above:
            at = self.volume.lookup(at, part).inode
        if kind == stat.S_IFDIR:
            return self.volume.mkdir(at, name, 0o755, ME).inode
        made = self.volume.mknod(at, name, kind | 0o644, 0, ME).inode
        self.volume.write(made, 0, data)
        return made


class Awaited:
    """A volume whose every answer is awaited, and comes when `gate` opens."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self.gate = trio.Event()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._volume, name)
        if name in {"capabilities", "forget", "check_invariants"}:
            return method

        async def answer(*args: Any, **options: Any) -> Any:
            self.asked += 1
            await self.gate.wait()
            return method(*args, **options)

        return answer


@pytest.fixture
def reconnecting() -> Iterator[ReconnectingVolume]:
    volume = ReconnectingVolume()
    yield volume
    volume.check_invariants()


def connect(volume: ReconnectingVolume, beneath: Volume) -> CacheInvalidation:
    return trio.run(volume.connect, beneath)


def walk(volume: ReconnectingVolume, path: bytes) -> int:
    at = ROOT_INODE
    for name in path.split(b"/"):
        at = volume.lookup(at, name).inode
    return at


def test_before_it_is_connected_everything_is_eio(reconnecting: ReconnectingVolume) -> None:
    for call in (
        lambda: reconnecting.getattr(ROOT_INODE),
        lambda: reconnecting.lookup(ROOT_INODE, b"x"),
        lambda: reconnecting.readdir(ROOT_INODE, 0),
        reconnecting.statfs,
    ):
        failing(errno.EIO, call)


def test_a_number_whose_file_is_gone_is_stale_and_is_given_to_no_other(reconnecting: ReconnectingVolume) -> None:
    first, second = Shifted(0), Shifted(0)
    made = first.make(b"gone")
    other = second.make(b"other", b"not yours")
    assert made == other  # the new volume has another file under that very number
    connect(reconnecting, first.volume)
    number = walk(reconnecting, b"gone")

    reconnecting.disconnect()
    connect(reconnecting, second.volume)

    failing(errno.ESTALE, lambda: reconnecting.read(number, 0, 10))
    seen = walk(reconnecting, b"other")
    assert seen != number
    listed = {entry.name: entry.inode for entry in reconnecting.readdir(ROOT_INODE, 0)}
    assert listed[b"other"] == seen
    assert reconnecting.read(seen, 0, 10) == b"not yours"
    failing(errno.ESTALE, lambda: reconnecting.getattr(number))


def test_names_are_followed_through_renames_links_and_removals(reconnecting: ReconnectingVolume) -> None:
    first, second = Shifted(0), Shifted(3)
    connect(reconnecting, first.volume)
    directory = reconnecting.mkdir(ROOT_INODE, b"d", 0o755, ME).inode
    moved = reconnecting.mknod(ROOT_INODE, b"a", 0o100644, 0, ME).inode
    linked = reconnecting.mknod(ROOT_INODE, b"b", 0o100644, 0, ME).inode
    removed = reconnecting.mknod(ROOT_INODE, b"c", 0o100644, 0, ME).inode
    one = reconnecting.mknod(ROOT_INODE, b"one", 0o100644, 0, ME).inode
    two = reconnecting.mknod(ROOT_INODE, b"two", 0o100644, 0, ME).inode
    replaced = reconnecting.mknod(ROOT_INODE, b"old", 0o100644, 0, ME).inode
    reconnecting.rename(ROOT_INODE, b"a", directory, b"a")
    reconnecting.link(linked, directory, b"b")
    reconnecting.unlink(ROOT_INODE, b"b")
    reconnecting.unlink(ROOT_INODE, b"c")
    reconnecting.rename(ROOT_INODE, b"one", ROOT_INODE, b"two", RENAME_EXCHANGE)
    reconnecting.rename(directory, b"a", ROOT_INODE, b"old")
    second.make(b"d", kind=stat.S_IFDIR)
    for path in (b"d/b", b"one", b"two", b"old", b"c"):
        second.make(path, path)

    reconnecting.disconnect()
    connect(reconnecting, second.volume)

    assert reconnecting.read(moved, 0, 9) == b"old"
    assert reconnecting.read(linked, 0, 9) == b"d/b"
    assert reconnecting.read(one, 0, 9) == b"two"
    assert reconnecting.read(two, 0, 9) == b"one"
    for number in (removed, replaced):
        failing(errno.ESTALE, lambda number=number: reconnecting.getattr(number))


def test_what_the_kernel_forgets_the_volume_forgets(reconnecting: ReconnectingVolume) -> None:
    first, second = Shifted(0), Shifted(1)
    for shifted in (first, second):
        shifted.make(b"f")
    connect(reconnecting, first.volume)
    number = walk(reconnecting, b"f")
    walk(reconnecting, b"f")
    reconnecting.disconnect()
    connect(reconnecting, second.volume)
    inner = second.volume.lookup(ROOT_INODE, b"f").inode
    second.volume.forget(inner, 2)  # ours, and the one that `make` had
    assert second.volume.lookup_counts().get(inner, 0) == 1

    reconnecting.forget(number, 1)
    assert second.volume.lookup_counts().get(inner, 0) == 1
    reconnecting.forget(number, 1)

    assert second.volume.lookup_counts().get(inner, 0) == 0
    assert [change.inode for change in reconnecting.disconnect().inodes] == [ROOT_INODE]


def test_the_kernel_is_told_to_forget_every_name_and_every_inode(reconnecting: ReconnectingVolume) -> None:
    first = Shifted(0)
    first.make(b"d", kind=stat.S_IFDIR)
    first.make(b"d/f")
    connect(reconnecting, first.volume)
    number = walk(reconnecting, b"d/f")
    directory = walk(reconnecting, b"d")

    for told in (reconnecting.disconnect(), connect(reconnecting, first.volume)):
        assert {(change.parent, change.name) for change in told.entries} == {(ROOT_INODE, b"d"), (directory, b"f")}
        assert {change.inode for change in told.inodes} == {ROOT_INODE, directory, number}
        assert all(change.content for change in told.inodes)


def test_after_a_cut_nothing_is_renamed_into_a_directory_whose_lock_has_ended(
    reconnecting: ReconnectingVolume, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("edited")
    first, second = HostVolume(tmp_path), HostVolume(tmp_path)
    connect(reconnecting, first)
    directory = walk(reconnecting, b"d")
    reconnecting.lock(directory)
    reconnecting.disconnect()
    connect(reconnecting, second)

    failing(errno.EIO, lambda: reconnecting.rename(directory, b"f", directory, b"g"))
    reconnecting.rename(directory, b"f", ROOT_INODE, b"f")
    failing(errno.EAGAIN, lambda: reconnecting.lock(directory))  # `first` has it still
    first.close()
    reconnecting.unlock()
    reconnecting.lock(directory)
    reconnecting.rename(ROOT_INODE, b"f", directory, b"f")
    second.close()


def test_a_volume_that_fails_while_it_is_looked_through_is_not_connected(reconnecting: ReconnectingVolume) -> None:
    first, second = Shifted(0), Shifted(1)
    first.make(b"f", b"kept")
    connect(reconnecting, first.volume)
    number = walk(reconnecting, b"f")
    reconnecting.disconnect()

    class Failing(Awaited):
        def lookup(self, *_: Any) -> Any:
            raise OSError(errno.EPIPE, "the helper is gone")

    with pytest.raises(BrokenPipeError):
        connect(reconnecting, Failing(second.volume))
    failing(errno.EIO, lambda: reconnecting.getattr(number))
    reconnecting.check_invariants()
    connect(reconnecting, first.volume)

    assert reconnecting.read(number, 0, 9) == b"kept"


def test_answers_that_are_awaited_come_under_the_kernels_numbers(reconnecting: ReconnectingVolume) -> None:
    first, second = Shifted(0), Shifted(4)
    for shifted in (first, second):
        shifted.make(b"f", b"x")

    async def body() -> None:
        await reconnecting.connect(first.volume)
        number = reconnecting.lookup(ROOT_INODE, b"f").inode
        reconnecting.disconnect()
        awaited = Awaited(second.volume)
        awaited.gate.set()
        await reconnecting.connect(awaited)
        assert (await reconnecting.lookup(ROOT_INODE, b"f")).inode == number
        assert (await reconnecting.getattr(number)).inode == number
        assert await reconnecting.read(number, 0, 9) == b"x"
        made = await reconnecting.mknod(ROOT_INODE, b"g", 0o100644, 0, ME)
        await reconnecting.rename(ROOT_INODE, b"g", ROOT_INODE, b"h")
        assert (await reconnecting.lookup(ROOT_INODE, b"h")).inode == made.inode

    trio.run(body)


def test_a_request_in_flight_when_the_volume_goes_is_eio_and_counts_for_nothing(
    reconnecting: ReconnectingVolume,
) -> None:
    first, second = Shifted(0), Shifted(0)
    first.make(b"f")
    codes: list[int | None] = []

    async def ask(awaited: Awaited) -> None:
        try:
            await reconnecting.lookup(ROOT_INODE, b"f")
        except OSError as error:
            codes.append(error.errno)

    async def body() -> None:
        awaited = Awaited(first.volume)
        await reconnecting.connect(awaited)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, awaited)
            while not awaited.asked:
                await trio.lowlevel.checkpoint()
            reconnecting.disconnect()
            await reconnecting.connect(second.volume)
            awaited.gate.set()

    trio.run(body)
    assert codes == [errno.EIO]
    assert [change.inode for change in reconnecting.disconnect().inodes] == [ROOT_INODE]


def test_what_is_forgotten_while_the_next_volume_is_looked_through_stays_forgotten(
    reconnecting: ReconnectingVolume,
) -> None:
    first, second = Shifted(0), Shifted(2)
    for shifted in (first, second):
        shifted.make(b"f")

    async def body() -> None:
        await reconnecting.connect(first.volume)
        number = reconnecting.lookup(ROOT_INODE, b"f").inode
        reconnecting.disconnect()
        awaited = Awaited(second.volume)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reconnecting.connect, awaited)
            while not awaited.asked:
                await trio.lowlevel.checkpoint()
            reconnecting.forget(number, 1)
            awaited.gate.set()
        assert await reconnecting.getattr(number)

    trio.run(body)
    inner = second.volume.lookup(ROOT_INODE, b"f").inode
    assert second.volume.lookup_counts().get(inner, 0) == 2  # `make`'s and this one


def test_a_chain_of_directories_deeper_than_pythons_stack_is_found_again(reconnecting: ReconnectingVolume) -> None:
    first, second = MemoryVolume(2**20), MemoryVolume(2**20)
    second.mknod(ROOT_INODE, b"filler", 0o100644, 0, ME)
    connect(reconnecting, first)
    at = inner = ROOT_INODE
    for _ in range(1500):
        at = reconnecting.mkdir(at, b"d", 0o755, ME).inode
        inner = second.mkdir(inner, b"d", 0o755, ME).inode

    reconnecting.disconnect()
    connect(reconnecting, second)

    assert reconnecting.mknod(at, b"deep", 0o100644, 0, ME).inode
    assert second.lookup(inner, b"deep").inode


def test_a_file_that_got_another_number_is_asked_for_again_when_its_own_is_free() -> None:
    volume = ReconnectingVolume(keeps_numbers=True)
    first, second = Shifted(0), Shifted(0)
    gone, taken = first.make(b"gone"), second.make(b"taken")
    assert gone == taken
    connect(volume, first.volume)
    walk(volume, b"gone")
    volume.disconnect()
    connect(volume, second.volume)
    number = walk(volume, b"taken")
    assert number != taken
    assert not volume.misnumbered().entries, "the kernel still has a file with its number"
    volume.forget(gone, 1)
    assert [(entry.parent, entry.name) for entry in volume.misnumbered().entries] == [(ROOT_INODE, b"taken")]
    volume.forget(number, 1)
    assert not volume.misnumbered().entries
    assert walk(volume, b"taken") == taken
    volume.check_invariants()


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
