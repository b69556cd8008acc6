"""PathFilter: which paths of a tree are shown, by patterns in gitignore's syntax.

Source: gitignore(5), "PATTERN FORMAT".
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.adapters.git_patterns import GitPatterns

__all__ = ["PathFilter"]


class PathFilter:
    """Hides what a pattern of `exclude` matches, and everything below it.

    With `include`, a file is shown only if one of these patterns matches the file or a directory above it; directories
    are always shown.  A path that both match is hidden.
    """

    __slots__ = ("_exclude", "_include")

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        """Raise ValueError for an invalid pattern."""
        self._include = GitPatterns(include)
        self._exclude = GitPatterns(exclude)

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    def lists(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether a change of the entry at `path`, which `hides` does not hide, is to be listed.

        A directory that no pattern of `include` matches is shown only for the files below it.
        """
        return not (self._include and is_directory) or self._include.matches(path, is_directory=True)

    def hides(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether the entry at `path` is hidden; the caller has checked the directories above it."""
        if self._exclude and self._exclude.matches_here(path, is_directory=is_directory):
            return True
        return bool(self._include) and not is_directory and not self._include.matches(path, is_directory=False)
