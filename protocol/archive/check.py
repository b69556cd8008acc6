"""From the entries of a ZIP and its manifest to those of a tree, with everything checked on the way."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import BinaryIO, Final

from protocol.archive.content import decompressed
from protocol.archive.limits import ArchiveLimits
from protocol.archive.manifest import PERCENT, SPECIAL, Manifest, Record, decode_manifest, record_xattrs
from protocol.archive.members import Member, read_members
from protocol.archive.names import FILES, MANIFEST, check_path, shown, unescape
from protocol.archive.progress import Progress, untold
from protocol.errors import ArchiveError
from protocol.tree import TreeEntry
from protocol.volume import ROOT_INODE

__all__ = ["Contents", "read_contents"]

_TARGET_BYTES_MAX: Final = 4095  # PATH_MAX with its NUL, linux/limits.h
# A value of three bytes costs 64 once decoded: without a bound an archive of some KB would take GB.
_VALUES_FREE: Final = 1_000_000
_VALUES_PER_ENTRY: Final = 64
_DEFAULT_FILE: Final = stat.S_IFREG | 0o644
_DEFAULT_DIRECTORY: Final = stat.S_IFDIR | 0o755


@dataclass(slots=True)
class Contents:
    """A checked archive: the entries of its tree, and where the content of each regular file is."""

    manifest: Manifest
    entries: dict[bytes, TreeEntry] = field(default_factory=dict)
    members: dict[bytes, Member] = field(default_factory=dict)


def read_contents(file: BinaryIO, limits: ArchiveLimits, progress: Progress = untold) -> Contents:
    """Read and check the archive in `file`.  ArchiveError.  `progress` is told of the content decompressed."""
    members = read_members(file, limits)
    contents = Contents(_read_manifest(file, members, limits))
    _place_members(contents, members)
    _apply_records(contents)
    _check_counts(contents)
    _complete_directories(contents, limits)
    groups = _hard_links(contents)
    linked = frozenset(path for group in groups for path in group)
    digests = _check_content(file, contents, linked, progress)
    _number(contents, groups, digests)
    return contents


def _read_manifest(file: BinaryIO, members: Sequence[Member], limits: ArchiveLimits) -> Manifest:
    member = next((member for member in members if member.name == MANIFEST), None)
    if member is None:
        raise ArchiveError(
            "unknown format: the archive has no manifest.json, so no vfsd wrote it"
            " (to take a plain ZIP in, unpack it with unzip inside the mounted workspace)"
        )
    if stat.S_IFMT(member.mode) not in (0, stat.S_IFREG):
        raise ArchiveError("the manifest is malformed: it is no regular file", member.shown)
    if member.size > limits.manifest_bytes:
        raise ArchiveError(f"the manifest is larger than {limits.manifest_bytes} bytes", member.shown)
    data = b"".join(decompressed(file, member))
    # Each value of the JSON is preceded by one of these; strings with many of them are paid for by the slack.
    if sum(map(data.count, (b",", b"[", b"{"))) > _VALUES_FREE + _VALUES_PER_ENTRY * len(members):
        raise ArchiveError("the manifest has more values than its entries can need", member.shown)
    return decode_manifest(data, member.shown)


# -- paths -------------------------------------------------------------------------------------


def _path(text: bytes, name: str, manifest: Manifest) -> bytes:
    """The path that `text`, a name below files/ or in the manifest, stands for."""
    path = text
    if manifest.names == PERCENT:
        try:
            path = unescape(text.decode())
        except ValueError:
            raise ArchiveError("the name is not escaped as the manifest says", name) from None
    check_path(path, name)
    return path


def _place_members(contents: Contents, members: Sequence[Member]) -> None:
    for member in members:
        if member.name == MANIFEST:
            continue
        name = member.shown
        text = member.name[len(FILES) :]
        is_dir = not text or text.endswith(b"/")
        path = _path(text.removesuffix(b"/"), name, contents.manifest)
        if path in contents.entries:
            raise ArchiveError("the archive has a file and a directory of this name", name)
        mode = member.mode or (_DEFAULT_DIRECTORY if is_dir else _DEFAULT_FILE)
        if not stat.S_IFMT(mode):
            mode |= stat.S_IFDIR if is_dir else stat.S_IFREG
        if stat.S_ISDIR(mode) != is_dir or stat.S_IFMT(mode) not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK):
            raise ArchiveError(f"the entry has the impossible mode {mode:#o}", name)
        if is_dir and member.size:
            raise ArchiveError("the entry is a directory with content", name)
        if stat.S_ISLNK(mode) and not 0 < member.size <= _TARGET_BYTES_MAX:
            raise ArchiveError(f"the symlink's target is empty or longer than {_TARGET_BYTES_MAX} bytes", name)
        contents.entries[path] = TreeEntry(path, mode, member.size, member.mtime_ns)
        contents.members[path] = member


def _complete_directories(contents: Contents, limits: ArchiveLimits) -> None:
    """Add the directories that are only implied, and refuse whatever lies below something else."""
    entries = contents.entries
    if not entries.get(b"", _ROOT).is_dir:
        raise ArchiveError("the root is no directory", shown(FILES))
    entries.setdefault(b"", _ROOT)
    names_bytes = sum(map(len, entries))
    for path in list(entries):
        child = path
        while child:
            parent = child.rpartition(b"/")[0]
            entry = entries.get(parent)
            if entry is not None:
                if not entry.is_dir:
                    kind = "a symlink" if entry.is_symlink else "something that is no directory"
                    raise ArchiveError(f"the entry is below {kind}", shown(FILES + path))
                break
            names_bytes += len(parent)
            if len(entries) >= limits.entries or names_bytes > limits.names_bytes:
                raise ArchiveError("the archive's paths imply too many directories", shown(FILES + path))
            entries[parent] = TreeEntry(parent, _DEFAULT_DIRECTORY)
            child = parent
    # The root, the manifest's twin, is not counted by whoever made the archive.
    if len(entries) - 1 > limits.entries or names_bytes > limits.names_bytes:
        raise ArchiveError(f"the archive has more than {limits.entries} entries or {limits.names_bytes} bytes of names")


_ROOT: Final = TreeEntry(b"", _DEFAULT_DIRECTORY)


# -- the manifest against the entries ----------------------------------------------------------


def _apply_records(contents: Contents) -> None:
    seen: set[bytes] = set()
    for record in contents.manifest.entries:
        path = _record_path(record.path, contents.manifest)
        if path in seen:
            raise ArchiveError("the manifest has two records of this path", record.path)
        seen.add(path)
        contents.entries[path] = _merged(contents.entries.get(path), path, record)


def _record_path(text: str, manifest: Manifest) -> bytes:
    try:
        return _path(text.encode(), text, manifest)
    except ArchiveError as error:
        raise ArchiveError(f"the manifest is malformed: {error.strerror}", text) from None


def _merged(entry: TreeEntry | None, path: bytes, record: Record) -> TreeEntry:
    """The entry with what the manifest says of it.  Of the mode's bits the manifest's win, its type may not differ."""
    mode = record.mode
    if entry is None:
        # An implied directory may have a record, and what has no data has nothing else.
        if mode is None or stat.S_IFMT(mode) not in SPECIAL | {stat.S_IFDIR}:
            raise ArchiveError("the manifest has a record of what is not in the archive", record.path)
        entry = TreeEntry(path, mode)
    elif mode is None:
        mode = entry.mode
    elif stat.S_IFMT(mode) != stat.S_IFMT(entry.mode):
        raise ArchiveError("the manifest contradicts the entry's type", record.path)
    return replace(
        entry,
        mode=mode,
        mtime_ns=entry.mtime_ns if record.mtime_ns is None else record.mtime_ns,
        uid=record.uid,
        gid=record.gid,
        rdev=record.rdev,
        xattrs=record_xattrs(record),
    )


def _check_counts(contents: Contents) -> None:
    sizes = [entry.size for entry in contents.entries.values() if entry.is_file]
    manifest = contents.manifest
    if len(sizes) != manifest.file_count:
        raise ArchiveError(f"the manifest says {manifest.file_count} files, there are {len(sizes)}", shown(MANIFEST))
    if sum(sizes) != manifest.total_bytes:
        raise ArchiveError(f"the manifest says {manifest.total_bytes} bytes, there are {sum(sizes)}", shown(MANIFEST))


def _hard_links(contents: Contents) -> list[list[bytes]]:
    """The groups of paths that are one file, with attributes that agree (contents are compared later)."""
    groups = []
    seen: set[bytes] = set()
    for texts in contents.manifest.hard_links:
        group = [_record_path(text, contents.manifest) for text in texts]
        first: TreeEntry | None = None
        for path, text in zip(group, texts, strict=True):
            entry = contents.entries.get(path)
            if entry is None:
                raise ArchiveError("the manifest links what is not in the archive", text)
            if entry.is_dir:
                raise ArchiveError("the manifest links a directory", text)
            if path in seen:
                raise ArchiveError("the manifest links the path twice", text)
            seen.add(path)
            first = first or entry
            if replace(entry, path=first.path) != first:
                raise ArchiveError("the manifest links files that differ", text)
        groups.append(group)
    return groups


# -- content -----------------------------------------------------------------------------------


def _check_content(
    file: BinaryIO, contents: Contents, linked: frozenset[bytes], progress: Progress
) -> Mapping[bytes, bytes]:
    """Decompress everything once; fill in symlink targets; the digests of `linked`."""
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
        else:
            for chunk in decompressed(file, member):
                progress(done := done + len(chunk), total)
    return digests


def _number(contents: Contents, groups: Sequence[Sequence[bytes]], digests: Mapping[bytes, bytes]) -> None:
    """Give each file its inode number, one to all names of a group."""
    group_of = {path: group for group in groups for path in group}
    inodes: dict[bytes, int] = {b"": ROOT_INODE}
    for path in contents.entries:
        group = group_of.get(path, (path,))
        if digests.get(path) != digests.get(group[0]):
            raise ArchiveError("the manifest links files that differ", shown(FILES + path))
        inode = inodes.setdefault(group[0], len(inodes) + ROOT_INODE)
        contents.entries[path] = replace(contents.entries[path], inode=inode, nlink=len(group))
