"""The commands of `vfsd fs`, with its answers: list, read, search and change files, and run a program (`exec`).

`Place` is the root of the program's paths.  The program prints one JSON object, with the two forms of a path, or an
error.  A path that is not UTF-8 is printed with `"escaped": true`: a backslash as `\\\\`, a byte as `\\xNN`.
"""

from __future__ import annotations

import base64
import codecs
import errno
import json
import os
import re
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from protocol.adapters.host_files import HostFiles
from protocol.adapters.path_files import PathFilesTree, search_start
from protocol.adapters.plain_filesystem import PlainPathFilesystem
from protocol.errors import os_error, shortened
from protocol.execution import supervisor
from protocol.paths import DEFAULT_LIMITS, CallLimitError, decode, encode, located, normalise
from protocol.search.grep import grep_tree
from protocol.search.walk import SKIP_NOTHING, USUAL_SKIPS, UnreadablePaths, glob_paths
from protocol.tools.edits import edit_file, parsed_edit
from protocol.types import DEFAULT_READ_LINES, FileStat

_LINE_CHARACTERS = 1_000
_INPUT_BYTES = 512 * 1024
MOST_OUTPUT_BYTES = 16 << 20


def _entry(place: Place, path: str, found: FileStat) -> dict[str, Any]:
    kind = "file" if found.is_file else "directory" if found.is_directory else "other"
    shown = {"type": kind, "size_bytes": found.size_bytes, "mode": f"{stat.S_IMODE(found.mode):04o}"}
    if found.modified_at is not None:
        shown["modified_at"] = found.modified_at.isoformat()
    return {**place.shown(path), **shown, **({"is_symlink": True} if found.is_symlink else {})}


def _symlink(place: Place, path: str, size_bytes: int = 0, mode: int = 0) -> dict[str, Any]:
    shown = {"type": "symlink", "size_bytes": size_bytes, "mode": f"{mode:04o}", "is_symlink": True}
    return {**place.shown(path), **shown}


def list_directory(place: Place, path: str, limit: int) -> Any:
    """List a directory."""
    inside = place.path(path)
    listed = place.files.list(inside)
    entries = []
    for one in listed[:limit]:
        try:
            entries.append(_entry(place, one.path, place.files.stat(one.path)))
        except OSError:  # a symlink that leads nowhere or out of the directory, or an entry removed meanwhile
            other = {**place.shown(one.path), "type": "other", "size_bytes": 0, "mode": "0000"}
            entries.append(_symlink(place, one.path) if one.is_symlink else other)
    return {**place.shown(inside), "entries": entries, "truncated": len(listed) > limit}


def stat_path(place: Place, path: str) -> Any:
    """Describe one path, without following a symlink that leads nowhere."""
    inside = place.path(path)
    try:
        return _entry(place, inside, place.files.stat(inside))
    except FileNotFoundError:
        entry = place.tree().entry(encode(normalise(inside)))  # a dangling symlink exists
        if not entry.is_symlink:
            raise
        return _symlink(place, inside, entry.size, stat.S_IMODE(entry.mode))


def read_file(place: Place, path: str, offset: int, limit: int | None, as_bytes: bool) -> Any:
    """Read lines of a text, or bytes."""
    try:
        return _read_page(place, place.path(path), offset, limit, as_bytes)
    except CallLimitError:
        most = f"a read is limited to {DEFAULT_LIMITS.read_bytes} bytes"
        raise ValueError(f"{most}: use `--bytes --offset N --limit N`, or read the file in the mount") from None


def _read_page(place: Place, path: str, offset: int, limit: int | None, as_bytes: bool) -> Any:
    if not as_bytes:
        try:
            text = place.files.read(path, offset=offset, limit=DEFAULT_READ_LINES if limit is None else limit)
        except ValueError as error:
            if not isinstance(error.__cause__, UnicodeDecodeError):
                raise
            if offset or limit is not None:
                raise ValueError(f"{path} is not text, so it has no lines: read it as bytes") from None
        else:
            shown = {"content": text.content, "encoding": "utf-8", "offset": text.offset, "limit": text.limit}
            return {**place.shown(path), **shown, "total_lines": text.total_lines, "truncated": text.truncated}
    page = place.files.read_bytes(path, offset=offset, limit=limit)
    shown = {"content": base64_text(page.content), "encoding": "base64", "offset": page.offset, "limit": page.limit}
    return {**place.shown(path), **shown, "size_bytes": page.size_bytes, "truncated": page.truncated}


def _unreadable(place: Place, found: UnreadablePaths, name: Callable[[bytes], str]) -> dict[str, Any]:
    named = [{**place.shown(name(each.path)), "reason": each.reason} for each in found.named]
    return {"unreadable": named, "unreadable_count": found.count}


def find_files(place: Place, pattern: str, path: str, limit: int, everything: bool) -> Any:
    """Find files by name."""
    start, name = search_start(place.store, place.path(path))
    skip = SKIP_NOTHING if everything else USUAL_SKIPS
    found = glob_paths(place.tree(), pattern, path=start, limit=limit, skip=skip)
    files = [place.shown(name(each)) for each in found.paths]
    return {"files": files, "truncated": found.truncated, **_unreadable(place, found.unreadable, name)}


def find_lines(
    place: Place, pattern: str, path: str, glob: str | None, ignore_case: bool, limit: int, everything: bool
) -> Any:
    """Find lines by a regular expression."""
    start, name = search_start(place.store, place.path(path))
    found = grep_tree(
        place.tree(),
        pattern,
        path=start,
        glob=glob,
        max_matches=limit,
        max_line_characters=_LINE_CHARACTERS,
        skip=SKIP_NOTHING if everything else USUAL_SKIPS,
        ignore_case=ignore_case,
    )
    matches = [
        {
            **place.shown(name(encode(match.path))),
            "line_number": match.line_number,
            "line": match.line_content,
            "match_start": match.match_start,
            "match_end": match.match_end,
        }
        for match in found.matches
    ]
    return {"matches": matches, "truncated": found.truncated, **_unreadable(place, found.unreadable, name)}


def write_file(place: Place, path: str, mode: Any, no_parents: bool) -> Any:
    """Write standard input to a file."""
    inside = place.path(path)
    limit = DEFAULT_LIMITS.write_bytes
    content = sys.stdin.buffer.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"a write is limited to {limit} bytes: write the rest with --mode append, or in the mount")
    done = place.files.write_bytes(inside, content, mode=mode, create_parents=not no_parents)
    return {**place.shown(done.path), "bytes_written": done.bytes_written, "mode": done.mode}


def edit_text(place: Place, path: str, *, first: bool = False) -> Any:
    """Replace text in a file, as standard input says; see `edit_file` for `first`."""
    done = edit_file(place.files, place.path(path), **parsed_edit(sys.stdin.buffer.read()), first=first)
    return {**place.shown(done.path), "replacements": done.replacements, "bytes_written": done.bytes_written}


def remove(place: Place, path: str, recursive: bool) -> Any:
    """Delete a file, a symlink or a directory."""
    inside = place.path(path)
    try:
        return {**place.shown(inside), "deleted": place.files.delete(inside, recursive=recursive)}
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or recursive:
            raise
        raise OSError(errno.ENOTEMPTY, f"{described(error)}; `-r` deletes it with its content") from None


# The functions that the supervisor uses and Python 3.8 lacks.
_SUPERVISOR = """
import ctypes, os
if not hasattr(os, "pidfd_open"):
    def pidfd_open(pid):
        descriptor = ctypes.CDLL(None, use_errno=True).syscall(434, pid, 0)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return descriptor
    os.pidfd_open = pidfd_open
if not hasattr(os, "waitstatus_to_exitcode"):
    os.waitstatus_to_exitcode = lambda status: (
        -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    )
exec(compile({source!r}, "supervisor", "exec"))
"""


def run_command(
    place: Place,
    argv: Sequence[str],
    cwd: str = ".",
    env: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    timeout_s: float = 86_400,
    output_limit_bytes: int = MOST_OUTPUT_BYTES,
    with_stdin: bool = False,
) -> Any:
    """Run a program below the root; return its exit status and output."""
    output_limit_bytes = min(output_limit_bytes, MOST_OUTPUT_BYTES)
    content = sys.stdin.buffer.read(_INPUT_BYTES + 1) if with_stdin else b""
    if len(content) > _INPUT_BYTES:
        raise ValueError(f"standard input is longer than {_INPUT_BYTES} bytes")
    inside = place.path(cwd)
    if not place.files.stat(inside).is_directory:
        with located(inside):
            raise os_error(errno.ENOTDIR)
    directory = os.path.normpath(os.path.join(place.root, inside))
    run = _Run(argv, directory, {**os.environ, **dict(env), "PWD": directory}, output_limit_bytes)
    return run.result(content, timeout_s)


class _Run:
    """A command under `protocol.execution.supervisor`, which kills all its processes at the end."""

    def __init__(self, argv: Sequence[str], directory: str, env: dict[str, str], limit: int) -> None:
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        source = supervisor.__loader__.get_source(supervisor.__name__)  # type: ignore[union-attr]
        program = _SUPERVISOR.format(source=source)
        self._argv, self._directory, self._limit = argv, directory, limit
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, directory, str(control), str(status), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(control, status),
            start_new_session=True,
            env=env,
        )
        os.close(control)
        os.close(status)
        self._kept = {"stdout": b"", "stderr": b""}
        self._truncated = False

    def result(self, content: bytes, timeout_s: float) -> dict[str, Any]:
        """Wait for the end of the command; kill it at the timeout, and if this is interrupted."""
        threads = [threading.Thread(target=self._feed, args=(content,), daemon=True)]
        threads += [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._kept]
        for thread in threads:
            thread.start()
        report, timed_out = b"", False
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                left_s = None if timed_out else max(0.0, deadline_s - time.monotonic())
                if not select.select([self._status], [], [], left_s)[0]:
                    timed_out = True
                    self._kill()
                    continue
                data = os.read(self._status, 100)
                if not data:
                    break
                report += data
        finally:
            self._kill()
            self._process.wait()
            os.close(self._status)
        for thread in threads:
            thread.join(1)  # a process that is not the command's may hold a pipe
        kind, _, number = report.decode().strip().partition(" ")
        if kind == "error":
            raise os_error(int(number), self._argv[0] if os.path.isdir(self._directory) else self._directory)
        if kind != "exit":
            raise os_error(errno.EIO, "the command's supervisor was killed")
        output = {name: _text(kept, self._truncated) for name, kept in self._kept.items()}
        ended = {"timed_out": timed_out, "truncated": self._truncated, "snapshot": None, "snapshot_error": None}
        return {"exit_status": int(number), **output, **ended}

    def _kill(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _feed(self, content: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.close()
        except OSError:
            pass  # the command reads no more

    def _read(self, name: str) -> None:
        stream = getattr(self._process, name)
        while True:
            data = os.read(stream.fileno(), 64 * 1024)
            if not data:
                stream.close()
                return
            kept = data[: self._limit - len(self._kept[name])]
            self._truncated = self._truncated or len(kept) < len(data)
            self._kept[name] += kept


def _text(content: bytes, truncated: bool) -> str:
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=not truncated)
    except UnicodeDecodeError:
        return base64_text(content)


# command of `vfsd fs` -> its function, whose parameters are those of that command
COMMANDS: dict[str, Callable[..., Any]] = {
    "ls": list_directory, "stat": stat_path, "read": read_file, "glob": find_files, "grep": find_lines,
    "write": write_file, "edit": edit_text, "rm": remove, "exec": run_command,
}  # fmt: skip


_ESCAPE = re.compile(rb"\\(\\|x[0-9a-f]{2})")


class Place:
    """The root, and the conversion of its paths: relative to the current directory if that is inside, else to the root.

    As `vfsd fs` converts them.
    """

    def __init__(self, root: str, escaped: bool = False) -> None:
        self.root = os.path.realpath(root)
        if not os.path.isdir(self.root):
            raise os_error(errno.ENOTDIR if os.path.lexists(root) else errno.ENOENT, self.root)
        self.store = HostFiles(self.root)
        self.files = PlainPathFilesystem(self.store)
        self._escaped = escaped
        self._cwd = os.getcwdb()
        self._base = b"/" + self._inside(b".")

    def path(self, text: str) -> str:
        """The path that an argument means, relative to the root."""
        return decode(self._inside(from_wire(text) if self._escaped else os.fsencode(text)))

    def _inside(self, raw: bytes) -> bytes:
        root = os.fsencode(self.root)
        start = root if _below(self._cwd, root) is None else self._cwd
        inside = _below(os.path.normpath(os.path.join(start, raw)), root)
        if inside is None and os.path.isabs(raw):
            inside = _below(os.path.realpath(raw), root)
        if inside is None:
            raise ValueError(f"{os.fsdecode(raw)!r} is not in the directory {self.root}")
        return inside

    def shown(self, path: str) -> dict[str, Any]:
        """A path for printing."""
        relative = os.path.relpath(b"/" + encode(normalise(path)), self._base)
        try:
            return {"path": relative.decode()}
        except UnicodeDecodeError:
            return {"path": wire(relative), "escaped": True}

    def tree(self) -> PathFilesTree:
        """The directory as searches read it."""
        return PathFilesTree(self.store, with_xattrs=False)


def _below(path: bytes, root: bytes) -> bytes | None:
    if path == root:
        return b""
    prefix = root.rstrip(b"/") + b"/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def wire(path: bytes) -> str:
    """Return the printed form of a path."""
    return path.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def from_wire(text: str) -> bytes:
    """Return the path of a printed form.  ValueError if it is none."""
    raw = text.encode()
    if b"\0" in raw or b"\\" in _ESCAPE.sub(b"", raw):
        raise ValueError(f"not a path in the control socket's encoding (a backslash is \\\\, a byte \\xNN): {text!r}")
    return _ESCAPE.sub(lambda found: b"\\" if found[1] == b"\\" else bytes([int(found[1][1:], 16)]), raw)


class UsageError(Exception):
    """Wrong usage; the message is for the user."""


def fail(message: str, status: int) -> int:
    """Print an error; return the exit status `status`."""
    try:
        print_answer({"ok": False, "error": _printable(message)})
    except BrokenPipeError:
        pass
    except OSError:  # standard output may be the stream that failed
        sys.stderr.write(f"vfsd-fs: error: {_printable(message)}\n")
    return status


def answered(work: Callable[[], Any]) -> int:
    """Print what `work` returns, or its error; return the exit status."""
    try:
        print_answer({"ok": True, "data": work()})
    except UsageError as error:
        return fail(str(error), 2)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:
        return 1
    except (OSError, ValueError) as error:
        return fail(described(error), 1)
    return 0


def print_answer(answer: Any) -> None:
    """Print one JSON object, on a line of its own."""
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace") + b"\n")
    sys.stdout.buffer.flush()


def _printable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def described(error: Exception) -> str:
    """Describe an error in one line, with its path."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    if error.filename is None:
        return error.strerror
    return f"{error.strerror}: {shortened(wire(os.fsencode(error.filename)))}"


def base64_text(content: bytes) -> str:
    """Encode bytes that are not text."""
    return "base64:" + base64.b64encode(content).decode()
