"""Two dicts that load on demand: the entries of a directory of the lower layer, and the table of inodes.

A directory's dict reads the lower directory at the first access.  After that its class is one without overrides, so
that every later access runs at the speed of a plain dict.  The table creates the inode of a number when it is first
asked for.

Threading: any thread may ask; `fill` and `make` hold the state's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from protocol.backends.overlay.inode import OverlayInode

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode


class FilledChildren(dict[bytes, int]):
    """Name to inode number, after loading: a dict without overrides."""

    __slots__ = ("fill",)

    fill: Callable[[], None]


class UnfilledChildren(FilledChildren):
    """Name to inode number, before loading.  Each access calls `fill`, which turns it into a `FilledChildren`."""

    __slots__ = ()

    def __init__(self, fill: Callable[[], None]) -> None:
        super().__init__()
        self.fill = fill

    def become(self, entries: dict[bytes, int]) -> None:
        """Finish loading, with `entries`."""
        self.update(entries)
        self.__class__ = FilledChildren  # type: ignore[assignment]  # last: other threads wait in `fill` until then


def _after_filling(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: UnfilledChildren, *args: Any) -> Any:
        self.fill()
        return method(self, *args)

    return call


for _name in (
    "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__",
    "copy", "get", "items", "keys", "values",
):  # fmt: skip
    setattr(UnfilledChildren, _name, _after_filling(getattr(dict, _name)))


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
