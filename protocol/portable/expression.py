r"""Expression: takes the place of `protocol.search.expression` in vfsd-fs.pyz, which has no RE2.

The engine is Python's `re`.  Differences:

- look-around, backreferences and atomic groups are refused as in RE2, but an expression with nested repeats, such as
  `(a+)+$`, may take exponential time;
- `\pL`, `\p{Greek}` and `[[:alpha:]]` are not supported; `\z` is;
- `(?i)` and `ignore_case` fold the case of ASCII letters only, and `\w`, `\d`, `\s` and `\b` are ASCII, as in RE2.
"""

from __future__ import annotations

import re
from typing import Any, Iterator, Tuple

__all__ = ["Expression", "Hit"]

Hit = Tuple[int, int, int, int, int]

_ESCAPES = re.compile(r"\\(.)", re.DOTALL)
_REFUSED = (
    (r"\(\?<?[=!]", "look-around is not supported"),
    (r"\(\?>", "atomic groups are not supported"),
    (r"\(\?P=|(?<!\\)(?:\\\\)*\\[1-9]", "backreferences are not supported"),
    (r"\(\?\(", "conditions are not supported"),
    (r"\(\?#", "comments are not supported"),
    (r"(?<!\\)(?:\\\\)*\\Z", r"\Z is not supported, write \z"),
    (r"(?<!\\)(?:\\\\)*\\C", r"\C is not supported: it can match a part of a character"),
)


class Expression:
    """Compile an expression.  ValueError, with the position, for syntax that is not supported."""

    def __init__(self, pattern: str, *, ignore_case: bool = False) -> None:
        try:
            pattern.encode()
        except UnicodeEncodeError as error:
            raise _invalid(error.start, "not text that can be encoded", pattern) from None
        for syntax, reason in _REFUSED:
            found = re.search(syntax, pattern)
            if found is not None:
                raise _invalid(found.start(), reason, pattern)
        flags = re.ASCII | (re.IGNORECASE if ignore_case else 0)
        try:
            compiled = re.compile(_ESCAPES.sub(_translated, pattern), flags)
        except (re.error, RecursionError, OverflowError) as error:
            raise _invalid(getattr(error, "pos", None) or 0, getattr(error, "msg", str(error)), pattern) from None
        self._search = compiled.search

    def may_match(self, text: bytes) -> bool:  # noqa: ARG002
        """Return True: this engine knows no text that a match requires."""
        return True

    def hits(self, text: bytes, end: Any = None) -> Iterator[Hit]:
        """Yield the matching lines of `text`; see `protocol.search.expression`."""
        if not text:
            return
        if end is None:
            end = len(text) - text.endswith(b"\n")
        at = newlines = 0
        while at <= end:
            line_end = text.find(b"\n", at, end)
            if line_end < 0:
                line_end = end
            line = text[at:line_end].decode("utf-8", "replace")
            found = self._search(line)
            if found is not None:
                start, stop = (at + len(line[:offset].encode()) for offset in found.span())
                yield newlines, at, line_end, start, stop
            at = line_end + 1
            newlines += 1


def _translated(escape: re.Match[str]) -> str:
    return r"\Z" if escape[1] == "z" else escape[0]


def _invalid(position: int, reason: str, pattern: str) -> ValueError:
    return ValueError(f"invalid regular expression at position {position}: {reason}: {pattern!r}")
