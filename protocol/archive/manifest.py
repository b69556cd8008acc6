"""The manifest of an archive: its JSON format, and the checks that need only the manifest."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

import msgspec

from protocol.archive.names import unescape
from protocol.errors import ArchiveError
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
