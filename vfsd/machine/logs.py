"""The logs of daemons: structured records, and the files in the runtime directory.

A record is the message, and the fields operation, errno and path.  Uses the standard `logging`: callers pass fields as
`extra`, and libraries (pyfuse3, trio) share the handler.  Formats: "text" for people, "json" with one object per line,
"journal" for text with sd-daemon's priority prefixes.

Safety: file names come from agents and archives.  Whatever they contain, a record is one line without control
characters, and each further line of a traceback starts with a mark.

Source: sd-daemon(3) for the prefixes and their levels.
"""

from __future__ import annotations

import contextlib
import errno as errnos
import fcntl
import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

import msgspec

from protocol.errors import errno_of
from protocol.linux.regular_file import open_regular
from vfsd.machine.runtime import ensure_socket_dir, read_records

LogFormat = Literal["text", "json", "journal"]

_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
# They log every request below "warning", so their records are shown at level "debug" only.
_LIBRARIES: Final = ("pyfuse3", "trio")
_TRACEBACK_MARK: Final = "  | "
KEPT_DAYS: Final = 7
_SUFFIXES: Final = (".log", ".log.1")  # of the last daemon with the name, and of the one before it
_DAY_S: Final = 24 * 60 * 60

_logger = logging.getLogger(__name__)


def configure(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send all logs of the process to `stream`, standard error by default.  Replaces an earlier configuration."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter(journal=log_format == "journal"))
    number = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))


def log_failure(
    logger: logging.Logger,
    operation: str,
    error: BaseException,
    *,
    path: str | bytes | None = None,
    level: int = logging.ERROR,
) -> None:
    """Log that `operation` failed with `error`, with a traceback if the error has no errno and is thus unexpected."""
    code = errno_of(error)
    named = path if path is not None else getattr(error, "filename", None)
    fields = {"operation": operation, "errno": errno_name(code or errnos.EIO)}
    if isinstance(named, str | bytes):
        fields["path"] = os.fsdecode(named)
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    logger.log(level, "%s failed: %s", operation, reason, extra=fields, exc_info=error if code is None else None)


def errno_name(code: int) -> str:
    """Return the name of an errno, such as "ENOENT" for 2, or the number if it has no name."""
    return errnos.errorcode.get(code, str(code))


def escape(text: str) -> str:
    r"""Escape the control characters of `text`, so that it is one line: a newline becomes a backslash and an n."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape_character(char) for char in text)


def _escape_character(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # os.fsdecode's representation of a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, str]:
    """Return the fields of the record in output order."""
    values = ((name, getattr(record, name, None)) for name in ("operation", "errno", "path"))
    return {
        name: errno_name(value) if name == "errno" and isinstance(value, int) else _as_text(value)
        for name, value in values
        if value is not None
    }


def _as_text(value: object) -> str:
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)


class _JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; bytes that are not UTF-8 become `\\xNN`."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode({key: _encodable(value) for key, value in content.items()}).decode()


def _encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return "".join(_escape_character(char) if 0xD800 <= ord(char) <= 0xDFFF else char for char in text)


class _TextFormatter(logging.Formatter):
    """Formats `time level logger: message [field=value ...]`; for the journal, `<priority>` replaces time and level."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in _fields(record).items())
        message = escape(record.getMessage()) + (f" [{fields}]" if fields else "")
        lines = [f"{record.name}: {message}"]
        if record.exc_info:
            traceback = self.formatException(record.exc_info).split("\n")
            lines += [_TRACEBACK_MARK + escape(line) for line in traceback]
        if self._journal:
            priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
            return "\n".join(f"<{priority}>{line}" for line in lines)
        lines[0] = f"{_timestamp(record)} {record.levelname.lower():<7} {lines[0]}"
        return "\n".join(lines)


def _quoted(value: str) -> str:
    """Return `value` as one word, quoted if it would be ambiguous in a list of `name=value` pairs."""
    escaped = escape(value)
    if escaped and not any(char in ' "]=' for char in escaped):
        return escaped
    return '"' + escaped.replace('"', '\\"') + '"'


# -- the log of a daemon, in the runtime directory ----------------------------------------------------
def log_path(name: str) -> str:
    """Return the path of the log of workspace `name`.  The previous log has the suffix ".1"."""
    return os.path.join(ensure_socket_dir(), name + ".log")


def open_log(path: str) -> tuple[int, bool]:
    """Open an empty log; return its descriptor and whether it is locked.  The previous log is kept as ".1".

    The daemon inherits the lock for its life, so a second start of the same name, which the daemon will refuse, does
    not move the log of a running workspace away.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptor = open_regular(path, flags)
    if not _lock(descriptor):
        return descriptor, False
    if os.fstat(descriptor).st_nlink == 0:  # `remove_old_logs` removed it before it was locked
        os.close(descriptor)
        return open_log(path)
    if os.fstat(descriptor).st_size == 0:
        return descriptor, True
    os.replace(path, path + ".1")
    os.close(descriptor)
    descriptor = open_regular(path, flags)
    return descriptor, _lock(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_old_logs(directory: str) -> None:
    """Remove the logs in `directory` that were last written more than KEPT_DAYS ago.

    Keeps the logs of running workspaces, which may have written nothing for a long time.  Raises no OSError: the logs
    must not keep a workspace from starting.
    """
    oldest = time.time() - KEPT_DAYS * _DAY_S
    try:
        with os.scandir(directory) as entries:
            old = [entry for entry in entries if entry.name.endswith(_SUFFIXES) and _written(entry) < oldest]
        running = {record.name for record in read_records() if record.alive} if old else set()
        for entry in old:
            if entry.name.rpartition(".log")[0] not in running:
                with contextlib.suppress(OSError):  # removed or replaced meanwhile
                    _remove(entry.path, oldest)
    except OSError as error:
        _logger.warning("cannot remove old logs: %s", error)


def _written(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return float("inf")


def _remove(path: str, oldest: float) -> None:
    """Remove a log, unless a daemon has it locked or has written to it meanwhile."""
    descriptor = open_regular(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if found.st_mtime < oldest and os.path.samestat(found, os.lstat(path)):
            os.unlink(path)
    finally:
        os.close(descriptor)
