"""`vfsd diff`."""

from __future__ import annotations

from typing import Any

import click

from vfsd.cli import output
from vfsd.cli.app import App, Command
from vfsd.cli.changes import show_changes, show_stat
from vfsd.cli.names import complete_snapshot
from vfsd.control import messages
from vfsd.userpaths import current_directory, wire_paths

__all__ = ["diff_command"]


class _DiffCommand(Command):
    """Takes what follows `--` as paths: click itself drops the mark."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        paths: list[str] = []
        if "--" in args:
            mark = args.index("--")
            args, paths = args[:mark], args[mark + 1 :]
        ctx.obj = ctx.ensure_object(App)
        rest = super().parse_args(ctx, args)
        ctx.params["paths"] = tuple(paths)
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PATH...]"]


@click.command(
    "diff",
    cls=_DiffCommand,
    examples="""
    vfsd diff                              # since the newest snapshot
    vfsd diff turn-3                       # since turn-3
    vfsd diff turn-3 turn-4 --stat
    vfsd diff turn-3 --patch -- src/main.c # of one file
    vfsd diff turn-3 --patch | (cd copy && patch -p1)
    """,
)
@click.argument("a", required=False, shell_complete=complete_snapshot)
@click.argument("b", required=False, shell_complete=complete_snapshot)
@click.option("--stat", "mode", flag_value="stat", help="A table of lines added and removed, as git has it.")
@click.option("-p", "--patch", "mode", flag_value="patch", help="A unified diff that `patch -p1` takes.")
@click.option("--names", "mode", flag_value="names", help="The paths alone.")
@click.pass_obj
def diff_command(app: App, a: str | None, b: str | None, mode: str | None, paths: tuple[str, ...]) -> None:
    """Show what changed between two snapshots, or since one.

    A is the newest snapshot if not given (of an overlay the directory below it), B the state as it is now.
    Each line is a letter and a path:
    A added, M modified, D removed, T another type (a file is now a symlink, say), m metadata only (mode,
    owner, time, extended attributes).

    PATHs, after `--`, limit it to these and what is below them.  They are relative to the current
    directory when that is in the workspace, else to the workspace's root; or absolute.
    In output a byte that is no UTF-8, and a control character, is written \\xNN, and a backslash doubled.
    """
    record = app.record()
    params = messages.DiffParams(a=a, b=b, paths=wire_paths(paths, record.mountpoint, current_directory()))
    if mode == "patch":
        params.mode = "patch"
        _patch(app, record, params)
        return
    if mode == "stat":
        params.mode = "stat"
    answer = app.call(record, "diff", params, label="comparing")
    app.emit(answer, {"stat": _show_stat, "names": _show_names}.get(mode or "", _show))


def _show(answer: messages.DiffResult) -> None:
    show_changes(answer.changes, truncated=answer.truncated)


def _show_names(answer: messages.DiffResult) -> None:
    for change in answer.changes:
        output.say(output.show_path(change.path))
    if answer.truncated:
        output.note("not all are listed")


def _show_stat(answer: messages.DiffResult) -> None:
    if answer.changes:
        show_stat(answer.changes, answer.counts, truncated=answer.truncated)


def _patch(app: App, record: Any, params: messages.DiffParams) -> None:
    """The patch as it comes, so that one of any size needs no memory; in JSON, whole."""
    if not app.json:
        app.call(record, "diff", params, on_output=output.write_bytes)
        return
    pieces: list[bytes] = []
    answer = app.call(record, "diff", params, on_output=pieces.append)
    whole = b"".join(pieces)
    try:
        content: dict[str, str | bytes] = {"patch": whole.decode()}
    except UnicodeDecodeError:
        content = {"patch_base64": whole}
    output.print_json({"a": answer.a, "b": answer.b, "counts": answer.counts, **content})
