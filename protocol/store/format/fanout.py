"""FanOut: finds the pack that has a digest, at a cost that does not depend on the number of packs.

Sorted arrays of 64-bit keys: the first 40 bits of a digest, then the number of the pack.  A lookup bisects each array
and asks the packs that it names, almost always one.  New packs make a new array; an array that has at least half of the
length of the one before it is merged with that, so there are at most log2(entries) of them.  8 bytes for each entry.

Threading: `find` any thread, while another one adds.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from protocol.store.format.packs import BlobLocation, Pack

__all__ = ["FanOut"]

_NUMBER_BITS: Final = 24
_NUMBER: Final = (1 << _NUMBER_BITS) - 1
_PREFIX: Final = ((1 << 64) - 1) ^ _NUMBER


class FanOut:
    """The packs that were added, by the beginnings of their digests."""

    def __init__(self) -> None:
        self._packs: list[Pack] = []
        self._levels: list[array[int]] = []

    def add(self, pack: Pack) -> None:
        """Make the digests of a pack findable."""
        number = len(self._packs)
        self._packs.append(pack)
        levels = [*self._levels, array("Q", [prefix & _PREFIX | number for prefix in _prefixes(pack)])]
        while len(levels) > 1 and len(levels[-1]) * 2 >= len(levels[-2]):
            last = levels.pop()
            levels[-1] = array("Q", sorted([*levels[-1], *last]))
        self._levels = levels  # at once: another thread may be looking

    def find(self, digest: bytes) -> BlobLocation | None:
        """Where a blob is, if in any of the packs."""
        wanted = int.from_bytes(digest[:8], "big") & _PREFIX
        for level in self._levels:
            at = bisect_left(level, wanted)
            while at < len(level) and level[at] & _PREFIX == wanted:
                place = self._packs[level[at] & _NUMBER].find(digest)
                if place is not None:
                    return place
                at += 1
        return None


def _prefixes(pack: Pack) -> array[int]:
    """The first 64 bits of each digest; an entry of the index is six such words."""
    words = array("Q", pack.index)[::6]
    if sys.byteorder == "little":
        words.byteswap()
    return words
