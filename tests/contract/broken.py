"""Filesystems and volumes that break their contract, each in one way: the suites that are named for it must notice."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from protocol import InMemoryFilesystem
from protocol.backends.memory import MemoryVolume
from protocol.errors import os_error
from protocol.streams import ByteReader, ByteWriter, FileReader, TextReader
from protocol.types import FileEntry, FileStat, FilesystemSnapshot, GlobMatch, GrepMatch, ReadBytesResult, ReadResult
from protocol.volume import AttributeChanges


class SplitsLinesAsPythonDoes(InMemoryFilesystem):
    def read(self, path: str, **options: Any) -> ReadResult:
        result = super().read(path, **options)
        return replace(result, total_lines=len(result.content.splitlines()))


class TranslatesNewlines(InMemoryFilesystem):
    def read(self, path: str, **options: Any) -> ReadResult:
        result = super().read(path, **options)
        return replace(result, content=result.content.replace("\r\n", "\n"))


class NeverSaysTruncated(InMemoryFilesystem):
    def read_bytes(self, path: str, **options: Any) -> ReadBytesResult:
        return replace(super().read_bytes(path, **options), truncated=False)


class ReplacesWhatItCannotDecode(InMemoryFilesystem):
    def read(self, path: str, **options: Any) -> ReadResult:
        try:
            return super().read(path, **options)
        except ValueError:
            text = self.read_bytes(path).content.decode("utf-8", "replace")
            return ReadResult(text, path, text.count("\n"), 0, 0, truncated=False)


class RaisesWithoutErrno(InMemoryFilesystem):
    def stat(self, path: str) -> FileStat:
        try:
            return super().stat(path)
        except FileNotFoundError:
            raise FileNotFoundError(path) from None


class ReportsLongNamesAsTheSystemDoes(InMemoryFilesystem):
    def stat(self, path: str) -> FileStat:
        try:
            return super().stat(path)
        except ValueError as error:
            raise OSError(errno.ENAMETOOLONG, str(error), path) from None


class CreatesOverWhatIsThere(InMemoryFilesystem):
    def write_bytes(self, path: str, content: bytes, *, mode: Any = "overwrite", create_parents: bool = True) -> Any:
        mode = "overwrite" if mode == "create" else mode
        return super().write_bytes(path, content, mode=mode, create_parents=create_parents)


class AlwaysMakesParents(InMemoryFilesystem):
    def open_write(self, path: str, *, mode: Any = "overwrite", create_parents: bool = True) -> ByteWriter:
        return super().open_write(path, mode=mode)


class DeletesWithoutAsking(InMemoryFilesystem):
    def delete(self, path: str, *, recursive: bool = False) -> int:
        return super().delete(path, recursive=True)


class CountsOneDeletion(InMemoryFilesystem):
    def delete(self, path: str, *, recursive: bool = False) -> int:
        super().delete(path, recursive=recursive)
        return 1


class ListsInNoOrder(InMemoryFilesystem):
    def list(self, path: str = ".") -> Sequence[FileEntry]:
        return super().list(path)[::-1]


class FindsDirectoriesToo(InMemoryFilesystem):
    def glob(self, pattern: str, *, path: str = ".") -> Sequence[GlobMatch]:
        found = list(super().glob(pattern, path=path))
        return found or [GlobMatch(pattern, is_file=False)] if self.is_dir(pattern) else found


class CountsLinesFromZero(InMemoryFilesystem):
    def grep(self, pattern: str, **options: Any) -> Sequence[GrepMatch]:
        return [replace(match, line_number=match.line_number - 1) for match in super().grep(pattern, **options)]


class _Reader(FileReader):
    def __init__(self, good: ByteReader) -> None:
        assert isinstance(good, FileReader)
        super().__init__(good.path, good._content)


class _ShortReader(_Reader):
    def chunks(self, size: int = 1 << 16) -> Iterator[bytes]:
        return super().chunks(min(size, 1 << 12))


class GivesChunksOfAnotherSize(InMemoryFilesystem):
    def open_read(self, path: str) -> ByteReader:
        return _ShortReader(super().open_read(path))


class _GreedyReader(_Reader):
    def chunks(self, size: int = 1 << 16) -> Iterator[bytes]:
        data = self.read()
        return (data[start : start + size] for start in range(0, len(data), size))


class ReadsAllAtOnce(InMemoryFilesystem):
    def open_read(self, path: str) -> ByteReader:
        return _GreedyReader(super().open_read(path))


class _ForgetfulReader(_Reader):
    def read(self, size: int = -1) -> bytes:
        return b"" if self.closed else super().read(size)


class ReadsAfterClose(InMemoryFilesystem):
    def open_read(self, path: str) -> ByteReader:
        return _ForgetfulReader(super().open_read(path))


class WritesInPlace(InMemoryFilesystem):
    def open_write(self, path: str, *, mode: Any = "overwrite", create_parents: bool = True) -> ByteWriter:
        writer = super().open_write(path, mode=mode, create_parents=create_parents)
        if mode == "overwrite":
            writer.close()
            writer = super().open_write(path, mode="append")
        return writer


class DecodesWithoutPosition(InMemoryFilesystem):
    def open_text(self, path: str, *, encoding: str = "utf-8") -> TextReader:
        reader = super().open_text(path, encoding=encoding)
        reader._decoder._position = -1_000_000  # type: ignore[attr-defined]
        return reader


class SaysItCanBeWritten(InMemoryFilesystem):
    read_only = False  # type: ignore[assignment]


class RefusesWithoutErrno(InMemoryFilesystem):
    def _changing(self, path: str, *, root_is_fine: bool = False) -> str:
        if self.read_only:
            raise PermissionError("read-only")
        return super()._changing(path, root_is_fine=root_is_fine)


class WritesThoughReadOnly(InMemoryFilesystem):
    def write(self, path: str, content: str, **options: Any) -> Any:
        self.volume.read_only = False  # type: ignore[misc]
        try:
            return super().write(path, content, **options)
        finally:
            self.volume.read_only = True  # type: ignore[misc]


class ForgetsItsTag(InMemoryFilesystem):
    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        return super().snapshot()


class KeepsWhatIsNew(InMemoryFilesystem):
    def restore(self, snapshot: FilesystemSnapshot) -> None:
        new = {entry.path for entry in self.list() if entry.is_file}
        super().restore(snapshot)
        for path in new - {entry.path for entry in self.list()}:
            if not self.exists(path):
                self.write(path, "left behind")


class RewritesEveryFile(InMemoryFilesystem):
    def restore(self, snapshot: FilesystemSnapshot) -> None:
        super().restore(snapshot)
        for match in self.glob("**"):
            self.write_bytes(match.path, self.read_bytes(match.path).content)


class RestoresWhatIsNotThere(InMemoryFilesystem):
    def restore(self, snapshot: FilesystemSnapshot) -> None:
        try:
            super().restore(snapshot)
        except FileNotFoundError:
            pass


class ImportsOverWhatIsThere(InMemoryFilesystem):
    def import_archive(self, path: str | os.PathLike[str]) -> None:
        kept = {match.path: self.read_bytes(match.path).content for match in self.glob("**")}
        super().import_archive(path)
        for name, content in kept.items():
            if not self.exists(name):
                self.write_bytes(name, content)


class ExportsOverWhatIsThere(InMemoryFilesystem):
    def export_archive(self, path: str | os.PathLike[str]) -> None:
        if os.path.exists(path):
            os.unlink(path)
        super().export_archive(path)


class LosesTheMode(InMemoryFilesystem):
    def open_write(self, path: str, *, mode: Any = "overwrite", create_parents: bool = True) -> ByteWriter:
        if mode == "overwrite" and self.is_file(path):
            self.delete(path)
        return super().open_write(path, mode=mode, create_parents=create_parents)


BROKEN: Mapping[str, Sequence[Callable[..., InMemoryFilesystem]]] = {
    "FilesystemContract": [
        SplitsLinesAsPythonDoes,
        TranslatesNewlines,
        NeverSaysTruncated,
        ReplacesWhatItCannotDecode,
        RaisesWithoutErrno,
        ReportsLongNamesAsTheSystemDoes,
        CreatesOverWhatIsThere,
        AlwaysMakesParents,
        DeletesWithoutAsking,
        CountsOneDeletion,
        ListsInNoOrder,
        FindsDirectoriesToo,
        CountsLinesFromZero,
    ],
    "StreamingContract": [
        GivesChunksOfAnotherSize,
        ReadsAllAtOnce,
        ReadsAfterClose,
        WritesInPlace,
        DecodesWithoutPosition,
    ],
    "ReadOnlyContract": [SaysItCanBeWritten, RefusesWithoutErrno, WritesThoughReadOnly],
    "SnapshotContract": [ForgetsItsTag, KeepsWhatIsNew, RewritesEveryFile, RestoresWhatIsNotThere],
    "ArchiveContract": [ImportsOverWhatIsThere, ExportsOverWhatIsThere, LosesTheMode],
}


class BrokenVolume:
    """A memory volume; a subclass replaces single calls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.memory_volume = MemoryVolume(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory_volume, name)


class WritesPastHolesWithJunk(BrokenVolume):
    def write(self, inode: int, offset: int, data: Any, *, kill_privileges: bool = False) -> int:
        size = self.getattr(inode).size
        if offset > size:
            self.memory_volume.write(inode, size, b"?" * min(offset - size, 4096))
        return self.memory_volume.write(inode, offset, data, kill_privileges=kill_privileges)


class KeepsSetuidWhateverIsWritten(BrokenVolume):
    def write(self, inode: int, offset: int, data: Any, *, kill_privileges: bool = False) -> int:
        return self.memory_volume.write(inode, offset, data)


class RenamesOverWhatItMustNotReplace(BrokenVolume):
    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0, *rest: Any) -> None:
        self.memory_volume.rename(parent, name, new_parent, new_name, flags & ~1, *rest)


class SaysEpermForWhatIsMissing(BrokenVolume):
    def lookup(self, parent: int, name: bytes) -> Any:
        try:
            return self.memory_volume.lookup(parent, name)
        except FileNotFoundError:
            raise os_error(errno.EPERM) from None


class ListsWithoutTheDots(BrokenVolume):
    def readdir(self, inode: int, cookie: int) -> Any:
        return (entry for entry in self.memory_volume.readdir(inode, cookie) if entry.name not in (b".", b".."))


class CountsItsCookiesFromWhereItWasAsked(BrokenVolume):
    def readdir(self, inode: int, cookie: int) -> Any:
        for at, entry in enumerate(self.memory_volume.readdir(inode, 0), 1):
            if at > cookie:
                yield entry._replace(cookie=at)


class ListsNewNamesLast(BrokenVolume):
    def readdir(self, inode: int, cookie: int) -> Any:
        found = sorted(self.memory_volume.readdir(inode, 0), key=lambda entry: (entry.cookie > 2, entry.inode))
        for entry in found:
            at = entry.cookie if entry.cookie <= 2 else entry.inode + 2
            if at > cookie:
                yield entry._replace(cookie=at)


class ForgetsThatItForgets(BrokenVolume):
    def forget(self, inode: int, count: int) -> None:
        del inode, count


class ShrinksNothing(BrokenVolume):
    def setattr(self, inode: int, changes: AttributeChanges) -> Any:
        if changes.size is not None and changes.size < self.getattr(inode).size:
            changes = changes._replace(size=None)
        return self.memory_volume.setattr(inode, changes)


class HasNoQuota(BrokenVolume):
    def __init__(self, _max_bytes: int | None = None, _max_inodes: int | None = None, **options: Any) -> None:
        super().__init__(None, None, **options)


class TakesNamesOfAnyLength(BrokenVolume):
    def mknod(self, parent: int, name: bytes, *rest: Any) -> Any:
        return self.memory_volume.mknod(parent, name[:255], *rest)


class ReplacesXattrsThatMustBeNew(BrokenVolume):
    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self.memory_volume.setxattr(inode, name, value, 0)


BROKEN_VOLUMES: Sequence[type[BrokenVolume]] = [
    WritesPastHolesWithJunk,
    KeepsSetuidWhateverIsWritten,
    RenamesOverWhatItMustNotReplace,
    SaysEpermForWhatIsMissing,
    ListsWithoutTheDots,
    CountsItsCookiesFromWhereItWasAsked,
    ListsNewNamesLast,
    ForgetsThatItForgets,
    ShrinksNothing,
    HasNoQuota,
    TakesNamesOfAnyLength,
    ReplacesXattrsThatMustBeNew,
]
