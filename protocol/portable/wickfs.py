"""wickfs: the program of the wickfs specification, and RemoteFS, which runs it wherever an executor runs commands.

    wickfs ls|read|write|edit|grep|glob|exec ...

Each command prints `{"ok": true, "data": ...}` with exit status 0, or `{"ok": false, "error": "..."}` with 1.  The
classes below are the `data`, for both ends; `read` gives the text itself.  The commands are those of `vfsd fs`, on the
whole file system and with the specification's names: paths are absolute or relative to the current directory.

vfsd-fs.pyz is this program if it is called wickfs, so this module runs on Python 3.8 with the standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from protocol.adapters.path_files import search_start
from protocol.paths import decode, encode
from protocol.portable.file_commands import (
    MOST_OUTPUT_BYTES,
    Place,
    answered,
    base64_text,
    edit_text,
    run_command,
    write_file,
)
from protocol.search.grep import grep_tree
from protocol.search.walk import SkipRules, glob_paths
from protocol.tree import TreeEntry

if TYPE_CHECKING:
    from protocol.execution.executor import Executor

_FILES = 100
_MATCHES = 200
_LINE_CHARACTERS = 64 * 1024
# Files of these kinds are not searched, whatever they contain.
_BINARY = (
    "7z a avi bin bmp bz2 class dat db dll doc docx dylib eot exe flac gif gz ico jar jpeg jpg mov mp3 mp4 o ogg otf "
    "pdf png ppt pptx pyc pyo rar so sqlite svgz tar tgz tif tiff ttf war wasm wav webm webp woff woff2 xls xlsx xz "
    "zip zst"
)
_SKIPS = SkipRules(suffixes=tuple(b"." + name.encode() for name in _BINARY.split()))


class DirEntry(NamedTuple):
    """An entry of a directory.  `type` is "file", "dir" or "symlink"; `size` in bytes."""

    name: str
    type: str
    size: int


class WriteResult(NamedTuple):
    """A written file."""

    path: str
    bytes_written: int


class EditResult(NamedTuple):
    """An edited file."""

    path: str
    replacements: int


class GrepMatch(NamedTuple):
    """A matching line, `text`, and its number, `line`, from 1."""

    file: str
    line: int
    text: str


class GrepResult(NamedTuple):
    """The first 200 matching lines."""

    matches: Sequence[GrepMatch]
    truncated: bool


class GlobResult(NamedTuple):
    """The first 100 matching files."""

    files: Sequence[str]
    truncated: bool


class ExecResult(NamedTuple):
    """The result of a command."""

    stdout: str
    stderr: str
    exit_code: int


# -- the program -----------------------------------------------------------------------------------
def _ls(place: Place, path: str = ".") -> Any:
    tree = place.tree()
    directory, _ = search_start(place.store, place.path(path))
    entries = sorted(tree.entries(directory), key=lambda entry: entry.name)
    return [DirEntry(decode(each.name), _kind(each), each.size)._asdict() for each in entries]


def _kind(entry: TreeEntry) -> str:
    return "symlink" if entry.is_symlink else "dir" if entry.is_dir else "file"


def _read(place: Place, path: str) -> str:
    content = place.files.read_bytes(place.path(path)).content
    try:
        return content.decode()
    except UnicodeDecodeError:
        return base64_text(content)


def _write(place: Place, path: str) -> Any:
    done = write_file(place, path, "overwrite", no_parents=False)
    return WriteResult(path, done["bytes_written"])._asdict()


def _edit(place: Place, path: str) -> Any:
    return EditResult(path, edit_text(place, path, first=True)["replacements"])._asdict()


def _grep(place: Place, pattern: str, path: str = ".") -> Any:
    start, name = search_start(place.store, place.path(path))
    found = grep_tree(
        place.tree(), pattern, path=start, max_matches=_MATCHES, max_line_characters=_LINE_CHARACTERS, skip=_SKIPS
    )
    matches = [
        GrepMatch(_as_asked(name(encode(each.path)), path), each.line_number, each.line_content)._asdict()
        for each in found.matches
    ]
    return GrepResult(matches, found.truncated)._asdict()  # type: ignore[arg-type]


def _glob(place: Place, pattern: str, path: str = ".") -> Any:
    start, name = search_start(place.store, place.path(path))
    found = glob_paths(place.tree(), pattern, path=start, limit=_FILES, skip=SkipRules(binary_files=False))
    return GlobResult([_as_asked(name(each), path) for each in found.paths], found.truncated)._asdict()


def _as_asked(inside: str, path: str) -> str:
    """Return a path below the root: absolute if the search began at an absolute `path`, else relative."""
    return f"/{inside}" if os.path.isabs(path) else os.path.relpath(f"/{inside}")


def _exec(place: Place, *words: str) -> Any:
    done = run_command(place, ["/bin/sh", "-c", " ".join(words)])
    return ExecResult(done["stdout"], done["stderr"], done["exit_status"])._asdict()


# command -> its function, the fewest and the most words that it takes, and its usage
_COMMANDS: Mapping[str, tuple[Callable[..., Any], int, int, str]] = {
    "ls": (_ls, 0, 1, "ls [PATH]"),
    "read": (_read, 1, 1, "read PATH"),
    "write": (_write, 1, 1, "write PATH < CONTENT"),
    "edit": (_edit, 1, 1, 'edit PATH <<< \'{"old_text": "...", "new_text": "..."}\''),
    "grep": (_grep, 1, 2, "grep PATTERN [PATH]"),
    "glob": (_glob, 1, 2, "glob PATTERN [PATH]"),
    "exec": (_exec, 1, 1_000_000, "exec LINE"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of `words` (None: of the process); return the exit status."""
    name, *arguments = (sys.argv[1:] if words is None else words) or [""]

    def run() -> Any:
        if name not in _COMMANDS:
            raise ValueError(f"usage: wickfs {'|'.join(_COMMANDS)}")
        command, fewest, most, usage = _COMMANDS[name]
        if not fewest <= len(arguments) <= most:
            raise ValueError(f"usage: wickfs {usage}")
        try:
            return command(Place("/"), *arguments)
        except OSError as error:
            if isinstance(error.filename, str):  # relative to the root
                error.filename = os.path.join("/", error.filename)
            raise

    return answered(run)


# -- the client ------------------------------------------------------------------------------------
class RemoteFS:
    """The files that commands of `executor` see, through the program $WICKFS_BIN (without it: wickfs) there.

    Methods raise OSError with the program's error (EIO), and what the executor raises.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._program = os.environ.get("WICKFS_BIN") or "wickfs"

    def ls(self, path: str = ".") -> list[DirEntry]:
        """Return the entries of a directory."""
        return [DirEntry(**each) for each in self._call("ls", path)]

    def read_file(self, path: str) -> str:
        """Return the text of a file; "base64:..." if it is not UTF-8."""
        return str(self._call("read", path))

    def write_file(self, path: str, content: str) -> WriteResult:
        """Replace a file, or create it with the missing directories."""
        return WriteResult(**self._call("write", path, stdin=content.encode()))

    def edit_file(self, path: str, old_text: str, new_text: str) -> EditResult:
        """Replace the first occurrence of `old_text`."""
        edit = json.dumps({"old_text": old_text, "new_text": new_text})
        return EditResult(**self._call("edit", path, stdin=edit.encode()))

    def grep(self, pattern: str, path: str = ".") -> GrepResult:
        """Find lines by a regular expression."""
        found = self._call("grep", pattern, path)
        return GrepResult([GrepMatch(**each) for each in found["matches"]], found["truncated"])

    def glob(self, pattern: str, path: str = ".") -> GlobResult:
        """Find files by name."""
        return GlobResult(**self._call("glob", pattern, path))

    def exec(self, command: str) -> ExecResult:
        """Run a line of the shell."""
        return ExecResult(**self._call("exec", command))

    def _call(self, *words: str, stdin: bytes = b"") -> Any:
        command = [self._program, *words]
        done = self._executor.run(command, stdin=stdin, output_limit_bytes=MOST_OUTPUT_BYTES)
        # Whatever a shell of the other end prints comes before or after the reply.
        for text in (done.stdout, *done.stdout.splitlines()):
            try:
                reply = json.loads(text)
            except ValueError:
                continue
            if isinstance(reply, dict) and "ok" in reply:
                if reply["ok"]:
                    return reply["data"]
                raise OSError(errno.EIO, str(reply.get("error")))
        printed = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-200:]
        raise OSError(errno.EIO, f"{self._program} does not answer (exit status {done.exit_status}): {printed}")
