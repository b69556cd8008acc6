"""The manifest of an archive and the names in it: the formats, the limits, and the checks that need nothing else."""

from __future__ import annotations

import os
import re
import stat
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

import msgspec

from protocol.errors import ArchiveError, shown
from protocol.linux import posix_acl
from protocol.volume import NAME_MAX

VERSION: Final = "1"
PERCENT: Final = "percent"
# types without data: they have a record and no entry in the ZIP
SPECIAL: Final = frozenset({stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK})

DEVICES: Final = frozenset({stat.S_IFCHR, stat.S_IFBLK})
_KINDS: Final = SPECIAL | {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}
_ID_MAX: Final = 0xFFFF_FFFE  # uid_t, gid_t; -1 tells chown(2) to leave the owner unchanged
_RDEV_MAX: Final = 0xFFFF_FFFF  # dev_t of the kernel: 12 bits of major, 20 of minor number (linux/kdev_t.h)
# The first and last second of gmtime(3): the years that fit into the 32 bits of `tm_year`.
_FIRST_SECOND: Final = -67_768_040_609_740_800
_LAST_SECOND: Final = 67_768_036_191_676_799
_NS: Final = 1_000_000_000
_NO_XATTRS: Final[Mapping[bytes, bytes]] = MappingProxyType({})  # shared: there may be a million records
_NAMESPACES: Final = frozenset({b"user", b"trusted", b"security"})
_ACLS: Final = frozenset({posix_acl.ACCESS, posix_acl.DEFAULT})
_XATTR_BYTES_MAX: Final = 64 * 1024  # XATTR_SIZE_MAX and XATTR_LIST_MAX, linux/limits.h


class Record(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The manifest's attributes of one path.  `mode` has the type bits."""

    path: str
    mode: int | None = None
    mtime_ns: int | None = None
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    xattrs: dict[str, bytes] = {}


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """manifest.json.  `names` is PERCENT or None."""

    version: str
    created_at: str
    file_count: int
    total_bytes: int
    names: str | None = None
    entries: list[Record] = []
    hard_links: list[list[str]] = []


class _Version(msgspec.Struct):
    version: Any


def timestamp(created_ns: int) -> str:
    """ISO 8601, UTC, to the second.  ValueError or OverflowError outside of the years 1 to 9999."""
    return datetime.fromtimestamp(created_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def decode_manifest(data: bytes | bytearray, name: str) -> Manifest:
    """Decode a manifest and check each record by itself.  ArchiveError."""
    try:
        # The version first: the rest of an unknown version need not decode.
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise ArchiveError(f"the archive has the unknown version {version!r:.40}", name)
        manifest = msgspec.json.decode(data, type=Manifest)
        datetime.fromisoformat(manifest.created_at)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ArchiveError(f"the manifest is malformed: {error!s:.200}", name) from None
    if manifest.names not in (None, PERCENT):
        raise ArchiveError(f"the manifest has names of an unknown kind {manifest.names!r:.40}", name)
    if manifest.file_count < 0 or manifest.total_bytes < 0:
        raise ArchiveError("the manifest is malformed: a count is negative", name)
    for record in manifest.entries:
        _check_record(record)
    return manifest


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of the archive at `path`, and check nothing else.  ArchiveError; FileNotFoundError."""
    name, entry = os.fspath(path), MANIFEST.decode()
    try:
        with zipfile.ZipFile(name) as archive:
            too_long = archive.getinfo(entry).file_size > ArchiveLimits().manifest_bytes
            content = b"" if too_long else archive.read(entry)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ArchiveError(f"not an archive of a workspace: {error}", name) from error
    if too_long:
        raise ArchiveError("the manifest is too long", name)
    return decode_manifest(content, entry)


def _check_record(record: Record) -> None:
    # The range first: S_IFMT raises OverflowError for a number that is not a mode_t.
    if record.mode is not None and not (0 < record.mode <= 0xFFFF and stat.S_IFMT(record.mode) in _KINDS):
        raise ArchiveError(f"the manifest gives it the impossible mode {record.mode:#o}", record.path)
    if not (0 <= record.uid <= _ID_MAX and 0 <= record.gid <= _ID_MAX):
        raise ArchiveError("the manifest gives it an owner out of range", record.path)
    if record.mtime_ns is not None and clamped_ns(record.mtime_ns) != record.mtime_ns:
        raise ArchiveError("the manifest gives it an mtime out of range", record.path)
    if not 0 <= record.rdev <= _RDEV_MAX:
        raise ArchiveError("the manifest gives it a device number out of range", record.path)
    if record.rdev and stat.S_IFMT(record.mode or 0) not in DEVICES:
        raise ArchiveError("the manifest gives it a device number, but it is not a device node", record.path)


def clamped_ns(mtime_ns: int) -> int:
    """Clamp `mtime_ns` to the times that tools can show."""
    return min(max(mtime_ns, _FIRST_SECOND * _NS), _LAST_SECOND * _NS + _NS - 1)


def is_xattr_name(name: bytes) -> bool:
    """Whether every workspace supports an xattr of this name: in a namespace of xattr(7), or a POSIX ACL."""
    namespace, _, rest = name.partition(b".")
    return name in _ACLS or (namespace in _NAMESPACES and bool(rest) and b"\0" not in rest and len(name) <= NAME_MAX)


def xattrs_fit(names: Iterable[bytes]) -> bool:
    """Whether listxattr(2) can return all of `names`."""
    return sum(len(name) + 1 for name in names) <= _XATTR_BYTES_MAX


def record_xattrs(record: Record) -> Mapping[bytes, bytes]:
    """The xattrs of `record`, with their names as bytes.  ArchiveError."""
    if not record.xattrs:
        return _NO_XATTRS
    xattrs = {}
    for text, value in record.xattrs.items():
        try:
            name = unescape(text)
        except ValueError:
            name = b""
        if not is_xattr_name(name) or len(value) > _XATTR_BYTES_MAX or not _is_acl_if_named_so(name, value):
            raise ArchiveError(f"the manifest gives it the impossible xattr {text!r:.80}", record.path)
        xattrs[name] = value
    if not xattrs_fit(xattrs):
        raise ArchiveError("the manifest gives it too many xattrs", record.path)
    return xattrs


def _is_acl_if_named_so(name: bytes, value: bytes) -> bool:
    if name in _ACLS:
        try:
            posix_acl.parse(value)
        except OSError:
            return False
    return True


# -- limits ----------------------------------------------------------------------------------------
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


# -- names: how paths become names, and which names are refused ------------------------------------
MANIFEST: Final = b"manifest.json"
FILES: Final = b"files/"
# A ZIP has 16 bits for the length of a name (APPNOTE 4.4.10).  The kernel takes at most PATH_MAX (4,096) bytes in one
# call, but a program that changes directory step by step can make paths of any length.
NAME_BYTES_MAX: Final = 0xFFFF
PATH_BYTES_MAX: Final = NAME_BYTES_MAX - len(FILES) - 1  # with the slash after a directory's

# Nearly every name and path matches these; they take a fifth of the time of the separate checks.
_PLAIN_NAME: Final = re.compile(b"files/[^\\0]*+$")
_PLAIN_PATH: Final = re.compile(rb"[^/.\0][^/\0]{0,254}+(?:/[^/.\0][^/\0]{0,254}+){0,30}+")
_ESCAPED: Final = re.compile(b"%(..)", re.DOTALL)
# By the characters that "surrogateescape" makes of bytes that are not UTF-8.
_ESCAPES: Final = {0xDC00 + byte: f"%{byte:02X}" for byte in range(0x80, 0x100)}


def is_utf8(name: bytes) -> bool:
    """Whether `name` may be in a ZIP with flag bit 11."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def escape(name: bytes) -> str:
    """`name` as text, one-to-one: "%XX" for each byte that is not UTF-8, "%25" for "%"."""
    text = name.replace(b"%", b"%25").decode("utf-8", "surrogateescape")
    return text if text.isascii() else text.translate(_ESCAPES)


def unescape(text: str) -> bytes:
    """The inverse of `escape`.  ValueError for text that `escape` does not give (so never a "/" or NUL)."""
    raw = text.encode()
    name = _ESCAPED.sub(lambda match: bytes((int(match[1], 16),)), raw)
    if escape(name) != text:
        raise ValueError("not the escaped form of any name")
    return name


def check_name(name: bytes) -> None:
    """Refuse a ZIP name that leads outside, with a message for each reason."""
    if _PLAIN_NAME.match(name) and b".." not in name:
        return
    if b"\0" in name:
        raise ArchiveError("the name has a NUL byte", shown(name))
    if name.startswith(b"/"):
        raise ArchiveError("the name is absolute", shown(name))
    if b".." in name.split(b"/"):
        raise ArchiveError('the name has a ".." component', shown(name))


def check_path(path: bytes, name: bytes) -> None:
    """Refuse the path of entry `name` if no kernel would return it."""
    if not path or _PLAIN_PATH.fullmatch(path):
        return
    if len(path) > PATH_BYTES_MAX:
        raise ArchiveError(f"the path is longer than {PATH_BYTES_MAX} bytes", shown(name))
    for part in path.split(b"/"):
        if not part:
            raise ArchiveError("the name has an empty component", shown(name))
        if part in (b".", b".."):
            raise ArchiveError(f'the name has a "{part.decode()}" component', shown(name))
        if len(part) > NAME_MAX:
            raise ArchiveError(f"the name has a component longer than {NAME_MAX} bytes", shown(name))
    if b"\0" in path:
        raise ArchiveError("the name has a NUL byte", shown(name))
