"""The manifest of an archive: its JSON, and the checks that need nothing but it."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

import msgspec

from protocol.archive.names import unescape
from protocol.errors import ArchiveError
from protocol.volume import NAME_MAX

__all__ = [
    "DEVICES",
    "PERCENT",
    "SPECIAL",
    "VERSION",
    "Manifest",
    "Record",
    "decode_manifest",
    "record_xattrs",
    "timestamp",
]

VERSION: Final = "1"
PERCENT: Final = "percent"
# What has no data, and so no entry in the ZIP, only a record.
SPECIAL: Final = frozenset({stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK})

DEVICES: Final = frozenset({stat.S_IFCHR, stat.S_IFBLK})
_KINDS: Final = SPECIAL | {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}
_ID_MAX: Final = 0xFFFF_FFFF  # uid_t, gid_t
_RDEV_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF  # dev_t of glibc
_SECONDS_MAX: Final = 1 << 63  # time_t
_NO_XATTRS: Final[Mapping[bytes, bytes]] = MappingProxyType({})  # one for all: there may be a million
_XATTR_BYTES_MAX: Final = 64 * 1024  # XATTR_SIZE_MAX and XATTR_LIST_MAX, linux/limits.h


class Record(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the manifest says of one path.  `mode` has the type bits."""

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


def decode_manifest(data: bytes, name: str) -> Manifest:
    """The manifest in `data`, each record checked by itself.  ArchiveError."""
    try:
        # By itself first: of an unknown version nothing else can be expected to fit.
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
    # The range first: S_IFMT raises OverflowError for what is no mode_t.
    if record.mode is not None and not (0 < record.mode <= 0xFFFF and stat.S_IFMT(record.mode) in _KINDS):
        raise ArchiveError(f"the manifest gives it the impossible mode {record.mode:#o}", record.path)
    if not (0 <= record.uid <= _ID_MAX and 0 <= record.gid <= _ID_MAX):
        raise ArchiveError("the manifest gives it an owner out of range", record.path)
    if record.mtime_ns is not None and not -_SECONDS_MAX <= record.mtime_ns // 1_000_000_000 < _SECONDS_MAX:
        raise ArchiveError("the manifest gives it an mtime out of range", record.path)
    if not 0 <= record.rdev <= _RDEV_MAX:
        raise ArchiveError("the manifest gives it a device number out of range", record.path)
    if record.rdev and stat.S_IFMT(record.mode or 0) not in DEVICES:
        raise ArchiveError("the manifest gives it a device number, but it is no device node", record.path)


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
        if not name or b"\0" in name or len(name) > NAME_MAX or len(value) > _XATTR_BYTES_MAX:
            raise ArchiveError(f"the manifest gives it the impossible xattr {text!r:.80}", record.path)
        xattrs[name] = value
    if sum(len(name) + 1 for name in xattrs) > _XATTR_BYTES_MAX:
        raise ArchiveError("the manifest gives it too many xattrs", record.path)
    return xattrs
