"""RemoteFilesystem over an executor of this machine: the contract, and what can go wrong on the way."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from protocol import RemoteFilesystem
from protocol.execution.executor import ExecResult
from protocol.execution.host import HostExecutor
from protocol.portable import program
from protocol.testing import FilesystemContract


@pytest.fixture
def remote(root: Path) -> Iterator[RemoteFilesystem]:
    with RemoteFilesystem(HostExecutor(root), python=sys.executable) as remote:
        yield remote


def program_of(remote: RemoteFilesystem) -> Path:
    return Path(remote._program)


class InProcess:
    """An executor that runs the program in this process: the contract calls it a thousand times."""

    def __init__(self, root: Path, installed: Path) -> None:
        self._root = root
        self._installed = installed

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", **_settings: Any) -> ExecResult:
        if argv[-1] != "call":  # copies or removes it
            return ExecResult(0, os.fsencode(self._installed), b"")
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
            patch.setattr(sys, "argv", list(argv[3:]))
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            patch.chdir(self._root)
            status = program.main(["call"])
        return ExecResult(status, output.getvalue().encode(), b"")


class TestFilesystem(FilesystemContract):
    @pytest.fixture
    def filesystem(self, root: Path, tmp_path: Path) -> RemoteFilesystem:
        (tmp_path / "installed").mkdir()
        return RemoteFilesystem(InProcess(root, tmp_path / "installed"), input_bytes=16 << 20)


@pytest.mark.long
class TestFilesystemOverARealExecutor(FilesystemContract):
    @pytest.fixture
    def filesystem(self, root: Path) -> Iterator[RemoteFilesystem]:
        with RemoteFilesystem(HostExecutor(root), python=sys.executable, input_bytes=16 << 20) as remote:
            yield remote


def test_it_works_on_a_directory_below_the_executors_own(root: Path) -> None:
    (root / "below").mkdir()
    with RemoteFilesystem(HostExecutor(root), "below", python=sys.executable) as remote:
        assert remote.root == str(root / "below")
        remote.write("file", "content")
    assert (root / "below" / "file").read_text() == "content"
    with pytest.raises(FileNotFoundError):
        RemoteFilesystem(HostExecutor(root), "missing", python=sys.executable)


def test_names_and_contents_that_are_not_text_go_there_and_back(remote: RemoteFilesystem, root: Path) -> None:
    name, content = os.fsdecode(b"caf\xe9 \n\\x"), bytes(range(256)) * 5000
    remote.write_bytes(name, content)
    assert (root / name).read_bytes() == remote.read_bytes(name).content == content
    assert [entry.name for entry in remote.list()] == [name]
    with remote.open_read(name) as reader:
        reader.seek(-3, os.SEEK_END)
        assert (reader.size, reader.read()) == (len(content), content[-3:])
        reader.seek(300_000)
        assert reader.read(2) == content[300_000:300_002]
    with remote.open_write(name, mode="append") as writer:
        writer.write_all([b"more", b""])
    assert (root / name).read_bytes() == content + b"more"


def test_what_is_discarded_is_not_written(remote: RemoteFilesystem, root: Path) -> None:
    def write_half() -> None:
        with remote.open_write("file") as writer:
            writer.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert os.listdir(root) == []


def test_a_read_only_one_changes_nothing(root: Path) -> None:
    (root / "file").write_text("x")
    with RemoteFilesystem(HostExecutor(root), python=sys.executable, read_only=True) as remote:
        assert remote.read_only
        assert remote.read("file").content == "x"
        for change in (
            lambda: remote.write("file", "y"), lambda: remote.delete("file"), lambda: remote.mkdir("d"),
            lambda: remote.open_write("file"),
        ):  # fmt: skip
            with pytest.raises(PermissionError, match="Read-only"):
                change()


def test_a_symlink_that_leads_out_is_refused(remote: RemoteFilesystem, root: Path) -> None:
    (root / "link").symlink_to("/etc")
    for call in (lambda: remote.read("link/passwd"), lambda: remote.write("link/x", "x"), lambda: remote.list("link")):
        with pytest.raises(PermissionError, match="outside"):
            call()


def test_the_program_is_removed_at_the_end_and_copied_again_when_it_is_lost(root: Path) -> None:
    with RemoteFilesystem(HostExecutor(root), python=sys.executable) as remote:
        first = program_of(remote)
        assert (first.stat().st_mode & 0o777, (first / "program" / "__main__.py").exists()) == (0o700, True)
        shutil.rmtree(first)
        assert remote.list() == []
        second = program_of(remote)
        assert second != first
    assert not second.exists()


def test_a_missing_python_is_named(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-python"):
        RemoteFilesystem(HostExecutor(root), python="no-such-python")


class Scripted:
    """An executor that answers without running anything."""

    def __init__(self, *answers: ExecResult) -> None:
        self._answers = list(answers)

    def run(self, argv: Any, **_settings: Any) -> ExecResult:
        return self._answers.pop(0) if self._answers else ExecResult(0, b"", b"")


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([ExecResult(1, b"", b"Python 3.8 or newer is needed, and this is 3.6\n")], "this is 3.6"),
        ([ExecResult(127, b"", b"sh: python3: not found\n")], "python3: not found .exit status 127"),
        ([ExecResult(0, b"/tmp/x\n", b""), ExecResult(137, b"", b"")], "does not answer: it printed nothing"),
        ([ExecResult(0, b"/tmp/x\n", b""), ExecResult(0, b"noise", b"")], "does not answer"),
        ([ExecResult(0, b"/tmp/x\n", b""), ExecResult(-9, b"", b"", timed_out=True)], "it took too long"),
    ],
)
def test_an_executor_that_cannot_run_it_is_one_line(answers: list[ExecResult], error: str) -> None:
    with pytest.raises(OSError, match=error):
        RemoteFilesystem(Scripted(*answers))
