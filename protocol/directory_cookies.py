"""DirectoryCookies: the cookies of a directory, with which a scan continues where it stopped despite changes.

Cookies increase and are never reused.  A removed name leaves a gap; the gaps are closed when they outnumber the names,
so adding and removing cost O(1) amortised, and finding a cookie O(log n).  The object is made when a directory is first
listed, and from then on follows every change.  Most directories are listed and never changed again.  Therefore the
cookies are a range until gaps are closed, and the positions of names are computed at the first removal.

Invariant: `_cookies` increases strictly; `_names[i]` is the name at `_cookies[i]` or None for a gap; `_position`, if
not None, maps exactly the present names to their cookies.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

__all__ = ["FIRST_COOKIE", "DirectoryCookies"]

FIRST_COOKIE: Final = 3  # 1 and 2 are "." and ".."
_GAPS_KEPT: Final = 32
_CHUNK: Final = 128  # names; small, because a reader may not need a whole chunk


class DirectoryCookies:
    """The names of one directory in the order of their cookies."""

    __slots__ = ("_cookies", "_gaps", "_names", "_next", "_position")

    def __init__(self, names: Iterable[bytes]) -> None:
        self._names: list[bytes | None] = [*names]
        self._next = FIRST_COOKIE + len(self._names)
        self._cookies: range | list[int] = range(FIRST_COOKIE, self._next)
        self._position: dict[bytes, int] | None = None
        self._gaps = 0

    @classmethod
    def of(cls, cookies: Iterable[tuple[bytes, int]], following: int) -> DirectoryCookies:
        """Return an object in which each name has the given cookie, and the next one gets `following`."""
        pairs = sorted(cookies, key=lambda pair: pair[1])
        made = cls(name for name, _ in pairs)
        made._cookies = [cookie for _, cookie in pairs]
        made._next = following
        return made

    def __len__(self) -> int:
        return len(self._names) - self._gaps

    @property
    def following(self) -> int:
        """The cookie that the next name gets."""
        return self._next

    def pairs(self) -> Iterator[tuple[bytes, int]]:
        """Yield (name, cookie) of every name, in order."""
        return ((name, cookie) for cookie, name in zip(self._cookies, self._names, strict=True) if name is not None)

    def __contains__(self, name: bytes) -> bool:
        return name in self._positions()

    def _positions(self) -> dict[bytes, int]:
        if self._position is None:
            found = zip(self._names, self._cookies, strict=True)
            self._position = {name: cookie for name, cookie in found if name is not None}
        return self._position

    def add(self, name: bytes) -> None:
        """Add `name`, which must not be present, at the end."""
        if self._position is not None:
            self._position[name] = self._next
        self._names.append(name)
        self._next += 1
        if isinstance(self._cookies, range):
            self._cookies = range(self._cookies.start, self._next)
        else:
            self._cookies.append(self._next - 1)

    def remove(self, name: bytes) -> None:
        """Remove `name`, which must be present."""
        cookie = self._positions().pop(name)
        self._names[bisect_left(self._cookies, cookie)] = None
        self._gaps += 1
        if self._gaps > _GAPS_KEPT and self._gaps > len(self):
            self._close_gaps()

    def _close_gaps(self) -> None:
        kept = [(cookie, name) for cookie, name in zip(self._cookies, self._names, strict=True) if name is not None]
        self._cookies = [cookie for cookie, _ in kept]
        self._names = [name for _, name in kept]
        self._gaps = 0

    def after(self, cookie: int) -> Iterator[tuple[int, bytes]]:
        """Yield (cookie, name) of every name after `cookie`, in order; changes between two steps are seen."""
        while True:
            at = bisect_right(self._cookies, cookie)
            while at < len(self._names) and self._names[at] is None:
                at += 1
            if at >= len(self._names):
                return
            # Continue until closing gaps replaces the lists; then find the position again.
            cookies, names = self._cookies, self._names
            while at < len(names) and cookies is self._cookies:
                name = names[at]
                cookie = cookies[at]
                at += 1
                if name is not None:
                    yield cookie, name

    def chunks(self, cookie: int) -> Iterator[tuple[Sequence[int], Sequence[bytes]]]:
        """Yield cookies and names after `cookie`, in order and in chunks; changes between two chunks are seen."""
        while True:
            at = bisect_right(self._cookies, cookie)
            cookies = self._cookies[at : at + _CHUNK]
            if not cookies:
                return
            cookie = cookies[-1]
            names = self._names[at : at + _CHUNK]
            if self._gaps and None in names:
                cookies = [each for each, name in zip(cookies, names, strict=True) if name is not None]
                names = [name for name in names if name is not None]
            yield cookies, cast("list[bytes]", names)
