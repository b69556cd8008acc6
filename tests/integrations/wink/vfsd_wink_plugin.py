"""A pytest plugin for WINK's own tests: replaces `HostFilesystem` by a workspace, and writes the outcomes.

    pytest -p vfsd_wink_plugin tests      $VFSD_WINK_OUTCOMES: a JSON file, {"outcomes": {node id: outcome},
                                          "used": [node id of each test that made a HostFilesystem]}
                                          $VFSD_WINK_SWAP=1: with the class replaced, in directories below
                                          $VFSD_WINK_TMP, which the caller made for the run

All tests share a few workspaces: each root of a test is a bind mount of one, which is restored to its empty snapshot
afterwards.  That takes about 10 ms, and a new mount and its unmount 150 ms.  Without the right to make a bind mount,
each root gets a mount of its own.

WINK's distributions lack its package `weakincentives.contrib.tools`, whose `InMemoryFilesystem` many tests use.  With
and without the replacement, a `HostFilesystem` on a temporary directory stands in for it, so that these tests run too.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import weakincentives.filesystem
from weakincentives.filesystem import HostFilesystem

from vfsd.client.workspace import Workspace
from vfsd.integrations.weakincentives import VfsdFilesystem

SWAP = os.environ.get("VFSD_WINK_SWAP") == "1"
OWN = os.environ["VFSD_WINK_TMP"]  # a directory that the caller made for this run, and removes
MAY_BIND = os.geteuid() == 0
_MS_BIND, _MNT_DETACH = 0x1000, 2  # mount(2), umount2(2)
_libc = ctypes.CDLL(None, use_errno=True)
_mounted: dict[str, Workspace] = {}  # the root of a test -> the workspace that is visible there
_idle: list[Workspace] = []  # empty workspaces that no test uses
_outcomes: dict[str, str] = {}
_used: set[str] = set()
_rmdir = os.rmdir


def is_ours(root: str) -> bool:
    """Whether `root` is a directory below the run's own directory for temporary files.

    Only there may a workspace replace it: some tests name directories that others use, such as "/tmp".
    """
    own, real = os.path.realpath(OWN), os.path.realpath(root)
    return os.path.isdir(real) and real != own and os.path.commonpath([own, real]) == own


def mount_in_place(root: str) -> Workspace:
    """Mount a workspace at the directory `root`, with a copy of its content.  RuntimeError unless `is_ours`."""
    real = os.path.realpath(root)
    if real not in _mounted:
        if not is_ours(root):
            raise RuntimeError(f"{root} is not below {OWN}, so that no workspace may be mounted there")
        aside = tempfile.mkdtemp(prefix="vfsd-aside-", dir=OWN)
        for name in os.listdir(real):
            os.rename(os.path.join(real, name), os.path.join(aside, name))
        _mounted[real] = show_at(real)
        shutil.copytree(aside, real, symlinks=True, dirs_exist_ok=True)
    return _mounted[real]


def show_at(root: str) -> Workspace:
    """Make an empty workspace visible at the empty directory `root`."""
    if not MAY_BIND:
        return Workspace.mount(root)
    workspace = _idle.pop() if _idle else empty_workspace()
    if _libc.mount(os.fsencode(workspace.path), os.fsencode(root), None, _MS_BIND, None):
        raise OSError(ctypes.get_errno(), "no bind mount of a workspace could be made", root)
    return workspace


def empty_workspace() -> Workspace:
    workspace = Workspace.mount(tempfile.mkdtemp(prefix="vfsd-shared-", dir=OWN))
    workspace.snapshot("empty")
    return workspace


def hide(root: str, *, removed: bool = False) -> None:
    """Undo `show_at`.  The workspace of a root that is `removed` ends with it, as some tests check."""
    workspace = _mounted.pop(root)
    if MAY_BIND and _libc.umount2(os.fsencode(root), _MNT_DETACH):
        raise OSError(ctypes.get_errno(), "the bind mount of a workspace could not be removed", root)
    if removed or not MAY_BIND:
        workspace.unmount(lazy=True)
        return
    workspace.restore("empty")
    for taken in workspace.snapshots():
        if taken.name != "empty":
            workspace.drop(taken.name)
    _idle.append(workspace)


def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
    """Unmount the workspace before its directory is removed."""
    try:
        _rmdir(path, dir_fd=dir_fd)
    except OSError as error:
        real = os.path.realpath(path)
        if error.errno != errno.EBUSY or dir_fd is not None or real not in _mounted:
            raise
        hide(real, removed=True)
        _rmdir(path)


class SwappedFilesystem(VfsdFilesystem):
    """A `VfsdFilesystem` with the arguments of `HostFilesystem`; other directories are used as they are."""

    def __init__(self, _root: str, _read_only: bool = False, *_git: Any) -> None:
        if is_ours(_root):
            super().__init__(mount_in_place(_root), read_only=_read_only)
        else:
            HostFilesystem.__init__(self, _root, _read_only)
        self._root = _root  # as the test spells it

    def _resolve_path(self, path: str) -> Path:
        return super()._resolve_path(path) if hasattr(self, "workspace") else HostFilesystem._resolve_path(self, path)


def replace_class() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("weakincentives") and getattr(module, "HostFilesystem", None) is HostFilesystem:
            module.HostFilesystem = SwappedFilesystem  # type: ignore[attr-defined]
    os.rmdir = rmdir


def stand_in() -> None:
    base = SwappedFilesystem if SWAP else HostFilesystem

    class InMemoryFilesystem(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(tempfile.mkdtemp(prefix="wink-memory-"))

        def _resolve_path(self, path: str) -> Path:
            return super()._resolve_path(path.lstrip("/"))  # as WINK's class: "/a" is the file "a"

    package = ModuleType("weakincentives.contrib.tools")
    package.__path__ = []
    memory = ModuleType("weakincentives.contrib.tools.filesystem_memory")
    package.InMemoryFilesystem = memory.InMemoryFilesystem = InMemoryFilesystem  # type: ignore[attr-defined]
    sys.modules[package.__name__] = package
    sys.modules[memory.__name__] = memory


def count_uses() -> None:
    """Add each test that makes a `HostFilesystem`, or the stand-in for WINK's class, to `_used`."""
    make = HostFilesystem.__init__

    def counted(self: HostFilesystem, *arguments: Any, **named: Any) -> None:
        _used.add(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
        make(self, *arguments, **named)

    HostFilesystem.__init__ = counted


count_uses()
if SWAP:
    assert weakincentives.filesystem.HostFilesystem is HostFilesystem
    replace_class()
stand_in()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "rerun":
        return
    before = _outcomes.get(report.nodeid)
    if report.failed or before is None or (report.skipped and before == "passed"):
        _outcomes[report.nodeid] = report.outcome


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown() -> None:
    for root in list(_mounted):
        hide(root)


def pytest_sessionfinish() -> None:
    for workspace in _idle:
        workspace.unmount(lazy=True)
    found = {"outcomes": _outcomes, "used": sorted(_used)}
    Path(os.environ["VFSD_WINK_OUTCOMES"]).write_text(json.dumps(found))
