"""archive: the ZIP file of a tree, written from any `Tree` and read as one.

    manifest.json   {"version": "1", "created_at": ISO 8601 UTC, "file_count": n, "total_bytes": n, ...}
    files/          the root; then every directory ("files/<path>/"), regular file and symlink

`file_count` counts the regular files below files/, each hard-linked name as one; `total_bytes` is the sum
of their sizes.  Unix mode rides in `external_attr`; mtime in DOS time (UTC, clamped to 1980..2107, two
seconds) and in Info-ZIP's "UT" field, so that `unzip` restores it in every time zone; a symlink's target is
its content.  Names are UTF-8 (flag bit 11).  So `unzip` and Python's `zipfile` get all data.

What ZIP cannot say rides in optional keys of the manifest, which a reader may ignore:

    entries      one record for each path: path, mode, mtime_ns, uid, gid, rdev, xattrs (values in base64).
                 A fifo, socket or device node has only a record: it has no data to lose.
    hard_links   groups of paths that are one file; every one of them is an entry with its content.
    names        "percent": see below; absent, names are literal.

Names that are not UTF-8: a ZIP name without bit 11 would be the obvious place, but `unzip` drops some of
such bytes and then overwrites one file with another.  So as soon as one path of the tree is not valid UTF-8,
*all* names of that archive are written with "%XX" for each invalid byte and "%25" for "%", and the manifest
says so.  This is one-to-one; `unzip` gets every file under the escaped name, our reader the exact bytes.
Names of xattrs are always written so.  Control characters are left as they are (`unzip -^` keeps them too);
a backslash is a character like any other, as it is for `unzip` on Unix.

The same tree gives the same bytes: `created_at` comes from the caller or SOURCE_DATE_EPOCH, all else from
the tree.  (Other versions of zlib-ng may compress to other bytes.)

Reading is for hostile input: `open_archive` checks everything, each entry's content by decompressing it
once, before it hands out a tree.
"""

from protocol.archive.limits import ArchiveLimits
from protocol.archive.progress import ByteProgress, no_progress
from protocol.archive.read import ArchiveTree, open_archive
from protocol.archive.write import ArchiveSummary, export_archive, write_archive

__all__ = [
    "ArchiveLimits",
    "ArchiveSummary",
    "ArchiveTree",
    "ByteProgress",
    "export_archive",
    "no_progress",
    "open_archive",
    "write_archive",
]
