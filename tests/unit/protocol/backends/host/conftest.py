"""A volume over a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.backends.host import HostVolume


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """The directory of `volume`."""
    place = tmp_path / "inside"
    place.mkdir()
    return place


@pytest.fixture
def volume(inside: Path) -> Iterator[HostVolume]:
    volume = HostVolume(os.fsencode(inside))
    yield volume
    volume.check_invariants()
    volume.close()
