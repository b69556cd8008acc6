"""Hiding: which names below an overlay does not show, by patterns in gitignore's syntax.

Source: gitignore(5), "PATTERN FORMAT".
"""

from __future__ import annotations

from collections.abc import Sequence

from pathspec import GitIgnoreSpec

__all__ = ["Hiding"]


class Hiding:
    """`exclude` hides what it matches, and all below.  Where there are patterns to `include`, a file is seen only if
    one of them matches it or a directory that it is in; directories are seen.  What both match is hidden.
    """

    __slots__ = ("_exclude", "_include")

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        """ValueError for a pattern that is none."""
        self._include = GitIgnoreSpec.from_lines(include) if include else None
        self._exclude = GitIgnoreSpec.from_lines(exclude) if exclude else None

    def __bool__(self) -> bool:
        return self._include is not None or self._exclude is not None

    def hides(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether the entry at `path` is not to be seen.  What is above it is."""
        if self._exclude is None and self._include is None:
            return False
        text = path.decode("utf-8", "surrogateescape")
        shown = text + "/" if is_directory else text
        if self._exclude is not None and self._exclude.match_file(shown):
            return True
        return self._include is not None and not is_directory and not self._include.match_file(shown)
