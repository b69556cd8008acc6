"""Real mounts: a workspace of its own for a test, on each engine, checked when the test is over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from vfsd.control.client import ControlClient
from vfsd.launch import log_path
from vfsd.workspace import Workspace

ENGINES = ("native", "pyfuse3")
MountIt = Callable[..., Workspace]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.fuse)


def complaints(name: str) -> list[str]:
    """The lines of a daemon's log that a test must account for."""
    try:
        text = Path(log_path(name)).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if " warning " in line or " error " in line or "Traceback" in line]


def check_invariants(workspace: Workspace) -> None:
    """Have the daemon check its own state.  (A daemon that was lazily unmounted still answers.)"""
    with ControlClient(socket_of(workspace)) as client:
        client.call("check")


def socket_of(workspace: Workspace) -> str:
    return os.path.join(os.environ["VFSD_RUNTIME_DIR"], "vfsd", workspace.name + ".sock")


@contextmanager
def mounted(path: Path, **options: Any) -> Iterator[Workspace]:
    """A workspace at `path`; on leaving, its invariants hold and its log complains of nothing."""
    with Workspace.mount(path, **options) as workspace:
        yield workspace
        check_invariants(workspace)
    assert complaints(workspace.name) == []


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mount(engine: str, workdir: Path) -> Iterator[MountIt]:
    """Mounts workspaces below `workdir`: `mount()`, `mount(max_bytes=...)`; all are unmounted and checked."""
    with ExitStack() as stack:
        count = 0

        def mount_it(**options: Any) -> Workspace:
            nonlocal count
            count += 1
            place = workdir / f"m{count}"
            place.mkdir()
            return stack.enter_context(
                mounted(place, **{"engine": engine, "name": f"{workdir.name}-{count}", **options})
            )

        yield mount_it


@pytest.fixture
def workspace(mount: MountIt) -> Workspace:
    return mount()


@pytest.fixture
def root(workspace: Workspace) -> Path:
    """The mount of `workspace`."""
    return Path(workspace.path)
