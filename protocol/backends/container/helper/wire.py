"""The codec of the frames that vfsd and its helper exchange.

A frame is a header (length of the body, number of the request, code) and a body: any count of signed 64-bit numbers
and of byte strings; the strings' lengths come first.  A request's code is an `Op`.  A reply's code is 0, or an errno
with an empty body.  The comments of `Op` list each operation's numbers and strings.

A request that must be executed once, also if another daemon repeats it, has the flag ONCE in its code, and after the
header the number (KEY) of the kernel's request that it belongs to.

Neither side trusts the other: a body whose length does not match its content is refused (WireError).  A body longer
than MAX_BODY_BYTES is refused before any of it is kept.
"""

import struct
from typing import Any, Callable, Tuple

Reply = Tuple[Tuple[int, ...], Tuple[bytes, ...]]  # in the syntax of Python 3.6
Operation = Callable[..., Any]  # from the numbers and strings of a request to the Reply

VERSION = 4
MAGIC = b"vfsd-helper 4\n"  # the helper's first bytes, so that other output of the image is not taken for a frame
HEADER = struct.Struct("<IIH")  # bytes in the body, number of the request, Op or errno
ONCE = 0x4000
KEY = struct.Struct("<Q")
CHUNK_BYTES = 1024 * 1024  # the most that one request reads or writes
MAX_BODY_BYTES = CHUNK_BYTES + 128 * 1024
MAX_STRINGS = 4096
NAME_MAX = 255

# The attributes of an inode: inode, mode, nlink, uid, gid, rdev, size, blocks; atime, mtime, ctime, birth in seconds;
# and the nanoseconds of these four.  (Some file systems' times in nanoseconds alone would need more than 64 bits.)
ATTRIBUTE_COUNT = 16
ENTRY = struct.Struct("<q16qH")  # cookie, attributes, length of the name that follows
FORGET = struct.Struct("<qq")  # inode, lookups
# An entry of a walk: mode, size, mtime (seconds, nanoseconds), ctime (likewise), uid, gid, nlink, inode, rdev; lengths
# of path, target and xattrs, which follow.
TREE_ENTRY = struct.Struct("<11qIII")
XATTR = struct.Struct("<II")  # lengths of name and value, which follow
# An inode with lookups: number, type bits, lookups, number of its parent (0: no name); length of the name that follows
KNOWN = struct.Struct("<qqqqH")

# A relay sends this to the helper that it hands its standard streams to (see `sessions`).
SECRET_BYTES = 16
JOIN = struct.Struct("<%dsI" % SECRET_BYTES)  # the secret of HOLD, and its seconds
RELAY_MAGIC = b"vfsd-relay 3\n"  # the relay's first bytes: the helper runs, and the relay waits for GO
NO_HELPER = b"vfsd-ended 3\n"  # ... or the helper has ended, and the relay ends
GO = b"\n"

SECOND_NS = 1000000000


class WireError(ValueError):
    """The other side sent an invalid frame."""


class Op:
    """The operations: numbers; strings -> the same.  "attributes" means ATTRIBUTE_COUNT numbers, with one lookup."""

    HELLO = 1  # -> version, uid, gid, whether there are ACLs, uid and gid of the container's first process
    LOOKUP = 2  # parent; name -> attributes
    FORGET = 3  # ; FORGET... -> no reply
    GETATTR = 4  # inode -> attributes (no lookup)
    SETATTR = 5  # inode, SET_ bits, mode, uid, gid, size, atime, its ns, mtime, its ns -> attributes (no lookup)
    READLINK = 6  # inode -> ; target
    MKNOD = 7  # parent, mode, rdev, uid, gid, umask; name -> attributes
    MKDIR = 8  # parent, mode, uid, gid, umask; name -> attributes
    SYMLINK = 9  # parent, uid, gid; name, target -> attributes
    LINK = 10  # inode, parent; name -> attributes
    UNLINK = 11  # parent; name
    RMDIR = 12  # parent; name
    RENAME = 13  # parent, new parent, flags, uid, gid; name, new name
    READDIR = 14  # inode, cookie, most entries -> ; ENTRY..., with one lookup each except for the dots
    READ = 15  # inode, offset, size -> ; data
    WRITE = 16  # inode, offset, whether to clear suid and sgid; data -> written
    FALLOCATE = 17  # inode, mode, offset, length
    SEEK = 18  # inode, offset, whence -> offset
    COPY = 19  # source, offset, target, offset, length -> copied
    FSYNC = 20  # inode, whether data only
    STATFS = 21  # -> block size, blocks, free, inodes, free, longest name
    GETXATTR = 22  # inode; name -> ; value
    SETXATTR = 23  # inode, flags; name, value
    LISTXATTR = 24  # inode -> ; names, each ended by NUL
    REMOVEXATTR = 25  # inode; name
    TMPFILE = 26  # parent, mode, uid, gid, umask -> attributes
    TREE_ENTRY = 27  # ; path -> ; TREE_ENTRY
    TREE_CHILDREN = 28  # ; path, after which name -> whether there are more; names, each ended by NUL
    TREE_READ = 29  # offset, size; path -> length of a large hole there, or 0; data, none for a hole
    TREE_WALK = 30  # ; path -> walk
    TREE_NEXT = 31  # walk, most bytes -> whether there is more; TREE_ENTRY...
    TREE_END = 32  # walk
    HOLD = 33  # seconds; name, secret: wait so long for another stream when this ends; again: only the seconds count
    ANSWERED = 34  # ; KEY... -> no reply; the kernel has the replies to these requests
    KNOWN = 35  # after which inode -> whether there are more; KNOWN...
    END = 36  # -> no reply; end the helper
    SETTLE = 37  # -> ; wait until no change of an earlier stream is executed any more
    APPEND = 38  # inode, whether to clear suid and sgid; data -> written, the file's size after that
    LOCK = 39  # inode of a directory, until UNLOCK, the next LOCK or the end of the stream
    UNLOCK = 40


# Operations that wait for a disk or move much data: another thread serves the next request at once.
SLOW = frozenset({Op.FALLOCATE, Op.COPY, Op.FSYNC, Op.TREE_NEXT})

# Operations that change something: repeated, they would fail, or undo what was changed since.
CHANGES = frozenset(
    {
        Op.SETATTR, Op.MKNOD, Op.MKDIR, Op.SYMLINK, Op.LINK, Op.UNLINK, Op.RMDIR, Op.RENAME, Op.WRITE, Op.APPEND,
        Op.FALLOCATE, Op.COPY, Op.SETXATTR, Op.REMOVEXATTR, Op.TMPFILE, Op.LOCK, Op.UNLOCK,
    }
)  # fmt: skip
MAKES = frozenset({Op.MKNOD, Op.MKDIR, Op.SYMLINK, Op.LINK, Op.TMPFILE})  # whose replies have a lookup
SILENT = frozenset({Op.FORGET, Op.ANSWERED, Op.END})  # without a reply

SET_MODE = 1
SET_UID = 2
SET_GID = 4
SET_SIZE = 8
SET_ATIME = 16
SET_MTIME = 32
SET_CTIME = 64
KILL_PRIVILEGES = 128


def pack(
    number: int, code: int, numbers: "tuple[int, ...]" = (), strings: "tuple[bytes, ...]" = (), key: int = 0
) -> bytes:
    """A frame; a request with `key` is executed once.  struct.error where a number has no room in 64 bits."""
    count, lengths = len(numbers), tuple(map(len, strings))
    head = struct.pack("<HH%dq%dI" % (count, len(lengths)), count, len(lengths), *numbers, *lengths)
    body = b"".join((head, *strings))
    if key:
        return b"".join((HEADER.pack(len(body), number, code | ONCE), KEY.pack(key), body))
    return HEADER.pack(len(body), number, code) + body


def unpack(body: bytes) -> "tuple[tuple[int, ...], list[bytes]]":
    """The numbers and strings of a body.  WireError."""
    if not body:
        return (), []
    try:
        count, strings = struct.unpack_from("<HH", body)
        if strings > MAX_STRINGS:
            raise WireError("%d strings" % strings)
        shape = struct.Struct("<%dq%dI" % (count, strings))
        fields = shape.unpack_from(body, 4)
    except struct.error as error:
        raise WireError(str(error)) from None
    at = 4 + shape.size
    lengths = fields[count:]
    if at + sum(lengths) != len(body):
        raise WireError("%d bytes instead of %d" % (len(body), at + sum(lengths)))
    found = []
    for length in lengths:
        found.append(body[at : at + length])
        at += length
    return fields[:count], found
