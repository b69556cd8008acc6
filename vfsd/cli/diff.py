"""`vfsd diff`."""

from __future__ import annotations

import errno
import os
import shlex
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from protocol.diff.patch import GIT_APPLY_LIMIT_BYTES
from protocol.types import ChangeCounts
from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.changes import note_problems, plain_change, show_changes, show_stat
from vfsd.cli.common.names import complete_path, complete_snapshot, complete_workspace
from vfsd.cli.common.paging import PatchColours, paged
from vfsd.cli.common.streamed import ChangeSpool, PatientOutput, call_with_changes, write_changes
from vfsd.cli.common.values import exclude_option, include_option
from vfsd.client.requests import RemoteCall
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.snapshots import DiffResult
from vfsd.wire.messages import from_wire_path, is_unknown_snapshot

_NAMED: Final = 20  # paths missing from a patch that standard error names


_AFTER_DASHES: Final = f"{__name__}.after_dashes"  # whether `--` was among the arguments


def _complete_state(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer snapshots, or paths after `--`."""
    return (complete_path if ctx.meta[_AFTER_DASHES] else complete_snapshot)(ctx, param, incomplete)


class _DiffCommand(Command):
    """Takes the words after `--` as paths.  click itself drops the `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        paths: list[str] = []
        after_dashes = "--" in args
        if after_dashes:
            mark = args.index("--")
            args, paths = args[:mark], args[mark + 1 :]
        ctx.obj = ctx.ensure_object(App)
        rest = super().parse_args(ctx, args)
        ctx.params["paths"] = tuple(paths)
        ctx.meta[_AFTER_DASHES] = after_dashes
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if ctx.meta[_AFTER_DASHES]:
            return complete_path(ctx, self.params[0], incomplete)
        return super().shell_complete(ctx, incomplete)

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
    vfsd diff turn-3 --patch | git -C copy apply
    vfsd diff --exclude '*.log' --exclude build/
    vfsd diff --against agents-1 --stat    # how a fork differs from this workspace
    """,
)
@click.argument("a", required=False, shell_complete=_complete_state)
@click.argument("b", required=False, shell_complete=_complete_state)
@click.option("--stat", is_flag=True, help="Print the lines added and removed in each file, as git does.")
@click.option("-p", "--patch", is_flag=True, help="Print a patch for `git apply`, binary files included.")
@click.option("--names", is_flag=True, help="Print only the paths.")
@click.option(
    "--against", metavar="FORK", shell_complete=complete_workspace, help="Show how a fork differs from this workspace."
)
@include_option
@exclude_option
@click.option("--include-git", is_flag=True, help="With --patch: include .git, which `git apply` rejects.")
@click.pass_obj
def diff_command(
    app: App,
    a: str | None,
    b: str | None,
    stat: bool,
    patch: bool,
    names: bool,
    against: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    include_git: bool,
    paths: tuple[str, ...],
) -> None:
    """Show what changed between two snapshots, or since one.

    A defaults to the newest snapshot (in an overlay without snapshots, to the directory below it), B to the live state.
    `vfsd apply --dry-run` shows what an overlay with snapshots has changed since the directory below.
    Each line is a letter and a path:
    A added, M modified, D removed, T another type (a file became a symlink, for example), m metadata only (mode,
    owner, time, extended attributes, hard links).  A path that became a name of another file, or is no longer one, has
    that name after it: "m b (hard link to a)".

    With --against, the changes lead from this workspace to FORK, which is the name of a running workspace or a path in
    it: a fork of this workspace, its source, or another fork of the same source.

    PATHs, after `--`, limit the output to these paths and what is below them.  They are relative to the current
    directory if that is in the workspace, else to the workspace's root; or absolute.
    The output writes a byte that is not UTF-8, and a control character, as \\xNN, and doubles a backslash.
    On a terminal it has colours, and goes through $VFSD_PAGER, else $PAGER, else `less`; NO_COLOR=1 and VFSD_PAGER=cat
    switch that off.

    `git apply` of a patch turns state A into state B; standard error names the command.  Comment lines in the patch,
    and standard error, name the changes that are missing from it: special files, files over 256 MiB and names that git
    rejects (exit status 1); empty directories, hard links and the content of .git, which git ignores (exit status 0).
    A patch never contains owners, times, extended attributes, or mode bits other than the owner's execute bit.
    """
    modes = [mode for mode, is_given in (("stat", stat), ("patch", patch), ("names", names)) if is_given]
    if len(modes) > 1:
        raise click.UsageError(f"{' and '.join(f'--{mode}' for mode in modes)} exclude each other: give one")
    mode = modes[0] if modes else None
    if include_git and mode != "patch":
        raise click.UsageError("--include-git goes with --patch")
    if against is not None and a is not None:
        raise click.UsageError("--against compares the present states: it takes no snapshots; put paths after --")
    app.paths = paths
    selected: Any = {"include": include, "exclude": exclude, "against": against}
    request: RemoteCall[Any]
    if mode == "patch":
        request = app.requests.patch(a, b, paths, include_git=include_git, **selected)
    else:
        request = app.requests.diff(a, b, paths, **selected)
    try:
        _answer(app, request, mode)
    except FileNotFoundError as error:
        mistaken = next((word for word in (a, b) if word is not None and error.filename == word), None)
        if mistaken is None or not os.path.lexists(mistaken) or not is_unknown_snapshot(error):
            raise
        raise FileNotFoundError(errno.ENOENT, "this is a path, not a snapshot; put paths after --", mistaken) from None


def _answer(app: App, request: RemoteCall[Any], mode: str | None) -> None:
    if mode == "patch":
        _patch(app, request)
        return
    if mode == "stat":
        request.params.mode = "stat"
    if not (app.json or mode == "stat" or output.on_terminal()):
        answer = write_changes(app, request, _name if mode == "names" else plain_change)
    else:
        show = {"stat": _show_stat, "names": _show_names}.get(mode or "", _show)
        answer = call_with_changes(app, request, "comparing", show)
    note_problems(answer.problems)


def _show(_answer: DiffResult, changes: ChangeSpool) -> None:
    with paged():
        show_changes(changes)


def _name(change: ChangeRecord) -> str:
    return output.show_path(change.path)


def _show_names(_answer: DiffResult, changes: ChangeSpool) -> None:
    with paged():
        for change in changes:
            output.say(_name(change))


def _show_stat(answer: DiffResult, changes: ChangeSpool) -> None:
    if answer.counts != ChangeCounts():
        with paged():
            show_stat(changes, answer.counts)


def _patch(app: App, request: RemoteCall[Any]) -> None:
    """Print the patch as it arrives, so that its size is not limited by memory; in JSON, print it at once."""
    if app.json:
        pieces: list[bytes] = []
        answer = app.call(request, on_output=pieces.append)
        output.print_json(_patch_document(answer, b"".join(pieces)))
    else:
        coloured = output.on_terminal() and output.has_colours()
        with paged(), PatientOutput() as out:
            answer = app.call(request, on_output=PatchColours(out.write).feed if coloured else out.write)
        _note_what_is_missing(answer)
    if answer.problems:
        click.get_current_context().exit(1)


def _patch_document(answer: DiffResult, whole: bytes) -> dict[str, Any]:
    try:
        content: dict[str, str | bytes] = {"patch": whole.decode()}
    except UnicodeDecodeError:
        content = {"patch_base64": whole}
    names = ("a", "b", "counts", "problems", "omitted", "truncated")
    return {**{name: getattr(answer, name) for name in names}, **content}


def _command_for(a: str) -> str:
    """Return the command that applies a patch to state `a`; that of an overlay's directory knows its repository.

    In a directory below the top of a repository, `git apply` takes the paths of the patch from the top, and skips them.
    """
    directory = os.fsdecode(from_wire_path(a.removeprefix("overlay:")))
    if not a.startswith("overlay:/") or not os.path.isdir(directory):
        return "`git apply` at the top of a copy (in a subdirectory of a larger repository: `--directory=SUBDIRECTORY`)"
    top = directory = os.path.realpath(directory)
    while not os.path.lexists(os.path.join(top, ".git")) and top != "/":
        top = os.path.dirname(top)
    if top == "/":
        return f"`{shlex.join(['git', '-C', directory, 'apply'])}`"
    inside = [] if top == directory else [f"--directory={os.path.relpath(directory, top)}"]
    return f"`{shlex.join(['git', '-C', top, 'apply', *inside])}`"


def _note_what_is_missing(answer: DiffResult) -> None:
    named = [*answer.omitted, *answer.problems]
    for each in named[:_NAMED]:
        output.note(f"not in this patch: {each.path} ({each.reason})")
    if len(named) > _NAMED or answer.truncated:
        output.note("not in this patch: more paths, named in its comments")
    if answer.patch_bytes > GIT_APPLY_LIMIT_BYTES:
        size, limit = output.human_size(answer.patch_bytes), output.human_size(GIT_APPLY_LIMIT_BYTES)
        output.note(f"the patch has {size}, but `git apply` takes at most {limit}: split it with PATHs")
    if answer.patch_bytes:
        only = "; `patch` does not: it would write through links, or reject directories" if answer.git_only else ""
        output.note(f"{_command_for(answer.a)} applies it{only}")
    if answer.problems:
        lacking = output.counted(len(answer.problems), "change")
        output.report(f"the patch lacks {lacking}; `vfsd export` contains everything")
