"""vfsd-fs.pyz, the commands of `vfsd fs --root` in one file; and RemoteFilesystem, which runs it elsewhere."""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from protocol import RemoteFilesystem
from protocol.execution.executor import ExecResult
from protocol.execution.host import HostExecutor
from protocol.portable import program as installed_program
from protocol.portable.expression import Expression
from protocol.portable.package import build_program, write_program
from protocol.search.expression import Expression as Re2Expression
from protocol.testing import FilesystemContract
from tests.unit.vfsd.cli.test_fs_root import CALLS, Words, same
from tests.unit.vfsd.cli.test_fs_root import run as vfsd_fs


def _is_python(path: str | None) -> bool:
    """Whether the program runs: pyenv has one for each version of others' projects, which only prints an error."""
    return path is not None and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode


def pythons() -> list[str]:
    """The one that runs the tests, and one of every other version that is installed."""
    others = (shutil.which(f"python3.{minor}") for minor in range(8, 15) if minor != sys.version_info.minor)
    return [sys.executable, *filter(_is_python, others)]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "vfsd-fs.pyz"
    write_program(str(path))
    return path


# A Python that has loaded the program's modules, and forks for each call: they are compiled once.  For each line on its
# standard input, it runs the program with these words and standard streams.
_FORKS = """
import json, os, runpy, sys
program = sys.argv[1]
sys.path.insert(0, program)
import protocol.portable.program
for line in sys.stdin:
    words, streams = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in enumerate(streams):
            os.dup2(os.open(name, os.O_WRONLY if number else os.O_RDONLY), number)
        sys.argv[:] = [program, *words]
        sys.stdin = open(0)
        runpy.run_path(program, run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ForkingPython:
    """Runs the program in forks of a Python as `run` starts it."""

    def __init__(self, program: Path) -> None:
        self._streams = [program.with_name(name) for name in ("stdin", "stdout", "stderr")]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _FORKS, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
        )

    def __call__(self, words: Sequence[str], stdin: bytes) -> subprocess.CompletedProcess[bytes]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for stream, content in zip(self._streams, (stdin, b"", b""), strict=True):
            stream.write_bytes(content)
        self._process.stdin.write(json.dumps([words, list(map(str, self._streams))]).encode() + b"\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(words, status, *(stream.read_bytes() for stream in self._streams[1:]))

    def end(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


forking_python = functools.cache(ForkingPython)


@pytest.fixture(scope="module", autouse=True)
def _ends_with_the_module(program: Path) -> Iterator[None]:
    python = forking_python(program)
    yield
    python.end()
    forking_python.cache_clear()


def run(program: Path, *words: str | bytes, stdin: bytes = b"", python: str | None = None) -> tuple[int, Any]:
    """Run the program, in a new interpreter if `python` is given."""
    arguments = [os.fsdecode(word) for word in words]
    if python is None:
        done = forking_python(program)(arguments, stdin)
    else:
        command = [python, "-I", "-S", str(program), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, cwd="/")
    assert done.stderr == b""
    assert done.stdout.count(b"\n") == 1
    return done.returncode, json.loads(done.stdout)


def without_text(answer: tuple[int, Any]) -> tuple[int, Any]:
    """The answer without the text of an error that argparse, or `re`, words in its own way."""
    return answer if answer[1]["ok"] else (answer[0], {"ok": False})


@pytest.mark.extended
@pytest.mark.slow
def test_its_answers_are_those_of_vfsd_fs(
    program: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("/")
    for words, stdin in CALLS:
        ours = same(vfsd_fs("--root", str(tmp_path / "other"), *words, stdin=stdin), str(tmp_path / "other"))
        theirs = same(run(program, "--root", str(root), *words, stdin=stdin), str(root))
        if ours[0] == 2 or words[0] in {"grep", "exec"} or words[:2] == ("edit", "src/a.py"):
            ours, theirs = without_text(ours), without_text(theirs)
        if words[0] == "exec" and ours[0] != theirs[0]:
            assert words[1:3] == ("--timeout", "1e9")  # wrong usage here, refused by the daemon there
            continue
        assert theirs == ours, words


@pytest.mark.extended
def test_it_is_written_in_the_language_of_python_3_8(program: Path) -> None:
    with zipfile.ZipFile(program) as packed:
        for name in packed.namelist():
            ast.parse(packed.read(name), name, feature_version=(3, 8))


def test_it_runs_on_every_python_that_is_installed(program: Path, root: Path) -> None:
    for python in pythons():
        check_runs(python, program, root)


def check_runs(python: str, program: Path, root: Path) -> None:
    for name in ("a.py", "deep/b.py", "deep/cab.txt"):
        assert run(program, "--root", str(root), "write", name, stdin=b"needle\n", python=python)[0] == 0

    def paths(*words: str) -> list[str]:
        data = run(program, "--root", str(root), *words, python=python)[1]["data"]
        return [each["path"] for each in data.get("files", data.get("matches"))]

    assert paths("glob", "*.py") == ["a.py", "deep/b.py"]
    assert paths("glob", "*a*b*.t[w-y]t") == ["deep/cab.txt"]  # atomic groups, where `re` has them
    assert paths("grep", r"ne+\w*$", "--glob", "{a,b}.py") == ["a.py", "deep/b.py"]
    edit = json.dumps({"old_text": "needle", "new_text": "pin"}).encode()
    assert run(program, "--root", str(root), "edit", "a.py", stdin=edit, python=python)[1]["data"]["replacements"] == 1
    done = run(program, "exec", "--root", str(root), "-c", "cat a.py; exit 3", python=python)[1]["data"]
    assert (done["exit_status"], done["stdout"]) == (3, "pin\n")


def test_exec_runs_a_line_of_the_shell_with_arguments(program: Path, root: Path) -> None:
    data = run(program, "--root", str(root), "exec", "-c", 'echo "$1|$2" >&2; pwd', "--", "a b", "c")[1]["data"]
    assert (data["stdout"], data["stderr"]) == (f"{root}\n", "a b|c\n")


def test_a_command_is_killed_at_its_timeout_with_all_that_it_started(program: Path, root: Path) -> None:
    line = "sleep 1000 & echo $! > pid; setsid sleep 1000 & wait"
    data = run(program, "--root", str(root), "exec", "--timeout", "0.5", "-c", line)[1]["data"]
    assert (data["exit_status"], data["timed_out"]) == (-9, True)
    assert not Path("/proc", (root / "pid").read_text().strip()).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_ends_with_the_program(program: Path, root: Path, number: int) -> None:
    words = ["--root", str(root), "exec", "-c", "echo $$ > pid; exec sleep 1000"]
    with subprocess.Popen([sys.executable, str(program), *words], stdout=subprocess.PIPE) as process:
        while not ((root / "pid").exists() and (root / "pid").read_text()):
            time.sleep(0.01)
        process.send_signal(number)
    command = Path("/proc", (root / "pid").read_text().strip())
    while command.exists():  # after SIGKILL, the supervisor outlives the program for a moment
        time.sleep(0.01)


@pytest.mark.parametrize(
    "words",
    [("read", "link/secret"), ("ls", "link"), ("write", "link/new"), ("rm", "link/secret"), ("grep", "x", "link"),
     ("glob", "*", "link"), ("exec", "--cwd", "link", "--", "pwd")],
)  # fmt: skip
def test_a_symlink_that_leads_out_is_refused(program: Path, root: Path, tmp_path: Path, words: Words) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("x")
    (root / "link").symlink_to("../outside")
    status, envelope = run(program, "--root", str(root), *words)
    assert (status, envelope["error"].partition(":")[0]) == (1, "symlink leads outside the root")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "a command is missing"), (("--root",), "expected one argument"), (("ls", ""), "an empty string"),
        (("exec",), "give a COMMAND"), (("read", "f", "--limit", "0"), "not a number from 1"),
        (("exec", "--timeout", "nan", "true"), "not a number of seconds"), (("write", "f", "--mode", "x"), "invalid"),
        (("exec", "--output-limit", "1TB", "true"), "not a size"), (("--rot", ".", "ls"), "invalid choice"),
    ],
)  # fmt: skip
def test_wrong_usage_is_an_envelope_and_status_2(program: Path, words: Words, error: str) -> None:
    status, envelope = run(program, *words)
    assert (status, envelope["ok"]) == (2, False)
    assert error in envelope["error"]


def test_nothing_of_the_current_directory_is_imported(program: Path, root: Path) -> None:
    (root / "json.py").write_text("raise SystemExit('imported')")
    done = subprocess.run([sys.executable, str(program), "ls"], cwd=root, capture_output=True, check=True)
    assert json.loads(done.stdout)["data"]["entries"][0]["path"] == "json.py"


# -- the file --------------------------------------------------------------------------------------------
def test_the_same_version_gives_the_same_bytes() -> None:
    script = "import sys; from protocol.portable.package import build_program; sys.stdout.buffer.write(build_program())"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    again = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert again.stdout == build_program()


def test_vfsd_fs_writes_it_and_replaces_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "vfsd-fs.pyz"
    for _ in range(2):
        status, envelope = vfsd_fs("--write-pyz", str(path))
        assert (status, envelope["data"]) == (0, {"path": str(path), "size_bytes": path.stat().st_size})
    assert subprocess.run([path, "--help"], capture_output=True, check=True).stdout.startswith(b"usage: vfsd-fs")
    (tmp_path / "precious").write_text("mine")
    status, envelope = vfsd_fs("--write-pyz", str(tmp_path / "precious"))
    assert (status, envelope["ok"]) == (1, False)
    assert (tmp_path / "precious").read_text() == "mine"
    missing = str(tmp_path / "missing" / "x")
    status, envelope = vfsd_fs("--write-pyz", missing)
    assert (status, envelope["error"]) == (1, f"No such file or directory: {missing}")
    assert sorted(os.listdir(tmp_path)) == ["precious", "vfsd-fs.pyz"]


# -- its expressions -------------------------------------------------------------------------------------
TEXT = "one\nTwo über 2\n\n  three\r\n\\Z (x)\n".encode()


@pytest.mark.parametrize(
    "pattern",
    ["o", "^t", "e$", r"\bt", r"\d\z", "", "[^a-z ]", "ü.*2", r"\\Z \(", "(?i)TWO", "^$", r"\s\S", "a|e", "."],
)
def test_it_finds_what_re2_finds(pattern: str) -> None:
    assert list(Expression(pattern).hits(TEXT)) == list(Re2Expression(pattern).hits(TEXT))


@pytest.mark.parametrize(
    "pattern", ["(", "(?=a)", "(?<!a)", r"(a)\1", "(?>a)", "a**", r"\Z", r"\C", "(?#x)", "[", "\udcff"]
)
def test_it_refuses_what_re2_refuses(pattern: str) -> None:
    for kind in (Expression, Re2Expression):
        with pytest.raises(ValueError, match="invalid regular expression at position"):
            kind(pattern)


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
            status = installed_program.main(["call"])
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


def test_a_symlink_that_leads_a_remote_filesystem_out_is_refused(remote: RemoteFilesystem, root: Path) -> None:
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
