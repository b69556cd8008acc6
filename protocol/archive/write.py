"""Write the archive of a tree: streamed in fixed memory, to any file, atomically to a path.

The tree is read, and the file written, by the caller's thread alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

import msgspec

from protocol.archive.limits import ArchiveLimits
from protocol.archive.manifest import DEVICES, PERCENT, SPECIAL, VERSION, Manifest, Record, timestamp
from protocol.archive.names import FILES, MANIFEST, PATH_BYTES_MAX, escape, is_utf8, shown
from protocol.archive.progress import Progress
from protocol.archive.zipwriter import SMALL_BYTES, Item, Packer, ZipWriter
from protocol.errors import fail
from protocol.tree import Tree, TreeEntry

__all__ = ["ArchiveSummary", "export_archive", "write_archive"]

DEFAULT_LEVEL: Final = 6  # zlib's and zip's own

_CHUNK_BYTES: Final = 256 * 1024
_REGULAR_FILE: Final = 0o100644


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """What was written.  `files` are regular files, each name counted; `directories` are without the root."""

    files: int
    directories: int
    total_bytes: int
    archive_bytes: int


def write_archive(
    tree: Tree,
    file: BinaryIO,
    *,
    created_ns: int | None = None,
    progress: Progress | None = None,
    level: int = DEFAULT_LEVEL,
) -> ArchiveSummary:
    """Write the archive of `tree` to `file`, which need not be seekable.

    `created_ns` (else SOURCE_DATE_EPOCH, else now) becomes `created_at`; `level` is zlib's, 0 to 9.
    Whatever the tree or the file raises goes through; OSError (EIO) when a file's size is not what its
    entry says; ENAMETOOLONG for a path, and EFBIG for a tree, that no reader would accept.
    """
    created_ns = _created(created_ns)
    entries = list(tree.walk())
    _check_total(entries)
    percent = not all(is_utf8(entry.path) for entry in entries)
    names = [escape(entry.path) if percent else entry.path.decode() for entry in entries]
    manifest = _manifest(entries, names, percent, created_ns)
    writer = ZipWriter(file)
    report = _Reporter(progress, manifest.total_bytes)
    with Packer(writer, level) as packer:
        packer.add(Item(MANIFEST, _REGULAR_FILE, created_ns, msgspec.json.encode(manifest)))
        for entry, name in zip(entries, names, strict=True):
            _add(packer, tree, entry, name, report)
    writer.finish()
    report.finish()
    directories = sum(entry.is_dir for entry in entries) - 1
    return ArchiveSummary(manifest.file_count, directories, manifest.total_bytes, writer.offset)


def export_archive(
    tree: Tree,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    created_ns: int | None = None,
    progress: Progress | None = None,
    level: int = DEFAULT_LEVEL,
) -> ArchiveSummary:
    """Write the archive of `tree` at `path`: the whole of it, durably, or nothing.

    Without `overwrite` an existing file is left alone: FileExistsError.
    """
    path = os.fspath(path)
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    folder = os.path.dirname(path)
    # In the same directory, so that the rename stays in one file system.
    temporary = os.path.join(folder, f".vfsd-export-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            summary = write_archive(tree, file, created_ns=created_ns, progress=progress, level=level)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            _rename_to_new(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(folder or ".")
    return summary


def _rename_to_new(temporary: str, path: str) -> None:
    """Give the finished file its name; FileExistsError when somebody else was faster."""
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


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse to sync directories; the archive is complete all the same.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


# -- what goes in ------------------------------------------------------------------------------


def _created(created_ns: int | None) -> int:
    """The time of creation, checked to be one that ISO 8601 can say."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        if created_ns is None:
            created_ns = int(epoch) * 1_000_000_000 if epoch else time.time_ns()
        timestamp(created_ns)
    except (ValueError, OverflowError, OSError):
        raise fail(errno.EINVAL, f"created_ns={created_ns} SOURCE_DATE_EPOCH={epoch}") from None
    return created_ns


def _manifest(entries: Sequence[TreeEntry], names: Sequence[str], percent: bool, created_ns: int) -> Manifest:
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
        names=PERCENT if percent else None,
        entries=[_record(entry, name) for entry, name in zip(entries, names, strict=True)],
        hard_links=[group for group in groups.values() if len(group) > 1],
    )


def _check_total(entries: Sequence[TreeEntry]) -> None:
    """EFBIG, naming the largest file, for a tree that no reader would take; holes count here as they do there."""
    total = sum(entry.size for entry in entries if entry.is_file)
    limit = ArchiveLimits().total_bytes
    if total > limit:
        largest = max((entry for entry in entries if entry.is_file), key=lambda entry: entry.size)
        reason = f"{total:,} bytes are more than an archive may hold ({limit:,}); the largest file has {largest.size:,}"
        raise OSError(errno.EFBIG, reason, shown(largest.path))


def _record(entry: TreeEntry, name: str) -> Record:
    xattrs = {escape(key): value for key, value in sorted(entry.xattrs.items())} if entry.xattrs else {}
    rdev = entry.rdev if stat.S_IFMT(entry.mode) in DEVICES else 0
    return Record(name, entry.mode, entry.mtime_ns, entry.uid, entry.gid, rdev, xattrs)


def _add(packer: Packer, tree: Tree, entry: TreeEntry, text: str, report: _Reporter) -> None:
    """One entry of the tree into the archive."""
    name = FILES + text.encode()
    if len(entry.path) > PATH_BYTES_MAX:
        raise fail(errno.ENAMETOOLONG, shown(entry.path))
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
    elif stat.S_IFMT(entry.mode) not in SPECIAL:  # of those the manifest says all there is
        raise OSError(errno.EINVAL, f"no kind of file that there is: mode {entry.mode:o}", shown(entry.path))


def _checked(tree: Tree, entry: TreeEntry, report: _Reporter) -> Iterator[bytes]:
    """The content of a file in chunks; its size must be what its entry, and so the manifest, says."""
    done = 0
    for chunk in tree.chunks(entry.path, _CHUNK_BYTES):
        done += len(chunk)
        if done > entry.size:
            break
        yield chunk
        report.add(len(chunk))
    if done != entry.size:
        raise _changed(entry)


def _changed(entry: TreeEntry) -> OSError:
    return OSError(errno.EIO, "the file changed while it was archived", shown(entry.path))


class _Reporter:
    """Tells the caller how far it is."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._told = 0

    def add(self, size: int) -> None:
        self._done += size
        # Not for each small file: ten thousand calls would cost more than they tell.
        if self._done - self._told >= _CHUNK_BYTES and self._done < self._total:
            self._tell()

    def finish(self) -> None:
        self._tell()

    def _tell(self) -> None:
        self._told = self._done
        if self._progress is not None:
            self._progress(self._done, self._total)
