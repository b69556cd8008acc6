"""Brace expansion: "{a,b{c,d}}" in a glob pattern becomes several patterns, before anything else is parsed.

As in bash, a group has at least one comma at its own level.  Any other brace, and a character after a backslash, is
literal.

bracex 3.2 does not fit: it also expands "{1..3}" and "{a..c}", which are file names here, leaves "${a,b}" alone, drops
empty alternatives ("{,}" gives no pattern), and raises RecursionError for a thousand nested braces.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

__all__ = ["MAX_ALTERNATIVES", "expand"]

MAX_ALTERNATIVES: Final = 1_000  # twenty groups "{a,b}" would give a million patterns


def expand(pattern: str) -> list[str]:
    """Return the patterns that `pattern` stands for, in order.  ValueError for more than MAX_ALTERNATIVES."""
    done: list[str] = []
    waiting = [(pattern, 0)]  # a stack; no group starts before the offset
    while waiting:
        text, looked_at = waiting.pop()
        group = _first_group(text, looked_at)
        if group is None:
            done.append(text)
        else:
            start, commas, end = group
            bounds = [start, *commas, end]
            parts = [text[a + 1 : b] for a, b in pairwise(bounds)]
            waiting.extend((text[:start] + part + text[end + 1 :], start) for part in reversed(parts))
        if len(done) + len(waiting) > MAX_ALTERNATIVES:
            raise ValueError(f"the braces of the pattern stand for more than {MAX_ALTERNATIVES} patterns")
    return done


def _first_group(text: str, start: int) -> tuple[int, list[int], int] | None:
    """The offsets of the first group's opening brace, its own commas, and its closing brace; None without a group.

    One pass: groups are recorded when they close, and the group that opened first is returned.
    """
    opened: list[tuple[int, list[int]]] = []
    best: tuple[int, list[int], int] | None = None
    at = start
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "{":
            opened.append((at, []))
        elif character == "," and opened:
            opened[-1][1].append(at)
        elif character == "}" and opened:
            begin, commas = opened.pop()
            if commas and (best is None or begin < best[0]):
                best = (begin, commas, at)
            if best is not None and not opened:
                break
        at += 1
    return best
