"""FanOut: finds the pack that has a digest, in a time that hardly depends on the number of packs.

Keeps sorted arrays of 64-bit keys: the first 40 bits of a digest, then the number of the pack.  A lookup bisects each
array and searches the packs that match, almost always one.  New packs form a new array; an array with at least half
the length of the one before is merged with it, so there are at most log2(entries) arrays.  8 bytes per entry.

Threading: any thread may call `find` while another one adds.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from protocol.store.format.packs import BlobLocation, Pack

_NUMBER_BITS: Final = 24
_NUMBER: Final = (1 << _NUMBER_BITS) - 1
_PREFIX: Final = ((1 << 64) - 1) ^ _NUMBER


class FanOut:
    """The added packs, by the first bits of their digests."""

    def __init__(self) -> None:
        self._packs: list[Pack] = []
        self._levels: list[array[int]] = []

    def add(self, pack: Pack) -> None:
        """Add the digests of a pack."""
        number = len(self._packs)
        self._packs.append(pack)
        levels = [*self._levels, array("Q", [prefix & _PREFIX | number for prefix in _prefixes(pack)])]
        while len(levels) > 1 and len(levels[-1]) * 2 >= len(levels[-2]):
            last = levels.pop()
            levels[-1] = array("Q", sorted([*levels[-1], *last]))
        self._levels = levels  # in one step: another thread may be searching

    def find(self, digest: bytes) -> BlobLocation | None:
        """The position of a blob in any of the packs."""
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
    """The first 64 bits of each digest; an index entry has six such words."""
    words = array("Q", pack.index)[::6]
    if sys.byteorder == "little":
        words.byteswap()
    return words
