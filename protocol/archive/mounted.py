"""MountedArchive: an archive whose entries are read when they are needed.

To open it, only the central directory and the manifest are read and checked.  Local headers, symlinks and content are
checked when they are first read.  Names of one file must have the same size and CRC.

The file is read with pread(2): a process that was forked shares the descriptor, and its offset.

Threading: one thread at a time.
"""

from __future__ import annotations

import errno
import functools
import io
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, BinaryIO, Final, NamedTuple, cast

from msgspec.structs import replace

from protocol.archive.content import RandomAccess
from protocol.archive.manifest import ArchiveLimits
from protocol.archive.members import Member, data_start
from protocol.archive.read import Contents, read_outline
from protocol.errors import ArchiveError, os_error, shown
from protocol.linux.regular_file import open_regular
from protocol.tree import CHUNK_BYTES, TYPE_MASK, Chunk, LowerTree, TreeEntry, sparse

_BUFFER_BYTES: Final = 128 * 1024
_ENTRY_BYTES: Final = 320  # memory of an entry, without its path
_CACHE_BYTES: Final = 32 << 20
_NO_MEMBER: Final = (1 << 64) - 1
_NO_XATTRS: Final[Mapping[bytes, bytes]] = {}


class _Rare(NamedTuple):
    """Attributes that few entries have."""

    nlink: int
    inode: int
    rdev: int
    xattrs: Mapping[bytes, bytes]


class _PositionedFile(io.RawIOBase):
    """A descriptor that is read with pread(2).  The position belongs to this object."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            offset += os.fstat(self.descriptor).st_size
        elif whence == os.SEEK_CUR:
            offset += self._at
        self._at = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self.descriptor, [buffer], self._at)
        self._at += count
        return count


class MountedArchive(LowerTree):
    """The archive at `path`.

    ArchiveError if the archive is refused; OSError.  `reserve` is called with each number of bytes that reading the
    index takes for a moment, before it takes them, and may raise.  `cache_bytes` bounds the caches of content.
    """

    def __init__(
        self,
        path: str,
        *,
        reserve: Callable[[int], None] = lambda _: None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self._path = path
        self._file = _PositionedFile(open_regular(path, os.O_RDONLY | os.O_NONBLOCK))
        try:
            seen = os.fstat(self._file.descriptor)
            self._version = seen.st_size, seen.st_mtime_ns
            buffered = io.BufferedReader(self._file, _BUFFER_BYTES)
            contents, self._headers = read_outline(buffered, ArchiveLimits(), reserve)
            buffered.detach()
            self._index(contents)
        except ArchiveError as error:
            self.close()
            raise ArchiveError(str(error.strerror), error.entry or path) from None
        except BaseException:
            self.close()
            raise
        buffered = io.BufferedReader(self._file, _BUFFER_BYTES)
        self._content = RandomAccess(buffered, self._another, cache_bytes)
        self.memory_bytes = cache_bytes + sum(_ENTRY_BYTES + len(path) for path in self._paths)
        self.total_bytes = contents.manifest.total_bytes
        self.file_count = contents.manifest.file_count
        self.created_at = contents.manifest.created_at

    def _index(self, contents: Contents) -> None:
        """Copy the entries into arrays, which take a quarter of the memory."""
        self._paths = sorted(contents.entries)
        self._numbers = {path: number for number, path in enumerate(self._paths)}
        entries = [contents.entries[path] for path in self._paths]
        members = [contents.members.get(path) for path in self._paths]
        self._modes = array("H", [entry.mode for entry in entries])
        self._mtimes: list[int] | array[int] = [entry.mtime_ns for entry in entries]
        try:
            self._mtimes = array("q", self._mtimes)
        except OverflowError:  # before 1677 or after 2262
            pass
        self._sizes = array("Q", [entry.size for entry in entries])
        self._uids = array("I", [entry.uid for entry in entries])
        self._gids = array("I", [entry.gid for entry in entries])
        self._rare = {
            number: _Rare(entry.nlink, entry.inode, entry.rdev, entry.xattrs)
            for number, entry in enumerate(entries)
            if entry.nlink > 1 or entry.rdev or entry.xattrs
        }
        self._header = array("Q", [_NO_MEMBER if member is None else member.header for member in members])
        self._compressed = array("Q", [0 if member is None else member.compressed for member in members])
        self._crcs = array("I", [0 if member is None else member.crc for member in members])
        self._flags = array("H", [0 if member is None else member.flags for member in members])
        self._methods = array("B", [0 if member is None else member.method for member in members])
        self._names = {  # of the few members whose name cannot be told from the path
            number: member.name
            for number, member in enumerate(members)
            if member is not None and not entries[number].is_dir and member.name != _member_name(self._paths[number])
        }
        self._children: dict[bytes, array[int]] = {entry.path: array("I") for entry in entries if entry.is_dir}
        for number, path in enumerate(self._paths):
            if path:
                self._children[path.rpartition(b"/")[0]].append(number)

    @property
    def fingerprint(self) -> str:
        """A hash of all entries, with the CRC of each content."""
        hashed = blake2b(b"\0".join(self._paths), digest_size=16)
        for column in (self._modes, self._sizes, self._uids, self._gids, self._crcs):
            hashed.update(column.tobytes())
        hashed.update(repr((list(self._mtimes), sorted(self._rare.items()))).encode())
        return f"archive {hashed.hexdigest()}"

    # -- protocol.tree.LowerTree ---------------------------------------------------------------------------------
    def entry(self, path: bytes) -> TreeEntry:
        number = self._number(path)
        entry = self._entry(number)
        if not entry.is_symlink:
            return entry
        target = self._content.read(self._member(number), 0, entry.size, self._locate)
        if b"\0" in target:
            raise ArchiveError("the symlink's target has a NUL byte", shown(path))
        return replace(entry, size=len(target), target=target)

    def _entry(self, number: int) -> TreeEntry:
        rare = self._rare.get(number) or _Rare(1, 0, 0, _NO_XATTRS)
        return TreeEntry(
            self._paths[number], self._modes[number], self._sizes[number], self._mtimes[number], self._uids[number],
            self._gids[number], rare.nlink, rare.inode, rare.rdev, b"", rare.xattrs,
        )  # fmt: skip

    def entries(self, path: bytes) -> list[TreeEntry]:
        numbers = self._children.get(path)
        if numbers is None:
            self._number(path)
            raise os_error(errno.ENOTDIR, shown(path))
        return [self._entry(number) for number in numbers]

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        number = self._number(path)
        if self._modes[number] & TYPE_MASK != 0o100000:
            raise os_error(errno.EINVAL, shown(path))
        return self._content.read(self._member(number), offset, size, self._locate)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        at = 0
        while piece := self.read(path, at, size):
            yield from sparse(piece)
            at += len(piece)

    def preparation(self, path: bytes) -> Callable[[], object] | None:
        number = self._number(path)
        member = self._member(number)
        if self._content.is_ready(member):
            return None
        return functools.partial(self._content.prepare, member, self._locate)

    def stop(self) -> None:
        self._content.stop()

    def _another(self) -> BinaryIO:
        return cast("BinaryIO", _PositionedFile(self._file.descriptor))

    def _number(self, path: bytes) -> int:
        number = self._numbers.get(path)
        if number is not None:
            return number
        above = path.rpartition(b"/")[0]
        while above not in self._numbers:
            above = above.rpartition(b"/")[0]
        raise os_error(errno.ENOENT if above in self._children else errno.ENOTDIR, shown(path))

    def _member(self, number: int) -> Member:
        """The member with the content of an entry."""
        name = self._names.get(number) or _member_name(self._paths[number])
        header = self._header[number]
        return Member(
            name, self._flags[number], self._methods[number], self._crcs[number], self._compressed[number],
            self._sizes[number], 0, 0, header, 0,
        )  # fmt: skip

    def _locate(self, member: Member) -> None:
        """Find the data of a member, and check its local header."""
        end = self._headers[bisect_right(self._headers, member.header)]
        member.data = data_start(io.BufferedReader(_PositionedFile(self._file.descriptor)), member, end)

    # -- the file ----------------------------------------------------------------------------------
    def problem(self) -> str | None:
        """Describe what happened to the file since it was opened; None if it is unchanged."""
        seen = os.fstat(self._file.descriptor)
        if not seen.st_nlink:
            return "was removed or replaced; the workspace shows the old archive until it is unmounted"
        if (seen.st_size, seen.st_mtime_ns) != self._version:
            return "was overwritten; what differs from the archive that was mounted cannot be read"
        return None

    def close(self) -> None:
        """Close the file."""
        if self._file.descriptor >= 0:
            os.close(self._file.descriptor)
            self._file.descriptor = -1


def _member_name(path: bytes) -> bytes:
    return b"files/" + path
