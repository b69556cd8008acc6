"""Attached directories: workspaces without a mount, by real daemons, where FUSE is not needed and may be missing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.adapters.host import HostFilesystem
from protocol.errors import NotMountedError
from tests.mount.programs import failed, succeeded, vfsd
from tests.mount.test_host_backend import rich_tree, tree_of
from tests.support.host_directories import mounted_tmpfs
from tests.support.rights import needs_root
from tests.support.zygote import starting_interpreters
from vfsd.client.arguments import attach_options
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.connection import daemon_end
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace
from vfsd.daemon import attached
from vfsd.machine.runtime import WorkspaceRecord, ensure_socket_dir, read_record, socket_dir

# A mount namespace in which /dev has no fuse, as in a container without privileges; then a plain user, who may read
# the interpreter wherever it lies.
WITHOUT_FUSE = """
mount -t tmpfs dev "$0"
for name in null zero full random urandom; do touch "$0/$name"; mount --bind "/dev/$name" "$0/$name"; done
mount --rbind "$0" /dev
exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all,+dac_read_search \\
    --ambient-caps=+dac_read_search "$@"
"""


@pytest.fixture
def directory(workdir: Path) -> Path:
    place = workdir / "project"
    place.mkdir()
    return place


@pytest.fixture
def store(workdir: Path) -> Path:
    return workdir / "store"


@pytest.fixture
def workspace(directory: Path, store: Path) -> Iterator[Workspace]:
    with Workspace.attach_directory(directory, store=store) as workspace:
        yield workspace


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that a stranger may enter."""
    with tempfile.TemporaryDirectory(prefix="vfsd-attached-") as place:
        os.chmod(place, 0o755)
        yield Path(place)


def killed(workspace: Workspace) -> WorkspaceRecord:
    """The record of a workspace whose daemon was killed."""
    with daemon_end(workspace.pid) as wait_ended:
        os.kill(workspace.pid, signal.SIGKILL)
        wait_ended()
    found = read_record(workspace.name)
    assert found is not None
    assert not found.alive
    return found


# -- what works as for host:DIR ----------------------------------------------------------------------
def test_every_state_comes_back_as_a_twin_of_the_directory_has_it(
    workspace: Workspace, directory: Path, workdir: Path
) -> None:
    rich_tree(directory / "tree")
    states = []
    for number in range(3):
        (directory / "tree" / f"new-{number}").write_text(str(number))
        (directory / "tree" / "plain").write_bytes(bytes([number]) * 5000)
        if number == 1:
            shutil.rmtree(directory / "tree" / "dir")
        workspace.snapshot(f"s{number}")
        twin = workdir / f"twin-{number}"
        subprocess.run(["cp", "-a", directory, twin], check=True)
        states.append(twin)
    for number in (0, 2, 1):
        workspace.restore(f"s{number}")
        assert tree_of(directory) == tree_of(states[number])
    workspace.undo()
    assert tree_of(directory) == tree_of(states[2])
    assert [change.path for change in workspace.diff("s1", "s2").changes]
    workspace.export(workdir / "x.zip", snapshot="s0")
    assert (workdir / "x.zip").stat().st_size
    workspace.filesystem.write("from-python", "x")
    assert (directory / "from-python").read_text() == "x"


@pytest.mark.extended
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=5)
@given(st.lists(st.tuples(st.sampled_from(("write", "drop", "keep", "restore", "undo")), st.integers(0, 3))))
def test_the_directory_is_that_of_a_plain_model(
    workspace: Workspace, directory: Path, calls: list[tuple[str, int]]
) -> None:
    for path in directory.iterdir():
        path.unlink()
    names = {info.name for info in workspace.snapshots()}
    if names:
        workspace.drop(*names)
    model: dict[str, str] = {}
    kept: dict[str, dict[str, str]] = {}
    before: list[dict[str, str]] = []
    for step, (call, number) in enumerate(calls):
        name = f"k{number}"
        if call == "write":
            (directory / name).write_text(f"{step}")
            model[name] = f"{step}"
        elif call == "drop":
            (directory / name).unlink(missing_ok=True)
            model.pop(name, None)
        elif call == "keep":
            if name in kept:
                workspace.drop(name)
            workspace.snapshot(name)
            kept[name] = dict(model)
        elif call == "restore" and name in kept:
            if model != kept[name]:
                before.append(model)
            workspace.restore(name)
            model = dict(kept[name])
        elif call == "undo" and before and workspace.undo():
            model = dict(before.pop())
            before.clear()  # further steps are those of tests/model/test_undo_model.py
        assert {path.name: path.read_text() for path in directory.iterdir()} == model


def test_a_revert_undoes_one_change_and_keeps_what_came_later(workspace: Workspace, directory: Path) -> None:
    (directory / "f").write_text("a\nb\nc\n")
    workspace.snapshot("one")
    (directory / "f").write_text("a\nB\nc\n")
    (directory / "new").write_text("x")
    workspace.snapshot("two")
    (directory / "f").write_text("a\nB\nc\nd\n")
    succeeded(vfsd("revert", "-w", workspace.name, "one..two"))
    assert ((directory / "f").read_text(), os.listdir(directory)) == ("a\nb\nc\nd\n", ["f"])
    workspace.undo()
    assert ((directory / "f").read_text(), (directory / "new").read_text()) == ("a\nB\nc\nd\n", "x")


@pytest.mark.extended
def test_the_asynchronous_api_attaches_too(directory: Path, store: Path) -> None:
    (directory / "f").write_text("one")

    async def use() -> None:
        async with AsyncWorkspace.attach_directory(directory, store=store) as workspace:
            await workspace.snapshot("one")
            (directory / "f").write_text("two")
            await workspace.restore("one")

    trio.run(use)
    assert (directory / "f").read_text() == "one"


# -- the end -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "end", ["kill", *(pytest.param(end, marks=pytest.mark.extended) for end in ("unmount", "terminate"))]
)
def test_the_directory_stays_and_the_next_attach_finds_its_snapshots(directory: Path, store: Path, end: str) -> None:
    (directory / "f").write_text("one")
    workspace = Workspace.attach_directory(directory, store=store).__enter__()
    workspace.snapshot("one")
    (directory / "f").write_text("two")
    if end == "unmount":
        workspace.unmount()
    elif end == "kill":
        assert str(directory) in killed(workspace).content_after_crash
    else:
        with daemon_end(workspace.pid) as wait_ended:
            os.kill(workspace.pid, signal.SIGTERM)
            wait_ended()
    assert (directory / "f").read_text() == "two"
    with Workspace.attach_directory(directory, store=store) as again:
        assert again.name == workspace.name
        again.restore("one")
        assert (directory / "f").read_text() == "one"
        again.undo()
        assert (directory / "f").read_text() == "two"


def test_the_record_of_a_killed_daemon_is_removed_without_a_mount(workspace: Workspace, directory: Path) -> None:
    (directory / "f").write_text("kept")
    killed(workspace)
    done = vfsd("unmount", workspace.name)
    assert "mount was removed" not in done.stderr
    assert "detached" in succeeded(done)
    assert (directory / "f").read_text() == "kept"
    assert read_record(workspace.name) is None


def test_another_directory_at_its_path_is_refused(workspace: Workspace, directory: Path, workdir: Path) -> None:
    """A clone in its place, for example: a snapshot would not have it, and a restore would change the old directory."""
    files = HostFilesystem(workspace.path, mount=workspace.mount_id)
    for name in ("one", "two"):
        (directory / "f").write_text(name)
        workspace.snapshot(name)
    workspace.restore("one")
    names = [info.name for info in workspace.snapshots()]
    moved = directory.rename(directory.with_name("moved"))
    (moved / "f").write_text("changed")
    calls = ("snapshot", "diff", "restore one", "restore --undo", "revert one..two", f"export {workdir / 'x.zip'}")
    for what in ("gone", "replaced"):
        if what == "replaced":
            directory.mkdir()
            (directory / "g").touch()
        with pytest.raises(NotMountedError):
            files.read("f")
        for call in (*calls, "fs ls", "fs write f"):
            done = vfsd(*call.split(), "-w", workspace.name, input="x")
            assert done.returncode == 1, call
            assert "the attached directory was moved, removed or replaced" in done.stderr + done.stdout, call
    assert [path.name for path in directory.iterdir()] == ["g"]
    assert (moved / "f").read_text() == "changed"
    assert [info.name for info in workspace.snapshots()] == names
    shutil.rmtree(directory)
    moved.rename(directory)
    workspace.undo()
    assert (directory / "f").read_text() == "two"


def test_a_restore_leaves_journals_of_workspaces_as_they_are(
    directory: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon appends to its journal: an older one lacks what programs wrote and synced."""
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    journal = directory / "state/vfsd/journals/w/log"
    journal.parent.mkdir(parents=True)
    files = (journal, directory / "f")
    with Workspace.attach_directory(directory, store=store) as workspace:
        for number in ("one", "two"):
            for path in files:
                path.write_text(number)
            workspace.snapshot(number)
        for restore in (lambda: workspace.restore("one"), lambda: workspace.revert("one", "two")):
            with pytest.raises(OSError, match="journals of workspaces") as caught:
                restore()
            assert caught.value.errno == errno.EBUSY
            assert [path.read_text() for path in files] == ["two", "two"]
        workspace.restore("one", ["f"])
        assert [path.read_text() for path in files] == ["two", "one"]
        workspace.undo()  # the journals are as in the state before
        assert [path.read_text() for path in files] == ["two", "two"]


# -- what needs a mount ------------------------------------------------------------------------------
def test_a_verb_that_needs_a_mount_says_so_in_one_line(workspace: Workspace) -> None:
    for verb, *rest in (["log"], ["policy", "--hide", ".env"], ["exec", "true"], ["upgrade"]):
        done = vfsd(verb, "-w", workspace.name, *rest)
        assert done.returncode == (125 if verb == "exec" else 1)
        assert "needs a mount" in done.stderr
        assert done.stderr.count("\n") == 1
    assert not workspace.policy().hide


def test_the_commands_say_that_there_is_no_mount(directory: Path, store: Path) -> None:
    made = json.loads(succeeded(vfsd("attach", directory, "--store", store, "--json")))
    try:
        assert (made["engine"], made["mountpoint"]) == ("none", str(directory))
        status = json.loads(succeeded(vfsd("status", "--json", cwd=directory)))
        assert (status["engine"], status["backend"]) == ("none", f"host:{directory}")
    finally:
        done = succeeded(vfsd("unmount", made["name"]))
    assert done == f"detached {made['name']} from {directory}, which stays as it is\n"


def test_no_module_of_an_engine_is_imported(directory: Path, store: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, starting_interpreters():
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        with Workspace.attach_directory(directory, store=store) as workspace:
            workspace.snapshot("s")  # answered after everything is imported
            log = Path(log_path(workspace.name)).read_text()
    imported = {line.rsplit("|", 1)[1].strip() for line in log.splitlines() if line.startswith("import time:")}
    assert "vfsd.daemon.attached" in imported
    assert not [each for each in imported if each.startswith(("vfsd.kernel.engines.native", "pyfuse3"))]


@pytest.mark.extended
@needs_root
def test_a_plain_user_without_dev_fuse_is_told_of_attach_and_can_use_it(public: Path) -> None:
    for name in ("dev", "run", "project", "place"):
        (public / name).mkdir()
        os.chown(public / name, 65534, 65534)
    (public / "project" / "f").write_text("one")
    os.chown(public / "project" / "f", 65534, 65534)
    before = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", WITHOUT_FUSE, str(public / "dev")]
    environment = {
        **os.environ,
        "VFSD_RUNTIME_DIR": str(public / "run"),
        "VFSD_STORE_DIR": str(public / "run" / "store"),
        "XDG_STATE_HOME": str(public / "run" / "state"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def call(*words: object, cwd: Path = public / "project") -> subprocess.CompletedProcess[str]:
        return vfsd(*words, before=before, env=environment, cwd=cwd)

    assert "vfsd attach DIR" in failed(call("mount", public / "place"))
    run = call("run", "--", "touch", "uncontained")
    assert (run.returncode, "vfsd attach DIR" in run.stderr) == (125, True)
    assert "`vfsd attach .`" in call("hooks", "install", "claude").stderr
    shutil.rmtree(public / "project" / ".claude")
    assert not (public / "project" / "uncontained").exists()
    name = json.loads(succeeded(call("attach", ".", "--json")))["name"]
    try:
        succeeded(call("snapshot", "one"))
        (public / "project" / "f").write_text("two")
        assert "M f" in succeeded(call("diff"))
        succeeded(call("restore", "one"))
        assert (public / "project" / "f").read_text() == "one"
    finally:
        succeeded(call("unmount", name))


# -- what cannot be attached -------------------------------------------------------------------------
def refused(code: int, words: str, *arguments: object) -> None:
    """Attaching fails with this errno and a line that has `words`, and leaves nothing."""
    names = set(os.listdir(ensure_socket_dir()))
    done = vfsd("attach", *arguments, "--json")
    assert done.returncode == 1, done.stdout
    assert done.stderr.count("\n") == 1
    error = json.loads(done.stdout)["error"]
    assert (error["errno"], words in error["message"]) == (errno.errorcode[code], True), error
    assert "\n" not in error["message"]
    assert {each for each in os.listdir(socket_dir()) if each.endswith(".json")} <= names


def test_a_directory_that_is_attached_inside_or_around_another_one_is_refused(
    workspace: Workspace, directory: Path
) -> None:
    (directory / "below").mkdir()
    (directory.parent / "link").symlink_to(directory)
    refused(errno.EBUSY, "attached already", directory)
    refused(errno.EBUSY, "attached already", directory.parent / "link")
    refused(errno.EBUSY, "a directory above it", directory / "below")
    refused(errno.EBUSY, "a part of it", directory.parent)
    with pytest.raises(OSError, match="attached already"):
        Workspace.attach_directory(directory, name="other")


@pytest.mark.extended
def test_two_attaches_at_the_same_moment_are_one(directory: Path, store: Path) -> None:
    command = [sys.executable, "-P", "-m", "vfsd.cli.main", "attach", str(directory), "--store", str(store), "--name"]
    started = [
        subprocess.Popen(
            [*command, f"{directory.parent.name}-{number}"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/"
        )
        for number in range(2)
    ]
    assert sorted(each.communicate() and each.returncode for each in started) == [0, 1]
    Workspace.attach(str(directory)).unmount()


def test_a_place_that_is_no_directory_of_a_local_file_system_is_refused(
    directory: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "file").write_text("x")
    refused(errno.ENOENT, "no such directory", directory / "none")
    refused(errno.ENOTDIR, "not a directory", directory / "file")
    refused(errno.EINVAL, "is inside", directory, "--store", directory / "store")
    refused(errno.EINVAL, "vfsd's runtime directory", Path(socket_dir()).parent)
    refused(errno.EOPNOTSUPP, "on proc, whose files are settings of the kernel", Path("/proc/self/task"))
    monkeypatch.setattr(attached, "filesystem_type", lambda _: 0x6969)
    with pytest.raises(OSError, match="on NFS"):
        attached.check_free(attach_options(directory, store=store))


@needs_root
def test_a_read_only_directory_and_one_that_the_store_has_no_room_for_are_refused(directory: Path) -> None:
    with (
        mounted_tmpfs(directory / "large") as place,
        mounted_tmpfs(directory.parent / "small", max_bytes=1 << 20) as small,
    ):
        (place / "large").write_bytes(os.urandom(4 << 20))
        refused(errno.ENOSPC, "too large for the store", place, "--store", small / "store")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        refused(errno.EROFS, "read-only", place)
        assert (place / "large").stat().st_size == 4 << 20
