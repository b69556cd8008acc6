"""A host volume is handed over to another one while it is served: the other has all that the kernel knows."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.backends.host import HostVolume
from protocol.linux.shared_log import SharedLog
from protocol.volume import RENAME_EXCHANGE, ROOT_INODE, SUPERUSER

FILE = stat.S_IFREG | 0o644


class Chain:
    """A directory that one process after the other serves to one kernel."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lookups: dict[int, int] = {}  # of the kernel
        self.logs: list[SharedLog] = []
        self.volume = self.opened()

    def opened(self) -> HostVolume:
        return HostVolume(os.fsencode(self.directory))

    def keep(self, volume: HostVolume) -> None:
        """Record in a log what a replacement needs, as a keeper has it."""
        self.logs.append(SharedLog.create())
        volume.keep_log(self.logs[-1], is_known=False)

    def find(self, *path: bytes) -> int:
        at = ROOT_INODE
        for name in path:
            at = self.volume.lookup(at, name).inode
            self.lookups[at] = self.lookups.get(at, 0) + 1
        return at

    def forget(self, number: int) -> None:
        self.volume.forget(number, self.lookups.pop(number))

    def hand_over(self, *meanwhile: Callable[[], object], is_kept: bool = False) -> HostVolume:
        """Hand over while the calls `meanwhile` are made."""
        old, new = self.volume, self.opened()
        if is_kept:
            self.keep(new)
        given, taken = old.handing_over(), new.taking_over()
        assert given.below == taken.below
        taken.read(-1, given.log_fd(), given.start)
        taken.follow(given.position().offset)
        for call in meanwhile:
            call()
            taken.follow(given.position().offset)
        for number, descriptor in given.files():
            taken.take_files({number: os.dup(descriptor)})
        taken.complete(given.rest())
        old.check_invariants()
        new.check_invariants()
        for number in self.lookups:
            assert seen(new, number) == seen(old, number), number
        given.end()
        old.check_invariants()
        old.close()
        self.volume = new
        return new

    def close(self) -> None:
        for number in list(self.lookups):
            self.forget(number)
        self.volume.check_invariants()
        self.volume.close()
        for log in self.logs:
            os.close(log.descriptor)


def seen(volume: HostVolume, number: int) -> object:
    try:
        found = volume.getattr(number)
    except OSError as error:
        return error.errno
    return found.inode, found.mode, found.size, found.nlink, found.mtime_ns, volume.path_of(number)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    (tmp_path / "dir" / "below").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "dir" / f"f{number}").write_bytes(b"%d" % number)
    made = Chain(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("is_kept", [False, True])
def test_inodes_listings_and_files_without_names_go_on(chain: Chain, is_kept: bool) -> None:
    if is_kept:
        chain.keep(chain.volume)
    directory, file, gone = (chain.find(b"dir"), chain.find(b"dir", b"f3"), chain.find(b"dir", b"f4"))
    late = chain.find(b"dir", b"f5")
    listed = list(chain.volume.readdir(directory, 0))
    chain.volume.unlink(directory, b"f4")
    temporary = chain.volume.tmpfile(directory, 0o600, SUPERUSER).inode
    chain.lookups[temporary] = 1
    chain.volume.write(temporary, 0, b"temporary")
    for _ in range(2):
        volume = chain.hand_over(lambda: chain.find(b"dir", b"below"), is_kept=is_kept)
        assert volume.read(file, 0, 10) == b"3"
        assert volume.read(gone, 0, 10) == b"4"
        assert volume.read(temporary, 0, 10) == b"temporary"
        assert [entry.name for entry in volume.readdir(directory, listed[5].cookie)] == [
            entry.name for entry in listed[6:] if entry.name != b"f4"
        ]
    chain.hand_over(lambda: chain.volume.rename(directory, b"f5", ROOT_INODE, b"moved"), is_kept=is_kept)
    chain.volume.write(late, 1, b"!")
    assert (chain.directory / "moved").read_bytes() == b"5!"
    chain.volume.link(temporary, ROOT_INODE, b"named")
    chain.lookups[temporary] += 1
    assert (chain.directory / "named").read_bytes() == b"temporary"


def test_a_file_that_another_program_removed_stays_open(chain: Chain) -> None:
    number = chain.find(b"dir", b"f7")
    assert chain.volume.read(number, 0, 10) == b"7"
    (chain.directory / "dir" / "f7").unlink()
    assert chain.hand_over().read(number, 0, 10) == b"7"


def test_an_inode_that_the_kernel_forgot_is_not_kept(chain: Chain) -> None:
    number, other = chain.find(b"dir", b"f3"), chain.find(b"dir", b"f4")
    chain.volume.unlink(chain.find(b"dir"), b"f4")
    volume = chain.hand_over(lambda: chain.forget(number))
    assert not volume.is_orphan(number)
    assert volume.is_orphan(other)
    chain.forget(other)
    assert not volume.is_orphan(other)


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_during_handovers(chain: Chain, seed: int) -> None:
    choice = random.Random(seed)
    chain.keep(chain.volume)
    directories = [ROOT_INODE, chain.find(b"dir"), chain.find(b"dir", b"below")]

    def name() -> bytes:
        return b"f%d" % choice.randrange(12)

    def change() -> None:
        volume = chain.volume
        for _ in range(15):
            above = choice.choice(directories)
            with suppress(OSError, IndexError):
                match choice.randrange(8):
                    case 0:
                        made = volume.mknod(above, name(), FILE, 0, SUPERUSER).inode
                        chain.lookups[made] = chain.lookups.get(made, 0) + 1
                    case 1:
                        volume.unlink(above, name())
                    case 2:
                        volume.rename(above, name(), choice.choice(directories), name())
                    case 3:
                        volume.rename(above, name(), choice.choice(directories), name(), RENAME_EXCHANGE)
                    case 4:
                        found = volume.link(choice.choice(list(chain.lookups)), above, name()).inode
                        chain.lookups[found] = chain.lookups.get(found, 0) + 1
                    case 5:
                        chain.forget(choice.choice([each for each in chain.lookups if each not in directories]))
                    case 6:
                        list(volume.readdir(above, 0))
                    case _:
                        found = volume.lookup(above, name()).inode
                        chain.lookups[found] = chain.lookups.get(found, 0) + 1

    for turn in range(8):
        change()
        chain.hand_over(change, change, is_kept=turn % 2 == 0)
