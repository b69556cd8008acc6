"""How far the writing or the checking of an archive is, for whom it may concern."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["ByteProgress", "no_progress"]

# Called with (bytes of content done, bytes of content in all).  What it raises ends the work.
ByteProgress: TypeAlias = Callable[[int, int], None]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Nobody wants to hear of it."""
