"""The hidden command `call`, with which `protocol.portable.remote` reads and writes files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
from typing import Any

from protocol.adapters.path_filesystem.host_files import HostFiles
from protocol.adapters.path_filesystem.plain import PlainPathFilesystem
from protocol.paths import CallLimitError


def answer_call() -> int:
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
    if method == "replace_bytes":
        with open(_uploaded(arguments["name"]), "rb") as file:
            new = file.read()
        os.unlink(_uploaded(arguments["name"]))
        old = files.read_bytes(arguments["path"]).content
        same = hashlib.sha256(old).hexdigest() == arguments["digest"]
        return _plain(files.replace_bytes(arguments["path"], old, new)) if same else None
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
