"""Names of workspaces and snapshots, for a shell's completion and for suggestions in errors.

A completer must neither hang nor print: after any failure it offers nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from vfsd.cli.common.app import did_you_mean
from vfsd.client.connection import ControlClient, ControlError, control_error
from vfsd.client.paths import current_directory
from vfsd.machine.runtime import WorkspaceRecord, find_workspace, read_records
from vfsd.wire.messages import SnapshotsParams

_TIMEOUT_S: Final = 1.0  # longer, and the shell seems to hang


def complete_workspace(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the workspaces, including dead ones."""
    return _offer(
        lambda: [CompletionItem(record.name, help=record.mountpoint) for record in read_records()], incomplete
    )


def complete_restore(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer snapshots for the first argument, or files if none fits; then files."""
    first = not ctx.params.get(param.name or "") and not ctx.params.get("undo")
    # Never both: the script for bash drops all names before an item of type "file".
    return (first and complete_snapshot(ctx, param, incomplete)) or [CompletionItem(incomplete, type="file")]


def complete_snapshot(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the snapshots of the selected workspace, newest first."""
    here = os.fsdecode(current_directory())
    return _offer(lambda: _snapshots_of(find_workspace(_selector(ctx), here)), incomplete)


def _offer(names: Callable[[], list[CompletionItem]], incomplete: str) -> list[CompletionItem]:
    logging.disable()  # a warning would appear in the middle of the command line
    try:
        return [item for item in names() if item.value.startswith(incomplete)]
    except Exception:  # noqa: BLE001 no daemon, no permission, invalid data: offer nothing
        return []
    finally:
        logging.disable(logging.NOTSET)


def with_similar_snapshots(record: WorkspaceRecord, error: FileNotFoundError) -> FileNotFoundError:
    """Return `error`; if it is about an unknown snapshot, with suggestions of similar names."""
    name = error.filename
    if not isinstance(error, ControlError) or not isinstance(name, str) or "no such snapshot" not in str(error):
        return error
    names = [item.value for item in _offer(lambda: _snapshots_of(record), "")]
    advice = did_you_mean(name, names) or "; `vfsd snapshots` lists them"
    better = control_error(error.code, f"{error}{advice}", error.errno, name)
    return better if isinstance(better, FileNotFoundError) else error


def _selector(ctx: click.Context | None) -> Any:
    """Return the -w nearest to the command."""
    while ctx is not None:
        if ctx.params.get("workspace"):
            return ctx.params["workspace"]
        ctx = ctx.parent
    return None


def _snapshots_of(record: WorkspaceRecord) -> list[CompletionItem]:
    with ControlClient(record.socket, timeout_s=_TIMEOUT_S) as client:
        answer = client.call("snapshots", SnapshotsParams(changes=False))
    # Newest first: the oldest of ten thousand snapshots is of little use.
    return [CompletionItem(snapshot.name, help=snapshot.tag) for snapshot in reversed(answer.snapshots)]
