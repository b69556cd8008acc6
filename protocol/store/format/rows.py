"""Rows and listings: the stored form of a tree.

A listing is the rows of one directory, sorted by name, as MessagePack.  The row of a subdirectory has the digest of its
listing, so the root's row identifies a whole state, and a subtree that two states share is stored once.

MessagePack has integers of 64 bits.  An mtime in nanoseconds that needs more (before 1677 or after 2554) is stored as
a decimal string.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import astuple

from protocol.tree import HasMode, TreeEntry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

Xattrs = tuple[tuple[bytes, bytes], ...]
UNREADABLE: Final = 1  # a file or directory that could not be read; its content is unknown
ELSEWHERE: Final = 2  # a mount point; its content is not part of this tree
_DIRECTORY_NUMBERS: Final = 1 << 63  # the range of directories, apart from the inode numbers of files


class TreeCounts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Counts of what is below a directory, without the directory itself and without files with several names."""

    files: int = 0
    directories: int = 0
    size_bytes: int = 0

    def with_links(self, sizes: Collection[int]) -> TreeCounts:
        """These counts, plus files with several names; `sizes` has the size of each."""
        return TreeCounts(self.files + len(sizes), self.directories, self.size_bytes + sum(sizes))


class More(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Fields that few files have.  `link` is equal for all names of one file, and 0 for a file with one name."""

    link: int = 0
    nlink: int = 1
    rdev: int = 0
    xattrs: Xattrs = ()
    state: int = 0  # UNREADABLE, ELSEWHERE
    counts: TreeCounts | None = None  # of a directory


PLAIN: Final = More()


class Row(HasMode, msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An entry.  `content`: the digest of a file (b"": empty) or of a directory's listing, or a symlink's target."""

    name: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    content: bytes
    rare: More | None = None

    @property
    def more(self) -> More:
        return self.rare or PLAIN


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Row], strict=False)  # accepts a string for an integer
_MTIMES: Final = range(-1 << 63, 1 << 64)


def encode_listing(rows: Sequence[Row]) -> bytes:
    """Encode rows that are sorted by name."""
    try:
        return _encoder.encode(rows)
    except OverflowError:
        return _encoder.encode(list(map(encodable, rows)))


def encodable(row: Row) -> Row | tuple[Any, ...]:
    """`row`, or its fields with the mtime as a string if MessagePack has no integer for it."""
    if row.mtime_ns in _MTIMES:
        return row
    fields = list(astuple(row))
    fields[Row.__struct_fields__.index("mtime_ns")] = str(row.mtime_ns)
    return tuple(fields)


def decode_listing(data: bytes) -> list[Row]:
    """Decode a listing.  ValueError (msgspec.DecodeError)."""
    return _decoder.decode(data)


def size_of(row: Row) -> int:
    """The bytes that a row adds to the sum of sizes."""
    return row.size if row.is_file else 0


def counts_of(row: Row) -> tuple[int, int, int]:
    """The files, directories and bytes that a row adds to its directory's counts."""
    if stat.S_ISDIR(row.mode):
        below = row.more.counts or TreeCounts()
        return below.files, below.directories + 1, below.size_bytes
    if row.more.link:
        return 0, 0, 0
    return 1, 0, size_of(row)


def sum_counts(several: Iterable[tuple[int, int, int]]) -> TreeCounts:
    """The sum of several results of `counts_of`."""
    files = directories = size_bytes = 0
    for more_files, more_directories, more_bytes in several:
        files += more_files
        directories += more_directories
        size_bytes += more_bytes
    return TreeCounts(files, directories, size_bytes)


def directory_number(path: bytes) -> int:
    """A number for a directory, equal in two trees that both have the directory."""
    return _DIRECTORY_NUMBERS | (hash(path) & (_DIRECTORY_NUMBERS - 1))


def entry_of(row: Row, path: bytes) -> TreeEntry:
    """The `TreeEntry` of a row."""
    more = row.more
    is_dir, is_link = stat.S_ISDIR(row.mode), stat.S_ISLNK(row.mode)
    return TreeEntry(
        path=path,
        mode=row.mode,
        size=0 if is_dir else row.size,
        mtime_ns=row.mtime_ns,
        uid=row.uid,
        gid=row.gid,
        nlink=more.nlink,
        inode=directory_number(path) if is_dir else more.link,
        rdev=more.rdev,
        target=row.content if is_link else b"",
        xattrs=dict(more.xattrs),
    )
