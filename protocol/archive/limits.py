"""Limits on the resources that reading an archive may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Bounds on the archives that `open_archive` accepts; all are checked before anything is decompressed.

    Deflate expands by at most 1,032 (zlib's technical notes), and a file of zeros, such as a sparse one, comes close.
    The default ratio lies just above that: it refuses archives that lie about their sizes, and accepts every archive
    that vfsd wrote.  Against bombs set `total_bytes` to the available space; for archives from strangers also a lower
    `ratio`.
    """

    entries: int = 2_000_000  # files, directories (named or implied by a path), symlinks and special files
    total_bytes: int = 64 << 30  # sum of all entries, decompressed
    ratio: int = 1_100  # size of an entry to its compressed size,
    ratio_from_bytes: int = 64 << 20  # for entries larger than this
    manifest_bytes: int = 512 << 20  # the manifest is held in memory as a whole
    names_bytes: int = 512 << 20  # sum of all paths: deep paths imply directories, each with a long path
