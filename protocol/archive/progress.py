"""Progress of writing or checking an archive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["ByteProgress", "no_progress"]

# Called with (bytes of content done, total bytes of content).  An exception from it ends the work.
ByteProgress: TypeAlias = Callable[[int, int], None]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """The default: do nothing."""
