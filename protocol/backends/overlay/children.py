"""Two dicts that load on demand: the entries of a directory of the lower layer, and the table of inodes.

A directory's dict reads the lower directory at the first access.  After that its class is one without overrides, so
that every later access runs at the speed of a plain dict.  The table creates the inode of a number when it is first
asked for.

Threading: any thread may ask; `fill` and `make` hold the state's lock.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, Any

from protocol.backends.overlay.inode import OverlayInode

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode

__all__ = ["FilledChildren", "InodeTable", "UnfilledChildren"]


class FilledChildren(dict[bytes, int]):
    """Name to inode number, after loading."""

    __slots__ = ("fill",)

    fill: Callable[[], None]


class UnfilledChildren(dict[bytes, int]):
    """Name to inode number, before loading.  `fill` turns it into a `FilledChildren`."""

    __slots__ = ("fill",)

    fill: Callable[[], None]

    def __init__(self, fill: Callable[[], None]) -> None:
        super().__init__()
        self.fill = fill

    def become(self, entries: dict[bytes, int]) -> None:
        """Finish loading, with `entries`."""
        dict.update(self, entries)
        self.__class__ = FilledChildren  # type: ignore[assignment]

    def get(self, name: bytes, default: Any = None) -> Any:
        self.fill()
        return dict.get(self, name, default)

    def __getitem__(self, name: bytes) -> int:
        self.fill()
        return dict.__getitem__(self, name)

    def __contains__(self, name: object) -> bool:
        self.fill()
        return dict.__contains__(self, name)

    def __iter__(self) -> Iterator[bytes]:
        self.fill()
        return dict.__iter__(self)

    def __len__(self) -> int:
        self.fill()
        return dict.__len__(self)

    def __setitem__(self, name: bytes, number: int) -> None:
        self.fill()
        dict.__setitem__(self, name, number)

    def __delitem__(self, name: bytes) -> None:
        self.fill()
        dict.__delitem__(self, name)

    def keys(self) -> KeysView[bytes]:  # type: ignore[override]  # dict_keys is one
        self.fill()
        return dict.keys(self)

    def values(self) -> ValuesView[int]:  # type: ignore[override]
        self.fill()
        return dict.values(self)

    def items(self) -> ItemsView[bytes, int]:  # type: ignore[override]
        self.fill()
        return dict.items(self)

    def copy(self) -> dict[bytes, int]:
        self.fill()
        return dict.copy(self)


class InodeTable(dict[int, "Inode"]):
    """Inode number to inode.  `make` creates the inode of an assigned number.  KeyError, FileNotFoundError.

    Its length counts the inodes held in memory as changes, not those of the lower layer.
    """

    __slots__ = ("below", "make")

    def __init__(self, inodes: dict[int, Inode], make: Callable[[int], Inode]) -> None:
        super().__init__(inodes)
        self.make = make
        self.below = 0

    def __missing__(self, number: int) -> Inode:
        return self.make(number)

    def __delitem__(self, number: int) -> None:
        if isinstance(dict.__getitem__(self, number), OverlayInode):
            self.below -= 1
        dict.__delitem__(self, number)

    def __len__(self) -> int:
        return dict.__len__(self) - self.below

    def get(self, number: int, default: Any = None) -> Any:
        found = dict.get(self, number)
        if found is not None:
            return found
        try:
            return self.make(number)
        except (KeyError, FileNotFoundError):
            return default

    def loaded(self, number: int) -> Inode | None:
        """The inode, if it was loaded."""
        return dict.get(self, number)
