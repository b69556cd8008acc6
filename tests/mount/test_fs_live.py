"""`vfsd fs` and the mount show one state: whatever is done by either, the other sees it at once."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from protocol.tool_messages import EditFileParams, GlobParams, GrepParams, RmParams
from tests.mount.conftest import MountIt, edit_on_two_mounts, mounted, socket_of
from tests.mount.engine_child import Watcher
from tests.support.waiting import readable
from vfsd.cli.main import cli
from vfsd.client.connection import ControlClient
from vfsd.client.workspace import Workspace
from vfsd.operations.fs import FsExecParams, FsExecResult, FsLsParams, FsReadParams, FsStatParams, FsWriteParams
from vfsd.wire.messages import wire_path

Run = Callable[..., Any]
ODD_NAMES = [
    b"with space",
    b"quo'te\"s",
    b"new\nline",
    b"caf\xe9 \xff",
    "日本".encode(),
    b"-dash",
    b"back\\slash",
    b"*?[x]",
]


def vfsd_fs(workspace: Workspace, *args: str | bytes, stdin: bytes = b"", cwd: str = "/") -> tuple[int, Any]:
    """The exit status and the envelope of one `vfsd fs`."""
    words = ["-w", workspace.name, "fs", *map(os.fsdecode, args)]
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(cli, words, input=stdin)
    assert done.stderr == ""
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def run(workspace: Workspace) -> Run:
    """The data of a `vfsd fs` that succeeds."""

    def run_it(*args: str | bytes, stdin: bytes = b"", cwd: str = "/") -> Any:
        status, envelope = vfsd_fs(workspace, *args, stdin=stdin, cwd=cwd)
        assert envelope["ok"] is True, envelope
        assert status == 0
        return envelope["data"]

    return run_it


def edit_of(old: str, new: str, **more: Any) -> bytes:
    return json.dumps({"old_text": old, "new_text": new, **more}).encode()


# -- a round trip of every tool ---------------------------------------------------------------------
def test_a_round_trip_of_every_tool(run: Run, root: Path) -> None:
    assert run("write", "src/a.py", stdin=b"print('old')\n")["bytes_written"] == 13
    assert (root / "src" / "a.py").read_bytes() == b"print('old')\n"
    assert run("edit", "src/a.py", stdin=edit_of("old", "new"))["replacements"] == 1
    assert (root / "src" / "a.py").read_bytes() == b"print('new')\n"
    (root / "src" / "b.py").write_text("print('b')\nnew\n")
    assert run("read", "src/b.py", "--offset", "1")["content"] == "new\n"
    assert [entry["path"] for entry in run("ls", "src")["entries"]] == ["src/a.py", "src/b.py"]
    assert run("glob", "*.py")["files"] == [{"path": "src/a.py"}, {"path": "src/b.py"}]
    matches = run("grep", r"ne\w")["matches"]
    assert [(match["path"], match["line_number"]) for match in matches] == [("src/a.py", 1), ("src/b.py", 2)]
    assert run("stat", "src/a.py")["size_bytes"] == 13
    assert run("rm", "-r", "src")["deleted"] == 3
    assert os.listdir(root) == []


def test_a_read_only_workspace_is_read_and_not_changed(mount: MountIt) -> None:
    workspace = mount(read_only=True)
    for args in (("write", "f"), ("rm", "f")):
        status, envelope = vfsd_fs(workspace, *args, stdin=b"x")
        assert status == 1
        assert "Read-only" in envelope["error"]
    assert vfsd_fs(workspace, "ls")[1]["data"]["entries"] == []


# -- coherence: from `vfsd fs` to the mount ---------------------------------------------------------
@pytest.fixture
def call(workspace: Workspace) -> Iterator[Callable[[str, Any], Any]]:
    """Calls over the control socket: quicker than a process for each."""
    with ControlClient(socket_of(workspace)) as client:
        yield client.call


@pytest.mark.both_engines
def test_a_name_whose_absence_the_kernel_has_cached_is_seen(call: Run, root: Path) -> None:
    for _ in range(2):
        assert not (root / "new").exists()
        assert not (root / "dir" / "below").exists()
    assert os.listdir(root) == []
    call("fs.write", FsWriteParams(path="new", content=b"x"))
    call("fs.write", FsWriteParams(path="dir/below", content=b"y"))
    assert (root / "new").read_bytes() == b"x"
    assert (root / "dir" / "below").read_bytes() == b"y"
    assert sorted(os.listdir(root)) == ["dir", "new"]


@pytest.mark.both_engines
def test_a_file_removed_is_gone_from_the_kernels_caches(call: Run, root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").write_text("x")
    assert os.listdir(root / "d") == ["f"]
    os.stat(root / "d" / "f")
    call("fs.rm", RmParams(path="d/f"))
    assert not (root / "d" / "f").exists()
    assert os.listdir(root / "d") == []
    assert os.stat(root / "d").st_nlink == 2
    call("fs.rm", RmParams(path="d", recursive=True))
    assert os.listdir(root) == []
    (root / "d").mkdir()


@pytest.mark.both_engines
def test_content_that_the_kernel_has_cached_is_replaced(call: Run, root: Path) -> None:
    for turn in range(20):
        content = f"turn {turn} ".encode() * (turn + 1)
        call("fs.write", FsWriteParams(path="f", content=content))
        assert (root / "f").read_bytes() == content
        assert os.stat(root / "f").st_size == len(content)


@pytest.mark.both_engines
def test_what_is_appended_is_seen_by_a_program_that_has_the_file_open(call: Run, root: Path) -> None:
    (root / "log").write_bytes(b"one\n")
    with open(root / "log", "rb") as reader, open(root / "log", "ab", buffering=0) as writer:
        assert reader.read() == b"one\n"
        call("fs.write", FsWriteParams(path="log", content=b"two\n", mode="append"))
        assert reader.read() == b"two\n"
        writer.write(b"three\n")
        assert reader.read() == b"three\n"
    assert (root / "log").read_bytes() == b"one\ntwo\nthree\n"


@pytest.mark.both_engines
def test_a_program_goes_on_with_the_file_that_it_has_open_when_that_is_replaced(call: Run, root: Path) -> None:
    (root / "f").write_bytes(b"old")
    with open(root / "f", "r+b") as held:
        call("fs.write", FsWriteParams(path="f", content=b"brand new"))
        assert held.read() == b"old"
        assert (root / "f").read_bytes() == b"brand new"
        assert os.fstat(held.fileno()).st_nlink == 0


def test_the_exec_bit_survives_an_edit_and_the_program_runs(call: Run, root: Path) -> None:
    script = root / "run.sh"
    script.write_text("#!/bin/sh\necho old\n")
    script.chmod(0o755)
    assert subprocess.run([script], capture_output=True, check=True).stdout == b"old\n"
    call("fs.edit", EditFileParams(path="run.sh", old_text="old", new_text="new"))
    assert script.stat().st_mode & 0o7777 == 0o755
    assert subprocess.run([script], capture_output=True, check=True).stdout == b"new\n"
    call("fs.write", FsWriteParams(path="run.sh", content=b"#!/bin/sh\necho newest\n"))
    assert subprocess.run([script], capture_output=True, check=True).stdout == b"newest\n"


def test_a_symlink_is_followed_within_the_workspace(call: Run, root: Path) -> None:
    (root / "real").mkdir()
    (root / "relative").symlink_to("real")
    (root / "absolute").symlink_to(root / "real")
    (root / "out").symlink_to("/etc")
    call("fs.write", FsWriteParams(path="relative/a", content=b"a"))
    call("fs.write", FsWriteParams(path="absolute/b", content=b"b"))
    assert sorted(os.listdir(root / "real")) == ["a", "b"]
    with pytest.raises(PermissionError):
        call("fs.read", FsReadParams(path="out/passwd"))
    assert call("fs.stat", FsStatParams(path="absolute")).type == "directory"


# -- coherence: from the mount to `vfsd fs` ---------------------------------------------------------
@pytest.mark.both_engines
def test_whatever_the_mount_does_is_seen(call: Run, root: Path) -> None:
    def content(path: str) -> bytes:
        pieces: list[bytes] = []
        with ControlClient(call.__self__._path) as client:
            client.call("fs.read", FsReadParams(path=path, as_bytes=True), on_output=pieces.append)
        return b"".join(pieces)

    with open(root / "f", "wb", buffering=0) as file:
        for turn in range(20):
            file.write(b"%d," % turn)
            assert content("f").endswith(b"%d," % turn)
    os.rename(root / "f", root / "g")
    assert [entry.path for entry in call("fs.ls", FsLsParams()).entries] == ["g"]
    os.chmod(root / "g", 0o700)
    assert call("fs.stat", FsStatParams(path="g")).mode == "0700"
    os.truncate(root / "g", 2)
    assert content("g") == b"0,"
    os.unlink(root / "g")
    with pytest.raises(FileNotFoundError):
        content("g")


@pytest.mark.both_engines
def test_a_shared_mapping_is_seen_once_it_was_synced(call: Run, root: Path) -> None:
    (root / "f").write_bytes(b"old!")
    with open(root / "f", "r+b") as file, mmap.mmap(file.fileno(), 4) as mapped:
        mapped[:] = b"new!"
        mapped.flush()
        assert call("fs.grep", GrepParams(pattern="new!")).matches[0].path == "f"


@pytest.mark.both_engines
def test_edits_of_many_clients_and_writes_through_the_mount_are_all_there(workspace: Workspace, root: Path) -> None:
    (root / "f").write_text("".join(f"<{n}>" for n in range(8)))

    def edit(number: int) -> None:
        with ControlClient(socket_of(workspace)) as client:
            client.call("fs.edit", EditFileParams(path="f", old_text=f"<{number}>", new_text=f"[{number}]"))
            client.call("fs.write", FsWriteParams(path=f"by-socket/{number}", content=b"x"))

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    (root / "by-mount").mkdir()
    for number in range(50):
        (root / "by-mount" / str(number)).write_text("y")
    for thread in threads:
        thread.join()
    assert (root / "f").read_text() == "".join(f"[{n}]" for n in range(8))
    assert len(os.listdir(root / "by-socket")) == 8
    assert len(os.listdir(root / "by-mount")) == 50


@pytest.mark.parametrize(
    "kinds", ["host exec", *(pytest.param(both, marks=pytest.mark.extended) for both in ("host host", "exec exec"))]
)
def test_edits_on_two_mounts_of_one_directory_at_the_same_time_are_all_kept(
    mount: MountIt, workdir: Path, kinds: str
) -> None:
    below = workdir / "below"
    below.mkdir()
    options = {
        "host": {"backend": f"host:{below}", "store": workdir / "store"},
        "exec": {"backend": f"exec:{sys.executable}", "workdir": str(below)},
    }
    assert edit_on_two_mounts(*(mount(**options[kind]) for kind in kinds.split())) == (below / "f").read_text()
    assert os.listdir(below) == ["f"]


@pytest.mark.extended
@pytest.mark.both_engines
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_done_by_turns_both_sides_agree_with_a_plain_model(
    call: Run, root: Path, seed: int, runs_long: bool
) -> None:
    chance = random.Random(seed)
    names = [f"{directory}{name}" for directory in ("", "d/", "d/e/") for name in "abc"]
    model: dict[str, bytes] = {}

    def write(path: str, content: bytes, mode: Any) -> None:
        call("fs.write", FsWriteParams(path=path, content=content, mode=mode))
        model[path] = content if mode == "overwrite" else model.get(path, b"") + content

    def write_through_mount(path: str, content: bytes, mode: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        with open(root / path, "ab" if mode == "append" else "wb") as file:
            file.write(content)
        model[path] = content if mode == "overwrite" else model.get(path, b"") + content

    def look(path: str) -> None:
        """Both sides, and the kernel's caches of presence and absence filled."""
        assert (root / path).exists() == (path in model)
        if path in model:
            assert (root / path).read_bytes() == model[path]
            assert os.stat(root / path).st_size == len(model[path])
            assert call("fs.stat", FsStatParams(path=path)).size_bytes == len(model[path])
        else:
            with pytest.raises(FileNotFoundError):
                call("fs.stat", FsStatParams(path=path))

    for turn in range(500 if runs_long else 100):
        path, content = chance.choice(names), b"%d " % turn * chance.choice((1, 2000))
        mode = chance.choice(("overwrite", "append"))
        match chance.randrange(6):
            case 0 | 1:
                write(path, content, mode)
            case 2:
                write_through_mount(path, content, mode)
            case 3 if path in model:
                call("fs.rm", RmParams(path=path))
                del model[path]
            case 4 if path in model:
                (root / path).unlink()
                del model[path]
            case 5 if path in model:
                other = chance.choice(names)
                (root / other).parent.mkdir(parents=True, exist_ok=True)
                os.rename(root / path, root / other)
                model[other] = model.pop(path)
        look(path)
        look(chance.choice(names))
    found = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}
    assert found == set(model)
    assert set(call("fs.glob", GlobParams(pattern="*")).paths) == set(model)


# -- watchers -----------------------------------------------------------------------------------------
@pytest.mark.both_engines
def test_an_inotify_watcher_sees_what_is_written(call: Run, root: Path) -> None:
    (root / "old").write_text("x")
    (root / "removed").write_text("x")
    with watching(root) as wait_for:
        call("fs.write", FsWriteParams(path="new", content=b"x"))
        wait_for("CREATE /new")
        call("fs.write", FsWriteParams(path="old", content=b"y", mode="append"))
        wait_for("MODIFY /old")
        call("fs.rm", RmParams(path="removed"))
        wait_for("DELETE /removed")
        call("fs.edit", EditFileParams(path="new", old_text="x", new_text="edited"))
        wait_for("CREATE /new")
    assert (root / "new").read_text() == "edited"


@contextlib.contextmanager
def watching(path: Path) -> Iterator[Callable[[str], None]]:
    """Waits for events in `path`, as "CREATE /name"; the replay that raises them comes after the answer."""
    watcher = Watcher()
    watcher.add(str(path), "")

    def wait_for(event: str) -> None:
        seen: list[str] = []
        while event not in seen:
            assert readable(watcher.fd, 30), f"no {event!r} but {seen}"
            seen += watcher.events()

    try:
        yield wait_for
    finally:
        os.close(watcher.fd)


# -- commands -----------------------------------------------------------------------------------------
@pytest.fixture
def able(mount: MountIt) -> Workspace:
    return mount(exec_on_host=True)


def exec_in(workspace: Workspace, *argv: str, **more: Any) -> FsExecResult:
    with ControlClient(socket_of(workspace)) as client:
        result: FsExecResult = client.call(
            "fs.exec", FsExecParams(argv=[wire_path(word.encode()) for word in argv], **more)
        )
    return result


def test_a_command_runs_in_the_mount_that_its_daemon_serves(able: Workspace) -> None:
    root = Path(able.path)
    (root / "d").mkdir()
    (root / "tool").write_text('#!/bin/sh\necho tool "$@"; cat; echo made >made; exit 5\n')
    (root / "tool").chmod(0o755)
    command = ("exec", "--stdin", "--", "../tool", "-a", "b c")
    status, envelope = vfsd_fs(able, *command, stdin=b"in", cwd=str(root / "d"))
    assert status == 0
    assert envelope["data"] == {
        "exit_status": 5,
        "stdout": "tool -a b c\nin",
        "stderr": "",
        "timed_out": False,
        "truncated": False,
        "snapshot": None,
        "snapshot_error": None,
    }
    assert (root / "d" / "made").read_text() == "made\n"


def test_a_command_is_killed_when_its_client_goes_away(able: Workspace) -> None:
    root = Path(able.path)
    os.mkfifo(root / "started")
    client = subprocess.Popen(
        [sys.executable, "-m", "vfsd.cli.main", "-w", able.name, "fs", "exec", "--", "sh", "-c", SLEEPER],
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    pids = [int(word) for word in (root / "started").read_text().split()]
    handles = [os.pidfd_open(pid) for pid in pids]
    client.kill()
    client.wait()
    for handle in handles:
        assert readable(handle, 30), "a process is left"
        os.close(handle)
    assert len(pids) == 2


SLEEPER = "setsid sleep 1000 & echo $$ $! >started; sleep 1000"


def test_the_mount_answers_while_commands_work_in_it(able: Workspace) -> None:
    root = Path(able.path)
    fifos = [root / f"go{number}" for number in range(4)]
    results: list[bytes] = []
    threads = []
    for fifo in fifos:
        os.mkfifo(fifo)
        argv = ("sh", "-c", f"cat {fifo.name}; ls | wc -l")
        threads.append(threading.Thread(target=lambda argv=argv: results.append(exec_in(able, *argv).stdout)))
    for thread in threads:
        thread.start()
    with contextlib.ExitStack() as stack:
        # An open waits for the command at the other end: from here on all of them run.
        writers = [stack.enter_context(open(fifo, "w")) for fifo in fifos]
        (root / "f").write_text("x")
        assert (root / "f").read_text() == "x"
        for writer in writers:
            writer.write("line\n")
    for thread in threads:
        thread.join()
    assert results == [b"line\n5\n"] * 4


# -- searches -----------------------------------------------------------------------------------------
def test_searches_skip_what_agents_do_not_look_for_unless_told(run: Run, root: Path) -> None:
    for name in ("src", "node_modules", "__pycache__", "vendor", ".git"):
        (root / name).mkdir()
        (root / name / "f.txt").write_text("needle\n")
    (root / "src" / "binary").write_bytes(b"\0needle\n")
    assert [one["path"] for one in run("glob", "f*")["files"]] == ["src/f.txt"]
    assert len(run("glob", "f*", "--all")["files"]) == 5
    assert [one["path"] for one in run("grep", "needle")["matches"]] == ["src/f.txt"]
    assert len(run("grep", "needle", "--all")["matches"]) == 5
    assert [one["path"] for one in run("glob", "b*")["files"]] == []
    assert [one["path"] for one in run("glob", "b*", "--all")["files"]] == ["src/binary"]


def test_searches_stop_at_their_limits_and_say_so(run: Run, root: Path) -> None:
    for number in range(101):
        (root / f"f{number:03}").write_text("needle\n" * 3)
    found = run("glob", "*")
    assert (len(found["files"]), found["truncated"]) == (100, True)
    found = run("grep", "needle")
    assert (len(found["matches"]), found["truncated"]) == (200, True)
    found = run("grep", "needle", "--limit", "303")
    assert (len(found["matches"]), found["truncated"]) == (303, False)
    assert run("glob", "*", "--limit", "101")["truncated"] is False


@pytest.mark.extended
@pytest.mark.both_engines
def test_the_mount_answers_while_a_search_runs(workspace: Workspace, root: Path) -> None:
    for number in range(200):
        (root / f"f{number}").write_bytes(b"nothing to be found here\n" * 10_000)
    # A search that stopped the loop would let no more than the request through that waited for its end.
    assert any(answered_during_search(workspace, root) > 3 for _ in range(5))


def answered_during_search(workspace: Workspace, root: Path) -> int:
    """How many requests the mount answered meanwhile."""
    done = threading.Event()

    def search() -> None:
        with ControlClient(socket_of(workspace)) as client:
            client.call("fs.grep", GrepParams(pattern="(a|b)*needle"))
        done.set()

    thread = threading.Thread(target=search)
    thread.start()
    answered = 0
    while not done.is_set():
        os.mkdir(root / "busy")
        os.rmdir(root / "busy")
        answered += 1
    thread.join()
    return answered


@pytest.mark.parametrize("backend", ["memory", "overlay", "host"])
def test_ls_goes_on_after_a_name_and_reads_snapshots(mount: MountIt, workdir: Path, backend: str) -> None:
    workspace = mount(backend=backend)
    root = os.fsencode(workspace.path)
    for name in ODD_NAMES:
        with open(os.path.join(root, name), "wb") as file:
            file.write(b"old " + name)
    workspace.snapshot("one")
    for name in ODD_NAMES[1:]:
        os.unlink(os.path.join(root, name))
    with ControlClient(socket_of(workspace)) as client:

        def listed(snapshot: str | None) -> list[str]:
            names: list[str] = []
            while True:
                page = client.call("fs.ls", FsLsParams(limit=2, after=names[-1] if names else None, snapshot=snapshot))
                names += [entry.path for entry in page.entries]
                if not page.truncated:
                    return names

        assert listed("one") == [wire_path(name) for name in sorted(ODD_NAMES)]
        assert listed(None) == [wire_path(ODD_NAMES[0])]
        for name in ODD_NAMES:
            pieces: list[bytes] = []
            client.call("fs.read", FsReadParams(wire_path(name), snapshot="one"), on_output=pieces.append)
            assert b"".join(pieces) == b"old " + name
            assert client.call("fs.stat", FsStatParams(wire_path(name), "one")).size_bytes == 4 + len(name)
        with pytest.raises(FileNotFoundError):
            client.call("fs.ls", FsLsParams(snapshot="none"))


@pytest.mark.parametrize("backend", ["memory", "host"])
def test_a_new_file_gets_the_mode_that_the_callers_umask_allows(workdir: Path, backend: str) -> None:
    options = {} if backend == "memory" else {"store": workdir / "store"}
    with mounted(workdir / "mount", engine="native", backend=backend, **options) as workspace:
        root = Path(workspace.path)
        for umask, file_mode, directory_mode in ((0o077, 0o600, 0o700), (0o002, 0o664, 0o775)):
            before = os.umask(umask)
            try:
                assert vfsd_fs(workspace, "write", f"{umask}/new", stdin=b"x")[0] == 0
            finally:
                os.umask(before)
            assert stat.S_IMODE((root / f"{umask}" / "new").stat().st_mode) == file_mode
            assert stat.S_IMODE((root / f"{umask}").stat().st_mode) == directory_mode
