"""Turn the entries of a ZIP file and its manifest into the entries of a tree, and check all of them."""

from __future__ import annotations

import stat
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import BinaryIO, Final

from msgspec.structs import replace
from msgspec.structs import replace as replace_struct

from protocol.archive.content import decompressed
from protocol.archive.limits import ArchiveLimits
from protocol.archive.manifest import PERCENT, SPECIAL, Manifest, Record, decode_manifest, record_xattrs
from protocol.archive.members import Member, data_start, read_directory, read_members
from protocol.archive.names import FILES, MANIFEST, check_path, unescape
from protocol.errors import ArchiveError, shown
from protocol.tree import TYPE_MASK, ByteProgress, TreeEntry, no_progress
from protocol.volume import ROOT_INODE

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
    contents.manifest = replace_struct(contents.manifest, entries=[], hard_links=[])  # `entries` has all of it
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
    contents.manifest = replace_struct(contents.manifest, entries=[], hard_links=[])
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
            entries[path] = TreeEntry(path, mode, member.size, member.mtime_ns, inode=number)
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


def _complete_directories(contents: Contents, limits: ArchiveLimits) -> None:
    """Add the directories that paths only imply, and refuse entries below anything but a directory."""
    entries = contents.entries
    if not entries.get(b"", _ROOT).is_dir:
        raise ArchiveError("the root is not a directory", shown(FILES))
    entries.setdefault(b"", _ROOT)
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
            entries[parent] = TreeEntry(parent, _DEFAULT_DIRECTORY, inode=_inode(entries, parent))
            child = parent
    # The root is not counted, like the manifest: writers do not count it.
    if len(entries) - 1 > limits.entries or names_bytes > limits.names_bytes:
        raise ArchiveError(f"the archive has more than {limits.entries} entries or {limits.names_bytes} bytes of names")


_ROOT: Final = TreeEntry(b"", _DEFAULT_DIRECTORY, inode=ROOT_INODE)


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
