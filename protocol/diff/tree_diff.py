"""Diff: the changes between two trees, entry by entry.

Order: paths are sorted by their components, compared as bytes, which is the order of `Tree.walk`: parents before
children, siblings by name, a directory's whole subtree before its next sibling.

Memory does not grow with the trees or the files: both sides are streamed, and no content is read if the sizes differ.
`protocol.diff.patch` turns changes into line counts and into a patch.
"""

from __future__ import annotations

import contextlib
import functools
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from stat import S_IFMT
from typing import Literal, Protocol, TypeAlias, cast, runtime_checkable

from protocol.errors import os_error
from protocol.tree import Chunk, Filtered, Hole, Tree, TreeEntry, unfiltered
from protocol.types import ChangeCounts
from protocol.values import Value

ChangeKind: TypeAlias = Literal["added", "modified", "removed", "type", "metadata"]
Pair: TypeAlias = tuple[TreeEntry | None, TreeEntry | None]


class Change(Value):
    """One path that differs; `old` is None if it was added, `new` if it was removed.

    `kind` is the first of these that applies: "added", "removed"; "type" (a file became a directory, ...); "modified"
    (a file's content, a symlink's target or a device's number); "metadata" (mode, owner, group, xattrs or mtime, or the
    other names of a file).

    A directory's mtime does not count, because adding a file changes it; the mtime of anything else does, as
    "metadata".  Link counts and inode numbers never count, but hard links do: if the path became a name of another
    file, `linked` is the first name of that file; if it is no longer a name of its old file, `unlinked` is the first
    name of that.  Names that only one of the trees has change nothing for the others.
    """

    path: bytes
    kind: ChangeKind
    old: TreeEntry | None
    new: TreeEntry | None
    linked: bytes | None = None
    unlinked: bytes | None = None

    @property
    def has_other_links(self) -> bool:
        """Whether the path became, or is no longer, a name of another file."""
        return self.linked is not None or self.unlinked is not None


@runtime_checkable
class ComparesContent(Protocol):
    """A tree that can compare a file's content with that in another tree without reading it.

    Where blocks are shared this works for a sparse file of 10^15 bytes, which cannot be read through.
    """

    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:
        """Whether the regular file at `path` has the same bytes in `other`; None if they must be read.

        `other_path`: the path there; None: the same.  The file has the same size in both.
        """
        ...


def comparer(tree: Tree) -> ComparesContent | None:
    """Return `tree` if it can compare content.  isinstance() with a protocol takes longer than most comparisons."""
    return cast(ComparesContent, tree) if _can_compare(type(tree)) else None


@functools.cache
def _can_compare(kind: type[Tree]) -> bool:
    return hasattr(kind, "same_content")


class Comparison(Value):
    """One path of either tree; `kind` as in `Change`, None if nothing differs."""

    path: bytes
    kind: ChangeKind | None
    old: TreeEntry | None
    new: TreeEntry | None


def _nothing() -> None:
    pass


def changes(
    old: Tree,
    new: Tree,
    *,
    paths: Sequence[bytes] = (),
    contents: bool = True,
    keep_going: Callable[[], None] = _nothing,
) -> Iterator[Change]:
    """Yield what differs between `old` and `new`, in the order that the module's docstring gives.

    An added or removed directory yields itself and everything below it.  `paths` restricts the answer to these paths
    and everything below them; a path that is in neither tree, filtered or not, raises FileNotFoundError at once.

    `contents=False` reads no file: files of the same size are then "modified" where their mtime differs.

    `keep_going` is called for each path that is compared, changed or not, and each piece of content that is read; an
    exception that it raises ends the work.
    """
    compared = compare(old, new, paths=paths, contents=contents, keep_going=keep_going)
    return linked_changes(old, new, compared, keep_going)


def linked_changes(
    old: Tree, new: Tree, compared: Iterable[Comparison], keep_going: Callable[[], None] = _nothing
) -> Iterator[Change]:
    """Yield those of the comparisons that are changes, in content, metadata or hard links."""
    return _Links(old, new, keep_going).changes(compared)


def compare(
    old: Tree,
    new: Tree,
    *,
    paths: Sequence[bytes] = (),
    contents: bool = True,
    every_path: bool = False,
    keep_going: Callable[[], None] = _nothing,
) -> Iterator[Comparison]:
    """Compare the entries of two trees, without hard links; parameters, order and errors as in `changes`.

    If `new.touched(old)` names the candidates, yields only these, unless `every_path`; else walks both trees and
    yields every path.
    """
    found = candidate_pairs(old, new, paths=paths, every_path=every_path, keep_going=keep_going)
    return compare_pairs(old, new, found, contents=contents, keep_going=keep_going)


def candidate_pairs(
    old: Tree,
    new: Tree,
    *,
    paths: Sequence[bytes] = (),
    every_path: bool = False,
    keep_going: Callable[[], None] = _nothing,
) -> Iterator[Pair]:
    """Yield the two entries of each path that may differ; parameters, order and errors as in `compare`."""
    for path in paths:
        keep_going()
        if _pair(unfiltered(old), unfiltered(new), path) == (None, None):
            raise os_error(2, os.fsdecode(path))
    scope = PathScope(paths or [b""])
    touched = None if every_path else new.touched(old)
    return (
        chain.from_iterable(_merged_walk(old, new, top) for top in scope.tops())
        if touched is None
        else _candidates(old, new, sorted(touched, key=walk_order), scope)
    )


# --- hard links ---------------------------------------------------------------------------------------------


def has_links(entry: TreeEntry | None) -> bool:
    """Whether the entry is a file that has several names."""
    return entry is not None and entry.nlink > 1 and entry.inode != 0 and not entry.is_dir


@runtime_checkable
class NamesFiles(Protocol):
    """A tree that knows all names of a file without a walk."""

    def names_of(self, inode: int) -> list[bytes]:
        """The paths of the file with this inode number; none if there is no such file."""
        ...


class LinkedFiles:
    """The names of the files of `tree` that have several.  If the tree does not know them, walks it, once."""

    def __init__(self, tree: Tree, keep_going: Callable[[], None]) -> None:
        self._tree = tree
        self._keep_going = keep_going
        self._walked: dict[int, list[bytes]] | None = None

    def names_of(self, inode: int) -> list[bytes]:
        """The paths of the file with this inode number."""
        whole = self._tree
        while isinstance(whole, Filtered):
            whole = whole.unfiltered
        if isinstance(whole, NamesFiles):
            names = whole.names_of(inode)
            return names if whole is self._tree else [name for name in names if entry_or_none(self._tree, name)]
        if self._walked is None:
            self._walked = {}
            with contextlib.suppress(OSError):  # a part that cannot be read, where no names are found
                for entry in self._tree.walk():
                    self._keep_going()
                    if has_links(entry):
                        self._walked.setdefault(entry.inode, []).append(entry.path)
        return self._walked.get(inode, [])


class _Links:
    """Finds the paths that have become names of another file.

    Two states have the same hard links if the first name of each path's file is the same, among the names that both
    have.  Each of these names is looked up once.
    """

    def __init__(self, old: Tree, new: Tree, keep_going: Callable[[], None]) -> None:
        self._trees = old, new
        self._files = LinkedFiles(old, keep_going), LinkedFiles(new, keep_going)
        self._first: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}

    def changes(self, compared: Iterable[Comparison]) -> Iterator[Change]:
        """See `linked_changes`."""
        for one in compared:
            left, right = one.old, one.new
            if has_links(left) or has_links(right):
                linked, unlinked = self._links(left, right)
                if one.kind is not None or linked is not None or unlinked is not None:
                    yield Change(one.path, one.kind or "metadata", left, right, linked, unlinked)
            elif one.kind is not None:
                yield Change(one.path, one.kind, left, right)

    def _links(self, left: TreeEntry | None, right: TreeEntry | None) -> tuple[bytes | None, bytes | None]:
        """`Change.linked` and `Change.unlinked`."""
        if right is None or right.is_dir:
            return None, None
        now = self._first_name(1, right)
        if left is None or left.is_dir:
            return (None if now == right.path else now), None
        before = self._first_name(0, left)
        if now == before:
            return None, None
        return (None if now == right.path else now), (None if before == right.path else before)

    def _first_name(self, which: int, entry: TreeEntry) -> bytes:
        """The first name of a file in one of the trees, of those that the other tree has too, if there is one."""
        if not has_links(entry):
            return entry.path
        found = self._first[which].get(entry.inode)
        if found is None:
            names = self._files[which].names_of(entry.inode) or [entry.path]
            common = [name for name in names if _is_leaf(self._trees[1 - which], name)]
            found = self._first[which][entry.inode] = min(common or names, key=walk_order)
        return found


def _is_leaf(tree: Tree, path: bytes) -> bool:
    entry = entry_or_none(tree, path)
    return entry is not None and not entry.is_dir


@runtime_checkable
class Counted(Protocol):
    """A tree that counts what is below a path in a fraction of the time of a walk."""

    def count_below(self, path: bytes) -> int:
        """The number of entries at `path` and below it.  FileNotFoundError, NotADirectoryError."""
        ...


def summary(
    old: Tree, new: Tree, most: int, *, contents: bool = True, keep_going: Callable[[], None] = _nothing
) -> tuple[ChangeCounts, list[Change], int]:
    """Count what differs between `old` and `new`; and the first `most` changes, in the order of `changes`.

    The last value is the number of files that `went_back`.

    A subtree that only one of them has is counted as a whole, if that tree is `Counted`.  `keep_going` is called often;
    an exception that it raises ends the work.
    """
    touched = new.touched(old)
    links = _Links(old, new, keep_going)
    first: list[Change] = []
    added = modified = removed = older = 0
    walked: bytes | None = None
    for path in [b""] if touched is None else sorted(touched, key=walk_order):
        if walked is not None and is_below(path, walked):
            continue
        keep_going()
        left, right = _pair(old, new, path)
        if left is None and right is None:
            continue
        pairs: Iterable[Pair] = [(left, right)]
        if touched is None or not is_same_inode(left, right):
            walked = path
            pairs = _merged_walk(old, new, path)
        found = links.changes(compare_pairs(old, new, pairs, contents=contents, keep_going=keep_going))
        only: object = new if left is None else old if right is None else None
        if isinstance(only, Counted):
            first += islice(found, most - len(first))
            below = only.count_below(path)
            added, removed = (added + below, removed) if left is None else (added, removed + below)
            continue
        for change in found:
            keep_going()
            added += change.kind == "added"
            removed += change.kind == "removed"
            modified += change.kind not in {"added", "removed"}
            older += went_back(change)
            if len(first) < most:
                first.append(change)
    return ChangeCounts(added, modified, removed), first, older


def count(changed: Iterable[Change]) -> ChangeCounts:
    """Count `changed` by what `ChangeCounts` tells apart."""
    kinds = [change.kind for change in changed]
    added, removed = kinds.count("added"), kinds.count("removed")
    return ChangeCounts(added, len(kinds) - added - removed, removed)


def went_back(change: Change) -> bool:
    """Return whether a file got other content and an earlier mtime: build tools may not notice it."""
    old, new = change.old, change.new
    return (
        change.kind == "modified"
        and old is not None
        and new is not None
        and new.is_file
        and (new.mtime_ns < old.mtime_ns)
    )


def got_content(change: Change) -> bool:
    """Return whether a file is new or got other content."""
    return change.kind != "metadata" and change.new is not None and change.new.is_file


def is_below(path: bytes, top: bytes) -> bool:
    """Whether `path` is `top` or lies below it."""
    return not top or path == top or path.startswith(top + b"/")


class PathScope:
    """Some paths and everything below them.  Each question takes O(log n) for n paths, however deep they are."""

    __slots__ = ("_keys",)

    def __init__(self, paths: Iterable[bytes]) -> None:
        # In the order of `walk_order`, so that what is at or below a path follows it, and without the paths below
        # others, so that nothing lies between a path and what is below it.
        self._keys: list[bytes] = []
        for key in sorted(set(map(_scope_key, paths))):
            if not self._keys or not key.startswith(self._keys[-1]):
                self._keys.append(key)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def tops(self) -> list[bytes]:
        """The paths, sorted as `Tree.walk` does, without those below another one."""
        return [key[:-1].replace(b"\0", b"/") for key in self._keys]

    def covers(self, path: bytes) -> bool:
        """Whether `path` is one of the paths or lies below one."""
        key = _scope_key(path)
        at = bisect_right(self._keys, key)
        return at > 0 and key.startswith(self._keys[at - 1])

    def within(self, path: bytes) -> list[bytes]:
        """Return the paths of this scope at or below `path`; `path` itself if it is covered."""
        if self.covers(path):
            return [path]
        key, found = _scope_key(path), []
        for at in range(bisect_right(self._keys, key), len(self._keys)):
            if not self._keys[at].startswith(key):
                break
            found.append(self._keys[at][:-1].replace(b"\0", b"/"))
        return found

    def meets(self, path: bytes) -> bool:
        """Whether `path` is covered, or one of the paths lies below it."""
        key = _scope_key(path)
        at = bisect_right(self._keys, key)
        if at > 0 and key.startswith(self._keys[at - 1]):
            return True
        return at < len(self._keys) and self._keys[at].startswith(key)


def _scope_key(path: bytes) -> bytes:
    """Return a key that sorts as `walk_order` does and is a prefix of the key of everything below `path`."""
    return path.replace(b"/", b"\0") + b"\0" if path else b""


def is_at_or_below(path: bytes, tops: AbstractSet[bytes]) -> bool:
    """Whether `path` is one of `tops` or lies below one.  Takes as long as the path has parts, however many `tops`."""
    while path not in tops:
        if not path:
            return False
        path = path.rpartition(b"/")[0]
    return True


# --- which paths to compare ---------------------------------------------------------------------------------


def missing_above(live: Tree, wanted: Tree, paths: Collection[bytes]) -> Iterator[Change]:
    """Yield the directories above `paths` that a restore of these makes, because `live` has none there.

    They replace what else is there (kind "type").  Sorted; a path that `wanted` lacks needs none.
    """
    above = directories_above(path for path in paths if entry_or_none(wanted, path) is not None)
    scope = PathScope(paths)
    for path in sorted((path for path in above if not scope.covers(path)), key=walk_order):
        old = entry_or_none(live, path)
        if old is None or not old.is_dir:
            yield Change(path, "added" if old is None else "type", old, wanted.entry(path))


def directories_above(paths: Iterable[bytes]) -> set[bytes]:
    """Return the directories above `paths`, the root among them."""
    found: set[bytes] = set()
    for path in paths:
        at = path
        while at:
            at = at.rpartition(b"/")[0]
            if at in found:
                break
            found.add(at)
    return found


def restored_links(found: Iterable[Change], live: Tree, wanted: Tree, paths: Collection[bytes]) -> Iterator[Change]:
    """Yield the changes from `live` to `wanted` below `paths` as a restore of these paths makes them.

    A name outside of `paths` stays as it is: a restored file is linked to it only if it equals the wanted file already.
    """
    scope, files = PathScope(paths), LinkedFiles(wanted, _nothing)

    def is_kept(name: bytes) -> bool:
        left, right = pair = _pair(live, wanted, name)
        return is_same_inode(left, right) and next(compare_pairs(live, wanted, [pair])).kind is None

    for change in found:
        old, new, linked = change.old, change.new, change.linked
        if linked is None or new is None or scope.covers(linked):
            yield change
            continue
        names = [name for name in files.names_of(new.inode) if scope.covers(name) or is_kept(name)]
        first = min(names or [change.path], key=walk_order)
        other = Change(change.path, change.kind, old, new, None if first == change.path else first, change.unlinked)
        if other.has_other_links or old is None or next(compare_pairs(live, wanted, [(old, new)])).kind is not None:
            yield other


def walk_order(path: bytes) -> list[bytes]:
    """The sort key that gives the order of `Tree.walk`."""
    # Whole paths compared as bytes would put b"a-b" between b"a" and b"a/b".
    return path.split(b"/") if path else []


def outermost(paths: Sequence[bytes]) -> list[bytes]:
    """`paths` sorted, without those below another one."""
    return PathScope(paths).tops()


def entry_or_none(tree: Tree, path: bytes) -> TreeEntry | None:
    """The entry at `path`, or None if there is none."""
    try:
        return tree.entry(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_same_inode(left: TreeEntry | None, right: TreeEntry | None) -> bool:
    """Whether two entries are known to be of one file or directory."""
    # Inode 0 means unknown; and a file system may use a number again for another type.
    return left is not None and right is not None and left.inode == right.inode != 0 and left.is_dir == right.is_dir


def _pair(old: Tree, new: Tree, path: bytes) -> Pair:
    return entry_or_none(old, path), entry_or_none(new, path)


def _merged_walk(old: Tree, new: Tree, top: bytes) -> Iterator[Pair]:
    """Every path at and below `top` in either tree, with its entry in each."""
    left_walk = old.walk(top) if entry_or_none(old, top) else iter(())
    right_walk = new.walk(top) if entry_or_none(new, top) else iter(())
    left, right = next(left_walk, None), next(right_walk, None)
    while left or right:
        if left and right and left.path == right.path:
            yield left, right
            left, right = next(left_walk, None), next(right_walk, None)
        elif left and (not right or walk_order(left.path) < walk_order(right.path)):
            yield left, None
            left = next(left_walk, None)
        else:
            yield None, right
            right = next(right_walk, None)


def _candidates(old: Tree, new: Tree, touched: Sequence[bytes], scope: PathScope) -> Iterator[Pair]:
    """The pairs that `Tree.touched` covers: the named paths, and everything below those with another inode."""
    walked: bytes | None = None
    for path in touched:
        if walked is not None and is_below(path, walked):
            continue
        left, right = pair = _pair(old, new, path)
        same_inode = is_same_inode(left, right)
        if same_inode and scope.covers(path):
            yield pair
        elif not same_inode:
            walked = path
            for top in scope.within(path):
                yield from _merged_walk(old, new, top)


# --- how two entries differ ---------------------------------------------------------------------------------


def compare_pairs(
    old: Tree,
    new: Tree,
    pairs: Iterable[Pair],
    *,
    contents: bool = True,
    keep_going: Callable[[], None] = _nothing,
) -> Iterator[Comparison]:
    """Compare the two entries of each path; None where a tree does not have it.  `keep_going` as in `changes`."""
    for left, right in pairs:
        keep_going()
        kind: ChangeKind | None
        if left is None or right is None:
            kind = "removed" if right is None else "added"
        elif S_IFMT(left.mode) != S_IFMT(right.mode):
            kind = "type"
        elif content_differs(old, new, left, right, contents=contents, keep_going=keep_going):
            kind = "modified"
        else:
            kind = "metadata" if metadata_differs(left, right) else None
        entry = left or right
        if entry:
            yield Comparison(entry.path, kind, left, right)


def metadata_differs(left: TreeEntry, right: TreeEntry) -> bool:
    """Whether mode, owner, group, xattrs or, except of a directory, mtime differ."""
    return (
        (left.mode, left.uid, left.gid) != (right.mode, right.uid, right.gid)
        or (left.mtime_ns != right.mtime_ns and not left.is_dir)
        or dict(left.xattrs) != dict(right.xattrs)
    )


def content_differs(
    old: Tree, new: Tree, left: TreeEntry, right: TreeEntry, *, contents: bool, keep_going: Callable[[], None]
) -> bool:
    """Whether two entries of the same type have another content, target or device number."""
    if not left.is_file:
        return (left.target, left.rdev) != (right.target, right.rdev)
    if left.size != right.size:
        return True
    if not contents:
        return left.mtime_ns != right.mtime_ns
    # Equal inode, size and mtime prove nothing: a program may set an mtime back.
    comparing = comparer(new)
    is_same = None if comparing is None else comparing.same_content(right.path, old)
    if is_same is not None:
        return not is_same
    return not same_bytes(old.chunks(left.path), new.chunks(right.path), keep_going)


def same_bytes(
    left_chunks: Iterator[Chunk], right_chunks: Iterator[Chunk], keep_going: Callable[[], None] = _nothing
) -> bool:
    """Whether two streams have the same bytes; their chunks may be cut differently, and have different holes."""
    left_full: Iterator[Chunk] = filter(len, left_chunks)
    right_full: Iterator[Chunk] = filter(len, right_chunks)
    left: Chunk = b""
    right: Chunk = b""
    while True:
        left = left or next(left_full, b"")
        right = right or next(right_full, b"")
        if not left or not right:
            return not left and not right
        keep_going()
        common = min(len(left), len(right))
        (left_part, left), (right_part, right) = _cut(left, common), _cut(right, common)
        if isinstance(left_part, Hole):
            left_part, right_part = right_part, left_part
        if isinstance(left_part, Hole):
            continue
        if left_part.count(0) != common if isinstance(right_part, Hole) else left_part != right_part:
            return False


def _cut(chunk: Chunk, at: int) -> tuple[Chunk, Chunk]:
    return (Hole(at), Hole(len(chunk) - at)) if isinstance(chunk, Hole) else (chunk[:at], chunk[at:])
