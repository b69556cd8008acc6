"""What a subclass of MemoryVolume may do."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.volume import Caller


def test_a_subclass_replaces_an_operation_after_init() -> None:
    made = []

    class Recording(MemoryVolume):
        def __init__(self) -> None:
            super().__init__()
            mkdir = self.mkdir

            def recorded(parent: int, name: bytes, mode: int, caller: Caller) -> Any:
                made.append(name)
                return mkdir(parent, name, mode, caller)

            self.mkdir = recorded

    Recording().mkdir(1, b"d", 0o755, Caller(0, 0, 0, 0))

    assert made == [b"d"]


def test_a_method_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(TypeError, match="mkdir would be ignored"):

        class Ignored(MemoryVolume):
            def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Any:
                raise AssertionError
