"""The command line as a person sees it: a real terminal (a pty), with headings, colours and progress."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from protocol.store import DirectorySource, Store
from tests.support.fake_workspace import FakeDaemon
from vfsd.cli.common import output
from vfsd.cli.common.changes import PatchColours
from vfsd.cli.common.output import human_size, show_path
from vfsd.wire.messages import ProgressReport

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def daemon(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    monkeypatch.setenv("VFSD_WORKSPACE", "demo")
    with FakeDaemon("demo", str(workdir / "mnt"), live={b"a[red].txt": b"x" * 2048}) as fake:
        yield fake


def on_a_terminal(*args: str, **variables: str) -> str:
    """What the terminal receives, with its escape sequences."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "TZ": "UTC"}
    environment.pop("NO_COLOR", None)
    if not variables.keys() & {"PAGER", "VFSD_PAGER"}:
        environment["VFSD_PAGER"] = "cat"
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


def test_the_timeline_fits_50_columns_and_ends_with_the_live_state(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot", "base", "--tag", "what the user asked for " * 4 + "\x1b[31m")
    daemon.live[b"new"] = b""
    daemon.authors = [("label" * 5, 3), ("c\x1bc", 2), *((f"program{number}", 1) for number in range(6))]
    on_a_terminal("snapshot", "before-restore")
    del daemon.live[b"new"]
    text = on_a_terminal("timeline", COLUMNS="50")
    plain = ESCAPES.sub("", text).splitlines()
    assert max(map(len, plain)) <= 50
    assert [line.split()[0] for line in plain if not line.startswith(" ")] == ["base", "before-restore", "live"]
    assert "before-restore  (safety)" in plain
    assert "\x1b[32m+1\x1b[0m ~0 -0\n" in text
    assert text.endswith(" +0 ~0 \x1b[31m-1\x1b[0m\n  by " + "label" * 5 + ", c\\x1bc, program0,\n    program1, ...\n")
    assert "what the user asked" in text
    assert "\\x1b[31m" in text


def test_the_timeline_goes_through_the_pager(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot", "base")
    text = on_a_terminal("timeline", VFSD_PAGER="sed s/^/paged:/")
    assert "paged:\x1b[33m\x1b[1mbase" in text


def test_a_file_name_cannot_send_escapes_to_the_terminal(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot")
    daemon.live[b"\x1b]0;owned\x07\xc2\x9b31m"] = b""
    text = on_a_terminal("diff", "--names")
    assert text == "\\x1b]0;owned\\x07\\xc2\\x9b31m\n"


def test_a_file_name_cannot_turn_the_text_around() -> None:
    assert show_path("invoice\u202efdp.exe") == "invoice\\xe2\\x80\\xaefdp.exe"
    assert show_path("\u05e9\u05dc\u05d5\u05dd \u2066x") == "\u05e9\u05dc\u05d5\u05dd \\xe2\\x81\\xa6x"


def test_long_work_shows_progress_and_then_the_result(daemon: FakeDaemon, workdir: Path) -> None:
    text = on_a_terminal("export", str(workdir / "x.zip"))
    assert "exporting" in text
    assert "exported 1 file " in ESCAPES.sub("", text)


@pytest.mark.parametrize(
    ("unit", "expected"), [("files", r"[\d,]+ files +[\d,]+ files/s"), ("bytes", r"[\d.]+ KiB +[\d.]+ [KM]iB/s")]
)
def test_a_bar_shows_its_unit_the_rate_in_it_and_the_time_left(
    unit: Literal["files", "bytes"], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(output, "on_terminal", lambda **_: True)
    monkeypatch.setattr(output, "_console", lambda **_: Console(file=shown, force_terminal=True, width=100))
    with output.progress("collecting") as report:
        assert report is not None
        for done in range(0, 40_000, 10_000):
            report(ProgressReport(1, done, 40_000, unit))
            time.sleep(0.01)  # a rate needs time
    text = ESCAPES.sub("", shown.getvalue())
    assert re.search(rf"collecting .*{expected} +\d:\d\d:\d\d", text)


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


def test_a_long_diff_goes_through_the_pager_with_colours(daemon: FakeDaemon, workdir: Path) -> None:
    on_a_terminal("snapshot")
    daemon.live |= {b"file%d" % number: b"" for number in range(100)}
    kept = workdir / "paged"
    on_a_terminal("diff", VFSD_PAGER=f"cat > {kept}; echo the pager ended")
    assert kept.read_text().splitlines()[0] == "\x1b[32mA\x1b[0m file0"
    assert len(kept.read_text().splitlines()) == 100


@pytest.mark.parametrize("variables", [{"VFSD_PAGER": "cat"}, {"PAGER": ""}, {"VFSD_PAGER": "", "PAGER": "false"}])
def test_no_pager_where_the_user_wants_none(daemon: FakeDaemon, variables: dict[str, str]) -> None:
    on_a_terminal("snapshot")
    daemon.live[b"new"] = b""
    assert on_a_terminal("diff", **variables) == "\x1b[32mA\x1b[0m new\n"


def test_a_pager_that_is_not_installed_is_named_and_left_out(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot")
    daemon.live[b"new"] = b""
    assert "the pager nosuchpager is not installed" in on_a_terminal("diff", PAGER="nosuchpager -x")
    assert on_a_terminal("diff", PAGER="nosuchpager -x").endswith("\x1b[32mA\x1b[0m new\n")


def test_a_dumb_terminal_has_no_pager(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot")
    daemon.live[b"new"] = b""
    assert on_a_terminal("diff", PAGER="echo paged", TERM="dumb") == "A new\n"


def test_a_pager_that_is_left_at_once_is_no_error(daemon: FakeDaemon) -> None:
    on_a_terminal("snapshot")
    daemon.live |= {b"%0250d" % number: b"" for number in range(2000)}
    assert on_a_terminal("diff", VFSD_PAGER="head -c 1 >/dev/null; echo left") == "left\n"


def test_a_patch_has_the_colours_of_git() -> None:
    written: list[bytes] = []
    colours = PatchColours(written.append)
    patch = (
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n same\n--- removed\n+++ added\n"
        b"diff --git a/y b/y\nnew file mode 100644\n"
    )
    for start in range(0, len(patch), 7):
        colours.feed(patch[start : start + 7])
    bold, red, green, cyan, plain = b"\x1b[1m", b"\x1b[31m", b"\x1b[32m", b"\x1b[36m", b"\x1b[m"
    assert b"".join(written).splitlines() == [
        bold + b"diff --git a/x b/x" + plain,
        bold + b"--- a/x" + plain,
        bold + b"+++ b/x" + plain,
        cyan + b"@@ -1,2 +1,2 @@" + plain,
        b" same",
        red + b"--- removed" + plain,
        green + b"+++ added" + plain,
        bold + b"diff --git a/y b/y" + plain,
        bold + b"new file mode 100644" + plain,
    ]


def test_the_list_of_a_store_is_a_narrow_table_for_each_workspace(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "store"))
    (workdir / "root").mkdir()
    store = Store()
    for workspace in ("host:/srv/one", "host:/srv/two"):
        store.take(workspace, "before", DirectorySource(workdir / "root"))
        store.take(workspace, "turn-12", DirectorySource(workdir / "root"))
    lines = [line.rstrip() for line in ESCAPES.sub("", on_a_terminal("store", "list", COLUMNS="50")).splitlines()]
    table = ["NAME", "before", "turn-12"]
    assert [line.split()[0] for line in lines if line] == ["host:/srv/one", *table, "host:/srv/two", *table]
    assert max(map(len, lines)) <= 50
