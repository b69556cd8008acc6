"""Write the archive of a tree: streamed in bounded memory, to any file, atomically to a path.

Only the caller's thread reads the tree and writes the file.

A program that changes directory step by step can make paths of any length.  ZIP names have at most 65,535 bytes.  A
long chain of directories also costs an archive the square of its depth, because each entry repeats its whole path.  So
the length of paths is bounded: to the largest length at which each name fits into a ZIP, and all names together into
the limits of a reader.  An entry below an omitted path has a longer path, and is omitted too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec

from protocol.archive.manifest import (
    DEVICES,
    FILES,
    MANIFEST,
    NAME_BYTES_MAX,
    PATH_BYTES_MAX,
    PERCENT,
    SPECIAL,
    VERSION,
    ArchiveLimits,
    Manifest,
    Record,
    clamped_ns,
    escape,
    is_utf8,
    is_xattr_name,
    timestamp,
    xattrs_fit,
)
from protocol.archive.zipwriter import SMALL_BYTES, STREAM_BYTES, Item, Packer, ZipWriter, equal_pieces
from protocol.errors import os_error, shown
from protocol.linux.regular_file import sync_directory
from protocol.tree import ByteProgress, Chunk, Tree, TreeEntry, no_progress

DEFAULT_LEVEL: Final = 6  # the default of zlib and zip

_CHUNK_BYTES: Final = 256 * 1024
_ENTRIES_PER_REPORT: Final = 1024
_REGULAR_FILE: Final = 0o100644


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """The result of writing an archive.  `files` counts regular files by name; `directories` excludes the root.

    `skipped` maps each path that an archive cannot hold to the reason; entries below such a path are omitted too.
    """

    files: int
    directories: int
    total_bytes: int
    archive_bytes: int
    skipped: Mapping[bytes, str] = field(default_factory=dict)


def write_archive(
    tree: Tree,
    file: BinaryIO,
    *,
    created_ns: int | None = None,
    progress: ByteProgress = no_progress,
    level: int = DEFAULT_LEVEL,
    skip_too_long: bool = False,
) -> ArchiveSummary:
    """Write the archive of `tree` to `file`, which need not be seekable.

    `created_ns` (else SOURCE_DATE_EPOCH, else now) becomes `created_at`; `level` is zlib's, 0 to 9. Errors of the
    tree and the file are passed on; OSError (EIO) if a file's size differs from its entry; EFBIG for a tree that no
    reader would accept.  ENAMETOOLONG for a path that no archive can hold; with `skip_too_long` such a path is
    omitted, and the summary names it.  Xattrs in a namespace of one file system (`btrfs.compression`) are omitted.
    """
    created_ns = _created(created_ns)
    chosen = select(_watched(tree.walk(), progress))
    if chosen.skipped and not skip_too_long:
        path, reason = next(iter(chosen.skipped.items()))
        raise OSError(errno.ENAMETOOLONG, reason, shown(path))
    _check_total(chosen.entries)
    manifest = _manifest(chosen, created_ns)
    text = _encoded(manifest)
    writer = ZipWriter(file)
    report = _Reporter(progress, manifest.total_bytes)
    with Packer(writer, level) as packer:
        packer.add(Item(MANIFEST, _REGULAR_FILE, created_ns, text))
        for entry, name in zip(chosen.entries, chosen.names, strict=True):
            _add(packer, tree, entry, name, report)
            report.entry()
    writer.finish()
    progress(manifest.total_bytes, manifest.total_bytes)
    directories = sum(entry.is_dir for entry in chosen.entries) - 1
    return ArchiveSummary(manifest.file_count, directories, manifest.total_bytes, writer.offset, chosen.skipped)


def export_archive(
    tree: Tree,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    created_ns: int | None = None,
    progress: ByteProgress = no_progress,
    level: int = DEFAULT_LEVEL,
    skip_too_long: bool = False,
) -> ArchiveSummary:
    """Write the archive of `tree` at `path`, completely and durably, or leave `path` unchanged.

    Without `overwrite` an existing file raises FileExistsError.  With it only a regular file is replaced, never a
    device or a pipe: EINVAL.  The rest is as in `write_archive`.
    """
    path = os.fspath(path)
    _check_place(path, overwrite=overwrite)
    folder = os.path.dirname(path)
    # in the same directory, so that the rename stays in one file system
    temporary = os.path.join(folder, f".vfsd-export-{secrets.token_hex(8)}.tmp")
    try:
        with _new_file(temporary, folder) as file:
            summary = write_archive(
                tree, file, created_ns=created_ns, progress=progress, level=level, skip_too_long=skip_too_long
            )
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            _rename_to_new(temporary, path)
    except OSError as error:
        # write(2) has only a descriptor.
        if error.errno not in {errno.ENOSPC, errno.EDQUOT} or error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror} for the archive, which was not written", path) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_directory(folder or ".")
    return summary


def _new_file(temporary: str, folder: str) -> BinaryIO:
    """Create the file `temporary`; errors name its directory, which the caller chose."""
    try:
        return open(temporary, "xb")
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "no such directory: make it with mkdir", folder) from None
    except OSError as error:
        error.filename = folder or "."
        raise


def _check_place(path: str, *, overwrite: bool) -> None:
    if not overwrite:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "this is a directory: name a file in it, such as backup.zip", path)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # nothing there, or a broken symlink
    # A rename would replace /dev/null or /dev/stdout for every program.
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "this is not a regular file, so no archive can replace it", path)


def _rename_to_new(temporary: str, path: str) -> None:
    """Give the finished file its name; FileExistsError if another program has made it meanwhile."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
    else:
        return
    # No hard links here (FAT, some network file systems): reserve the name, then replace the reservation.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(path)
        raise


# -- manifest and entries ----------------------------------------------------------------------


def _created(created_ns: int | None) -> int:
    """The time of creation, checked to be valid in ISO 8601."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        if created_ns is None:
            created_ns = int(epoch) * 1_000_000_000 if epoch else time.time_ns()
        timestamp(created_ns)
    except (ValueError, OverflowError, OSError):
        raise os_error(errno.EINVAL, f"created_ns={created_ns} SOURCE_DATE_EPOCH={epoch}") from None
    return created_ns


def _manifest(chosen: Selection, created_ns: int) -> Manifest:
    entries, names = chosen.entries, chosen.names
    files = [entry.size for entry in entries if entry.is_file]
    groups: dict[int, list[str]] = {}
    for entry, name in zip(entries, names, strict=True):
        if entry.inode and not entry.is_dir:
            groups.setdefault(entry.inode, []).append(name)
    return Manifest(
        version=VERSION,
        created_at=timestamp(created_ns),
        file_count=len(files),
        total_bytes=sum(files),
        names=PERCENT if chosen.percent else None,
        entries=[_record(entry, name) for entry, name in zip(entries, names, strict=True)],
        hard_links=[group for group in groups.values() if len(group) > 1],
    )


def _encoded(manifest: Manifest) -> bytes:
    """The manifest as JSON.  EFBIG for one that no reader would accept."""
    text = msgspec.json.encode(manifest)
    limit = ArchiveLimits().manifest_bytes
    if len(text) > limit:
        reason = f"names and extended attributes take {len(text):,} bytes, more than an archive may have ({limit:,})"
        raise OSError(errno.EFBIG, reason, shown(MANIFEST))
    return text


def _check_total(entries: Sequence[TreeEntry]) -> None:
    """Raise EFBIG, naming the largest file, for a tree that no reader would accept; holes count, as they do there."""
    total = sum(entry.size for entry in entries if entry.is_file)
    limit = ArchiveLimits().total_bytes
    if total > limit:
        largest = max((entry for entry in entries if entry.is_file), key=lambda entry: entry.size)
        reason = f"{total:,} bytes are more than an archive may hold ({limit:,}); the largest file has {largest.size:,}"
        raise OSError(errno.EFBIG, reason, shown(largest.path))


def _record(entry: TreeEntry, name: str) -> Record:
    xattrs = {}
    if entry.xattrs and xattrs_fit(entry.xattrs):
        xattrs = {escape(key): value for key, value in sorted(entry.xattrs.items()) if is_xattr_name(key)}
    rdev = entry.rdev if stat.S_IFMT(entry.mode) in DEVICES else 0
    return Record(name, entry.mode, clamped_ns(entry.mtime_ns), entry.uid, entry.gid, rdev, xattrs)


def _add(packer: Packer, tree: Tree, entry: TreeEntry, text: str, report: _Reporter) -> None:
    """Write one entry of the tree."""
    name = FILES + text.encode()
    if entry.is_file:
        if entry.size > SMALL_BYTES:
            packer.stream(Item(name, entry.mode, entry.mtime_ns, b""), entry.size, _checked(tree, entry, report))
            return
        data = tree.read(entry.path, 0, entry.size) if entry.size else b""
        if len(data) != entry.size:
            raise _changed(entry)
        packer.add(Item(name, entry.mode, entry.mtime_ns, data))
        report.add(len(data))
    elif entry.is_dir:
        packer.add(Item(name + b"/" if text else name, entry.mode, entry.mtime_ns, b""))
    elif entry.is_symlink:
        packer.add(Item(name, entry.mode, entry.mtime_ns, entry.target))
    elif stat.S_IFMT(entry.mode) not in SPECIAL:  # special files have only a record in the manifest
        raise OSError(errno.EINVAL, f"unknown file type: mode {entry.mode:o}", shown(entry.path))


def _checked(tree: Tree, entry: TreeEntry, report: _Reporter) -> Iterator[Chunk]:
    """Yield the content of a file in chunks; its size must be that of its entry, which the manifest states."""
    done = 0
    for chunk in equal_pieces(tree.chunks(entry.path, STREAM_BYTES)):
        done += len(chunk)
        if done > entry.size:
            break
        yield chunk
        report.add(len(chunk))
    if done != entry.size:
        raise _changed(entry)


def _changed(entry: TreeEntry) -> OSError:
    return OSError(errno.EIO, "the file changed while it was archived", shown(entry.path))


def _watched(entries: Iterable[TreeEntry], progress: ByteProgress) -> Iterator[TreeEntry]:
    """Yield `entries` and call `progress` regularly; an exception from it ends the work."""
    for number, entry in enumerate(entries, 1):
        if number % _ENTRIES_PER_REPORT == 0:
            progress(0, 0)
        yield entry


class _Reporter:
    """Calls the caller's `progress`, after _CHUNK_BYTES or _ENTRIES_PER_REPORT: a call for each file would be slow."""

    def __init__(self, progress: ByteProgress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._reported = 0
        self._entries = 0

    def entry(self) -> None:
        """Count an entry: progress of a million empty files is reported too, and can be cancelled."""
        self._entries += 1
        if self._entries % _ENTRIES_PER_REPORT == 0 and self._done < self._total:
            self._progress(self._done, self._total)

    def add(self, size: int) -> None:
        self._done += size
        if self._done - self._reported >= _CHUNK_BYTES and self._done < self._total:
            self._reported = self._done
            self._progress(self._done, self._total)


# -- entries that an archive can hold --------------------------------------------------------------
# The manifest repeats all names, with some hundred bytes for each record.
_ALL_NAMES_BYTES: Final = ArchiveLimits().manifest_bytes // 4


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries of an archive with their names below files/.

    `skipped` maps each omitted path to the reason; entries below such a path are omitted and not listed.
    """

    entries: list[TreeEntry]
    names: list[str]
    percent: bool
    skipped: dict[bytes, str]


def select(entries: Iterable[TreeEntry], all_names_bytes: int = _ALL_NAMES_BYTES) -> Selection:
    """Choose from `entries`; `all_names_bytes` bounds the sum of the names' lengths.

    Memory is bounded by `all_names_bytes`, however long the paths of the tree are.
    """
    fitting = _Fitting(all_names_bytes)
    for entry in entries:
        fitting.add(entry)
    fitting.shrink(lambda entry: len(entry.path))
    percent = not all(is_utf8(entry.path) for entry in fitting.entries)
    if percent:  # now names may be three times as long as paths
        fitting.shrink(lambda entry: len(escape(entry.path).encode()))
    names = [escape(entry.path) if percent else entry.path.decode() for entry in fitting.entries]
    for entry in fitting.entries:
        if entry.xattrs and not xattrs_fit(entry.xattrs):
            fitting.skipped[entry.path] = "the names of its extended attributes are too long together: archived without"
    return Selection(fitting.entries, names, percent, fitting.skipped)


class _Fitting:
    """The entries that fit so far."""

    def __init__(self, all_names_bytes: int) -> None:
        self.entries: list[TreeEntry] = []
        self.skipped: dict[bytes, str] = {}
        self._most = all_names_bytes
        self._bytes = 0
        self._longest = PATH_BYTES_MAX

    def add(self, entry: TreeEntry) -> None:
        length = len(entry.path)
        if length > self._longest:
            self._skip(entry.path)
            return
        self.entries.append(entry)
        self._bytes += length
        if self._bytes > 2 * self._most:  # not at each entry, which would be quadratic
            self.shrink(lambda entry: len(entry.path))

    def shrink(self, length: Callable[[TreeEntry], int]) -> None:
        """Omit the longest names until the others fit."""
        longest = _longest_that_fit((length(entry) for entry in self.entries), self._most)
        kept = []
        self._bytes = 0
        for entry in self.entries:
            size = length(entry)
            if size > longest:
                self._longest = min(self._longest, len(entry.path) - 1)
            else:
                self._bytes += size
                kept.append(entry)
        if len(kept) == len(self.entries):
            return
        present = {entry.path for entry in kept}
        left_out = [*self.skipped, *(entry.path for entry in self.entries if entry.path not in present)]
        self.entries, self.skipped = kept, {}
        for path in left_out:
            if path.rpartition(b"/")[0] in present:
                self.skipped[path] = _reason(path)

    def _skip(self, path: bytes) -> None:
        # otherwise its directory is omitted as well, and listed
        if path.rfind(b"/") <= self._longest:
            self.skipped[path] = _reason(path)


def _longest_that_fit(lengths: Iterable[int], most: int) -> int:
    """The largest length for which the lengths up to it sum to at most `most`."""
    longest = NAME_BYTES_MAX - len(FILES) - 1
    total = 0
    for length, count in sorted(Counter(lengths).items()):
        total += length * count
        if total > most:
            return min(longest, length - 1)
    return longest


def _reason(path: bytes) -> str:
    return f"its path of {len(path):,} bytes is too long for an archive; it and everything below it are left out"
