"""Long output through a pager, and patches in colours, on a terminal; as git does both."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click

from vfsd.cli.common import output
from vfsd.wire.messages import LineBuffer

# Leave at once if one screen holds it all, show colours, and keep the text on the screen: git's default.
_LESS: Final = "FRX"
_BOLD, _RED, _GREEN, _CYAN, _PLAIN = b"\x1b[1m", b"\x1b[31m", b"\x1b[32m", b"\x1b[36m", b"\x1b[m"
_HEADERS: Final = (
    b"diff ",
    b"index ",
    b"--- ",
    b"+++ ",
    b"old mode ",
    b"new mode ",
    b"new file ",
    b"deleted file ",
    b"# ",
)
_VARIABLES: Final = ("VFSD_PAGER", "PAGER")


def _pager() -> str | None:
    """Return the shell command of the user's pager; None if there is none, none is wanted, or it would only ask."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    given = next((os.environ[name] for name in _VARIABLES if name in os.environ), None)
    if given is None:
        return "less" if shutil.which("less") else None
    if given.strip() in {"", "cat"}:
        return None
    program = given.split()[0]
    if program.replace("_", "").isalnum() and shutil.which(program) is None:
        output.note(f"the pager {program} is not installed: $VFSD_PAGER or $PAGER names another")
        return None
    return given


@contextmanager
def paged() -> Iterator[None]:
    """Send what the block prints through a pager, if standard output is a terminal.

    The pager is $VFSD_PAGER, else $PAGER, else `less`; none if that is empty or `cat`.  The block prints with
    `output.say` and `output.write_bytes`; whether it prints for a terminal, it must ask before.  If the user leaves the
    pager, the block gets BrokenPipeError.
    """
    pager = _pager() if output.on_terminal() else None
    if pager is None:
        yield
        return
    sys.stdout.flush()
    environment = {"LESS": _LESS, **os.environ}
    process = subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=environment)  # noqa: S602 the user's own
    assert process.stdin is not None
    terminal = os.dup(1)
    os.dup2(process.stdin.fileno(), 1)
    process.stdin.close()
    click.get_current_context().color = output.has_colours()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # for what is still buffered
        os.close(null)
        os.close(terminal)
        terminal = -1
        raise
    finally:
        if terminal >= 0:
            os.dup2(terminal, 1)  # which ends the pager's input
            os.close(terminal)
        _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until the user leaves the pager.  Ctrl-C in it is for the pager."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


class PatchColours:
    """Colours a patch that arrives in pieces, and passes it on to `write` line by line."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._lines = LineBuffer()
        self._is_header = True  # between "diff --git" and the first hunk: "--- a/x" is no removed line there

    def feed(self, data: bytes) -> None:
        """Take the next piece of the patch."""
        self._lines.feed(data)
        coloured = []
        while (line := self._lines.next_line()) is not None:
            colour = self._colour(line)
            coloured.append(b"%b%b%b\n" % (colour, line, _PLAIN) if colour else line + b"\n")
        self._write(b"".join(coloured))

    def _colour(self, line: bytes) -> bytes:
        if line.startswith(b"diff --git "):
            self._is_header = True
        elif line.startswith(b"@@ "):
            self._is_header = False
            return _CYAN
        if self._is_header:
            return _BOLD if line.startswith(_HEADERS) else b""
        return {b"+": _GREEN, b"-": _RED}.get(line[:1], b"")
