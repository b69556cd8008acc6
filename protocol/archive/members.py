"""The entries of a ZIP file according to its records, which are checked against each other.

Stricter than ZIP: the local headers and their data must fill the file from its first byte to the central directory,
without overlap or gap, so that no two readers can see different entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import attrgetter
from typing import BinaryIO, Final

import msgspec

from protocol.archive import records as zr
from protocol.archive.manifest import ArchiveLimits, check_name, is_utf8
from protocol.errors import ArchiveError, shown

_COMMENT_MAX: Final = 0xFFFF
_VERSION_MAX: Final = 63  # of APPNOTE 6.3, the newest
_PLAIN_FLAGS: Final = zr.FLAG_UTF8 | zr.FLAG_DESCRIPTOR
_NS: Final = 1_000_000_000
_MEMBER_BYTES: Final = 1024  # memory of an entry while it is checked: a Member, a TreeEntry, names


class Member(msgspec.Struct, gc=False):
    """One entry.  `mode` is the upper half of external_attr; 0 where the archive has none.

    `header` is the offset of the local header, `data` that of the compressed data.
    """

    name: bytes
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    mode: int
    mtime_ns: int
    header: int
    data: int

    @property
    def shown(self) -> str:
        return shown(self.name)

    @property
    def sums(self) -> tuple[int, int, int]:
        """The fields of a data descriptor."""
        return self.crc, self.compressed, self.size


def read_members(file: BinaryIO, limits: ArchiveLimits) -> list[Member]:
    """Read the entries, ordered by the offset of their data; names and sizes within `limits`.  ArchiveError."""
    members, start = read_directory(file, limits)
    ends = [member.header for member in members] + [start]
    for member, end in zip(members, ends[1:], strict=True):
        member.data = data_start(file, member, end)
    return members


def read_directory(
    file: BinaryIO, limits: ArchiveLimits, reserve: Callable[[int], None] = lambda _: None
) -> tuple[list[Member], int]:
    """Read the entries as `read_members`, but from the central directory only: `data` is 0.  And its offset.

    `reserve` is called with the memory in bytes that the entries are about to take.
    """
    start, length, count = _find_directory(file)
    if count > limits.entries:
        raise ArchiveError(f"the archive has {count} entries, more than {limits.entries}")
    reserve(length + _MEMBER_BYTES * count)
    members = _read_directory(file, start, length, count)
    _check_limits(members, limits)
    members.sort(key=attrgetter("header"))
    _check_overlap(members, start)
    return members, start


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


# -- the end records ---------------------------------------------------------------------------


def _find_directory(file: BinaryIO) -> tuple[int, int, int]:
    """(offset, length, entries) of the central directory, which must end at the end records."""
    size = file.seek(0, os.SEEK_END)
    tail_start = max(0, size - zr.END.size - _COMMENT_MAX)
    tail = _read(file, tail_start, size - tail_start)
    at = tail.rfind(zr.SIGNATURE_END)
    while at >= 0 and at + zr.END.size + int.from_bytes(tail[at + 20 : at + 22], "little") != len(tail):
        at = tail.rfind(zr.SIGNATURE_END, 0, at)
    if at < 0:
        if _read(file, 0, 2) == zr.SIGNATURE_LOCAL[:2]:
            raise ArchiveError("the archive is truncated: its end record is missing")
        raise ArchiveError("this is not a ZIP archive")
    _, disk, directory_disk, here, count, length, start, _ = zr.END.unpack_from(tail, at)
    end = tail_start + at
    if zr.MAX_16 in (here, count) or zr.MAX_32 in (length, start):
        wide = _find_wide_directory(file, end)
        if wide is not None:
            end, disk, directory_disk, here, count, length, start = wide
    if disk or directory_disk or here != count:
        raise ArchiveError("the archive is one part of several")
    if start + length != end:
        raise ArchiveError("the archive is truncated or damaged: its central directory is not where it should be")
    if count * zr.CENTRAL.size > length:
        raise ArchiveError("the archive is damaged: its central directory is too short for its entries")
    return start, length, count


def _find_wide_directory(file: BinaryIO, end: int) -> tuple[int, int, int, int, int, int, int] | None:
    """Like `_find_directory`, from the ZIP64 records before offset `end`; None if there are none."""
    at = end - zr.LOCATOR64.size
    locator = _read(file, at, zr.LOCATOR64.size) if at >= 0 else b""
    if not locator.startswith(zr.SIGNATURE_LOCATOR64):
        return None
    _, disk, offset, disks = zr.LOCATOR64.unpack(locator)
    # The record may have an extensible part, which no writer uses: it must end at the locator.
    if disk or disks > 1 or offset + zr.END64.size != at:
        raise ArchiveError("the archive is damaged: its ZIP64 end record is not where it should be")
    record = zr.END64.unpack(_read(file, offset, zr.END64.size))
    if record[0] != zr.SIGNATURE_END64 or record[1] != zr.END64.size - 12:
        raise ArchiveError("the archive is damaged: its ZIP64 end record is malformed")
    _, _, _, _, disk, directory_disk, here, count, length, start = record
    return offset, disk, directory_disk, here, count, length, start


# -- the central directory ---------------------------------------------------------------------


def _read_directory(file: BinaryIO, start: int, length: int, count: int) -> list[Member]:
    members = []
    end = start + length
    file.seek(start)
    for _ in range(count):
        fixed = file.read(zr.CENTRAL.size)
        if len(fixed) < zr.CENTRAL.size or not fixed.startswith(zr.SIGNATURE_CENTRAL):
            raise ArchiveError("the archive is damaged: its central directory is malformed")
        fields = zr.CENTRAL.unpack(fixed)
        name_size, extra_size, comment_size = fields[10:13]
        rest = file.read(name_size + extra_size + comment_size)
        start += zr.CENTRAL.size + name_size + extra_size + comment_size
        if start > end or len(rest) < name_size + extra_size + comment_size:
            raise ArchiveError("the archive is damaged: its central directory is malformed")
        members.append(_member(fields, rest[:name_size], rest[name_size : name_size + extra_size]))
    if start != end:
        raise ArchiveError("the archive is damaged: its central directory has more than its entries")
    return members


def _member(fields: tuple[int, ...], name: bytes, extra: bytes) -> Member:
    """Parse one record of the central directory and check it by itself."""
    _, _, version, flags, method, clock, date, crc, compressed, size, _, _, _, disk, _, attributes, header = fields
    _check_member(name, flags, method, version & 0xFF, disk)
    mtime_ns = None
    wide = b""
    if extra:
        for kind, field in _extra_fields(extra, name):
            if kind == zr.FIELD_UT and len(field) >= 5 and field[0] & 1:
                mtime_ns = int.from_bytes(field[1:5], "little", signed=True) * _NS
            elif kind == zr.FIELD_ZIP64:
                wide = field
    if mtime_ns is None:
        mtime_ns = zr.ns_of_dos_time(clock, date)
    if zr.MAX_32 in (size, compressed, header):
        size, compressed, header = _widened((size, compressed, header), wide, name)
    if method == zr.STORED and size != compressed:
        raise ArchiveError("the entry is stored, but its two sizes differ", shown(name))
    return Member(name, flags, method, crc, compressed, size, attributes >> 16, mtime_ns, header, 0)


def _check_member(name: bytes, flags: int, method: int, version: int, disk: int) -> None:
    """Refuse unsupported entries, and names that lead outside."""
    if not name:
        raise ArchiveError("an entry has an empty name")
    check_name(name)
    if (
        not (flags & ~_PLAIN_FLAGS or disk)
        and method in (zr.STORED, zr.DEFLATED)
        and version <= _VERSION_MAX
        and is_utf8(name)
    ):
        return  # nearly all entries
    entry = shown(name)
    if flags & zr.FLAG_ENCRYPTED:
        raise ArchiveError("the entry is encrypted", entry)
    if method not in (zr.STORED, zr.DEFLATED) or flags & zr.FLAG_PATCHED:
        raise ArchiveError(f"the entry is compressed with the unsupported method {method}", entry)
    if version > _VERSION_MAX:
        raise ArchiveError(f"the entry needs the unknown ZIP version {version / 10}", entry)
    if disk:
        raise ArchiveError("the entry is on another part of several", entry)
    if flags & zr.FLAG_UTF8 and not is_utf8(name):
        raise ArchiveError("the name is marked as UTF-8 but is not valid UTF-8", entry)


def _extra_fields(extra: bytes, name: bytes) -> list[tuple[int, bytes]]:
    try:
        return list(zr.extra_fields(extra))
    except ValueError as error:
        raise ArchiveError(f"the entry is damaged: {error}", shown(name)) from None


def _widened(values: tuple[int, ...], field: bytes, name: bytes) -> list[int]:
    """Replace values that are all ones by those of the ZIP64 field, in order (4.5.3)."""
    result = []
    for value in values:
        if value != zr.MAX_32:
            result.append(value)
        elif len(field) >= 8:
            result.append(int.from_bytes(field[:8], "little"))
            field = field[8:]
        else:
            raise ArchiveError("the entry is damaged: its ZIP64 field is too short", shown(name))
    return result


# -- all entries together ----------------------------------------------------------------------


def _check_limits(members: list[Member], limits: ArchiveLimits) -> None:
    total = 0
    names: set[bytes] = set()
    for member in members:
        if member.name in names:
            raise ArchiveError("the archive has two entries of this name", member.shown)
        names.add(member.name)
        if member.size > limits.ratio_from_bytes and member.size > limits.ratio * member.compressed:
            raise ArchiveError(f"the entry claims to expand more than {limits.ratio} times", member.shown)
        total += member.size
        if total > limits.total_bytes:
            raise ArchiveError(f"the archive holds more than {limits.total_bytes} bytes", member.shown)


def _check_overlap(members: list[Member], directory: int) -> None:
    """Refuse entries whose data overlaps another entry or the directory; `members` are ordered by offset."""
    end = 0
    for member in members:
        if member.header < end:
            raise ArchiveError("the entry overlaps another one", member.shown)
        end = member.header + zr.LOCAL.size + len(member.name) + member.compressed
        if end > directory:
            raise ArchiveError("the entry overlaps the central directory", member.shown)
    if members and members[0].header:
        raise ArchiveError("the archive has bytes before its first entry", members[0].shown)


def data_start(file: BinaryIO, member: Member, end: int) -> int:
    """The offset of the data of `member`; checks its local header, and that its data ends at offset `end`."""
    local = _read(file, member.header, zr.LOCAL.size + len(member.name))
    if len(local) < zr.LOCAL.size + len(member.name) or not local.startswith(zr.SIGNATURE_LOCAL):
        raise ArchiveError("the entry is damaged: it has no local header", member.shown)
    _, _, flags, method, _, _, crc, compressed, size, name_size, extra_size = zr.LOCAL.unpack_from(local)
    if name_size != len(member.name) or local[zr.LOCAL.size :] != member.name:
        raise ArchiveError("the local header has another name", member.shown)
    if (flags, method) != (member.flags, member.method):
        raise ArchiveError("the local header contradicts the central directory", member.shown)
    extra = file.read(extra_size)
    if len(extra) < extra_size:
        raise ArchiveError("the entry is damaged: it has no local header", member.shown)
    if zr.MAX_32 in (size, compressed):
        wide = next((field for kind, field in _extra_fields(extra, member.name) if kind == zr.FIELD_ZIP64), None)
        if wide is not None:
            size, compressed = _widened((size, compressed), wide, member.name)
    elif extra:
        _extra_fields(extra, member.name)
    sums = (crc, compressed, size)
    if sums != member.sums and not (flags & zr.FLAG_DESCRIPTOR and sums == (0, 0, 0)):
        raise ArchiveError("the local header contradicts the central directory", member.shown)
    data: int = member.header + len(local) + extra_size
    gap = end - data - member.compressed
    if gap < 0:
        raise ArchiveError("the entry overlaps another one", member.shown)
    found = b"" if not gap else _read(file, end - gap, gap) if gap <= zr.DESCRIPTOR64.size else None
    if not _is_descriptor(found, member):
        raise ArchiveError("bytes that belong to no entry follow the entry", member.shown)
    return data


def _is_descriptor(found: bytes | None, member: Member) -> bool:
    """Whether the bytes after the data are correct: none, or the data descriptor (4.3.9)."""
    if not member.flags & zr.FLAG_DESCRIPTOR:
        return found == b""
    possible = [zr.DESCRIPTOR64.pack(zr.SIGNATURE_DESCRIPTOR, *member.sums)]
    if member.size <= zr.MAX_32 and member.compressed <= zr.MAX_32:
        possible.append(zr.DESCRIPTOR.pack(zr.SIGNATURE_DESCRIPTOR, *member.sums))
    # The signature is optional (4.3.9.3).
    return found is not None and any(found in (record, record[4:]) for record in possible)
