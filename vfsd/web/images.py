"""Images: which files a page shows as pictures.

Formats without scripts only, known by their first bytes and not by their name.  SVG is text here.
"""

from __future__ import annotations

from typing import Final

HEAD_BYTES: Final = 16
_FORMATS: Final = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


def image_type(head: bytes) -> str | None:
    """Return the media type of an image by its first `HEAD_BYTES` bytes; None for other files."""
    for magic, media_type in _FORMATS:
        if head.startswith(magic):
            return media_type
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None
