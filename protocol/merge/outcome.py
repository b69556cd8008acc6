"""What a merge returns: the merged tree, the paths at which it differs from `ours`, and the conflicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from protocol.diff.tree_diff import Change
from protocol.tree import Tree
from protocol.values import Value

# What happens to conflicts; `docs/merge.md` has a table of all rules.
Policy: TypeAlias = Literal["fail", "ours", "theirs", "markers"]

# Why a path cannot be merged.  These names are part of `vfsd merge --json`.
ConflictReason: TypeAlias = Literal[
    "content",  # both sides changed the same lines, or git is missing
    "binary",  # both sides changed a file that is not text
    "large",  # both sides changed a file that is too large for a merge by lines
    "created",  # both sides created it, with different content
    "delete/modify",  # one side deleted it, the other changed it
    "directory/file",  # one side has a directory there, the other something else
    "type",  # one side made it another type of file (a symlink, a fifo), the other changed it
    "symlink",  # both sides changed the symlink's target
    "device",  # both sides changed the device number
    "mode",  # both sides changed the permission bits
    "owner",  # both sides changed the owner or the group
    "xattrs",  # both sides changed the same extended attribute
    "links",  # the names of one file (hard links) would need different content
]

_NAMES_SHOWN: Final = 3
KEPT_SUFFIX: Final = b"~theirs"  # of a version that the policy "markers" keeps under a name of its own


class Conflict(Value):
    """A path that both sides changed in different ways.

    `detail` is one line for people.  `kept_as` is the path at which the policy "markers" keeps the version of `theirs`
    because the path itself has the version of `ours`; empty if it keeps none.
    """

    path: bytes
    reason: ConflictReason
    detail: str
    kept_as: bytes = b""


class Merge(Value):
    """The result of a merge.

    `tree` is `ours` with the changes of `theirs`, and with the policy applied to the conflicts ("fail": as "ours").  It
    can be read as long as the trees that were merged.  `paths` are the outermost paths at which it differs from `ours`,
    sorted as `Tree.walk` does; none if the merge changes nothing.  `changes` are the differences between `ours` and
    `tree` (see `tree_diff.changes`; unlike there, a path is also listed if only the set of its hard links differs).
    `conflicts` are sorted by path and do not depend on the policy, except for `kept_as`.  `repositories` are those that
    both sides changed, and that are as in `ours`.
    """

    tree: Tree
    paths: tuple[bytes, ...]
    changes: tuple[Change, ...]
    conflicts: tuple[Conflict, ...]
    repositories: tuple[bytes, ...] = ()


def names_shown(names: Sequence[bytes]) -> str:
    """Names or paths for a message of one line; a control character as an escape, and only the first names."""
    shown = [_on_one_line(name.decode("utf-8", "backslashreplace")) for name in names[:_NAMES_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _on_one_line(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
