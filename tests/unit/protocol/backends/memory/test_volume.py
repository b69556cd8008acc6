"""What a subclass of MemoryVolume may do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.volume import Caller
from tests.support.journals import JournalInMemory


def test_a_subclass_replaces_a_call_and_uses_the_original() -> None:
    made = []

    class Recording(MemoryVolume):
        def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Any:
            made.append(name)
            return super().mkdir(parent, name, mode, caller)

    Recording().mkdir(1, b"d", 0o755, Caller(0, 0, 0, 0))

    assert made == [b"d"]


@pytest.mark.parametrize("kind", [MemoryVolume, OverlayVolume])
def test_no_method_is_assigned_to_an_instance(kind: type[MemoryVolume], tmp_path: Path) -> None:
    volume = MemoryVolume() if kind is MemoryVolume else OverlayVolume(os.fsencode(tmp_path))
    journal = JournalInMemory()
    journal.keep(volume)
    volume.share_limit(None)
    volume.connect(is_known=True)
    assert {name for name in vars(volume) if callable(getattr(kind, name, None))} == set()
