"""`vfsd fs`, against the real control socket and the real methods, over a volume that nobody has mounted."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from protocol.backends.memory import MemoryVolume
from protocol.execution.host import HostCommandRunner
from protocol.tool_messages import GrepParams
from protocol.tree import Tree
from protocol.volume import ROOT_INODE, AttributeChanges, Caller
from protocol.volume_extensions import CacheInvalidation
from tests.support.fake_workspace import FakeDaemon
from vfsd.cli.main import cli
from vfsd.client.connection import ControlClient, ControlError
from vfsd.daemon.control.calls import handlers_of
from vfsd.daemon.control.connection import ControlServer
from vfsd.daemon.control.handlers.exec import ExecMethods
from vfsd.daemon.control.handlers.fs import FsMethods
from vfsd.daemon.exec.commands import Commands
from vfsd.operations.catalogue import OPERATIONS
from vfsd.operations.fs import FsReadParams, FsWriteParams
from vfsd.wire.messages import INVALID_PARAMS
from vfsd.wire.options import MountOptions, Ready, WorkspaceOptions


class FakeMountedVolume:
    """A mounted volume without a mount: records the invalidations."""

    def __init__(self, volume: MemoryVolume) -> None:
        self.volume = self.enforced = volume
        self.change_lock = trio.Lock()
        self.invalidations: list[CacheInvalidation] = []

    def shown(self, tree: Tree) -> Tree:
        """Nothing is hidden."""
        return tree

    async def write_back_cached(self) -> None:
        """Nothing is cached."""

    async def invalidate(self, invalidation: CacheInvalidation) -> None:
        assert self.change_lock.locked()
        self.invalidations.append(invalidation)


class FsDaemon(FakeDaemon):
    """A daemon with the `fs.` methods only."""

    on_host = False

    async def _serve(self, started: threading.Event) -> None:
        self.volume = MemoryVolume(max_bytes=40 << 20)
        self.mounted = FakeMountedVolume(self.volume)
        options = MountOptions.of(self.mountpoint, self.name, exec_on_host=self.on_host)
        runner = HostCommandRunner(self.mountpoint, {"VFSD_WORKSPACE": self.name}) if self.on_host else None
        self.commands = commands = Commands(self.name, runner=runner)
        fs_methods = FsMethods(self.mounted, options.workspace, commands)  # type: ignore[arg-type]
        methods = handlers_of(fs_methods, ExecMethods(commands))
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(self.socket, methods).serve)
                started.set()


class FsDaemonOnHost(FsDaemon):
    on_host = True


@pytest.fixture
def place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place.parent)
    monkeypatch.setenv("VFSD_WORKSPACE", "demo")
    return place


@pytest.fixture
def daemon(place: Path) -> Iterator[FsDaemon]:
    with FsDaemon("demo", str(place)) as daemon:
        yield daemon
        daemon.volume.check_invariants()


def run(*args: str | bytes, stdin: bytes = b"") -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["fs", *map(os.fsdecode, args)], input=stdin)
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    return result.exit_code, json.loads(result.stdout)


def data(*args: str | bytes, stdin: bytes = b"") -> Any:
    status, envelope = run(*args, stdin=stdin)
    assert status == 0, envelope
    assert envelope.keys() == {"ok", "data"}
    assert envelope["ok"] is True
    return envelope["data"]


def error(*args: str | bytes, stdin: bytes = b"", status: int = 1) -> str:
    got, envelope = run(*args, stdin=stdin)
    assert got == status, envelope
    assert envelope.keys() == {"ok", "error"}
    assert envelope["ok"] is False
    return str(envelope["error"])


def call(daemon: FsDaemon, method: str, params: Any) -> Any:
    with ControlClient(daemon.socket) as client:
        return client.call(method, params)


# -- the envelope -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "args",
    [
        ("read",),
        ("read", "a", "b"),
        ("nonsense",),
        ("--nonsense",),
        ("ls", "--limit", "0"),
        ("read", "f", "--offset", "-1"),
        ("write", "f", "--mode", "sideways"),
        ("exec",),
        ("exec", "--env", "novalue", "--", "true"),
        ("exec", "--env", "A=\udcff", "--", "true"),
    ],
)
def test_wrong_usage_is_an_envelope_and_status_2(daemon: FsDaemon, args: tuple[str, ...]) -> None:
    assert error(*args, status=2)


def test_that_there_is_no_workspace_is_an_envelope_too(place: Path) -> None:
    assert "workspace" in error("ls")


def test_a_dead_daemon_is_an_envelope_too(daemon: FsDaemon) -> None:
    os.unlink(daemon.socket)
    assert "not running" in error("ls")


@pytest.mark.parametrize(
    ("workspace", "reason"),
    [
        ("demo", "standard output: No space left on device, but the file was written"),
        ("other", "'other' is not the name of a workspace"),
    ],
)
def test_an_envelope_that_cannot_be_written_is_a_line_on_standard_error(
    daemon: FsDaemon, workspace: str, reason: str
) -> None:
    command = [sys.executable, "-m", "vfsd.cli.main", "fs", "write", "-w", workspace, "new"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, input="c", stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert reason in done.stderr


def test_the_workspace_may_be_named_before_between_and_after(daemon: FsDaemon) -> None:
    for args in (["-w", "demo", "fs", "ls"], ["fs", "-w", "demo", "ls"], ["fs", "ls", "-w", "demo"]):
        assert CliRunner().invoke(cli, args).exit_code == 0
        wrong = CliRunner().invoke(cli, ["other" if word == "demo" else word for word in args])
        assert wrong.exit_code == 1
        assert json.loads(wrong.stdout)["ok"] is False


@pytest.mark.parametrize("command", ["ls", "read", "write", "edit", "grep", "glob", "rm", "stat", "exec"])
def test_help_is_help(command: str) -> None:
    result = CliRunner().invoke(cli, ["fs", command, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage:")
    assert command in CliRunner().invoke(cli, ["fs", "--help"]).stdout


def test_every_fs_method_has_a_handler(daemon: FsDaemon) -> None:
    methods = FsMethods(daemon.mounted, WorkspaceOptions("/m", "m"), Commands("m"))  # type: ignore[arg-type]
    assert set(handlers_of(methods)) == {name for name in OPERATIONS if name.startswith("fs.")}


# -- content ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 512 * 1024, 512 * 1024 + 1, 3_000_000])
def test_content_of_any_size_and_kind_is_written_as_it_is(daemon: FsDaemon, size: int) -> None:
    content = os.urandom(size)
    assert data("write", "f", stdin=content) == {"path": "f", "bytes_written": size, "mode": "overwrite"}
    page = data("read", "f", "--bytes")
    assert base64.b64decode(page["content"].removeprefix("base64:")) == content
    assert (page["encoding"], page["size_bytes"], page["truncated"]) == ("base64", size, False)


def test_large_content_leaves_no_file_on_the_host(
    daemon: FsDaemon, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = workdir / "tmp"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    data("write", "f", stdin=bytes(1_000_000))
    assert os.listdir(directory) == []


def test_more_than_a_write_may_have_is_refused(daemon: FsDaemon) -> None:
    data("write", "f", stdin=b"old")
    assert "write the rest in mode append" in error("write", "f", stdin=bytes((32 << 20) + 1))
    assert data("read", "f")["content"] == "old"


@pytest.mark.parametrize("options", [(), ("--bytes",)])
def test_more_than_a_read_may_have_is_refused_with_the_options_to_use(daemon: FsDaemon, options: list[str]) -> None:
    data("write", "f", stdin=b"x" * (32 << 20))
    data("write", "f", "--mode", "append", stdin=b"yz")
    assert "read a part as bytes, with an offset and a limit" in error("read", "f", *options)
    page = data("read", "f", "--bytes", "--offset", str(32 << 20), "--limit", "1")
    assert base64.b64decode(page["content"].removeprefix("base64:")) == b"y"


def test_a_directory_with_content_is_deleted_only_with_the_option_that_the_error_names(daemon: FsDaemon) -> None:
    data("write", "d/f", stdin=b"")
    assert error("rm", "d") == "Directory not empty: d; `-r` deletes it with its content"
    data("rm", "-r", "d")


def test_modes_of_writing(daemon: FsDaemon) -> None:
    data("write", "f", "--mode", "create", stdin=b"1")
    assert "File exists" in error("write", "f", "--mode", "create", stdin=b"2")
    data("write", "f", "--mode", "append", stdin=b"3")
    assert data("read", "f")["content"] == "13"
    assert "No such file" in error("write", "d/f", "--no-parents", stdin=b"")
    assert data("write", "d/f", stdin=b"")["path"] == "d/f"


def test_text_is_given_as_it_is_in_pages_of_lines(daemon: FsDaemon) -> None:
    text = "".join(f"line {n} é\r\n" for n in range(2500))
    data("write", "f", stdin=text.encode())
    page = data("read", "f")
    assert page["content"] == "".join(text.splitlines(keepends=True)[:2000])
    assert (page["total_lines"], page["truncated"], page["encoding"]) == (2500, True, "utf-8")
    page = data("read", "f", "--offset", "2499", "--limit", "7")
    assert (page["content"], page["offset"], page["limit"]) == ("line 2499 é\r\n", 2499, 1)


def test_a_text_that_looks_like_base64_is_told_apart(daemon: FsDaemon) -> None:
    data("write", "f", stdin=b"base64:AAAA")
    assert data("read", "f").items() >= {"content": "base64:AAAA", "encoding": "utf-8"}.items()


def test_lines_of_a_binary_file_are_refused(daemon: FsDaemon) -> None:
    data("write", "f", stdin=b"\xff\n\xff")
    assert data("read", "f")["encoding"] == "base64"
    assert "bytes" in error("read", "f", "--limit", "1")


# -- paths --------------------------------------------------------------------------------------------
def test_paths_count_from_a_directory_in_the_mount(daemon: FsDaemon, place: Path) -> None:
    (place / "a").mkdir()  # nothing is mounted there: only its name matters
    data("write", "a/f", stdin=b"needle")
    with contextlib.chdir(place / "a"):
        assert data("stat", "f")["path"] == "f"
        assert data("stat", "..")["path"] == ".."
        assert data("glob", "*")["files"] == [{"path": "f"}]
        assert [entry["path"] for entry in data("ls")["entries"]] == ["f"]
        assert "not in the workspace" in error("stat", "../..")
    assert data("stat", str(place / "a" / "f"))["path"] == "a/f"
    assert "not in the workspace" in error("stat", "/etc/passwd")


def test_a_name_that_is_no_utf8_is_marked_and_can_be_given_back(daemon: FsDaemon) -> None:
    name = b"caf\xe9\\x"
    data("write", name, stdin=b"needle")
    listed = data("ls")["entries"][0]
    assert (listed["path"], listed["escaped"]) == ("caf\\xe9\\\\x", True)
    assert data("grep", "needle")["matches"][0]["escaped"] is True
    assert data("read", "--escaped", listed["path"])["content"] == "needle"
    assert "caf\\xe9" in error("read", b"other-caf\xe9")
    assert data("rm", name)["deleted"] == 1


def test_a_backslash_in_a_name_that_is_utf8_stays_one(daemon: FsDaemon) -> None:
    data("write", "a\\x41", stdin=b"x")
    assert data("stat", "a\\x41")["path"] == "a\\x41"
    assert "escaped" not in data("stat", "a\\x41")


# -- edits --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "stdin", [b"", b"{", b"[]", b'{"old_text": "a"}', b'{"old_text": "a", "new_text": "", "x": 1}']
)
def test_what_is_no_edit_is_refused(daemon: FsDaemon, stdin: bytes) -> None:
    data("write", "f", stdin=b"a")
    assert "not an edit" in error("edit", "f", stdin=stdin)
    assert data("read", "f")["content"] == "a"


def test_an_edit_of_every_occurrence(daemon: FsDaemon) -> None:
    data("write", "f", stdin=b"a a")
    assert "found 2 times" in error("edit", "f", stdin=b'{"old_text": "a", "new_text": "b"}')
    edit = b'{"old_text": "a", "new_text": "b", "replace_all": true}'
    assert data("edit", "f", stdin=edit) == {"path": "f", "replacements": 2, "bytes_written": 3}


# -- the socket's methods -----------------------------------------------------------------------------
def test_the_kernel_is_told_of_a_change_and_of_nothing_else(daemon: FsDaemon) -> None:
    data("write", "d/f", stdin=b"x")
    told = daemon.mounted.invalidations.pop()
    # What is in a directory that is new, no kernel can have known.
    assert [(entry.name, entry.old != 0, entry.new != 0) for entry in told.entries] == [(b"d", False, True)]
    data("read", "d/f")
    data("grep", "x")
    data("ls")
    error("write", "d/f", "--mode", "create", stdin=b"y")
    error("rm", "missing")
    assert daemon.mounted.invalidations == []
    data("rm", "d/f")
    assert [(entry.name, entry.new) for entry in daemon.mounted.invalidations.pop().entries] == [(b"f", 0)]


def test_a_change_that_fails_midway_is_undone(daemon: FsDaemon) -> None:
    data("write", "fills", stdin=bytes(30 << 20))
    before = daemon.volume.usage().used_bytes
    assert "No space" in error("write", "more/deep/f", stdin=bytes(30 << 20))
    assert daemon.volume.usage().used_bytes == before
    assert "more" not in [entry["path"] for entry in data("ls")["entries"]]


def test_a_refusal_has_its_errno(daemon: FsDaemon) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        call(daemon, "fs.read", FsReadParams(path="missing"))
    assert missing.value.filename == "missing"
    with pytest.raises(ControlError) as invalid:
        call(daemon, "fs.grep", GrepParams(pattern="("))
    assert invalid.value.errno == errno.EINVAL
    with pytest.raises(IsADirectoryError):
        call(daemon, "fs.read", FsReadParams(path=""))


@pytest.mark.parametrize(
    "params",
    [
        FsWriteParams(path="f"),
        FsWriteParams(path="f", content=b"", source="/etc/hostname"),
        FsWriteParams(path="f", source="relative"),
        FsWriteParams(path="bad\\escape", content=b""),
    ],
)
def test_parameters_that_make_no_sense_are_refused(daemon: FsDaemon, params: FsWriteParams) -> None:
    with pytest.raises(ControlError) as caught:
        call(daemon, "fs.write", params)
    assert caught.value.code == INVALID_PARAMS
    assert daemon.volume.usage().files == 0


def test_only_a_regular_file_is_a_source(daemon: FsDaemon, workdir: Path) -> None:
    os.mkfifo(workdir / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        call(daemon, "fs.write", FsWriteParams(path="f", source=str(workdir / "fifo")))
    with pytest.raises(FileNotFoundError):
        call(daemon, "fs.write", FsWriteParams(path="f", source=str(workdir / "missing")))


def test_a_symlink_that_leads_nowhere_has_a_stat(daemon: FsDaemon) -> None:
    daemon.volume.forget(daemon.volume.symlink(ROOT_INODE, b"broken", b"nowhere", Caller(0, 0)).inode, 1)
    assert data("stat", "broken").items() >= {"type": "symlink", "is_symlink": True}.items()
    assert "No such file" in error("read", "broken")


def test_a_read_that_nobody_waits_for_any_more_ends(place: Path) -> None:
    # A daemon that does not end fails its own context: so the read, of a terabyte, must have.
    with FsDaemon("demo", str(place)) as daemon:
        data("write", "f", stdin=b"\n" * 3000)
        found = daemon.volume.lookup(ROOT_INODE, b"f")
        daemon.volume.setattr(found.inode, AttributeChanges(size=10**12))
        with ControlClient(daemon.socket, timeout_s=0.5) as client, pytest.raises(TimeoutError):
            client.call("fs.read", FsReadParams(path="f"))


# -- commands -----------------------------------------------------------------------------------------
def test_without_on_host_no_command_runs(daemon: FsDaemon, place: Path) -> None:
    assert "--on-host" in error("exec", "--", "touch", str(place / "made"))
    assert os.listdir(place) == []


@pytest.fixture
def able(place: Path) -> Iterator[FsDaemon]:
    with FsDaemonOnHost("demo", str(place)) as daemon:
        yield daemon


def test_mounting_with_on_host_is_what_allows_commands(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MountOptions] = []

    def launch(options: MountOptions, **_: object) -> Ready:
        asked.append(options)
        return Ready(options.workspace.name, options.workspace.mountpoint, "/run/x.sock", 42, "native")

    monkeypatch.setattr("vfsd.client.launch.launch", launch)
    for args in (["mount", str(workdir / "m"), "--on-host"], ["mount", str(workdir / "m")]):
        assert CliRunner().invoke(cli, args).exit_code == 0
    assert [options.commands.exec_on_host for options in asked] == [True, False]


def test_words_of_a_command_arrive_as_they_are(able: FsDaemon) -> None:
    words = ["a b", "", "--limit", "*", "back\\slash", "new\nline", "é"]
    done = data("exec", "--", "printf", "[%s]", *words)
    assert done["stdout"] == "".join(f"[{word}]" for word in words)
    assert data("exec", "--", "printf", "%s", b"\xff")["stdout"] == "base64:" + base64.b64encode(b"\xff").decode()


def test_a_command_that_fails_is_no_failure_of_exec(able: FsDaemon) -> None:
    assert data("exec", "--", "sh", "-c", "echo e >&2; exit 9").items() >= {"exit_status": 9, "stderr": "e\n"}.items()


def test_exec_says_why_the_snapshot_after_a_command_failed(able: FsDaemon) -> None:
    class Full:
        async def infos(self) -> list[Any]:
            raise OSError(errno.ENOSPC, "no space for a snapshot")

    able.commands._snapshots = Full()
    done = data("exec", "--", "true")
    assert (done["exit_status"], done["snapshot"]) == (0, None)
    assert done["snapshot_error"] == "no space for a snapshot"


def test_options_of_exec(able: FsDaemon, place: Path) -> None:
    (place / "sub").mkdir()
    script = ("sh", "-c", 'echo "$A"; pwd; cat')
    done = data("exec", "--cwd", "sub", "--env", "A=b=c", "--stdin", "--", *script, stdin=b"in")
    assert done["stdout"] == f"b=c\n{place}/sub\nin"
    assert (
        data("exec", "--output-limit", "3", "--", "echo", "12345").items()
        >= {
            "stdout": "123",
            "truncated": True,
        }.items()
    )
    assert data("exec", "--timeout", "0.5", "--", "sleep", "1000")["timed_out"] is True
    assert "No such file" in error("exec", "--", "no-such-program")
    assert "not in the workspace" in error("exec", "--cwd", "/", "--", "true")


def test_text_that_the_limit_cut_within_a_character_is_still_text(able: FsDaemon) -> None:
    assert data("exec", "--output-limit", "3", "--", "printf", "éé")["stdout"] == "é"
