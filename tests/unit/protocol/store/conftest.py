"""A store, and a directory beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store; at the end it is whole."""
    with Store(tmp_path / "store") as opened:
        yield opened
        assert opened.check().damages == ()
