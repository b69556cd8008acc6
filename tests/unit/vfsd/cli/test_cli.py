"""The command line, against the real control socket of a daemon without a mount."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from tests.support.fake_workspace import FakeDaemon
from vfsd.cli.common.app import Interrupted
from vfsd.cli.common.output import counted
from vfsd.cli.common.values import in_home
from vfsd.cli.main import COMMANDS, cli
from vfsd.client.connection import ControlClient, vanished
from vfsd.machine.doctor import examine
from vfsd.machine.runtime import ensure_socket_dir, read_records, write_record
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.forks import ForkResult
from vfsd.operations.snapshots import FromOther, ProblemRecord, Undo
from vfsd.wire import messages as m
from vfsd.wire.options import declared_options


def run(*args: str | bytes) -> Result:
    return CliRunner().invoke(cli, [os.fsdecode(arg) for arg in args])


def ok(*args: str | bytes) -> str:
    result = run(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def fails(*args: str | bytes) -> str:
    """What standard error says; the exit status is 1, and it is the one line."""
    result = run(*args)
    assert result.exit_code == 1, (result.output, result.exception)
    assert result.stderr.startswith("vfsd: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("vfsd: error: ").rstrip("\n")


def as_json(*args: str | bytes) -> Any:
    return json.loads(ok(*args, "--json"))


def last(daemon: FakeDaemon, method: str) -> Any:
    return [params for name, params in daemon.requests if name == method][-1]


# -- help -------------------------------------------------------------------------------------------
# A -w would have no meaning in these commands.
ON_NO_WORKSPACE = {"attach", "mount", "doctor", "completion", "store", "hooks", "run", "persisted", "pull"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_shows_an_example(command: str) -> None:
    text = ok(command, "--help")
    assert f"  vfsd {command}" in text.partition("Examples:")[2] or f"$(vfsd {command}" in text
    assert "--json" in text
    assert ("--workspace" in text) == (command not in ON_NO_WORKSPACE)


def test_the_table_of_commands_says_what_each_commands_help_begins_with() -> None:
    context = click.Context(cli)
    for name, (_, line) in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert (command.help or "").splitlines()[0] == line


def test_help_lists_every_command_once() -> None:
    listed = [line.split()[0] for line in ok("--help").splitlines() if line.startswith("  ") and line.split()]
    assert all(listed.count(name) == 1 for name in COMMANDS)


def test_help_imports_nothing_that_takes_long() -> None:
    code = (
        "import sys\nfrom vfsd.cli.main import cli\n"
        "try: cli(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'trio', 'rich', 'pyfuse3', 'msgspec', 'asyncio', 'vfsd.machine.runtime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["snapshot", "list", "diff", "mount"])
def test_a_short_command_in_a_pipe_needs_neither_trio_nor_rich_nor_pyfuse3(daemon: FakeDaemon, command: str) -> None:
    ok("snapshot", "base")
    code = (
        "import sys\nfrom vfsd.cli.main import cli\n"
        f"try: cli([{command!r}{', sys.argv[1]' if command == 'mount' else ''}])\nexcept SystemExit: pass\n"
        "print(sorted({'trio', 'rich', 'pyfuse3', 'asyncio'} & set(sys.modules)))"
    )
    missing = f"{daemon.mountpoint}/missing/place"
    done = subprocess.run([sys.executable, "-c", code, missing], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# -- which workspace --------------------------------------------------------------------------------
READING = ("status", "snapshots", "timeline", "diff", "log", "restore base --dry-run", "discard --dry-run", "policy")
CHANGING = (
    "snapshot", "drop base", "restore base", "restore --undo", "discard", "apply", "import x.zip", "fork {place}",
    "merge demo", "adopt demo", "unmount", "unmount --discard", "upgrade", "compact", "exec true", "policy --hide x",
    "push file:///tmp/no-such", "rewind", "fs write x", "fs rm x", "fs exec true",
)  # fmt: skip


def test_outside_of_every_workspace_a_command_that_reads_says_which_one_it_takes(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("snapshot", "base")
    monkeypatch.delenv("VFSD_WORKSPACE")
    for words in READING:
        for as_document in ([], ["--json"]):
            result = run(*words.split(), *as_document)
            assert f"using demo ({daemon.mountpoint}), the only workspace running" in result.stderr, words


def test_outside_of_every_workspace_a_command_that_changes_something_needs_a_name_or_a_path(
    daemon: FakeDaemon, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "x.zip").write_bytes(b"")
    monkeypatch.delenv("VFSD_WORKSPACE")
    for line in CHANGING:
        words = line.format(place=workdir / "fork").split()
        result = run(*words)
        assert result.exit_code != 0, words
        assert "the current directory is in no workspace: pick one with -w NAME" in result.output + result.stderr, words
    assert daemon.requests == []
    run("restore", "--undo", f"{daemon.mountpoint}/src")
    assert [method for method, _ in daemon.requests] == ["restore"]


def test_w_is_taken_before_and_after_the_command(
    daemon: FakeDaemon, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VFSD_WORKSPACE")
    with FakeDaemon("other", str(workdir / "other")):
        assert as_json("-w", "demo", "status")["name"] == "demo"
        assert as_json("status", "-w", "other")["name"] == "other"
        assert as_json("-w", "demo", "status", "-w", "other")["name"] == "other"
        assert "the current directory is in no workspace" in fails("status")


def test_the_environment_picks_a_workspace_and_w_overrides_it(
    daemon: FakeDaemon, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeDaemon("other", str(workdir / "other")):
        monkeypatch.setenv("VFSD_WORKSPACE", "other")
        assert as_json("status")["name"] == "other"
        assert as_json("status", "-w", "demo")["name"] == "demo"


def test_the_directory_one_is_in_picks_a_workspace_even_when_it_is_gone(
    daemon: FakeDaemon, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Path(daemon.mountpoint, "gone")
    gone.mkdir()
    monkeypatch.chdir(gone)
    with FakeDaemon("other", str(workdir / "other")):
        assert as_json("status")["name"] == "demo"
        gone.rmdir()
        assert as_json("status")["name"] == "demo"


def test_no_workspace_is_an_error_that_says_what_to_type() -> None:
    assert "vfsd mount" in fails("status")


# -- errors -----------------------------------------------------------------------------------------
def test_an_error_is_one_line_and_with_json_a_document_too(daemon: FakeDaemon) -> None:
    assert "no such snapshot" in fails("drop", "nothing")
    result = run("drop", "nothing", "--json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 1
    assert (error["errno"], error["path"]) == ("ENOENT", "nothing")
    assert "no such snapshot" in error["message"]
    assert result.stderr.startswith("vfsd: error: ")


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (["snapsot"], "did you mean snapshot or snapshots?"),
        (["satus"], "did you mean status?"),
        (["unmont"], "did you mean unmount or mount?"),
        (["fs", "raed", "x"], "did you mean read?"),
        (["store", "lst"], "did you mean list?"),
    ],
)
def test_a_command_that_is_misspelled_gets_a_suggestion(words: list[str], suggested: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert suggested in result.output
    assert result.output.count("\n") == 1
    assert "did you mean" not in run("xyzzy").stderr


def test_a_snapshot_name_that_is_misspelled_gets_a_suggestion(daemon: FakeDaemon) -> None:
    ok("snapshot", "before-refactor")
    ok("snapshot", "turn-1")
    for words in (["drop"], ["restore"], ["diff"], ["diff", "turn-1"], ["export", "x.zip", "--snapshot"]):
        text = fails(*words, "befor-refactor")
        assert text == "no such snapshot: befor-refactor; did you mean before-refactor?", words
    assert fails("drop", "xyzzy") == "no such snapshot: xyzzy; `vfsd snapshots` lists them"
    error = json.loads(run("drop", "turn1", "--json").stdout)["error"]
    assert (error["errno"], error["path"]) == ("ENOENT", "turn1")
    assert error["message"].endswith("did you mean turn-1?")


def test_a_workspace_name_that_is_misspelled_gets_a_suggestion(daemon: FakeDaemon) -> None:
    assert "did you mean demo?" in fails("status", "-w", "dmeo")
    assert "did you mean demo?" in fails("unmount", "deme")
    assert "did you mean" not in fails("status", "-w", "xyzzy")


def test_what_a_restore_could_not_do_is_named_and_makes_it_fail(daemon: FakeDaemon) -> None:
    ok("snapshot", "one")
    daemon.problems = [ProblemRecord(f"path-{number}", "for no good reason") for number in range(25)]
    result = run("restore", "one")
    assert result.exit_code == 1
    assert "restored one" in result.stdout
    *notes, last_line = result.stderr.splitlines()
    assert notes == [f"vfsd: path-{number}: for no good reason" for number in range(20)]
    assert last_line.startswith("vfsd: error: 25 paths could not be restored")
    result = run("restore", "one", "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["problems"]) == 25
    del daemon.problems[1:]
    assert run("restore", "one").stderr.endswith("error: 1 path could not be restored\n")


def test_an_engine_that_does_not_exist_is_refused_with_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "toy_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vfsd.engines]\ntoy = toy:Engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "'steam' is not one of 'auto', 'native', 'pyfuse3', 'toy'" in run("mount", "--engine", "steam", "x").stderr


def test_a_snapshot_says_what_it_lacks(daemon: FakeDaemon) -> None:
    daemon.unreadable = ["secret", "another"]
    result = run("snapshot", "one")
    assert (result.exit_code, result.stdout) == (0, "one\n")
    assert result.stderr == "vfsd: secret, and 1 more: could not be read, and is not in the snapshot\n"


def test_a_snapshot_of_another_directory_is_asked_for_by_its_real_path(daemon: FakeDaemon, workdir: Path) -> None:
    (workdir / "real").mkdir()
    (workdir / "alias").symlink_to("real")
    ok("snapshot", "one")
    ok("restore", "one", "--of", f"host:{workdir}/alias", "--store", f"{workdir}/s")
    assert last(daemon, "restore").source == FromOther("one", f"host:{workdir}/real", f"{workdir}/s")


def test_a_daemon_that_is_gone_is_told_without_a_traceback(workdir: Path) -> None:
    with FakeDaemon("demo", str(workdir)) as fake:
        record = fake.record
    ensure_socket_dir()
    write_record(record)
    try:
        text = fails("snapshot", "-w", "demo")
        assert "the daemon of demo is dead" in text
        assert "vfsd unmount demo" in text
    finally:
        os.unlink(record.socket.removesuffix(".sock") + ".json")


def test_control_c_ends_a_command_that_waits_with_status_130_and_says_what_became_of_it(daemon: FakeDaemon) -> None:
    daemon.silent = True
    command = [sys.executable, "-m", "vfsd.cli.main", "snapshot"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert daemon.asked.wait(30)
        child.send_signal(signal.SIGINT)
        assert child.communicate() == (b"", b"vfsd: error: stopped: no snapshot was taken\n")
    assert child.returncode == 130


def test_a_reader_that_goes_away_ends_the_command_quietly(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.patch = [b"+line\n" * 10_000] * 100
    command = [sys.executable, "-m", "vfsd.cli.main", "diff", "--patch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read(6) == b"+line\n"
        child.stdout.close()
        said = child.stderr.read()
    assert said == b""


# -- snapshots --------------------------------------------------------------------------------------
def test_a_snapshot_prints_its_name_alone_in_a_pipe(daemon: FakeDaemon) -> None:
    assert ok("snapshot") == "snap-1\n"
    assert ok("snapshot", "mine", "--tag", "a remark") == "mine\n"
    assert daemon.snapshots["mine"] == daemon.live
    assert "exists" in fails("snapshot", "mine")


def test_snapshots_are_a_line_of_fields_each(daemon: FakeDaemon) -> None:
    ok("snapshot", "one", "--tag", "the first")
    daemon.live[b"new"] = b"12345"
    ok("snapshot", "two")
    lines = [line.split("\t") for line in ok("snapshots").splitlines()]
    assert lines == [
        ["one", "2026-01-02T03:04:05Z", "2", "11", "+2 ~0 -0", "user", "the first", "-"],
        ["two", "2026-01-02T03:04:05Z", "3", "16", "+1 ~0 -0", "user", "-", "-"],
    ]
    assert [one["name"] for one in as_json("snapshots")["snapshots"]] == ["one", "two"]
    assert ok("snapshots", "--no-changes").splitlines()[0].split("\t")[4] == "-"


def test_drop_deletes_snapshots(daemon: FakeDaemon) -> None:
    ok("snapshot", "one")
    ok("snapshot", "two")
    none_is_dropped = fails("drop", "one", "nope")
    assert "no such snapshot: nope" in none_is_dropped
    assert "nothing was dropped" in none_is_dropped
    assert list(daemon.snapshots) == ["one", "two"]
    answer = as_json("drop", "one", "two", "one")
    assert answer == {"dropped": ["one", "two"], "steps": [], "undo_steps": 0, "redo_steps": 0}
    assert daemon.snapshots == {}


# -- restore ----------------------------------------------------------------------------------------
def test_restore_says_what_it_did_and_how_to_undo_it(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    before = dict(daemon.live)
    daemon.live |= {b"a.txt": b"two\n", b"new": b""}
    text = ok("restore", "base")
    assert daemon.live == before
    assert "1 modified, 1 removed" in text
    assert "before-2" in text
    assert "vfsd restore --undo" in text
    ok("restore", "--undo")
    assert daemon.live[b"a.txt"] == b"two\n"


def test_a_dry_run_prints_the_changes_and_changes_nothing(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.live |= {b"a.txt": b"two\n", b"new": b""}
    del daemon.live[b"src/main.c"]
    before = dict(daemon.live)
    assert ok("restore", "base", "--dry-run") == "M a.txt\nD new\nA src/main.c\n"
    assert daemon.live == before


def test_paths_limit_a_restore_and_count_from_the_root(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.live |= {b"a.txt": b"two\n", b"src/main.c": b"no\n"}
    ok("restore", "base", "src/../src/")
    assert daemon.live == {b"a.txt": b"two\n", b"src/main.c": b"int x;\n"}
    ok("restore", "base", f"{daemon.mountpoint}/a.txt")
    assert daemon.live[b"a.txt"] == b"one\n"


def test_inside_the_mount_paths_count_from_the_current_directory(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("snapshot", "base")
    Path(daemon.mountpoint, "src").mkdir()
    monkeypatch.chdir(f"{daemon.mountpoint}/src")
    ok("restore", "base", "main.c", "../a.txt", "-n")
    assert last(daemon, "restore").paths == ["src/main.c", "a.txt"]
    ok("restore", "base", "..", "-n")
    assert last(daemon, "restore").paths == []
    assert "is not in the workspace" in fails("restore", "base", "../../etc")


def test_a_path_outside_the_workspace_is_refused_before_anything_is_asked(daemon: FakeDaemon) -> None:
    for path in ("../x", "/etc/passwd", f"{daemon.mountpoint}-other/x"):
        assert "is not in the workspace" in fails("restore", "base", path)
    assert daemon.requests == []


def test_a_mountpoint_reached_by_a_symlink_is_known(daemon: FakeDaemon, workdir: Path) -> None:
    (workdir / "link").symlink_to(daemon.mountpoint)
    ok("snapshot", "base")
    ok("restore", "base", f"{workdir}/link/a.txt", "-n")
    assert last(daemon, "restore").paths == ["a.txt"]


def test_names_that_are_no_utf8_go_there_and_back(daemon: FakeDaemon) -> None:
    name = b"caf\xe9 \\ \n\x1b[31m"
    ok("snapshot", "base")
    daemon.live[name] = b"x"
    assert ok("diff") == "A caf\\xe9 \\\\ \\x0a\\x1b[31m\n"
    assert m.from_wire_path(ok("diff").rstrip("\n")[2:]) == name
    ok("restore", "base", "-n", b"./" + name)
    assert [m.from_wire_path(path) for path in last(daemon, "restore").paths] == [name]


def test_names_come_out_as_utf8_also_where_the_locale_is_ascii(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.live["é".encode()] = b""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "vfsd.cli.main", "diff"]
    assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == "A é\n".encode()


def test_a_name_that_the_encoding_cannot_say_is_no_traceback(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.live["日".encode()] = b""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", "from vfsd.cli.main import main; main()", "diff"]
    assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == b"A \\u65e5\n"


def test_undo_takes_paths_and_no_snapshot(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    ok("restore", "base")
    ok("restore", "--undo", "src", "a.txt")
    params = last(daemon, "restore")
    assert (params.source, params.paths) == (Undo(), ["src", "a.txt"])


def test_an_argument_is_an_archive_when_it_looks_like_one_and_is_there(daemon: FakeDaemon, workdir: Path) -> None:
    archive = workdir / "old.zip"
    ok("snapshot", "old.zip")
    assert "restored old.zip" in ok("restore", "old.zip")
    archive.touch()
    daemon.archives[str(archive)] = {b"from-zip": b"1"}
    ok("restore", "old.zip")
    assert daemon.live == {b"from-zip": b"1"}
    (workdir / "plain").touch()
    assert "no such snapshot" in fails("restore", "plain")
    assert "not a ZIP archive" in fails("restore", "./plain")
    assert "neither a snapshot nor an archive: missing.zip" in fails("restore", "missing.zip")


# -- diff -------------------------------------------------------------------------------------------
def test_diff_is_against_the_newest_snapshot_and_the_live_state(daemon: FakeDaemon) -> None:
    ok("snapshot", "one")
    daemon.live[b"b"] = b"1"
    ok("snapshot", "two")
    daemon.live[b"c"] = b"1"
    assert ok("diff") == "A c\n"
    assert ok("diff", "one") == "A b\nA c\n"
    assert ok("diff", "one", "two") == "A b\n"
    assert ok("diff", "two", "one") == "D b\n"
    assert ok("diff", "one", "one") == ""
    assert ok("diff", "one", "--names") == "b\nc\n"
    assert as_json("diff", "one", "two")["counts"] == {"added": 1, "modified": 0, "removed": 0}


def test_each_kind_of_change_has_its_letter(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    kinds = ["added", "modified", "removed", "type", "metadata"]
    daemon.forced_changes = [ChangeRecord(kind, kind, "file") for kind in kinds]  # type: ignore[arg-type]
    daemon.forced_changes.append(ChangeRecord("dir", "added", "directory"))
    assert [line[0] for line in ok("diff").splitlines()] == ["A", "M", "D", "T", "m", "A"]
    assert ok("diff").endswith("A dir/\n")


def test_what_follows_two_dashes_limits_the_diff(daemon: FakeDaemon) -> None:
    ok("snapshot", "one")
    daemon.live |= {b"src/new": b"1", b"other": b"1", b"-x": b"1"}
    assert ok("diff", "--", "src") == "A src/new\n"
    assert ok("diff", "one", "--", "-x", "other") == "A -x\nA other\n"


def test_stat_is_a_table_as_git_has_it(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.forced_changes = [
        ChangeRecord("a.txt", "modified", "file", 10, 20, lines_added=3, lines_removed=1),
        ChangeRecord("longer-name", "added", "file", None, 9, binary=True),
        ChangeRecord("mode", "metadata", "file", 1, 1),
        ChangeRecord("sub", "removed", "directory", lines_added=0, lines_removed=0),
    ]
    assert ok("diff", "--stat").splitlines() == [
        " a.txt       |   4 +++-",
        " longer-name | Bin 0 -> 9 bytes",
        " mode        |   0 metadata file",
        " sub/        |   0 removed directory",
        " 4 paths changed, 3 insertions(+), 1 deletion(-)",
    ]
    assert last(daemon, "diff").mode == "stat"


def test_a_big_stat_is_scaled_and_nothing_vanishes(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.forced_changes = [
        ChangeRecord("big", "modified", "file", lines_added=100_000, lines_removed=1),
        ChangeRecord("small", "modified", "file", lines_added=1, lines_removed=0),
    ]
    big, small, _ = ok("diff", "--stat").splitlines()
    assert len(big) < 80
    assert big.endswith("+-")
    assert small.endswith(" 1 +")


def test_a_patch_comes_byte_by_byte_as_the_daemon_wrote_it(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.patch = [b"--- a/x\n+caf\xe9\n", b"\x00\r\n"]
    result = run("diff", "--patch")
    assert result.exit_code == 0, result.stderr
    assert result.stdout_bytes == b"--- a/x\n+caf\xe9\n\x00\r\n"
    assert "patch_base64" in as_json("diff", "--patch")
    daemon.patch = ["+é\n".encode()]
    assert as_json("diff", "-p")["patch"] == "+é\n"


def test_a_patch_that_lacks_something_says_so_and_fails(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.patch = [b"+1\n"]
    daemon.omitted = [ProblemRecord("logs", "an empty directory")]
    result = run("diff", "--patch")
    assert (result.exit_code, result.stdout) == (0, "+1\n")
    assert result.stderr == "vfsd: not in this patch: logs (an empty directory)\n"
    daemon.problems = [ProblemRecord(f"fifo{n}", "a special file") for n in range(30)]
    result = run("diff", "--patch")
    assert (result.exit_code, result.stdout) == (1, "+1\n")
    *named, more, error = result.stderr.splitlines()
    assert named[1] == "vfsd: not in this patch: fifo0 (a special file)"
    assert len(named) == 20
    assert "more" in more
    assert "vfsd export" in error
    result = run("diff", "--patch", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (len(answer["problems"]), len(answer["omitted"]), answer["patch"]) == (30, 1, "+1\n")


MANY = 25_000  # more than one message lists


def test_a_long_diff_is_listed_whole_everywhere(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.forced_changes = [ChangeRecord(f"f\n{n}", "added", "file", None, 1, lines_added=1) for n in range(MANY)]
    names = [f"f\\x0a{n}" for n in range(MANY)]
    assert ok("diff").splitlines() == [f"A {name}" for name in names]
    assert ok("diff", "--names").splitlines() == names
    *table, totals = ok("diff", "--stat").splitlines()
    assert [line.partition("|")[0].strip() for line in table] == names
    assert totals == f" {MANY:,} paths changed, {MANY:,} insertions(+)"
    answer = as_json("diff")
    assert [change["path"] for change in answer["changes"]] == [f"f\n{n}" for n in range(MANY)]
    assert answer["truncated"] is False
    assert answer["counts"]["added"] == MANY


def test_a_long_dry_run_is_listed_whole(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    daemon.live |= {b"f%d" % n: b"" for n in range(MANY)}
    assert len(ok("restore", "base", "--dry-run").splitlines()) == MANY
    assert len(as_json("restore", "base", "--dry-run")["changes"]) == MANY


@pytest.mark.extended
@pytest.mark.parametrize("words", [["diff"], ["diff", "--stat"], ["diff", "--patch"], ["diff", "--json"]])
def test_a_reader_that_pauses_holds_nobody_up_and_gets_everything(daemon: FakeDaemon, words: list[str]) -> None:
    ok("snapshot", "base")
    daemon.patch = [b"+line\n" * 10_000] * 50
    daemon.forced_changes = [ChangeRecord(f"file{n}", "added", "file") for n in range(100_000)]
    command = [sys.executable, "-m", "vfsd.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        # Before a byte is read: the daemon has said all it has to say.
        assert daemon.diffed.wait(30)
        said = child.stdout.read()
    assert child.returncode == 0
    expected = 50 * 10_000 * 6 if "--patch" in words else 100_000 * len("A file1\n")
    assert len(said) >= expected


def test_patterns_go_to_the_daemon(daemon: FakeDaemon) -> None:
    ok("snapshot", "base")
    ok("diff", "--exclude", "*.log", "--exclude", "build/", "--include", "*.c")
    assert (last(daemon, "diff").exclude, last(daemon, "diff").include) == (["*.log", "build/"], ["*.c"])
    ok("diff", "--patch", "--include-git")
    assert last(daemon, "diff").include_git
    ok("export", "out.zip", "--exclude", ".git", "--include", "*.c")
    assert (last(daemon, "export").exclude, last(daemon, "export").include) == ([".git"], ["*.c"])
    assert "--patch" in run("diff", "--include-git").stderr


# -- archives ---------------------------------------------------------------------------------------
def test_export_and_import_take_paths_relative_to_the_current_directory(daemon: FakeDaemon, workdir: Path) -> None:
    assert "exported 2 files" in ok("export", "out.zip")
    assert daemon.archives[str(workdir / "out.zip")] == daemon.live
    assert "--force" in fails("export", "out.zip")
    daemon.live[b"a.txt"] = b"changed"
    ok("export", "out.zip", "--force")
    daemon.live = {b"mine": b"1"}
    text = ok("import", "out.zip")
    assert set(daemon.live) == {b"mine", b"a.txt", b"src/main.c"}
    assert "2 added" in text
    assert "vfsd restore --undo" in text


def test_a_snapshot_can_be_exported(daemon: FakeDaemon, workdir: Path) -> None:
    ok("snapshot", "base")
    daemon.live.clear()
    assert as_json("export", "old.zip", "--snapshot", "base")["files"] == 2
    assert "no such snapshot" in fails("export", "x.zip", "--snapshot", "nothing")


# -- list, status, unmount --------------------------------------------------------------------------
def test_list_is_a_line_for_each_workspace(daemon: FakeDaemon, workdir: Path) -> None:
    with FakeDaemon("other", str(workdir / "other")):
        rows = [line.split("\t") for line in ok("list").splitlines()]
        assert [row[:4] for row in rows] == [
            ["demo", daemon.mountpoint, "memory", "alive"],
            ["other", f"{workdir}/other", "memory", "alive"],
        ]
        assert [one["name"] for one in as_json("list")["workspaces"]] == ["demo", "other"]
        assert [one["name"] for one in as_json("list", "-w", "other")["workspaces"]] == ["other"]


def test_an_empty_list_is_empty() -> None:
    assert ok("list") == ""
    assert as_json("list") == {"workspaces": []}


def test_status_is_names_and_values(daemon: FakeDaemon) -> None:
    values = dict(line.split("\t") for line in ok("status", "demo").splitlines())
    assert values["name"] == "demo"
    assert values["files"] == "2"
    assert values["size"] == "11"
    assert values["max-bytes"] == "-"
    assert "counted" not in values


def test_unmount_names_who_holds_a_busy_workspace(daemon: FakeDaemon) -> None:
    daemon.holders = ["pid 12 (bash)"]
    text = fails("unmount")
    assert "pid 12 (bash)" in text
    assert "vfsd unmount demo --lazy" in text
    assert not daemon.unmounted
    assert as_json("unmount", "demo", "--lazy")["unmounted"][0]["holders"] == ["pid 12 (bash)"]
    assert daemon.unmounted


def test_when_unmount_returns_the_daemon_has_ended(daemon: FakeDaemon) -> None:
    assert ok("unmount") == f"unmounted demo from {daemon.mountpoint}\n"
    assert daemon.ended


def test_a_workspace_that_another_client_unmounts_meanwhile_is_unmounted(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ControlClient.call

    def vanish(self: ControlClient, method: str, *args: Any, **options: Any) -> Any:
        real(self, method, *args, **options)
        raise vanished("/run/demo.sock", method)

    monkeypatch.setattr(ControlClient, "call", vanish)
    assert ok("unmount", "--discard") == f"unmounted demo from {daemon.mountpoint}\n"


def test_unmount_all_goes_on_after_a_failure_and_tells_what_was_done(daemon: FakeDaemon, workdir: Path) -> None:
    daemon.holders = ["pid 12 (bash)"]
    with FakeDaemon("other", str(workdir / "other")) as other:
        result = run("unmount", "--all", "--json")
        assert "demo: busy" in result.stderr
        assert other.unmounted
        assert not daemon.unmounted
        assert run("unmount", "--all", "demo").exit_code == 2
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    failed, done = answer["unmounted"]
    assert (failed["name"], failed["mountpoint"], failed["error"]["errno"]) == ("demo", daemon.mountpoint, "EBUSY")
    assert done["name"] == "other"
    assert "error" not in done
    assert answer["error"] == failed["error"]


def test_a_workspace_whose_daemon_is_dead_is_listed_and_cleared_away(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workdir)
    with subprocess.Popen(["true"]) as ended:
        pass
    with FakeDaemon("demo", str(workdir)) as fake:
        record = msgspec.structs.replace(fake.record, pid=ended.pid, pid_start_ticks=1)
    write_record(record)
    assert ok("list").split("\t")[3] == "dead"
    result = run("unmount", "demo")
    assert result.exit_code == 0
    assert "dead" in result.stderr
    assert read_records() == []


# -- completion -------------------------------------------------------------------------------------
def complete(line: str, **environ: str) -> list[str]:
    """What <Tab> offers after `line`."""
    words = line.split(" ")
    environment = {
        **os.environ,
        "_VFSD_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        **environ,
    }
    command = [sys.executable, "-c", "from vfsd.cli.main import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [item.partition(",")[2] for item in done.stdout.splitlines() if item]


def test_completion_offers_nothing_where_there_is_nothing_to_ask(workdir: Path) -> None:
    assert complete("vfsd drop x") == []
    assert complete("vfsd drop x", VFSD_WORKSPACE="nobody") == []
    Path(ensure_socket_dir(), "broken.json").write_text("{")
    try:
        assert complete("vfsd status -w x") == []
    finally:
        Path(ensure_socket_dir(), "broken.json").unlink()


def test_completion_does_not_wait_for_a_daemon_that_is_silent(daemon: FakeDaemon) -> None:
    daemon.silent = True
    assert complete("vfsd drop x") == []
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(daemon.socket)  # it was not that nobody listened
    assert daemon.requests[-1][0] == "snapshots"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ok("completion", shell)
    assert f"_VFSD_COMPLETE={shell}_complete" in script
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert ok("completion") == script


# -- doctor -----------------------------------------------------------------------------------------
def test_doctor_says_of_each_thing_whether_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine()  # once: workspaces of other tests come and go
    monkeypatch.setattr("vfsd.machine.doctor.examine", lambda *, deep: found)
    result = run("doctor", "--json")
    answer = json.loads(result.stdout)
    missing = [one for one in answer["findings"] if not one["ok"] and not one["optional"]]
    assert answer["ok"] == (not missing)
    assert result.exit_code == (1 if missing else 0)
    lines = [line.split("\t") for line in run("doctor").stdout.splitlines()]
    assert [line[1] for line in lines] == [one["topic"] for one in answer["findings"]]
    assert {line[0] for line in lines} <= {"ok", "missing", "optional"}


# -- wrong usage that says what was meant ------------------------------------------------------------
def refused(*args: str) -> str:
    result = run(*args)
    assert result.exit_code == 2, (result.output, result.exception)
    return result.stderr


def test_diff_takes_one_form_of_answer(daemon: FakeDaemon) -> None:
    for one, other in (("--stat", "--patch"), ("--stat", "--names"), ("--patch", "--names")):
        assert f"{one} and {other} exclude each other" in refused("diff", one, other)


def test_a_path_in_place_of_a_snapshot_is_named_as_such(daemon: FakeDaemon, workdir: Path) -> None:
    (workdir / "notes").touch()
    ok("snapshot", "one")
    assert (
        fails("diff", "one", "notes")
        == "this is a path, not a snapshot; paths follow `--`: `vfsd diff -- notes`: notes"
    )
    assert (
        fails("diff", "one", "nothing")
        == "no such snapshot: nothing; `vfsd snapshots` lists them, and paths follow `--`"
    )


@pytest.mark.parametrize("name", ["undo", "redo", "read", "grep"])
def test_a_command_that_is_part_of_another_one_is_pointed_to(name: str) -> None:
    assert f"it is `vfsd {'restore --' if name.endswith('do') else 'fs '}{name}`" in refused(name)


@pytest.mark.parametrize(("alias", "command"), [("umount", "unmount"), ("ls", "list"), ("rm", "drop")])
def test_a_usual_name_of_other_programs_is_an_alias(alias: str, command: str) -> None:
    help_text = ok(alias, "--help")
    assert help_text == ok(command, "--help").replace(f" {command} ", f" {alias} ", 1)


def test_an_alias_with_the_arguments_of_a_file_command_says_what_to_use() -> None:
    assert "`vfsd fs ls PATH` lists a directory" in refused("ls", "src")
    assert "`vfsd fs rm PATH` deletes files" in refused("rm", "-rf", "src")


def test_help_is_a_command_too() -> None:
    assert ok("help") == ok("--help")
    assert ok("help", "fs", "read") == ok("fs", "read", "--help")
    assert "no such command: 'nothing'" in refused("help", "nothing")
    assert ok("-V") == ok("--version")
    assert ok("-V").startswith("vfsd 0.")


@pytest.mark.parametrize(("command", "option"), [("snapshot", "--tag"), ("diff", "--exclude"), ("export", "--include")])
def test_an_option_without_its_value_points_to_the_commands_help(command: str, option: str) -> None:
    assert f" {command} --help`" in refused(command, option)


def test_an_archive_needs_a_file_name(daemon: FakeDaemon, workdir: Path) -> None:
    assert "is a directory: name a file in it" in refused("export", f"{workdir}/")


def test_a_home_directory_is_expanded_after_a_backends_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert in_home("host:~/project") == "host:/home/me/project"
    assert in_home("overlay:~") == "overlay:/home/me"
    assert in_home("host:a~/b") == "host:a~/b"
    assert in_home("container:~x") == "container:~x"


def test_counts_have_the_right_number() -> None:
    assert [counted(number, "file") for number in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert counted(2, "path was", "paths were") == "2 paths were"


def test_a_fork_command_that_is_stopped_says_that_no_fork_is_left(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([ForkResult("kids-1", str(tmp_path / "1"), "", 1, "native", "fork-1")])

    def fork(*_: object) -> ForkResult:
        answer = next(answers, None)
        if answer is None:
            raise Interrupted("stopped: no fork was made", signal.SIGINT, errno.ECANCELED)
        return answer

    monkeypatch.setattr("vfsd.cli.forks._fork", fork)
    result = run("fork", str(tmp_path), "--count", "3")
    assert result.exit_code == 130
    assert "stopped: no fork was made" in result.stderr


# -- timeline ---------------------------------------------------------------------------------------
def test_the_timeline_has_each_state_with_its_changes_and_authors(daemon: FakeDaemon) -> None:
    files = len(daemon.live)
    ok("snapshot", "one", "--tag", "a remark")
    daemon.live[b"new"] = b""
    ok("snapshot", "two")
    daemon.live.clear()
    daemon.authors = [("git", 1), ("make", 2)]
    rows = [line.split("\t") for line in ok("timeline").splitlines()]
    assert [[row[0], *row[2:]] for row in rows] == [
        ["one", f"+{files} ~0 -0", "-", "user", "a remark", "-"],
        ["two", "+1 ~0 -0", "-", "user", "-", "-"],
        ["-", f"+0 ~0 -{files + 1}", "make, git", "live", "-", "-"],
    ]
    assert [row[1][:10] for row in rows] == ["2026-01-02", "2026-01-02", "-"]


def test_the_timeline_can_be_limited_to_the_newest_states(daemon: FakeDaemon) -> None:
    for name in ("one", "two", "three"):
        ok("snapshot", name)
    result = run("timeline", "-n", "2")
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == ["three", "-"]
    assert result.stderr == "vfsd: 2 older snapshots not shown; `vfsd timeline -n 4` shows all\n"
    answer = as_json("timeline", "-n", "2")
    assert ([state["name"] for state in answer["states"]], answer["older"]) == (["three", None], 2)


def test_the_timeline_without_counts_compares_nothing(daemon: FakeDaemon) -> None:
    ok("snapshot", "one")
    assert [state["changes"] for state in as_json("timeline", "--no-changes")["states"]] == [None, None]
    assert not [name for name, _ in daemon.requests if name == "diff"]
    assert not last(daemon, "snapshots").changes


def test_the_timeline_without_snapshots_is_the_live_state(daemon: FakeDaemon) -> None:
    (state,) = as_json("timeline")["states"]
    assert (state["name"], state["kind"], state["changes"]) == (None, "live", None)


def test_the_timeline_of_a_workspace_without_a_log_names_no_programs(daemon: FakeDaemon) -> None:
    daemon.authors = None
    answer = as_json("timeline")
    assert (answer["states"][0]["authors"], answer["authors_since"]) == (None, None)


def test_the_timeline_says_how_far_the_log_reaches_back(daemon: FakeDaemon) -> None:
    daemon.log_dropped = 1
    assert "the log does not reach back to changes before 2026-01-0" in run("timeline").stderr


def test_the_timeline_starts_again_if_the_newest_snapshot_is_dropped_meanwhile(daemon: FakeDaemon) -> None:
    ok("snapshot", "one")
    ok("snapshot", "two")
    daemon.drop_before_diff = "two"
    assert [state["name"] for state in as_json("timeline")["states"]] == ["one", None]


def test_the_help_of_mount_shows_ten_options_and_help_all_every_one() -> None:
    def options(text: str) -> set[str]:
        return set(re.findall(r"^  (--[\w-]+)", text.partition("Options:")[2], re.MULTILINE))

    few, every = options(ok("mount", "--help")), options(ok("mount", "--help-all"))
    assert len(few - {"--help-all", "--json"}) == 10
    assert every >= few | {option.flag_of(name) for name, (_, option) in declared_options().items()}


def test_vfsd_alone_shows_the_first_commands_in_the_order_of_use() -> None:
    result = CliRunner().invoke(cli, [])
    named = re.findall(r"^  vfsd (\w+)", result.stderr, re.MULTILINE)
    assert (result.exit_code, result.stdout, len(named)) == (2, "", 6)
    assert set(named) <= COMMANDS.keys()
