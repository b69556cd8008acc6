"""The values in the effects of overlays (`protocol.journal.effects`).

LOWER       number, `LowerValue`
LISTING     number of the directory, `Listing`
KIND        number, type bits of the mode, or 0
FOLLOWED    number, `FileRecord`
CONTENT     number, `FileRecord`, or None for content that is empty
VISIBLE     number, `LowerContent.visible`
KEPT        0, `KeptValue`
BASE        serial of the epoch that begins with the base, None
IDENTITIES  0, [(path, `IdentityRecord` or None)]
RENEWED     0, [(device, inode, `IdentityRecord`)]
DEVICE      the device number, None
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from protocol.backends.overlay.lower import FileRecord, IdentityRecord

Listing: TypeAlias = list[tuple[bytes, int, int]]
"""Name, inode number and type bits of each entry."""
Visible: TypeAlias = tuple[int, tuple[int, ...]]
Identities: TypeAlias = list[tuple[bytes, IdentityRecord | None]]
Renewed: TypeAlias = list[tuple[int, int, IdentityRecord]]


class LowerValue(NamedTuple):
    """An inode of the lower layer.  `attributes` is an INODE effect."""

    file: FileRecord
    attributes: bytes
    links: list[tuple[int, bytes]]
    xattrs: list[tuple[bytes, bytes]] | None
    target: bytes | None


class KeptValue(NamedTuple):
    """A part of the content of a file; the parts come in order."""

    file: FileRecord
    offset: int
    data: bytes
