"""What every command shares: -w and --json, how its errors end, and its way to a workspace's daemon."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from vfsd.cli.common import output
from vfsd.cli.common.interrupts import AFTER_SIGNAL, Interrupted, Signalled, completed, interruptible

if TYPE_CHECKING:
    from vfsd.client.requests import RemoteCall, Requests
    from vfsd.machine.runtime import WorkspaceRecord

__all__ = [
    "INTERRUPTED",
    "NO_ARGUMENTS",
    "WORDS",
    "App",
    "Command",
    "SuggestingGroup",
    "asks_for_json",
    "check_alive",
    "describe",
    "did_you_mean",
    "end_with_usage",
    "error_record",
    "guarded",
    "json_option",
    "workspace_option",
]

T = TypeVar("T")
INTERRUPTED: Final = 130  # what a shell says of a command that SIGINT ended: 128 + 2
WORDS: Final = "vfsd.words"  # the key of the whole command line in a context's `meta`


@dataclass(slots=True)
class App:
    """One run of the command line: which workspace, and whether the answer is JSON."""

    workspace: str | None = None
    json: bool = False
    interrupted: str = "interrupted"  # what to say when Ctrl-C ends the command
    signalled: Signalled | None = None  # the call that was completed after a signal
    _record: WorkspaceRecord | None = None

    def record(self) -> WorkspaceRecord:
        """The workspace that -w, $VFSD_WORKSPACE or the current directory picks, or the only one."""
        # Here and below: start-up; `vfsd --help` needs neither msgspec nor a socket.
        from vfsd.client.mount_arguments import running_workspace  # noqa: PLC0415

        if self._record is None:
            self._record = running_workspace(self.workspace)
        return self._record

    @property
    def requests(self) -> Requests:
        """The requests for that workspace.  Their paths are relative to the current directory."""
        from vfsd.client.paths import current_directory  # noqa: PLC0415
        from vfsd.client.requests import Requests  # noqa: PLC0415

        return Requests(self.record().mountpoint, current_directory())

    def call(
        self,
        request: RemoteCall[Any],
        record: WorkspaceRecord | None = None,
        *,
        label: str | None = None,
        on_output: Callable[[bytes], object] | None = None,
    ) -> Any:
        """Send `request` to that workspace, or to the one of `record`, and return the answer, unconverted.

        With `label`, a progress bar is shown on a terminal while the daemon works.  Raises Interrupted.
        """
        from vfsd.client.connection import ControlClient  # noqa: PLC0415

        if self.signalled is not None and self.signalled.number is not None:
            # Of a command that makes several calls: no further one after Ctrl-C.
            raise Interrupted(completed(self.signalled), self.signalled.number, errno.EINTR)
        record = record or self.record()
        check_alive(record)
        try:
            with (
                ControlClient(record.socket) as client,
                interruptible(client, request.method) as self.signalled,
                output.progress(label) as on_progress,
            ):
                return client.call(
                    request.method, request.params, on_progress=on_progress, on_output=on_output or request.on_output
                )
        except FileNotFoundError as error:
            # With `of` the snapshot is another workspace's, whose names this daemon does not have.
            if getattr(request.params, "of", None) is None:
                from vfsd.cli.common.names import with_similar_snapshots  # noqa: PLC0415 start-up: an error has time

                raise with_similar_snapshots(record, error) from None
            raise

    def emit(self, answer: Any, show: Callable[[Any], None]) -> None:
        """`answer` as the one JSON document, or as `show` prints it for people."""
        if self.json:
            output.print_json(answer)
        else:
            show(answer)


def check_alive(record: WorkspaceRecord) -> None:
    """ConnectionRefusedError, which says what to do, where nobody serves the workspace any more."""
    if not record.alive:
        advice = f"`vfsd unmount {record.name}` clears it away, `vfsd mount` at its place replaces it"
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, f"the daemon of {record.name} is dead, and {record.what_a_death_costs}; {advice}"
        )


# -- options --------------------------------------------------------------------------------------
def _complete_workspace(ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
    from vfsd.cli.common.names import complete_workspace  # noqa: PLC0415 start-up: only a shell's <Tab> needs it

    return complete_workspace(ctx, param, incomplete)


def workspace_option() -> click.Option:
    """-w, on the group and on every command."""
    return click.Option(
        ["-w", "--workspace"],
        metavar="NAME|PATH",
        help="The workspace: its name, or a path in it.",
        shell_complete=_complete_workspace,
    )


def json_option() -> click.Option:
    """--json, on the group and on every command."""
    return click.Option(["--json", "as_json"], is_flag=True, help="Answer with one JSON document.")


class Command(click.Command):
    """A command that takes -w and --json, and whose `examples` end its help.

    Parameters other than those named in `may_be_empty` are refused where they are an empty string.
    """

    def __init__(
        self,
        *args: Any,
        examples: str = "",
        may_be_empty: frozenset[str] = frozenset({"tag"}),
        interrupted: str = "interrupted",
        **kwargs: Any,
    ) -> None:
        """`interrupted` says what has become of the work when Ctrl-C ends the command itself."""
        super().__init__(*args, **kwargs)
        self.interrupted = interrupted
        self.examples = examples
        self.may_be_empty = may_be_empty
        self.params += [workspace_option(), json_option()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # the parser does not give it where an option lacks its value
            raise
        if not ctx.resilient_parsing:
            self._refuse_empty(ctx)
        return rest

    def _refuse_empty(self, ctx: click.Context) -> None:
        """UsageError for an argument or option that is an empty string.

        It is mostly a shell variable that is not set, and would mean much: as a PATH the whole workspace, as a
        WORKSPACE the one that the current directory is in.
        """
        for param in self.params:
            value = ctx.params.get(param.name or "")
            empty = value == "" or (isinstance(value, tuple) and "" in value)
            if empty and param.name not in self.may_be_empty and param.type is not click.UNPROCESSED:
                hint = param.get_error_hint(ctx).replace("'", "")
                raise click.UsageError(f"{hint} is an empty string", ctx)

    def invoke(self, ctx: click.Context) -> Any:
        app = ctx.ensure_object(App)
        app.workspace = ctx.params.pop("workspace") or app.workspace
        app.json = ctx.params.pop("as_json") or app.json
        app.interrupted = self.interrupted
        try:
            return super().invoke(ctx)
        finally:
            signalled = app.signalled
            if signalled is not None and signalled.is_completed and not isinstance(sys.exception(), Interrupted):
                # The answer is shown: the call was completed all the same.
                output.note(completed(signalled))
                ctx.exit(AFTER_SIGNAL + (signalled.number or 0))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.strip().splitlines():
                    formatter.write(" " * formatter.current_indent + line.strip() + "\n")


# -- errors ---------------------------------------------------------------------------------------
def guarded(ctx: click.Context, run: Callable[[], T]) -> T:
    """Return what `run` returns.  A failure or wrong usage ends the process with one line and status 1 or 2.

    Any other exception is a bug, and `main` reports it.
    """
    try:
        return run()
    except Interrupted as end:
        _report(error_record(OSError(end.errno, str(end))), str(end), as_json=ctx.ensure_object(App).json)
        ctx.exit(AFTER_SIGNAL + end.number)
    except KeyboardInterrupt:
        app = ctx.ensure_object(App)
        _report(error_record(OSError(errno.EINTR, app.interrupted)), app.interrupted, as_json=app.json)
        ctx.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output is gone: click ends the process quietly.  (The client raises other errors for its
        # socket.)
        raise
    except (OSError, NotImplementedError, UnicodeEncodeError) as error:
        _fail(ctx, error)
    except click.ClickException as error:
        end_with_usage(error, as_json=ctx.ensure_object(App).json or asks_for_json(ctx.meta.get(WORDS, ())))


def _fail(ctx: click.Context, error: Exception) -> NoReturn:
    _report(error_record(error), describe(error), as_json=ctx.ensure_object(App).json)
    for note in getattr(error, "__notes__", ()):  # of a start that failed unexpectedly: the end of its log
        output.note(note)
    ctx.exit(1)


def end_with_usage(error: click.ClickException, *, as_json: bool) -> NoReturn:
    """End the process as click would, but with one line, and with --json a document."""
    if isinstance(error, NO_ARGUMENTS):
        raise error  # `vfsd` alone, which prints the help
    message = _printable(error.format_message().rstrip("."))
    line = message
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "vfsd"
        line += f"{'' if message.endswith('?') else '.'} See `{path} --help`"
    _report({"message": message, "errno": None, "path": None}, line, as_json=as_json)
    raise click.exceptions.Exit(error.exit_code)


# Newer versions of click than the oldest that we support raise this; the older ones print and exit.
NO_ARGUMENTS: Final[tuple[type[Exception], ...]] = tuple(
    getattr(click.exceptions, name) for name in ("NoArgsIsHelpError",) if hasattr(click.exceptions, name)
)


def _report(record: dict[str, Any], line: str, *, as_json: bool) -> None:
    output.report(line)
    if as_json:
        with contextlib.suppress(OSError):  # standard output may be what failed; the line has been written
            output.print_json({"error": record})


def asks_for_json(words: Iterable[str]) -> bool:
    """Whether the command line has --json, also where an option before it is wrong and nothing was parsed."""
    return "--json" in itertools.takewhile(lambda word: word != "--", words)


def did_you_mean(word: str, possible: Iterable[str]) -> str:
    """A clause that names the entries of `possible` that are spelled like `word`; empty where none is."""
    import difflib  # noqa: PLC0415 start-up: an error has time

    close = difflib.get_close_matches(word, list(possible), n=3)
    return f"; did you mean {' or '.join(output.show_path(name) for name in close)}?" if close else ""


# What a newcomer tries as a command of its own.
_ELSEWHERE: Final = {
    "undo": "vfsd restore --undo",
    "redo": "vfsd restore --redo",
    "run": "vfsd exec",
    **{name: f"vfsd fs {name}" for name in ("ls", "read", "write", "edit", "glob", "grep", "rm", "stat")},
}


class SuggestingGroup(click.Group):
    """A group that names the commands spelled like one that it does not have."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click looks for such names among the commands that it has imported: none, where they are imported lazily.
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            if ctx.parent is None and name in _ELSEWHERE:
                raise click.UsageError(f"no such command: {name!r}; it is `{_ELSEWHERE[name]}`", ctx)
            raise click.UsageError(f"no such command: {name!r}{did_you_mean(name, self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)


def error_record(error: Exception) -> dict[str, Any]:
    """An error as --json has it; `errno` is the errno's name, and `facts` of the error come with it."""
    name = errno.errorcode.get(getattr(error, "errno", None) or 0)
    facts = getattr(error, "facts", {})
    return {"message": _printable(describe(error)), "errno": name, "path": _path(error), **facts}


def describe(error: Exception) -> str:
    """An error in one line, without Python's "[Errno 2]"."""
    from vfsd.client.connection import ControlError  # noqa: PLC0415 start-up: an error has time

    if isinstance(error, UnicodeEncodeError):  # an argument that is not a path, on its way to the daemon
        return f"not UTF-8: {_printable(error.object)!r}"
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_nowhere():
        return "the current directory was removed: change to another one, or give absolute paths"
    # The daemon's text is whole, with the path as it stands on the wire.
    if isinstance(error, ControlError) or not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    path = _path(error)
    return f"{error.strerror}: {path}" if path else error.strerror


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _path(error: Exception) -> str | None:
    """The path an error is about, printable."""
    name = getattr(error, "filename", None)
    if name is None:
        return None
    text = os.fsdecode(name) if isinstance(name, (bytes, os.PathLike)) else str(name)
    return _printable(text)


def _printable(text: str) -> str:
    """`text` with bytes that are not UTF-8 as `\\xNN`: neither JSON nor every terminal takes them as they are."""
    return _SURROGATE.sub(lambda match: f"\\x{ord(match[0]) - 0xDC00:02x}", text)


# PEP 383: a byte that is no UTF-8, as os.fsdecode smuggles it into a str.
_SURROGATE: Final = re.compile("[\udc80-\udcff]")
