"""The tools and resources of `vfsd mcp`, without the SDK, against the real control socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from protocol.tools import TOOLS
from tests.support.fake_workspace import FakeDaemon
from tests.unit.vfsd.cli.test_fs import FsDaemonOnHost
from vfsd.integrations.mcp import tools
from vfsd.integrations.mcp.session import Session, restore_runtime_variable
from vfsd.integrations.mcp.tools import PATCH_BYTES, SERVED_TOOLS, describe_error, served_for
from vfsd.operations.workspace import StatusResult


@pytest.fixture
def place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def files(place: Path) -> Iterator[FsDaemonOnHost]:
    """A daemon with the tools for files and commands."""
    with FsDaemonOnHost("demo", str(place)) as daemon:
        yield daemon


@pytest.fixture
def snapshots(place: Path) -> Iterator[FakeDaemon]:
    """A daemon with snapshots."""
    with FakeDaemon("demo", str(place), live={b"a.txt": b"one\n"}) as daemon:
        yield daemon


def call(name: str, /, session: Session | None = None, **arguments: Any) -> str:
    return anyio.run(SERVED_TOOLS[name].call, arguments, session or Session(), lambda _: None)


# -- the list ---------------------------------------------------------------------------------------
def test_every_tool_of_the_protocol_is_offered_with_its_own_words() -> None:
    for name, tool in TOOLS.items():
        served = SERVED_TOOLS[name]
        assert (served.description, served.json_schema()) == (tool.description, tool.json_schema())
    assert SERVED_TOOLS.keys() - TOOLS.keys() == {"snapshot", "snapshots", "restore", "revert", "diff", "log"}


def test_every_schema_is_an_object() -> None:
    assert {tool.json_schema()["type"] for tool in SERVED_TOOLS.values()} == {"object"}


def test_the_hints_say_what_a_tool_may_do() -> None:
    reading = {name for name, tool in SERVED_TOOLS.items() if tool.hints.read_only}
    destroying = {name for name, tool in SERVED_TOOLS.items() if tool.hints.destructive}
    reaching_out = {name for name, tool in SERVED_TOOLS.items() if tool.hints.open_world}
    assert reading == {"ls", "read_file", "glob", "grep", "snapshots", "diff", "log"}
    assert destroying == {"write_file", "edit_file", "rm", "restore", "revert", "shell", "python"}
    assert reaching_out == {"shell", "python"}


def status(**values: Any) -> StatusResult:
    others: dict[str, Any] = dict.fromkeys(StatusResult.__struct_fields__)
    return StatusResult(**{**others, "read_only": False, **values})


def test_a_workspace_gets_the_tools_that_work_in_it() -> None:
    def names(status: StatusResult | None) -> set[str]:
        return {tool.name for tool in served_for(status)}

    everything = SERVED_TOOLS.keys()
    assert names(None) == names(status(commands="on this host")) == everything
    assert names(status()) == everything - {"shell", "python"}
    reading = status(commands="on this host", read_only=True)
    assert names(reading) == everything - {"write_file", "edit_file", "rm", "restore", "revert"}


# -- files and commands -----------------------------------------------------------------------------
def test_files_are_written_read_edited_and_deleted(files: FsDaemonOnHost) -> None:
    assert call("write_file", path="src/a b.txt", content="one\ntwo\n") == "Wrote src/a b.txt (8 bytes)"
    assert (
        call("edit_file", path="src/a b.txt", old_text="two", new_text="2")
        == "Edited src/a b.txt in 1 place (6 bytes now)"
    )
    assert call("read_file", path="src/a b.txt") == "     1\tone\n     2\t2"
    assert call("ls") == "src/"
    assert call("ls", path="src") == "src/a b.txt  6 bytes"
    assert call("rm", path="src", recursive=True) == "Deleted src (2 entries)"
    assert call("ls") == ". is empty"


def test_an_absolute_path_below_the_mountpoint_is_a_path_in_the_workspace(files: FsDaemonOnHost) -> None:
    call("write_file", path=f"{files.mountpoint}/a.txt", content="x")
    assert call("ls") == "a.txt  1 bytes"


@pytest.mark.parametrize("path", ["/etc/passwd", "../x"])
def test_a_path_outside_of_the_workspace_is_refused(files: FsDaemonOnHost, path: str) -> None:
    with pytest.raises(ValueError, match="is not in the workspace"):
        call("read_file", path=path)


def test_content_that_does_not_fit_into_a_request_is_written(files: FsDaemonOnHost) -> None:
    assert call("write_file", path="large", content="x" * 2_000_000) == "Wrote large (2000000 bytes)"


def test_searches_find_files_and_lines(files: FsDaemonOnHost) -> None:
    call("write_file", path="src/a.py", content="x = 1\ny = 2\n")
    assert call("glob", pattern="*.py") == "src/a.py"
    assert call("grep", pattern="y =") == "src/a.py\n     2\ty = 2"


def test_names_that_are_not_utf_8_are_escaped(files: FsDaemonOnHost) -> None:
    call("write_file", path=os.fsdecode(b"a\xff"), content="x")
    assert call("ls") == "a\\xff  1 bytes"
    assert call("glob", pattern="*") == "a\\xff"
    assert call("grep", pattern="x") == "a\\xff\n     1\tx"


def test_commands_run_in_the_workspace(files: FsDaemonOnHost) -> None:
    assert call("shell", command="pwd; echo no >&2; exit 3") == (
        f"{files.mountpoint}\nstandard error:\nno\n(exit status 3)"
    )
    assert call("python", code="print(1 + 1)") == "2"


@pytest.mark.parametrize("arguments", [{}, {"path": 1}, {"path": "a", "nope": 1}, {"path": "a", "offset": -1}])
def test_wrong_arguments_are_a_value_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"path|field|int"):
        call("read_file", **arguments)


def test_an_error_is_described_without_an_errno(files: FsDaemonOnHost) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        call("read_file", path="missing")
    assert describe_error(caught.value) == "No such file or directory: missing"
    assert describe_error(PermissionError(13, "Permission denied", "a\udcff")) == "Permission denied: a\\xff"


# -- snapshots --------------------------------------------------------------------------------------
def test_a_snapshot_is_taken_compared_and_restored(snapshots: FakeDaemon) -> None:
    assert call("snapshot", name="before", tag="a step").startswith("Took snapshot before (")
    snapshots.live[b"b.txt"] = b"new\n"
    assert call("diff") == "From before to the present state: 1 added\nA b.txt"
    assert call("restore", snapshot="before", dry_run=True).startswith(
        "Would have restored before:\n1 removed\nD b.txt"
    )
    done = call("restore", snapshot="before")
    assert done.startswith("Restored before:\n1 removed\nD b.txt\nThe state before is kept as before-2")
    assert done.endswith("; undo brings it back.")
    assert b"b.txt" not in snapshots.live
    listed = call("snapshots")
    assert listed.splitlines()[0].startswith("before  ")
    assert "a step" in listed


def test_a_long_list_of_changes_is_bounded(snapshots: FakeDaemon) -> None:
    call("snapshot")
    snapshots.live.update({b"%04d" % number: b"" for number in range(50)})
    text = call("diff", limit=10)
    assert text.endswith("A 0009\n(the first 10 of 50 paths)")


@pytest.mark.parametrize("arguments", [{}, {"snapshot": "a", "undo": True}])
def test_a_restore_needs_a_snapshot_or_undo(snapshots: FakeDaemon, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give either"):
        call("restore", **arguments)


def test_a_patch_has_a_bound() -> None:
    assert PATCH_BYTES <= 1 << 20


# -- the daemon dies --------------------------------------------------------------------------------
def test_a_call_without_a_workspace_says_so(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no workspace"):
        call("ls")


def test_a_session_finds_the_workspace_again_after_its_daemon_died(place: Path) -> None:
    session = Session()

    async def steps() -> None:
        with FsDaemonOnHost("demo", str(place)):
            assert (await session.record()).name == "demo"
        with pytest.raises(OSError, match="no workspace"):
            await session.record()
        # Another workspace, although it is the only one running, is not the one that the agent works in.
        with FsDaemonOnHost("other", str(place)), pytest.raises(OSError, match="demo"):
            await session.record()
        with FsDaemonOnHost("demo", str(place)):
            assert (await session.record()).name == "demo"

    anyio.run(steps)


def test_a_client_that_passes_no_runtime_directory_gets_the_usual_one(tmp_path: Path) -> None:
    usual = tmp_path / str(os.geteuid())
    records = usual / "vfsd"
    records.mkdir(parents=True)
    environ: dict[str, str] = {}
    restore_runtime_variable(environ, str(tmp_path))
    assert environ == {}  # no workspace runs there
    (records / "demo.json").touch()
    restore_runtime_variable(environ, str(tmp_path))
    assert environ == {"XDG_RUNTIME_DIR": str(usual)}
    for given in ({"VFSD_RUNTIME_DIR": "/x"}, {"XDG_RUNTIME_DIR": "/x"}):
        environ = dict(given)
        restore_runtime_variable(environ, str(tmp_path))
        assert environ == given


# -- resources --------------------------------------------------------------------------------------
def test_files_are_resources(files: FsDaemonOnHost) -> None:
    call("write_file", path="src/a b.py", content="x = 1\n")
    session = Session()
    (found,) = anyio.run(tools.list_resources, session)
    assert (found.uri, found.name, found.mime_type) == ("vfsd://demo/src/a%20b.py", "src/a b.py", "text/x-python")
    read = anyio.run(tools.read_resource, session, found.uri)
    assert (read.text, read.mime_type) == ("x = 1\n", "text/x-python")
    assert anyio.run(tools.resource_template, session) == "vfsd://demo/{+path}"


def test_the_list_of_resources_is_bounded(files: FsDaemonOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "LISTED", 2)
    for name in "abc":
        call("write_file", path=name, content=name)
    assert [file.name for file in anyio.run(tools.list_resources, Session())] == ["a", "b"]


def test_a_large_file_is_no_resource(files: FsDaemonOnHost) -> None:
    call("write_file", path="large", content="x" * (tools.READ_BYTES + 1))
    with pytest.raises(ValueError, match="read_file"):
        anyio.run(tools.read_resource, Session(), "vfsd://demo/large")


def test_the_path_of_a_uri_is_percent_encoded_bytes() -> None:
    assert tools.file_path("vfsd://Demo/a%FF%20b/%5Cc", "Demo") == b"a\xff b/\\c"
    assert tools.file_path("vfsd://demo/x", "Demo") == b"x"  # libraries write the host in lower case


@pytest.mark.parametrize(
    "uri",
    ["file:///etc/passwd", "vfsd://other/x", "vfsd://demo/", "vfsd://demo", "", "::", "vfsd://demo/a%00", "vfsd://[/x"],
)
def test_another_uri_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"is not a file of this server: its resources are vfsd://demo/PATH"):
        tools.file_path(uri, "demo")
