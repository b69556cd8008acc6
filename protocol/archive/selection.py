"""Select the entries of a tree that its archive can hold, and their names.

A program that changes directory step by step can make paths of any length.  ZIP names have at most 65,535 bytes.  A
long chain of directories also costs an archive the square of its depth, because each entry repeats its whole path.  So
the length of paths is bounded: to the largest length at which each name fits into a ZIP, and all names together into
the limits of a reader.  An entry below an omitted path has a longer path, and is omitted too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from protocol.archive.limits import ArchiveLimits
from protocol.archive.manifest import xattrs_fit
from protocol.archive.names import FILES, NAME_BYTES_MAX, PATH_BYTES_MAX, escape, is_utf8
from protocol.tree import TreeEntry

# The manifest repeats all names, with some hundred bytes for each record.
_ALL_NAMES_BYTES: Final = ArchiveLimits().manifest_bytes // 4


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries of an archive with their names below files/.

    `skipped` maps each omitted path to the reason; entries below such a path are omitted and not listed.
    """

    entries: list[TreeEntry]
    names: list[str]
    percent: bool
    skipped: dict[bytes, str]


def select(entries: Iterable[TreeEntry], all_names_bytes: int = _ALL_NAMES_BYTES) -> Selection:
    """Choose from `entries`; `all_names_bytes` bounds the sum of the names' lengths.

    Memory is bounded by `all_names_bytes`, however long the paths of the tree are.
    """
    fitting = _Fitting(all_names_bytes)
    for entry in entries:
        fitting.add(entry)
    fitting.shrink(lambda entry: len(entry.path))
    percent = not all(is_utf8(entry.path) for entry in fitting.entries)
    if percent:  # now names may be three times as long as paths
        fitting.shrink(lambda entry: len(escape(entry.path).encode()))
    names = [escape(entry.path) if percent else entry.path.decode() for entry in fitting.entries]
    for entry in fitting.entries:
        if entry.xattrs and not xattrs_fit(entry.xattrs):
            fitting.skipped[entry.path] = "the names of its extended attributes are too long together: archived without"
    return Selection(fitting.entries, names, percent, fitting.skipped)


class _Fitting:
    """The entries that fit so far."""

    def __init__(self, all_names_bytes: int) -> None:
        self.entries: list[TreeEntry] = []
        self.skipped: dict[bytes, str] = {}
        self._most = all_names_bytes
        self._bytes = 0
        self._longest = PATH_BYTES_MAX

    def add(self, entry: TreeEntry) -> None:
        length = len(entry.path)
        if length > self._longest:
            self._skip(entry.path)
            return
        self.entries.append(entry)
        self._bytes += length
        if self._bytes > 2 * self._most:  # not at each entry, which would be quadratic
            self.shrink(lambda entry: len(entry.path))

    def shrink(self, length: Callable[[TreeEntry], int]) -> None:
        """Omit the longest names until the others fit."""
        longest = _longest_that_fit((length(entry) for entry in self.entries), self._most)
        kept = []
        self._bytes = 0
        for entry in self.entries:
            size = length(entry)
            if size > longest:
                self._longest = min(self._longest, len(entry.path) - 1)
            else:
                self._bytes += size
                kept.append(entry)
        if len(kept) == len(self.entries):
            return
        present = {entry.path for entry in kept}
        left_out = [*self.skipped, *(entry.path for entry in self.entries if entry.path not in present)]
        self.entries, self.skipped = kept, {}
        for path in left_out:
            if path.rpartition(b"/")[0] in present:
                self.skipped[path] = _reason(path)

    def _skip(self, path: bytes) -> None:
        # otherwise its directory is omitted as well, and listed
        if path.rfind(b"/") <= self._longest:
            self.skipped[path] = _reason(path)


def _longest_that_fit(lengths: Iterable[int], most: int) -> int:
    """The largest length for which the lengths up to it sum to at most `most`."""
    longest = NAME_BYTES_MAX - len(FILES) - 1
    total = 0
    for length, count in sorted(Counter(lengths).items()):
        total += length * count
        if total > most:
            return min(longest, length - 1)
    return longest


def _reason(path: bytes) -> str:
    return f"its path of {len(path):,} bytes is too long for an archive; it and everything below it are left out"
