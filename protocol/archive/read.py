"""Read an archive as a tree: `open_archive`, which checks all of it first, and what it checks."""

from __future__ import annotations

import errno
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import chain
from typing import BinaryIO, Final, TypeAlias

from msgspec.structs import replace

from protocol.archive.content import RandomAccess, decompressed
from protocol.archive.manifest import (
    FILES,
    MANIFEST,
    PERCENT,
    SPECIAL,
    ArchiveLimits,
    Manifest,
    Record,
    check_path,
    decode_manifest,
    record_xattrs,
    unescape,
)
from protocol.archive.members import Member, data_start, read_directory, read_members
from protocol.errors import ArchiveError, os_error, shown
from protocol.tree import CHUNK_BYTES, TYPE_MASK, ByteProgress, Chunk, LookupTree, TreeEntry, no_progress, sparse
from protocol.volume import ROOT_INODE

# Local headers and small entries are adjacent: one read(2) gets many.
_BUFFER_BYTES: Final = 128 * 1024
_CACHE_BYTES: Final = 4 << 20
Source: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | BinaryIO


@contextmanager
def open_archive(
    source: Source,
    *,
    limits: ArchiveLimits | None = None,
    progress: ByteProgress = no_progress,
    check_content: bool = True,
    reserve: Callable[[int], None] = lambda _: None,
) -> Iterator[ArchiveTree]:
    """Open the archive at a path or in a seekable file as a tree, for the length of the context.

    Everything is checked before the context is entered, each entry's content by decompressing it once.  Without
    `check_content` the content of a file is checked when it is read; then `chunks` may raise ArchiveError.  That is
    for callers that read everything into a place that they can discard.  `reserve` is called with each number of bytes
    that reading the manifest takes, before it takes them, and may raise; the bytes are free again when the context is
    entered.  `progress` is called during the check.  ArchiveError names the refused entry; OSError if the archive
    cannot be read.  A file object that was passed in stays open.
    """
    limits = limits or ArchiveLimits()
    if isinstance(source, str | bytes | os.PathLike):
        with _open_regular(source) as file:
            try:
                contents = read_contents(file, limits, progress, check_content=check_content, reserve=reserve)
            except ArchiveError as error:
                # An error without an entry names the archive.
                raise ArchiveError(str(error.strerror), error.entry or os.fsdecode(source)) from None
            yield ArchiveTree(file, contents)
    elif not source.seekable():
        raise ArchiveError("an archive can only be read from a seekable file")
    else:
        contents = read_contents(source, limits, progress, check_content=check_content, reserve=reserve)
        yield ArchiveTree(source, contents)


def _open_regular(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> BinaryIO:
    # Without O_NONBLOCK, opening a fifo would wait for a writer.
    file = open(path, "rb", buffering=_BUFFER_BYTES, opener=_open_at_once)  # noqa: SIM115 -- the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ArchiveError("an archive must be a regular file", os.fsdecode(path))
    return file


def _open_at_once(name: str | bytes, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


class ArchiveTree(LookupTree):
    """The tree of an archive, made by `open_archive`; for one thread at a time.

    Inode numbers only identify hard links.
    """

    def __init__(self, file: BinaryIO, contents: Contents) -> None:
        self._file = file
        self._reader = RandomAccess(file, lambda: file, _CACHE_BYTES)
        self._entries = contents.entries
        self._members = contents.members
        self._children: dict[bytes, list[TreeEntry]] = {
            path: [] for path, entry in self._entries.items() if entry.is_dir
        }
        for path, entry in sorted(self._entries.items()):
            if path:
                self._children[path.rpartition(b"/")[0]].append(entry)
        self.file_count = contents.manifest.file_count
        self.total_bytes = contents.manifest.total_bytes
        self.created_at = _utc(contents.manifest.created_at)

    def entry(self, path: bytes) -> TreeEntry:
        """The entry at `path`.  FileNotFoundError, NotADirectoryError."""
        entry = self._entries.get(path)
        if entry is not None:
            return entry
        parent = path.rpartition(b"/")[0]
        while parent not in self._entries:
            parent = parent.rpartition(b"/")[0]
        raise os_error(errno.ENOENT if self._entries[parent].is_dir else errno.ENOTDIR, shown(path))

    def entries(self, path: bytes) -> list[TreeEntry]:
        """The entries in directory `path`, sorted.  FileNotFoundError, NotADirectoryError."""
        if not self.entry(path).is_dir:
            raise os_error(errno.ENOTDIR, shown(path))
        return self._children[path]

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """Read up to `size` bytes of a file; fewer only at its end.  IsADirectoryError; EINVAL for a special file.

        The first read of an entry decompresses all of it.
        """
        return self._reader.read(self._file_member(path), offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield the content of a regular file in chunks of at most `size` bytes, and holes; errors as for `read`."""
        return chain.from_iterable(map(sparse, decompressed(self._file, self._file_member(path), size)))

    def _file_member(self, path: bytes) -> Member:
        entry = self.entry(path)
        if not entry.is_file:
            raise os_error(errno.EISDIR if entry.is_dir else errno.EINVAL, shown(path))
        return self._members[path]


def _utc(created_at: str) -> datetime:
    created = datetime.fromisoformat(created_at)
    return created.replace(tzinfo=UTC) if created.tzinfo is None else created


# -- the entries of a ZIP file and its manifest as those of a tree ---------------------------------
_TARGET_BYTES_MAX: Final = 4095  # PATH_MAX with its NUL, linux/limits.h
# A value of three bytes costs 64 once decoded: without a bound an archive of some KB would take GB.
_VALUES_FREE: Final = 1_000_000
_VALUES_PER_ENTRY: Final = 64
_VALUE_BYTES: Final = 64
# The manifest may have keys that no reader knows.  These bounds leave room for the largest xattrs of each entry.
_MANIFEST_FREE_BYTES: Final = 64 << 20
_MANIFEST_ENTRY_BYTES: Final = 1 << 20
_DEFAULT_FILE: Final = stat.S_IFREG | 0o644
_DEFAULT_DIRECTORY: Final = stat.S_IFDIR | 0o755


@dataclass(slots=True)
class Contents:
    """A checked archive: the entries of its tree, and the member with the content of each regular file."""

    manifest: Manifest
    entries: dict[bytes, TreeEntry] = field(default_factory=dict)
    members: dict[bytes, Member] = field(default_factory=dict)


def read_contents(
    file: BinaryIO,
    limits: ArchiveLimits,
    progress: ByteProgress = no_progress,
    *,
    check_content: bool = True,
    reserve: Callable[[int], None] = lambda _: None,
) -> Contents:
    """Read and check the archive in `file`.  ArchiveError.  `progress` is called with the bytes decompressed.

    Without `check_content` only the content of symlinks and of hard links is read.  `reserve` is called with the
    number of bytes that the manifest is about to take; an error that it raises ends the reading.
    """
    members = read_members(file, limits)
    contents = Contents(_read_manifest(file, members, limits, reserve))
    groups = _place(contents, members, limits)
    linked = frozenset(path for group in groups for path in group)
    digests = _check_content(file, contents, linked, progress, check_all=check_content)
    _join_links(contents, groups, digests)
    contents.manifest = replace(contents.manifest, entries=[], hard_links=[])  # `entries` has all of it
    return contents


def read_outline(file: BinaryIO, limits: ArchiveLimits, reserve: Callable[[int], None]) -> tuple[Contents, array[int]]:
    """Read and check the central directory and the manifest of the archive in `file`, and nothing else.  ArchiveError.

    Symlinks have no target yet, members no `data`; names of one file have contents of one size and CRC.  Return also
    the sorted offsets of all local headers, and that of the central directory.
    """
    members, start = read_directory(file, limits, reserve)
    headers = array("Q", [member.header for member in members] + [start])
    for number, member in enumerate(members):
        if member.name == MANIFEST:
            member.data = data_start(file, member, headers[number + 1])
    contents = Contents(_read_manifest(file, members, limits, reserve))
    groups = _place(contents, members, limits)
    sums = {path: b"%d %d" % (each.size, each.crc) for path, each in contents.members.items()} if groups else {}
    _join_links(contents, groups, sums)
    contents.manifest = replace(contents.manifest, entries=[], hard_links=[])
    return contents, headers


def _place(contents: Contents, members: Sequence[Member], limits: ArchiveLimits) -> list[list[bytes]]:
    """Add all entries of `members` and of the manifest; return the groups of paths that are one file."""
    records = _records(contents)
    _place_members(contents, members, records)
    _place_others(contents, records)
    _check_counts(contents)
    _complete_directories(contents, limits)
    return _hard_links(contents)


def _read_manifest(
    file: BinaryIO, members: Sequence[Member], limits: ArchiveLimits, reserve: Callable[[int], None]
) -> Manifest:
    member = next((member for member in members if member.name == MANIFEST), None)
    if member is None:
        raise ArchiveError(
            "unknown format: the archive has no manifest.json, so no vfsd wrote it"
            " (to take a plain ZIP in, unpack it with unzip inside the mounted workspace)"
        )
    if stat.S_IFMT(member.mode) not in (0, stat.S_IFREG):
        raise ArchiveError("the manifest is malformed: it is not a regular file", member.shown)
    if member.size > limits.manifest_bytes:
        raise ArchiveError(f"the manifest is larger than {limits.manifest_bytes} bytes", member.shown)
    if member.size > _MANIFEST_FREE_BYTES + _MANIFEST_ENTRY_BYTES * len(members):
        raise ArchiveError("the manifest is larger than its entries can need", member.shown)
    reserve(member.size)
    data = bytearray(member.size)  # joining chunks would need the same amount again
    at = 0
    for chunk in decompressed(file, member):
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    # One of these precedes each value of the JSON; the slack covers strings that contain many of them.
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values > _VALUES_FREE + _VALUES_PER_ENTRY * len(members):
        raise ArchiveError("the manifest has more values than its entries can need", member.shown)
    # Memory of the decoded manifest: objects, and the bytes of strings (three for four characters of base64).
    reserve(_VALUE_BYTES * values + len(data) * 3 // 4)
    return decode_manifest(data, member.shown)


# -- paths -------------------------------------------------------------------------------------


def _path(text: bytes, name: bytes, manifest: Manifest) -> bytes:
    """The path for `text`, a name below files/ or in the manifest."""
    path = text
    if manifest.names == PERCENT:
        try:
            path = unescape(text.decode())
        except ValueError:
            raise ArchiveError("the name is not escaped as the manifest says", shown(name)) from None
    check_path(path, name)
    return path


def _place_members(contents: Contents, members: Sequence[Member], records: dict[bytes, Record]) -> None:
    """Add the entries that have a member, and remove their records from `records`."""
    entries, placed = contents.entries, contents.members
    for member in members:
        if member.name == MANIFEST:
            continue
        # Not checked earlier: a ZIP without a manifest gets the error that explains what to do with it.
        if not member.name.startswith(FILES):
            raise ArchiveError("the entry is outside of files/", member.shown)
        text = member.name[len(FILES) :]
        is_dir = not text or text.endswith(b"/")
        path = _path(text[:-1] if text and is_dir else text, member.name, contents.manifest)
        if path in entries:
            raise ArchiveError("the archive has a file and a directory of this name", member.shown)
        mode = member.mode or (_DEFAULT_DIRECTORY if is_dir else _DEFAULT_FILE)
        if not stat.S_IFMT(mode):
            mode |= stat.S_IFDIR if is_dir else stat.S_IFREG
        if is_dir or not stat.S_ISREG(mode):
            _check_member_mode(member, mode, is_dir=is_dir)
        record = records.pop(path, None)
        placed[path] = member
        number = _inode(entries, path)
        if record is None:
            entries[path] = _without_owner(path, mode, number, member.size, member.mtime_ns)
        else:
            entries[path] = _merged(path, mode, member.size, member.mtime_ns, record, number)


def _check_member_mode(member: Member, mode: int, *, is_dir: bool) -> None:
    if stat.S_ISDIR(mode) != is_dir or stat.S_IFMT(mode) not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK):
        raise ArchiveError(f"the entry has the impossible mode {mode:#o}", member.shown)
    if is_dir and member.size:
        raise ArchiveError("the entry is a directory with content", member.shown)
    if stat.S_ISLNK(mode) and not 0 < member.size <= _TARGET_BYTES_MAX:
        reason = f"the symlink's target is empty or longer than {_TARGET_BYTES_MAX} bytes"
        raise ArchiveError(reason, member.shown)


def _inode(entries: Mapping[bytes, TreeEntry], path: bytes) -> int:
    """The inode number for the next entry: it only identifies hard links."""
    return ROOT_INODE + 1 + len(entries) if path else ROOT_INODE


def _without_owner(path: bytes, mode: int, inode: int, size: int = 0, mtime_ns: int = 0) -> TreeEntry:
    """An entry whose owner the archive does not say: it belongs to the user who reads it, as with unzip."""
    return TreeEntry(path, mode, size, mtime_ns, os.geteuid(), os.getegid(), 1, inode)


def _complete_directories(contents: Contents, limits: ArchiveLimits) -> None:
    """Add the directories that paths only imply, and refuse entries below anything but a directory."""
    entries = contents.entries
    if not entries.setdefault(b"", _without_owner(b"", _DEFAULT_DIRECTORY, ROOT_INODE)).is_dir:
        raise ArchiveError("the root is not a directory", shown(FILES))
    names_bytes = sum(map(len, entries))
    for path in list(entries):
        child = path
        while child:
            parent = child.rpartition(b"/")[0]
            entry = entries.get(parent)
            if entry is not None:
                if not entry.is_dir:
                    kind = "a symlink" if entry.is_symlink else "an entry that is not a directory"
                    raise ArchiveError(f"the entry is below {kind}", shown(FILES + path))
                break
            names_bytes += len(parent)
            if len(entries) >= limits.entries or names_bytes > limits.names_bytes:
                raise ArchiveError("the archive's paths imply too many directories", shown(FILES + path))
            entries[parent] = _without_owner(parent, _DEFAULT_DIRECTORY, _inode(entries, parent))
            child = parent
    # The root is not counted, like the manifest: writers do not count it.
    if len(entries) - 1 > limits.entries or names_bytes > limits.names_bytes:
        raise ArchiveError(f"the archive has more than {limits.entries} entries or {limits.names_bytes} bytes of names")


# -- the manifest against the entries ----------------------------------------------------------


def _records(contents: Contents) -> dict[bytes, Record]:
    """The manifest's records by path."""
    records: dict[bytes, Record] = {}
    for record in contents.manifest.entries:
        path = _record_path(record.path, contents.manifest)
        if path in records:
            raise ArchiveError("the manifest has two records of this path", record.path)
        records[path] = record
    return records


def _record_path(text: str, manifest: Manifest) -> bytes:
    name = text.encode()
    try:
        return _path(name, name, manifest)
    except ArchiveError as error:
        raise ArchiveError(f"the manifest is malformed: {error.strerror}", text) from None


def _place_others(contents: Contents, records: Mapping[bytes, Record]) -> None:
    """Add the entries that have only a record: implied directories, and special files."""
    for path, record in records.items():
        mode = record.mode
        if mode is None or stat.S_IFMT(mode) not in SPECIAL | {stat.S_IFDIR}:
            raise ArchiveError("the manifest has a record for a path that is not in the archive", record.path)
        contents.entries[path] = _merged(path, mode, 0, 0, record, _inode(contents.entries, path))


def _merged(path: bytes, mode: int, size: int, mtime_ns: int, record: Record, number: int) -> TreeEntry:
    """An entry with the manifest's attributes.  The manifest's mode bits take precedence; its type must agree."""
    if record.mode is not None:
        if (record.mode ^ mode) & TYPE_MASK:
            raise ArchiveError("the manifest contradicts the entry's type", record.path)
        mode = record.mode
    if record.mtime_ns is not None:
        mtime_ns = record.mtime_ns
    xattrs = record_xattrs(record)
    return TreeEntry(path, mode, size, mtime_ns, record.uid, record.gid, 1, number, record.rdev, b"", xattrs)


def _check_counts(contents: Contents) -> None:
    sizes = [entry.size for entry in contents.entries.values() if entry.is_file]
    manifest = contents.manifest
    if len(sizes) != manifest.file_count:
        raise ArchiveError(f"the manifest says {manifest.file_count} files, there are {len(sizes)}", shown(MANIFEST))
    if sum(sizes) != manifest.total_bytes:
        raise ArchiveError(f"the manifest says {manifest.total_bytes} bytes, there are {sum(sizes)}", shown(MANIFEST))


def _hard_links(contents: Contents) -> list[list[bytes]]:
    """The groups of paths that are one file; their attributes must agree (contents are compared later)."""
    groups = []
    seen: set[bytes] = set()
    for texts in contents.manifest.hard_links:
        group = [_record_path(text, contents.manifest) for text in texts]
        first: TreeEntry | None = None
        for path, text in zip(group, texts, strict=True):
            entry = contents.entries.get(path)
            if entry is None:
                raise ArchiveError("the manifest has a hard link to a path that is not in the archive", text)
            if entry.is_dir:
                raise ArchiveError("the manifest has a hard link to a directory", text)
            if path in seen:
                raise ArchiveError("the manifest has the path twice among its hard links", text)
            seen.add(path)
            first = first or entry
            if replace(entry, path=first.path, inode=first.inode) != first:
                raise ArchiveError("the manifest has a hard link of files that differ", text)
        groups.append(group)
    return groups


# -- content -----------------------------------------------------------------------------------


def _check_content(
    file: BinaryIO, contents: Contents, linked: frozenset[bytes], progress: ByteProgress, *, check_all: bool
) -> Mapping[bytes, bytes]:
    """Decompress everything, or only what is needed; set symlink targets; return the digests of `linked`."""
    digests: dict[bytes, bytes] = {}
    done, total = 0, sum(member.size for member in contents.members.values())
    for path, member in contents.members.items():
        entry = contents.entries[path]
        if entry.is_symlink:
            target = b"".join(decompressed(file, member))
            if b"\0" in target:
                raise ArchiveError("the symlink's target has a NUL byte", member.shown)
            contents.entries[path] = replace(entry, target=target)
            digests[path] = target
        elif path in linked:
            digest = blake2b()
            for chunk in decompressed(file, member):
                digest.update(chunk)
                progress(done := done + len(chunk), total)
            digests[path] = digest.digest()
        elif check_all:
            for chunk in decompressed(file, member):
                progress(done := done + len(chunk), total)
    return digests


def _join_links(contents: Contents, groups: Sequence[Sequence[bytes]], digests: Mapping[bytes, bytes]) -> None:
    """Give all names of a group one inode number; their contents must be equal."""
    entries = contents.entries
    for group in groups:
        for path in group:
            first = group[0]
            inode = entries[first].inode
            if digests.get(path) != digests.get(first):
                raise ArchiveError("the manifest has a hard link of files that differ", shown(FILES + path))
            entries[path] = replace(entries[path], inode=inode, nlink=len(group))
