"""The tour in README.md works when it is pasted from top to bottom, and prints what README.md shows."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fuse

README = Path(__file__).parents[2] / "README.md"
# Blocks of commands and of their output.  A block that needs a container has another language and is not run.
_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(\.\d+)?")  # git's templates differ between versions, and so do counts and sizes


def tour() -> list[tuple[str, str]]:
    """The blocks of the section "A tour", each with its language."""
    text = README.read_text()
    return _BLOCK.findall(text[text.index("\n## A tour\n") : text.index("\n## Speed\n")])


def typed_in_one_shell(script: str, home: Path) -> str:
    """What a shell and its programs print on a terminal.  It stops at the first command that fails."""
    ours, theirs = pty.openpty()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(home), "PATH": path, "NO_COLOR": "1", "TERM": "dumb"}
    environment.pop("VFSD_STORE_DIR", None)
    environment["XDG_STATE_HOME"] = str(home / ".local" / "state")  # the default, except for the journals of root
    with open(ours, "rb", buffering=0) as output:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", script],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = output.read(65536)
            except OSError:  # EIO: the last program that had the terminal open has ended
                break
            if not piece:
                break
            pieces.append(piece)
    printed = b"".join(pieces).decode().replace("\r\n", "\n")
    assert shell.wait(timeout=60) == 0, printed
    # On a dumb terminal a progress bar is an empty line, and a fast operation has none.
    return "".join(line for line in printed.splitlines(keepends=True) if line != "\n")


@pytest.mark.slow
def test_the_tour_works_pasted_from_top_to_bottom(workdir: Path) -> None:
    blocks = tour()
    script = "".join(block for kind, block in blocks if kind == "sh")
    shown = "".join(block for kind, block in blocks if kind == "text")
    assert script.count("vfsd mount") == 4
    home = workdir / "home"
    home.mkdir()
    printed = typed_in_one_shell(script, home)
    assert _NUMBER.sub("N", printed) == _NUMBER.sub("N", shown.replace("/home/me", str(home)))
    assert not [each.name for each in home.iterdir() if not each.name.startswith(".")]
