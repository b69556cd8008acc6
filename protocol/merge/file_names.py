"""FileNames: all names of the files (hard links) that a merge changes, in the three trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

from protocol.diff.tree_diff import LinkedFiles, entry_or_none, has_links
from protocol.merge.sides import Trees
from protocol.tree import Tree, TreeEntry

Which: TypeAlias = Literal["base", "ours", "theirs"]
WHICH: Final[tuple[Which, ...]] = ("base", "ours", "theirs")


class FileNames:
    """The entries, in all trees, of paths and of all other names of the files there."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._by_name: dict[Which, Tree] = {"base": trees.base, "ours": trees.ours, "theirs": trees.theirs}
        self._files = {which: LinkedFiles(tree, trees.keep_going) for which, tree in self._by_name.items()}
        self._counts: Counter[tuple[Which, int]] = Counter()  # names that were found
        self._asked: set[tuple[Which, int]] = set()
        self.entries: dict[bytes, dict[Which, TreeEntry | None]] = {}

    def add(self, paths: Iterable[bytes]) -> None:
        """Look up `paths`, and all other names of the files at these paths, in all trees.

        A tree is asked for names only if some are missing, because a tree that is not a `NamesFiles` is walked then.
        """
        waiting = {path for path in paths if path not in self.entries}
        while waiting:
            found = [(path, which, entry) for path in waiting for which, entry in self._look_up(path).items()]
            files = {(which, entry.inode): entry for _, which, entry in found if entry is not None and has_links(entry)}
            self._counts.update(
                (which, entry.inode) for _, which, entry in found if entry is not None and has_links(entry)
            )
            incomplete = [
                file for file, entry in files.items() if self._counts[file] < entry.nlink and file not in self._asked
            ]
            self._asked.update(incomplete)
            names = (name for file in incomplete for name in self.names_of(*file))
            waiting = {name for name in names if name not in self.entries}

    def _look_up(self, path: bytes) -> dict[Which, TreeEntry | None]:
        self._trees.keep_going()
        found = self.entries[path] = {which: entry_or_none(tree, path) for which, tree in self._by_name.items()}
        return found

    def names_of(self, which: Which, inode: int) -> list[bytes]:
        """The paths of a file with several names in one of the trees."""
        return self._files[which].names_of(inode)
