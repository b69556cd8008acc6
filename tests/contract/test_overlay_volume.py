"""The overlay backend keeps the contract of protocol.volume, over nothing and over what it copies up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.backends.overlay import OverlayVolume
from protocol.testing import MakeVolume, VolumeContract
from protocol.volume import SnapshotableVolume, Volume


class TestOverlayVolume(VolumeContract):
    @pytest.fixture
    def volume(self, tmp_path: Path) -> Iterator[MakeVolume]:
        made: list[OverlayVolume] = []
        numbers = itertools.count()

        def make(
            *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
        ) -> Volume:
            lower = tmp_path / f"lower{next(numbers)}"
            lower.mkdir(mode=0o755)
            volume = OverlayVolume(str(lower), max_bytes, max_inodes, clock=clock or time.time_ns)
            made.append(volume)
            return volume

        yield make
        for volume in made:
            volume.check_invariants()


def test_an_overlay_has_all_methods_of_its_protocols(tmp_path: Path) -> None:
    assert isinstance(OverlayVolume(str(tmp_path)), Volume)
    assert isinstance(OverlayVolume(str(tmp_path)), SnapshotableVolume)
