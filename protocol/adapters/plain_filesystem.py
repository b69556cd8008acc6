"""PlainPathFilesystem: the `Filesystem` contract, implemented once over any `PathFiles`.

After the class come the pages that `read` and `read_bytes` return, and the calls that change files.

`protocol.portable` packs this module into a program for other machines: it imports neither archives nor snapshots.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, get_args

from protocol.adapters.path_files import (
    OpenFile,
    PathFiles,
    PathFilesTree,
    ResolvedPath,
    Status,
    enter,
    held,
    resolve,
    search_start,
)
from protocol.errors import DeniedByPolicyError, os_error
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
from protocol.search.grep import grep_tree
from protocol.search.walk import glob_paths
from protocol.streams import (
    ByteReader,
    ByteWriter,
    FileReader,
    FileTextReader,
    FileWriter,
    PositionedDecoder,
    TextReader,
    check_encoding,
)
from protocol.tree import Tree
from protocol.types import (
    DEFAULT_READ_LINES,
    READ_ENTIRE_FILE,
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
        base, shown = search_start(self._store, path)
        with located(normalise(path)), self._search_tree() as tree:
            found = glob_paths(tree, pattern, path=base).paths
        return [GlobMatch(shown(each)) for each in found]

    def grep(
        self, pattern: str, *, path: str = ROOT, glob: str | None = None, max_matches: int | None = None
    ) -> Sequence[GrepMatch]:
        if max_matches is not None and max_matches < 0:
            raise ValueError(f"max_matches must be 0 or more, not {max_matches}")
        most = self._limits.grep_matches if max_matches is None else max_matches
        normal = normalise(path)
        base, shown = search_start(self._store, normal)
        with located(normal), self._search_tree() as tree:
            found = grep_tree(tree, pattern, path=base, glob=glob, max_matches=most).matches
        if decode(base) == normal:
            return found
        return [
            GrepMatch(shown(encode(each.path)), each.line_number, each.line_content, each.match_start, each.match_end)
            for each in found
        ]

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
        # (The grammar of Python 3.8, for vfsd-fs.pyz.)
        with self._place(normalise(path)) as place:  # noqa: SIM117
            with held(self._store, enter(self._store, place.names[:-1])) as parent, self._store.locked(parent):
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


# -- pages -----------------------------------------------------------------------------------------
def check_line_page(offset: int, limit: int | None) -> None:
    """Raise ValueError for an invalid page of lines."""
    if offset < 0:
        raise ValueError(f"offset must be 0 or more, not {offset}")
    if limit is not None and limit < 0 and limit != READ_ENTIRE_FILE:
        raise ValueError(f"limit must be 0 or more, or READ_ENTIRE_FILE, not {limit}")


def check_byte_page(offset: int, limit: int | None) -> None:
    """Raise ValueError for an invalid page of bytes."""
    for name, value in (("offset", offset), ("limit", limit)):
        if value is not None and value < 0:
            raise ValueError(f"{name} must be 0 or more, not {value}")


def text_page(reader: ByteReader, offset: int, limit: int | None, encoding: str, limits: CallLimits) -> ReadResult:
    """Read a page of a text file; see `Filesystem.read`.  Bounds the size of the page, not of the file."""
    if limit is None:
        limit = DEFAULT_READ_LINES
    page = _Page(offset, None if limit == READ_ENTIRE_FILE else offset + limit, limits.read_bytes)
    decoder = PositionedDecoder(encoding)
    try:
        for chunk in reader:
            page.add(decoder.decode(chunk), reader.path)
        page.add(decoder.decode(b""), reader.path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{reader.path!r} is not text in {encoding} ({error}): use read_bytes") from error
    total = page.lines + page.has_rest
    start = min(offset, total)
    end = total if page.end is None else min(page.end, total)
    return ReadResult("".join(page.parts), reader.path, total, start, end - start, end < total)


class _Page:
    """Collects the lines from `start` up to `end` (None: the last one), and counts all."""

    def __init__(self, start: int, end: int | None, limit_bytes: int) -> None:
        self.start = start
        self.end = end
        self.lines = 0  # lines complete so far
        self.has_rest = False  # whether text follows the last line end
        self.parts: list[str] = []
        self._size = 0
        self._limit_bytes = limit_bytes

    def add(self, text: str, path: str) -> None:
        if not text:
            return
        ends = text.count("\n")
        if self.lines + ends >= self.start and (self.end is None or self.lines < self.end):
            begin = _after_line_ends(text, self.start - self.lines)
            stop = len(text) if self.end is None else _after_line_ends(text, self.end - self.lines)
            part = text[begin:stop]
            self._size += len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))
            if self._size > self._limit_bytes:
                raise CallLimitError(
                    f"a read is limited to {self._limit_bytes} bytes: use open_text, or pages of {path!r}"
                )
            self.parts.append(part)
        self.lines += ends
        self.has_rest = not text.endswith("\n")


def _after_line_ends(text: str, count: int) -> int:
    """Return the index after the `count`-th "\\n" of `text`, or its length if it has fewer."""
    at = 0
    for _ in range(count):
        at = text.find("\n", at) + 1
        if not at:
            return len(text)
    return at


def bytes_page(reader: ByteReader, offset: int, limit: int | None, limits: CallLimits) -> ReadBytesResult:
    """Read a page of a file; see `Filesystem.read_bytes`."""
    size = reader.size
    wanted = max(0, size - offset)
    if limit is not None:
        wanted = min(wanted, limit)
    if wanted > limits.read_bytes:
        raise CallLimitError(
            f"a read is limited to {limits.read_bytes} bytes: use open_read, or pages of {reader.path!r}"
        )
    start = min(offset, size)
    reader.seek(start)
    content = reader.read(wanted)
    return ReadBytesResult(content, reader.path, size, start, len(content), start + len(content) < size)


# -- changes ---------------------------------------------------------------------------------------
_COPIED: Final = (b"user.", b"system.posix_acl_")  # attributes that a write in place keeps


def temporary_name() -> bytes:
    """Return a name for an unfinished file.  It has no suffix that a pattern of a policy is likely to match."""
    return b".vfsd-" + secrets.token_hex(8).encode()


def make_directories(store: PathFiles, names: tuple[bytes, ...], missing: Sequence[bytes]) -> tuple[bytes, ...]:
    """Make the directories `missing`, each inside the previous one, below `names`; return the names of the last one."""
    for name in missing:
        with held(store, enter(store, names)) as node, contextlib.suppress(FileExistsError):
            store.mkdir(node, name)  # another program may have made it first
            store.sync_names(node)
        names = (*names, name)
    return names


def replace_content(store: PathFiles, path: str, place: ResolvedPath, old: bytes, new: bytes) -> bool:
    """Replace the file at `place` if its content is `old`, and return whether it was."""
    parent = enter(store, place.names[:-1])
    try:
        replacement = _Replacement(store, parent, place.names[-1], place)
    except BaseException:
        store.release(parent)
        raise
    writer = FileWriter(path, replacement.file, commit=lambda: replacement.commit(old), abort=replacement.abort)
    try:
        with writer:
            writer.write(new)
    except _ChangedMeanwhileError:
        return False
    return True


class _ChangedMeanwhileError(Exception):
    """A file has other content than the one that was to be replaced."""


def open_writer(store: PathFiles, path: str, place: ResolvedPath, mode: WriteMode) -> FileWriter:
    """Open a writer for the file at `place`, whose parent exists."""
    if mode == "append" and not place.missing:
        node = place.take_node()
        try:
            file = store.open(node, "append")
        except BaseException:
            store.release(node)
            raise
        return FileWriter(path, file, position=file.size(), commit=file.sync)
    names = (*place.names, *place.missing)
    parent = enter(store, names[:-1])
    try:
        if mode == "overwrite":
            replacement = _Replacement(store, parent, names[-1], place)
            return FileWriter(path, replacement.file, commit=replacement.commit, abort=replacement.abort)
        creation = _Creation(store, parent, names[-1])
        return FileWriter(path, creation.file, commit=creation.commit, abort=creation.abort)
    except BaseException:
        store.release(parent)
        raise


class _Creation:
    """A new file under its final name from the start, so that no other program creates it; removed on failure."""

    def __init__(self, store: PathFiles, parent: int, name: bytes) -> None:
        self._store = store
        self._parent = parent
        self._name = name
        self.file: OpenFile = store.create(parent, name, None)

    def commit(self) -> None:
        self.file.sync()
        self._store.sync_names(self._parent)
        self._store.release(self._parent)

    def abort(self) -> None:
        store = self._store
        with held(store, self._parent), contextlib.suppress(FileNotFoundError):
            # Not a file that another program has put there since.
            if store.status_of(self._parent, self._name).inode == store.status(self.file.node).inode:
                store.unlink(self._parent, self._name)


class _Replacement:
    """A file under a temporary name that in the end takes the place, mode, owner and attributes of the old one."""

    def __init__(self, store: PathFiles, parent: int, name: bytes, place: ResolvedPath) -> None:
        self._store = store
        self._parent = parent
        self._name = name
        self._old = old = None if place.missing else place.status
        self._xattrs = {} if old is None else store.xattrs(place.node)
        self._temporary = temporary_name()
        # The old file may be private, so nobody else may read the new one.
        try:
            self.file: OpenFile = store.create(parent, self._temporary, None if old is None else 0o600)
        except DeniedByPolicyError as error:
            raise DeniedByPolicyError(error.attempt, b"/".join((*place.names, *place.missing))) from None

    def commit(self, expected: bytes | None = None) -> None:
        """Replace the file; with `expected`, only one that has this content (_ChangedMeanwhileError)."""
        store = self._store
        if self._old is not None:
            copy_access(store, self.file.node, self._old, self._xattrs)
        self.file.sync()
        with store.locked(self._parent):
            if expected is not None and not self._has_content(expected):
                raise _ChangedMeanwhileError
            store.rename(self._parent, self._temporary, self._parent, self._name)
        store.sync_names(self._parent)
        store.release(self._parent)

    def _has_content(self, expected: bytes) -> bool:
        node = self._store.child(self._parent, self._name)
        try:
            if not stat.S_ISREG(self._store.status(node).mode):
                return False
            file = self._store.open(node, "read")
        except BaseException:
            self._store.release(node)
            raise
        with contextlib.closing(file):
            return file.size() == len(expected) and file.read(0, len(expected) + 1) == expected

    def abort(self) -> None:
        with held(self._store, self._parent), contextlib.suppress(FileNotFoundError):
            self._store.unlink(self._parent, self._temporary)


def copy_access(store: PathFiles, node: int, old: Status, xattrs: Mapping[bytes, bytes]) -> None:
    """Give the new file `node` the ACL, user attributes, mode and, if allowed, the owner of the file that it replaces.

    An ACL that the directory gave the new file goes, because it lets in users whom the old file kept out.  The
    attributes that the system sets stay (security.selinux), and so does what write(2) removes: capabilities.
    """
    made = store.xattrs(node)
    wanted = {name: value for name, value in made.items() if not name.startswith(_COPIED)}
    wanted.update(
        (name, value) for name, value in xattrs.items() if name.startswith(_COPIED)
    )  # `|=`: not in Python 3.8
    if wanted != made:
        store.set_xattrs(node, wanted)
    _copy_ownership(store, node, old)


def _copy_ownership(store: PathFiles, node: int, old: Status) -> None:
    """Give `node` the mode of `old` and, where that is allowed, its owner."""
    made = store.status(node)
    if (made.uid, made.gid) != (old.uid, old.gid):
        try:
            store.set_owner(node, old.uid, old.gid)
        except PermissionError:
            # This user owns the file now: it must not run with the rights of another user.
            old = old._replace(mode=old.mode & ~(stat.S_ISUID | stat.S_ISGID))
    store.set_mode(node, old.mode)  # after the owner: chown clears suid and sgid


def remove(store: PathFiles, names: tuple[bytes, ...], *, recursive: bool) -> int:
    """Remove the entry at `names`, not the root; return the number of entries removed.

    IsADirectoryError (ENOTEMPTY) for a directory with entries, unless `recursive`.
    """
    with held(store, enter(store, names[:-1])) as parent:
        if not stat.S_ISDIR(store.status_of(parent, names[-1]).mode):
            store.unlink(parent, names[-1])
            return 1
        try:
            store.rmdir(parent, names[-1])
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:  # rmdir(2): POSIX allows either
                raise
        else:
            return 1
    if not recursive:
        raise IsADirectoryError(errno.ENOTEMPTY, "Directory not empty")
    return _remove_below(store, names)


def _remove_below(store: PathFiles, names: tuple[bytes, ...]) -> int:
    """Remove a directory with everything in it.  Holds no node between directories: the tree may be very deep."""
    count = 0
    waiting = [(names, False)]  # (directory, whether its entries are gone)
    while waiting:
        directory, is_empty = waiting.pop()
        if not is_empty:
            waiting.append((directory, True))
            with held(store, enter(store, directory)) as node:
                for name, kind in store.names(node):
                    if kind == stat.S_IFDIR:
                        waiting.append(((*directory, name), False))
                    else:
                        store.unlink(node, name)
                        count += 1
            continue
        with held(store, enter(store, directory[:-1])) as parent:
            store.rmdir(parent, directory[-1])
        count += 1
    return count
