"""The program in vfsd-fs.pyz: the commands of `vfsd fs --root DIR`, with the same envelope.

Standard output gets `{"ok": true, "data": ...}` with exit status 0, or `{"ok": false, "error": "..."}` with 1, or 2 for
wrong usage.  The hidden command `call` serves `protocol.portable.remote`: it reads one request from standard input.

It runs on Python 3.8 with the standard library only, on the modules of `protocol` with which vfsd does the same.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from protocol.adapters.path_filesystem.host_files import HostFiles
from protocol.adapters.path_filesystem.plain import PlainPathFilesystem
from protocol.adapters.path_filesystem.resolve import resolve
from protocol.adapters.tree import PathFilesTree
from protocol.errors import os_error, shortened
from protocol.execution import supervisor
from protocol.paths import DEFAULT_LIMITS, CallLimitError, decode, encode, located, normalise
from protocol.search import SKIP_NOTHING, USUAL_SKIPS, UnreadablePaths, glob_paths, grep_tree
from protocol.tools.edits import edit_file
from protocol.types import DEFAULT_READ_LINES, FileStat

_ESCAPE = re.compile(rb"\\(\\|x[0-9a-f]{2})")
_OUTPUT_MOST_BYTES = 16 << 20
_INPUT_BYTES = 512 * 1024
_LINE_CHARACTERS = 1_000
_SUFFIXES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


# What Python 3.8 lacks of what the supervisor uses.
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


class _UsageError(Exception):
    """Wrong usage; the message is for the user."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise _UsageError(message)


# -- the command line ------------------------------------------------------------------------------
def main(words: Sequence[str]) -> int:
    """Run one command line; return the exit status."""
    if list(words[:1]) == ["call"]:
        return _answer_call()
    try:
        settings = vars(_parser().parse_args(list(words)))
        run = settings.pop("run", None)
        if run is None:
            return _fail("a command is missing; --help lists them", 2)
        _print({"ok": True, "data": run(_Place(settings.pop("root"), settings.pop("escaped")), **settings)})
    except _UsageError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        return 1
    except (OSError, ValueError) as error:
        return _fail(_described(error), 1)
    return 0


def _fail(message: str, status: int) -> int:
    try:
        _print({"ok": False, "error": _printable(message)})
    except BrokenPipeError:
        pass
    except OSError:  # standard output may be the stream that failed
        sys.stderr.write(f"vfsd-fs: error: {_printable(message)}\n")
    return status


def _print(answer: Any) -> None:
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace") + b"\n")
    sys.stdout.buffer.flush()


def _printable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _described(error: Exception) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    if error.filename is None:
        return error.strerror
    return f"{error.strerror}: {shortened(_wire(os.fsencode(error.filename)))}"


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty string")
    return text


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, above 0 and at most 86400")
    return value


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})\s*([kmg]?)(?:i?b)?", text.lower(), re.ASCII)
    if found is None or int(found[1]) * _SUFFIXES[found[2]] > _OUTPUT_MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of at most 16MiB")
    return int(found[1]) * _SUFFIXES[found[2]]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _parser() -> _Parser:
    about = "Read, write, search and run below a directory; answers are JSON, as those of `vfsd fs`."
    parser = _Parser(prog="vfsd-fs", description=about)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for each in (parser, shared := _Parser(add_help=False)):
        default = "." if each is parser else argparse.SUPPRESS
        each.add_argument("--root", metavar="DIR", type=_not_empty, default=default, help="the directory; default: .")
        escaped = False if each is parser else argparse.SUPPRESS
        how = "read paths in the form in which `escaped` ones are printed"
        each.add_argument("--escaped", action="store_true", default=escaped, help=how)

    def command(name: str, run: Callable[..., Any], about: str, path: str | None = None) -> _Parser:
        made = commands.add_parser(name, help=about, description=about, parents=[shared], allow_abbrev=False)
        made.set_defaults(run=run)
        if path is not None:
            required: dict[str, Any] = {} if path == "" else {"nargs": "?", "default": path}
            made.add_argument("path", metavar="PATH", type=_not_empty, **required)
        return made

    def limit(made: _Parser, default: int) -> None:
        made.add_argument("--limit", metavar="N", type=_count(1), default=default, help=f"at most N; {default}")

    def everything(made: _Parser) -> None:
        how = "also hidden directories, node_modules, __pycache__, vendor and binary files"
        made.add_argument("--all", dest="everything", action="store_true", help=how)

    limit(command("ls", _ls, "list a directory", "."), 10_000)
    command("stat", _stat, "describe a path", "")
    made = command("read", _read, "read a file", "")
    made.add_argument("--offset", metavar="N", type=_count(0), default=0, help="skip N lines (or bytes)")
    made.add_argument("--limit", metavar="N", type=_count(1), help="at most N lines (or bytes); 2,000 lines")
    made.add_argument("--bytes", dest="as_bytes", action="store_true", help="count bytes, and print base64")
    made = command("glob", _glob, "find files by name")
    made.add_argument("pattern", metavar="PATTERN", type=_not_empty)
    made.add_argument("path", metavar="PATH", type=_not_empty, nargs="?", default=".")
    limit(made, 100)
    everything(made)
    made = command("grep", _grep, "find lines by a regular expression of Python, without look-around")
    made.add_argument("pattern", metavar="PATTERN", type=_not_empty)
    made.add_argument("path", metavar="PATH", type=_not_empty, nargs="?", default=".")
    made.add_argument("--glob", metavar="PATTERN", type=_not_empty, help="only files whose path matches")
    made.add_argument("-i", "--ignore-case", action="store_true")
    limit(made, 200)
    everything(made)
    made = command("write", _write, "write standard input to a file", "")
    made.add_argument("--mode", choices=["create", "overwrite", "append"], default="overwrite")
    made.add_argument("--no-parents", action="store_true", help="do not create missing directories")
    command("edit", _edit, 'replace text: {"old_text", "new_text", "replace_all"} on standard input', "")
    made = command("rm", _rm, "delete a file, a symlink or a directory", "")
    made.add_argument("-r", "--recursive", action="store_true", help="with its content")
    made = command("exec", _exec, "run a command; -c LINE runs a line of the shell")
    _add_exec_options(made)
    return parser


def _add_exec_options(made: _Parser) -> None:
    made.add_argument("--cwd", metavar="PATH", type=_not_empty, default=".")
    made.add_argument("--env", metavar="NAME=VALUE", type=_variable, action="append", default=[])
    made.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=120.0, help="kill it after that time; 120")
    made.add_argument("--output-limit", metavar="SIZE", type=_size, default=256 << 10, help="of each stream; 256KiB")
    made.add_argument("--stdin", action="store_true", help="pass standard input to it, up to 512 KiB")
    made.add_argument("-c", dest="line", metavar="LINE", type=_not_empty, help="run a line of /bin/sh")
    made.add_argument("argv", metavar="COMMAND", nargs=argparse.REMAINDER)


# -- paths -----------------------------------------------------------------------------------------
class _Place:
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
        return decode(self._inside(_from_wire(text) if self._escaped else os.fsencode(text)))

    def _inside(self, raw: bytes) -> bytes:
        root = os.fsencode(self.root)
        start = root if _below(self._cwd, root) is None else self._cwd
        inside = _below(os.path.normpath(os.path.join(start, raw)), root)
        if inside is None and os.path.isabs(raw):
            inside = _below(os.path.realpath(raw), root)
        if inside is None:
            raise ValueError(f"{os.fsdecode(raw)!r} is not in the workspace at {self.root}")
        return inside

    def shown(self, path: str) -> dict[str, Any]:
        """A path for printing."""
        relative = os.path.relpath(b"/" + encode(normalise(path)), self._base)
        try:
            return {"path": relative.decode()}
        except UnicodeDecodeError:
            return {"path": _wire(relative), "escaped": True}

    def searched(self, path: str) -> tuple[bytes, Callable[[bytes], str]]:
        """The path without symlinks at which a search begins, and the names of what it finds below `path`."""
        asked = encode(normalise(path))
        with located(normalise(path)), resolve(self.store, asked) as place:
            real = b"/".join(place.names)

        def name(found: bytes) -> str:
            rest = found[len(real) :].lstrip(b"/")
            return decode(asked + b"/" + rest if asked and rest else asked or rest)

        return real, name

    def tree(self) -> PathFilesTree:
        """The directory as searches read it."""
        return PathFilesTree(self.store, with_xattrs=False)


def _below(path: bytes, root: bytes) -> bytes | None:
    if path == root:
        return b""
    prefix = root.rstrip(b"/") + b"/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def _wire(path: bytes) -> str:
    return path.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def _from_wire(text: str) -> bytes:
    raw = text.encode()
    if b"\0" in raw or b"\\" in _ESCAPE.sub(b"", raw):
        raise ValueError(f"not a path in the control socket's encoding (a backslash is \\\\, a byte \\xNN): {text!r}")
    return _ESCAPE.sub(lambda found: b"\\" if found[1] == b"\\" else bytes([int(found[1][1:], 16)]), raw)


# -- reading ---------------------------------------------------------------------------------------
def _entry(place: _Place, path: str, found: FileStat) -> dict[str, Any]:
    kind = "file" if found.is_file else "directory" if found.is_directory else "other"
    shown = {"type": kind, "size_bytes": found.size_bytes, "mode": f"{stat.S_IMODE(found.mode):04o}"}
    if found.modified_at is not None:
        shown["modified_at"] = found.modified_at.isoformat()
    return {**place.shown(path), **shown, **({"is_symlink": True} if found.is_symlink else {})}


def _symlink(place: _Place, path: str, size_bytes: int = 0, mode: int = 0) -> dict[str, Any]:
    shown = {"type": "symlink", "size_bytes": size_bytes, "mode": f"{mode:04o}", "is_symlink": True}
    return {**place.shown(path), **shown}


def _ls(place: _Place, path: str, limit: int) -> Any:
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


def _stat(place: _Place, path: str) -> Any:
    inside = place.path(path)
    try:
        return _entry(place, inside, place.files.stat(inside))
    except FileNotFoundError:
        entry = place.tree().entry(encode(normalise(inside)))  # a dangling symlink exists
        if not entry.is_symlink:
            raise
        return _symlink(place, inside, entry.size, stat.S_IMODE(entry.mode))


def _read(place: _Place, path: str, offset: int, limit: int | None, as_bytes: bool) -> Any:
    try:
        return _read_page(place, place.path(path), offset, limit, as_bytes)
    except CallLimitError:
        most = f"a read is limited to {DEFAULT_LIMITS.read_bytes} bytes"
        raise ValueError(f"{most}: use `--bytes --offset N --limit N`, or read the file in the mount") from None


def _read_page(place: _Place, path: str, offset: int, limit: int | None, as_bytes: bool) -> Any:
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
    shown = {"content": _base64(page.content), "encoding": "base64", "offset": page.offset, "limit": page.limit}
    return {**place.shown(path), **shown, "size_bytes": page.size_bytes, "truncated": page.truncated}


def _base64(content: bytes) -> str:
    return "base64:" + base64.b64encode(content).decode()


# -- searching -------------------------------------------------------------------------------------
def _unreadable(place: _Place, found: UnreadablePaths, name: Callable[[bytes], str]) -> dict[str, Any]:
    named = [{**place.shown(name(each.path)), "reason": each.reason} for each in found.named]
    return {"unreadable": named, "unreadable_count": found.count}


def _glob(place: _Place, pattern: str, path: str, limit: int, everything: bool) -> Any:
    start, name = place.searched(place.path(path))
    skip = SKIP_NOTHING if everything else USUAL_SKIPS
    found = glob_paths(place.tree(), pattern, path=start, limit=limit, skip=skip)
    files = [place.shown(name(each)) for each in found.paths]
    return {"files": files, "truncated": found.truncated, **_unreadable(place, found.unreadable, name)}


def _grep(
    place: _Place, pattern: str, path: str, glob: str | None, ignore_case: bool, limit: int, everything: bool
) -> Any:
    start, name = place.searched(place.path(path))
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


# -- changing --------------------------------------------------------------------------------------
def _write(place: _Place, path: str, mode: Any, no_parents: bool) -> Any:
    inside = place.path(path)
    limit = DEFAULT_LIMITS.write_bytes
    content = sys.stdin.buffer.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"a write is limited to {limit} bytes: write the rest with --mode append, or in the mount")
    done = place.files.write_bytes(inside, content, mode=mode, create_parents=not no_parents)
    return {**place.shown(done.path), "bytes_written": done.bytes_written, "mode": done.mode}


def _edit(place: _Place, path: str) -> Any:
    try:
        edit = json.loads(sys.stdin.buffer.read())
        old, new, everywhere = edit.pop("old_text"), edit.pop("new_text"), edit.pop("replace_all", False)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"standard input is not an edit: {error!r}") from None
    if edit or not (isinstance(old, str) and isinstance(new, str) and isinstance(everywhere, bool)):
        raise ValueError("standard input is not an edit: it has other members, or members of other types")
    done = edit_file(place.files, place.path(path), old, new, replace_all=everywhere)
    return {**place.shown(done.path), "replacements": done.replacements, "bytes_written": done.bytes_written}


def _rm(place: _Place, path: str, recursive: bool) -> Any:
    inside = place.path(path)
    try:
        return {**place.shown(inside), "deleted": place.files.delete(inside, recursive=recursive)}
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise OSError(errno.ENOTEMPTY, f"{_described(error)}; `-r` deletes it with its content") from None


# -- commands --------------------------------------------------------------------------------------
def _exec(
    place: _Place,
    cwd: str,
    env: Iterable[tuple[str, str]],
    timeout: float,
    output_limit: int,
    stdin: bool,
    line: str | None,
    argv: list[str],
) -> Any:
    if argv[:1] == ["--"]:
        del argv[0]
    if line is not None:
        argv = ["/bin/sh", "-c", line, "sh", *argv]
    if not argv:
        raise _UsageError("exec: give a COMMAND, or -c LINE")
    content = sys.stdin.buffer.read(_INPUT_BYTES + 1) if stdin else b""
    if len(content) > _INPUT_BYTES:
        raise ValueError(f"standard input is longer than {_INPUT_BYTES} bytes")
    inside = place.path(cwd)
    if not place.files.stat(inside).is_directory:
        with located(inside):
            raise os_error(errno.ENOTDIR)
    directory = os.path.normpath(os.path.join(place.root, inside))
    run = _Run(argv, directory, {**os.environ, **dict(env)}, output_limit)
    return run.result(content, timeout)


class _Run:
    """A command under `protocol.execution.supervisor`, which kills all its processes at the end."""

    def __init__(self, argv: list[str], directory: str, env: dict[str, str], limit: int) -> None:
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
        while True:
            data = os.read(getattr(self._process, name).fileno(), 64 * 1024)
            if not data:
                return
            kept = data[: self._limit - len(self._kept[name])]
            self._truncated = self._truncated or len(kept) < len(data)
            self._kept[name] += kept


def _text(content: bytes, truncated: bool) -> str:
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=not truncated)
    except UnicodeDecodeError:
        return _base64(content)


# -- calls of `protocol.portable.remote` -----------------------------------------------------------
def _answer_call() -> int:
    """Answer one request: {"root", "read_only", "method", "arguments"}; the bytes in it are base64."""
    try:
        request = json.loads(sys.stdin.buffer.read())
        answer: Any = {"data": _called(**request)}
    except (OSError, ValueError) as error:
        answer = {"error": _error_record(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _error_record(error: Exception) -> dict[str, Any]:
    if isinstance(error, OSError):
        name = os.fsdecode(error.filename) if error.filename is not None else None
        kind = type(error).__name__
        return {"kind": kind, "errno": error.errno, "message": error.strerror or str(error), "path": name}
    return {"kind": "CallLimitError" if isinstance(error, CallLimitError) else "ValueError", "message": str(error)}


def _called(root: str, read_only: bool, method: str, arguments: dict[str, Any]) -> Any:
    files = PlainPathFilesystem(HostFiles(root, read_only=read_only))
    if method == "hello":
        return [files.root, files.read_only]
    if method == "upload":
        with open(_uploaded(arguments["name"]), "ab") as file:
            file.write(base64.b64decode(arguments["content"]))
        return None
    if method == "put":
        source = arguments.pop("name")
        with open(_uploaded(source), "rb") as file, files.open_write(**arguments) as writer:
            writer.write_all(iter(lambda: file.read(1 << 20), b""))
        os.unlink(_uploaded(source))
        return None
    if method == "drop":
        if os.path.exists(_uploaded(arguments["name"])):
            os.unlink(_uploaded(arguments["name"]))
        return None
    if method == "check_write":
        files.open_write(**arguments).discard()  # type: ignore[attr-defined]
        return None
    if method == "write_bytes":
        arguments["content"] = base64.b64decode(arguments["content"])
    return _plain(getattr(files, method)(**arguments))


def _uploaded(name: str) -> str:
    """The path of an upload, next to the program."""
    if not re.fullmatch(r"[0-9a-f]+", name, re.ASCII):
        raise ValueError(f"not an upload: {name!r}")
    return os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), name)


def _plain(value: Any) -> Any:
    """A result in JSON's types: values as objects, times as numbers of microseconds since 1970."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "timestamp"):
        return round(value.timestamp() * 1e6)
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else {name: _plain(getattr(value, name)) for name in fields}
