"""Rows, listings and records: the stored form of a tree.

A listing is the rows of one directory, sorted by name, as MessagePack.  The row of a subdirectory has the digest of its
listing, so the root's row identifies a whole state, and a subtree that two states share is stored once.

MessagePack has integers of 64 bits.  An mtime in nanoseconds that needs more (before 1677 or after 2554) is stored as
a decimal string.

The record of a snapshot has its name, time and root; it is at the end of the snapshot's pack.

An inode row has the inode number and the ctime of an entry, in listings of their own.  A program such as git recognises
an unchanged file by its stat data, so a state that is resumed elsewhere shows the same.  These values are not in the
rows of the content: two states with the same content have the same root, whatever their inodes are.  An inode row has
the form of a `Row`, so everything that follows listings follows these, too: `mtime_ns` is the ctime, `size` the inode
number (0: number and ctime are unknown), and `content` the digest of a directory's inode listing (b"" for other
files).
"""

from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import astuple

from protocol.errors import shown
from protocol.linux.statx import numbers_and_ctimes
from protocol.store.format.layout import Layout
from protocol.store.format.packs import DamagedError
from protocol.tree import HasMode, TreeEntry
from protocol.volume_extensions import SnapshotInfo, SnapshotKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from protocol.store.directory.statcache import CachedDirectory
    from protocol.store.format.blobs import Sink
    from protocol.store.format.packs import Pack

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


def needed_by(
    roots: Iterable[bytes], read: Callable[[Collection[bytes]], Iterable[list[Row]]]
) -> tuple[Collection[bytes], dict[bytes, int]]:
    """The digests of the listings `roots` and of all below them; and the size of each content that they name.

    `read` gets the listings of one level of the tree, and returns the rows of those that it knows.
    """
    listings: dict[bytes, None] = {}
    contents: dict[bytes, int] = {}
    level = dict.fromkeys(roots)
    while level:
        listings |= level
        below: dict[bytes, None] = {}
        for rows in read(level):
            for row in rows:
                if stat.S_ISDIR(row.mode):
                    below[row.content] = None
                elif stat.S_ISREG(row.mode) and row.content:
                    contents[row.content] = row.size
        level = {digest: None for digest in below if digest not in listings}
    return listings, contents


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


# -- inode rows ------------------------------------------------------------------------------------
_NUMBERS_END: Final = 1 << 63  # as in the rows of content
_EMPTY: Final = encode_listing([])


def inode_row(name: bytes, mode: int, number: int, ctime_ns: int, below: bytes = b"") -> Row:
    """The inode row of an entry; `below` is the digest of a directory's inode listing."""
    return Row(name, stat.S_IFMT(mode), 0, 0, ctime_ns, number if number < _NUMBERS_END else 0, below)


def inodes_lost(path: bytes, damage: str) -> str:
    """Say that a mount has no inode numbers and ctimes of what is below `path`."""
    return (
        f"the inode numbers and ctimes below {shown(path) or '.'} are lost ({damage}), so git reads files again;"
        " the contents are whole"
    )


def scanned_inodes(sink: Sink, record: bytes, root: CachedDirectory, *, trusted: bool) -> Row:
    """Give the inode listings of a scanned host directory to `sink`; return the inode row of the root.

    `record` is the statx record of the root.  `trusted`: the store has everything below each listing that it has.
    """
    ((mode, number, ctime_ns),) = numbers_and_ctimes(record)
    return inode_row(b"", mode, number, ctime_ns, _listing(sink, root, trusted=trusted))


def _listing(sink: Sink, directory: CachedDirectory, *, trusted: bool) -> bytes:
    digest = directory.inodes
    if trusted and digest is not None and sink.keeps(digest):
        return digest
    rows = []
    for name, (mode, number, ctime_ns) in zip(directory.names, numbers_and_ctimes(directory.records), strict=True):
        below = b""
        if stat.S_ISDIR(mode):
            child = directory.children.get(name)
            below = sink.listing(_EMPTY) if child is None else _listing(sink, child, trusted=trusted)
        # Stat data must never be older than the content: a program would take the file for an earlier one.
        rows.append(inode_row(name, mode, 0 if name in directory.outdated else number, ctime_ns, below))
    directory.inodes = digest = sink.listing(encode_listing(rows))
    return digest


# -- records ---------------------------------------------------------------------------------------
_PACK_NAME: Final = re.compile(r"([0-9a-f]+)-(\d+)\.snap")


class Record(msgspec.Struct, array_like=True, frozen=True):
    """A snapshot's record as it is stored."""

    version: int
    workspace: str
    name: str
    serial: int
    created_ns: int
    files: int
    directories: int
    size_bytes: int
    tag: str | None
    kind: SnapshotKind
    unstable: tuple[bytes, ...]
    unreadable: tuple[bytes, ...]
    root: Row
    inodes: Row | None = None  # see the module; None in records of older versions, and of states without inodes

    @property
    def roots(self) -> tuple[bytes, ...]:
        """The digests of the listings that the snapshot needs, with everything below them."""
        return (self.root.content,) if self.inodes is None else (self.root.content, self.inodes.content)


_record_decoder: Final = msgspec.msgpack.Decoder(Record, strict=False)  # as for rows


def encode_record(record: Record) -> bytes:
    """Encode a record."""
    try:
        return _encoder.encode(record)
    except OverflowError:
        inodes = None if record.inodes is None else encodable(record.inodes)
        return _encoder.encode((*astuple(record)[:-2], encodable(record.root), inodes))


def decode_record(data: bytes) -> Record:
    """Decode a record.  ValueError."""
    return _record_decoder.decode(data)


def read_record(pack: Pack) -> Record:
    """Read the record of a snapshot's pack.  DamagedError."""
    try:
        record = decode_record(pack.record)
    except ValueError:
        raise DamagedError("the snapshot's record is damaged", pack.name) from None
    if workspace_and_serial(pack.name) != (Layout.workspace_id(record.workspace), record.serial):
        raise DamagedError("the snapshot's file has the name of another snapshot", pack.name)
    return record


def info_of(record: Record) -> SnapshotInfo:
    """The public form of a record."""
    return SnapshotInfo(**{name: getattr(record, name) for name in SnapshotInfo.__struct_fields__})


def pack_name(workspace_id: str, serial: int) -> str:
    """The file name of a snapshot's pack."""
    return f"{workspace_id}-{serial:010d}.snap"


def workspace_and_serial(name: str) -> tuple[str, int] | None:
    """The arguments of `pack_name`; None for a pack that is not a snapshot."""
    match = _PACK_NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))
