"""A view read by another thread shows one state, while the loop's thread changes everything under it."""

from __future__ import annotations

import hashlib
import random
import stat
import sys
import threading
from collections.abc import Iterator

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.tree import Tree, filled
from protocol.volume import RENAME_EXCHANGE, ROOT_INODE, AttributeChanges, Caller

CALLER = Caller(0, 0)
CHANGES = 2_000
LONG_CHANGES = 12_000


@pytest.fixture(autouse=True)
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def digest(tree: Tree) -> str:
    sums = hashlib.sha256()
    for entry in tree.walk():
        sums.update(repr(entry).encode())
        for chunk in filled(tree.chunks(entry.path)) if entry.is_file else ():
            sums.update(chunk)
    return sums.hexdigest()


class Reader(threading.Thread):
    """Digests `tree` over and over until it is told to stop."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree = tree
        self._stopping = threading.Event()
        self.digests: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.digests.append(digest(self._tree))
        except BaseException as error:  # re-raised by `stop`
            self.error = error

    def stop(self) -> list[str]:
        self._stopping.set()
        self.join()
        if self.error is not None:
            raise self.error
        return self.digests


class Vandal:
    """Changes a volume at random, through the calls that an engine makes."""

    def __init__(self, volume: MemoryVolume, seed: int) -> None:
        self.volume = volume
        self.random = random.Random(seed)
        self.snapshots: list[str] = []

    def directories(self) -> list[int]:
        found = [ROOT_INODE]
        for number in found:
            entries = self.volume.readdir(number, 2)
            found += [entry.inode for entry in entries if stat.S_ISDIR(entry.mode)]
        return found

    def step(self) -> None:
        pick = self.random.choice
        kind = self.random.random()
        try:
            if kind < 0.06:
                self.around_snapshots()
            else:
                directories = self.directories()
                self.change(pick(directories), b"%d" % self.random.randrange(12), pick(directories))
        except OSError:
            pass  # not possible here and now

    def around_snapshots(self) -> None:
        volume = self.volume
        kind = self.random.randrange(4)
        if kind == 0 and self.snapshots:
            volume.drop_snapshot(self.snapshots.pop(self.random.randrange(len(self.snapshots))))
        elif kind == 1 and self.snapshots:
            volume.restore_snapshot(self.random.choice(self.snapshots))
        elif kind == 2 and self.snapshots:
            with volume.tree(self.random.choice(self.snapshots)) as tree:
                volume.import_tree(tree, replace=False, paths=[b"%d" % self.random.randrange(12)])
        else:
            name = f"s{self.random.getrandbits(60)}"
            volume.take_snapshot(name)
            self.snapshots.append(name)

    def change(self, parent: int, name: bytes, other: int) -> None:
        volume, kind = self.volume, self.random.randrange(10)
        if kind == 0:
            volume.forget(volume.mkdir(parent, name, 0o755, CALLER).inode, 1)
        elif kind == 1:
            volume.forget(volume.mknod(parent, name, stat.S_IFREG | 0o644, 0, CALLER).inode, 1)
        elif kind == 2:
            volume.rename(
                parent, name, other, b"%d" % self.random.randrange(12), self.random.choice((0, RENAME_EXCHANGE))
            )
        else:
            inode = volume.lookup(parent, name)
            number, is_dir = inode.inode, inode.is_dir
            volume.forget(number, 1)
            if kind == 3:
                (volume.rmdir if is_dir else volume.unlink)(parent, name)
            elif kind == 4:
                volume.setattr(number, AttributeChanges(mode=self.random.randrange(0o1000)))
            elif kind == 5:
                volume.setxattr(number, b"user.x", self.random.randbytes(3), 0)
            elif kind == 6:
                volume.setattr(number, AttributeChanges(size=self.random.randrange(20_000)))
            elif kind == 7 and not is_dir:
                volume.forget(volume.link(number, other, b"%d" % self.random.randrange(12)).inode, 1)
            else:
                volume.write(
                    number, self.random.randrange(140_000), self.random.randbytes(self.random.randrange(1, 9_000))
                )


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(3))
def test_a_view_in_another_thread_never_changes(seed: int, runs_long: bool) -> None:
    changes = LONG_CHANGES if runs_long else CHANGES
    volume = MemoryVolume()
    vandal = Vandal(volume, seed)
    for _ in range(400):
        vandal.step()
    volume.take_snapshot("then")
    for _ in range(100):
        vandal.step()
    with volume.tree("then") as then, volume.tree() as now:
        expected = digest(then), digest(now)
        readers = Reader(then), Reader(now)
        for reader in readers:
            reader.start()
        try:
            for _ in range(changes // 3):
                vandal.step()
            volume.drop_snapshot("then")  # what is being read stays until it is closed
            for _ in range(changes // 3):
                vandal.step()
        finally:
            digests = [reader.stop() for reader in readers]
        for reader_digests, wanted in zip(digests, expected, strict=True):
            assert len(reader_digests) > 1
            assert set(reader_digests) == {wanted}
    volume.check_invariants()
