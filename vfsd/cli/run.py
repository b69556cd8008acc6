"""`vfsd run`: a command on an overlay of the current directory or of the whole machine, then apply, keep or discard."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Final, Literal

import click

from protocol.journal.directory import drop_journal
from protocol.types import ChangeCounts
from vfsd.cli.common import output
from vfsd.cli.common.app import (
    FAILED,
    NOT_EXECUTABLE,
    NOT_FOUND,
    App,
    Command,
    describe,
    error_record,
    report,
)
from vfsd.cli.common.changes import (
    ChangeSpool,
    PatchColours,
    PatientOutput,
    call_with_changes,
    note_problems,
    paged,
    show_repositories,
)
from vfsd.cli.common.summary import Summary, rules_for, summarize
from vfsd.cli.common.values import NAME, SIZE, touch_option
from vfsd.cli.foreground import Ended, NoPrivateMountError, NotStartedError, run_in_foreground
from vfsd.cli.mount import naming_what_is_read
from vfsd.cli.unmount import clear_away, unmount_and_drop
from vfsd.client import launch
from vfsd.client.arguments import mount_options, running_workspace
from vfsd.client.requests import RemoteCall, Requests
from vfsd.machine.directories import disk_bytes, journal_backend, journal_directory
from vfsd.machine.runtime import (
    WORKSPACE_VARIABLE,
    WorkspaceRecord,
    ensure_socket_dir,
    is_own_place,
    make_place,
    read_record,
    remove_place,
)
from vfsd.machine.selection import PLACES, in_system_run
from vfsd.machine.text import count_words, older_lines
from vfsd.machine.whole_machine import machine_parts
from vfsd.operations.declaration import RepositoryRecord
from vfsd.operations.snapshots import ApplyResult, DiffResult, DropParams, SnapshotsParams, SnapshotsResult
from vfsd.operations.workspace import StatusResult, UnmountParams
from vfsd.wire.messages import wire_path
from vfsd.wire.options import declared_options

Outcome = Literal["applied", "kept", "discarded", "unchanged", "lost"]
_NAMED: Final = 6  # file systems in a remark
_JOURNAL_BYTES: Final = 1 << 20  # what a disk must have room for
# What the answers mean, in the order of the question.
_CHOICES: Final = {
    "apply": "write the changes to {directory}, and end the workspace",
    "patch": "show them as a patch, without .git, ignored directories and new ignored files",
    "select": "choose paths, write only these, and ask again about the others",
    "keep": "keep them in workspace {workspace}: look at them, rewind or apply them later",
    "discard": "forget them; {directory} stays as it is",
}


@click.command(
    "run",
    cls=Command,
    acts_on_workspace=False,
    context_settings={"allow_interspersed_args": False},
    examples="""
    vfsd run -- claude                     # asks at the end what to do with the changes
    vfsd run --apply -- make fmt
    vfsd run --discard -- sh -c 'npm install && npm test'
    vfsd run --keep -- ./migrate.sh        # look at it later: vfsd apply -w NAME --dry-run
    vfsd run --frozen -- claude            # go on working here: claude sees the directory as it is now
    vfsd run --system -- bash              # changes to the whole machine, installed packages included
    vfsd run --system --keep --name try -- apt-get install cowsay
    """,
)
@click.argument("argv", metavar="[--] COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--apply", "apply_it", is_flag=True, help="Apply the changes at the end, without asking.")
@click.option("--keep", is_flag=True, help="Keep the overlay at the end, without asking.")
@click.option("--discard", is_flag=True, help="Discard the changes at the end, without asking.")
@click.option("--frozen", is_flag=True, help="Show the directory as it is now, without later changes in it.")
@click.option(
    "--persist/--no-persist", default=True, help="Keep a journal of the changes on disk (the default), or keep none."
)
@click.option("--name", type=NAME, help="Name the workspace; if one of that name was kept, run in it again.")
@click.option("--max-bytes", type=SIZE, metavar="SIZE", help=declared_options()["max_bytes"][1].text)
@click.option("--system", is_flag=True, help="Run on an overlay of the whole machine instead of the current directory.")
@click.option("--private-tmp", is_flag=True, help="With --system: give the command an empty /tmp, in memory.")
@touch_option
@click.pass_obj
def run_command(
    app: App, /, argv: tuple[str, ...], apply_it: bool, keep: bool, discard: bool, touch: bool, **settings: Any
) -> None:
    """Run a command on an overlay of the current directory.

    The command, and all that it starts, sees the overlay at the path of the current directory.  Other programs see the
    directory itself, which does not change.  Where this user may not make private mounts, the command runs at
    another path, and vfsd says so.

    When the command has ended, vfsd shows what it changed, as `vfsd diff --summary` does, and asks: apply the changes
    to the directory, show them as a patch, apply selected paths, keep the changes in a workspace, or discard them.
    Without a terminal they are kept.  They are kept, too, if `vfsd run` is killed; `vfsd list` shows the workspace.
    The command finds its name in $VFSD_WORKSPACE, so `vfsd snapshot`, `vfsd rewind` and hooks act on it.  `vfsd exec`
    runs further commands in it, on this host and with your rights, as `vfsd run` does.

    The changes are also in a journal on disk, as with `vfsd mount --persist`: if the daemon dies, another one continues
    with them.  The journal is removed when the changes were applied or discarded.  If it cannot be written, vfsd says
    so, and keeps the changes in memory only, as with --no-persist.

    With --frozen, the command does not see what changes in the directory meanwhile: vfsd first takes a snapshot of the
    directory, in the store on this machine, and the overlay shows that snapshot. Applying then merges the changes of
    both sides, as `vfsd apply` describes.

    Files that are applied keep the time at which the command changed them. With --touch, files whose content is written
    get the present time instead.

    The overlay stays for processes that the command leaves in the background, as long as they use it.  After SIGTERM or
    SIGHUP the changes are kept, not applied.  With --apply they are also kept if the command failed.

    With --system the overlay covers the root directory and every other local file system. The command has the rights of
    this user. File systems of other kinds, such as NFS, are read-only; vfsd says which. /dev, /run, /sys, /tmp, sockets
    and the network are the machine's own: changes there are real, and not in the overlay. For root, device files cannot
    be made or removed, and /sys and /proc/sys are read-only. Changes to /var/log and to the profiles of browsers are
    forgotten at the end. vfsd's own journals and snapshots look empty. The command sees only processes that it started,
    and all of them end with it. --system protects against accidents. It does not stop a program that runs as root and
    looks for a way out.

    Ctrl-C, Ctrl-Z and signals reach the command as in a shell.  The exit status is the command's own, 128 + N if signal
    N killed it, 125 if vfsd failed, 126 if the command cannot be executed, and 127 if it was not found.  With --json,
    the command writes its standard output to standard error.
    """
    flags = [name for name, is_given in (("apply", apply_it), ("keep", keep), ("discard", discard)) if is_given]
    if len(flags) > 1:
        raise click.UsageError(f"{' and '.join(f'--{name}' for name in flags)} exclude each other: give one")
    if touch and (keep or discard):
        raise click.UsageError("--touch is for changes that are applied")
    if settings["private_tmp"] and not settings["system"]:
        raise click.UsageError("--private-tmp is for --system")
    if settings["frozen"] and settings["system"]:
        raise click.UsageError("--frozen is for a directory, not for --system")
    if app.workspace is not None:
        raise click.UsageError("-w selects a running workspace; `vfsd exec` runs a command in one")
    try:
        run = _Run(app, argv, touch=touch, **settings)
        run.start()
        status = run.finish(flags[0] if flags else None)
    except OSError as error:
        report(describe(error), error_record(error), as_json=app.json)
        raise SystemExit(_status_of(error)) from None
    raise SystemExit(status)


def _status_of(error: OSError) -> int:
    if isinstance(error, NotStartedError) and error.filename is not None:
        return NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else NOT_EXECUTABLE
    return FAILED


class _Run:
    """One overlay with its command."""

    def __init__(
        self,
        app: App,
        argv: tuple[str, ...],
        *,
        frozen: bool,
        persist: bool,
        touch: bool,
        name: str | None,
        max_bytes: int | None,
        system: bool,
        private_tmp: bool,
    ) -> None:
        self._frozen = frozen
        self._touch = touch
        self._app = app
        self._argv = argv
        self._persist = persist
        self._is_system = system
        self._private_tmp = private_tmp
        self._cwd = os.getcwd()
        self._directory = "/" if system else self._cwd
        if not system and self._directory == "/":
            advice = "change to the directory of a project, or run on the whole machine with --system"
            raise OSError(errno.EINVAL, f"cannot run over the root directory: {advice}")
        if system and in_system_run():
            advice = "run the command without `vfsd run --system`"
            raise OSError(errno.EBUSY, f"the root directory is the overlay of a system run already: {advice}")
        _check_program(argv[0])
        self._is_continued = False
        self._record = self._mount(name, max_bytes)
        self._summary = Summary([], [])
        self._repositories: list[RepositoryRecord] = []  # that the last apply left out, because both sides changed them
        self._counts = ChangeCounts()  # of the changes that are not applied
        self._ended: Ended | None = None
        self._is_saved = False  # the command's own changes are in the directory, or there are none

    def _mount(self, given: str | None, max_bytes: int | None) -> WorkspaceRecord:
        found = None if given is None else read_record(given)
        kept = found if found is not None and self._is_own(found) else None
        is_running = kept is not None and kept.alive
        if kept is not None and (is_running or kept.journal is not None):
            place = kept.mountpoint
        elif given is not None and found is None and self._has_journal(given):
            place = os.path.join(ensure_socket_dir(), PLACES, given)
        else:
            place = self._new_place(given)
        name = os.path.basename(place)
        self._is_continued = is_running or self._has_journal(name)
        if is_running and max_bytes is not None:
            advice = "leave out --max-bytes"
            raise OSError(errno.EBUSY, f"the limit of {name}, which is mounted, cannot be changed: {advice}")
        if self._is_continued and self._frozen:
            advice = "leave --frozen out, or give another --name"
            raise OSError(errno.EEXIST, f"--frozen is for a new workspace, and {given} was kept: {advice}")
        try:
            persist = self._persist and (self._is_continued or self._can_persist(name))
            self._options = mount_options(
                place,
                f"overlay:{self._directory}",
                name=name,
                persist=persist,
                max_bytes=max_bytes,
                exec_on_host=not self._is_system,  # it would run outside of the namespaces
                allow_other=self._is_system and os.geteuid() == 0,
                frozen=self._frozen,
            )
            if not is_running:
                if kept is not None:
                    clear_away(kept, says=False)  # its daemon died
                os.makedirs(place, mode=0o700, exist_ok=True)
                with naming_what_is_read(self._options):
                    launch.launch(self._options)
        except ValueError as error:
            remove_place(place)
            raise OSError(errno.EINVAL, str(error)) from None
        except BaseException as error:
            if not is_running:
                remove_place(place)
            if not self._is_continued:
                with contextlib.suppress(OSError):
                    drop_journal(journal_directory(name))  # nothing was ever in it
            if isinstance(error, OSError) and _is_in_user_namespace():
                reason = "this is a user namespace, perhaps of another `vfsd run`, in which fusermount3 cannot mount"
                raise OSError(error.errno, f"{describe(error)}; {reason}: run it outside") from None
            raise
        return running_workspace(name)

    def _new_place(self, given: str | None) -> str:
        """Make the mountpoint of a new workspace.  EEXIST if the name `given` is taken."""
        base = "system" if self._is_system else os.path.basename(self._directory)
        place = make_place(given or f"run-{base}", self._directory)
        if given not in (None, os.path.basename(place)):
            remove_place(place)
            raise OSError(errno.EEXIST, f"the name {given} is taken (`vfsd list`, `vfsd persisted`): give another")
        return place

    def _is_own(self, record: WorkspaceRecord) -> bool:
        """Return whether a workspace is one that `vfsd run` made over the same directory."""
        return record.backend == f"overlay:{self._directory}" and is_own_place(record.mountpoint)

    def _has_journal(self, name: str) -> bool:
        """Return whether an earlier run over the same directory, which is not mounted any more, left a journal."""
        return self._persist and journal_backend(journal_directory(name)) == f"overlay:{_shown(self._directory)}"

    def _can_persist(self, name: str) -> bool:
        """Return whether a journal can be written; if not, say so in one line."""
        directory = journal_directory(name)
        try:
            os.makedirs(os.path.dirname(directory), mode=0o700, exist_ok=True)
            os.mkdir(directory, 0o700)
            try:
                with tempfile.TemporaryFile(dir=directory) as file:
                    os.posix_fallocate(file.fileno(), 0, _JOURNAL_BYTES)
            finally:
                os.rmdir(directory)
        except OSError as error:
            place = _shown(os.path.dirname(directory))
            reason = f"the journal cannot be written in {place} ({error.strerror})"
            output.note(f"{reason}: the changes are in memory only, and are lost if the daemon dies")
            return False
        return True

    @property
    def _name(self) -> str:
        return self._record.name

    # -- the command --------------------------------------------------------------------------------
    def start(self) -> None:
        """Run the command to its end.  NotStartedError, after which the overlay is gone."""
        here = "the machine" if self._is_system else _shown(self._directory)
        environment = {**os.environ, WORKSPACE_VARIABLE: self._name}
        output_fd = 2 if self._app.json else 1
        self._app.interrupted = f"interrupted: {self._kept()}"
        try:
            self._note(f"{here} is an overlay for this command; workspace {self._name} holds its changes")
            if self._is_system:
                self._run_in_machine(environment, output_fd)
                return
            try:
                self._ended = run_in_foreground(
                    self._argv, self._record.mountpoint, self._directory, environment, output_fd=output_fd
                )
            except NoPrivateMountError as error:
                place = f"the command runs in {_shown(self._record.mountpoint)} instead"
                self._note(f"{describe(error)}; {place} (`vfsd doctor` says why)")
                environment["PWD"] = self._record.mountpoint
                self._ended = run_in_foreground(
                    self._argv, self._record.mountpoint, None, environment, output_fd=output_fd
                )
        except NotStartedError:
            if not self._is_continued:
                self._unmount(discard=True)
            raise

    def _run_in_machine(self, environment: dict[str, str], output_fd: int) -> None:
        """Run the command in the namespaces of a system run."""
        parts = machine_parts(self._record.mountpoint)
        for what, paths in {
            "in the overlay, too": parts.overlaid,
            "read-only, because only local file systems can be in the overlay": parts.read_only,
            "changes there are forgotten at the end": parts.left_out,
        }.items():
            if paths:
                more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
                self._note(f"{what}: {', '.join(map(_shown, paths[:_NAMED]))}{more}")
        steps = parts.steps(self._record.mountpoint, private_tmp=self._private_tmp)
        plan = json.dumps({"directory": self._cwd, "steps": steps})
        try:
            self._ended = run_in_foreground(self._argv, self._record.mountpoint, plan, environment, output_fd=output_fd)
        except NoPrivateMountError as error:
            needs = "a system run needs the right to make namespaces and mounts, and Linux 5.12"
            raise NotStartedError(
                error.errno, f"{describe(error)}; {needs} (`vfsd doctor` says what is missing)"
            ) from None

    def _note(self, text: str) -> None:
        if not self._app.json:
            output.note(text)

    # -- the end --------------------------------------------------------------------------------------
    def finish(self, choice: str | None) -> int:
        """Show the changes, do what `choice` or the user says, and return the exit status."""
        assert self._ended is not None, "start() ended"
        status = self._ended.status
        os.chdir("/")  # this process must not keep the workspace busy
        try:
            self._continue()
        except OSError as error:
            is_lost = self._record.journal is None
            what = "the changes of the command are lost" if is_lost else self._record.content_after_crash
            reason = "" if is_lost else f" ({describe(error)})"
            output.report(f"the daemon of {self._name} died{reason}: {what}")
            self._emit(status, "lost" if is_lost else "kept", ChangeCounts())
            return FAILED
        try:
            try:
                self._show_changes()
            except ConnectionError:  # the daemon died since
                self._continue()
                self._show_changes()
            if choice == "apply" and status != 0:
                self._note(f"the command {self._ended.failure}, so its changes are not applied")
                choice = "keep"
            outcome, is_failed = self._end_as(choice)
        except OSError as error:
            raise OSError(error.errno, f"{describe(error)}; {self._kept()}") from None
        self._emit(status, outcome, self._counts)
        return status or int(is_failed)

    def _continue(self) -> None:
        """Find the daemon that serves now; if it died, and no keeper restarts it, start one with the journal.

        OSError if there is none.
        """
        self._record = running_workspace(self._name)
        if self._record.alive:
            return
        clear_away(self._record, says=False)
        if self._record.journal is None:
            self._record.check_alive()
        os.makedirs(self._record.mountpoint, mode=0o700, exist_ok=True)
        launch.launch(self._options)
        self._record = running_workspace(self._name)
        self._note(f"the daemon of {self._name} died; another one has the changes from the journal")

    def _show_changes(self) -> None:
        requests = Requests(self._record.mountpoint)
        request = requests.diff("")  # since the directory below, also if the command took snapshots
        request.params.mode = "stat"
        app = App(workspace=self._name)
        app.interrupted = self._app.interrupted

        def show(answer: DiffResult, changes: ChangeSpool) -> None:
            self._counts = answer.counts
            if answer.counts != ChangeCounts() and not self._app.json:
                self._summary = summarize(changes, rules_for(self._record))
                with contextlib.suppress(BrokenPipeError), paged():  # the choice counts, even if nothing reads the list
                    self._summary.show()

        problems = call_with_changes(app, request, "comparing", show).problems
        note_problems(self._summary.of_files(problems))

    def _end_as(self, choice: str | None) -> tuple[Outcome, bool]:
        """Apply, keep or discard; return the outcome, and whether the choice could not be carried out."""
        assert self._ended is not None
        if self._counts == ChangeCounts():
            self._is_saved = True
            return self._end_unchanged(choice)
        if self._ended.passed_on and choice != "discard":
            choice = "keep"  # SIGTERM or SIGHUP: the changes may be half done, and nobody may be there to answer
        if choice is None:
            choice = "keep" if self._app.json or not output.can_ask() else self._ask()
        if choice == "apply" and not self._write():
            return "kept", True
        if choice == "nothing left":
            self._drop_snapshots(self._named_snapshots())
        if choice in {"apply", "nothing left"}:
            return "applied", not self._end_saved()
        if choice == "discard":
            self._unmount(discard=True)
            self._note(f"discarded: {count_words(self._counts)}")
            return "discarded", False
        self._note(self._kept() + self._on_disk())
        return "kept", False

    def _end_unchanged(self, choice: str | None) -> tuple[Outcome, bool]:
        """End an overlay that does not differ from the directory; one with named snapshots may be kept for these."""
        assert self._ended is not None
        snapshots = self._named_snapshots()
        name = shlex.quote(self._name)
        if snapshots and (choice in {None, "keep"} or self._ended.passed_on):
            has = f"{self._name} has {output.counted(len(snapshots), 'named snapshot')}"
            self._note(f"nothing is left to apply to {_shown(self._directory)}, but workspace {has}")
            can_ask = choice is None and not self._app.json and not self._ended.passed_on and output.can_ask()
            if not can_ask or self._ask(("keep", "discard"), "[k]eep [d]iscard [?] ") == "keep":
                lists, removes = f"`vfsd snapshots -w {name}` lists them", f"`vfsd unmount --discard {name}` removes it"
                self._note(f"workspace {self._name} keeps them: {lists}, {removes}")
                return "kept", False
        self._drop_snapshots(snapshots)
        self._unmount(discard=False)  # a process that the command left may have changed something since
        self._note("nothing was left to apply" if snapshots else "the command changed nothing")
        return "unchanged", False

    def _named_snapshots(self) -> list[str]:
        """Return the snapshots that an unmount does not drop unasked."""
        answer: SnapshotsResult = self._app.call(RemoteCall("snapshots", SnapshotsParams(changes=False)), self._record)
        return [each.name for each in answer.snapshots if each.kind == "user"]

    def _drop_snapshots(self, names: Sequence[str]) -> None:
        if names:
            self._app.call(RemoteCall("drop", DropParams(names[0], list(names[1:]))), self._record)

    def _ask(
        self,
        choices: Sequence[str] = tuple(_CHOICES),
        question: str = "[a]pply [p]atch [s]elect paths [k]eep [d]iscard [?] ",
    ) -> Literal["apply", "keep", "discard", "nothing left"]:
        """Ask until the answer ends the overlay; show the patch, and apply selected paths, on the way.

        Ctrl-C and the end of the input keep the changes.
        """
        while True:
            words = _read_answer(question)
            if words is None:
                return "keep"
            found = [name for name in choices if words and name.startswith(words.lower())]
            match found:
                case ["apply" | "keep" | "discard" as choice]:
                    return choice
                case ["patch"]:
                    self._show_patch()
                case ["select"]:
                    paths = self._select()
                    if paths and self._write(paths):
                        self._show_changes()
                    if self._counts == ChangeCounts():
                        return "nothing left"
                case _:
                    for name in choices:
                        meaning = _CHOICES[name].format(directory=_shown(self._directory), workspace=self._name)
                        click.echo(f"  {name[0]}  {name.ljust(7)}  {meaning}", err=True)

    def _show_patch(self) -> None:
        """Show the changes as a patch, without those that the summary only counts."""
        request = Requests(self._record.mountpoint).patch("", exclude=self._summary.left_out_of_patches)
        with contextlib.suppress(BrokenPipeError), paged(), PatientOutput() as out:
            coloured = output.on_terminal() and output.has_colours()
            on_output = PatchColours(out.write).feed if coloured else out.write
            self._app.call(request, self._record, on_output=on_output)

    def _select(self) -> list[str]:
        """Ask which of the changes are to be applied; return their paths.

        The directory itself is not offered: to apply it is to apply everything.
        """
        paths = [path for path in self._summary.paths if path]
        if len(paths) < len(self._summary.paths):
            output.note("the mode, owner or time of the directory itself is applied only with everything, by `a`")
        if not paths:
            return []
        for number, path in enumerate(paths, 1):
            click.echo(f"{number:5}  {output.show_path(path)}", err=True)
        while True:
            words = _read_answer("numbers or paths to apply, such as 1 3-5 src; none with Enter: ")
            try:
                return selected(words or "", paths)
            except ValueError as error:
                output.note(str(error))

    def _write(self, paths: Sequence[str] = ()) -> bool:
        """Apply all changes or those at `paths`; return whether that was possible.  If not, nothing was written."""
        request = Requests(self._record.mountpoint).apply(touch=self._touch)
        request.params.paths = list(paths)
        try:
            answer: ApplyResult = self._app.call(request, self._record, label="applying")
        except OSError as error:
            output.report(f"the changes were not applied: {describe(error)}; {self._kept()}")
            return False
        for conflict in answer.conflicts:
            output.note(f"{output.show_path(conflict.path)} {conflict.reason}")
        if not answer.applied:
            conflicts = output.counted(len(answer.conflicts), "conflict", "conflicts")
            name = shlex.quote(self._name)
            how = "--conflicts markers` merges them" if answer.merged else "--force` overwrites changed files there"
            output.report(
                f"{conflicts} in {_shown(self._directory)}; nothing was written; {self._kept(can_apply=False)};"
                f" `vfsd apply -w {name} {how}, `vfsd discard -w {name} PATH` drops the change of the workspace"
            )
            return False
        self._note(f"applied to {_shown(self._directory)}: {count_words(answer.counts)}")
        for line in older_lines(answer.older, way_back=None):
            self._note(line)
        show_repositories(answer.repositories)
        self._repositories = answer.repositories
        return True

    def _end_saved(self) -> bool:
        """Unmount, because the directory has all changes; return whether that was possible."""
        if self._repositories:
            paths = ", ".join(output.show_path(each.path) for each in self._repositories)
            output.report(
                f"everything was applied except {paths}; workspace {self._name} keeps its own:"
                f" `vfsd unmount --discard {shlex.quote(self._name)}` removes it when you have what you need of it"
            )
            return False
        self._is_saved = True
        try:
            self._unmount(discard=False)
        except OSError as error:  # a process that the command left has changed something since, or has a file open
            output.report(f"the changes were applied, but {describe(error)}; {self._kept()}")
            return False
        return True

    def _unmount(self, *, discard: bool) -> None:
        answer = unmount_and_drop(self._app, self._record, UnmountParams(discard=discard))
        if answer.left is not None:
            output.note(answer.left)
        if answer.holders:
            self._note(f"it is still in use by {', '.join(answer.holders)}")

    def _kept(self, *, can_apply: bool = True) -> str:
        """Say where the changes are, and what to do with them.  `can_apply`: an apply of all of them may succeed."""
        name = shlex.quote(self._name)
        what = "is still mounted, and keeps later changes" if self._is_saved else "keeps the changes"
        writes = f" `vfsd apply -w {name}` writes them," if can_apply else ""
        return (
            f"workspace {self._name} {what}: `vfsd apply -w {name} --dry-run` shows them,{writes}"
            f" `vfsd unmount --discard {name}` removes it"
        )

    def _on_disk(self) -> str:
        """Say what the journal takes on disk, if there is one."""
        if self._record.journal is None:
            return ""
        size = output.human_size(disk_bytes(self._record.journal))
        status: StatusResult = self._app.call(RemoteCall("status"), self._record)
        large = f", not compacted: {status.journal_uncompacted}" if status.journal_uncompacted else ""
        return f"; its journal takes {size} in {_shown(self._record.journal)}{large}"

    def _emit(self, status: int, outcome: Outcome, counts: ChangeCounts) -> None:
        if self._app.json:
            document: dict[str, Any] = {
                "directory": _shown(self._directory),
                "workspace": self._name,
                "exit_status": status,
                "outcome": outcome,
                "counts": counts,
            }
            with self._app.writing():
                output.print_json(document)


def _is_in_user_namespace() -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return file.read().split() != ["0", "0", str((1 << 32) - 1)]


def _shown(path: str) -> str:
    return wire_path(os.fsencode(path))


def _check_program(program: str) -> None:
    """Raise NotStartedError unless there is such a program, before a workspace is made for it."""
    code = errno.ENOENT
    if os.path.dirname(program):
        code = 0 if os.access(program, os.X_OK) and not os.path.isdir(program) else errno.EACCES
        if not os.path.exists(program):
            code = errno.ENOENT
    elif shutil.which(program) is not None:
        code = 0
    if code:
        reason = (
            os.strerror(code) if os.path.dirname(program) else "not installed, or not in $PATH; nothing was started"
        )
        raise NotStartedError(code, reason, program)


def _read_answer(question: str) -> str | None:
    """Ask on the terminal; return None at Ctrl-C and at the end of the input."""
    try:
        click.echo(question, nl=False, err=True)
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer:
        click.echo(err=True)
        return None
    return answer.strip()


def selected(words: str, paths: Sequence[str]) -> list[str]:
    """Return those of `paths` that a person chose: by number, beginning with 1, by range, or by path.

    A word that is a path chooses it, and what is below it.  Commas may stand between numbers.  ValueError for a word
    that chooses nothing.
    """
    chosen: set[str] = set()
    for word in words.split():
        below = word.rstrip("/")
        found = [path for path in paths if path == below or path.startswith(f"{below}/")]
        for number in [] if found else word.removesuffix(",").split(","):
            span = re.fullmatch(r"(\d+)(?:-(\d+))?", number)
            first, last = (int(span[1]), int(span[2] or span[1])) if span else (0, 0)
            if not 0 < first <= last <= len(paths):
                raise ValueError(f"{number or word} is neither one of the paths nor a number from 1 to {len(paths)}")
            found += paths[first - 1 : last]
        chosen.update(found)
    return [path for path in paths if path in chosen]
