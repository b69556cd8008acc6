"""The root of the program's paths, and what the program prints: JSON, with the two forms of a path, or an error.

A path that is not UTF-8 is printed with `"escaped": true`: a backslash as `\\\\`, a byte as `\\xNN`.


"""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from protocol.adapters.host_files import HostFiles
from protocol.adapters.path_files import PathFilesTree, resolve
from protocol.adapters.plain_filesystem import PlainPathFilesystem
from protocol.errors import os_error, shortened
from protocol.paths import decode, encode, located, normalise

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
