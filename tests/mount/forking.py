"""Forks of the workspaces of a test: checked and unmounted at its end, unless the test killed them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mount.conftest import check_invariants, complaints
from tests.support.unmounting import unmount_when_idle
from vfsd import Workspace

Fork = Callable[..., Workspace]


@contextmanager
def forking(workdir: Path, source: Workspace) -> Iterator[Fork]:
    """Yield a function that forks `source`, or another workspace, below `workdir`."""
    made: list[Workspace] = []

    def make(name: str = "copy", of: Workspace = source, **options: Any) -> Workspace:
        made.append(of.fork(workdir / name, name=name, **options))
        return made[-1]

    yield make
    for workspace in reversed(made):
        is_mounted = os.path.ismount(workspace.path)
        if is_mounted and not os.path.exists(f"/proc/{workspace.pid}"):
            continue
        if is_mounted:
            check_invariants(workspace)
            unmount_when_idle(workspace)
        assert complaints(workspace.name) == []


def text(workspace: Workspace, path: str = "tree/file") -> str:
    return Path(workspace.path, path).read_text()


def put(workspace: Workspace, path: str, content: str) -> None:
    Path(workspace.path, path).write_text(content)
