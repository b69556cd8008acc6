"""The tour in docs/start.md and the example of docs/store.md work when pasted, and print what is shown there."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import section

pytestmark = pytest.mark.fuse

# Blocks of commands and of their output.  A block that needs a container has another language and is not run.
_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(\.\d+)?")  # git's templates differ between versions, and so do counts and sizes


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
@pytest.mark.parametrize(
    ("document", "title", "mounts"), [("docs/start.md", "A tour", 3), ("docs/store.md", "An example", 1)]
)
def test_the_tour_works_pasted_from_top_to_bottom(workdir: Path, document: str, title: str, mounts: int) -> None:
    found = _BLOCK.findall(section(document, title))
    script = "".join(block for kind, block in found if kind == "sh")
    shown = "".join(block for kind, block in found if kind == "text")
    assert script.count("vfsd mount") == mounts
    home = workdir / "home"
    home.mkdir()
    printed = typed_in_one_shell(script, home)
    assert _NUMBER.sub("N", printed) == _NUMBER.sub("N", shown.replace("/home/me", str(home)))
    assert not [each.name for each in home.iterdir() if not each.name.startswith(".")]


@pytest.mark.extended
def test_the_run_works_pasted_from_top_to_bottom(workdir: Path) -> None:
    blocks = _BLOCK.findall(section("docs/forks.md", "Parallel agents"))
    script = "".join(text for kind, text in blocks if kind == "sh")
    environment = {
        **os.environ,
        "HOME": str(workdir),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
    }
    ran = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=workdir,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    for kind, text in blocks:
        assert kind == "sh" or text in ran.stdout
    committed = subprocess.run(
        ["git", "show", "--name-only", "--format="], cwd=workdir / "project", capture_output=True, text=True, check=True
    )
    assert committed.stdout.split() == ["README.md", "perimeter.py", "shapes.py"]
    assert (workdir / "project" / "shapes.py").read_text() == "def area(w, h):\n    return w * h\n"
