"""<Tab> offers the paths of a workspace and of its snapshots; in bash, zsh and fish themselves, too."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
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
        ("vfsd snap", ["snapshot", "snapshots"]),
        ("vfsd status -w comp", ["complete"]),
        ("vfsd unmount comp", ["complete"]),
        ("vfsd mount x --backend ho", ["host:"]),
        ("vfsd -w complete drop b", ["before"]),
        ("vfsd drop -w complete b", ["before"]),
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
        ("vfsd hooks install c", ["claude", "codex"]),
    ],
)
def test_commands_names_and_paths_are_offered(workspace: Workspace, line: str, expected: list[str]) -> None:
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


def with_vfsd(directory: Path) -> dict[str, str]:
    """An environment with the program `vfsd`."""
    program = directory / "vfsd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vfsd.cli.main "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "PS1": "ready>", "TERM": "dumb"}


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, directory: Path, words: list[str], setup: str) -> None:
        environment = with_vfsd(directory)
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 500, 0, 0))  # it would scroll a longer line
        self._terminal = master
        self._process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.type(f'{setup}; echo be"gun"\n', "begun")

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


@pytest.fixture
def bash(workdir: Path) -> Iterator[Shell]:
    bash = Shell(workdir, ["bash", "--norc", "--noprofile", "-i"], 'eval "$(vfsd completion bash)"')
    yield bash
    bash.close()


def test_bash_completes_a_path_step_by_step(workspace: Workspace, bash: Shell) -> None:
    bash.type("vfsd fs read s\t", "src/")
    bash.type("m\t", "main.py ")
    bash.type("\x15vfsd restore b\t", "before ")
    bash.type("tw\t", "two\\ words/")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a snapshot in the store, whose name has characters that bash breaks words at."""
    directory = tmp_path_factory.mktemp("stored") / "pro=ject@two x"
    directory.mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VFSD_STORE_DIR", str(directory.parent / "store"))
        with mounted(directory.parent / "m", name="stored", backend=f"host:{directory}") as workspace:
            workspace.snapshot("of-host")
            yield directory


@pytest.mark.extended
@pytest.mark.parametrize("option", ["--of ", "--of="])
def test_bash_completes_what_follows_a_colon_or_an_equals_sign(
    workspace: Workspace, stored: Path, bash: Shell, option: str
) -> None:
    name = str(stored).replace(" ", "\\ ")
    parts = ("h", "host:", f"host:{stored.parent}", f"host:{stored.parent}/pro=", f"host:{name[:-4]}")
    for number, typed in enumerate(parts):
        bash.type(f"vfsd restore {option}{typed}\t", "wo\\ x ")
        # All that is shown is read before the next line.
        bash.type(f"end{number}\x15", f"end{number}")
    bash.type("vfsd mount x --backend=ho\t", "st:")


@pytest.mark.extended
def test_zsh_completes_paths_and_keeps_an_option_before_an_equals_sign(
    workspace: Workspace, stored: Path, workdir: Path
) -> None:
    zsh = Shell(workdir, ["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(vfsd completion zsh)"')
    try:
        zsh.type("vfsd fs read -w complete s\t", "src/")
        zsh.type("m\t", "main.py")
        zsh.type("\x15vfsd restore --of=ho\t", "ject@two\\ x")
        zsh.type("\x01echo '\x05'\n", f"\nvfsd restore --of=host:{str(stored)[:-2]}")
        zsh.type("\x15vfsd mount x --backend=ho\t", "--backend=host:")
    finally:
        zsh.close()


@pytest.mark.extended
def test_fish_completes_paths_and_values(workspace: Workspace, stored: Path, workdir: Path) -> None:
    root = Path(workspace.path)
    (root / "with,comma").touch()

    def completed(line: str) -> list[str]:
        script = 'vfsd completion fish | source; complete -C "$argv[1]"'
        words = ["fish", "--no-config", "-c", script, line]
        done = subprocess.run(words, env=with_vfsd(workdir), capture_output=True, text=True, check=True)
        return [each.partition("\t")[0] for each in done.stdout.splitlines()]

    assert completed("vfsd fs read -w complete src/") == ["src/inner/", "src/main.py"]
    assert completed("vfsd fs read -w complete with") == ["with,comma"]
    assert completed("vfsd restore -w complete b") == ["before"]
    assert completed("vfsd restore --of ho") == [f"host:{stored}"]
    assert completed("vfsd restore --of=ho") == [f"--of=host:{stored}"]
    assert completed(f"vfsd mount --store={stored.parent}/pro") == [f"--store={stored}/"]
    (root / "with,comma").unlink()
