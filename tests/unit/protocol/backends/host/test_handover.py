"""A host volume is handed over while it is served, or continued after its process died: the kernel notices nothing."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.host import HostVolume, repeated_requests
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


RESEND = 1 << 63
XATTR_CREATE = 1


class Served:
    """A directory that several processes serve to one kernel, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = SharedLog.create()
        self.volume = HostVolume(os.fsencode(directory))
        self.volume.keep_log(self.log, is_known=False)

    def restart(self) -> HostVolume:
        self.volume.check_invariants()
        self.volume.close()
        self.volume = HostVolume(os.fsencode(self.directory))
        self.volume.keep_log(SharedLog(self.log.descriptor), is_known=True)
        self.volume.check_invariants()
        return self.volume

    def request(self, unique: int, call: Callable[[HostVolume], Any]) -> Any:
        self.volume.answering(unique)
        try:
            return call(self.volume)
        finally:
            self.volume.answering(0)

    def dies_after(self, call: Callable[[HostVolume], Any]) -> None:
        """Execute the request 7; the process dies before it has recorded the result."""
        self.request(7, call)
        slot = SharedLog(self.log.descriptor).slot
        newest = slot[repeated_requests._NEWEST]
        slot[newest * repeated_requests._ENTRY_WORDS + repeated_requests._IS_DONE] = 0
        self.restart()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "dir" / "below").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "dir" / f"f{number}").write_bytes(b"%d" % number)
    (tmp_path / "file").write_bytes(b"content")
    made = Served(tmp_path)
    yield made
    made.volume.check_invariants()
    made.volume.close()
    os.close(made.log.descriptor)


def find(volume: HostVolume, *path: bytes) -> int:
    at = ROOT_INODE
    for name in path:
        at = volume.lookup(at, name).inode
    return at


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_inodes_and_listings_are_found_again(served: Served, is_rewritten: bool) -> None:
    directory = find(served.volume, b"dir")
    number = find(served.volume, b"dir", b"f3")
    listed = list(served.volume.readdir(directory, 0))
    for _ in range(2):
        if is_rewritten:
            known = served.volume.table.known
            assert known is not None
            known.rewrite()
        volume = served.restart()
        assert volume.read(number, 0, 10) == b"3"
        assert list(volume.readdir(directory, listed[5].cookie)) == listed[6:]
        volume.rename(ROOT_INODE, b"dir", ROOT_INODE, b"moved")
        assert served.restart().path_of(number) == b"moved/f3"
        served.volume.rename(ROOT_INODE, b"moved", ROOT_INODE, b"dir")
    served.volume.forget(number, 2)
    assert served.restart().lookup(directory, b"f3").inode == number


def test_what_cannot_be_found_is_stale(served: Served) -> None:
    removed, nameless = find(served.volume, b"dir", b"f1"), find(served.volume, b"dir", b"f2")
    served.volume.unlink(find(served.volume, b"dir"), b"f2")
    assert served.volume.read(nameless, 0, 1) == b"2"
    (served.directory / "dir" / "f1").unlink()
    volume = served.restart()
    for number in (removed, nameless):
        with pytest.raises(OSError, match=r"(?i)stale") as raised:
            volume.read(number, 0, 1)
        assert raised.value.errno == errno.ESTALE


@pytest.mark.parametrize("dies_as", ["nameless", "lost"])
def test_no_other_file_gets_the_number_of_a_lost_one_until_the_kernel_forgets_it(served: Served, dies_as: str) -> None:
    """The host gives a removed file's inode number to the next file; a program that has the first open is not in it."""
    directory = find(served.volume, b"dir")
    number = find(served.volume, b"dir", b"f1")
    if dies_as == "nameless":
        served.volume.unlink(directory, b"f1")
    else:
        (served.directory / "dir" / "f1").unlink()
        served.volume.table.lose(served.volume.node(number))
    for _ in range(2):
        volume = served.restart()
        key = (served.directory.stat().st_dev, number)
        seen = os.stat_result((stat.S_IFREG | 0o644, number, key[0], 1, 0, 0, 0, 0, 0, 0))
        again = volume.table.enter(volume.node(directory), b"new", seen)
        assert again.number != number
        with pytest.raises(OSError, match=r"(?i)stale"):
            volume.write(number, 0, b"x")
    volume.forget(number, 1)
    assert volume.table.get(number) is None
    assert served.restart().table.get(number) is None


def test_another_directory_is_refused(served: Served, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    volume = HostVolume(os.fsencode(tmp_path / "other"))
    with pytest.raises(OSError, match="another directory"):
        volume.keep_log(SharedLog(served.log.descriptor), is_known=True)
    volume.close()


def xattr(volume: HostVolume, flags: int = XATTR_CREATE) -> None:
    volume.setxattr(find(volume, b"file"), b"user.new", b"value", flags)


CALLS: dict[str, Callable[[HostVolume], Any]] = {
    "mkdir": lambda volume: volume.mkdir(ROOT_INODE, b"new", 0o755, SUPERUSER),
    "mknod": lambda volume: volume.mknod(ROOT_INODE, b"new", stat.S_IFREG | 0o644, 0, SUPERUSER),
    "fifo": lambda volume: volume.mknod(ROOT_INODE, b"new", stat.S_IFIFO | 0o644, 0, SUPERUSER),
    "symlink": lambda volume: volume.symlink(ROOT_INODE, b"new", b"target", SUPERUSER),
    "link": lambda volume: volume.link(find(volume, b"file"), ROOT_INODE, b"new"),
    "unlink": lambda volume: volume.unlink(ROOT_INODE, b"file"),
    "rmdir": lambda volume: volume.rmdir(find(volume, b"dir"), b"below"),
    "rename": lambda volume: volume.rename(ROOT_INODE, b"file", find(volume, b"dir"), b"f1"),
    "exchange": lambda volume: volume.rename(ROOT_INODE, b"file", ROOT_INODE, b"dir", RENAME_EXCHANGE),
    "setxattr": xattr,
    "write": lambda volume: volume.write(find(volume, b"file"), 3, b"x"),
}


def shown(root: Path) -> list[tuple[str, int, int]]:
    return sorted((str(each), each.lstat().st_mode, each.lstat().st_ino) for each in root.rglob("*"))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_request_that_comes_again_is_executed_once(served: Served, name: str, is_recorded: bool) -> None:
    call = CALLS[name]
    if is_recorded:
        served.request(7, call)
        served.restart()
    else:
        served.dies_after(call)
    expected = shown(served.directory)
    served.restart()  # a second death, before the request comes
    served.request(7 | RESEND, call)
    assert shown(served.directory) == expected


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (b"", b"record"),
        (b"rec", b"record"),  # killed in the middle
        (b"record", b"record"),
        (b"other", b"otherrecord"),
        (b"otherrecord", b"otherrecord"),
        (b"recordother", b"recordother"),
    ],
)
def test_an_append_that_comes_again_adds_what_is_not_there(served: Served, there: bytes, expected: bytes) -> None:
    def append(volume: HostVolume) -> tuple[int, int]:
        return volume.append(find(volume, b"file"), memoryview(b"record"))

    served.dies_after(append)
    (served.directory / "file").write_bytes(b"content" + there)
    for _ in range(2):
        assert served.request(7 | RESEND, append) == (6, 7 + len(expected))
        assert (served.directory / "file").read_bytes() == b"content" + expected
        served.restart()


@pytest.mark.parametrize("name", ["mkdir", "mknod", "symlink", "link", "setxattr"])
def test_a_call_that_fails_for_another_reason_fails_again(served: Served, name: str) -> None:
    (served.directory / "new").mkdir()
    os.setxattr(served.directory / "file", "user.new", b"value")
    for unique in (7, 7 | RESEND):
        with pytest.raises(FileExistsError):
            served.request(unique, CALLS[name])
        served.restart()
    with pytest.raises(FileExistsError):
        served.request(9, CALLS[name])


def test_a_name_that_another_program_made_meanwhile_is_not_removed(served: Served) -> None:
    served.dies_after(CALLS["unlink"])
    (served.directory / "other").write_bytes(b"")
    (served.directory / "file").write_bytes(b"another file")
    served.request(7 | RESEND, CALLS["unlink"])
    assert (served.directory / "file").read_bytes() == b"another file"
