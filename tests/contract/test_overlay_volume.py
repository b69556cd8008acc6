"""The overlay backend keeps the contract of protocol.volume, over an empty directory and over what is there already."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.inode import LowerContent, OverlayInode
from protocol.linux.portable import proc_path
from protocol.testing import Clock, Driver, MakeVolume, VolumeContract
from protocol.testing.volume.driver import ALICE, fails
from protocol.volume import Caller, Volume
from protocol.volume_extensions import SnapshotableVolume
from tests.contract.conftest import checked
from tests.support.lower_layers import Layer, make, opened


class TestOverlayVolume(VolumeContract):
    @pytest.fixture
    def volume(self, tmp_path: Path) -> Iterator[MakeVolume]:
        numbers = itertools.count()

        def over(
            *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
        ) -> Volume:
            lower = tmp_path / f"lower{next(numbers)}"
            lower.mkdir(mode=0o755)
            return OverlayVolume(str(lower), max_bytes, max_inodes, clock=clock or time.time_ns)

        with checked(over) as make:
            yield make


class Below(Driver):
    """Puts each file, directory and symlink that it makes into the directory below: as if it had been there before.

    What is shown of it stays as it was made, the virtual clock's times too; its content is below from then on.
    """

    def file(self, path: bytes, data: bytes = b"", mode: int = 0o644, caller: Caller = ALICE) -> int:
        return self._below(path, super().file(path, data, mode, caller))

    def directory(self, path: bytes, mode: int = 0o755, caller: Caller = ALICE) -> int:
        return self._below(path, super().directory(path, mode, caller))

    def symlink(self, path: bytes, target: bytes) -> int:
        return self._below(path, super().symlink(path, target))

    def _below(self, path: bytes, number: int) -> int:
        volume = self.volume
        assert isinstance(volume, OverlayVolume)
        state = volume._overlay
        made = state.inodes[number]
        place = os.path.join(os.readlink(proc_path(volume.directory.fd)), path)
        if not os.path.isdir(os.path.dirname(place)) or os.path.lexists(place):
            return number  # its directory is above alone, or something else was there
        if made.is_dir:
            os.mkdir(place)
        elif made.target is not None:
            os.symlink(made.target, place)
        else:
            Path(os.fsdecode(place)).write_bytes(self.read(number))
        seen = volume.lower.stat(path)
        there = state._loaded(number, path, seen)
        state.ledger.leave(made)
        for name in SHOWN:
            setattr(there, name, getattr(made, name))
        state.pages -= made.pages
        state.ledger.enter_new(there)
        state.table[number] = there
        state.table.below += 1
        return number


# All of an inode but what it holds.
SHOWN = (
    "mode", "nlink", "uid", "gid", "size", "atime_ns", "mtime_ns", "ctime_ns", "birth_ns", "epoch", "born",
    "generation", "links", "xattrs",
)  # fmt: skip


@pytest.mark.extended
class TestOverlayVolumeOverWhatIsThere(TestOverlayVolume):
    @pytest.fixture
    def fs(self, volume: MakeVolume, clock: Clock) -> Driver:
        return Below(volume(clock=clock))

    def test_it_is_tried_on_what_is_below(self, fs: Driver) -> None:
        fs.directory(b"d")
        number = fs.file(b"d/f", b"data")
        assert fs.read(number) == b"data"
        assert isinstance(fs.volume, OverlayVolume)
        assert fs.volume.usage().used_bytes == 0
        os.unlink(b"d/f", dir_fd=fs.volume.directory.fd)
        fs.volume.lower.close()
        with fails(errno.ESTALE):
            fs.read(number)


class InLayers(Driver):
    """Puts the content of each file that it makes into an archive or a stored snapshot: as if it came from there."""

    def __init__(self, volume: Volume, layer: Layer, place: Path) -> None:
        super().__init__(volume)
        self._layer = layer
        self._place = place
        self._count = 0

    def file(self, path: bytes, data: bytes = b"", mode: int = 0o644, caller: Caller = ALICE) -> int:
        number = super().file(path, data, mode, caller)
        volume = self.volume
        assert isinstance(volume, OverlayVolume)
        state = volume._overlay
        made = state.inodes[number]
        if not made.size:
            return number
        self._count += 1
        below, place = self._place / f"below{self._count}", self._place / f"layer{self._count}.zip"
        below.mkdir()
        (below / "f").write_bytes(self.read(number))
        make(self._layer, below, place)
        lower = opened(self._layer, place, cache_bytes=1 << 20)
        there = OverlayInode(number, made.mode, made.uid, made.gid, 0, 0)
        there.lower = lower.file(b"f", lower.stat(b"f"))
        there.content = LowerContent(there.lower, state.ledger)
        state.ledger.leave(made)
        for name in SHOWN:
            setattr(there, name, getattr(made, name))
        state.pages -= made.pages
        state.ledger.enter_new(there)
        state.table[number] = there
        state.table.below += 1
        return number


@pytest.mark.extended
class TestOverlayVolumeOverLayers(TestOverlayVolume):
    """Over an archive or a stored snapshot, whose root is empty, and with the content of each file in another one."""

    @pytest.fixture
    def volume(self, layer: Layer, tmp_path: Path) -> Iterator[MakeVolume]:
        below, place = tmp_path / "empty", tmp_path / "empty.zip"
        below.mkdir(mode=0o755)
        make(layer, below, place)
        made: list[OverlayVolume] = []

        def over(
            *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
        ) -> Volume:
            made.append(OverlayVolume(opened(layer, place), max_bytes, max_inodes, clock=clock or time.time_ns))
            return made[-1]

        yield over
        for volume in made:
            volume.check_invariants()
            volume.lower.close()

    @pytest.fixture
    def fs(self, volume: MakeVolume, clock: Clock, layer: Layer, tmp_path: Path) -> Driver:
        return InLayers(volume(clock=clock), layer, tmp_path)

    def test_content_comes_from_a_layer(self, fs: Driver) -> None:
        number = fs.file(b"f", b"data")
        assert fs.read(number) == b"data"
        assert isinstance(fs.volume, OverlayVolume)
        assert fs.volume.usage().used_bytes == 0


def test_an_overlay_has_all_methods_of_its_protocols(tmp_path: Path) -> None:
    assert isinstance(OverlayVolume(str(tmp_path)), Volume)
    assert isinstance(OverlayVolume(str(tmp_path)), SnapshotableVolume)
