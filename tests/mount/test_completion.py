"""<Tab> offers the paths of a workspace and of its snapshots; in bash itself, too."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import mounted
from tests.support.waiting import readable
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    directory = tmp_path_factory.mktemp("completion")
    with mounted(directory, name="complete") as workspace:
        root = Path(workspace.path)
        for name in ("src/inner", "two words", ".hidden"):
            (root / name).mkdir(parents=True)
        for name in ("src/main.py", "src/gone.py", "two words/file"):
            (root / name).touch()
        Path(os.fsdecode(os.fsencode(root) + b"/src/not-\xff-utf8")).touch()
        (root / "src/new\nline").touch()
        workspace.snapshot("before")
        (root / "src/gone.py").unlink()
        yield workspace


def offered(line: str, directory: str = "/") -> list[str]:
    environment = {
        **os.environ,
        "_VFSD_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    command = [sys.executable, "-m", "vfsd.cli.main"]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [item.partition(",")[2] for item in done.stdout.splitlines() if item]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vfsd fs read s", ["src/"]),
        ("vfsd fs read ", ["src/", "two words/"]),
        ("vfsd fs read .", [".hidden/"]),
        ("vfsd fs read src/", ["src/inner/", "src/main.py"]),
        ("vfsd fs read --at before src/g", ["src/gone.py"]),
        ("vfsd fs read nowhere/", []),
        ("vfsd fs read ../", []),
        ("vfsd fs --at x read src/", []),
        ("vfsd -w complete log src/", ["src/inner/", "src/main.py"]),
        ("vfsd restore b", ["before"]),
        ("vfsd restore before src/", ["src/gone.py", "src/inner/", "src/main.py"]),
        ("vfsd restore --undo s", ["src/"]),
        ("vfsd diff b", ["before"]),
        ("vfsd diff before -- s", ["src/"]),
        ("vfsd diff -- s", ["src/"]),
        ("vfsd merge complete t", ["two words/"]),
        ("vfsd log --since b", ["before"]),
    ],
)
def test_paths_and_snapshots_are_offered(workspace: Workspace, line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_paths_are_relative_to_the_current_directory_or_absolute(workspace: Workspace) -> None:
    below = f"{workspace.path}/src"
    assert offered("vfsd fs read m", below) == ["main.py"]
    assert offered("vfsd fs read ../s", below) == ["../src/"]
    assert offered(f"vfsd fs read {below}/m") == [f"{below}/main.py"]


def test_paths_below_a_directory_without_a_workspace_are_offered(workdir: Path) -> None:
    (workdir / "some").mkdir()
    (workdir / "some" / "file").touch()
    assert offered(f"vfsd fs read --root {workdir} s") == ["some/"]
    assert offered(f"vfsd fs read --root {workdir} some/") == ["some/file"]


class Bash:
    """An interactive bash on a terminal of its own."""

    def __init__(self, directory: Path) -> None:
        program = directory / "vfsd"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vfsd.cli.main "$@"\n')
        program.chmod(0o755)
        environment = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "PS1": "ready>", "TERM": "dumb"}
        master, slave = pty.openpty()
        words = ["bash", "--norc", "--noprofile", "-i"]
        self._terminal = master
        self._process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.type('eval "$(vfsd completion bash)"; echo be"gun"\n', "begun")

    def type(self, keys: str, expected: str, timeout_s: float = 60) -> None:
        """Type `keys`, and read until `expected` is shown."""
        os.write(self._terminal, keys.encode())
        shown, deadline = b"", time.monotonic() + timeout_s
        while expected.encode() not in shown:
            assert readable(self._terminal, deadline - time.monotonic()), (keys, shown)
            shown += os.read(self._terminal, 4096)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


def test_bash_completes_a_path_step_by_step(workspace: Workspace, workdir: Path) -> None:
    bash = Bash(workdir)
    try:
        bash.type("vfsd fs read s\t", "src/")
        bash.type("m\t", "main.py ")
        bash.type("\x15vfsd restore b\t", "before ")
        bash.type("tw\t", "two\\ words/")
    finally:
        bash.close()
