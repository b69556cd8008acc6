"""The three versions of one path, what can be decided without the rest of the tree, and the result of a merge.

A side that did not change something takes the change of the other side.  Content and each kind of metadata are merged
separately, so a chmod on one side and an edit on the other go together.

`Merge` is what a merge returns: the merged tree, the paths at which it differs from `ours`, and the conflicts.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from protocol.diff.tree_diff import Change, comparer, same_bytes
from protocol.tree import CHUNK_BYTES, TYPE_MASK, Chunk, Tree, TreeEntry
from protocol.values import Value

# Files of this size or more, which the trees cannot compare without reading, are equal if size and mtime are equal:
# reading two sparse files of 10^15 bytes would not end.
COMPARED_BYTES: Final = 4 << 30

Side: TypeAlias = Literal["ours", "theirs"]
_Value = TypeVar("_Value")


class Sides(Value):
    """The entries of one path; None where a tree does not have it.

    `is_content_of_base`: whether `theirs` has the content of `base`; None if that is not known yet.
    """

    path: bytes
    base: TreeEntry | None
    ours: TreeEntry | None
    theirs: TreeEntry | None
    is_content_of_base: bool | None = None


class Trees(Value):
    """The trees that are merged.  `keep_going` is called often while contents are compared."""

    base: Tree
    ours: Tree
    theirs: Tree
    keep_going: Callable[[], None]

    def is_same(self, old_tree: Tree, old: TreeEntry, new_tree: Tree, new: TreeEntry) -> bool:
        """Whether two entries have the same type, content and metadata.  The mtime does not count."""
        return metadata_of(old) == metadata_of(new) and self.is_same_content(old_tree, old, new_tree, new)

    def is_same_content(self, old_tree: Tree, old: TreeEntry, new_tree: Tree, new: TreeEntry) -> bool:
        """Whether two entries have the same type and content (target, device number)."""
        if type_of(old) != type_of(new) or old.size != new.size:
            return False
        if not old.is_file:
            return (old.target, old.rdev) == (new.target, new.rdev)
        if old_tree is new_tree and old.path == new.path:
            return True
        if old.path == new.path:
            # Both trees are asked: only an overlay over a stored snapshot, for example, knows which of its contents the
            # store has.
            for one, other in ((new_tree, old_tree), (old_tree, new_tree)):
                comparing = comparer(one)
                same = None if comparing is None else comparing.same_content(new.path, other)
                if same is not None:
                    return same
        if old.size >= COMPARED_BYTES:
            return old.mtime_ns == new.mtime_ns
        return same_bytes(self._chunks(old_tree, old), self._chunks(new_tree, new))

    def _chunks(self, tree: Tree, entry: TreeEntry) -> Iterator[Chunk]:
        for chunk in tree.chunks(entry.path, 16 * CHUNK_BYTES):
            self.keep_going()
            yield chunk


def type_of(entry: TreeEntry) -> int:
    """The file type in the mode."""
    return entry.mode & TYPE_MASK


def metadata_of(entry: TreeEntry) -> tuple[int, int, int, dict[bytes, bytes]]:
    """Mode with type, owner, group and xattrs."""
    return entry.mode, entry.uid, entry.gid, dict(entry.xattrs)


def merged_metadata(
    path: bytes, base: TreeEntry | None, ours: TreeEntry, theirs: TreeEntry, side: Side
) -> tuple[TreeEntry, list[Conflict]]:
    """`ours` with the merged mode, owner and xattrs of entries of one type; conflicts are resolved for `side`.

    Without `base` every difference is a conflict.
    """
    if metadata_of(ours) == metadata_of(theirs):
        return ours, []
    conflicts: list[Conflict] = []

    def conflict(reason: ConflictReason, detail: str) -> None:
        conflicts.append(Conflict(path, reason, detail))

    def chosen(old: _Value | None, here: _Value, there: _Value, reason: ConflictReason, show: str) -> _Value:
        if theirs_is_due(old, here, there):
            return there
        if here in (there, old) or there == old:
            return here
        conflict(reason, f"{show.format(here)} in ours, {show.format(there)} in theirs")
        return there if side == "theirs" else here

    bits = None if base is None else stat.S_IMODE(base.mode)
    mode = chosen(bits, stat.S_IMODE(ours.mode), stat.S_IMODE(theirs.mode), "mode", "mode {:04o}")
    owners = None if base is None else (base.uid, base.gid)
    uid, gid = chosen(owners, (ours.uid, ours.gid), (theirs.uid, theirs.gid), "owner", "owner {0[0]}:{0[1]}")
    xattrs, differing = _merged_xattrs(base.xattrs if base else {}, ours.xattrs, theirs.xattrs, side)
    if differing:
        conflict("xattrs", f"different values of {names_shown(differing)}")
    merged = msgspec.structs.replace(ours, mode=type_of(ours) | mode, uid=uid, gid=gid, xattrs=xattrs)
    return merged, conflicts


def theirs_is_due(base: object, ours: object, theirs: object) -> bool:
    """Whether only `theirs` changed a value."""
    return ours == base != theirs


def _merged_xattrs(
    base: Mapping[bytes, bytes], ours: Mapping[bytes, bytes], theirs: Mapping[bytes, bytes], side: Side
) -> tuple[dict[bytes, bytes], list[bytes]]:
    """The merged extended attributes, and the names that both sides changed in different ways."""
    merged: dict[bytes, bytes] = {}
    differing: list[bytes] = []
    for name in sorted({*base, *ours, *theirs}):
        old, here, there = base.get(name), ours.get(name), theirs.get(name)
        value = here
        if theirs_is_due(old, here, there):
            value = there
        elif here not in (there, old) and there != old:
            differing.append(name)
            value = there if side == "theirs" else here
        if value is not None:
            merged[name] = value
    return merged, differing


# -- the result of a merge -------------------------------------------------------------------------
# How conflicts end; `docs/forks.md` has a table of all rules.
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
    "shared",  # `vfsd revert`: others changed it in the range, too
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
