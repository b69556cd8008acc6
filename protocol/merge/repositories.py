"""Git repositories in a merge: each is one unit, which stays as it is in `ours` or becomes what it is in `theirs`.

A repository is everything at and below a path named `.git`, or below another directory that has `HEAD`, `objects` and
`refs`.  Those of submodules and of linked worktrees below `.git` belong to it.  If both sides changed it, the merge
keeps that of `ours`, and `protocol.merge.git.fetch_repository` brings the branches of `theirs` into it.

An index that only has other times and inode numbers of the files is no change: `git status` writes it anew.

Source: gitrepository-layout(5), gitformat-index(5).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from protocol.diff.tree_diff import Change, candidate_pairs, entry_or_none
from protocol.merge.merged_tree import joined
from protocol.merge.sides import Sides, Trees, metadata_of
from protocol.tree import Tree, TreeEntry
from protocol.values import Value

_GIT: Final = b".git"
_INDEX: Final = b"index"
_INDEX_BYTES_MAX: Final = 64 << 20  # larger ones are compared as they are
_HASHES_BYTES: Final = (20, 32)  # SHA-1, SHA-256
_EXTENDED: Final = 0x40
_SPLIT: Final = b"link"  # the extension of a split index: another file has a part of it


class Decided(Value):
    """The repositories that `theirs` may have changed.

    `kept`: those that stay as in `ours`.  `both`: the ones among these that both sides changed, sorted.  `taken`: paths
    in the others at which the file of `theirs` replaces an index that `ours` only wrote anew.
    """

    kept: Collection[bytes] = frozenset()
    both: tuple[bytes, ...] = ()
    taken: Collection[bytes] = frozenset()


class Repositories:
    """The git repositories in three trees."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        # directory -> the repository that it is, or is in
        self._known: dict[bytes, bytes | None] = {b"": b"" if self._is_bare(b"") else None}

    def of(self, path: bytes, *, is_directory: bool = False) -> bytes | None:
        """Return the outermost repository that has `path`, or is there; None if there is none."""
        above, _, name = path.rpartition(b"/")
        found = self._of_directory(path if is_directory else above)
        return path if found is None and name == _GIT else found

    def _of_directory(self, path: bytes) -> bytes | None:
        new = []
        at = path
        while at not in self._known:
            new.append(at)
            at = at.rpartition(b"/")[0]
        for directory in reversed(new):
            above, _, name = directory.rpartition(b"/")
            found = self._known[above]
            if found is None and (name == _GIT or self._is_bare(directory)):
                found = directory
            self._known[directory] = found
        return self._known[path]

    def _is_bare(self, path: bytes) -> bool:
        def is_directory(tree: Tree, name: bytes) -> bool:
            entry = entry_or_none(tree, joined(path, name))
            return entry is not None and entry.is_dir

        return any(
            entry_or_none(tree, joined(path, b"HEAD")) is not None
            and is_directory(tree, b"objects")
            and is_directory(tree, b"refs")
            for tree in (self._trees.base, self._trees.ours, self._trees.theirs)
        )

    def decide(self, changed: Mapping[bytes, Sides]) -> Decided:
        """Decide the repositories that have paths in `changed`, which `theirs` changed."""
        found: dict[bytes, list[Sides]] = {}
        for path, sides in changed.items():
            entries = (sides.base, sides.ours, sides.theirs)
            is_directory = any(entry is not None and entry.is_dir for entry in entries)
            repository = self.of(path, is_directory=is_directory)
            if repository is not None:
                found.setdefault(repository, []).append(sides)
        trees = self._trees
        kept, both, taken = set(), [], set()
        for repository, paths in found.items():
            if not any(self._differs(trees.base, each.base, trees.theirs, each.theirs) for each in paths):
                kept.add(repository)
            elif self.is_changed(trees.ours, repository):
                kept.add(repository)
                if any(self._differs(trees.ours, each.ours, trees.theirs, each.theirs) for each in paths):
                    both.append(repository)
            else:
                taken |= {each.path for each in paths if each.ours is not None and _is_index(each.ours)}
        return Decided(kept, tuple(sorted(both)), taken)

    def outermost_changes(self, changed: Sequence[Change]) -> list[bytes]:
        """Return the paths of changes between the base and `ours`: of those in a repository, that of the repository.

        A repository is left out if only its index was written anew.
        """
        found: dict[bytes, None] = {}
        for change in changed:
            entries = (change.old, change.new)
            repository = self.of(change.path, is_directory=any(each is not None and each.is_dir for each in entries))
            if repository is None or (repository not in found and self.is_changed(self._trees.ours, repository)):
                found[change.path if repository is None else repository] = None
        return list(found)

    def is_changed(self, tree: Tree, repository: bytes) -> bool:
        """Whether `tree` has another repository there than the base."""
        base = self._trees.base
        if entry_or_none(base, repository) is None and entry_or_none(tree, repository) is None:
            return False
        return any(self._differs(base, old, tree, new) for old, new in candidate_pairs(base, tree, paths=[repository]))

    def _differs(self, old_tree: Tree, old: TreeEntry | None, new_tree: Tree, new: TreeEntry | None) -> bool:
        self._trees.keep_going()
        if old is None or new is None:
            return old is not new
        if metadata_of(old) != metadata_of(new):
            return True
        if old.is_dir or self._trees.is_same_content(old_tree, old, new_tree, new):
            return False
        if not (_is_index(old) and _is_index(new)):
            return True
        staged = _staged(old_tree.read(old.path, 0, old.size))
        return staged is None or staged != _staged(new_tree.read(new.path, 0, new.size))


def _is_index(entry: TreeEntry) -> bool:
    return entry.is_file and entry.size <= _INDEX_BYTES_MAX and entry.path.rpartition(b"/")[2] == _INDEX


def _staged(index: bytes) -> list[tuple[bytes, ...]] | None:
    """The entries of an index without the state of the files in the work tree; None if it cannot be told."""
    for hash_bytes in _HASHES_BYTES:
        try:
            return _parsed(index, hash_bytes)
        except (ValueError, IndexError):
            continue
    return None


def _parsed(index: bytes, hash_bytes: int) -> list[tuple[bytes, ...]]:
    version, count = _number(index, 4), _number(index, 8)
    if index[:4] != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("not an index")
    found: list[tuple[bytes, ...]] = []
    at, name = 12, b""
    for _ in range(count):
        start = at
        at += 40 + hash_bytes + (4 if index[at + 40 + hash_bytes] & _EXTENDED else 2)
        described = index[start + 24 : start + 28], index[start + 40 : at]  # the mode; the hash and the flags
        if version == 4:  # the name without what it has in common with the one before
            dropped, at = _varint(index, at)
            end = index.index(b"\0", at)
            name = name[: len(name) - dropped] + index[at:end]
            at = end + 1
        else:
            end = index.index(b"\0", at)
            name = index[at:end]
            at = start + ((end - start) // 8 + 1) * 8
        found.append((name, *described))
    while at < len(index) - hash_bytes:
        if index[at : at + 4] == _SPLIT:
            raise ValueError("a part of the index is in another file")
        at += 8 + _number(index, at + 4)
    if at != len(index) - hash_bytes:
        raise ValueError("not an index with hashes of that size")
    return found


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number as git's `decode_varint` does; return it and where it ends."""
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 0x7F)
    return value, at + 1
