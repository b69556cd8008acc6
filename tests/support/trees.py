"""DictTree: the plainest Tree, as an oracle and as input for what works on trees."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from msgspec.structs import replace

from protocol.errors import os_error
from protocol.tree import CHUNK_BYTES, LookupTree, TreeEntry


class DictTree(LookupTree):
    """A tree from {path: content}: bytes is a file, None a directory, str a symlink; or (TreeEntry, content)."""

    def __init__(self, items: dict[bytes, bytes | str | tuple[TreeEntry, bytes] | None] | None = None) -> None:
        self.by_path: dict[bytes, TreeEntry] = {b"": TreeEntry(b"", stat.S_IFDIR | 0o755)}
        self.content: dict[bytes, bytes] = {}
        for number, (path, item) in enumerate(sorted((items or {}).items()), 2):
            self._add_parents(path)
            if isinstance(item, tuple):
                entry, data = item
                entry = replace(entry, path=path, size=len(data) if entry.is_file else entry.size)
                self.content[path] = data
            elif item is None:
                entry = TreeEntry(path, stat.S_IFDIR | 0o755, inode=number)
            elif isinstance(item, str):
                target = item.encode()
                entry = TreeEntry(path, stat.S_IFLNK | 0o777, len(target), inode=number, target=target)
            else:
                entry = TreeEntry(path, stat.S_IFREG | 0o644, len(item), inode=number)
                self.content[path] = item
            self.by_path[path] = entry

    def _add_parents(self, path: bytes) -> None:
        parts = path.split(b"/")[:-1]
        for end in range(1, len(parts) + 1):
            parent = b"/".join(parts[:end])
            self.by_path.setdefault(parent, TreeEntry(parent, stat.S_IFDIR | 0o755))

    def entry(self, path: bytes) -> TreeEntry:
        try:
            return self.by_path[path]
        except KeyError:
            raise os_error(2, repr(path)) from None

    def children(self, path: bytes) -> list[bytes]:
        if not self.entry(path).is_dir:
            raise os_error(20, repr(path))
        prefix = path + b"/" if path else b""
        return sorted(
            p[len(prefix) :] for p in self.by_path if p and p.startswith(prefix) and b"/" not in p[len(prefix) :]
        )

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        self.entry(path)
        return self.content[path][offset : offset + size]

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        data = self.content[path]
        for start in range(0, len(data), size):
            yield data[start : start + size]
