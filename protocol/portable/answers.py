"""What the program prints: one JSON object, or what is wrong with the command line."""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

from protocol.errors import shortened
from protocol.portable.place import wire


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
