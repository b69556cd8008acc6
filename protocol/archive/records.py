"""The records of a ZIP file as bytes: layouts, flags, times.

Source: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 (local header) to 4.3.16 (end of central directory) and
4.5.3 (ZIP64 field); Info-ZIP's extrafld.txt for the "UT" field and unix/unix.c for external attributes.
"""

from __future__ import annotations

import calendar
import functools
import time
from collections.abc import Iterator
from struct import Struct
from typing import Final

SIGNATURE_LOCAL: Final = b"PK\x03\x04"
SIGNATURE_CENTRAL: Final = b"PK\x01\x02"
SIGNATURE_DESCRIPTOR: Final = b"PK\x07\x08"
SIGNATURE_END: Final = b"PK\x05\x06"
SIGNATURE_END64: Final = b"PK\x06\x06"
SIGNATURE_LOCATOR64: Final = b"PK\x06\x07"

# signature, version needed, flags, method, time, date, CRC, compressed size, size, name and extra length
LOCAL: Final = Struct("<4s5H3I2H")
# signature, made by, version needed, flags, method, time, date, CRC, compressed size, size, name, extra and
# comment length, disk, internal attributes, external attributes, offset of the local header
CENTRAL: Final = Struct("<4s6H3I5H2I")
# signature, disk, disk of the directory, entries here, entries, size and offset of the directory, comment length
END: Final = Struct("<4s4H2IH")
# signature, size of the rest, made by, version needed, disk, disk of the directory, entries here, entries, size, offset
END64: Final = Struct("<4sQ2H2I4Q")
# signature, disk of the record, its offset, disks
LOCATOR64: Final = Struct("<4sIQI")
# signature, CRC, compressed size, size
DESCRIPTOR: Final = Struct("<4s3I")
DESCRIPTOR64: Final = Struct("<4sI2Q")

STORED: Final = 0
DEFLATED: Final = 8
FLAG_ENCRYPTED: Final = 0x2041  # bit 0, bit 6 (strong encryption), bit 13 (encrypted directory)
FLAG_DESCRIPTOR: Final = 0x0008  # CRC and sizes follow the data
FLAG_PATCHED: Final = 0x0020  # compressed patched data
FLAG_UTF8: Final = 0x0800
VERSION_DEFLATE: Final = 20
VERSION_ZIP64: Final = 45
MADE_BY_UNIX: Final = 3 << 8 | 30  # as Info-ZIP's zip 3.0
MSDOS_DIRECTORY: Final = 0x10  # in the low byte of external_attr
MAX_16: Final = 0xFFFF  # in a 16-bit or 32-bit field: the value is in the ZIP64 record
MAX_32: Final = 0xFFFF_FFFF

FIELD_ZIP64: Final = 0x0001
FIELD_UT: Final = 0x5455
_UT: Final = Struct("<HHBi")
_FIELD: Final = Struct("<HH")

_NS: Final = 1_000_000_000
_DOS_FIRST_S: Final = calendar.timegm((1980, 1, 1, 0, 0, 0))
_DOS_LAST_S: Final = calendar.timegm((2107, 12, 31, 23, 59, 58))


@functools.lru_cache(maxsize=1024)
def times(seconds: int) -> tuple[int, int, bytes]:
    """A time since the epoch as (time, date) in MS-DOS format, and as Info-ZIP's extra field; all UTC.

    The MS-DOS time is clamped to its range; the extra field is empty if 32 bits cannot hold the time.
    """
    t = time.gmtime(min(max(seconds, _DOS_FIRST_S), _DOS_LAST_S))
    clock = t.tm_hour << 11 | t.tm_min << 5 | t.tm_sec // 2
    date = (t.tm_year - 1980) << 9 | t.tm_mon << 5 | t.tm_mday
    fits = -(1 << 31) <= seconds < 1 << 31
    return clock, date, _UT.pack(FIELD_UT, 5, 1, seconds) if fits else b""


def ns_of_dos_time(clock: int, date: int) -> int:
    """The inverse of `times`; 1980 for dates that do not exist."""
    year, month, day = 1980 + (date >> 9), date >> 5 & 15, date & 31
    try:
        return calendar.timegm((year, month, day, clock >> 11, clock >> 5 & 63, (clock & 31) * 2)) * _NS
    except ValueError:
        return _DOS_FIRST_S * _NS


def extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """(id, content) of each extra field.  ValueError when one reaches past the end."""
    at = 0
    # Up to three bytes of padding at the end are common (zipalign) and harmless.
    while at + _FIELD.size <= len(extra):
        kind, size = _FIELD.unpack_from(extra, at)
        at += _FIELD.size
        if at + size > len(extra):
            raise ValueError("an extra field reaches past its end")
        yield kind, extra[at : at + size]
        at += size
