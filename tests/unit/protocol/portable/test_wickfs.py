"""wickfs: each command's `data` as the specification has it, installed and as vfsd-fs.pyz; and its client."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.execution.executor import ExecResult as Finished
from protocol.execution.host import HostExecutor
from protocol.portable import wickfs
from protocol.portable.package import write_program
from protocol.portable.wickfs import (
    DirEntry,
    EditResult,
    ExecResult,
    GlobResult,
    GrepMatch,
    GrepResult,
    RemoteFS,
    WriteResult,
)

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*words: str, stdin: bytes = b"") -> tuple[int, Any]:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        monkeypatch.setattr(sys, "argv", ["wickfs", *words])
        status = wickfs.main()
        out, err = capsysbinary.readouterr()
        assert err == b""
        assert out.count(b"\n") == 1
        return status, json.loads(out)

    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("one\ntwo one\n")
    (tmp_path / "src/.hidden").mkdir()
    (tmp_path / "src/.hidden/one.py").write_text("one\n")
    (tmp_path / "src/one.png").write_text("one\n")
    (tmp_path / "l").symlink_to("src")
    (tmp_path / "raw").write_bytes(b"\xff\0")
    return tmp_path


EDIT = json.dumps({"old_text": "one", "new_text": "1"}).encode()
DATA: list[tuple[Sequence[str], bytes, Any]] = [
    (
        ["ls"],
        b"",
        [
            {"name": "l", "type": "symlink", "size": 3},
            {"name": "raw", "type": "file", "size": 2},
            {"name": "src", "type": "dir", "size": 0},
        ],
    ),
    (
        ["ls", "l/a.py/.."],
        b"",
        [{"name": "a.py", "type": "file", "size": 12}, {"name": "one.png", "type": "file", "size": 4}],
    ),
    (["read", "src/a.py"], b"", "one\ntwo one\n"),
    (["read", "ROOT/raw"], b"", "base64:/wA="),
    (["write", "new/x"], b"text", {"path": "new/x", "bytes_written": 4}),
    (["edit", "ROOT/src/a.py"], EDIT, {"path": "ROOT/src/a.py", "replacements": 1}),
    (
        ["grep", "one"],
        b"",
        {
            "matches": [
                {"file": "src/a.py", "line": 1, "text": "one"},
                {"file": "src/a.py", "line": 2, "text": "two one"},
            ],
            "truncated": False,
        },
    ),
    (
        ["grep", "two", "ROOT/l"],
        b"",
        {"matches": [{"file": "ROOT/l/a.py", "line": 2, "text": "two one"}], "truncated": False},
    ),
    (["glob", "*.p*"], b"", {"files": ["src/a.py", "src/one.png"], "truncated": False}),
    (["glob", "a.py", "ROOT/src"], b"", {"files": ["ROOT/src/a.py"], "truncated": False}),
]


@pytest.mark.parametrize(("words", "stdin", "data"), DATA, ids=[" ".join(words) for words, _, _ in DATA])
def test_data(words: Sequence[str], stdin: bytes, data: Any, run: Run, project: Path) -> None:
    if words[:2] == ["ls", "l/a.py/.."]:
        (project / "src/.hidden/one.py").unlink()
        (project / "src/.hidden").rmdir()
    words = [word.replace("ROOT", str(project)) for word in words]
    assert run(*words, stdin=stdin) == (
        0,
        {"ok": True, "data": json.loads(json.dumps(data).replace("ROOT", str(project)))},
    )


def test_edit_replaces_the_first_occurrence(run: Run, project: Path) -> None:
    run("edit", "src/a.py", stdin=EDIT)
    assert (project / "src/a.py").read_text() == "1\ntwo one\n"
    status, reply = run("edit", "src/a.py", stdin=EDIT.replace(b"one", b"three"))
    assert (status, reply["ok"]) == (1, False)
    assert "old_text" in reply["error"]


def test_results_are_cut(run: Run, project: Path) -> None:
    (project / "many").write_text("x\n" * 201)
    for number in range(101):
        (project / f"{number}.txt").write_text("")
    found = run("grep", "x", "many")[1]["data"]
    assert (len(found["matches"]), found["truncated"]) == (200, True)
    found = run("glob", "*.txt")[1]["data"]
    assert (len(found["files"]), found["truncated"]) == (100, True)


@pytest.mark.parametrize("words", [[], ["nonsense"], ["read"], ["read", "a", "b"], ["read", "missing"], ["grep", "("]])
def test_errors_are_one_object_and_status_1(words: list[str], run: Run) -> None:
    status, reply = run(*words)
    assert (status, reply["ok"], set(reply)) == (1, False, {"ok", "error"})


def test_an_error_names_the_path(run: Run, tmp_path: Path) -> None:
    assert run("read", "missing")[1]["error"] == f"No such file or directory: {tmp_path}/missing"


class InProcess:
    """An executor whose wickfs runs in this process, with noise around its reply, as of a shell's start-up file."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", **_settings: object) -> Finished:
        assert argv[0] == "wickfs"
        status, reply = self._run(*argv[1:], stdin=stdin)
        return Finished(status, b"{welcome}\n%s\nbye\n" % json.dumps(reply).encode(), b"")


def test_the_client(run: Run, project: Path) -> None:
    files = RemoteFS(InProcess(run))
    assert files.ls("src")[1:] == [DirEntry("a.py", "file", 12), DirEntry("one.png", "file", 4)]
    assert files.write_file("it's/x", "é") == WriteResult("it's/x", 2)
    assert files.read_file("it's/x") == "é"
    assert files.edit_file("src/a.py", "one", "1") == EditResult("src/a.py", 1)
    assert files.grep("t.o", "src") == GrepResult([GrepMatch("src/a.py", 2, "two one")], truncated=False)
    assert files.glob("*.py", f"{project}/src") == GlobResult([f"{project}/src/a.py"], truncated=False)
    with pytest.raises(OSError, match="No such file"):
        files.read_file("missing")


def test_the_client_runs_the_program_that_the_environment_names(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vfsd-fs.pyz is wickfs if it is called so."""
    write_program(str(project / "wickfs"))
    monkeypatch.setenv("WICKFS_BIN", str(project / "wickfs"))
    done = RemoteFS(HostExecutor(project)).exec("basename $PWD; echo err >&2; exit 3")
    assert done == ExecResult(f"{project.name}\n", "err\n", 3)


def test_a_program_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WICKFS_BIN", "/bin/echo")
    with pytest.raises(OSError, match=r"/bin/echo does not answer \(exit status 0\): ls"):
        RemoteFS(HostExecutor(tmp_path)).ls()
    monkeypatch.setenv("WICKFS_BIN", "")
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(FileNotFoundError):
        RemoteFS(HostExecutor(tmp_path)).ls()
