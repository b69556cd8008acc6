"""States without what the policy hides, and the check that a change by the daemon itself respects the policy.

Threading: `HiddenTree` as any tree; `check_changes` runs where its caller has the two trees.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from protocol.adapters.trees import FilteredTree
from protocol.diff.tree_diff import Change, Pair, candidate_pairs, compare_pairs
from protocol.errors import DeniedByPolicyError, os_error, shown
from protocol.tree import Tree, TreeEntry

if TYPE_CHECKING:
    from vfsd.daemon.policy.rules import PolicyRules

_PATHS_SHOWN: Final = 3


class HiddenTree(FilteredTree):
    """`tree` without what `rules` hide, by any of a file's names."""

    def __init__(self, tree: Tree, rules: PolicyRules) -> None:
        super().__init__(tree, lambda path, is_directory: rules.hides(path, is_directory=is_directory))
        self._rules = rules
        self._linked: tuple[int, frozenset[int]] | None = None  # the version of the rules; files with a hidden name
        self.left_out: set[bytes] = set()
        """The names that were left out so far, without those below hidden directories."""

    def _is_shown(self, entry: TreeEntry) -> bool:
        return entry.nlink <= 1 or entry.is_dir or entry.inode not in self._hidden_inodes()

    def _hidden_inodes(self) -> frozenset[int]:
        """The files with several names, at least one of them hidden; the first call walks the tree."""
        version = self._rules.version
        if self._linked is None or self._linked[0] != version:
            found = set()
            for entry in _walk(self._tree):
                if entry.nlink > 1 and not entry.is_dir and self._rules.hides(entry.path, is_directory=False):
                    found.add(entry.inode)
            self._linked = version, frozenset(found)
        return self._linked[1]

    def entry(self, path: bytes) -> TreeEntry:
        entry = super().entry(path)
        if not self._is_shown(entry):
            raise os_error(errno.ENOENT, shown(path))
        return entry

    def _shown_below(self, directory: bytes) -> list[TreeEntry]:
        prefix = directory + b"/" if directory else b""
        found = []
        for name in self._tree.children(directory):
            entry = self._tree.entry(prefix + name)
            if self._hides(entry.path, entry.is_dir) or not self._is_shown(entry):
                self.left_out.add(entry.path)
            else:
                found.append(entry)
        return found


def left_out_of(tree: Tree) -> int:
    """Return how many names a walk of a filtered tree has left out because the policy hides them."""
    return len(tree.left_out) if isinstance(tree, HiddenTree) else 0


def _walk(tree: Tree) -> Iterable[TreeEntry]:
    """Walk a state, by `entry` and `children`: it may have no other methods."""
    waiting = [b""]
    while waiting:
        at = waiting.pop()
        entry = tree.entry(at)
        yield entry
        if entry.is_dir:
            waiting += (at + b"/" + name if at else name for name in tree.children(at))


def guarded_changes(
    rules: PolicyRules,
    old: Tree,
    new: Tree,
    *,
    paths: Sequence[bytes] = (),
    keep_going: Callable[[], None] = lambda: None,
) -> Iterator[Change]:
    """Yield the changes from `old` to `new` that the policy may refuse.

    Their content is compared, because an archive may have a file of the same size and mtime.
    """

    def is_guarded(pair: Pair) -> bool:
        keep_going()
        return any(entry is not None and _reason(rules, entry) is not None for entry in pair)

    for one in compare_pairs(
        old, new, filter(is_guarded, candidate_pairs(old, new, paths=paths, keep_going=keep_going))
    ):
        if one.new is not None and one.new.nlink > 1 and not one.new.is_dir:
            rules.has_linked = True
        if one.kind is not None:
            yield Change(one.path, one.kind, one.old, one.new)


def _reason(rules: PolicyRules, entry: TreeEntry) -> str | None:
    """Return why the policy refuses a change that makes `entry`; None if it does not."""
    if rules.hides(entry.path, is_directory=entry.is_dir):
        return "hidden"
    if rules.protects(entry.path, is_directory=entry.is_dir):
        return "protected"
    return "symlink" if stat.S_ISLNK(entry.mode) and rules.refuses_symlink(entry.path) else None


def check_changes(rules: PolicyRules, changes: Iterable[Change], attempt: str) -> None:
    """Raise DeniedByPolicyError if the policy refuses one of `changes`, with the paths that it protects.

    A hidden path is counted and not named.
    """
    protected: list[bytes] = []
    hidden = 0
    for change in changes:
        before, after = (None if entry is None else _reason(rules, entry) for entry in (change.old, change.new))
        if "hidden" in {before, after}:
            hidden += 1
        elif "protected" in {before, after} or after == "symlink":
            protected.append(change.path)
    if not protected and not hidden:
        return
    parts = []
    only = protected[0] if len(protected) == 1 and not hidden else None  # the error names it
    if only is not None:
        parts.append("a protected path")
    elif protected:
        listed = ", ".join(map(shown, protected[:_PATHS_SHOWN])) + (", ..." if len(protected) > _PATHS_SHOWN else "")
        parts.append(f"{len(protected):,} protected path{'s' * (len(protected) > 1)} ({listed})")
    if hidden:
        parts.append(f"{hidden:,} hidden path{'s' * (hidden > 1)}")
    reason = f"the policy of this workspace refuses it, because it would change {' and '.join(parts)}"
    raise DeniedByPolicyError(attempt, only, reason + _ADVICE)


_ADVICE: Final = "; nothing was changed; name other paths only, or change these below the mount"
