"""SharedVolume: one caller's view of a volume that another thread serves to the kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from protocol.tree import Tree
from protocol.volume_extensions import CacheInvalidation, SnapshotableVolume

__all__ = ["SharedVolume"]

_LOOKING_UP: Final = frozenset({"lookup", "mknod", "mkdir", "symlink", "link", "tmpfile"})


class SharedVolume:
    """Has the methods of `volume`, and holds `lock` during each call, so that each is one step for the serving thread.

    Calls `invalidate`, without the lock, with what a restore or import changed: the kernel may wait for the serving
    thread before it drops a cache.  `lookups` counts the lookups that came through this object and were not forgotten.
    """

    def __init__(
        self,
        volume: SnapshotableVolume,
        lock: AbstractContextManager[Any],
        invalidate: Callable[[CacheInvalidation], None],
    ) -> None:
        self._volume = volume
        self._lock = lock
        self._invalidate = invalidate
        self.lookups: Counter[int] = Counter()

    @contextmanager
    def tree(self, name: str | None = None) -> Iterator[Tree]:
        """See `SnapshotableVolume.tree`: only the ends of the block need the lock."""
        with self._lock:
            state = self._volume.tree(name)
            tree = state.__enter__()
        try:
            yield tree
        finally:
            with self._lock:
                state.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._volume, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                answer = self._settled(name, args, member(*args, **kwargs))
            if isinstance(answer, CacheInvalidation):
                self._invalidate(answer)
            return answer

        return call

    def _settled(self, name: str, args: tuple[Any, ...], answer: Any) -> Any:
        """Count lookups, and copy an answer that later changes of the volume would alter."""
        if name in _LOOKING_UP:
            self.lookups[answer.inode] += 1
        elif name == "forget":
            self.lookups[args[0]] -= args[1]
        elif name == "readdir":
            return list(answer)
        elif name == "read":
            return bytes(answer)
        return answer
