"""Copy what the daemon streams to standard output, with bounded memory.

The daemon drops a client that does not read for half a minute.  So everything is read at once, and kept in a temporary
file until standard output (`less`, for example) accepts it.
"""

from __future__ import annotations

import codecs
import select
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec

from vfsd.cli.common import output
from vfsd.cli.common.app import App
from vfsd.client.requests import RemoteCall
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.snapshots import DiffResult
from vfsd.wire.messages import LineBuffer

_MEMORY_BYTES: Final = 1024 * 1024  # a larger temporary file is on disk
_STEP_BYTES: Final = 4096  # PIPE_BUF: a writable pipe accepts as much without blocking
_COPY_BYTES: Final = 1024 * 1024
_OF_PATCHES: Final = ("omitted", "patch_bytes", "git_only")  # fields of a DiffResult that only a patch has
_records = msgspec.json.Decoder(ChangeRecord)


class PatientOutput:
    """Buffered standard output, written as fast as it is read.  The end of a `with` block waits until all is
    written."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 closed in __exit__
        self._written = self._end = 0
        self._poll = _output_poll()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if kind is None or not issubclass(kind, BrokenPipeError):
                self._pass_on(lambda: True)

    def write(self, data: bytes) -> None:
        """Append `data`, and write as much of the buffer as standard output accepts now."""
        self._file.seek(self._end)
        self._file.write(data)
        self._end += len(data)
        self._pass_on(self._is_ready)
        if self._written == self._end:
            self._file.seek(0)
            self._file.truncate()
            self._written = self._end = 0

    def _pass_on(self, is_ready: Callable[[], bool]) -> None:
        while self._written < self._end and is_ready():
            self._file.seek(self._written)
            piece = self._file.read(_STEP_BYTES)
            self._written += len(piece)
            output.write_bytes(piece)

    def _is_ready(self) -> bool:
        # A pipe without a reader is ready, too: writing to it raises BrokenPipeError.
        return self._poll is None or bool(self._poll.poll(0))


def _output_poll() -> select.poll | None:
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file, in a test
        return None
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return poll


class ChangeSpool:
    """The changes that the daemon streamed, in the temporary `file`.  Can be iterated several times."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __iter__(self) -> Iterator[ChangeRecord]:
        self._file.seek(0)
        return map(_records.decode, self._file)

    def pieces(self) -> Iterator[bytes]:
        """Iterate over the stream in pieces."""
        self._file.seek(0)
        while piece := self._file.read(_COPY_BYTES):
            yield piece


def write_changes(app: App, request: RemoteCall[Any], line: Callable[[ChangeRecord], str]) -> Any:
    """Send `request` (a diff), print the `line` of each change as it arrives, and return the answer."""
    lines = LineBuffer()
    encoding = sys.stdout.encoding
    if codecs.lookup(encoding).name == "ascii":
        encoding = "utf-8"  # as click.echo does
    with PatientOutput() as out:

        def take(data: bytes) -> None:
            lines.feed(data)
            texts = []
            while (each := lines.next_line()) is not None:
                texts.append(line(_records.decode(each)) + "\n")
            out.write("".join(texts).encode(encoding, sys.stdout.errors or "strict"))

        return app.call(request, on_output=take)


def call_with_changes(app: App, request: RemoteCall[Any], label: str, show: Callable[[Any, ChangeSpool], None]) -> Any:
    """Send `request`, print the answer and its changes with `show` or as JSON, and return the answer."""
    with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as file:
        request.params.stream = True
        answer = app.call(request, label=label, on_output=file.write)
        with app.writing():
            (_print_with_changes if app.json else show)(answer, ChangeSpool(file))
        return answer


def _print_with_changes(answer: Any, spool: ChangeSpool) -> None:
    """Print `answer` as JSON, with the streamed changes as its `changes`."""
    fields = msgspec.json.decode(msgspec.json.encode(answer), type=dict[str, msgspec.Raw])
    if isinstance(answer, DiffResult):
        for name in _OF_PATCHES:
            del fields[name]
    if output.on_terminal():
        # On a terminal the output is small enough for memory.
        output.print_json({**fields, "changes": list(spool)})
        return
    first = True
    for name, value in fields.items():
        output.write_bytes((b"{" if first else b",") + msgspec.json.encode(name) + b":")
        first = False
        if name == "changes":
            _write_array(spool)
        else:
            output.write_bytes(bytes(value))
    output.write_bytes(b"}\n")


def _write_array(spool: ChangeSpool) -> None:
    """Write lines of JSON as an array.  JSON values contain no newline, so each newline ends a value."""
    output.write_bytes(b"[")
    held = b""
    for piece in spool.pieces():
        output.write_bytes(held)
        held = piece.replace(b"\n", b",")
    output.write_bytes(held.removesuffix(b",") + b"]")
