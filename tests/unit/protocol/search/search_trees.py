"""Trees that a search is watched on: what it looks at, by which way, and what it does when that is gone."""

from __future__ import annotations

from protocol.tree import TreeEntry
from tests.support.trees import DictTree

__all__ = ["DeepTree", "FadingTree", "WatchedTree"]


class WatchedTree(DictTree):
    """Remembers which directories were listed and which files read."""

    def __init__(self, items: dict[bytes, bytes | str | tuple[TreeEntry, bytes] | None]) -> None:
        super().__init__(items)
        self.listed: list[bytes] = []
        self.was_read: list[bytes] = []

    def children(self, path: bytes) -> list[bytes]:
        self.listed.append(path)
        return super().children(path)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        self.was_read.append(path)
        return super().read(path, offset, size)


class DeepTree(DictTree):
    """One file, very deep; listing it is one look-up."""

    def __init__(self, path: bytes) -> None:
        super().__init__({path: b""})
        self.below = {
            b"/".join(path.split(b"/")[:depth]): path.split(b"/")[depth] for depth in range(path.count(b"/") + 1)
        }

    def children(self, path: bytes) -> list[bytes]:
        return [self.below[path]]


class FadingTree(DictTree):
    """As a live directory may be: what was listed is gone when it is looked at."""

    def __init__(self, gone: bytes, items: dict[bytes, bytes | str | tuple[TreeEntry, bytes] | None]) -> None:
        super().__init__(items)
        self.gone = gone

    def entry(self, path: bytes) -> TreeEntry:
        if path == self.gone:
            raise FileNotFoundError(2, "gone", path)
        return super().entry(path)
