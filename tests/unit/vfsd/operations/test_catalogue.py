"""Every operation is answered in one place, and the client's methods take the parameters that are declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.requests import Requests
from vfsd.client.workspace import Workspace
from vfsd.daemon.control.calls import handlers_of
from vfsd.daemon.control.handlers.changes import TreeMethods
from vfsd.daemon.control.handlers.conflicts import ConflictsMethods
from vfsd.daemon.control.handlers.exec import ExecMethods
from vfsd.daemon.control.handlers.forks import ForkMethod, MergeMethods, MergeSource
from vfsd.daemon.control.handlers.fs import FsMethods
from vfsd.daemon.control.handlers.log import LogMethods
from vfsd.daemon.control.handlers.revert import RevertMethods
from vfsd.daemon.control.handlers.snapshots import SnapshotMethods
from vfsd.daemon.control.handlers.workspace import SavedStates, UnmountMethods, WorkspaceMethods
from vfsd.daemon.control.methods import Methods
from vfsd.daemon.upgrading.giving import Upgrade
from vfsd.operations import forks, snapshots, workspace
from vfsd.operations.catalogue import OPERATIONS

GROUPS: tuple[type[object], ...] = (
    Methods, WorkspaceMethods, SavedStates, UnmountMethods, Upgrade, ForkMethod, SnapshotMethods, TreeMethods,
    MergeSource, MergeMethods, ConflictsMethods, RevertMethods, LogMethods, FsMethods, ExecMethods,
)  # fmt: skip


def test_each_operation_has_one_handler() -> None:
    answered = [name for group in GROUPS for name in handlers_of(group.__new__(group))]
    assert sorted(answered) == sorted(OPERATIONS)


# A method of the client, the parameters that it sends, and those that are not the caller's.
CALLS: tuple[tuple[Callable[..., Any], type[msgspec.Struct], set[str]], ...] = (
    (Requests.snapshot, snapshots.SnapshotParams, set()),
    (Requests.snapshots, snapshots.SnapshotsParams, {"newest"}),  # of the timeline
    (Requests.drop, snapshots.DropParams, {"also", "created_at"}),
    (Requests.restore, snapshots.RestoreParams, {"stream"}),
    (Requests.undo, snapshots.RestoreParams, {"source", "stream"}),
    (Requests.redo, snapshots.RestoreParams, {"source", "stream", "paths"}),
    (Requests.discard, snapshots.RestoreParams, {"source", "stream"}),
    (Requests.restore, snapshots.FromOther, {"name"}),
    (Requests.diff, snapshots.DiffParams, {"mode", "stream", "include_git"}),
    (Requests.patch, snapshots.DiffParams, {"mode", "stream"}),
    (Requests.export, snapshots.ExportParams, {"source_date_epoch"}),
    (Requests.import_archive, snapshots.ImportParams, set()),
    (Requests.apply, snapshots.ApplyParams, {"stream"}),
    (Requests.merge, forks.MergeParams, set()),
    (Requests.adopt, forks.AdoptParams, set()),
    (Requests.conflicts, forks.ConflictsParams, set()),
    (Requests.revert, forks.RevertParams, set()),
    (Requests.policy, workspace.PolicyParams, set()),
    (Requests.log, workspace.LogParams, {"since_ns"}),
    (Requests.watch, workspace.LogParams, {"since_ns"}),
    (Requests.fork, forks.ForkParams, set()),
)


@pytest.mark.parametrize(("method", "declared", "own"), CALLS, ids=lambda value: getattr(value, "__name__", None))
def test_the_client_takes_the_declared_parameters(
    method: Callable[..., Any], declared: type[msgspec.Struct], own: set[str]
) -> None:
    taken = inspect.signature(method).parameters
    for field in msgspec.structs.fields(declared):
        if field.name in own:
            assert field.name not in taken
            continue
        parameter = taken[field.name]
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        if default is not msgspec.NODEFAULT and parameter.kind is not parameter.VAR_POSITIONAL:
            assert parameter.default == (() if default == [] else default) or field.name == "of"


def test_both_workspaces_have_the_methods_of_the_requests() -> None:
    for name in {method.__name__ for method, _, _ in CALLS} - {"watch", "fork"}:
        signatures = [
            inspect.signature(getattr(kind, name)).parameters for kind in (Requests, Workspace, AsyncWorkspace)
        ]
        assert signatures[0] == signatures[1] == signatures[2], name
