"""What an archive may cost its reader before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ArchiveLimits"]


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Bounds on what `open_archive` accepts; all of them hold before anything is decompressed.

    Deflate cannot expand by more than 1,032 (zlib's technical notes), and a file of zeros, such as a
    sparse one, comes close.  The default ratio lies just above: it refuses what lies about its sizes and
    lets every archive of ours back in; what stops a bomb is then `total_bytes`.  Who takes archives from
    strangers sets a lower `ratio`, or `total_bytes` to the space there is.
    """

    entries: int = 2_000_000  # files, directories (named or implied by a path), symlinks and special files
    total_bytes: int = 64 << 30  # sum of all entries, decompressed
    ratio: int = 1_100  # size of an entry to its compressed size,
    ratio_from_bytes: int = 64 << 20  # where it is larger than this
    manifest_bytes: int = 512 << 20  # the manifest is held in memory as a whole
    names_bytes: int = 512 << 20  # sum of all paths: deep paths imply directories, each with a long path
