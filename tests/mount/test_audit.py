"""The audit log: every change of a mount once, in order, by the process that made it."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import anyio
import pytest

from protocol.tools.base import FileEvent, FileWritten
from tests.mount.conftest import ENGINES, MountIt
from tests.mount.programs import failed, succeeded, vfsd
from tests.support.host_directories import mounted_tmpfs
from tests.support.rights import needs_root
from tests.support.waiting import wait_until
from vfsd.cli.agent_settings import hook_commands
from vfsd.client.log import LoggedChange, MountEvents
from vfsd.client.workspace import Workspace
from vfsd.integrations.mcp.session import Session
from vfsd.integrations.mcp.tools import SERVED_TOOLS

# With a write-back cache it is the kernel that writes.
pytestmark = pytest.mark.workspaces(engines=ENGINES)


def kinds(changes: list[LoggedChange]) -> list[tuple[str, str | None]]:
    return [(change.change, change.path) for change in changes]


def run(workspace: Workspace, *command: str) -> int:
    """Run a command in the workspace's root; return its process id."""
    program = subprocess.Popen(command, cwd=workspace.path)
    assert program.wait() == 0
    return program.pid


@pytest.mark.both_engines
@needs_root
def test_each_kind_of_change_is_one_entry_in_order(workspace: Workspace, root: Path) -> None:
    def change() -> None:
        (root / "d").mkdir()
        (root / "d" / "f").write_bytes(b"x" * 3_000_000)  # several requests
        os.link(root / "d" / "f", root / "g")
        os.rename(root / "d" / "f", root / "h")
        os.truncate(root / "h", 7)
        os.chmod(root / "h", 0o600)
        os.chown(root / "h", 1, 1)
        os.utime(root / "h", (1, 1))
        os.symlink("h", root / "s")
        os.mkfifo(root / "p")
        os.setxattr(root / "h", "user.a", b"1")
        os.removexattr(root / "h", "user.a")
        os.unlink(root / "s")
        os.rmdir(root / "d")

    change()
    found = workspace.log()
    assert kinds(found) == [
        ("mkdir", "d"),
        ("create", "d/f"),
        ("write", "d/f"),
        ("link", "g"),
        ("rename", "d/f"),
        *((kind, found[5].path) for kind in ("truncate", "chmod", "chown", "utime")),
        ("symlink", "s"),
        ("mknod", "p"),
        ("setxattr", found[5].path),
        ("removexattr", found[5].path),
        ("unlink", "s"),
        ("rmdir", "d"),
    ]
    assert [change.number for change in found] == list(range(1, len(found) + 1))
    assert found[2].bytes_written == 3_000_000
    assert (found[3].of, found[3].links) == ("d/f", 2)
    assert found[4].to == "h"
    assert found[5].path in {"g", "h"}, "one of its two names"
    for each in found:
        assert each.process is not None
        assert each.process.pid == os.getpid()
        assert each.process.command[0] == Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()


@pytest.mark.both_engines
def test_a_file_without_a_name_has_no_path(workspace: Workspace, root: Path) -> None:
    with (root / "f").open("wb", buffering=0) as file:
        file.write(b"named")
        (root / "f").unlink()
        file.write(b"not any more")
    assert kinds(workspace.log()) == [("create", "f"), ("write", "f"), ("unlink", "f"), ("write", None)]


@pytest.mark.both_engines
def test_writes_before_and_after_a_rename_are_two_entries(workspace: Workspace, root: Path) -> None:
    (root / "d").mkdir()
    with (root / "d" / "f").open("wb", buffering=0) as file:
        file.write(b"1")
        (root / "d").rename(root / "e")
        file.write(b"2")
        (root / "e" / "f").rename(root / "g")
        file.write(b"3")
    writes = [change.path for change in workspace.log() if change.change == "write"]
    assert writes == ["d/f", "e/f", "g"]


def test_paths_are_right_after_a_restore_has_moved_directories(workspace: Workspace, root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "1").touch()
    workspace.snapshot("before")
    (root / "d").rename(root / "e")
    (root / "e" / "2").touch()
    workspace.restore("before")
    (root / "d" / "3").touch()
    workspace.undo()
    (root / "e" / "4").write_text("4")
    made = [change.path for change in workspace.log() if change.change in {"create", "write"}]
    assert made == ["d/1", "e/2", "d/3", "e/4", "e/4"]


@pytest.mark.both_engines
def test_a_program_that_ends_at_once_is_named(workspace: Workspace) -> None:
    pids = {}
    for number in range(40):
        pids[f"f{number}"] = run(workspace, "sh", "-c", f"echo x > f{number}")
    found = workspace.log()
    assert kinds(found) == [(kind, f"f{number}") for number in range(40) for kind in ("create", "write")]
    for change in found:
        assert change.process is not None
        assert change.path is not None
        assert change.process.pid == pids[change.path]
        assert change.process.command == ("sh", "-c", f"echo x > {change.path}")
        assert change.ancestors[0].pid == os.getpid()


@pytest.mark.both_engines
def test_a_process_that_executes_another_program_is_named_by_it(workspace: Workspace) -> None:
    pid = run(workspace, "bash", "-c", "echo 1 > a; exec touch b")
    found = [(change.path, change.process and change.process.command[0]) for change in workspace.log()]
    assert [name for name in found if name[0] == "a"] == [("a", "bash")] * 2
    assert ("b", "touch") in found
    assert {change.process and change.process.pid for change in workspace.log()} == {pid}


@pytest.mark.both_engines
def test_writes_before_and_after_a_program_is_executed_are_two_entries(workspace: Workspace) -> None:
    run(workspace, "bash", "-c", "exec 7>f; echo 1 >&7; exec head -c 9 /dev/zero >&7")
    found = [
        (change.process and change.process.command[0], change.bytes_written)
        for change in workspace.log()
        if change.change == "write"
    ]
    assert found == [("bash", 2), ("head", 9)]


_THREAD = """
import sys, threading
def write():
    with open(sys.argv[1], "w") as file:
        file.write("x")
    print(threading.get_native_id())
thread = threading.Thread(target=write)
thread.start()
thread.join()
"""


@pytest.mark.both_engines
def test_a_thread_is_attributed_to_its_process(workspace: Workspace, root: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", _THREAD, str(root / "f")], stdout=subprocess.PIPE, text=True)
    thread = int(program.communicate()[0])
    records = json.loads(succeeded(vfsd("log", "-w", workspace.name, "--json")))["entries"]
    assert thread != program.pid
    assert [(one["change"], one["pid"], one["thread"]) for one in records] == [
        ("create", program.pid, thread),
        ("write", program.pid, thread),
    ]


@pytest.mark.both_engines
def test_a_program_of_another_user_is_named(mount: MountIt) -> None:
    workspace = mount(allow_other=True)
    Path(workspace.path).chmod(0o777)
    run(workspace, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "touch", "f")
    created = workspace.log("f")[0]
    assert created.process is not None
    assert created.process.command == ("touch", "f")
    assert created.process.uid == 65534


@pytest.mark.both_engines
@needs_root
def test_a_process_of_an_inner_pid_namespace_has_the_id_that_the_daemon_sees(workspace: Workspace) -> None:
    run(workspace, "unshare", "--pid", "--fork", "sh", "-c", "echo x > $$")
    created = workspace.log("1")[0]
    assert created.process is not None
    assert created.process.pid != 1
    assert created.process.command[0] == "sh"
    assert created.ancestors[0].command[0] == "unshare"


_MAPPED = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
with mmap.mmap(file, 4096) as pages:
    pages[:5] = b"hello"
    pages.flush()
"""


@pytest.mark.both_engines
def test_pages_that_the_kernel_writes_back_have_no_process(mount: MountIt) -> None:
    workspace = mount()
    run(workspace, sys.executable, "-c", _MAPPED, "f")
    written = [change for change in workspace.log("f") if change.change == "write"]
    if engine_of(workspace) == "native":
        assert [change.process for change in written] == [None]
        assert "(the kernel, or another pid namespace)" in succeeded(vfsd("log", "-w", workspace.name))
    else:
        # A write request of libfuse names the process that opened the file.
        assert [change.process and change.process.command[0] for change in written] == [sys.executable]


def engine_of(workspace: Workspace) -> str:
    return workspace.status().engine


@pytest.mark.extended
@pytest.mark.both_engines
def test_thirty_two_writers_at_once_are_told_apart(workspace: Workspace, root: Path) -> None:
    script = 'for i in $(seq 12); do echo "$i" > "$0-$i"; mv "$0-$i" "$0.$i"; done; rm "$0".*'
    programs = [subprocess.Popen(["sh", "-c", script, f"w{number}"], cwd=root) for number in range(32)]
    assert [program.wait() for program in programs] == [0] * 32
    found = workspace.log()
    assert [change.number for change in found] == list(range(1, 32 * 12 * 4 + 1))
    by_name = {f"w{number}": programs[number].pid for number in range(32)}
    counts: Counter[tuple[str, str]] = Counter()
    for change in found:
        assert change.path is not None
        assert change.process is not None
        writer = re.split("[-.]", change.path)[0]
        counts[writer, change.change] += 1
        if change.change in {"create", "write"}:
            assert change.process.pid == by_name[writer]
        else:
            assert change.ancestors[0].pid == by_name[writer]
            assert change.process.name == {"rename": "mv", "unlink": "rm"}[change.change]
    assert set(counts.values()) == {12}


_CALLS = {
    "mkdir": "mkdir", "mkdirat": "mkdir", "rename": "rename", "renameat": "rename", "renameat2": "rename",
    "unlink": "unlink", "unlinkat": "unlink", "rmdir": "rmdir", "link": "link", "linkat": "link",
    "symlink": "symlink", "symlinkat": "symlink", "chmod": "chmod", "fchmod": "chmod", "fchmodat": "chmod",
    "utimensat": "utime", "ftruncate": "truncate", "truncate": "truncate",
}  # fmt: skip


def test_the_log_of_git_is_that_of_strace(workspace: Workspace, workdir: Path) -> None:
    (workdir / "trace").mkdir()
    script = (
        "git init -q . && mkdir -p src/deep && for i in 1 2 3; do echo $i > src/deep/f$i; done && git add . &&"
        " git -c user.name=a -c user.email=a@b commit -qm one && git mv src/deep/f1 g && git gc -q && chmod 600 g"
    )
    options = ["-ff", "-qq", "-y", "-s4096", "-o", f"{workdir}/trace/of", "-e", f"trace={','.join(_CALLS)}"]
    run(workspace, "strace", *options, "sh", "-c", script)
    seen: Counter[tuple[int, str]] = Counter()
    outside = rf'"/(?!{re.escape(workspace.path[1:])})'
    for trace in (workdir / "trace").iterdir():
        for line in trace.read_text(errors="replace").splitlines():
            match = re.match(r"(\w+)\((.*)\) += 0$", line)
            # A change of something outside the workspace has an absolute path.
            if match and not re.search(outside, match[2]):
                name = "rmdir" if "AT_REMOVEDIR" in match[2] else _CALLS[match[1]]
                seen[int(trace.suffix[1:]), name] += 1
    logged = Counter(
        (change.process.pid, change.change)
        for change in workspace.log()
        if change.process is not None and change.change in _CALLS.values()
    )
    assert sum(seen.values()) > 20
    assert logged == seen


# -- changes that do not come through the mount ---------------------------------------------------------
def test_calls_of_the_control_socket_are_entries(workspace: Workspace, root: Path, workdir: Path) -> None:
    (root / "f").write_text("1")
    workspace.snapshot("before")
    workspace.export(workdir / "a.zip")
    (root / "f").write_text("2")
    (root / "g").write_text("2")
    workspace.restore("before")
    vfsd("fs", "write", "h", "-w", workspace.name, input="3")
    workspace.import_archive(workdir / "a.zip")
    vfsd("fs", "rm", "h", "-w", workspace.name)
    found = [change for change in workspace.log() if change.change not in {"create", "write", "truncate"}]
    assert [change.change for change in found] == ["restore", "fs.write", "fs.rm"], "the import changed nothing"
    assert found[0].count == 2
    assert set(found[0].paths) == {"f", "g"}
    assert found[1].path == "h"
    assert found[0].process is not None
    assert found[0].process.pid == os.getpid()
    assert found[2].process is not None
    assert found[2].process.pid != os.getpid()
    assert os.getpid() in [process.pid for process in found[2].ancestors]


def test_fs_on_a_host_directory_is_attributed_to_its_client(mount: MountIt, workdir: Path) -> None:
    (workdir / "below").mkdir()
    workspace = mount(backend=f"host:{workdir}/below")
    vfsd("fs", "write", "f", "-w", workspace.name, input="text")
    found = workspace.log()
    assert found
    for change in found:
        assert change.label == "vfsd fs.write"
        assert os.getpid() in [process.pid for process in change.ancestors]
    assert {"f"} <= {change.to or change.path for change in found}


def test_merge_and_adopt_are_entries(mount: MountIt, workdir: Path) -> None:
    workspace = mount(engine="native")  # only this one forks
    with workspace.fork(workdir / "fork") as fork:
        (Path(fork.path) / "f").write_text("1")
        assert [change.change for change in fork.log()] == ["create", "write"]
        workspace.merge(fork)
        (Path(fork.path) / "g").write_text("1")
        workspace.adopt(fork)
    assert kinds(workspace.log()) == [("merge", "f"), ("adopt", "g")]


# -- selections ------------------------------------------------------------------------------------------
def test_the_log_of_a_path_has_what_removed_or_moved_the_directories_above_it(workspace: Workspace, root: Path) -> None:
    workspace.snapshot("before")
    (root / "d" / "e").mkdir(parents=True)
    (root / "d" / "e" / "f").write_text("1")
    (root / "d" / "other").mkdir()
    os.chmod(root / "d", 0o700)
    os.rename(root / "d", root / "moved")
    workspace.restore("before")
    assert kinds(workspace.log("d/e/f")) == [("create", "d/e/f"), ("write", "d/e/f"), ("rename", "d")]
    assert kinds(workspace.log("moved/e/f")) == [("rename", "d"), ("restore", None)]
    restored = workspace.log("moved/e/f")[-1]
    assert (restored.count, set(restored.paths)) == (4, {"moved", "moved/e", "moved/e/f", "moved/other"})
    assert workspace.log("moved/other")[-1] == restored
    workspace.undo()
    vfsd("fs", "rm", "-r", "moved", "-w", workspace.name)
    assert workspace.log("moved/e/f")[-1].change == "fs.rm"


def test_paths_programs_and_times_select_entries(workspace: Workspace, root: Path) -> None:
    (root / "src").mkdir()
    (root / "src" / "a").write_text("1")
    (root / "srcs").write_text("1")
    workspace.snapshot("before")
    run(workspace, "sh", "-c", "touch src/b; mv srcs src/c")
    assert {change.path for change in workspace.log("src")} == {"src", "src/a", "src/b", "srcs"}
    assert {change.path for change in workspace.log(since="before")} == {"src/b", "srcs"}
    assert {change.path for change in workspace.log(by="touch")} == {"src/b"}
    assert {change.path for change in workspace.log(by="sh")} == {"src/b", "srcs"}, "and what it started"
    assert workspace.log(by=os.getpid()) == workspace.log()
    done = vfsd("log", "--json", "--by", "nobody", "-w", workspace.name)
    nobody = json.loads(succeeded(done))
    assert (nobody["entries"], nobody["logged"]) == ([], len(workspace.log())), "it looks like an empty log"
    assert "no logged change matches; the log has " in done.stderr
    with pytest.raises(FileNotFoundError):
        workspace.log(since="never")


def test_the_command_line_takes_ages_times_and_snapshots(workspace: Workspace, root: Path) -> None:
    (root / "f").write_text("1")
    workspace.snapshot("before")
    select = ["log", "-w", workspace.name, "--since"]
    assert len(succeeded(vfsd(*select, "10m")).splitlines()) == 2
    assert len(succeeded(vfsd(*select, "2026-01-01")).splitlines()) == 2
    assert len(succeeded(vfsd(*select, "yesterday")).splitlines()) == 2
    assert len(succeeded(vfsd(*select, "2 hours ago")).splitlines()) == 2
    assert succeeded(vfsd(*select, "before")) == ""
    workspace.snapshot("today")
    assert succeeded(vfsd(*select, "today")) == "", "the name of a snapshot is that snapshot"
    for follow in ((), ("--follow",)):
        said = failed(vfsd(*select, "befor", *follow))
        assert "no such snapshot: befor; did you mean before?" in said
        assert "yesterday" in said, "the times that it takes"
        assert len(said.splitlines()) == 1


def test_a_hostile_command_line_cannot_change_the_terminal(workspace: Workspace, root: Path) -> None:
    subprocess.run([b"sh", b"-c", b"echo > f", b"\x1b]0;owned\x07\n\xff\xe2\x80\xae"], cwd=root, check=True)
    shown = succeeded(vfsd("log", "-w", workspace.name))
    assert len(shown.splitlines()) == 2
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", shown) is None
    process = workspace.log()[0].process
    assert process is not None
    assert os.fsencode(process.command[-1]) == b"\x1b]0;owned\x07\n\xff\xe2\x80\xae", "Python gets it as it is"


def test_a_long_command_line_is_cut(workspace: Workspace) -> None:
    run(workspace, "sh", "-c", "echo > f", "x" * 100_000)
    process = workspace.log()[0].process
    assert process is not None
    assert process.truncated
    assert sum(map(len, process.command)) < 1024


_UNREADABLE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
page = int(fields[45]) & ~4095  # of the start of the command line
file = os.open("page", os.O_RDWR | os.O_CREAT)
os.write(file, ctypes.string_at(page, 4096))
os.fsync(file)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
assert libc.mmap(page, 4096, 3, 0x12, file, 0) == page  # MAP_PRIVATE | MAP_FIXED
os.mkdir("made")
"""


@pytest.mark.both_engines
def test_a_command_line_that_is_a_file_of_the_mount_does_not_block_it(workspace: Workspace) -> None:
    # Reading it makes the kernel ask the daemon for the file.
    run(workspace, sys.executable, "-c", _UNREADABLE)
    made = workspace.log("made")[0]
    assert made.process is not None
    assert made.process.name.startswith("python")


# -- labels ----------------------------------------------------------------------------------------------
_WRITES_BACK_IN_EXEC = f"""
import mmap, os, sys, time
file = os.open("mapped", os.O_RDWR | os.O_CREAT)
os.truncate(file, {32 << 20})
mapping = mmap.mmap(file, {32 << 20})
if not os.fork():
    mapping.close()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    os.mkdir("made")
    os._exit(0)
mapping[:] = bytes([1]) * {32 << 20}
print("ready", flush=True)
sys.stdin.buffer.raw.read(1)
os.execv("/bin/sleep", ["sleep", "0.1"])
"""


@pytest.mark.both_engines
def test_a_parent_that_writes_a_mapping_back_while_it_executes_a_program_does_not_block_the_daemon(
    workspace: Workspace, workdir: Path
) -> None:
    # Until the pages are written, much of what /proc shows of the parent waits (vfsd.machine.processes).
    command = [sys.executable, "-c", _WRITES_BACK_IN_EXEC, str(workdir / "begin")]
    other = Workspace.mount(workdir / "other")
    with subprocess.Popen(command, cwd=workspace.path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        os.kill(workspace.pid, signal.SIGSTOP)
        try:
            parent.stdin.write(b"x")
            parent.stdin.flush()
            time.sleep(0.5)  # nothing shows without waiting that the program is there
            other.unmount()
            (workdir / "begin").touch()
            time.sleep(0.5)
        finally:
            os.kill(workspace.pid, signal.SIGCONT)
        assert parent.wait() == 0
    made = workspace.log("made")[0]
    assert made.process is not None
    assert made.process.name.startswith("python")


def test_a_label_is_inherited_by_what_is_started_below_it(workspace: Workspace, root: Path) -> None:
    with workspace.label("turn 1"):
        (root / "a").mkdir()
        late = subprocess.Popen(["sh", "-c", "mkdir b; read line; mkdir c"], cwd=root, stdin=subprocess.PIPE)
        while not (root / "b").exists():
            time.sleep(0.01)
    (root / "d").mkdir()
    late.communicate(b"\n")
    assert {change.path: change.label for change in workspace.log()} == {
        "a": "turn 1",
        "b": "turn 1",
        "c": "turn 1",
        "d": None,
    }


# It runs hooks as Claude Code does: in a shell, with the event on standard input.
_AGENT = """
import json, os, subprocess, sys
hook, event = sys.argv[1], json.loads(sys.argv[2])
def tell(name):
    subprocess.run(["sh", "-c", hook], input=json.dumps({**event, "hook_event_name": name}).encode(), check=True)
os.mkdir("before")
tell("PreToolUse")
os.mkdir("own")
subprocess.run(["sh", "-c", "mkdir tool"], check=True)
tell("PostToolUse")
tell("Stop")
os.mkdir("after")
"""


def test_a_call_of_a_tool_of_claude_code_is_the_label_of_what_it_starts(workspace: Workspace) -> None:
    event = {"cwd": workspace.path, "tool_name": "Bash", "tool_input": {"command": "make"}, "tool_use_id": "toolu_1"}
    run(workspace, sys.executable, "-c", _AGENT, hook_commands("claude")["PreToolUse"], json.dumps(event))
    call = "claude toolu_1: Bash: make"
    labels = {change.path: change.label for change in workspace.log()}
    assert labels == {"before": None, "own": call, "tool": call, "after": None}


def test_a_model_reads_the_log_with_a_tool(workspace: Workspace, root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").write_text("12345")
    session = Session(workspace.name)
    shown = anyio.run(SERVED_TOOLS["log"].call, {"paths": ["d/f"], "limit": 1}, session, lambda _: None)
    first, entry = shown.splitlines()
    assert first.startswith("(1 older ones")
    assert re.fullmatch(rf"\S+  write  d/f  5 bytes  by {os.getpid()} .*", entry)


def test_what_exec_runs_belongs_to_it(mount: MountIt) -> None:
    workspace = mount(exec_on_host=True)
    workspace.executor.run(["sh", "-c", "mkdir a; (setsid mkdir b)"])
    assert {change.path: change.label for change in workspace.log()} == dict.fromkeys(
        ("a", "b"), "exec: sh -c mkdir a; (setsid mkdir b)"
    )


# -- following -------------------------------------------------------------------------------------------
def test_follow_yields_changes_as_they_are_made(workspace: Workspace, root: Path) -> None:
    with workspace.follow("d") as changes:
        (root / "other").mkdir()
        (root / "d").mkdir()
        (root / "d" / "f").write_text("12345")
        found = [next(changes) for _ in range(3)]
    assert [isinstance(one, LoggedChange) and (one.change, one.path) for one in found] == [
        ("mkdir", "d"),
        ("create", "d/f"),
        ("write", "d/f"),
    ]


def test_follow_since_a_snapshot_yields_everything_after_it_once(workspace: Workspace, root: Path) -> None:
    (root / "a").mkdir()
    workspace.snapshot("s")
    (root / "b").mkdir()
    with workspace.follow(since="s") as changes:
        (root / "c").mkdir()
        found = [next(changes) for _ in range(2)]
    assert [isinstance(one, LoggedChange) and one.path for one in found] == ["b", "c"]


@pytest.fixture
def alone(engine: str, workdir: Path) -> Callable[..., Workspace]:
    """Mounts a workspace that its test unmounts."""
    return functools.partial(Workspace.mount, workdir / "alone", name=workdir.name, engine=engine)


def test_events_tell_what_other_programs_have_written(workspace: Workspace, root: Path) -> None:
    events: SimpleQueue[FileEvent] = SimpleQueue()
    with MountEvents(workspace, workspace.path, events.put):
        (root / "mine").write_text("not told")
        run(workspace, "sh", "-c", "echo 12345 > new; mv new kept; touch empty; echo 1 > last")
        found = {events.get(timeout=30) for _ in range(3)}
    assert found == {FileWritten("new", 6), FileWritten("kept", 6), FileWritten("last", 2)}
    run(workspace, "sh", "-c", "echo 1 > later; mv later latest")
    assert events.empty()


# -- limits, the file, off -------------------------------------------------------------------------------
def test_without_audit_there_is_no_log(mount: MountIt) -> None:
    workspace = mount(audit=False)
    with pytest.raises(OSError, match="--no-audit") as caught:
        workspace.log()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_the_file_has_every_entry(alone: Callable[..., Workspace], workdir: Path) -> None:
    workspace = alone(audit_file=workdir / "log.jsonl")
    root = Path(workspace.path)
    for number in range(200):
        (root / f"f{number}").write_text("1")
    expected = [change.number for change in workspace.log()]
    workspace.unmount()
    lines = [json.loads(line) for line in (workdir / "log.jsonl").read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == expected
    assert (workdir / "log.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def full_disk(workdir: Path) -> Iterator[Path]:
    with mounted_tmpfs(workdir / "disk", max_bytes=16 << 10) as place:
        yield place


def test_a_full_disk_stops_nothing_and_the_file_says_what_is_missing(
    alone: Callable[..., Workspace], full_disk: Path
) -> None:
    workspace = alone(audit_file=full_disk / "log.jsonl")
    root = Path(workspace.path)
    for number in range(100):
        (root / f"d{number}").mkdir()

    def wait_said(text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in (said := vfsd("log", "-w", workspace.name).stderr) or "the audit file lacks" not in said:
            assert time.monotonic() < deadline, said
            time.sleep(0.05)

    wait_said("No space left on device")
    subprocess.run(["mount", "-o", "remount,size=1m", full_disk], check=True)
    (root / "after").mkdir()
    wait_said("it is written again")
    workspace.unmount()
    lines = [json.loads(line) for line in (full_disk / "log.jsonl").read_text().splitlines()]
    missing = sum(line.get("missing", 0) for line in lines)
    kept = [line["number"] for line in lines if "number" in line]
    assert missing + len(kept) == 101
    assert kept == sorted(kept)
    assert kept[-1] == 101


def test_a_file_that_is_rotated_or_torn_is_continued_with_whole_lines(
    alone: Callable[..., Workspace], workdir: Path
) -> None:
    file = workdir / "log.jsonl"
    file.write_text('{"number":')
    workspace = alone(audit_file=file)
    root = Path(workspace.path)
    (root / "first").mkdir()
    wait_until(lambda: "first" in file.read_text(), "the first entry")
    file.rename(workdir / "old.jsonl")
    (root / "second").mkdir()
    wait_until(lambda: file.exists() and "second" in file.read_text(), "another file")
    file.rename(workdir / "older.jsonl")
    file.touch(mode=0o600)  # as the option `create` of logrotate does
    (root / "third").mkdir()
    workspace.unmount()
    torn, *lines = (workdir / "old.jsonl").read_text().splitlines()
    assert torn == '{"number":'
    assert [json.loads(line)["path"] for line in lines] == ["first"]
    assert [json.loads(line)["path"] for line in (workdir / "older.jsonl").read_text().splitlines()] == ["second"]
    assert [json.loads(line)["path"] for line in file.read_text().splitlines()] == ["third"]


def test_the_log_says_that_it_begins_later_than_asked(mount: MountIt) -> None:
    workspace = mount()
    (Path(workspace.path) / "d").mkdir()
    assert "the log begins at" in vfsd("log", "-w", workspace.name, "--since", "1d").stderr
    workspace.snapshot("now")
    assert vfsd("log", "-w", workspace.name, "--since", "now").stderr == ""


def test_a_device_is_no_file_for_the_log_and_is_not_to_be_removed(mount: MountIt) -> None:
    with pytest.raises(OSError, match=r"not a regular file; name another one") as caught:
        mount(audit_file="/dev/null")
    assert "remove" not in str(caught.value)


def test_the_file_must_not_be_in_the_directory_that_the_workspace_shows(mount: MountIt, workdir: Path) -> None:
    below = workdir / "below"
    below.mkdir()
    for backend in ("host", "overlay"):
        for option in ({"audit_file": below / "log"}, {"journal_dir": below / "journal", "persist": True}):
            with pytest.raises(ValueError, match="inside the directory that the workspace shows"):
                mount(backend=f"{backend}:{below}", **option)
    assert not any(below.iterdir())


@pytest.mark.parametrize("backend", ["memory", "host"])
def test_the_newest_states_of_a_timeline_have_the_counts_that_all_have(
    mount: MountIt, workdir: Path, backend: str
) -> None:
    workspace = mount(backend=backend)
    for number in range(4):
        (Path(workspace.path) / f"f{number}").touch()
        workspace.snapshot(f"s{number}")

    def states(*words: str) -> list[tuple[str | None, dict[str, int] | None]]:
        shown = succeeded(vfsd("timeline", "-w", workspace.name, "--json", *words))
        return [(state["name"], state["changes"]) for state in json.loads(shown)["states"]]

    whole = states()
    assert [name for name, _ in whole] == ["s0", "s1", "s2", "s3", None]
    assert all(changes is not None for _, changes in whole)
    for number in range(1, 7):
        assert states("-n", str(number)) == whole[-number:]


def test_the_timeline_names_the_programs_and_counts_what_they_changed(workspace: Workspace, root: Path) -> None:
    def timeline() -> list[tuple[str | None, dict[str, int], dict[str, int]]]:
        states = json.loads(succeeded(vfsd("-w", workspace.name, "--json", "timeline")))["states"]
        return [
            (each["name"], each["changes"], {one["name"]: one["entries"] for one in each["authors"]}) for each in states
        ]

    run(workspace, "mkdir", "d")
    workspace.snapshot("one")
    time.sleep(0.01)  # a snapshot's time is in milliseconds
    run(workspace, "touch", "d/a", "d/b")
    workspace.snapshot("two")
    time.sleep(0.01)
    run(workspace, "rm", "d/a")
    counts = [{"added": 1, "modified": 0, "removed": 0}, {"added": 2, "modified": 0, "removed": 0}]
    found = timeline()
    assert [(name, changes) for name, changes, _ in found[:2]] == [("one", counts[0]), ("two", counts[1])]
    assert found[2][:2] == (None, {"added": 0, "modified": 0, "removed": 1})
    assert [set(programs) for _, _, programs in found] == [{"mkdir"}, {"touch"}, {"rm"}]
    workspace.drop("two")
    name, changes, programs = timeline()[-1]
    assert (name, changes) == (None, {"added": 1, "modified": 0, "removed": 0})
    assert programs.keys() == {"touch", "rm"}
