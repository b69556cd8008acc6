"""Which blobs the snapshots of a remote store need."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING

from protocol.store.format.digests import CHUNK_BYTES
from protocol.store.format.packs import BlobLocation
from protocol.store.object_store.layout import decode_chunk_map, decode_listing_of

if TYPE_CHECKING:
    from protocol.store.object_store.packs import PackView, RemotePacks


def needed_blobs(packs: RemotePacks, view: PackView, roots: Iterable[bytes], *, tolerant: bool = False) -> set[bytes]:
    """The digests of everything that the listings `roots` need.

    DamagedError if a listing is damaged, or is gone and `tolerant` is not set.
    """

    def located(digests: set[bytes]) -> Iterable[tuple[bytes, BlobLocation]]:
        return [view.located(digest) for digest in digests if not tolerant or view.find(digest) is not None]

    found: set[bytes] = set()
    listings, maps = set(roots), set[bytes]()
    while listings or maps:
        found |= listings | maps
        below: set[bytes] = set()
        long: set[bytes] = set()
        for digest, data in packs.blobs(located(maps)):
            found.update(decode_chunk_map(digest, data).chunks.values())
        for digest, data in packs.blobs(located(listings)):
            for row in decode_listing_of(digest, data):
                if stat.S_ISDIR(row.mode):
                    below.add(row.content)
                elif stat.S_ISREG(row.mode) and row.content:
                    (long if row.size > CHUNK_BYTES else found).add(row.content)
        listings, maps = below - found, long - found
    return found
