"""RemoteFilesystem: a `Filesystem` wherever an executor runs commands and a Python 3.8 is installed.

The program of `protocol.portable` is copied once, into a temporary directory of the other end; each call runs it with
one request on its standard input, so each call is one command: some 100 ms more than the executor takes for one.  A
call changes all it has to change in that one command, except for an upload in pieces, which ends with such a command.
If the executor fails while it runs a command, the effect of the call is unknown.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import errno
import hashlib
import json
import secrets
import tempfile
from collections.abc import Sequence
from typing import IO, Any, Final, Self, get_args

from protocol.execution.executor import ExecResult, Executor
from protocol.paths import DEFAULT_LIMITS, ROOT, CallLimitError, check_bytes, encoded, normalise
from protocol.portable.package import build_program
from protocol.search.expression import Expression
from protocol.streams import (
    ByteReader,
    ByteWriter,
    Data,
    FileReader,
    FileTextReader,
    FileWriter,
    TextReader,
    check_encoding,
)
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

__all__ = ["RemoteFilesystem"]

_INPUT_BYTES: Final = 480 * 1024  # on standard input of one command; `WorkspaceExecutor` takes 512 KiB with its words
_REQUEST_BYTES: Final = 64 * 1024  # of a request, besides its content
_AHEAD_BYTES: Final = 256 * 1024  # that a stream reads ahead
_PAGE_BYTES: Final = 4 << 20  # of a download
_OUTPUT_BYTES: Final = 16 << 20  # the most that executors of this project take
_INSTALL: Final = """\
import io, os, sys, tempfile, zipfile
if sys.version_info < (3, 8):
    sys.exit("Python 3.8 or newer is needed, and this is %d.%d" % sys.version_info[:2])
directory = tempfile.mkdtemp(prefix="vfsd-fs-")
zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read())).extractall(os.path.join(directory, "program"))
print(directory)
"""
_REMOVE: Final = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"


class RemoteFilesystem:
    """Implements `protocol.filesystem.Filesystem` over an executor; a context manager that removes the program.

    `root` is the directory, relative to the executor's own; `python` the Python 3.8 or later to run there.
    `input_bytes` is the most that one command gets on its standard input.  Paths of absolute symlinks are those of the
    other end.  `grep` takes the expressions that RE2 and Python's `re` share (see
    `protocol.portable.expression`).

    A stream for reading fetches the file piece by piece, by its path: a file that is replaced meanwhile is read as a
    mixture, and one that is deleted raises FileNotFoundError.  A stream for writing collects the content on this
    machine, and uploads it when it is closed.

    OSError if the program cannot be copied or run, and what the executor raises.
    """

    def __init__(
        self,
        executor: Executor,
        root: str = ROOT,
        *,
        python: str = "python3",
        read_only: bool = False,
        input_bytes: int = _INPUT_BYTES,
    ) -> None:
        self._executor = executor
        self._directory = normalise(root)
        self._python = python
        self._read_only = read_only
        self._piece_bytes = max(1, input_bytes * 3 // 4 - _REQUEST_BYTES)  # base64
        self._program = ""
        self._root = "."
        try:
            self._root, self._read_only = self._call("hello")
        except BaseException:
            with contextlib.suppress(OSError):
                self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the program from the other end.  A later call copies it again."""
        program, self._program = self._program, ""
        if program:
            self._run("-c", _REMOVE, program)

    # -- running the program -----------------------------------------------------------------
    def _run(self, *words: str, stdin: bytes = b"", cwd: str = ".") -> ExecResult:
        command = [self._python, "-I", "-S", *words]
        return self._executor.run(command, cwd=cwd, stdin=stdin, output_limit_bytes=_OUTPUT_BYTES)

    def _install(self) -> None:
        done = self._run("-c", _INSTALL, stdin=build_program())
        self._program = _last_line(done).decode("utf-8", "surrogateescape")
        if done.exit_status or not self._program:
            raise _failed("the program cannot be copied", done)

    def _call(self, method: str, **arguments: Any) -> Any:
        """Run the program for one request.  Its error; _TooLongError for an answer over _OUTPUT_BYTES."""
        request = {"root": self._root, "read_only": self._read_only, "method": method, "arguments": arguments}
        for is_last in (False, True):
            if not self._program:
                self._install()
            stdin = json.dumps(request).encode()
            done = self._run(f"{self._program}/program", "call", stdin=stdin, cwd=self._directory)
            # Something may clean the temporary directory up. Then Python has not run the program.
            if done.exit_status and not done.stdout and self._program.encode() in done.stderr and not is_last:
                self._program = ""
                continue
            break
        if done.truncated and not done.exit_status:
            raise _TooLongError
        try:
            answer = json.loads(_last_line(done))
        except ValueError:
            raise _failed("the program does not answer", done) from None
        if "error" in answer:
            raise _error(**answer["error"])
        return answer["data"]

    # -- the contract ----------------------------------------------------------------------------
    @property
    def root(self) -> str:
        """See `protocol.filesystem.Filesystem`."""
        return self._root

    @property
    def read_only(self) -> bool:
        return self._read_only

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        path = normalise(path)
        try:
            return ReadResult(**self._call("read", path=path, offset=offset, limit=limit, encoding=encoding))
        except _TooLongError:
            most = _OUTPUT_BYTES // 2
            raise CallLimitError(
                f"a read is limited to about {most} bytes: use open_text, or pages of {path!r}"
            ) from None

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        path = normalise(path)
        page = self._page(path, offset, _PAGE_BYTES if limit is None else min(limit, _PAGE_BYTES))
        wanted = max(0, page.size_bytes - offset)
        if limit is not None:
            wanted = min(wanted, limit)
        if wanted > DEFAULT_LIMITS.read_bytes:
            most = DEFAULT_LIMITS.read_bytes
            raise CallLimitError(f"a read is limited to {most} bytes: use open_read, or pages of {path!r}")
        pieces = [page.content]
        done = len(page.content)
        while pieces[-1] and done < wanted:
            pieces.append(self._page(path, offset + done, min(wanted - done, _PAGE_BYTES)).content)
            done += len(pieces[-1])
        start = page.offset
        return ReadBytesResult(b"".join(pieces), path, page.size_bytes, start, done, start + done < page.size_bytes)

    def _page(self, path: str, offset: int, limit: int) -> ReadBytesResult:
        found = self._call("read_bytes", path=path, offset=offset, limit=limit)
        return ReadBytesResult(**{**found, "content": base64.b64decode(found["content"])})

    def exists(self, path: str) -> bool:
        return bool(self._call("exists", path=normalise(path)))

    def is_file(self, path: str) -> bool:
        return bool(self._call("is_file", path=normalise(path)))

    def is_dir(self, path: str) -> bool:
        return bool(self._call("is_dir", path=normalise(path)))

    def stat(self, path: str) -> FileStat:
        found = self._call("stat", path=normalise(path))
        for name in ("created_at", "modified_at"):
            found[name] = None if found[name] is None else utc_time(found[name] * 1000)
        return FileStat(**found)

    def list(self, path: str = ROOT) -> Sequence[FileEntry]:
        return [FileEntry(**each) for each in self._call("list", path=normalise(path))]

    def glob(self, pattern: str, *, path: str = ROOT) -> Sequence[GlobMatch]:
        return [GlobMatch(**each) for each in self._call("glob", pattern=pattern, path=normalise(path))]

    def grep(
        self, pattern: str, *, path: str = ROOT, glob: str | None = None, max_matches: int | None = None
    ) -> Sequence[GrepMatch]:
        Expression(pattern)  # refuses what RE2 refuses, with its message
        settings = {"path": normalise(path), "glob": glob, "max_matches": max_matches}
        return [GrepMatch(**each) for each in self._call("grep", pattern=pattern, **settings)]

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        return self.write_bytes(path, encoded(content), mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        path = normalise(path)
        check_bytes(content)
        most = DEFAULT_LIMITS.write_bytes
        if len(content) > most:
            raise CallLimitError(f"a write is limited to {most} bytes, not {len(content)}: use open_write")
        if len(content) > self._piece_bytes:
            with self.open_write(path, mode=mode, create_parents=create_parents) as writer:
                writer.write(content)
            return WriteResult(path, len(content), mode)
        encoded = base64.b64encode(content).decode()
        settings = {"path": path, "mode": mode, "create_parents": create_parents}
        return WriteResult(**self._call("write_bytes", content=encoded, **settings))

    def replace_bytes(self, path: str, old: bytes, new: bytes) -> WriteResult | None:
        """See `protocol.filesystem.ComparingFilesystem`.  The other end compares, by a digest."""
        content = _Collected()
        with contextlib.closing(content):
            content.write(0, new)
            settings = {"path": normalise(path), "digest": hashlib.sha256(old).hexdigest()}
            found = self._put(content, settings, method="replace_bytes")
        return None if found is None else WriteResult(**found)

    def delete(self, path: str, *, recursive: bool = False) -> int:
        return int(self._call("delete", path=normalise(path), recursive=recursive))

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        self._call("mkdir", path=normalise(path), parents=parents, exist_ok=exist_ok)

    # -- streams -----------------------------------------------------------------------------
    def open_read(self, path: str) -> ByteReader:
        path = normalise(path)
        return FileReader(path, _Download(self, path, self._page(path, 0, _AHEAD_BYTES)))

    def open_write(self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True) -> ByteWriter:
        if mode not in get_args(WriteMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(WriteMode))}, not {mode!r}")
        path = normalise(path)
        settings = {"path": path, "mode": mode, "create_parents": create_parents}
        self._call("check_write", **settings)
        content = _Collected()
        return FileWriter(path, content, commit=lambda: self._put(content, settings))

    def _put(self, content: _Collected, settings: dict[str, Any], method: str = "put") -> Any:
        """Upload `content`, and call `method` with it."""
        name = secrets.token_hex(16)
        try:
            for offset in range(0, content.size() or 1, self._piece_bytes):
                piece = content.read(offset, self._piece_bytes)
                self._call("upload", name=name, content=base64.b64encode(piece).decode())
            return self._call(method, name=name, **settings)
        except OSError:
            self._call("drop", name=name)
            raise

    def open_text(self, path: str, *, encoding: str = "utf-8") -> TextReader:
        check_encoding(encoding)
        return FileTextReader(self.open_read(path), encoding)


class _Download:
    """Implements `protocol.streams.SeekableContent` by pages of a file at the other end."""

    def __init__(self, filesystem: RemoteFilesystem, path: str, first: ReadBytesResult) -> None:
        self._filesystem = filesystem
        self._path = path
        self._page = first

    def size(self) -> int:
        return self._page.size_bytes

    def read(self, offset: int, size: int) -> bytes:
        pieces = []
        while size > 0:
            at = offset - self._page.offset
            if not 0 <= at < len(self._page.content):
                if self._page.offset <= offset and not self._page.truncated:
                    break  # after the end
                self._page = self._filesystem._page(self._path, offset, min(max(size, _AHEAD_BYTES), _PAGE_BYTES))  # noqa: SLF001
                at = offset - self._page.offset
            piece = self._page.content[at : at + size]
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            size -= len(piece)
        return b"".join(pieces)

    def write(self, offset: int, data: Data) -> int:  # noqa: ARG002
        raise OSError(errno.EBADF, "opened for reading")

    def close(self) -> None:
        """Nothing is open."""


class _Collected:
    """Implements `protocol.streams.SeekableContent` by a temporary file of this machine."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="vfsd-upload-")  # noqa: SIM115 (closed by `close`)

    def size(self) -> int:
        return self._file.seek(0, 2)

    def read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def write(self, offset: int, data: Data) -> int:
        self._file.seek(offset)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()


class _TooLongError(Exception):
    """The answer of the program exceeds _OUTPUT_BYTES."""


def _last_line(done: ExecResult) -> bytes:
    """The reply: what a shell of the other end prints at its start comes before it."""
    return done.stdout.rstrip().rpartition(b"\n")[2]


def _failed(what: str, done: ExecResult) -> OSError:
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").split("\n")]
    last = next((line for line in reversed(lines) if line), "it printed nothing")
    ended = "it took too long" if done.timed_out else f"exit status {done.exit_status}"
    return OSError(errno.EIO, f"{what}: {last} ({ended})")


def _error(kind: str, message: str, errno: int | None = None, path: str | None = None) -> Exception:
    if kind == "CallLimitError":
        return CallLimitError(message)
    found = getattr(builtins, kind, OSError)
    if not (isinstance(found, type) and issubclass(found, OSError)):
        return ValueError(message)
    return found(errno, message, path) if path is not None else found(errno, message)
