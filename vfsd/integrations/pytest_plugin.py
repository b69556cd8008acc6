"""pytest plugin: the fixtures `workspace` and `workspace_factory`.  pytest loads it by its entry point.

    def test_build(workspace):
        subprocess.run(["make"], cwd=workspace.path, check=True)
        assert workspace.diff().counts.removed == 0

The first test that uses `workspace` mounts it.  Every later one gets the same mount, restored to the state after the
mount.  Importing this module imports nothing of vfsd but the package itself; a session that uses no fixture mounts
nothing.

Invariant, when a test starts: the content of `workspace` equals its initial snapshot; there are no snapshots and undo
steps besides that one and those that existed before the mount ("host:DIR" and containers keep theirs).

Threading: pytest runs fixtures in its main thread.  Each pytest-xdist worker has a mount of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import tempfile
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, Protocol

import pytest

if TYPE_CHECKING:
    from vfsd.client.results import Snapshot
    from vfsd.client.workspace import Workspace

# Process id, its start time (field 22 of /proc/<pid>/stat), and a number.
_NAME: Final = re.compile(r"pytest-(\d+)-(\d+)-\d+")
_numbers: Final = itertools.count(1)
_TAG: Final = "initial state of the pytest session"


class WorkspaceFactory(Protocol):
    """The type of the fixture `workspace_factory`."""

    def __call__(self, backend: str = "memory", **arguments: Any) -> Workspace: ...


@pytest.fixture(scope="session")
def workspace_arguments() -> dict[str, Any]:
    """The arguments of `Workspace.mount` for `workspace`, such as {"backend": "overlay:DIR"}.  Override it."""
    return {}


@pytest.fixture
def workspace(_vfsd_session: _Session) -> Workspace:
    """A mounted `vfsd.Workspace`: one mount for the session, in its initial state at the start of each test."""
    return _vfsd_session.fresh()


@pytest.fixture
def workspace_factory() -> Generator[WorkspaceFactory]:
    """Mount another workspace: `workspace_factory("overlay:DIR", exec_on_host=True)` takes what `Workspace.mount` does.

    Each call mounts a new one, in a temporary directory.  All are unmounted at the end of the test.
    """
    with contextlib.ExitStack() as stack:

        def mount(backend: str = "memory", **arguments: Any) -> Workspace:
            return stack.enter_context(_mounted({"backend": backend, **arguments}))

        yield mount


@pytest.fixture(scope="session")
def _vfsd_session(workspace_arguments: dict[str, Any]) -> Generator[_Session]:
    session = _Session(workspace_arguments)
    with session.mounts:
        yield session
        session.end()


class _Session:
    """The mount that the tests of a session share."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.mounts: Final = contextlib.ExitStack()
        self._arguments: Final = arguments
        self._workspace: Workspace | None = None
        self._initial: Snapshot | None = None
        self._before: frozenset[tuple[str, object]] = frozenset()  # the snapshots that existed before the mount

    def fresh(self) -> Workspace:
        """Return the workspace in its initial state; mount it if that has not happened, or if a test unmounted it.

        OSError if there is no mount, RuntimeError if paths could not be restored.
        """
        if self._workspace is not None and self._reset(self._workspace):
            return self._workspace
        self.mounts.close()
        self._workspace = None
        mounted = self.mounts.enter_context(_mounted(self._arguments))
        self._before = frozenset(map(_identity, mounted.snapshots(changes=False)))
        self._initial = mounted.snapshot(tag=_TAG)
        self._workspace = mounted
        return mounted

    def end(self) -> None:
        """Return what lives longer than the mount, such as the directory of "host:DIR", to its initial state."""
        if self._workspace is not None and self._initial is not None and self._reset(self._workspace):
            with contextlib.suppress(OSError):
                self._workspace.drop(self._initial.name)

    def _reset(self, workspace: Workspace) -> bool:
        """Restore the initial state and drop later snapshots.  False if it is gone: a new mount is needed."""
        assert self._initial is not None, "taken when the workspace was mounted"
        try:
            initial, keep = _identity(self._initial), {*self._before, _identity(self._initial)}
            if initial not in map(_identity, workspace.snapshots(changes=False)):
                return False
            restored = workspace.restore(self._initial.name)
            later = [each.name for each in workspace.snapshots(changes=False) if _identity(each) not in keep]
            if later:
                workspace.drop(*later)
        except (ConnectionError, FileNotFoundError):
            return False
        if restored.problems:
            named = "; ".join(f"{path}: {reason}" for path, reason in list(restored.problems.items())[:5])
            raise RuntimeError(
                f"{workspace.path}: {len(restored.problems)} paths could not be restored for this test: {named}"
            )
        return True


def _identity(snapshot: Snapshot) -> tuple[str, object]:
    return snapshot.name, snapshot.created_at


@contextlib.contextmanager
def _mounted(arguments: dict[str, Any]) -> Generator[Workspace]:
    """Mount a workspace in a new temporary directory, which goes with it.

    Not below pytest's own: pytest deletes old ones recursively, which would delete the files of a "host:DIR" mount that
    a killed session left.
    """
    # Start-up: a session that mounts nothing does not pay for these imports.
    from vfsd.client.workspace import Workspace  # noqa: PLC0415
    from vfsd.machine.runtime import process_start_ticks  # noqa: PLC0415

    _unmount_left()
    pid = os.getpid()
    name = f"pytest-{pid}-{process_start_ticks(pid)}-{next(_numbers)}"
    mountpoint = os.path.join(tempfile.mkdtemp(prefix="vfsd-pytest-"), "workspace")
    try:
        mounted = Workspace.mount(mountpoint, **{"name": name, **arguments})
        try:
            yield mounted
        finally:
            try:
                with mounted:
                    pass
            except ConnectionError:
                _remove_dead(mounted.name, mountpoint)
    finally:
        _remove_directories(mountpoint)


@functools.cache
def _unmount_left() -> None:
    """Unmount the workspaces of pytest sessions that were killed: nothing else would.  Once in a process."""
    from vfsd.client.workspace import Workspace  # noqa: PLC0415 as above
    from vfsd.machine.runtime import process_start_ticks, read_records  # noqa: PLC0415

    for record in read_records():
        owner = _NAME.fullmatch(record.name)
        if owner is None or process_start_ticks(int(owner[1])) == int(owner[2]):
            continue
        with contextlib.suppress(OSError):  # another session is removing it, too
            if record.alive:
                Workspace.attach(record.name).unmount(lazy=True)
            else:
                _remove_dead(record.name, record.mountpoint)
            _remove_directories(record.mountpoint)


def _remove_dead(name: str, mountpoint: str) -> None:
    """Remove the mount, the record and the socket of a daemon that has died."""
    from vfsd.machine.mounts import clear_dead_mount  # noqa: PLC0415 as above
    from vfsd.machine.runtime import read_record, remove_record  # noqa: PLC0415
    from vfsd.wire.sockets import remove_dead_socket  # noqa: PLC0415

    clear_dead_mount(mountpoint)
    record = read_record(name)
    if record is not None and not record.alive:
        remove_record(record)
        remove_dead_socket(record.socket)


def _remove_directories(mountpoint: str) -> None:
    """Remove an unmounted mountpoint and the temporary directory around it.  Never recursively."""
    with contextlib.suppress(OSError):
        os.rmdir(mountpoint)
        os.rmdir(os.path.dirname(mountpoint))
