"""`vfsd fork`."""

from __future__ import annotations

import contextlib
import errno
import os

import click
from click.shell_completion import CompletionItem

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.interrupts import Interrupted
from vfsd.cli.common.names import complete_snapshot
from vfsd.cli.common.values import NAME
from vfsd.client.mount_arguments import fork_target
from vfsd.machine.runtime import unique_name
from vfsd.wire.messages import ForkResult


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

    Works with memory and overlay workspaces on the native engine.  All forks of one command start with the same state.
    """
    app.interrupted = "interrupted; `vfsd list` shows the forks that were made"
    if count is None:
        app.emit(_fork(app, mountpoint, name, snapshot), _show)
        return
    if not mountpoint:
        raise click.UsageError("MOUNTPOINT is an empty string")
    parent = os.path.abspath(mountpoint)
    is_new = not os.path.lexists(parent)
    os.makedirs(parent, exist_ok=True)
    made: list[ForkResult] = []
    for number in range(1, count + 1):
        try:
            own = f"{name}-{number}" if name else unique_name(f"{parent}-{number}")
            fork = _fork(app, os.path.join(parent, str(number)), own, snapshot)
        except OSError as error:
            if is_new and not made:
                with contextlib.suppress(OSError):
                    os.rmdir(parent)
            done = f"{len(made)} of {count} forks were made; the next: {error.strerror or error}"
            raise OSError(error.errno or errno.EIO, done, error.filename) from error
        except Interrupted as end:
            if not made or end.errno != errno.ECANCELED:
                raise
            done = f"stopped: {len(made)} of {count} forks were made, and stay; `vfsd list` shows them"
            raise Interrupted(done, end.number, errno.EINTR) from None
        made.append(fork)
        snapshot = snapshot or fork.base
        if not app.json:
            app.emit(fork, _show)
    if app.json:
        app.emit({"forks": made}, _show)


def _fork(app: App, mountpoint: str, name: str | None, snapshot: str | None) -> ForkResult:
    try:
        with fork_target(mountpoint, name) as (chosen, path):
            answer: ForkResult = app.call(app.requests.fork(chosen, path, snapshot))
            return answer
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _show(fork: ForkResult) -> None:
    output.say(f"workspace {fork.name} is mounted at {output.show_path(fork.mountpoint)} (a fork)")
    for warning in fork.warnings:
        output.note(warning)
