"""DirectoryCookies: the cookies of a directory, with which a scan continues where it stopped despite changes.

A scan goes to higher cookies.  A new name gets a cookie below all that were given, so what is added or renamed during a
scan lies before its position: a scan ends, whatever its reader does in the directory, and lists each name that stays
exactly once.  A cookie is never given to another name.  A removed name leaves a gap; the gaps are closed when they
outnumber the names, so adding and removing cost O(1) amortised, and finding a cookie O(log n).  The object is made when
a directory is first listed, and from then on follows every change.  Most directories are listed and never changed
again.  Therefore the cookies are a range until gaps are closed, and the positions of names are computed at the first
removal.

Cookies begin below 2**31, because 32-bit programs without large file support cannot list a directory with larger ones.
If those are used up, the internal cookies become negative, and all are shown larger by 2**61; a position from before
keeps its meaning.  So they stay positive and below 2**62, where `.snapshots` has its cookie.

Invariant: `_cookies` decreases strictly; `_names[i]` is the name at `_cookies[i]` or None for a gap; `_position`, if
not None, maps exactly the present names to their cookies.  All cookies inside are internal ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter, neg
from typing import Final, Self, cast

FIRST_COOKIE: Final = 3  # 1 and 2 are "." and ".."
_END: Final = 1 << 31
ALL: Final = 1 << 62  # larger than any cookie
_FAR: Final = 1 << 61
_GAPS_KEPT: Final = 32
_CHUNK: Final = 128  # names; small, because a reader may not need a whole chunk


class DirectoryCookies:
    """The names of one directory in the order of their cookies: at first, in the order of `names`."""

    __slots__ = ("_cookies", "_gaps", "_names", "_next", "_position")
    ascends: bool = False

    def __init__(self, names: Iterable[bytes]) -> None:
        self._names: list[bytes | None] = [*names]
        self._names.reverse()
        self._next = _END - 1 - len(self._names)
        self._cookies: range | list[int] = range(_END - 1, self._next, -1)
        self._position: dict[bytes, int] | None = None
        self._gaps = 0

    @classmethod
    def of(cls, cookies: Iterable[tuple[bytes, int]], following: int) -> Self:
        """Return an object in which each name has the given cookie, and the next one gets `following`."""
        pairs = sorted(cookies, key=itemgetter(1))
        made = cls(name for name, _ in pairs)
        made._cookies = [cookie for _, cookie in reversed(pairs)]
        made._next = following
        return made

    def __len__(self) -> int:
        return len(self._names) - self._gaps

    @property
    def following(self) -> int:
        """The internal cookie that the next name gets."""
        return self._next

    def pairs(self, below: int = ALL) -> Iterator[tuple[bytes, int]]:
        """Yield (name, internal cookie) of every name, or of those with a cookie less than `below`."""
        start = bisect_left(self._cookies, 1 - below, key=neg)
        found = zip(self._names[start:], self._cookies[start:], strict=True)
        return ((name, cookie) for name, cookie in found if name is not None)

    def __contains__(self, name: bytes) -> bool:
        return name in self._positions()

    def _positions(self) -> dict[bytes, int]:
        if self._position is None:
            self._position = dict(self.pairs())
        return self._position

    def add(self, name: bytes) -> None:
        """Add `name`, which must not be present, before all others."""
        cookie = self._next
        if self._position is not None:
            self._position[name] = cookie
        self._names.append(name)
        self._next = cookie - 1
        if isinstance(self._cookies, range):
            self._cookies = range(self._cookies.start, self._next, -1)
        else:
            self._cookies.append(cookie)

    def cookie(self, name: bytes) -> int:
        """Return the internal cookie of `name`, which must be present."""
        return self._positions()[name]

    def put_back(self, name: bytes, cookie: int) -> None:
        """Give `name`, which was added last, the internal cookie that it had before it was removed."""
        self._next += 1
        del self._names[-1]
        if isinstance(self._cookies, range):
            self._cookies = range(self._cookies.start, self._next, -1)
        else:
            del self._cookies[-1]
        at = bisect_left(self._cookies, -cookie, key=neg)
        if at < len(self._cookies) and self._cookies[at] == cookie:
            self._names[at] = name
            self._gaps -= 1
        else:  # the gap was closed, so the cookies are a list
            self._names.insert(at, name)
            cast("list[int]", self._cookies).insert(at, cookie)
        self._positions()[name] = cookie

    def remove(self, name: bytes) -> None:
        """Remove `name`, which must be present."""
        cookie = self._positions().pop(name)
        self._names[bisect_left(self._cookies, -cookie, key=neg)] = None
        self._gaps += 1
        if self._gaps > _GAPS_KEPT and self._gaps > len(self):
            self._close_gaps()

    def _close_gaps(self) -> None:
        pairs = list(self.pairs())
        self._names = [name for name, _ in pairs]
        self._cookies = [cookie for _, cookie in pairs]
        self._gaps = 0

    def _shift(self) -> int:
        """By how much cookies are shown larger than they are."""
        return 0 if self._next >= FIRST_COOKIE - 1 else _FAR

    def _internal(self, cookie: int) -> int:
        """Return the position that a reader refers to by `cookie`, which may be from before they were shown larger."""
        if cookie < FIRST_COOKIE:
            return -_FAR
        return cookie - _FAR if cookie >= _FAR // 2 and self._shift() else cookie

    def after(self, cookie: int) -> Iterator[tuple[int, bytes]]:
        """Yield (cookie, name) of every name after `cookie`, in order; changes between two steps are seen."""
        position = self._internal(cookie)
        while at := bisect_left(self._cookies, -position, key=neg):
            # Continue until a change replaces the list; then find the position again.
            cookies, names = self._cookies, self._names
            while at and cookies is self._cookies:
                at -= 1
                position = cookies[at]
                name = names[at]
                if name is not None:
                    yield position + self._shift(), name

    def chunks(self, cookie: int) -> Iterator[tuple[Sequence[int], Sequence[bytes]]]:
        """Yield cookies and names after `cookie`, in order and in chunks; changes between two chunks are seen."""
        position = self._internal(cookie)
        while at := bisect_left(self._cookies, -position, key=neg):
            start = max(0, at - _CHUNK)
            cookies = self._cookies[start:at][::-1]
            names = self._names[start:at][::-1]
            position = cookies[-1]
            if self._gaps and None in names:
                cookies = [each for each, name in zip(cookies, names, strict=True) if name is not None]
                names = [name for name in names if name is not None]
            shift = self._shift()
            yield [each + shift for each in cookies] if shift else cookies, cast("list[bytes]", names)


class AscendingCookies(DirectoryCookies):
    """Cookies of a directory that a vfsd listed whose cookies went up, as the kernel has them; see `downward`."""

    __slots__ = ()
    ascends = True

    def __init__(self, names: Iterable[bytes]) -> None:
        super().__init__(names)
        self._next = FIRST_COOKIE + len(self._names)
        self._cookies = list(range(self._next - 1, FIRST_COOKIE - 1, -1))

    def add(self, name: bytes) -> None:
        """Add `name`, which must not be present, after all others."""
        if self._position is not None:
            self._position[name] = self._next
        self._names.insert(0, name)
        cast("list[int]", self._cookies).insert(0, self._next)
        self._next += 1


def downward(cookies: DirectoryCookies | None, names: Iterable[bytes]) -> DirectoryCookies:
    """Return the cookies with which a directory is listed from now on: its `cookies`, or new ones for its `names`."""
    if cookies is None:
        return DirectoryCookies(sorted(names))
    return DirectoryCookies.of(cookies.pairs(), FIRST_COOKIE - 1) if cookies.ascends else cookies
