"""The `vfsd` command: the group, and the table of its commands.

Start-up is most of the cost of a short command.  So a command's module is imported only when the command runs, and
`vfsd --help` prints the table below without importing any.
"""

from __future__ import annotations

import sys

try:
    import contextlib
    import importlib
    import io
    import os
    import signal
    from typing import TYPE_CHECKING, Any, Final

    import click

    from vfsd import __version__
    from vfsd.cli.common import output
    from vfsd.cli.common.app import (
        INTERRUPTED,
        WORDS,
        App,
        SuggestingGroup,
        asks_for_json,
        describe,
        end_with_usage,
        guarded,
        report,
        shared_options,
    )
except KeyboardInterrupt:
    # These imports take most of the start-up time: Ctrl-C during them must not print a traceback.
    sys.exit(130)

if TYPE_CHECKING:
    from vfsd.client.quick_call import BegunCall

# heading -> name -> (module, the first line of its help; a test compares the two)
_GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "Workspaces": {
        "mount": ("mount", "Make a directory a workspace."),
        "attach": ("mount", "Make a directory a workspace without a mount, where FUSE is missing."),
        "unmount": ("unmount", "Unmount a workspace; asks before unsaved changes are lost."),
        "list": ("workspaces", "List the running workspaces."),
        "status": ("workspaces", "Show the settings, contents and limits of a workspace."),
        "policy": ("workspaces", "Show which files no program may change or see, and add to them."),
        "upgrade": ("workspaces", "Replace the daemon of a workspace by the installed version."),
        "compact": ("workspaces", "Replace the journal of a workspace by an image of its state."),
        "persisted": ("store", "Manage the journals of workspaces that were mounted with --persist."),
    },
    "Forks": {
        "fork": ("forks", "Make a workspace that starts as a copy of this one."),
        "merge": ("forks", "Take over what a fork has changed."),
        "adopt": ("forks", "Make the workspace equal to a fork."),
        "conflicts": ("forks", "Show which forks change the same paths, before anybody merges them."),
    },
    "Snapshots": {
        "snapshot": ("snapshots", "Take a snapshot of the workspace as it is now."),
        "snapshots": ("snapshots", "List the snapshots, oldest first."),
        "drop": ("snapshots", "Delete snapshots."),
        "prune": ("prune", "Remove the snapshots that no rule keeps."),
        "restore": ("snapshots", "Restore the workspace, or some paths, from a snapshot or archive."),
        "revert": ("forks", "Undo what changed between two states, and keep everything later."),
        "timeline": ("history", "Show the snapshots, what each changed, and who did it."),
        "diff": ("snapshots", "Show what changed between two snapshots, or since one."),
        "log": ("history", "Show which program changed what, and when."),
        "push": ("transfer", "Upload the present state, or a snapshot, to an object store."),
        "pull": ("transfer", "Download a snapshot from an object store to this machine."),
        "store": ("store", "Manage the snapshots that are kept on disk or in an object store."),
    },
    "Archives": {
        "export": ("transfer", "Write the workspace, or a snapshot, as a ZIP archive."),
        "import": ("transfer", "Add the content of a ZIP archive to the workspace."),
    },
    "Overlays": {
        "apply": ("forks", "Write the changes of an overlay to the directory below it."),
        "discard": ("forks", "Discard the changes of an overlay, and show the directory below it again."),
    },
    "Commands": {
        "exec": ("exec", "Run a command in the workspace."),
        "run": ("run", "Run a command on an overlay of the current directory."),
    },
    "Browser": {
        "web": ("servers", "Show the workspaces in a browser: timeline, files, differences, restore."),
    },
    "Agents": {
        "fs": ("fs", "Read, write, search and run, as an agent does; answers are JSON."),
        "mcp": ("servers", "Serve a running workspace to agents, as an MCP server."),
        "hooks": ("hooks", "Take a snapshot after each step of an agent."),
        "rewind": ("hooks", "Return to a state that the hooks of an agent kept."),
    },
    "This machine": {
        "doctor": ("this_machine", "Check what this machine needs to mount workspaces."),
        "completion": ("this_machine", "Print the script that completes vfsd's commands in a shell."),
    },
}
COMMANDS: Final = {name: found for group in _GROUPS.values() for name, found in group.items()}
_FIRST_STEPS: Final = """\
vfsd runs an agent on a live copy of your project. In the order of use:

  vfsd run -- claude       run a command on an overlay of the current directory
  vfsd diff                show what changed since the last snapshot
  vfsd rewind              return to the state at the last prompt; see `vfsd hooks install`
  vfsd restore NAME        return to a snapshot; `vfsd restore --undo` takes it back
  vfsd apply [PATH ...]    write the changes to the directory below
  vfsd discard [PATH ...]  drop them

`vfsd --help` shows all commands, `vfsd doctor` checks this machine."""
# Names of other programs' commands that do the same.
_ALIASES: Final = {"umount": "unmount", "ls": "list", "rm": "drop"}


class LazyGroup(SuggestingGroup):
    """A group that imports each command when it is used, and reports errors with `guarded`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        words = tuple(args)
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        if not output.has_colours():
            extra.setdefault("color", False)  # for everything that click prints, in the commands as well
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except click.ClickException as error:
            end_with_usage(error, as_json=asks_for_json(words))
        except KeyboardInterrupt:  # click itself would print "Aborted!"
            raise click.exceptions.Exit(INTERRUPTED) from None
        context.meta[WORDS] = words
        return context

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(_FIRST_STEPS, err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        cmd_name = _ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"vfsd.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, first = args[0], "".join(args[1:2])
        if name == "ls" and first and not first.startswith("-"):
            raise click.UsageError("`vfsd ls` lists the running workspaces; `vfsd fs ls PATH` lists a directory", ctx)
        if name == "rm" and set(first) <= set("-rfR") and first:
            raise click.UsageError("`vfsd rm` drops snapshots; `vfsd fs rm PATH` deletes files", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        return guarded(ctx, lambda: self._invoke(ctx))

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ImportError as error:
            from vfsd.machine.interpreter import foreign_protocol  # noqa: PLC0415 start-up: an error has time

            reason = foreign_protocol() if (error.name or "").partition(".")[0] == "protocol" else None
            if reason is None:
                raise
            raise click.ClickException(": ".join(reason)) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, COMMANDS))
        for heading, commands in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])


def _show_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        build = "interpreted"
        with contextlib.suppress(ImportError):  # `protocol` may be of an unrelated distribution: `vfsd doctor` says so
            from protocol import compiled  # noqa: PLC0415 start-up

            build = compiled.build()[0]
        click.echo(f"vfsd {__version__} ({build})")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  vfsd mount ~/work              # ~/work is now an empty in-memory workspace
  cd ~/work && git clone ... .   # use it as any directory
  vfsd snapshot before           # take a snapshot, in constant time
  vfsd diff                      # show the changes since then
  vfsd restore before            # restore it; `vfsd restore --undo` undoes that
  vfsd unmount

Without -w a command acts on $VFSD_WORKSPACE, else on the workspace that the
current directory is in. Outside of every workspace a command that only reads
takes the only one running, and says so.
`vfsd help COMMAND` is `vfsd COMMAND --help`; umount, ls and rm are other names
of unmount, list and drop.
Exit status: 0 success, 1 failure (one line says why), 2 wrong usage.""",
)
@click.option(
    "-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and exit.",
)  # fmt: skip
@click.pass_context
def cli(ctx: click.Context, workspace: str | None, as_json: bool) -> None:
    """A file system for agents: a real mount, snapshots in constant time, restored in place."""
    if workspace == "":
        raise click.UsageError("-w is an empty string")
    ctx.obj = App(workspace=workspace, json=as_json, begun=ctx.obj)


cli.params += shared_options()


# If it is set, an unexpected exception prints its traceback.
_DEBUG_VARIABLE: Final = "VFSD_DEBUG"


def _open_standard_streams() -> None:
    """Open closed standard streams, so that the next file or socket does not get one of their descriptors."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open(2) returns the lowest free number, which is this one
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # Python's value for a stream that was closed at start-up
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


class _StandardOutput(io.FileIO):
    """Descriptor 1, whose errors name it: "No space left on device" alone would be read as a full workspace."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, f"cannot write to standard output: {error.strerror}") from None


def _name_standard_output_in_errors() -> None:
    stdout = sys.stdout
    if stdout is sys.__stdout__ and isinstance(stdout, io.TextIOWrapper):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_StandardOutput(1, "w", closefd=False)),
            encoding=stdout.encoding,
            errors=stdout.errors,
            line_buffering=stdout.line_buffering,
            write_through=stdout.write_through,
        )


def main(begun: BegunCall | None = None) -> None:
    """Run the command line.  `begun` is the command's call, if the fast path has already sent it."""
    try:
        _run(begun)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if "obstore" in sys.modules and isinstance(end.code, int | None):
            # Its threads may still release Python objects.  If Python finalizes itself meanwhile, the process aborts.
            os._exit(end.code or 0)
        raise
    finally:
        # The outcome is decided and printed. While Python finalizes itself, Ctrl-C would kill the process instead.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(begun: BegunCall | None) -> None:
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks is written as an escape instead of raising an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _name_standard_output_in_errors()
    try:
        cli(prog_name="vfsd", obj=begun)
    except Exception as error:
        # A bug: print one line, and the traceback on request.
        if os.environ.get(_DEBUG_VARIABLE):
            raise
        sys.exit(_end_unexpectedly(error))
    finally:
        _drop_what_cannot_be_written()


def _end_unexpectedly(error: Exception) -> int:
    """Report an exception that no command handles; return the exit status."""
    line = f"{type(error).__name__}: {error}; this is a bug in vfsd: {_DEBUG_VARIABLE}=1 shows the traceback"
    as_json = asks_for_json(sys.argv[1:])
    if isinstance(error, OSError):  # from standard output: a full or broken disk
        line, as_json = describe(error), False
    with contextlib.suppress(OSError):  # standard error fails, too
        report(line, {"message": line, "errno": None, "path": None}, as_json=as_json)
    return 1


def _drop_what_cannot_be_written() -> None:
    """Flush the standard streams and discard what fails; else Python prints a traceback at exit."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


if __name__ == "__main__":
    main()
