"""PlainPathFilesystem: the `Filesystem` contract, implemented once over any `PathFiles`.

`protocol.portable` packs this module into a program for other machines: it imports neither archives nor snapshots.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import get_args

from protocol.adapters.path_filesystem.files import PathFiles, held
from protocol.adapters.path_filesystem.reading import bytes_page, check_byte_page, check_line_page, text_page
from protocol.adapters.path_filesystem.resolve import ResolvedPath, enter, resolve
from protocol.adapters.path_filesystem.writing import make_directories, open_writer, remove, replace_content
from protocol.adapters.tree import PathFilesTree
from protocol.errors import os_error
from protocol.paths import (
    DEFAULT_LIMITS,
    ROOT,
    CallLimitError,
    CallLimits,
    check_bytes,
    decode,
    encode,
    encoded,
    located,
    normalise,
)
from protocol.search import glob_paths, grep_tree
from protocol.streams import ByteReader, ByteWriter, FileReader, FileTextReader, TextReader, check_encoding
from protocol.tree import Tree
from protocol.types import (
    FileEntry,
    FileStat,
    GlobMatch,
    GrepMatch,
    ReadBytesResult,
    ReadResult,
    WriteMode,
    WriteResult,
    utc_time,
)


class PlainPathFilesystem:
    """Implements `protocol.filesystem.Filesystem`."""

    def __init__(self, store: PathFiles, *, limits: CallLimits = DEFAULT_LIMITS) -> None:
        self._store = store
        self._limits = limits

    @property
    def root(self) -> str:
        """See `protocol.filesystem.Filesystem`, as for all that follow."""
        return self._store.root

    @property
    def read_only(self) -> bool:
        return self._store.read_only

    # -- reading -----------------------------------------------------------------------------
    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        check_line_page(offset, limit)
        check_encoding(encoding)
        with self.open_read(path) as reader:
            return text_page(reader, offset, limit, encoding, self._limits)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        check_byte_page(offset, limit)
        with self.open_read(path) as reader:
            return bytes_page(reader, offset, limit, self._limits)

    def exists(self, path: str) -> bool:
        return bool(self._mode(path))

    def is_file(self, path: str) -> bool:
        return stat.S_ISREG(self._mode(path))

    def is_dir(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path))

    def _mode(self, path: str) -> int:
        """Return the mode of the file that `path` leads to, 0 if there is none."""
        try:
            with self._place(normalise(path)) as place:
                return place.status.mode
        except OSError as error:
            # errors of system calls for a path that cannot lead anywhere
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES}:
                return 0
            raise

    def stat(self, path: str) -> FileStat:
        normal = normalise(path)
        with self._place(normal) as place:
            seen = place.status
            return FileStat(
                path=normal,
                is_file=place.is_file,
                is_directory=place.is_dir,
                size_bytes=0 if place.is_dir else seen.size,
                created_at=None if seen.birth_ns is None else utc_time(seen.birth_ns),
                modified_at=utc_time(seen.mtime_ns),
                mode=seen.mode,
                is_symlink=place.is_symlink,
            )

    def list(self, path: str = ROOT) -> Sequence[FileEntry]:
        normal = normalise(path)
        with self._place(normal) as place:
            if not place.is_dir:
                raise os_error(errno.ENOTDIR, normal)
            with located(normal):
                names = self._store.names(place.node)
        prefix = "" if normal == ROOT else normal + "/"
        return [self._entry(decode(name), prefix, kind) for name, kind in sorted(names)]

    def _entry(self, name: str, prefix: str, kind: int) -> FileEntry:
        is_symlink = kind == stat.S_IFLNK
        leads_to = self._mode(prefix + name) if is_symlink else kind
        return FileEntry(name, prefix + name, stat.S_ISREG(leads_to), stat.S_ISDIR(leads_to), is_symlink)

    # -- searching ---------------------------------------------------------------------------
    def glob(self, pattern: str, *, path: str = ROOT) -> Sequence[GlobMatch]:
        normal = normalise(path)
        base = self._base(normal)
        with located(normal), self._search_tree() as tree:
            found = glob_paths(tree, pattern, path=base).paths
        return [GlobMatch(_renamed(decode(each), decode(base), normal)) for each in found]

    def grep(
        self, pattern: str, *, path: str = ROOT, glob: str | None = None, max_matches: int | None = None
    ) -> Sequence[GrepMatch]:
        if max_matches is not None and max_matches < 0:
            raise ValueError(f"max_matches must be 0 or more, not {max_matches}")
        most = self._limits.grep_matches if max_matches is None else max_matches
        normal = normalise(path)
        base = self._base(normal)
        with located(normal), self._search_tree() as tree:
            found = grep_tree(tree, pattern, path=base, glob=glob, max_matches=most).matches
        if decode(base) == normal:
            return found
        return [replace(match, path=_renamed(match.path, decode(base), normal)) for match in found]

    def _base(self, normal: str) -> bytes:
        """Return the path without symlinks at which a search begins: trees do not follow symlinks."""
        with self._place(normal) as place:
            return b"/".join(place.names)

    # -- changing ----------------------------------------------------------------------------
    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        return self.write_bytes(path, encoded(content), mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        check_bytes(content)
        if len(content) > self._limits.write_bytes:
            raise CallLimitError(
                f"a write is limited to {self._limits.write_bytes} bytes, not {len(content)}: use open_write"
            )
        with self._held_for(path, mode), self.open_write(path, mode=mode, create_parents=create_parents) as writer:
            writer.write(content)
        return WriteResult(writer.path, len(content), mode)

    def replace_bytes(self, path: str, old: bytes, new: bytes) -> WriteResult | None:
        """See `protocol.filesystem.ComparingFilesystem`."""
        normal = self._changing(path)
        with self._place(normal) as place, located(normal):
            _check_file(place)
            is_replaced = replace_content(self._store, normal, place, old, new)
        return WriteResult(normal, len(new), "overwrite") if is_replaced else None

    @contextmanager
    def _held_for(self, path: str, mode: WriteMode) -> Iterator[None]:
        """Let no other call replace the file while this one appends to it."""
        if mode != "append" or not self.is_file(path):
            yield
            return
        with (
            self._place(normalise(path)) as place,
            held(self._store, enter(self._store, place.names[:-1])) as parent,
            self._store.locked(parent),
        ):
            yield

    def delete(self, path: str, *, recursive: bool = False) -> int:
        normal = self._changing(path)
        with located(normal):
            with resolve(self._store, encode(normal), follow=False) as place:
                names = place.names
            if not names:
                raise ValueError(f"{path!r} leads to the root, which cannot be deleted")
            try:
                return remove(self._store, names, recursive=recursive)
            except IsADirectoryError as error:
                raise IsADirectoryError(error.errno, error.strerror, normal) from None

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        normal = self._changing(path, root_is_fine=True)
        with located(normal), resolve(self._store, encode(normal), may_miss=True) as place:
            if not place.missing:
                if not place.is_dir or not exist_ok:
                    raise os_error(errno.EEXIST)
                return
            if place.is_symlink:  # a symlink that leads nowhere, mkdir(2)
                raise os_error(errno.EEXIST)
            names = self._make_parents(normal, place, parents)
            with held(self._store, enter(self._store, names)) as parent:
                self._store.mkdir(parent, place.missing[-1])
                self._store.sync_names(parent)

    def _make_parents(self, normal: str, place: ResolvedPath, allowed: bool) -> tuple[bytes, ...]:
        """Make the missing parents of `place`; return the names of its parent directory."""
        if not stat.S_ISDIR(place.status.mode):
            raise os_error(errno.ENOTDIR)
        parents = place.missing[:-1]
        if parents and not allowed:
            raise os_error(errno.ENOENT)
        self._limits.check_new(normal)
        return make_directories(self._store, place.names, parents)

    def _changing(self, path: str, *, root_is_fine: bool = False) -> str:
        """Normalise and check a path that a call is about to change."""
        normal = normalise(path)
        if self.read_only:
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), normal)
        if normal == ROOT and not root_is_fine:
            raise ValueError(f"{path!r} is the root, which cannot be written or deleted")
        return normal

    # -- streams -----------------------------------------------------------------------------
    def open_read(self, path: str) -> ByteReader:
        normal = normalise(path)
        with self._place(normal) as place, located(normal):
            _check_file(place)
            reader = FileReader(normal, self._store.open(place.node, "read"))
            place.take_node()
            return reader

    def open_write(self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True) -> ByteWriter:
        if mode not in get_args(WriteMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(WriteMode))}, not {mode!r}")
        normal = self._changing(path)
        with located(normal), resolve(self._store, encode(normal), may_miss=True) as place:
            if place.is_dir:
                raise os_error(errno.EISDIR)
            if mode == "create" and (not place.missing or place.is_symlink):
                raise os_error(errno.EEXIST)
            if place.missing:
                self._make_parents(normal, place, create_parents)
            else:
                _check_file(place)
            return open_writer(self._store, normal, place, mode)

    def open_text(self, path: str, *, encoding: str = "utf-8") -> TextReader:
        check_encoding(encoding)
        return FileTextReader(self.open_read(path), encoding)

    # -- helpers -----------------------------------------------------------------------------
    def _search_tree(self) -> AbstractContextManager[Tree]:
        return nullcontext(PathFilesTree(self._store, with_xattrs=False))

    @contextmanager
    def _place(self, normal: str) -> Iterator[ResolvedPath]:
        """Resolve a normalised path; errors on the way name it."""
        with located(normal):
            place = resolve(self._store, encode(normal))
        with place:
            yield place


def _check_file(place: ResolvedPath) -> None:
    """Refuse anything but regular files: opening a fifo would wait for its other end for ever."""
    if not place.is_file:
        raise os_error(errno.EISDIR) if place.is_dir else OSError(errno.EINVAL, "Not a regular file")


def _renamed(path: str, base: str, asked: str) -> str:
    """Replace the beginning `base` of a path, to which a symlink led, by `asked`."""
    if base == asked:
        return path
    below = path if base == ROOT else path[len(base) :].lstrip("/")
    return f"{asked}/{below}" if below and asked != ROOT else below or asked
