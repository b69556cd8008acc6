"""Wrong use of every command but `mount`, and odd surroundings: one line, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.fake_workspace import FakeDaemon
from tests.support.session_directories import new_directory
from vfsd.cli import main as command_line
from vfsd.cli.main import cli

NOT_UTF8 = os.fsdecode(b"\xff")
HUGE = "9" * 40
LONG = "x" * 5000

# Wrong use, as words after `vfsd`; the exit status of the first ones is 2, and of each is 1 or 2.
USAGE = [
    ["nonsense"],
    ["--bogus"],
    ["mount"],
    ["mount", "--engine", "steam", "/x"],
    ["snapshot", "a", "b"],
    ["restore"],
    ["restore", "one", "--store", "s"],
    ["restore", "--undo", "--of", "host:d"],
    ["diff", "a", "b", "c"],
    ["list", "-x"],
]
WRONG = [
    *USAGE,
    ["snapshot", ""],
    ["snapshot", NOT_UTF8],
    ["snapshot", "--tag", NOT_UTF8],
    ["restore", ""],
    ["restore", "one", ""],
    ["restore", "--undo", ""],
    ["restore", NOT_UTF8],
    ["restore", "one", "--of", ""],
    ["restore", "one", "../../" + LONG],
    ["drop"],
    ["drop", ""],
    ["drop", "one", ""],
    ["drop", NOT_UTF8],
    ["drop", LONG],
    ["diff", ""],
    ["diff", "one", "--", ""],
    ["export"],
    ["export", ""],
    ["export", "x.zip", "--snapshot", ""],
    ["export", "x.zip", "--snapshot", NOT_UTF8],
    ["import", ""],
    ["import", "nothing.zip"],
    ["import", LONG],
    ["apply", ""],
    ["discard", ""],
    ["status", ""],
    ["status", NOT_UTF8],
    ["status", "a\nb"],
    ["status", "-w", ""],
    ["-w", "", "status"],
    ["-w", NOT_UTF8, "status"],
    ["unmount", ""],
    ["unmount", "demo", "--all"],
    ["unmount", "-w", "demo", "other"],
    ["upgrade", "-w", "demo", "other"],
    ["exec"],
    ["exec", "--"],
    ["exec", "--timeout", "-1", "--", "true"],
    ["exec", "--timeout", "nan", "--", "true"],
    ["exec", "--timeout", "inf", "--", "true"],
    ["exec", "--output-limit", HUGE, "--", "true"],
    ["exec", "--env", "=x", "--", "true"],
    ["exec", "--cwd", "", "--", "true"],
    ["completion", "tcsh"],
    ["doctor", "--shallow"],
    ["store", "list", "--store", ""],
    ["store", "drop", ""],
    ["store", "drop", "host:/nothing", ""],
    ["store", "gc", "--wait", "-1"],
    ["store", "gc", "--wait", "nan"],
    ["fs", "read"],
    ["fs", "read", ""],
    ["fs", "read", "a.txt", "--offset", "-1"],
    ["fs", "read", "a.txt", "--offset", "1.5"],
    ["fs", "grep", "("],
    ["fs", "grep", NOT_UTF8],
    ["fs", "rm", ""],
    ["fs", "exec", "--timeout", "nan", "--", "true"],
    ["fs", "exec", "--timeout", "1e300", "--", "true"],
]


@pytest.fixture(scope="module")
def daemon(session_dir: str) -> Iterator[FakeDaemon]:
    place = new_directory(session_dir, "wrong-usage")
    (place / "mnt").mkdir()
    before = os.getcwd()
    os.chdir(place)
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeDaemon("demo", str(place / "mnt"), live={b"a.txt": b"one\n"}, snapshots={"one": {}}) as fake,
    ):
        patch.setenv("VFSD_WORKSPACE", "demo")
        yield fake
    os.chdir(before)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def test_an_error_cuts_a_very_long_path_in_its_message_only() -> None:
    path = "/none/" + "a" * 194 + "/end"
    answer = json.loads(run("mount", path, "--json").stdout)["error"]
    assert answer["path"] == path
    assert answer["message"].endswith(f": {path[:100]} ... {path[-100:]}")


@pytest.mark.parametrize("words", WRONG, ids=lambda words: repr(" ".join(words))[:60])
def test_wrong_use_is_one_line_and_with_json_one_document(words: list[str], daemon: FakeDaemon) -> None:
    before = dict(daemon.live), dict(daemon.snapshots)
    result = run(*words)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in {1, 2, 125}
    assert result.output.count("\n") == 1
    assert result.stderr.startswith("vfsd: error: ") or words[0] == "fs"
    assert words not in USAGE or (result.exit_code == 2 and "--help`" in result.stderr)
    # What follows "--" is the command's.
    at = words.index("--") if "--" in words else len(words)
    result = run(*words[:at], "--json", *words[at:])
    assert isinstance(result.exception, SystemExit), result.exception
    error = json.loads(result.stdout)["error"]
    assert words not in USAGE or result.stderr.startswith(f"vfsd: error: {error['message']}")
    assert (daemon.live, daemon.snapshots) == before


def vfsd(*words: str, **settings: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "vfsd.cli.main", *words]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **settings)  # type: ignore[call-overload,no-any-return]


@pytest.mark.extended
@pytest.mark.parametrize("redirection", ["", ">&-", "2>&-", "<&-", ">&- 2>&- <&-", ">/dev/full", "2>/dev/full"])
@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["drop", "nothing", "--json"], ["restore"]])
def test_closed_and_full_standard_streams_are_no_traceback(
    redirection: str, words: list[str], daemon: FakeDaemon
) -> None:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "vfsd.cli.main", *words]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode in ({0} if words[0] == "status" and redirection != ">/dev/full" else {1, 2})
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
    assert done.stderr.count(b"\n") <= 1
    if words[0] == "status" and redirection == ">/dev/full":
        assert b"No space left on device" in done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("words", [["status"], ["list"], ["snapshots"], ["store", "list"], ["doctor"], ["drop", "x"]])
@pytest.mark.parametrize(
    "environment", [{}, {"LANG": "C"}, {"LC_ALL": "C", "TERM": ""}, {"TERM": "nonsense", "HOME": "relative"}]
)
def test_a_bare_environment_is_no_traceback(
    environment: dict[str, str], words: list[str], daemon: FakeDaemon, session_dir: str
) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "VFSD_RUNTIME_DIR", "VFSD_TEST_SESSION")}
    place = {"VFSD_STORE_DIR": f"{session_dir}/store"} if words[0] == "store" else {}
    done = vfsd(*words, env={**kept, **place, **environment})
    assert done.returncode in {0, 1}
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") <= 1


@pytest.mark.parametrize(
    "words", [["mount", "m"], ["export", "x.zip"], ["import", "x.zip"], ["restore", "one", "a", "-n"], ["status"]]
)
def test_a_current_directory_that_was_removed_is_no_traceback(words: list[str], daemon: FakeDaemon) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    command = ["sh", "-c", script, "sh", sys.executable, "-P", "-m", "vfsd.cli.main", *words, "-w", "demo"]
    if words[0] == "mount":
        command = command[:-2]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") <= 1
    if words[0] in {"mount", "export", "import"}:
        assert done.returncode == 1
        assert b"current directory was removed" in done.stderr


def test_an_unexpected_exception_is_a_line_that_says_how_to_see_it(daemon: FakeDaemon) -> None:
    code = (
        "import vfsd.cli.common.app as app, vfsd.cli.main as main\n"
        "def broken(self, **_): raise KeyError('unexpected')\n"
        "app.App.candidate = broken\nmain.main()"
    )
    command = [sys.executable, "-c", code, "status", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "KeyError: 'unexpected'; this is a bug in vfsd: VFSD_DEBUG=1 shows the traceback" in done.stderr
    assert "this is a bug" in json.loads(done.stdout)["error"]["message"]
    environment = {**os.environ, "VFSD_DEBUG": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert "Traceback" in done.stderr


def test_an_unexpected_exception_is_not_hidden_from_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, **_: object) -> None:
        raise KeyError("unexpected")

    monkeypatch.setattr("vfsd.cli.common.app.App.candidate", broken)
    assert isinstance(CliRunner().invoke(command_line.cli, ["status"]).exception, KeyError)


@pytest.mark.parametrize("module", ["typing", "click", "vfsd.cli.common.app", "vfsd.cli.workspaces"])
def test_ctrl_c_during_the_start_prints_no_traceback(module: str) -> None:
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "sys.argv = ['vfsd', 'list']\n"
        "from vfsd.cli.main import main\n"
        "main()\n"
    )
    # -S: `site` would import some of the modules before.
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr, "Abort" in done.stderr) == (130, False, False)


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        (["snapshot", "unwritten"], ", but the snapshot was taken; `vfsd drop` removes it"),
        (["restore", "one", "--dry-run"], ""),
        (["snapshot", "--help"], ""),
        (["--version"], ""),
    ],
)
def test_an_answer_that_cannot_be_written_says_what_was_done(
    words: list[str], outcome: str, daemon: FakeDaemon
) -> None:
    command = [sys.executable, "-m", "vfsd.cli.main", *words]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == f"vfsd: error: cannot write to standard output: No space left on device{outcome}\n"


def test_a_byte_that_is_not_utf8_is_shown_as_xff(daemon: FakeDaemon) -> None:
    for words in (
        ["status", "-w", NOT_UTF8],
        ["mount", "new", "--name", NOT_UTF8],
        ["snapshot", NOT_UTF8],
        ["fs", "ls", "-w", NOT_UTF8, "--escaped"],
    ):
        result = run(*words)
        assert "xff'" in result.output, words
        assert "udcff" not in result.output, words
