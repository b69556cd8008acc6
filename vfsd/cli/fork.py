"""`vfsd fork`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Mapping

import click
from click.shell_completion import CompletionItem
from msgspec.structs import replace

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.interrupts import Interrupted, raising
from vfsd.cli.common.names import complete_snapshot
from vfsd.cli.common.values import NAME
from vfsd.cli.unmount import unmount_running
from vfsd.client.arguments import fork_target
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.runtime import read_record, unique_name
from vfsd.operations.workspace import ForkResult, UnmountParams


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
        app.emit(_fork(app, mountpoint, name, snapshot), _show)
        return
    if not mountpoint:
        raise click.UsageError("MOUNTPOINT is an empty string")
    with raising():
        made = _Several(app, os.path.abspath(mountpoint), name).make(count, snapshot)
    if app.json:
        app.emit({"forks": made}, _show)
    else:
        warned: dict[str, None] = {}
        for fork in made:
            warned |= dict.fromkeys(fork.warnings)
            app.emit(replace(fork, warnings=[]), _show)
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


def _show(fork: ForkResult) -> None:
    output.say(f"workspace {fork.name} is mounted at {output.show_path(fork.mountpoint)} (a fork)")
    for warning in fork.warnings:
        output.note(warning)
