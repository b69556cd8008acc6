"""DirectoryCookies: the cookies of a directory, so that a scan goes on where it stopped whatever changed meanwhile.

Cookies only ever increase and are never given twice.  A removed name leaves a gap that is closed once
gaps outnumber names, so adding and removing cost O(1) amortised, and finding a place O(log n).
Made when a directory is first listed; from then on it follows every change.  Most directories are listed and
never changed again: until gaps are closed the cookies are a range, and where each name is is found out when the
first is removed.

Invariant: `_cookies` increases strictly; `_names[i]` is the name at `_cookies[i]` or None for a gap;
`_position`, if there is one, has exactly the names that are there, with their cookies.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

__all__ = ["FIRST_COOKIE", "DirectoryCookies"]

FIRST_COOKIE: Final = 3  # 1 and 2 stand for "." and ".."
_GAPS_KEPT: Final = 32
_CHUNK: Final = 128  # names; what a reader does not take of a chunk was put together for nothing


class DirectoryCookies:
    """The names of one directory in the order of their cookies."""

    __slots__ = ("_cookies", "_gaps", "_names", "_next", "_position")

    def __init__(self, names: Iterable[bytes]) -> None:
        self._names: list[bytes | None] = [*names]
        self._next = FIRST_COOKIE + len(self._names)
        self._cookies: range | list[int] = range(FIRST_COOKIE, self._next)
        self._position: dict[bytes, int] | None = None
        self._gaps = 0

    def __len__(self) -> int:
        return len(self._names) - self._gaps

    def __contains__(self, name: bytes) -> bool:
        return name in self._positions()

    def _positions(self) -> dict[bytes, int]:
        if self._position is None:
            found = zip(self._names, self._cookies, strict=True)
            self._position = {name: cookie for name, cookie in found if name is not None}
        return self._position

    def add(self, name: bytes) -> None:
        """Put `name` at the end.  It must not be there."""
        if self._position is not None:
            self._position[name] = self._next
        self._names.append(name)
        self._next += 1
        if isinstance(self._cookies, range):
            self._cookies = range(self._cookies.start, self._next)
        else:
            self._cookies.append(self._next - 1)

    def remove(self, name: bytes) -> None:
        """Take `name` out.  It must be there."""
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
        """(cookie, name) of every name after `cookie`, in order, as they are when asked for one by one."""
        while True:
            at = bisect_right(self._cookies, cookie)
            while at < len(self._names) and self._names[at] is None:
                at += 1
            if at >= len(self._names):
                return
            # Runs until a change in between moves things; then the place is looked up again.
            cookies, names = self._cookies, self._names
            while at < len(names) and cookies is self._cookies:
                name = names[at]
                cookie = cookies[at]
                at += 1
                if name is not None:
                    yield cookie, name

    def chunks(self, cookie: int) -> Iterator[tuple[Sequence[int], Sequence[bytes]]]:
        """Cookies and names after `cookie`, in order, some at a time, as they are when asked for the next of them."""
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
