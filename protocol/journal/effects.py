"""Effects: what a record of the journal says, as bytes.

An effect is a code and its fields.  A payload is a sequence of effects; all of them happened together.  Effects name
results (this inode has these attributes, this name leads to that inode), never the call that led to them.

Integers are little-endian.  A time is seconds and nanoseconds, because the file system takes times beyond 2**63 ns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from protocol.directory_cookies import DirectoryCookies
    from protocol.stored_attributes import StoredAttributes

INODE: Final = 1  # its attributes; it is made if it does not exist
ENTRY: Final = 2  # a name in a directory stands for an inode; 0: for none
WRITE: Final = 3  # bytes of content
TRUNCATE: Final = 4  # content from an offset on is dropped
PUNCH: Final = 5  # a hole
RESERVE: Final = 6  # pages promised by fallocate(2)
XATTRS: Final = 7  # all extended attributes of an inode
TARGET: Final = 8  # of a symlink
FREE: Final = 9  # the inode is gone
RESET: Final = 10  # the inode has neither content nor extended attributes
BLOCK: Final = 11  # a block of content without holes
SPARSE_BLOCK: Final = 12  # a block of content: its length and its written pages
SHARED_BLOCK: Final = 13  # a block of content that is one of an inode in a snapshot
NO_BLOCK: Final = 14  # a block of content is a hole
RESERVATIONS: Final = 15  # all pages promised by fallocate(2): the first, the page after the last, whether it is data
SNAPSHOT: Final = 16  # the present state is kept
DROP: Final = 17  # a snapshot is dropped
NOTE: Final = 18  # a value that the user of the volume keeps with it
NEXT: Final = 19  # the number that the next inode gets, at least
REQUEST: Final = 20  # the kernel's request that the batch belongs to, and the result of the call
CONNECTION: Final = 21  # a new mount: requests and open files of the one before are gone
LISTED: Final = 22  # written until cookies went down: the names of a directory get cookies that go up, in their order
COOKIES: Final = 23  # the names of a directory have these cookies, and the next ones go up
INVALIDATED: Final = 24  # the kernel caches nothing that changes without a request have made wrong
STORE: Final = 25  # for a later STORED_BLOCK or STORED_EFFECTS; number 0: those before are not needed any more
STORED_BLOCK: Final = 26  # a block of content that a STORE has
STORED_EFFECTS: Final = 27  # the effects that a STORE has
LISTED_DOWNWARD: Final = 28  # the names of a directory get cookies in the order of the names, or from now on lower ones
COOKIES_DOWNWARD: Final = 29  # the names of a directory have these cookies, and the next ones go down
XATTR: Final = 30  # one extended attribute of an inode
# Of overlays; `protocol.backends.overlay.journaling.recorder` describes the values.
LOWER: Final = 40  # an inode of the lower layer, as it was before its first change
LISTING: Final = 41  # the entries of a directory of the lower layer, as they were before its first change
KIND: Final = 42  # a listed name has become another type of file below; 0: it is gone there
FOLLOWED: Final = 43  # the file of the lower layer that a version of an inode belongs to
CONTENT: Final = 44  # the content is that of a file of the lower layer, or empty
VISIBLE: Final = 45  # the parts of that file that are read
KEPT: Final = 46  # content of a file of the lower layer that an apply replaced
BASE: Final = 47  # the present state is what changes are compared with
IDENTITIES: Final = 48  # of files that an apply wrote
RENEWED: Final = 49  # files of the lower layer whose ctime an apply changed
DEVICE: Final = 50  # the device number of the lower layer, which can be another one after a reboot
KNOWN: Final = 51  # in an image for a successor, never in a journal: what the kernel knows of the lower layer

_NS: Final = 10**9
# Of the most frequent effects, which a replay reads itself.
INODE_LAYOUT: Final = struct.Struct("<BQIQIIQQqIqIqIqIQ")
MODE_LAYOUT: Final = struct.Struct("<BQI")  # its beginning
ENTRY_LAYOUT: Final = struct.Struct("<BQQB")
WRITE_LAYOUT: Final = struct.Struct("<BQQI")
REQUEST_LAYOUT: Final = struct.Struct("<BQQ")
_NUMBER_AND_OFFSET: Final = REQUEST_LAYOUT
_RANGE: Final = struct.Struct("<BQQQ")
_NUMBER_AND_LENGTH: Final = struct.Struct("<BQI")
_NUMBER: Final = struct.Struct("<BQ")
_SHARED: Final = struct.Struct("<BQQQQQ")
_SIZES: Final = struct.Struct("<BII")


class Attributes(NamedTuple):
    """The attributes in an INODE effect."""

    inode: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    birth_ns: int
    generation: int


def inode(node: StoredAttributes | Attributes) -> bytes:
    """Return the effect that an inode has the attributes of `node`."""
    mtime_ns, ctime_ns = node.mtime_ns, node.ctime_ns
    modified = divmod(mtime_ns, _NS)
    return INODE_LAYOUT.pack(
        INODE, node.inode, node.mode, node.nlink, node.uid, node.gid, node.rdev, node.size,
        *divmod(node.atime_ns, _NS), *modified, *(modified if ctime_ns == mtime_ns else divmod(ctime_ns, _NS)),
        *divmod(node.birth_ns, _NS), node.generation,
    )  # fmt: skip


def entry(directory: int, name: bytes, number: int) -> bytes:
    """Return the effect that `name` in `directory` stands for inode `number`; 0: for none."""
    return ENTRY_LAYOUT.pack(ENTRY, directory, number, len(name)) + name


def subjects(effect: bytes) -> tuple[int, int, int]:
    """Return the code of an effect, its inode, and the inode that an ENTRY leads to (0: none, or another effect)."""
    code = effect[0]
    if code == ENTRY:
        _, directory, number, _ = ENTRY_LAYOUT.unpack_from(effect)
        return code, directory, number
    return code, _NUMBER.unpack_from(effect)[1], 0


# Of the kinds of layout: the code says which effect it is, and its comment above what the fields mean.
def of_number(code: int, number: int = 0) -> bytes:
    """Return an effect that has only a number, such as FREE."""
    return _NUMBER.pack(code, number)


def at_offset(code: int, number: int, offset: int) -> bytes:
    """Return an effect with a number and an offset, index or result: TRUNCATE, NO_BLOCK, REQUEST."""
    return _NUMBER_AND_OFFSET.pack(code, number, offset)


def of_range(code: int, number: int, offset: int, length: int) -> bytes:
    """Return a PUNCH or RESERVE, or a STORED_BLOCK, whose numbers are the index of the block and of its STORE."""
    return _RANGE.pack(code, number, offset, length)


def with_value(code: int, number: int, value: object) -> bytes:
    """Return an effect with a value of any type, such as SNAPSHOT and those of overlays."""
    encoded = msgspec.msgpack.encode(value)
    return _NUMBER_AND_LENGTH.pack(code, number, len(encoded)) + encoded


def with_data(code: int, number: int, offset: int, length: int) -> bytes:
    """Return the beginning of a WRITE, a BLOCK at an index, or a STORE at 0; its `length` bytes follow."""
    return WRITE_LAYOUT.pack(code, number, offset, length)


def xattrs(number: int, values: Mapping[bytes, bytes] | None) -> bytes:
    """Return the effect that an inode has exactly these extended attributes."""
    return with_value(XATTRS, number, list(values.items()) if values else [])


def target(number: int, value: bytes) -> bytes:
    """Return the effect that a symlink has this target."""
    return _NUMBER_AND_LENGTH.pack(TARGET, number, len(value)) + value


def sparse_block(number: int, index: int, length: int, pages: Mapping[int, bytes]) -> bytes:
    """Return the effect that a block of a file has `length` bytes, and holes where `pages` has no page."""
    encoded = msgspec.msgpack.encode((length, list(pages.items())))
    return with_data(SPARSE_BLOCK, number, index, len(encoded)) + encoded


def shared_block(number: int, index: int, serial: int, source: int, source_index: int) -> bytes:
    """Return the effect that a block is block `source_index` of inode `source` in the snapshot `serial`."""
    return _SHARED.pack(SHARED_BLOCK, number, index, serial, source, source_index)


def listed(number: int) -> bytes:
    """Return the effect that the names of a directory get cookies."""
    return of_number(LISTED_DOWNWARD, number)


def cookies(number: int, of: DirectoryCookies) -> bytes:
    """Return the effect that the names of a directory have the cookies `of`."""
    return with_value(COOKIES if of.ascends else COOKIES_DOWNWARD, number, (list(of.pairs()), of.following))


def note(key: str, value: bytes) -> bytes:
    """Return the effect of keeping a value."""
    encoded = key.encode()
    return _SIZES.pack(NOTE, len(encoded), len(value)) + encoded + value


# -- decoding ----------------------------------------------------------------------------------------
Effect = tuple[Any, ...]  # the code, and the fields in the order of the functions above

_OF_RANGE: Final = frozenset({PUNCH, RESERVE, STORED_BLOCK})
_WITH_OFFSET: Final = frozenset({TRUNCATE, NO_BLOCK, REQUEST})
_WITH_DATA: Final = frozenset({WRITE, BLOCK, SPARSE_BLOCK, STORE})
_OF_OVERLAY: Final = frozenset(range(LOWER, KNOWN + 1))
_WITH_VALUE: Final = frozenset({XATTRS, XATTR, TARGET, RESERVATIONS, SNAPSHOT, COOKIES, COOKIES_DOWNWARD}) | _OF_OVERLAY
_WITH_NUMBER: Final = frozenset(
    {FREE, RESET, DROP, NEXT, CONNECTION, LISTED, LISTED_DOWNWARD, INVALIDATED, STORED_EFFECTS}
)


def decoded(payload: bytes) -> Iterator[Effect]:
    """Yield the effects of a payload: the code and the fields.  ValueError for an unknown effect.

    An INODE effect has one field, `Attributes`.  Data is a memoryview of `payload`, or bytes.
    """
    at, end = 0, len(payload)
    while at < end:
        effect, at = decode(payload, at)
        yield effect


def decode(payload: bytes, at: int) -> tuple[Effect, int]:
    """Return the effect at offset `at`, and the offset after it.  See `decoded`."""
    code = payload[at]
    if code == INODE:
        return (INODE, attributes(payload, at)), at + INODE_LAYOUT.size
    if code == ENTRY:
        _, directory, number, length = ENTRY_LAYOUT.unpack_from(payload, at)
        at += ENTRY_LAYOUT.size + length
        return (ENTRY, directory, payload[at - length : at], number), at
    if code in _WITH_DATA:
        _, number, offset, length = WRITE_LAYOUT.unpack_from(payload, at)
        at += WRITE_LAYOUT.size + length
        return (code, number, offset, memoryview(payload)[at - length : at]), at
    if code in _WITH_OFFSET:
        return _NUMBER_AND_OFFSET.unpack_from(payload, at), at + _NUMBER_AND_OFFSET.size
    if code in _OF_RANGE:
        return _RANGE.unpack_from(payload, at), at + _RANGE.size
    if code in _WITH_VALUE:
        _, number, length = _NUMBER_AND_LENGTH.unpack_from(payload, at)
        at += _NUMBER_AND_LENGTH.size + length
        return (code, number, payload[at - length : at]), at
    if code in _WITH_NUMBER:
        return _NUMBER.unpack_from(payload, at), at + _NUMBER.size
    if code == SHARED_BLOCK:
        return _SHARED.unpack_from(payload, at), at + _SHARED.size
    if code == NOTE:
        _, key_length, length = _SIZES.unpack_from(payload, at)
        start = at + _SIZES.size
        at = start + key_length + length
        return (NOTE, payload[start : start + key_length].decode(), payload[start + key_length : at]), at
    raise ValueError(f"the journal has an effect {code} that this vfsd does not know: use a newer vfsd")


def attributes(payload: bytes, at: int = 0) -> Attributes:
    """Return the attributes of the INODE effect at offset `at`."""
    (
        _, number, mode, nlink, uid, gid, rdev, size,
        atime, atime_ns, mtime, mtime_ns, ctime, ctime_ns, birth, birth_ns, generation,
    ) = INODE_LAYOUT.unpack_from(payload, at)  # fmt: skip
    return Attributes(
        number, mode, nlink, uid, gid, rdev, size, atime * _NS + atime_ns, mtime * _NS + mtime_ns,
        ctime * _NS + ctime_ns, birth * _NS + birth_ns, generation,
    )  # fmt: skip
