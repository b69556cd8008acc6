"""The command line as a person sees it: a real terminal (a pty), with headings, colours and progress."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_workspace import FakeDaemon
from vfsd.cli.common.output import human_size, show_path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def daemon(workdir: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon("demo", str(workdir / "mnt"), live={b"a[red].txt": b"x" * 2048}) as fake:
        yield fake


def on_a_terminal(*args: str, **variables: str) -> str:
    """What the terminal receives, with its escape sequences."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "TZ": "UTC"}
    environment.pop("NO_COLOR", None)
    environment |= variables
    command = [sys.executable, "-m", "vfsd.cli.main", *args]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        received = b""
        # EIO is what a pty says at its end (pty(7)).
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 65536):
                received += piece
        os.close(ours)
    return received.decode().replace("\r\n", "\n")


def test_a_table_has_headings_and_rounded_sizes(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot", "base", "--tag", "[bold]not markup[/bold]")
    text = ESCAPES.sub("", on_a_terminal("snapshots"))
    assert text.split()[:3] == ["NAME", "TIME", "FILES"]
    assert "2.0 KiB" in text
    assert "2026-01-02 03:04:05" in text
    assert "[bold]not markup[/bold]" in text


def test_changes_have_colours(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot")
    daemon.live[b"new"] = b""
    assert on_a_terminal("diff") == "\x1b[32mA\x1b[0m new\n"


def test_a_file_name_cannot_send_escapes_to_the_terminal(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot")
    daemon.live[b"\x1b]0;owned\x07\xc2\x9b31m"] = b""
    text = on_a_terminal("diff", "--names")
    assert text == "\\x1b]0;owned\\x07\\xc2\\x9b31m\n"


def test_long_work_shows_progress_and_then_the_result(daemon: FakeDaemon, workdir: Path) -> None:
    text = on_a_terminal("export", str(workdir / "x.zip"))
    assert "exporting" in text
    assert "exported 1 file " in ESCAPES.sub("", text)


def test_a_table_breaks_no_name_in_two(daemon: FakeDaemon) -> None:
    name, tag = "n" * 60, "what the user asked for " * 3
    on_a_terminal("snapshot", name, "--tag", tag)
    text = ESCAPES.sub("", on_a_terminal("snapshots"))
    assert f"{name} " in text
    assert tag in text


def test_json_on_a_terminal_is_indented(daemon: FakeDaemon) -> None:
    assert '\n  "name": "demo",\n' in on_a_terminal("status", "--json")


def test_an_error_is_one_line_there_too(daemon: FakeDaemon) -> None:
    text = ESCAPES.sub("", on_a_terminal("drop", "nothing"))
    assert text == "vfsd: error: no such snapshot: nothing; `vfsd snapshots` lists them\n"


@pytest.mark.parametrize("words", [["drop", "nothing"], ["nonsense"], ["mount", "--engine", "steam", "x"], ["--bogus"]])
def test_an_error_has_colours_unless_the_terminal_or_the_user_has_none(words: list[str], daemon: FakeDaemon) -> None:
    assert ESCAPES.search(on_a_terminal(*words))
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}):
        text = on_a_terminal(*words, **variables)
        assert text.startswith("vfsd: error: ")
        assert "\x1b" not in text
    assert ESCAPES.search(on_a_terminal(*words, NO_COLOR=""))  # https://no-color.org: when it is not empty


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_changes_and_findings_have_no_colours_either(variables: dict[str, str], daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot")
    daemon.live[b"new"] = b""
    assert on_a_terminal("diff", **variables) == "A new\n"
    assert "\x1b" not in on_a_terminal("doctor", **variables)


def test_sizes_are_rounded_to_what_a_person_reads() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 2**20 - 1: "1.0 MiB", 150 * 2**30: "150 GiB"}
    assert {size: human_size(size) for size in sizes} == sizes


def test_a_path_that_is_shown_is_still_a_wire_path() -> None:
    assert show_path("a\tb\\\\") == "a\\x09b\\\\"
