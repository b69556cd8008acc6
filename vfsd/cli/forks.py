"""`vfsd fork`, `merge`, `adopt`, `revert`, `apply` and `discard`: copies of a workspace, and merges."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import click
import msgspec
from click.shell_completion import CompletionItem
from msgspec.structs import replace

from vfsd.cli.common import output
from vfsd.cli.common.app import INTERRUPTED, App, Command, Interrupted, raising
from vfsd.cli.common.changes import (
    ChangeSpool,
    call_with_changes,
    show_changes,
    show_dry_run,
    show_expired,
    show_outcome,
    show_problems,
    show_repositories,
)
from vfsd.cli.common.values import (
    NAME,
    complete_path,
    complete_path_of_fork,
    complete_revert,
    complete_snapshot,
    complete_workspace,
    touch_option,
)
from vfsd.cli.unmount import unmount_running
from vfsd.client.arguments import fork_target
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.runtime import read_record, unique_name
from vfsd.machine.text import count_words, older_lines, outcome_lines
from vfsd.operations.forks import (
    ConflictRecord,
    Conflicts,
    ConflictsResult,
    ForkResult,
    MergeResult,
    PairRecord,
    RevertResult,
)
from vfsd.operations.snapshots import ApplyResult, RestoreResult
from vfsd.operations.workspace import UnmountParams

if TYPE_CHECKING:
    from vfsd.client.requests import RemoteCall


@click.command(
    "fork",
    cls=Command,
    examples="""
    vfsd fork ~/try
    vfsd fork ~/try --snapshot before-refactoring
    vfsd fork ~/agents --count 4           # ~/agents/1 to ~/agents/4
    """,
)
@click.argument(
    "mountpoint", type=click.Path(readable=False), shell_complete=lambda *_: [CompletionItem("", type="dir")]
)
@click.option("--snapshot", metavar="NAME", shell_complete=complete_snapshot, help="Fork that snapshot.")
@click.option("--name", type=NAME, help="The fork's name; by default made from MOUNTPOINT.  With --count: NAME-1, ...")
@click.option(
    "--count", type=click.IntRange(1, 1000), help="Make so many forks, in numbered directories in MOUNTPOINT."
)
@click.pass_obj
def fork_command(app: App, mountpoint: str, snapshot: str | None, name: str | None, count: int | None) -> None:
    """Make a workspace that starts as a copy of this one.

    The fork is mounted at MOUNTPOINT, an empty directory, which is made if it does not exist.  It shares the memory of
    its source until either changes, so it takes a fraction of a second.  It has the options and the snapshots
    of its source, and a daemon of its own: the end of one workspace leaves the others as they are.

    Works with memory and overlay workspaces on the native engine, whose process is copied.  A fork of a directory or a
    container is an overlay in memory over a snapshot, which the store keeps as long as the fork is mounted.

    All forks of one command start with the same state.  If one of them cannot be made, or on Ctrl-C, the others are
    unmounted again.  With --count a second time in the same MOUNTPOINT, the numbers continue.
    """
    app.interrupted = "interrupted; `vfsd list` shows whether the fork was made"
    if count is None:
        app.emit(_fork(app, mountpoint, name, snapshot), _show_fork)
        return
    if not mountpoint:
        raise click.UsageError("MOUNTPOINT is an empty string")
    with raising():
        made = _Several(app, os.path.abspath(mountpoint), name).make(count, snapshot)
    if app.json:
        app.emit({"forks": made}, _show_fork)
    else:
        warned: dict[str, None] = {}
        for fork in made:
            warned |= dict.fromkeys(fork.warnings)
            app.emit(replace(fork, warnings=[]), _show_fork)
        for warning in warned:
            output.note(warning)


class _Several:
    """Forks in numbered directories in `parent`: all or none."""

    def __init__(self, app: App, parent: str, name: str | None) -> None:
        self._app = app
        self._parent = parent
        self._name = name

    def make(self, count: int, snapshot: str | None) -> list[ForkResult]:
        """Make `count` forks; if that fails or is interrupted, unmount those that were made."""
        app = self._app
        source = app.record().name
        is_new = not os.path.lexists(self._parent)
        os.makedirs(self._parent, exist_ok=True)
        made: list[ForkResult] = []
        targets: dict[str, str] = {}
        try:
            targets = self._targets(count)
            for name, mountpoint in targets.items():
                made.append(_fork(app, mountpoint, name, snapshot or (made[0].base if made else None)))
        except (OSError, KeyboardInterrupt) as error:
            app.interrupted = "interrupted again; `vfsd list` shows the forks that are left"
            left = self._take_back(targets, source)
            if is_new and not left:
                with contextlib.suppress(OSError):
                    os.rmdir(self._parent)
            done = f"{', '.join(left)} could not be unmounted again" if left else "no fork was made"
            if isinstance(error, OSError):
                reason = f"{done}; number {len(made) + 1} of {count} failed: {error.strerror or error}"
                raise OSError(error.errno or errno.EIO, reason, error.filename) from error
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            raise Interrupted(f"stopped: {done}", number, errno.EINTR) from None
        return made

    def _targets(self, count: int) -> dict[str, str]:
        """Return the mountpoint of each fork by its name.  FileExistsError if a workspace has that name."""
        first = max((number for name in os.listdir(self._parent) if (number := self._used(name))), default=0) + 1
        found: dict[str, str] = {}
        for number in range(first, first + count):
            name = f"{self._name}-{number}" if self._name else unique_name(f"{self._parent}-{number}")
            record = read_record(name)
            if record is not None and record.alive:
                reason = f"a workspace named {name} is mounted at {record.mountpoint}; choose another --name"
                raise FileExistsError(errno.EEXIST, reason)
            found[name] = os.path.join(self._parent, str(number))
        return found

    def _used(self, name: str) -> int:
        """Return the number of a directory in which no fork can be mounted; 0 for others."""
        if not (name.isascii() and name.isdecimal()):
            return 0
        path = os.path.join(self._parent, name)
        if mount_at(path) is not None:  # looked up first: a mount without a daemon does not answer
            return int(name)
        try:
            return int(name) if os.listdir(path) else 0
        except OSError:
            return int(name)

    def _take_back(self, targets: Mapping[str, str], source: str) -> list[str]:
        """Unmount the forks that were made; return the names of those that cannot be."""
        self._app.signalled = None  # the signal that ended the work must not end this
        left = []
        for name, mountpoint in targets.items():
            record = read_record(name)
            if record is None or not record.alive or (record.mountpoint, record.forked_from) != (mountpoint, source):
                continue
            try:
                unmount_running(self._app, record, UnmountParams())
                os.rmdir(mountpoint)
            except OSError:
                left.append(name)
        return left


def _fork(app: App, mountpoint: str, name: str | None, snapshot: str | None) -> ForkResult:
    try:
        with fork_target(mountpoint, name) as (chosen, path):
            answer: ForkResult = app.call(app.requests.fork(chosen, path, snapshot), label="forking")
            return answer
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _show_fork(fork: ForkResult) -> None:
    output.say(f"workspace {fork.name} is mounted at {output.show_path(fork.mountpoint)} (a fork)")
    for warning in fork.warnings:
        output.note(warning)


# -- merge and adopt --------------------------------------------------------------------------------
_CONFLICTS_SHOWN: Final = 20
_POLICIES: Final = click.Choice(["fail", "ours", "theirs", "markers"])
_conflicts_option: Final = functools.partial(
    click.option, "--conflicts", type=_POLICIES, default="fail", show_default=True
)


@click.command(
    "merge",
    cls=Command,
    examples="""
    vfsd merge agents-1 -w work            # take over what agents-1 has changed
    vfsd merge agents-2 -w work --dry-run  # show what it would change, and the conflicts
    vfsd merge agents-2 -w work --conflicts markers
    vfsd merge agents-3 -w work src docs   # only these paths
    vfsd restore --undo -w work            # take the last merge back
    """,
)
@click.argument("fork", metavar="FORK", shell_complete=complete_workspace)
@click.argument("paths", metavar="[PATH]...", nargs=-1, shell_complete=complete_path_of_fork)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be changed, and change nothing.")
@_conflicts_option(help="What to do with paths that both changed in different ways.")
@click.option(
    "--merge-tool",
    metavar="NAME",
    help="Merge texts that both changed with this driver of your global git configuration (merge.NAME.driver).",
)
@touch_option
@click.pass_obj
def merge_command(
    app: App,
    fork: str,
    paths: tuple[str, ...],
    dry_run: bool,
    conflicts: Conflicts,
    merge_tool: str | None,
    touch: bool,
) -> None:
    """Take over what a fork has changed.

    FORK is the name of a running workspace, or a path in it: a fork of this workspace, its source, or another fork of
    the same source.  The changes are those since FORK was merged last, or since the fork.  What this workspace has
    changed itself stays: text that both have changed is merged by lines, as git does.

    A conflict is a path that both have changed in ways that do not go together.  --conflicts says what happens then:

    \b
    fail     nothing is changed; the conflicts are listed (exit status 1)
    ours     keep the version of this workspace
    theirs   take the version of FORK
    markers  write both versions into text files, between <<<<<<< and >>>>>>>; where that
             is not possible, keep this workspace's version and put FORK's next to it

    A merge is one step: programs see all of it or nothing, open files stay usable, and `vfsd restore --undo` takes it
    back.  A git repository that only one side has changed is taken whole.  If both have, this workspace keeps its own,
    gets the branches of FORK as refs/vfsd/FORK/*, and the command prints how to merge them with git.

    FORK does not change, and can go on and be merged again: the next merge offers the changes that FORK has made since.
    A merge that is limited to PATHs changes only these, and no other hard link of a file there. It is not remembered:
    the next merge without PATHs compares everything again.

    Files get the times that they have in FORK.  The command counts those that are older than what they replaced, which
    a build may not notice; --touch gives all files whose content it changes the present time.
    """
    app.paths = paths
    request = app.requests.merge(fork, paths, conflicts=conflicts, tool=merge_tool, dry_run=dry_run, touch=touch)
    _merge(app, request, "merged", dry_run=dry_run, advice=_MERGE_ADVICE, has_markers=conflicts == "markers")


@click.command(
    "adopt",
    cls=Command,
    examples="""
    vfsd adopt agents-3 -w work            # work becomes equal to agents-3
    vfsd adopt agents-3 -w work --force    # even if work has changes of its own
    vfsd restore --undo -w work            # take it back
    """,
)
@click.argument("fork", metavar="FORK", shell_complete=complete_workspace)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be changed, and change nothing.")
@click.option("-f", "--force", is_flag=True, help="Replace changes that only this workspace has.")
@touch_option
@click.pass_obj
def adopt_command(app: App, fork: str, dry_run: bool, force: bool, touch: bool) -> None:
    """Make the workspace equal to a fork.

    Use it to keep the best of several forks.  FORK is the name of a running workspace, or a path in it.  If this
    workspace has changed since the fork, or since FORK was merged, and FORK does not have these changes, nothing is
    changed and the paths are listed (exit status 1): `vfsd merge` keeps both, --force replaces them.

    An adoption is one step, as a merge is, and `vfsd restore --undo` takes it back.  Times are those of FORK;
    --touch is as for `vfsd merge`.
    """
    request = app.requests.adopt(fork, force=force, dry_run=dry_run, touch=touch)
    _merge(app, request, "adopted", dry_run=dry_run, advice=_ADOPT_ADVICE)


@click.command(
    "conflicts",
    cls=Command,
    examples="""
    vfsd conflicts -w work                 # work and all its forks
    vfsd conflicts -w work agents-1 agents-2
    vfsd conflicts -w work --watch
    vfsd conflicts -w work --json | jq '.pairs[] | select(.conflicts != [])'
    """,
)
@click.argument("forks", metavar="[FORK]...", nargs=-1, shell_complete=complete_workspace)
@click.option("--watch", is_flag=True, help="Go on, and show each change until Ctrl-C; with --json one line for each.")
@click.pass_obj
def conflicts_command(app: App, forks: tuple[str, ...], watch: bool) -> None:
    """Show which forks change the same paths, before anybody merges them.

    Compares this workspace and each FORK with each other; without FORKs, those that it may be merged with: its forks,
    its source, and the forks of that.  Nothing is changed.

    On a terminal, a table shows for each pair how many paths both have changed, and how many conflicts a merge of one
    into the other would have ("3, 1 conflict"). A list of the conflicts follows. For an overlay, the list also has the
    paths that another program has changed in the directory below, too: `vfsd apply` would refuse them.

    In a pipe each pair is a line with columns that are separated by tabs: the two names, the number of paths, the
    number of conflicts, and the paths in conflict, separated by spaces.

    The exit status is 0, also if there are conflicts, and 1 if workspaces could not be compared.
    """
    app.record(reads=True)
    if watch:
        _watch(app, forks)
    answer: ConflictsResult = app.call(app.requests.conflicts(*forks), label="comparing")
    app.emit(answer, _show_matrix)
    if any(pair.problem for pair in answer.pairs):
        click.get_current_context().exit(1)


def _watch(app: App, forks: Sequence[str]) -> NoReturn:
    """Show the conflicts, and again when they have changed.  Waits longer than a comparison takes."""
    last = None
    while True:
        started = time.monotonic()
        answer: ConflictsResult = app.call(app.requests.conflicts(*forks))
        if answer != last:
            if app.json:
                output.write_bytes(msgspec.json.encode(answer) + b"\n")
            else:
                output.say(time.strftime("%H:%M:%S"))
                _show_matrix(answer)
            sys.stdout.flush()
        last = answer
        try:
            time.sleep(max(_WATCH_S, 4 * (time.monotonic() - started)))
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None  # the usual end


_WATCH_S: Final = 1.0


def _show_matrix(answer: ConflictsResult) -> None:
    names = answer.workspaces
    if not output.on_terminal():
        for pair in answer.pairs:
            paths = " ".join(output.show_path(each.path) for each in pair.conflicts)
            found = "?" if pair.problem else str(len(pair.conflicts))
            output.say("\t".join((pair.a, pair.b, str(pair.shared), found, paths)))
    elif len(names) > 1:
        cells = {(pair.a, pair.b): pair for pair in answer.pairs}
        columns = (output.Column(""), *(output.Column(name) for name in names[1:]))
        rows = [
            (a, *(_cell(cells.get((a, b))) if at < other else "" for other, b in enumerate(names[1:], 1)))
            for at, a in enumerate(names[:-1])
        ]
        output.table(columns, rows, empty="")
    if len(names) < 2:
        output.note(f"{names[0]} has no running forks to compare it with")
    for pair in answer.pairs:
        two = f"{pair.a} and {pair.b}"
        if pair.problem:
            output.note(f"{two} cannot be compared: {pair.problem}")
        for path in pair.repositories:
            output.note(f"{two} both changed the repository {output.show_path(path)}: a merge fetches the branches")
        if output.on_terminal():
            for each in pair.conflicts[:_CONFLICTS_SHOWN]:
                output.say(f"{two}: {output.show_path(each.path)} ({each.reason}): {each.detail}")
            if len(pair.conflicts) > _CONFLICTS_SHOWN:
                output.say(f"{two}: and {len(pair.conflicts) - _CONFLICTS_SHOWN:,} more, which --json lists")
    for below in (answer.below or [])[:_CONFLICTS_SHOWN]:
        output.note(f"{output.show_path(below.path)} {below.reason} (in the directory below {names[0]})")


def _cell(pair: PairRecord | None) -> str:
    if pair is None or pair.problem:
        return "?"
    if not pair.conflicts:
        return f"{pair.shared:,}" if pair.shared else "-"
    return f"{pair.shared:,}, {output.counted(len(pair.conflicts), 'conflict')}"


@click.command(
    "revert",
    cls=Command,
    examples="""
    vfsd revert turn-3..turn-4             # what changed between the two, and nothing later
    vfsd revert src turn-3..turn-4         # only below src
    vfsd revert --tool-call toolu_01A09q90qw90
    vfsd revert --session 0f3a7c11-4b52 --dry-run
    vfsd revert --session 0f3a7c11-4b52 turn-3..   # only its calls since turn-3
    vfsd restore --undo                    # take the revert back
    """,
)
@click.argument("arguments", metavar="[PATH]... [SINCE..UNTIL]", nargs=-1, shell_complete=complete_revert)
@click.option("--tool-call", metavar="ID", help="Undo what this call of an agent's tool changed.")
@click.option("--session", metavar="ID", help="Undo what the calls of this session of an agent changed.")
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be changed, and change nothing.")
@_conflicts_option(help="What to do with paths that were changed again since, and that cannot be merged.")
@touch_option
@click.pass_obj
def revert_command(
    app: App,
    arguments: tuple[str, ...],
    tool_call: str | None,
    session: str | None,
    dry_run: bool,
    conflicts: Conflicts,
    touch: bool,
) -> None:
    """Undo what changed between two states, and keep everything later.

    SINCE and UNTIL are snapshots; UNTIL defaults to the present state. A restore goes back to a state, and undoes
    everything later, too. A revert undoes only the changes between two states, and keeps the later ones: text that was
    changed again since is merged by lines, as git does.

    --tool-call and --session undo what one call of an agent's tool, or all calls of a session, changed, as the agent's
    hooks and the log recorded it: what you and other agents changed meanwhile stays. `vfsd hooks install` installs the
    hooks, and `vfsd rewind --list` lists the calls and sessions. If the log does not reach back to a call, everything
    that changed between the states before and after it is undone, and the command says so.

    A conflict is a path that was changed again, in a way that does not go together with the older state. With
    --tool-call and --session it is also a path that somebody else changed between the same two states. --conflicts says
    what happens then:

    \b
    fail     nothing is changed; the conflicts are listed (exit status 1)
    ours     keep the present version
    theirs   take the version of the older state
    markers  write both versions into text files, between <<<<<<< and >>>>>>>; where that
             is not possible, keep the present version and put the older one next to it

    A revert is one step, as a merge is, and `vfsd restore --undo` takes it back.  A git repository is reverted as a
    whole, or stays as it is if it was changed again.  Times are those of the older state; --touch is as for `vfsd
    merge`.
    """
    since, until, paths = _range(arguments)
    is_of_agent = tool_call is not None or session is not None
    if tool_call is not None and session is not None:
        raise click.UsageError("--tool-call and --session exclude each other: give one")
    if since is None and not is_of_agent:
        raise click.UsageError("name two states, SINCE..UNTIL, as the last argument, or give --tool-call or --session")
    app.paths = paths
    request = app.requests.revert(
        (since or None) if is_of_agent else since,
        until,
        paths,
        tool_call=tool_call,
        session=session,
        conflicts=conflicts,
        dry_run=dry_run,
        touch=touch,
    )
    _merge(app, request, "reverted", dry_run=dry_run, advice=_REVERT_ADVICE, has_markers=conflicts == "markers")


def _range(arguments: Sequence[str]) -> tuple[str | None, str | None, Sequence[str]]:
    """Return SINCE, UNTIL and the PATHs; SINCE is None without a range, and UNTIL is None for the present state."""
    last = arguments[-1] if arguments else ""
    since, dots, until = last.partition("..")
    if not dots or "/" in last or last == "..":
        return None, None, arguments
    return since, until or None, arguments[:-1]


_REVERT_ADVICE: Final = "choose with --conflicts ours, theirs or markers, or give the PATHs to revert"
_MERGE_ADVICE: Final = "choose with --conflicts ours, theirs or markers, or change one side and merge again"
_ADOPT_ADVICE: Final = "`vfsd merge` keeps the changes of both, --force replaces those of this workspace"


def _merge(
    app: App,
    request: RemoteCall[Any],
    verb: Literal["merged", "adopted", "reverted"],
    *,
    dry_run: bool,
    advice: str,
    has_markers: bool = False,
) -> None:
    def show(answer: MergeResult | RevertResult) -> None:
        what = output.show_path(answer.reverted if isinstance(answer, RevertResult) else answer.fork)
        for warning in answer.warnings if isinstance(answer, RevertResult) else ():
            output.note(warning)
        if dry_run:
            show_changes(answer.changes)
        _show_conflicts(answer, has_markers=has_markers)
        if answer.applied and answer.safety_snapshot is None:
            if not answer.repositories:
                output.say(f"nothing to do: {what} has no changes that are {_HERE[verb]}")
        elif answer.applied:
            for line in outcome_lines(f"{verb} {what}", answer.counts, answer.safety_snapshot, answer.older):
                output.say(line)
        elif dry_run and output.on_terminal(err=True):
            output.note(f"would change: {count_words(answer.counts)}")
        if _is_refused(answer, dry_run=dry_run):
            found = output.counted(len(answer.conflicts), "conflict")
            output.report(f"{found} with {what}; nothing was changed: {advice}")
        show_repositories(answer.repositories)
        show_expired(answer.expired)

    answer = app.call(request, label="merging")
    app.emit(answer, show)
    if _is_refused(answer, dry_run=dry_run):
        click.get_current_context().exit(1)


def _show_conflicts(answer: MergeResult | RevertResult, *, has_markers: bool) -> None:
    for conflict in answer.conflicts[:_CONFLICTS_SHOWN]:
        output.note(_described(conflict, is_applied=answer.applied, has_markers=has_markers))
    if len(answer.conflicts) > _CONFLICTS_SHOWN:
        output.note(f"and {len(answer.conflicts) - _CONFLICTS_SHOWN:,} more conflicts, which --json lists")


def _described(conflict: ConflictRecord, *, is_applied: bool, has_markers: bool) -> str:
    path = output.show_path(conflict.path)
    if is_applied and conflict.reason == "lost":  # by `vfsd adopt --force`
        return f"replaced {path}, which was changed here"
    text = f"conflict in {path} ({conflict.reason}): {conflict.detail}"
    if is_applied and conflict.kept_as:
        return f"{text}; theirs is {output.show_path(conflict.kept_as)}"
    return f"{text}; the file has markers" if is_applied and has_markers and conflict.reason == "content" else text


_HERE: Final = {"merged": "not here", "adopted": "not here", "reverted": "still here"}


def _is_refused(answer: MergeResult | RevertResult, *, dry_run: bool) -> bool:
    return bool(answer.conflicts) and not answer.applied and not dry_run


# -- overlays ---------------------------------------------------------------------------------------
@click.command(
    "apply",
    cls=Command,
    examples="""
    vfsd apply --dry-run                   # show what it would write
    vfsd apply
    vfsd apply src docs/index.md           # only these paths
    vfsd apply --conflicts markers         # of a frozen overlay: merge with the directory
    """,
)
@click.argument("paths", metavar="[PATH]...", nargs=-1, shell_complete=complete_path)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@click.option("-f", "--force", is_flag=True, help="Overwrite what other programs changed there since.")
@click.option(
    "--conflicts",
    type=click.Choice(["fail", "ours", "theirs", "markers"]),
    default="fail",
    show_default=True,
    help="For a frozen overlay: what to do with paths that both sides changed and that cannot be merged.",
)
@touch_option
@click.pass_obj
def apply_command(
    app: App, paths: tuple[str, ...], dry_run: bool, force: bool, conflicts: Conflicts, touch: bool
) -> None:
    """Write the changes of an overlay to the directory below it.

    Nothing is written if other programs have changed one of the paths there, or if a directory that would be removed
    has hidden or new entries: the command names the paths and exits with status 1. --force writes anyway, creates
    directories again that other programs removed, and keeps directories with hidden or new entries. If the workspace
    has only parts of a file, and the rest is lost in the directory below, --force leaves that file out, and the exit
    status is 1.

    Each file is replaced atomically.  If the apply is killed before it begins to write, the directory does not change.
    If it is killed later, the next apply, or the next mount of the directory, completes it and reports that.

    An overlay that was mounted with --frozen is merged with the directory instead, as `vfsd merge` does: it combines
    the changes of both sides, and changes that were made only in the directory stay. --conflicts says what happens to a
    path that cannot be merged: "fail" writes nothing and lists the conflicts (exit status 1), "ours" keeps the
    directory's version, "theirs" takes the workspace's version (as --force does), and "markers" writes both versions
    into text files. For other files, "markers" keeps the workspace's version as PATH~theirs. `vfsd attach DIR` and
    `vfsd restore --undo` take such an apply back.

    If a git repository was changed on both sides, its files are not written, even with --force. The repository in the
    directory gets the branches of the workspace as refs/vfsd/WORKSPACE/*, and the command prints how to merge them with
    git.

    A file keeps the time at which the workspace changed it, so a build that ran in the directory since then does not
    notice it: --touch gives all files whose content is written the present time, there and in the workspace.

    After an apply, `vfsd restore --undo` returns the workspace to the state that was applied. It does not change the
    directory.
    """

    def show(answer: ApplyResult, changes: ChangeSpool) -> None:
        place = output.show_path(answer.directory)
        if answer.recovered:
            output.note(answer.recovered)
        if dry_run:
            show_changes(changes)
        for conflict in answer.conflicts:
            output.note(f"{output.show_path(conflict.path)} {conflict.reason}")
        if dry_run:
            show_repositories(answer.repositories)
        if answer.applied:
            output.say(f"applied to {place}: {count_words(answer.counts)}")
            for line in older_lines(answer.older, way_back=None):
                output.say(line)
            show_repositories(answer.repositories)
            show_expired(answer.expired)
        elif answer.conflicts and not force:
            found = output.counted(len(answer.conflicts), "conflict", "conflicts")
            advice = (
                "choose with --conflicts ours, theirs or markers"
                if answer.merged
                else "`vfsd apply --force` overwrites changed files and keeps directories that cannot be removed"
            )
            output.report(
                f"{found} in {place}; nothing was written: {advice}, `vfsd discard PATH` drops the change of the"
                " workspace"
            )

    if force and conflicts != "fail":
        raise click.UsageError("--force and --conflicts exclude each other: give one")
    app.paths = paths
    request = app.requests.apply(paths, dry_run=dry_run, force=force, conflicts=conflicts, touch=touch)
    answer = call_with_changes(app, request, "applying", show)
    show_problems(answer.problems, "could not be written")
    if answer.conflicts and not (answer.applied or force):
        click.get_current_context().exit(1)


@click.command(
    "discard",
    cls=Command,
    examples="""
    vfsd discard --dry-run
    vfsd discard src/main.c                # only this path
    vfsd discard && vfsd restore --undo    # take it back
    """,
)
@click.argument("paths", metavar="[PATH]...", nargs=-1, shell_complete=complete_path)
@click.option("-n", "--dry-run", is_flag=True, help="Show the changes without making them.")
@touch_option
@click.pass_obj
def discard_command(app: App, paths: tuple[str, ...], dry_run: bool, touch: bool) -> None:
    """Discard the changes of an overlay, and show the directory below it again.

    The state before is kept as a safety snapshot, which `vfsd restore --undo` restores.  Files get the times that they
    have in the directory.  With --touch, those whose content changes show the present time, so that a build notices
    them; they are still unchanged for `vfsd diff` and `vfsd apply`.
    """
    app.paths = paths
    request = app.requests.discard(paths, dry_run=dry_run, touch=touch)
    if dry_run:
        show_dry_run(app, request)
    else:
        answer: RestoreResult = app.call(request, label="discarding")
        app.emit(answer, lambda _: show_outcome("discarded", answer, "nothing to discard"))
