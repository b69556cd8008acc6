"""Random trees and random edits for the models of a merge: plain dicts, with hard links."""

from __future__ import annotations

import copy
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from protocol.errors import os_error
from protocol.tree import CHUNK_BYTES, LookupTree, Tree, TreeEntry


@dataclass(eq=False)
class File:
    """A file, directory, symlink or fifo; two paths with the same object are hard links."""

    mode: int
    content: bytes = b""  # or the target of a symlink
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.mode)


def directory() -> File:
    return File(stat.S_IFDIR | 0o755)


class PlainTree(LookupTree):
    """A `Tree` over {path: File}.  Inode numbers start at `first_inode`."""

    def __init__(self, files: dict[bytes, File], first_inode: int = 1, known: PlainTree | None = None) -> None:
        self.files = files
        self.numbers: dict[int, int] = {}
        for path in sorted(files):
            self.numbers.setdefault(id(files[path]), first_inode + len(self.numbers))
        self.names: dict[int, list[bytes]] = {}
        for path in sorted(files):
            self.names.setdefault(id(files[path]), []).append(path)
        self.known = known  # the tree from which the differences are known

    def entry(self, path: bytes) -> TreeEntry:
        found = self.files.get(path)
        if found is None:
            raise os_error(2, repr(path))
        is_link = stat.S_ISLNK(found.mode)
        return TreeEntry(
            path,
            found.mode,
            0 if stat.S_ISDIR(found.mode) else len(found.content),
            found.mtime_ns,
            found.uid,
            found.gid,
            1 if stat.S_ISDIR(found.mode) else len(self.names[id(found)]),
            self.numbers[id(found)],
            0,
            found.content if is_link else b"",
            found.xattrs,
        )

    def children(self, path: bytes) -> list[bytes]:
        if not self.entry(path).is_dir:
            raise os_error(20, repr(path))
        return sorted(each.rpartition(b"/")[2] for each in self.files if each and each.rpartition(b"/")[0] == path)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        assert self.entry(path).is_file
        return self.files[path].content[offset : offset + size]

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        data = self.read(path, 0, 1 << 30)
        for start in range(0, len(data), size):
            yield data[start : start + size]

    def touched(self, other: Tree) -> Collection[bytes] | None:
        if other is not self.known or not isinstance(other, PlainTree):
            return None
        paths = {*self.files, *other.files}
        return [path for path in paths if _seen(self, path) != _seen(other, path)]


def _seen(tree: PlainTree, path: bytes) -> object:
    found = tree.files.get(path)
    if found is None:
        return None
    links = tuple(tree.names[id(found)]) if found.kind != stat.S_IFDIR else ()
    return (found.mode, found.content, found.uid, found.gid, found.mtime_ns, sorted(found.xattrs.items()), links)


# --- edits --------------------------------------------------------------------------------------------------

NAMES = st.sampled_from([b"a", b"a", b"-b\xff"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
LINES = [b"1\n", b"2\n", b"3\n", b"4\n", b"5\n", b"6\n"]
CONTENTS = st.one_of(
    st.lists(st.sampled_from([*LINES, b"x\n", b"y\r\n", b"\0"]), max_size=3).map(b"".join),
    st.tuples(st.integers(0, 5), st.sampled_from([b"", b"x\n", b"y\n"])).map(
        lambda edit: b"".join([*LINES[: edit[0]], edit[1], *LINES[edit[0] + 1 :]])
    ),
)
_ARGUMENTS: dict[str, st.SearchStrategy[object]] = {
    "write": CONTENTS,
    "mkdir": st.none(),
    "symlink": st.sampled_from([b"a", b"../b", b"/etc/passwd"]),
    "fifo": st.none(),
    "remove": st.none(),
    "chmod": st.sampled_from([0o755, 0o644, 0o600]),
    "chown": st.integers(0, 2),
    "xattr": st.tuples(st.sampled_from([b"user.x", b"user.y"]), st.sampled_from([b"1", b"2"])),
    "touch": st.integers(1, 3),
    "link": PATHS,
    "rename": PATHS,
}
_KINDS = {"write": stat.S_IFREG, "symlink": stat.S_IFLNK, "fifo": stat.S_IFIFO}
ALL_EDITS = ("write", "write", *_ARGUMENTS)
Edit = tuple[str, bytes, object]


def edits(*kinds: str) -> st.SearchStrategy[Edit]:
    """One edit of one of these kinds, or of any."""
    choices = [st.tuples(st.just(kind), PATHS, _ARGUMENTS[kind]) for kind in kinds or ALL_EDITS]
    return st.one_of(choices)


def edited(files: dict[bytes, File], steps: list[Edit]) -> dict[bytes, File]:
    """A copy of `files` after `steps`; those that make no sense are left out."""
    made: dict[bytes, File] = copy.deepcopy(files)
    made.setdefault(b"", directory())
    for step in steps:
        _edit(made, *step)
    return made


def _edit(files: dict[bytes, File], what: str, path: bytes, value: object) -> None:
    found = files.get(path)
    if what == "remove":
        _remove(files, path)
    elif what == "mkdir":
        if found is None or found.kind != stat.S_IFDIR:
            _put(files, path, directory())
    elif what in _KINDS:
        content = value if isinstance(value, bytes) else b""
        if found is not None and found.kind == _KINDS[what]:
            found.content = content
            found.mtime_ns += 1
        else:
            _put(files, path, File(_KINDS[what] | 0o644, content))
    elif found is not None and isinstance(value, bytes):
        _name(files, what, path, value)
    elif found is not None:
        _change(found, what, value)


def _name(files: dict[bytes, File], what: str, path: bytes, other: bytes) -> None:
    if path == other or other.startswith(path + b"/") or path.startswith(other + b"/"):
        return
    if what == "link" and files[path].kind != stat.S_IFDIR:
        _put(files, other, files[path])
    elif what == "rename":
        below = {each: files[each] for each in files if each == path or each.startswith(path + b"/")}
        _remove(files, path)
        for each in sorted(below):
            _put(files, other + each[len(path) :], below[each])


def _change(file: File, what: str, value: object) -> None:
    if isinstance(value, tuple):
        file.xattrs[value[0]] = value[1]
        return
    assert isinstance(value, int)
    if what == "chmod":
        file.mode = file.kind | value
    elif what == "chown":
        file.uid = value
    elif file.kind != stat.S_IFDIR:
        file.mtime_ns += value


def _remove(files: dict[bytes, File], path: bytes) -> None:
    for each in [each for each in files if each == path or each.startswith(path + b"/")]:
        del files[each]


def _put(files: dict[bytes, File], path: bytes, file: File) -> None:
    parts = path.split(b"/")
    for end in range(1, len(parts)):
        above = b"/".join(parts[:end])
        if above not in files or files[above].kind != stat.S_IFDIR:
            _remove(files, above)
            files[above] = directory()
    _remove(files, path)
    files[path] = file
