"""archive: the ZIP file of a tree, written from any `Tree` and read as one.

    manifest.json   {"version": "1", "created_at": ISO 8601 UTC, "file_count": n, "total_bytes": n, ...}
    files/          the root; then every directory ("files/<path>/"), regular file and symlink

`file_count` counts the regular files below files/, each hard-linked name as one; `total_bytes` is the sum
of their sizes.  The Unix mode is in `external_attr`; the mtime in DOS time (UTC, clamped to 1980..2107, two
seconds) and in Info-ZIP's "UT" field, so that `unzip` restores it in every time zone; a symlink's target is
its content.  Names are UTF-8 (flag bit 11).  So `unzip` and Python's `zipfile` get all data.

Metadata that ZIP cannot express is in optional keys of the manifest, which a reader may ignore:

    entries      one record for each path: path, mode, mtime_ns, uid, gid, rdev, xattrs (values in base64).
                 A fifo, socket or device node has only a record: it has no data to lose.
    hard_links   groups of paths that are one file; every one of them is an entry with its content.
    names        "percent": see below; absent, names are literal.

Names that are not UTF-8: `unzip` drops some bytes of a ZIP name without bit 11 and then overwrites one file with
another.  So if one path of the tree is not valid UTF-8, *all* names of that archive are written with "%XX" for each
invalid byte and "%25" for "%", and the manifest records that.  The mapping is one-to-one: `unzip` extracts every file
under its escaped name, `open_archive` restores the exact bytes.  Names of xattrs are always escaped.  Control
characters are kept (`unzip -^` keeps them too); a backslash is an ordinary character, as for `unzip` on Unix.

The same tree gives the same bytes: `created_at` comes from the caller or SOURCE_DATE_EPOCH, everything else from the
tree.  (Another version of zlib-ng may compress to other bytes.)

Archives are hostile input: `open_archive` checks everything, each entry's content by decompressing it once, before it
returns a tree.
"""

from protocol.archive.manifest import ArchiveLimits
from protocol.archive.mounted import MountedArchive
from protocol.archive.read import ArchiveTree, open_archive
from protocol.archive.write import ArchiveSummary, export_archive, write_archive
from protocol.tree import ByteProgress, no_progress

__all__ = [
    "ArchiveLimits",
    "ArchiveSummary",
    "ArchiveTree",
    "ByteProgress",
    "MountedArchive",
    "export_archive",
    "no_progress",
    "open_archive",
    "write_archive",
]
