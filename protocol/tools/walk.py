"""What the tools that look at many files walk: the context's tree, or any Filesystem as one."""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from protocol.adapters.path_filesystem.resolve import resolve
from protocol.adapters.path_filesystem.tree_files import TreeFiles
from protocol.filesystem import Filesystem
from protocol.paths import decode, encode, normalise
from protocol.tools.base import ToolContext
from protocol.tree import CHUNK_BYTES, Tree, TreeEntry

__all__ = ["FilesystemTree", "Shown", "below"]


class FilesystemTree:
    """Implements `protocol.tree.Tree`, live: what changes while it is walked is seen as it is then.

    It asks for no more than a search needs: types, sizes and content.  It has no symlinks: they are not searched.
    """

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem

    def entry(self, path: bytes) -> TreeEntry:
        """See `protocol.tree.Tree`, as for all that follow."""
        found = self._filesystem.stat(decode(path))
        # Only the top may be a symlink that is meant: that is what the caller asked for.
        kind = stat.S_IFDIR if found.is_directory else stat.S_IFREG if found.is_file else stat.S_IFIFO
        return TreeEntry(path, kind | stat.S_IMODE(found.mode), found.size_bytes)

    def children(self, path: bytes) -> list[bytes]:
        listed = self._filesystem.list(decode(path))
        return sorted(encode(entry.name) for entry in listed if not entry.is_symlink)

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        entry = self.entry(path)
        yield entry
        if entry.is_dir:
            for name in self.children(path):
                yield from self.walk(path + b"/" + name if path else name)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        with self._filesystem.open_read(decode(path)) as reader:
            reader.seek(offset)
            return reader.read(size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        with self._filesystem.open_read(decode(path)) as reader:
            yield from reader.chunks(size)

    def touched(self, other: Tree) -> Collection[bytes] | None:  # noqa: ARG002 (the contract's)
        return None


class Shown:
    """Paths as the caller wrote their beginning, where that went through a symlink."""

    def __init__(self, asked: bytes, real: bytes) -> None:
        self._asked = asked
        self._real = real

    def __call__(self, path: bytes) -> str:
        rest = path[len(self._real) :].lstrip(b"/")
        return decode(self._asked + b"/" + rest if self._asked and rest else self._asked or rest)


@contextmanager
def below(path: str, context: ToolContext) -> Iterator[tuple[Tree, bytes, Shown]]:
    """A tree in which `path` leads to something: the tree, where in it, and how to say what was found below."""
    asked = encode(normalise(path))
    if context.tree is None:
        yield FilesystemTree(context.filesystem), asked, Shown(asked, asked)
        return
    with context.tree() as tree:
        # A tree knows no symlinks.
        with resolve(TreeFiles(tree, root=context.filesystem.root), asked) as place:
            real = b"/".join(place.names)
        yield tree, real, Shown(asked, real)
