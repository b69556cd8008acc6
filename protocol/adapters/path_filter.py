"""PathFilter: which paths of a tree are shown, by patterns in gitignore's syntax.

Source: gitignore(5), "PATTERN FORMAT".
"""

from __future__ import annotations

from collections.abc import Sequence

from pathspec import GitIgnoreSpec

__all__ = ["PathFilter"]


def _spec(patterns: Sequence[str]) -> GitIgnoreSpec | None:
    # pathspec prefers its RE2 backend if google-re2 is installed, but RE2 refuses the surrogates that stand for bytes
    # that are not UTF-8.
    return GitIgnoreSpec.from_lines(patterns, backend="simple") if patterns else None


class PathFilter:
    """Hides what a pattern of `exclude` matches, and everything below it.

    With `include`, a file is shown only if one of these patterns matches the file or a directory above it; directories
    are always shown.  A path that both match is hidden.
    """

    __slots__ = ("_exclude", "_include")

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        """Raise ValueError for an invalid pattern."""
        self._include = _spec(include)
        self._exclude = _spec(exclude)

    def __bool__(self) -> bool:
        return self._include is not None or self._exclude is not None

    def lists(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether a change of the entry at `path`, which `hides` does not hide, is to be listed.

        A directory that no pattern of `include` matches is shown only for the files below it.
        """
        if self._include is None or not is_directory:
            return True
        return self._include.match_file(path.decode("utf-8", "surrogateescape") + "/")

    def hides(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether the entry at `path` is hidden; the caller has checked the directories above it."""
        if self._exclude is None and self._include is None:
            return False
        text = path.decode("utf-8", "surrogateescape")
        shown = text + "/" if is_directory else text
        if self._exclude is not None and self._exclude.match_file(shown):
            return True
        return self._include is not None and not is_directory and not self._include.match_file(shown)
