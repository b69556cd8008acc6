"""Opens a ZIP archive of this host as the lower layer of an overlay."""

from __future__ import annotations

import errno
import logging
from typing import Final

from protocol.archive.mounted import MountedArchive
from protocol.backends.overlay.tree_lower import TreeLower

_logger = logging.getLogger(__name__)
_CACHE_BYTES: Final = 32 << 20
_CACHE_SHARE: Final = 8  # of --max-memory, at most
_INDEX_SHARE: Final = 2


def open_archive_below(path: str, max_memory: int) -> TreeLower:
    """Open the archive at `path`.  ArchiveError; OSError, ENOMEM if its index needs half of `max_memory` or more."""

    def reserve(count: int) -> None:
        if count > max_memory // _INDEX_SHARE:
            advice = f"its index takes {count >> 20} MiB for a moment: give the workspace more --max-memory"
            raise OSError(errno.ENOMEM, advice, path)

    mounted = MountedArchive(path, reserve=reserve, cache_bytes=min(_CACHE_BYTES, max_memory // _CACHE_SHARE))
    noticed: set[str] = set()

    def check() -> None:
        problem = mounted.problem()
        if problem is not None and problem not in noticed:
            noticed.add(problem)
            _logger.warning("the archive below the overlay %s", problem, extra={"path": path})

    return TreeLower(
        mounted,
        path,
        fingerprint=mounted.fingerprint,
        memory_bytes=mounted.memory_bytes,
        check=check,
        close=mounted.close,
    )
