"""The tools, over filesystems of several kinds."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol import HostFilesystem, InMemoryFilesystem, RemoteFilesystem
from protocol.adapters.path_files import resolve
from protocol.adapters.path_filesystem import PathFilesystem
from protocol.adapters.trees import TreeFiles
from protocol.execution.host import HostExecutor
from protocol.filesystem import Filesystem, SnapshotableFilesystem
from protocol.linux.posix_acl import ACCESS, DEFAULT
from protocol.tools import (
    TOOLS,
    DirectoryCreated,
    EventHook,
    FileDeleted,
    FileEdited,
    FileEvent,
    FileWritten,
    ToolContext,
    tools_for,
)
from tests.support.trees import DictTree
from tests.support.waiting import longer_limits


@pytest.fixture(params=["memory", "host"])
def filesystem(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    return InMemoryFilesystem() if request.param == "memory" else HostFilesystem(tmp_path)


@pytest.fixture
def events() -> list[FileEvent]:
    return []


@pytest.fixture
def context(filesystem: Filesystem, events: list[FileEvent]) -> ToolContext:
    return ToolContext(filesystem, events.append)


def call(name: str, context: ToolContext, **arguments: Any) -> Any:
    return TOOLS[name].call(arguments, context)


def shown(name: str, context: ToolContext, **arguments: Any) -> str:
    return TOOLS[name].render(call(name, context, **arguments))


# -- the registry -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_a_closed_schema_whose_properties_are_described(name: str) -> None:
    schema = TOOLS[name].json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert "$ref" not in json.dumps(schema)
    assert all(value["description"] for value in schema["properties"].values())
    assert TOOLS[name].description


def test_a_schema_says_what_is_required_and_what_bounds_there_are() -> None:
    schema = TOOLS["read_file"].json_schema()
    assert schema["required"] == ["path"]
    assert schema["properties"]["limit"]["minimum"] == 1
    assert set(TOOLS["write_file"].json_schema()["properties"]["mode"]["enum"]) == {"create", "overwrite", "append"}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"path": "a", "nonsense": 1},
        {"path": 1},
        {"path": "a", "limit": 0},
        {"path": "a", "offset": -1},
        {"path": ""},
    ],
)
def test_arguments_that_break_the_schema_are_refused(context: ToolContext, arguments: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        TOOLS["read_file"].call(arguments, context)
    with pytest.raises(msgspec.ValidationError):
        TOOLS["read_file"].call(json.dumps(arguments), context)


@pytest.mark.parametrize("name", [name for name in TOOLS if not TOOLS[name].executes])
def test_results_are_of_the_type_that_the_tool_names_and_encode_as_json(name: str, context: ToolContext) -> None:
    call("write_file", context, path="d/f", content="text\n")
    arguments = {
        "ls": {},
        "read_file": {"path": "d/f"},
        "write_file": {"path": "n", "content": ""},
        "edit_file": {"path": "d/f", "old_text": "text", "new_text": "t"},
        "glob": {"pattern": "*"},
        "grep": {"pattern": "t"},
        "rm": {"path": "d/f"},
    }[name]
    result = TOOLS[name].call(json.dumps(arguments), context)  # the text that a model wrote
    assert type(result) is TOOLS[name].result
    assert msgspec.json.decode(msgspec.json.encode(result), type=TOOLS[name].result) == result


def test_without_an_executor_no_tool_that_runs_commands_is_offered(context: ToolContext) -> None:
    assert set(TOOLS) - set(tools_for(context)) == {"shell", "python"}
    with pytest.raises(OSError, match="cannot run commands"):
        call("shell", context, command="true")


def test_with_an_executor_all_tools_are_offered(filesystem: Filesystem, tmp_path: Path) -> None:
    assert set(tools_for(ToolContext(filesystem, executor=HostExecutor(tmp_path)))) == set(TOOLS)


def test_a_read_only_filesystem_offers_no_tool_that_changes_it(tmp_path: Path) -> None:
    context = ToolContext(HostFilesystem(tmp_path, read_only=True))
    assert set(tools_for(context)) == {"ls", "read_file", "glob", "grep"}


# -- ls and read_file ---------------------------------------------------------------------------------
def test_ls_gives_types_sizes_and_modes_sorted_by_name(context: ToolContext) -> None:
    call("write_file", context, path="b.txt", content="12345")
    call("write_file", context, path="a/x", content="")
    result = call("ls", context)
    assert [(one.path, one.type, one.size_bytes) for one in result.entries] == [
        ("a", "directory", 0),
        ("b.txt", "file", 5),
    ]
    assert result.entries[1].mode == 0o644
    assert shown("ls", context) == "a/\nb.txt  5 bytes"


def test_ls_says_where_it_stopped(context: ToolContext) -> None:
    for name in "abc":
        call("write_file", context, path=name, content="")
    result = call("ls", context, limit=2)
    assert [one.path for one in result.entries] == ["a", "b"]
    assert result.truncated
    assert "first 2 entries" in shown("ls", context, limit=2)


def test_ls_shows_a_symlink_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("missing")
    (tmp_path / "good").symlink_to("target")
    (tmp_path / "target").write_text("abc")
    entries = {one.path: one for one in call("ls", ToolContext(HostFilesystem(tmp_path))).entries}
    assert (entries["broken"].type, entries["broken"].is_symlink) == ("symlink", True)
    assert (entries["good"].type, entries["good"].is_symlink, entries["good"].size_bytes) == ("file", True, 3)


def test_a_name_that_is_no_utf8_can_be_rendered(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("needle")
    context = ToolContext(HostFilesystem(tmp_path))
    for name, arguments in (("ls", {}), ("glob", {"pattern": "*"}), ("grep", {"pattern": "needle"})):
        text = shown(name, context, **arguments)
        assert "caf\\xe9" in text
        text.encode()


def test_read_file_numbers_lines_and_says_how_to_go_on(context: ToolContext) -> None:
    call("write_file", context, path="f", content="".join(f"line {n}\n" for n in range(1, 11)))
    text = shown("read_file", context, path="f", offset=2, limit=2)
    assert text.splitlines() == ["     3\tline 3", "     4\tline 4", "(lines 3 to 4 of 10; read on with offset=4)"]
    assert "read on" not in shown("read_file", context, path="f", offset=8)
    assert "10 lines" in shown("read_file", context, path="f", offset=99)


def test_the_numbers_that_are_shown_are_the_ones_that_offset_counts(context: ToolContext) -> None:
    call("write_file", context, path="f", content="a\x0cb\u2028c\nsecond")
    assert shown("read_file", context, path="f").split("\n")[-1] == "     2\tsecond"
    assert call("read_file", context, path="f", offset=1).content == "second"


def test_a_very_long_line_is_shortened_for_the_model_only(context: ToolContext) -> None:
    call("write_file", context, path="f", content="x" * 5000)
    assert len(call("read_file", context, path="f").content) == 5000
    assert "(3000 more characters)" in shown("read_file", context, path="f")


def test_an_empty_file_is_said_to_be_empty(context: ToolContext) -> None:
    call("write_file", context, path="f", content="")
    assert shown("read_file", context, path="f") == "f is empty"


def test_reading_a_binary_file_is_refused_clearly(context: ToolContext, filesystem: Filesystem) -> None:
    filesystem.write_bytes("b", b"\xff\x00")
    with pytest.raises(ValueError, match="'b'"):
        call("read_file", context, path="b")


# -- write_file and rm --------------------------------------------------------------------------------
def test_writing_publishes_the_directories_made_and_then_the_file(
    context: ToolContext, events: list[FileEvent]
) -> None:
    call("write_file", context, path="a/b/c", content="é")
    call("write_file", context, path="a/b/d", content="x", mode="create")
    assert events == [
        DirectoryCreated("a"),
        DirectoryCreated("a/b"),
        FileWritten("a/b/c", 2),
        FileWritten("a/b/d", 1),
    ]


def test_what_is_refused_publishes_nothing(context: ToolContext, events: list[FileEvent]) -> None:
    call("write_file", context, path="f", content="x")
    events.clear()
    with pytest.raises(FileExistsError):
        call("write_file", context, path="f", content="y", mode="create")
    with pytest.raises(FileNotFoundError):
        call("write_file", context, path="no/f", content="y", create_parents=False)
    with pytest.raises(NotADirectoryError):
        call("write_file", context, path="f/below/it", content="y")
    with pytest.raises(FileNotFoundError):
        call("rm", context, path="missing")
    assert events == []


def test_rm_needs_recursive_for_a_directory_that_is_not_empty(context: ToolContext, events: list[FileEvent]) -> None:
    call("write_file", context, path="d/f", content="")
    with pytest.raises(IsADirectoryError):
        call("rm", context, path="d")
    events.clear()
    assert call("rm", context, path="d", recursive=True).deleted == 2
    assert events == [FileDeleted("d", 2)]


# -- edit_file ----------------------------------------------------------------------------------------
@pytest.fixture
def edited(context: ToolContext, filesystem: Filesystem) -> Callable[..., bytes]:
    def edit(content: bytes, old: str, new: str, **more: Any) -> bytes:
        filesystem.write_bytes("f", content)
        call("edit_file", context, path="f", old_text=old, new_text=new, **more)
        return filesystem.read_bytes("f").content

    return edit


@pytest.mark.parametrize(
    ("content", "old", "new", "expected"),
    [
        (b"one two three", "two", "2", b"one 2 three"),
        (b"one two three", " two", "", b"one three"),
        (b"a\r\nb\r\nc\r\n", "a\nb", "1\n2\n3", b"1\r\n2\r\n3\r\nc\r\n"),
        (b"a\r\nb\r\n", "a\r\nb", "x\r\ny", b"x\r\ny\r\n"),
        (b"a\r\nb\r\n", "a\r\nb", "a\nn\nb", b"a\r\nn\r\nb\r\n"),
        (b"a\r\nb\r\n", "a\nb\r\n", "x\n\r\ny\n", b"x\r\n\r\ny\r\n"),
        (b"a\r\nb\nc\r\n", "b\n", "B\nB\n", b"a\r\nB\nB\nc\r\n"),  # of mixed line ends none is changed
        (b"\xef\xbb\xbfa = 1", "a", "b", b"\xef\xbb\xbfb = 1"),
    ],
)
def test_an_edit_changes_what_it_names_and_no_line_ends(
    edited: Callable[..., bytes], content: bytes, old: str, new: str, expected: bytes
) -> None:
    assert edited(content, old, new) == expected


def test_replace_all_replaces_every_occurrence_once(edited: Callable[..., bytes], events: list[FileEvent]) -> None:
    assert edited(b"a a a", "a", "aa", replace_all=True) == b"aa aa aa"
    assert events[-1] == FileEdited("f", 3, 8)


@pytest.mark.parametrize(
    ("content", "old", "more", "said"),
    [
        (b"x y x y x", "x", {}, "found 3 times"),
        (b"aXaXa", "aXa", {}, "found 2 times"),
        (b"one", "two", {}, "found 0 times"),
        (b"one", "two", {"replace_all": True}, "found 0 times"),
        (b"one", "One", {}, "found 0 times"),
        (b"one", "one", {"new_text": "one"}, "the same"),
        (b"one", "", {}, "old_text is empty"),
        (b"\xff one", "one", {}, "not UTF-8 text .byte 0xff at offset 0"),
    ],
)
def test_an_edit_that_is_not_exact_is_refused_and_changes_nothing(
    context: ToolContext, filesystem: Filesystem, events: list[FileEvent], content: bytes, old: str,
    more: dict[str, Any], said: str,
) -> None:  # fmt: skip
    filesystem.write_bytes("f", content)
    with pytest.raises(ValueError, match=said):
        call("edit_file", context, **{"path": "f", "old_text": old, "new_text": "new", **more})
    assert filesystem.read_bytes("f").content == content
    assert events == []


def test_an_edit_keeps_the_mode(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\necho old\n")
    script.chmod(0o751)
    call("edit_file", ToolContext(HostFilesystem(tmp_path)), path="run.sh", old_text="old", new_text="new")
    assert script.stat().st_mode & 0o7777 == 0o751
    assert script.read_text() == "#!/bin/sh\necho new\n"


def test_an_unknown_argument_is_answered_with_the_known_ones(context: ToolContext) -> None:
    for arguments in ({"path": "f", "recursively": True}, '{"path": "f", "recursively": true}'):
        with pytest.raises(ValueError, match="unknown argument 'recursively': the arguments are path, recursive"):
            TOOLS["rm"].call(arguments, context)


def test_wrong_types_are_answered_with_the_right_ones(filesystem: Filesystem, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="use write_bytes for bytes"):
        filesystem.write("f", b"1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use write for text"):
        filesystem.write_bytes("f", "1")  # type: ignore[arg-type]
    assert not filesystem.exists("f")
    for wrong in (3, b"f"):
        for search in (filesystem.glob, filesystem.grep, lambda pattern: filesystem.grep("x", glob=pattern)):
            with pytest.raises(TypeError, match="a pattern must be a str, not"):
                search(wrong)  # type: ignore[operator]
    if isinstance(filesystem, SnapshotableFilesystem):
        with pytest.raises(TypeError, match="restore takes a FilesystemSnapshot, not str"):
            filesystem.restore("snapshot")  # type: ignore[arg-type]
    for command in ("ls -l", 3):
        with pytest.raises(TypeError, match="list of words"):
            HostExecutor(tmp_path).run(command)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stdin takes bytes, not str: encode text"):
        HostExecutor(tmp_path).run(["cat"], stdin="abc")  # type: ignore[arg-type]
    with filesystem.open_write("f") as writer, pytest.raises(OSError, match="cannot seek"):
        writer.seek(0)  # type: ignore[attr-defined]


# As of mode 0770, and one more user may do everything.
OPEN_ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in ((1, 7, 2**32 - 1), (2, 7, 65534), (4, 7, 2**32 - 1), (16, 7, 2**32 - 1), (32, 0, 2**32 - 1))
)


def test_a_replaced_file_gains_no_acl_of_its_directory_and_keeps_its_own(
    filesystem: Filesystem, context: ToolContext
) -> None:
    store = filesystem._store  # type: ignore[attr-defined]
    filesystem.write("d/plain", "old")
    filesystem.write("d/own", "old")
    for name, mode, acls in (
        ("plain", 0o664, {}),
        ("own", 0o770, {ACCESS: OPEN_ACL}),
        (".", 0o777, {DEFAULT: OPEN_ACL}),
    ):
        with resolve(store, b"d/" + name.encode()) as place:
            store.set_mode(place.node, mode)
            store.set_xattrs(place.node, acls)

    for name in ("plain", "own"):
        call("edit_file", context, path=f"d/{name}", old_text="old", new_text="new")
        call("write_file", context, path=f"d/{name}", content="newer")

    for name, mode, acls in (("plain", 0o664, {}), ("own", 0o770, {ACCESS: OPEN_ACL})):
        with resolve(store, b"d/" + name.encode()) as place:
            assert (place.status.mode & 0o7777, dict(store.xattrs(place.node))) == (mode, acls), name


def test_edits_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    numbers = range(40)
    (tmp_path / "f").write_text("".join(f"{number:02}=old\n" for number in numbers))

    def edit(number: int) -> None:
        context = ToolContext(HostFilesystem(tmp_path))
        call("edit_file", context, path="f", old_text=f"{number:02}=old", new_text=f"{number:02}=new")
        call("write_file", context, path="f", content="+", mode="append")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(edit, numbers))

    content = (tmp_path / "f").read_text()
    assert (content.count("=new"), content.count("+")) == (40, 40)


def test_an_edit_is_made_again_if_the_file_was_changed_since_it_was_read(tmp_path: Path) -> None:
    executor = HostExecutor(tmp_path)
    (tmp_path / "f").write_text("a b")
    with RemoteFilesystem(executor) as remote:
        for filesystem, ours, theirs, expected in (
            (HostFilesystem(tmp_path), "a", "b", "A B"),
            (remote, "A", "B", "a b"),
        ):
            read = filesystem.read_bytes
            waiting = [theirs]

            def read_bytes(path: str, read: Any = read, waiting: Any = waiting) -> Any:
                found = read(path)
                while waiting:
                    old = waiting.pop()
                    (tmp_path / "f").write_text((tmp_path / "f").read_text().replace(old, old.swapcase()))
                return found

            filesystem.read_bytes = read_bytes  # type: ignore[method-assign]
            call("edit_file", ToolContext(filesystem), path="f", old_text=ours, new_text=ours.swapcase())
            assert (tmp_path / "f").read_text() == expected


# -- glob and grep ------------------------------------------------------------------------------------
@pytest.fixture
def project(context: ToolContext, filesystem: Filesystem) -> ToolContext:
    for path in ("src/a.py", "src/deep/b.py", "node_modules/m/c.py", ".git/d.py", "vendor/e.py", "__pycache__/f.py"):
        filesystem.write(path, "needle\n")
    filesystem.write_bytes("src/binary.py", b"\0needle\n")
    return context


def test_glob_leaves_out_what_agents_do_not_look_for(project: ToolContext) -> None:
    assert call("glob", project, pattern="*.py").paths == ["src/a.py", "src/deep/b.py"]
    assert len(call("glob", project, pattern="*.py", everything=True).paths) == 7
    assert call("glob", project, pattern="*.py", path="node_modules").paths == ["node_modules/m/c.py"]


def test_grep_leaves_out_the_same_and_binary_files_always(project: ToolContext) -> None:
    def found(**arguments: Any) -> list[str]:
        return [match.path for match in call("grep", project, pattern="needle", **arguments).matches]

    assert found() == ["src/a.py", "src/deep/b.py"]
    assert len(found(everything=True)) == 6
    assert found(glob="src/*.py") == ["src/a.py"]
    assert found(path="src/deep") == ["src/deep/b.py"]
    assert found(path="src/a.py") == ["src/a.py"]


def test_searches_say_that_they_stopped_at_their_limit(project: ToolContext) -> None:
    assert call("glob", project, pattern="*.py", limit=1).truncated
    assert not call("glob", project, pattern="*.py", limit=2).truncated
    assert call("grep", project, pattern="needle", limit=1).truncated
    assert not call("grep", project, pattern="needle", limit=2).truncated
    assert "more" in shown("glob", project, pattern="*.py", limit=1)
    assert "more" in shown("grep", project, pattern="needle", limit=1)


def test_grep_shows_files_line_numbers_and_lines(context: ToolContext) -> None:
    call("write_file", context, path="f", content="no\nA needle\n")
    match = call("grep", context, pattern="needle").matches[0]
    assert (match.line_number, match.line, match.match_start, match.match_end) == (2, "A needle", 2, 8)
    assert shown("grep", context, pattern="needle") == "f\n     2\tA needle"
    assert shown("grep", context, pattern="NEEDLE") == "no line matches"
    assert "A needle" in shown("grep", context, pattern="NEEDLE", ignore_case=True)


def test_a_search_that_is_not_wanted_any_more_ends(project: ToolContext) -> None:
    class EndedError(Exception):
        pass

    def stop() -> None:
        raise EndedError

    context = ToolContext(project.filesystem, keep_going=stop)
    for name in ("glob", "grep"):
        with pytest.raises(EndedError):
            call(name, context, pattern="needle")


# -- shell and python ---------------------------------------------------------------------------------
@pytest.fixture
def able(tmp_path: Path) -> ToolContext:
    return ToolContext(HostFilesystem(tmp_path), executor=HostExecutor(tmp_path))


def test_shell_runs_in_the_workspace(able: ToolContext, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    result = call("shell", able, command="echo made >f; pwd; echo oops >&2; exit 2", cwd="d")
    assert (result.exit_status, result.stdout, result.stderr) == (2, f"{tmp_path}/d\n", "oops\n")
    assert (tmp_path / "d" / "f").read_text() == "made\n"
    text = shown("shell", able, command="echo out; echo oops >&2; exit 2")
    assert text == "out\nstandard error:\noops\n(exit status 2)"


def test_shell_is_bash_where_there_is_one(able: ToolContext) -> None:
    assert call("shell", able, command="x=(a b); echo ${x[1]}").stdout == "b\n"


def test_shell_says_that_its_time_was_over(able: ToolContext) -> None:
    for timeout_s in longer_limits(1):
        result = call("shell", able, command="echo begun; sleep 1000", timeout_s=timeout_s)
        assert result.timed_out
        assert "killed" in TOOLS["shell"].render(result)
        if result.stdout:
            break
    assert result.stdout == "begun\n"


def test_python_runs_a_program_of_any_length(able: ToolContext) -> None:
    code = "x = 0\n" + "x += 1\n" * 50_000 + "print(x)"
    assert call("python", able, code=code).stdout == "50000\n"
    assert call("python", able, code="raise SystemExit(7)").exit_status == 7


def test_output_that_is_no_utf8_is_replaced(able: ToolContext) -> None:
    assert call("shell", able, command=r"printf '\377'").stdout == "\ufffd"


# -- events -------------------------------------------------------------------------------------------
def test_a_subscriber_that_fails_breaks_neither_the_tool_nor_the_others(
    filesystem: Filesystem, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[FileEvent] = []

    def fail(event: FileEvent) -> None:
        raise RuntimeError("a bug in a subscriber")

    hook = EventHook()
    hook.subscribe(fail)
    hook.subscribe(seen.append)
    call("write_file", ToolContext(filesystem, hook), path="f", content="x")
    call("write_file", ToolContext(filesystem, fail), path="g", content="x")
    assert seen == [FileWritten("f", 1)]
    assert filesystem.exists("g")
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == ["a bug in a subscriber"] * 2


def test_who_unsubscribes_hears_no_more() -> None:
    seen: list[FileEvent] = []
    hook = EventHook()
    unsubscribe = hook.subscribe(seen.append)
    hook(DirectoryCreated("a"))
    unsubscribe()
    unsubscribe()
    hook(DirectoryCreated("b"))
    assert seen == [DirectoryCreated("a")]


def test_a_context_that_gives_a_tree_is_searched_in_it(filesystem: Filesystem) -> None:
    tree = DictTree({b"only/in/tree": b"needle", b"link": "only/in"})
    context = ToolContext(filesystem, tree=lambda: nullcontext(tree))
    assert call("glob", context, pattern="*").paths == ["only/in/tree"]
    assert [hit.path for hit in call("grep", context, pattern="needle", path="link").matches] == ["link/tree"]


def test_a_trees_files_can_be_read_and_not_changed() -> None:
    tree = DictTree({b"d/f": b"one\ntwo\n", b"link": "d"})
    context = ToolContext(PathFilesystem(TreeFiles(tree)))
    assert call("read_file", context, path="link/f", offset=1).content == "two\n"
    assert [one.path for one in call("ls", context, path="link").entries] == ["link/f"]
    assert set(tools_for(context)) == {"ls", "read_file", "glob", "grep"}
    for name, arguments in (
        ("write_file", {"path": "d/f", "content": ""}),
        ("edit_file", {"path": "d/f", "old_text": "one", "new_text": "1"}),
        ("rm", {"path": "d/f"}),
    ):
        with pytest.raises(PermissionError):
            call(name, context, **arguments)


def test_grep_names_what_it_could_not_read() -> None:
    class Locked(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            if path.startswith(b"locked"):
                raise PermissionError(13, "Permission denied", path)
            return super().read(path, offset, size)

    names = [b"locked%02d" % number for number in range(12)]
    context = ToolContext(PathFilesystem(TreeFiles(Locked({b"a": b"x\n", **dict.fromkeys(names, b"x\n")}))))
    found = call("grep", context, pattern="x")
    assert [hit.path for hit in found.matches] == ["a"]
    assert [each.path for each in found.unreadable] == [name.decode() for name in names]
    assert (found.unreadable[0].reason, found.unreadable_count) == ("Permission denied", 12)
    text = TOOLS["grep"].render(found).splitlines()
    assert "(not searched: locked00: Permission denied)" in text
    assert text[-1] == "(not searched either: 2 more unreadable paths)"


def test_glob_names_what_it_could_not_list() -> None:
    class Locked(DictTree):
        def children(self, path: bytes) -> list[bytes]:
            if path == b"locked":
                raise PermissionError(13, "Permission denied", path)
            return super().children(path)

    context = ToolContext(PathFilesystem(TreeFiles(Locked({b"a": b"x\n", b"locked/b": b"x\n"}))))
    found = call("glob", context, pattern="*")
    assert (found.paths, [each.path for each in found.unreadable], found.unreadable_count) == (["a"], ["locked"], 1)
    assert TOOLS["glob"].render(found).splitlines() == ["a", "(not searched: locked: Permission denied)"]
