"""The fast path of the command line against the full command: same output, same requests, fewer imports."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_workspace import FakeDaemon
from vfsd.cli import fast_path
from vfsd.client.connection import ControlClient
from vfsd.client.quick_call import begin
from vfsd.client.requests import Requests
from vfsd.operations.snapshots import ProblemRecord

FULL = (sys.executable, "-m", "vfsd.cli.main")
FAST = (sys.executable, "-m", "vfsd.cli.fast_path")


def outcome(program: tuple[str, ...], *words: str) -> tuple[int, str, str]:
    done = subprocess.run([*program, *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def fast_answer(*words: str) -> str:
    """What the fast path prints; it has to answer by itself."""
    call = fast_path.begin_command(list(words))
    assert call is not None
    try:
        call.sock.settimeout(30)  # a loaded machine
        text = fast_path.answer(call, list(words))
    finally:
        call.close()
    assert text is not None
    return text


@pytest.mark.extended
@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["status", "demo"],
        ["status", "--json", "-w", "demo"],
        ["diff"],
        ["diff", "base"],
        ["snapshot", "again"],
        ["snapshot", "again", "--tag", "a remark: é", "--json"],
        ["restore", "base"],
        ["restore", "base", "--json"],
        ["restore", "same"],
        ["restore", "--undo"],
    ],
)
def test_the_answer_is_that_of_the_full_command(daemon: FakeDaemon, words: list[str]) -> None:
    def prepare() -> None:
        daemon.snapshots.clear()
        daemon.snapshots.update(
            base={b"a.txt": b"zero\n", b"gone": b""}, second={b"b c": b"", "é".encode(): b""}, same=dict(live)
        )
        daemon.live, daemon.undo_to = dict(live), "second"

    live = dict(daemon.live)
    prepare()
    assert outcome(FULL, *words) == (0, mine := _after(prepare, words), ""), mine
    requests = [json.loads(msgspec.json.encode(params)) for _, params in daemon.requests if params is not None]
    assert requests[0] == requests[1]


def _after(prepare: Callable[[], None], words: list[str]) -> str:
    prepare()
    return fast_answer(*words)


@pytest.mark.extended
@pytest.mark.parametrize(
    "words",
    [
        ["snapshot", "base"],
        ["restore", "bsae"],
        ["diff", "missing"],
        ["status", "--help"],
        ["restore", "a", "--undo"],
        ["snapshot", ""],
    ],
)
def test_failures_and_unusual_command_lines_are_those_of_the_full_command(daemon: FakeDaemon, words: list[str]) -> None:
    daemon.snapshots["base"] = {}
    assert outcome(FAST, *words) == outcome(FULL, *words)


def test_a_call_that_fails_is_sent_once(daemon: FakeDaemon) -> None:
    assert outcome(FAST, "snapshot", "base")[0] == 0
    assert outcome(FAST, "snapshot", "base")[0] == 1
    assert [method for method, _ in daemon.requests].count("snapshot") == 2


def test_remarks_about_a_snapshot_are_kept(daemon: FakeDaemon) -> None:
    daemon.unreadable = ["secret"]
    status, printed, remark = outcome(FAST, "snapshot", "s")
    assert (status, printed) == (0, "s\n")
    assert "secret: could not be read" in remark
    assert len(daemon.requests) == 1


def test_problems_of_a_restore_are_reported(daemon: FakeDaemon) -> None:
    daemon.snapshots["base"] = {}
    daemon.problems = [ProblemRecord("a.txt", "busy")]
    status, _, remark = outcome(FAST, "restore", "base")
    assert status == 1
    assert "1 path could not be restored" in remark
    assert len(daemon.requests) == 1


def test_control_characters_are_escaped(daemon: FakeDaemon) -> None:
    daemon.snapshots["base"] = {}
    daemon.live = {b"two\nlines": b""}
    assert outcome(FAST, "diff", "base") == outcome(FULL, "diff", "base") == (0, "A two\\x0alines\n", "")


def test_a_continued_call_is_never_sent_again(daemon: FakeDaemon) -> None:
    call = begin(daemon.socket, "snapshot", {"name": "a", "tag": None})
    assert call is not None
    request = Requests(daemon.mountpoint).snapshot("b")
    with ControlClient(daemon.socket, begun=call) as client, pytest.raises(ConnectionError):
        client.call(request.method, request.params)
    assert "b" not in daemon.snapshots


@given(
    st.lists(st.sampled_from(["a", "b/c", "x.zip", "--undo", "--redo", "--json", "-w", "--tag", "-n", "--", "", "-"]))
)
def test_every_command_line_is_parsed_or_left_to_the_full_command(rest: list[str]) -> None:
    for command in ("snapshot", "status", "restore", "diff"):
        try:
            parsed, arguments, options = fast_path.parse([command, *rest])
        except fast_path._UnusualError:
            continue
        assert parsed == command
        assert not {"-n", "--", "", "-"} & {*rest}
        assert len(arguments) + 2 * len({"-w", "--tag"} & {*rest}) + len({*options} & fast_path._FLAGS) == len(rest)


HEAVY = "{'click', 'rich', 'msgspec', 'trio', 'asyncio', 'dataclasses', 'typing', 'pathlib', 'tempfile', 'logging'}"


@pytest.mark.parametrize("words", [["status"], ["snapshot", "x"], ["restore", "base"], ["diff", "base"]])
def test_a_command_in_a_pipe_imports_little(daemon: FakeDaemon, words: list[str]) -> None:
    daemon.snapshots["base"] = dict(daemon.live)
    code = (
        "import sys; before = set(sys.modules)\n"
        "from vfsd.cli import fast_path\nfrom vfsd.client import quick_call\n"
        "call = fast_path.begin_command(sys.argv[1:]); call.sock.settimeout(30)\n"
        "assert fast_path.answer(call, sys.argv[1:]) is not None\n"
        f"print(sorted({HEAVY} & set(sys.modules) - before), len([n for n in sys.modules if n.startswith('vfsd')]))"
    )
    root = str(Path(fast_path.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({root!r})\n" + code, *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    modules, count = done.stdout.rsplit(maxsplit=1)
    assert modules == "[]"
    assert int(count) <= 9


def test_hooks_prints_a_command_that_takes_a_snapshot(daemon: FakeDaemon) -> None:
    command = shlex.split(outcome(FULL, "hooks")[1])
    assert command[-1] == "snapshot"
    assert outcome(tuple(command), "--tag", "from a hook") == (0, "snap-1\n", "")
    assert daemon.tags == {"snap-1": "from a hook"}


def test_the_hook_client_never_exits_with_status_2(daemon: FakeDaemon) -> None:
    command = tuple(shlex.split(outcome(FULL, "hooks")[1]))
    status, printed, remark = outcome(command, "--wrong")
    assert (status, printed) == (1, "")
    # It waits a second for the whole command, which may need longer to start.
    slow = "vfsd: the daemon has not answered for a second: the state is kept later, or not at all\n"
    assert remark in {outcome(FULL, "snapshot", "--wrong")[2], slow}
