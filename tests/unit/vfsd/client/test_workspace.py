"""The Python API, blocking and for asyncio and trio, against the real control socket of a daemon without a mount."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

import vfsd
from tests.support.fake_workspace import FakeDaemon
from tests.support.suites import one_of
from vfsd import AsyncWorkspace, Workspace
from vfsd.wire.options import MountOptions, Ready


@pytest.fixture
def daemon(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    monkeypatch.setenv("VFSD_WORKSPACE", "demo")
    daemon.live[b"caf\xe9"] = b"x"
    return daemon


@pytest.fixture
def launched(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> list[MountOptions]:
    """Starting a workspace "starts" the fake one; the options that it was asked with."""
    asked: list[MountOptions] = []

    def launch(options: MountOptions, **_: object) -> Ready:
        asked.append(options)
        return Ready(daemon.name, daemon.mountpoint, daemon.socket, daemon.pid, "native")

    monkeypatch.setattr("vfsd.client.launch.launch", launch)
    return asked


LOOPS = ("asyncio", "trio")


loop = one_of(LOOPS)


class Driver:
    """Calls a method of either twin, so that one test holds for both."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "plain":
            with Workspace.attach() as ws:
                return getattr(ws, method)(*args, **kwargs)

        async def body() -> Any:
            async with AsyncWorkspace.attach() as ws:
                return await getattr(ws, method)(*args, **kwargs)

        return anyio.run(body, backend=self.kind)


@pytest.fixture(params=["plain", *LOOPS])
def call(request: pytest.FixtureRequest, daemon: FakeDaemon) -> Driver:
    return Driver(request.param)


def test_snapshots_are_taken_listed_and_dropped(call: Driver, daemon: FakeDaemon) -> None:
    taken = call("snapshot", "turn-1", tag="a remark")
    assert (taken.name, taken.tag, taken.files, taken.size_bytes, taken.kind) == ("turn-1", "a remark", 2, 5, "user")
    assert taken.created_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert call("snapshot").name == "snap-2"
    listed = call("snapshots")
    assert [one.name for one in listed] == ["turn-1", "snap-2"]
    assert listed[0].changes == vfsd.Counts(added=2)
    assert call("snapshots", changes=False)[0].changes is None
    call("drop", "turn-1")
    assert list(daemon.snapshots) == ["snap-2"]


def test_a_diff_lists_changes_whose_paths_open_files(call: Driver, daemon: FakeDaemon) -> None:
    call("snapshot", "base")
    assert not call("diff", "base")
    daemon.live[b"caf\xe9"] = b"longer"
    diff = call("diff", "base")
    assert diff
    assert diff.counts == vfsd.Counts(modified=1)
    assert diff.changes == (vfsd.Change(os.fsdecode(b"caf\xe9"), "modified", "file", 1, 6),)
    assert call("diff", "base", paths=["a.txt"]).changes == ()
    assert call("diff", "base", paths=[b"caf\xe9"]).counts.total == 1
    assert call("diff", "base", paths=[Path(daemon.mountpoint)]).counts.total == 1


def test_a_patch_is_bytes(call: Driver, daemon: FakeDaemon) -> None:
    call("snapshot", "base")
    daemon.patch = [b"--- a/x\n", b"\xff\n"]
    assert call("patch", "base") == b"--- a/x\n\xff\n"


def test_restore_and_undo(call: Driver, daemon: FakeDaemon) -> None:
    call("snapshot", "base")
    daemon.live[b"a.txt"] = b"two\n"
    would = call("restore", "base", dry_run=True)
    assert (would.counts.modified, would.safety_snapshot) == (1, None)
    assert daemon.live[b"a.txt"] == b"two\n"
    done = call("restore", "base", ["a.txt"])
    assert done.safety_snapshot is not None
    assert daemon.live[b"a.txt"] == b"one\n"
    call("undo")
    assert daemon.live[b"a.txt"] == b"two\n"


def test_a_path_object_is_an_archive(call: Driver, daemon: FakeDaemon, workdir: Path) -> None:
    exported = call("export", workdir / "out.zip")
    assert exported == vfsd.Exported(str(workdir / "out.zip"), 2, 5, 105)
    daemon.live = {b"mine": b"1"}
    imported = call("import_archive", str(workdir / "out.zip"))
    assert imported.counts.added == 2
    assert set(daemon.live) == {b"mine", b"a.txt", b"caf\xe9"}
    call("restore", workdir / "out.zip")
    assert set(daemon.live) == {b"a.txt", b"caf\xe9"}


def test_progress_is_told(call: Driver, workdir: Path) -> None:
    steps: list[Any] = []
    call("export", workdir / "out.zip", on_progress=steps.append)
    assert [(step.done, step.total, step.unit) for step in steps] == [(1, 2, "files")]


def test_errors_are_pythons_own(call: Driver, workdir: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such snapshot: nothing"):
        call("restore", "nothing")
    call("snapshot", "base")
    with pytest.raises(FileExistsError):
        call("snapshot", "base")
    call("export", workdir / "out.zip")
    with pytest.raises(FileExistsError):
        call("export", workdir / "out.zip")
    with pytest.raises(OSError, match="is not in the workspace"):
        call("restore", "base", ["../outside"])


def test_a_fork_of_the_wrong_type_is_answered_with_the_right_ones(call: Driver) -> None:
    for verb in ("merge", "adopt"):
        for wrong in (5, b"fork", ["fork"]):
            with pytest.raises(TypeError, match="a fork is a Workspace, an AsyncWorkspace or a name, not"):
                call(verb, wrong)


def test_bytes_are_no_name_of_a_snapshot(call: Driver) -> None:
    with pytest.raises(TypeError, match="name must be a str, not bytes: decode it"):
        call("snapshot", b"base")
    with pytest.raises(TypeError, match="tag must be a str, not bytes: decode it"):
        call("snapshot", tag=b"x")
    assert call("snapshots") == []


def test_status(call: Driver, daemon: FakeDaemon) -> None:
    status = call("status")
    assert (status.name, status.mountpoint, status.files) == ("demo", daemon.mountpoint, 2)
    assert status.started_at.tzinfo is not None


def test_attaching_to_nothing_is_an_error_that_says_what_there_is(workdir: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no workspace is running"):
        Workspace.attach()
    with FakeDaemon("demo", str(workdir)), pytest.raises(FileNotFoundError, match="running: demo"):
        Workspace.attach("other")


def test_attach_leaves_the_workspace_mounted_and_mount_does_not(
    daemon: FakeDaemon, launched: list[MountOptions]
) -> None:
    with Workspace.attach("demo") as ws:
        assert (ws.name, ws.path) == ("demo", daemon.mountpoint)
    assert not daemon.unmounted
    with Workspace.mount(daemon.mountpoint, name="demo", max_bytes=10) as ws:
        assert ws.path == daemon.mountpoint
    assert daemon.unmounted
    assert daemon.ended  # its name and place are free again
    assert launched == [MountOptions.of(daemon.mountpoint, "demo", max_bytes=10)]


def test_the_end_of_the_block_unmounts_after_an_exception(daemon: FakeDaemon, launched: list[MountOptions]) -> None:
    with pytest.raises(ZeroDivisionError), Workspace.mount(daemon.mountpoint):
        raise ZeroDivisionError
    assert daemon.ended


def test_the_end_of_the_block_unmounts_after_cancellation(
    daemon: FakeDaemon, launched: list[MountOptions], loop: str
) -> None:
    async def cancelled() -> None:
        with anyio.CancelScope() as scope:
            async with AsyncWorkspace.mount(daemon.mountpoint):
                scope.cancel()
                await anyio.sleep_forever()

    anyio.run(cancelled, backend=loop)
    assert daemon.unmounted
    assert daemon.ended


def test_an_async_workspace_can_be_awaited_instead(daemon: FakeDaemon, launched: list[MountOptions], loop: str) -> None:
    async def body() -> None:
        ws = await AsyncWorkspace.mount(daemon.mountpoint)
        assert not daemon.unmounted
        await ws.unmount()

    anyio.run(body, backend=loop)
    assert daemon.unmounted


def test_unmounting_twice_asks_once(daemon: FakeDaemon, launched: list[MountOptions]) -> None:
    with Workspace.mount(daemon.mountpoint) as ws:
        assert ws.unmount() is ws.unmount()
    assert [name for name, _ in daemon.requests] == ["unmount"]


def test_a_busy_workspace_says_who_holds_it(daemon: FakeDaemon, launched: list[MountOptions]) -> None:
    daemon.holders = ["pid 12 (bash)"]
    ws = Workspace.mount(daemon.mountpoint)
    with pytest.raises(OSError, match=r"pid 12 \(bash\)"):
        ws.unmount()
    assert not daemon.unmounted
    with pytest.warns(ResourceWarning, match=r"pid 12 \(bash\)"):
        ws.__exit__(None, None, None)
    assert daemon.unmounted


def test_a_workspace_that_somebody_else_unmounted_is_no_error(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeDaemon("gone", str(workdir)) as fake:
        ready = Ready("gone", str(workdir), fake.socket, 1, "native")
    monkeypatch.setattr("vfsd.client.launch.launch", lambda _, **__: ready)
    with Workspace.mount(workdir) as ws, pytest.raises(ConnectionError):
        ws.status()


@pytest.mark.parametrize(
    ("use", "warns"),
    [
        (Workspace.mount, True),
        (lambda path: Workspace.mount(path).unmount(), False),
        (lambda path: Workspace.mount(path).__enter__(), False),
        (lambda _path: Workspace.attach("demo"), False),
    ],
    ids=["left", "unmounted", "with", "attached"],
)
def test_a_workspace_that_is_left_mounted_warns(
    daemon: FakeDaemon,
    launched: list[MountOptions],
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[str], object],
    warns: bool,
) -> None:
    monkeypatch.setattr("vfsd.client.workspace.mount_at", lambda path: path)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(daemon.mountpoint)
        gc.collect()

    messages = [str(each.message) for each in caught if "left mounted" in str(each.message)]
    wanted = (
        f"<Workspace 'demo' at {daemon.mountpoint!r}> was left mounted: use it in a `with` block, or call unmount()"
    )
    assert messages == ([wanted] if warns else [])


def test_a_workspace_that_is_not_mounted_any_more_does_not_warn(
    daemon: FakeDaemon, launched: list[MountOptions]
) -> None:
    Workspace.mount(daemon.mountpoint)  # the fake one has no mount; a warning would fail this test
    gc.collect()


def test_a_program_that_ends_warns_of_the_workspace_that_it_leaves(daemon: FakeDaemon) -> None:
    code = """
import sys, vfsd.client.workspace as module
from vfsd.wire.options import Ready
module.launch.launch = lambda _, **__: Ready("demo", sys.argv[1], "socket", int(sys.argv[2]), "native")
module.mount_at = lambda path: path
kept = module.Workspace.mount(sys.argv[1])
"""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", code, daemon.mountpoint, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "was left mounted" in done.stderr


def test_mount_makes_the_directory_unless_told_not_to(
    daemon: FakeDaemon, launched: list[MountOptions], workdir: Path
) -> None:
    Workspace.mount(workdir / "deep" / "er")
    assert (workdir / "deep" / "er").is_dir()
    Workspace.mount(workdir / "deep" / "er")
    Workspace.mount(workdir / "not", create=False)
    assert not (workdir / "not").exists()


def test_arguments_that_make_no_sense_are_refused_before_anything_starts(
    launched: list[MountOptions], workdir: Path
) -> None:
    place = workdir / "new"
    for wrong in ({"backend": "tape"}, {"backend": "host:"}, {"name": "a/b"}, {"max_bytes": 0}, {"engine": "steam"}):
        with pytest.raises(ValueError, match=r".+"):
            Workspace.mount(place, **wrong)  # type: ignore[arg-type]
    assert launched == []
    assert not place.exists()


def test_the_twins_have_the_same_methods_with_the_same_parameters() -> None:
    def shape(cls: type) -> dict[str, list[str]]:
        return {
            # An object of this process is mounted by plain code only: a thread serves it, not the caller's loop.
            name: [each for each in inspect.signature(getattr(cls, name)).parameters if each != "filesystem"]
            for name in dir(cls)
            if not name.startswith("_") and callable(getattr(cls, name))
        }

    assert shape(Workspace) == shape(AsyncWorkspace)


def test_every_exported_name_is_there_and_results_are_frozen() -> None:
    for name in vfsd.__all__:
        assert getattr(vfsd, name) is not None
        assert name in dir(vfsd)
    with pytest.raises(AttributeError):
        vfsd.no_such_name  # noqa: B018
    with pytest.raises(AttributeError):
        vfsd.Counts().added = 1  # type: ignore[misc]


def test_importing_vfsd_imports_next_to_nothing() -> None:
    others = {"anyio", "trio", "msgspec", "click", "vfsd.client.workspace"}
    code = f"import sys, vfsd; print(sorted({others} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
