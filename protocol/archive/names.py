"""Names in an archive: how paths become names, and which names are refused."""

from __future__ import annotations

import re
from typing import Final

from protocol.errors import ArchiveError, shown
from protocol.volume import NAME_MAX

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
