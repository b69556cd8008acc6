"""What the tests of single modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty directory."""
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def volume() -> MemoryVolume:
    return MemoryVolume()
