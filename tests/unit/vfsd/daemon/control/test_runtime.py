"""Where workspaces are found: the runtime directory, records, and which one a caller means."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.foreign_files import NOT_REGULAR, plant
from tests.support.rights import needs_root
from vfsd.machine import runtime
from vfsd.machine.runtime import (
    WorkspaceNotFoundError,
    WorkspaceRecord,
    ensure_socket_dir,
    find_workspace,
    process_start_ticks,
    read_records,
    record_path,
    remove_record,
    runtime_dir,
    socket_path,
    unique_name,
    write_record,
)
from vfsd.wire.options import NAME_PATTERN


@pytest.fixture(autouse=True)
def directory(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(workdir / "run"))
    return ensure_socket_dir()


def record(name: str, mountpoint: str, *, alive: bool = True, pid: int | None = None) -> WorkspaceRecord:
    pid = os.getpid() if pid is None else pid
    ticks = process_start_ticks(pid) or 0
    return WorkspaceRecord(
        name=name,
        mountpoint=mountpoint,
        pid=pid,
        pid_start_ticks=ticks if alive else ticks + 1,
        backend="memory",
        started_at="2026-01-01T00:00:00Z",
        version="0.1.0",
        socket=socket_path(name),
    )


def put(name: str, mountpoint: str, *, alive: bool = True) -> WorkspaceRecord:
    written = record(name, mountpoint, alive=alive)
    write_record(written)
    return written


def find(selector: str | None, cwd: str = "/", **environ: str) -> str:
    return find_workspace(selector, cwd, environ=environ).name


# -- the directory ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"VFSD_RUNTIME_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}, 0, "/a"),
        ({"XDG_RUNTIME_DIR": "/b"}, 0, "/b"),
        ({"VFSD_RUNTIME_DIR": "", "XDG_RUNTIME_DIR": ""}, 0, "/run"),
        ({"VFSD_RUNTIME_DIR": "relative"}, 0, "/run"),
        ({}, 0, "/run"),
        ({}, 1000, "/tmp/vfsd-1000"),
    ],
)
def test_the_runtime_directory_is_the_first_that_applies(
    environ: dict[str, str], uid: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert runtime_dir(environ) == expected


def test_the_directory_is_private(directory: str) -> None:
    os.chmod(directory, 0o777)
    assert ensure_socket_dir() == directory
    assert stat.S_IMODE(os.lstat(directory).st_mode) == 0o700


def test_a_symlink_in_the_directorys_place_is_refused(directory: str, workdir: Path) -> None:
    os.rmdir(directory)
    os.mkdir(workdir / "elsewhere")
    os.symlink(workdir / "elsewhere", directory)
    with pytest.raises(PermissionError, match="is not a directory"):
        ensure_socket_dir()


@needs_root
def test_a_directory_of_another_user_is_refused(directory: str) -> None:
    os.chown(directory, 65534, 65534)
    with pytest.raises(PermissionError, match=r"belongs to uid 65534.*VFSD_RUNTIME_DIR"):
        ensure_socket_dir()


@needs_root
def test_without_a_runtime_directory_another_users_in_tmp_is_refused() -> None:
    path = "/tmp/vfsd-65534"
    if os.path.lexists(path):
        pytest.fail(f"{path} exists: remove it")
    code = (
        "import os; from vfsd.machine.runtime import ensure_socket_dir\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for name in ('VFSD_RUNTIME_DIR', 'XDG_RUNTIME_DIR'): os.environ.pop(name, None)\n"
        "print(ensure_socket_dir())\n"
    )
    try:
        fine = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert fine.stdout.strip() == f"{path}/vfsd"
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o700
        os.chown(path, 0, 0)
        refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "belongs to uid 0" in refused.stderr
        # Nor are its records believed, though there the stranger could put any socket.
        code = code.replace("ensure_socket_dir", "read_records")
        refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "belongs to uid 0" in refused.stderr
    finally:
        if os.path.isdir(f"{path}/vfsd"):
            os.rmdir(f"{path}/vfsd")
        if os.path.isdir(path):
            os.rmdir(path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-a", "a b", "a\n", "ä", "x" * 65])
def test_what_is_no_name_gets_no_path(name: str) -> None:
    with pytest.raises(ValueError, match="not a workspace name"):
        socket_path(name)
    with pytest.raises(ValueError, match="not a workspace name"):
        record_path(name)


# -- records ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mountpoint", ["/mnt/a", "/mnt/ä b\n", "/mnt/back\\slash", "/mnt/\udcff\udcfe"])
def test_a_record_is_read_as_it_was_written(mountpoint: str, directory: str) -> None:
    written = put("a", mountpoint)
    assert read_records() == [written]
    assert sorted(os.listdir(directory)) == ["a.json"]


def test_records_come_by_name_and_what_is_none_is_left_out(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    put("b", "/b")
    put("a", "/a")
    for name, content in (("c.json", b"{"), ("d.json", b'{"name": 1}'), ("e.sock", b""), (".record-x.json", b"{")):
        Path(directory, name).write_bytes(content)
    os.mkdir(os.path.join(directory, "f.json"))
    assert [found.name for found in read_records()] == ["a", "b"]
    assert [os.path.basename(str(entry.args[0])) for entry in caplog.records if entry.args] == [
        "c.json",
        "d.json",
        "f.json",
    ]


@pytest.mark.parametrize("kind", [*NOT_REGULAR, "huge"])
def test_a_record_that_is_no_file_is_named_and_keeps_nobody_waiting(
    kind: str, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    put("b", "/b")
    plant(Path(directory, "a.json"), kind)
    assert [found.name for found in read_records()] == ["b"]
    assert "a.json: " in caplog.text
    write_record(record("c", "/c"))
    remove_record(record("a", "/a"))
    assert os.path.lexists(os.path.join(directory, "a.json"))


@pytest.mark.parametrize("content", [b"", b"\xff", b"\x80{}", b"[" * 200_000, b"\0" * 4096, b"nu\xffll"])
def test_a_record_of_any_content_is_left_out_and_named(
    content: bytes, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    put("b", "/b")
    Path(directory, "a.json").write_bytes(content)
    assert [found.name for found in read_records()] == ["b"]
    assert "a.json: " in caplog.text


def test_without_a_directory_there_are_no_records(directory: str) -> None:
    os.rmdir(directory)
    assert read_records() == []


def test_removing_a_record_leaves_that_of_another_daemon() -> None:
    dead = put("a", "/a", alive=False)
    living = put("a", "/a")
    remove_record(dead)
    assert read_records() == [living]
    remove_record(living)
    remove_record(living)
    assert read_records() == []


def test_a_workspace_is_alive_while_its_process_runs() -> None:
    sleeper = subprocess.Popen(["sleep", "1000"])
    found = record("a", "/a", pid=sleeper.pid)
    assert (found.alive, found.state) == (True, "alive")
    sleeper.kill()
    # Not reaped, so that the pid is still in /proc: a zombie serves nobody.
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert (found.alive, found.state) == (False, "dead")
    sleeper.wait()
    assert (found.alive, found.state) == (False, "dead")


def test_a_pid_that_was_given_anew_is_another_process() -> None:
    assert record("a", "/a").alive
    assert not record("a", "/a", alive=False).alive


def test_a_process_name_with_parentheses_and_spaces_is_no_obstacle(workdir: Path) -> None:
    program = workdir / "a) S (1 2"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "1000"]) as process:
        ticks = process_start_ticks(process.pid)
        process.kill()
    assert ticks is not None
    assert ticks >= (process_start_ticks(os.getpid()) or 0)


# -- finding one --------------------------------------------------------------------------------------
def test_a_workspace_is_found_by_name_and_by_path_at_or_below_its_mount() -> None:
    put("a", "/mnt/a")
    put("ab", "/mnt/ab")
    for selector in ("a", "/mnt/a", "/mnt/a/", "/mnt/a/deep/er", "/mnt//x/../a/./b"):
        assert find(selector) == "a"
    assert find("a/b", cwd="/mnt") == "a"
    assert find(".", cwd="/mnt/ab/c") == "ab"
    assert find("..", cwd="/mnt/ab/c") == "ab"
    assert find("/mnt/ab") == "ab"


def test_a_name_goes_before_a_path() -> None:
    put("x", "/mnt/named")
    put("y", "/mnt/x")
    assert find("x", cwd="/mnt") == "x"
    assert find("./x", cwd="/mnt") == "y"


def test_in_a_workspace_a_name_that_no_workspace_has_does_not_mean_that_one() -> None:
    put("a", "/mnt/a")
    put("inner", "/mnt/a/mounted")
    for mistyped in ("aa", "sub"):
        with pytest.raises(
            WorkspaceNotFoundError, match=rf"'{mistyped}' is not the name of a workspace.*\./{mistyped}"
        ):
            find(mistyped, cwd="/mnt/a")
    assert find("./sub", cwd="/mnt/a") == find("sub/dir", cwd="/mnt/a") == "a"
    assert find("mounted", cwd="/mnt/a") == "inner"


def test_the_innermost_mount_is_meant() -> None:
    put("outer", "/mnt/a")
    put("inner", "/mnt/a/b/c")
    assert find("/mnt/a/b/c/d") == "inner"
    assert find("/mnt/a/b") == "outer"


def test_a_path_through_symlinks_is_followed_to_the_mount(workdir: Path) -> None:
    os.makedirs(workdir / "real")
    os.symlink("real", workdir / "link")
    os.symlink(str(workdir / "link" / "ws" / "sub"), workdir / "direct")
    os.symlink("loop", workdir / "loop")
    put("a", str(workdir / "real" / "ws"))
    put("b", "/b")
    assert find(str(workdir / "link" / "ws" / "x")) == "a"
    assert find("link/../real/ws", cwd=str(workdir)) == "a"
    assert find("direct", cwd=str(workdir)) == "a"
    with pytest.raises(WorkspaceNotFoundError):
        find("loop/x", cwd=str(workdir))


def test_without_a_selector_the_environment_then_the_directory_then_a_path_is_meant() -> None:
    put("a", "/mnt/a")
    put("b", "/mnt/b")
    assert find_workspace(None, "/", environ={}, paths=["relative", "/mnt/b/c"]).name == "b"
    assert find_workspace(None, "/mnt/a", environ={}, paths=["/mnt/b/c"]).name == "a"
    with pytest.raises(WorkspaceNotFoundError, match="no-such"):
        find_workspace(None, "/", environ={"VFSD_WORKSPACE": "no-such"}, paths=["/mnt/b/c"])
    assert find(None, cwd="/mnt/b/c") == "b"
    assert find(None, cwd="/mnt/b/c", VFSD_WORKSPACE="a") == "a"
    assert find("b", cwd="/", VFSD_WORKSPACE="a") == "b"
    assert find(None, cwd="/mnt/b", VFSD_WORKSPACE="/mnt/a/x") == "a"
    assert find(None, cwd="/mnt/b", VFSD_WORKSPACE="") == "b"


def test_only_a_caller_that_reads_gets_the_only_one_running_and_is_told() -> None:
    put("a", "/mnt/a")
    taken: list[WorkspaceRecord] = []
    with pytest.raises(WorkspaceNotFoundError, match=r"directory is in no workspace.*-w NAME.*running: a \(/mnt/a\)"):
        find(None)
    assert find_workspace(None, "/", environ={}, on_only=taken.append).name == "a"
    assert [each.name for each in taken] == ["a"]
    assert find_workspace(None, "/mnt/a", environ={}, on_only=taken.append).name == "a"
    assert len(taken) == 1


def test_a_dead_workspace_is_found_by_name_path_and_directory_but_never_as_the_only_one() -> None:
    put("dead", "/mnt/dead", alive=False)
    assert find("dead") == find("/mnt/dead/x") == find(None, cwd="/mnt/dead") == "dead"
    with pytest.raises(WorkspaceNotFoundError, match=r"vfsd mount MOUNTPOINT \(dead: dead \(/mnt/dead\)\)"):
        find(None)
    put("alive", "/mnt/alive")
    assert find_workspace(None, "/", environ={}, on_only=lambda _: None).name == "alive"


def test_at_one_mount_point_the_living_workspace_goes_before_the_dead() -> None:
    put("z-new", "/mnt/a")
    put("a-old", "/mnt/a", alive=False)
    put("zz-old", "/mnt/a", alive=False)
    assert find("/mnt/a") == "z-new"


def test_errors_say_what_there_is_and_what_to_type() -> None:
    with pytest.raises(WorkspaceNotFoundError, match="no workspace is running, start one with: vfsd mount MOUNTPOINT"):
        find(None)
    put("a", "/mnt/a")
    put("b", "/mnt/b")
    running = r"a \(/mnt/a\), b \(/mnt/b\)"
    with pytest.raises(WorkspaceNotFoundError, match=f"in no workspace.*-w NAME.*: {running}"):
        find_workspace(None, "/", environ={}, on_only=lambda _: None)
    with pytest.raises(WorkspaceNotFoundError, match=f"'no-such' is not the name of a workspace.*running: {running}"):
        find("no-such")
    with pytest.raises(WorkspaceNotFoundError, match=f"'/mnt' is in no workspace; running: {running}"):
        find("/mnt")
    with pytest.raises(WorkspaceNotFoundError, match=r"'no-such' \(from \$VFSD_WORKSPACE\)"):
        find(None, VFSD_WORKSPACE="no-such")
    assert issubclass(WorkspaceNotFoundError, LookupError)


def test_nothing_asks_a_mount_which_may_hang(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mountpoint = str(workdir / "hung")
    real = {name: getattr(os, name) for name in ("stat", "lstat", "readlink", "listdir", "open")}

    def guarded(name: str) -> object:
        def call(path: object, *args: object, **kwargs: object) -> object:
            assert not str(path).startswith(mountpoint), f"{name} on the mount"
            return real[name](path, *args, **kwargs)

        return call

    os.mkdir(mountpoint)
    os.symlink("hung", workdir / "link")
    put("a", mountpoint)
    put("b", "/mnt/b")
    for name in real:
        monkeypatch.setattr(runtime.os, name, guarded(name))
    for selector in (mountpoint, f"{mountpoint}/x/y", str(workdir / "link" / "x")):
        assert find(selector) == "a"
    assert find(None, cwd=f"{mountpoint}/x") == "a"
    assert [found.state for found in read_records()] == ["alive", "alive"]
    assert unique_name(mountpoint) == "hung"


# -- names --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("/mnt/work", "work"),
        ("/mnt/work/", "work"),
        ("work", "work"),
        ("/mnt/My Project (2)", "My-Project-2-"),
        ("/mnt/.hidden", "hidden"),
        ("/mnt/--", "workspace"),
        ("/", "workspace"),
        ("", "workspace"),
        ("/mnt/日本", "workspace"),
        ("/mnt/\udcff.x", "x"),
        ("/mnt/" + "x" * 300, "x" * 64),
    ],
)
def test_a_name_is_made_from_the_mount_points_last_part(base: str, name: str) -> None:
    assert unique_name(base) == name
    assert NAME_PATTERN.fullmatch(name)


def test_a_name_in_use_is_numbered() -> None:
    put("work", "/a/work")
    put("work-2", "/b/work")
    put("x" * 64, "/a/" + "x" * 64)
    assert unique_name("/c/work") == "work-3"
    assert unique_name("/c/work", ["work-3", "work-4"].__contains__) == "work-5"
    assert unique_name("/" + "x" * 100) == "x" * 62 + "-2"


def test_after_a_crash_the_same_mount_point_gets_the_same_name() -> None:
    put("work", "/a/work", alive=False)
    assert unique_name("/a/work") == "work"
    assert unique_name("/a/work/") == "work"
    assert unique_name("/b/work") == "work-2"


def test_the_command_that_continues_a_dead_workspace_has_the_options_of_its_object_store() -> None:
    dead = structs.replace(
        record("a", "/m", alive=False),
        journal="/journals/a", backend="overlay:s3://b/x#one", store_options=("endpoint=http://h:1", "allow_http=true"),
    )  # fmt: skip
    with pytest.raises(ConnectionRefusedError) as caught:
        dead.check_alive()
    options = "--store-option endpoint=http://h:1 --store-option allow_http=true"
    assert f"--backend 'overlay:s3://b/x#one' {options}` continues it" in str(caught.value)
