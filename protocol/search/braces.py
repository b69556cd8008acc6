"""Braces: "{a,b{c,d}}" written out, before anything else in a glob pattern is looked at.

As in bash: a group has at least one comma at its own level; any other brace stands for itself, and so does
what follows a backslash.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

__all__ = ["MAX_ALTERNATIVES", "expand"]

MAX_ALTERNATIVES: Final = 1_000  # "{a,b}" twenty times over would be a million


def expand(pattern: str) -> list[str]:
    """The patterns that `pattern` stands for, in order; ValueError beyond MAX_ALTERNATIVES."""
    done: list[str] = []
    waiting = [(pattern, 0)]  # the last is the next; up to the offset there is no group
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
    """Where the first group opens, its own commas are, and it closes.

    One pass: groups are remembered as they close, and the first to open is what is wanted.
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
