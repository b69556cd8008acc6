"""Volumes for the contract suites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protocol.testing import MakeVolume


@contextmanager
def checked(make: MakeVolume) -> Iterator[MakeVolume]:
    """Yield `make`; at the end of the block, check the invariants of the volumes that it made."""
    made: list[Any] = []

    def make_and_keep(**given: Any) -> Any:
        made.append(make(**given))
        return made[-1]

    yield make_and_keep
    for volume in made:
        volume.check_invariants()
