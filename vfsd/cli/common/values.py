"""Parameter types of the command line, options that commands share, and completion.

The types are sizes, seconds, backends, workspace names and variables.  Names of workspaces and snapshots and paths are
offered for a shell's completion, and suggested in errors.  A completer must neither hang nor print: after any failure
it offers nothing.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from vfsd.cli.common.app import did_you_mean
from vfsd.client.arguments import current_directory, workspace_path
from vfsd.client.connection import ControlClient
from vfsd.client.requests import check_archive_name
from vfsd.machine.runtime import WorkspaceRecord, find_workspace, read_records
from vfsd.operations.fs import FsLsParams
from vfsd.operations.snapshots import SnapshotsParams
from vfsd.wire.messages import ControlError, control_error, from_wire_path, is_unknown_snapshot, wire_path
from vfsd.wire.options import NAME_PATTERN, BackendSpec, known_backends, parse_backend

if TYPE_CHECKING:
    _SizeType = click.ParamType[int]
    _TextType = click.ParamType[str]
else:  # generic only in newer versions of click than the oldest supported one
    _SizeType = _TextType = click.ParamType

_TIMEOUT_S: Final = 1.0  # longer, and the shell seems to hang
_MAX_PATHS: Final = 10_000  # of one directory
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(iB|B)?", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
# The kernel's file sizes and counts are signed 64-bit numbers (off_t).
_LARGEST: Final = 2**63 - 1


def is_text(value: str) -> bool:
    """Return whether a value is UTF-8.  The daemon requires it, except for paths and commands."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class Size(_SizeType):
    """512, 512M, 1.5GiB (powers of 1024) or 512MB (powers of 1000), as in dd(1)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write 1048576, 512M, 2GiB or 500MB", param, ctx)
        number, unit, suffix = match.groups()
        base = 1000 if unit and (suffix or "").upper() == "B" else 1024
        factor = base ** _POWERS[unit.upper()]
        size = int(number) * factor if number.isdigit() else int(float(number) * factor)
        if not 0 < size <= _LARGEST:
            self.fail(f"{value!r} is out of range: at least 1 byte, at most 8 EiB", param, ctx)
        return size


class CacheSize(Size):
    """A size, or 0."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return 0 if value == "0" else super().convert(value, param, ctx)


class Seconds(click.FloatRange):
    """A number of seconds, without "nan" and "inf", which JSON cannot represent."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


class Name(_TextType):
    """A workspace name, which becomes a file name and a systemd instance name."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if NAME_PATTERN.fullmatch(value) is None:
            self.fail(
                f"{value!r} is not a name: letters, digits, '.', '_' and '-', at most 64, a letter or digit first",
                param,
                ctx,
            )
        return str(value)


def environment(*, inherit: bool) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, str]]:
    """Return a callback that parses NAME=VALUE; with `inherit`, also NAME, which has the value of the caller."""

    def parse(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
        found = {}
        for value in values:
            name, equals, text = value.partition("=")
            if not name or not (equals or inherit):
                raise click.BadParameter(f"{value!r} is not NAME=VALUE")
            if not equals and name not in os.environ:
                continue
            found[name] = text if equals else os.environ[name]
            if not is_text(name + found[name]):
                raise click.BadParameter(f"{name if inherit else value!r} is not UTF-8")
        return found

    return parse


def refuse_other_archives(file: str) -> None:
    """Raise UsageError if `file` is not a name for a ZIP archive."""
    try:
        check_archive_name(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def in_home(backend: str) -> str:
    """Expand the `~` of host:~/DIR and overlay:~/DIR, which a shell does only at the beginning of a word."""
    spec = BackendSpec.split(backend)
    if spec.snapshot is not None:
        name, directory = spec.snapshot
        return str(spec.with_snapshot(name, os.path.expanduser(directory)))
    return f"{spec.kind}:{os.path.expanduser(spec.argument)}" if spec.is_path and spec.argument else backend


class Backend(_TextType):
    """memory, host:DIR, overlay:DIR (or :FILE.zip, :snapshot:NAME), container:NAME, image:REF or exec:COMMAND."""

    name = "backend"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        value = in_home(value)
        try:
            parse_backend(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        choices = [re.sub(":.*", ":", form) for form in known_backends()]
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]


SIZE: Final = Size()
CACHE_SIZE: Final = CacheSize()
NAME: Final = Name()
BACKEND: Final = Backend()

include_option = click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Only files that match (.gitignore's syntax); may be repeated.",
)
exclude_option = click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave out paths that match, and what is below them; may be repeated.",
)

touch_option = click.option(
    "--touch", is_flag=True, help="Give the files whose content changes the present time, so that builds notice them."
)


# -- completion -------------------------------------------------------------------------------------
def complete_workspace(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the workspaces, including dead ones."""
    return _offer(
        lambda: [CompletionItem(record.name, help=record.mountpoint) for record in read_records()], incomplete
    )


def complete_restore(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer snapshots for the first argument, or files if none fits; then paths, now and in the snapshot."""
    words = ctx.params.get(param.name or "") or ()
    if words or ctx.params.get("undo"):
        return _paths(ctx, incomplete, snapshots=(None, *words[:1]))
    of = ctx.params.get("of")
    if of:
        return _offer(lambda: _stored_snapshots(ctx, of), incomplete)
    snapshots = complete_snapshot(ctx, param, incomplete)
    # Never both: the script for bash drops all names before an item of type "file".
    return snapshots or [CompletionItem(incomplete, type="file")]


def complete_revert(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer ranges of snapshots, SINCE..UNTIL, and paths."""
    since, dots, _ = incomplete.partition("..")
    found = complete_snapshot(ctx, param, "")
    if dots and "/" not in since:
        ranges = [f"{since}..{item.value}" for item in found]
    else:
        ranges = [f"{item.value}.." for item in found]
    matching = [CompletionItem(each) for each in ranges if each.startswith(incomplete)]
    return matching or _paths(ctx, incomplete)


def complete_of(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the workspaces that have snapshots in the store."""
    return _offer(lambda: _stored_workspaces(ctx), incomplete)


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the paths of the selected workspace, of the snapshot `--at`, or below `--root`."""
    return _paths(ctx, incomplete, snapshots=(ctx.params.get("snapshot"),))


def complete_path_of_fork(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the paths of the workspace that the argument `fork` names, and of the selected one."""
    found = _paths(ctx, incomplete) + _paths(ctx, incomplete, selector=ctx.params.get("fork"))
    return list({item.value: item for item in found}.values())


def _paths(
    ctx: click.Context, incomplete: str, *, snapshots: Sequence[str | None] = (None,), selector: str | None = None
) -> list[CompletionItem]:
    """Offer the entries of the directory in `incomplete`; a directory ends in "/".

    Leaves out names that a shell's script cannot pass on: not UTF-8, or with control characters.
    """
    above, _, _ = incomplete.rpartition("/")
    directory = f"{above}/" if "/" in incomplete else ""
    root = _option(ctx, "root")
    if root:
        with suppress(OSError), os.scandir(os.path.join(root, directory or ".")) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            return _path_items(directory, dict(found), incomplete)
        return []
    here = current_directory()
    found_names: dict[str, bool] = {}

    def collect() -> list[CompletionItem]:
        record = _selected(ctx)
        path = wire_path(workspace_path(directory or ".", record.mountpoint, here))
        other = record if selector is None else find_workspace(selector, os.fsdecode(here))
        with ControlClient(other.socket, timeout_s=_TIMEOUT_S) as client:
            for snapshot in dict.fromkeys(snapshots):
                with suppress(OSError):  # the directory or the snapshot does not exist
                    answer = client.call("fs.ls", FsLsParams(path, limit=_MAX_PATHS, snapshot=snapshot))
                    for entry in answer.entries:
                        with suppress(UnicodeDecodeError):
                            name = from_wire_path(entry.path).rpartition(b"/")[2].decode()
                            found_names[name] = entry.type == "directory"
        return _path_items(directory, found_names, incomplete)

    return _offer(collect, incomplete)


def _path_items(directory: str, names: dict[str, bool], incomplete: str) -> list[CompletionItem]:
    shown = sorted(name for name in names if name.isprintable())
    hidden = incomplete.rpartition("/")[2].startswith(".")  # as shells do, offer these only after a "."
    values = (directory + name + ("/" if names[name] else "") for name in shown if hidden or not name.startswith("."))
    return [CompletionItem(value, type="path") for value in values if value.startswith(incomplete)]


def _stored_workspaces(ctx: click.Context) -> list[CompletionItem]:
    from protocol.store import Store, default_directory  # noqa: PLC0415 start-up

    with Store(_option(ctx, "store") or default_directory()) as store:
        return [CompletionItem(name) for name in store.workspaces()]


def _stored_snapshots(ctx: click.Context, key: str) -> list[CompletionItem]:
    from protocol.store import Store, default_directory  # noqa: PLC0415 start-up

    with Store(_option(ctx, "store") or default_directory()) as store:
        infos = store.snapshots(os.fsdecode(from_wire_path(in_home(key))))
    return [CompletionItem(info.name, help=info.tag) for info in reversed(infos)]


def complete_snapshot(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Offer the snapshots of the selected workspace, newest first."""
    return _offer(lambda: _snapshots_of(_selected(ctx)), incomplete)


def _offer(names: Callable[[], list[CompletionItem]], incomplete: str) -> list[CompletionItem]:
    logging.disable()  # a warning would appear in the middle of the command line
    try:
        return [item for item in names() if item.value.startswith(incomplete)]
    except Exception:  # noqa: BLE001 no daemon, no permission, invalid data: offer nothing
        return []
    finally:
        logging.disable(logging.NOTSET)


LISTED: Final = "; `vfsd snapshots` lists them"


def with_similar_snapshots(record: WorkspaceRecord, error: FileNotFoundError) -> FileNotFoundError:
    """Return `error`; if it is about an unknown snapshot, with suggestions of similar names."""
    if not isinstance(error, ControlError) or not is_unknown_snapshot(error):
        return error
    name = error.filename
    names = [item.value for item in _offer(lambda: _snapshots_of(record), "")]
    advice = did_you_mean(name, names) or LISTED
    better = control_error(error.code, f"{error}{advice}", error.errno, name, error.subject)
    return better if isinstance(better, FileNotFoundError) else error


def _selected(ctx: click.Context) -> WorkspaceRecord:
    """Return the workspace that the -w nearest to the command selects, as for a command that only reads."""
    here = os.fsdecode(current_directory())
    return find_workspace(_option(ctx, "workspace"), here, on_only=lambda _: None)


def _option(ctx: click.Context | None, name: str) -> Any:
    """Return the value of an option that the command or a group before it may take."""
    while ctx is not None:
        if ctx.params.get(name):
            return ctx.params[name]
        ctx = ctx.parent
    return None


def _snapshots_of(record: WorkspaceRecord) -> list[CompletionItem]:
    with ControlClient(record.socket, timeout_s=_TIMEOUT_S) as client:
        answer = client.call("snapshots", SnapshotsParams(changes=False))
    # Newest first: the oldest of ten thousand snapshots is of little use.
    return [CompletionItem(snapshot.name, help=snapshot.tag) for snapshot in reversed(answer.snapshots)]
