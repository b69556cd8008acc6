"""`vfsd fs --root DIR`: the commands of `vfsd fs` on a plain directory, with the answers that a workspace gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.unit.vfsd.cli.test_fs import FsDaemonOnHost
from vfsd.cli.main import cli

Words = tuple[str | bytes, ...]

EDIT = json.dumps({"old_text": "two", "new_text": "2"}).encode()
# Each with its standard input.  They run in this order, on a directory and on a workspace that begin empty.
CALLS: list[tuple[Words, bytes]] = [
    (("ls",), b""),
    (("write", "src/a.py"), b"one\ntwo\nthree\n"),
    (("write", "src/a.py", "--mode", "create"), b""),
    (("write", "src/b.bin"), bytes(range(256))),
    (("write", b"src/caf\xe9"), b"odd"),
    (("write", "big"), b"x" * 600_000),
    (("write", "no/parent", "--no-parents"), b""),
    (("write", "src"), b""),
    (("write", "src/a.py/below"), b""),
    (("write", "/".join("d" * 20)), b""),
    (("ls", "src"), b""),
    (("ls", "src", "--limit", "1"), b""),
    (("ls", "missing"), b""),
    (("ls", "big"), b""),
    (("stat", "src"), b""),
    (("stat", "src/a.py"), b""),
    (("stat", "--escaped", r"src/caf\xe9"), b""),
    (("stat", "missing"), b""),
    (("read", "src/a.py"), b""),
    (("read", "src/a.py", "--offset", "1", "--limit", "1"), b""),
    (("read", "src/a.py", "--bytes", "--offset", "2"), b""),
    (("read", "src/b.bin"), b""),
    (("read", "src/b.bin", "--limit", "1"), b""),
    (("read", "src"), b""),
    (("read", "missing"), b""),
    (("read", "../outside"), b""),
    (("read", "/etc/passwd"), b""),
    (("edit", "src/a.py"), EDIT),
    (("edit", "src/a.py"), EDIT),
    (("edit", "src/b.bin"), EDIT),
    (("edit", "src/a.py"), b"{"),
    (("glob", "*.py"), b""),
    (("glob", "{"), b""),
    (("glob", "*", "src", "--limit", "1"), b""),
    (("glob", "*", "missing"), b""),
    (("grep", "t.*e"), b""),
    (("grep", "(?=x)"), b""),
    (("grep", "ONE", "src/a.py", "-i"), b""),
    (("grep", "o", "--glob", "*.txt"), b""),
    (("exec", "--", "sh", "-c", "echo out; echo err >&2; exit 3"), b""),
    (("exec", "--stdin", "--env", "A=b", "--cwd", "/", "--", "sh", "-c", "cat; echo $A"), b"in"),
    (("exec", "--", "printenv", "PWD"), b""),
    (("exec", "--", "no-such-command"), b""),
    (("exec", "--timeout", "1e9", "--", "true"), b""),
    (("exec", "--output-limit", "3", "--", "echo", "123456"), b""),
    (("rm", "src"), b""),
    (("rm", "src/a.py"), b""),
    (("rm", "missing"), b""),
    (("rm", "."), b""),
    (("rm", "-r", "src"), b""),
    (("ls", ""), b""),
    (("nonsense",), b""),
]
_VARYING = {"modified_at", "size_bytes", "mode"}  # of directories, and by the umask


@pytest.fixture
def daemon(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FsDaemonOnHost]:
    monkeypatch.chdir("/")
    monkeypatch.setenv("VFSD_WORKSPACE", "demo")
    with FsDaemonOnHost("demo", str(place)) as daemon:
        yield daemon


def run(*words: str | bytes, stdin: bytes = b"") -> tuple[int, Any]:
    result = CliRunner().invoke(cli, ["fs", *map(os.fsdecode, words)], input=stdin)
    assert result.stderr == ""
    return result.exit_code, json.loads(result.stdout)


def same(answer: Any, root: str) -> Any:
    """An answer without what two directories do not share."""
    if isinstance(answer, dict):
        return {key: same(value, root) for key, value in answer.items() if key not in _VARYING}
    if isinstance(answer, list | tuple):
        return [same(each, root) for each in answer]
    # An error names the workspace, or the directory.
    return answer.replace(root, "ROOT").replace("workspace at", "directory") if isinstance(answer, str) else answer


def test_a_directory_and_a_workspace_give_the_same_answers(daemon: FsDaemonOnHost, root: Path) -> None:
    for words, stdin in CALLS:
        in_workspace = run("-w", "demo", *words, stdin=stdin)
        in_directory = run("--root", os.fspath(root), *words, stdin=stdin)
        assert same(in_directory, str(root)) == same(in_workspace, daemon.mountpoint), words


def test_errors_about_a_directory_do_not_speak_of_a_workspace(root: Path) -> None:
    status, envelope = run("--root", str(root), "read", "/etc/passwd")
    assert (status, envelope["error"]) == (1, f"'/etc/passwd' is not in the directory {root}")


def test_the_option_may_follow_the_command(root: Path) -> None:
    (root / "file").write_text("content")
    assert run("read", "file", "--root", str(root))[1]["data"]["content"] == "content"


def test_paths_are_relative_to_the_current_directory_inside_the_root(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "file").write_text("content")
    monkeypatch.chdir(root / "sub")
    assert run("--root", "..", "glob", "*")[1]["data"]["files"] == [{"path": "file"}]
    assert run("--root", "..", "ls", "..")[1]["data"]["entries"][0]["path"] == "."
    assert run("--root", "..", "exec", "--", "pwd")[1]["data"]["stdout"] == f"{root}/sub\n"


@pytest.mark.parametrize(
    "words",
    [
        ("read", "link/secret"), ("ls", "link"), ("stat", "link"), ("write", "link/new"), ("rm", "link/secret"),
        ("glob", "*", "link"), ("grep", "x", "link"), ("exec", "--cwd", "link", "--", "pwd"),
    ],
)  # fmt: skip
def test_a_symlink_that_leads_out_is_refused(root: Path, tmp_path: Path, words: Words) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("x")
    (root / "link").symlink_to("../outside")

    status, envelope = run("--root", str(root), *words)
    assert (status, envelope["ok"]) == (1, False)
    assert envelope["error"].startswith("symlink leads outside the root: link")
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["secret"]


def test_a_dangling_symlink_has_a_status(root: Path) -> None:
    (root / "link").symlink_to("nowhere")
    answer = {"path": "link", "type": "symlink", "size_bytes": 7, "mode": "0777", "is_symlink": True}
    assert run("--root", str(root), "stat", "link") == (0, {"ok": True, "data": answer})


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (("--root", "{root}/missing", "ls"), 1, "No such file or directory: {root}/missing"),
        (("--root", "{root}/file", "ls"), 1, "Not a directory: {root}/file"),
        (("--root", "", "ls"), 2, "--root is an empty string"),
        (("-w", "demo", "--root", "{root}", "ls"), 2, "excludes -w"),
    ],
)
def test_a_wrong_root_is_one_envelope(root: Path, words: tuple[str, ...], status: int, error: str) -> None:
    (root / "file").touch()
    got, envelope = run(*(word.format(root=root) for word in words))
    assert (got, envelope["ok"]) == (status, False)
    assert error.format(root=root) in envelope["error"]


def test_a_command_ends_with_the_process_that_runs_it(root: Path) -> None:
    words = ["fs", "--root", str(root), "exec", "--", "sh", "-c", "echo $$ > pid; exec sleep 1000"]
    with subprocess.Popen([sys.executable, "-m", "vfsd.cli.main", *words], stdout=subprocess.PIPE) as process:
        while not ((root / "pid").exists() and (root / "pid").read_text()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert json.loads(process.stdout.read()) == {"ok": False, "error": "interrupted"}
    assert process.returncode == 130
    # The command is killed before `exec` answers.
    assert not Path("/proc", (root / "pid").read_text().strip()).exists()
