"""One run of a command: the options -w and --json, requests to the daemon, signals meanwhile, and error reports.

Ctrl-C, SIGTERM and SIGHUP while the daemon works: the first signal asks the daemon to cancel the call and waits for its
definite answer: either the call was cancelled and has changed nothing, or it has begun to change something and
completes.  The second signal exits at once; the daemon then continues in the background as it answered to the first.
The command exits by itself, too, if the call has not stopped after some seconds: what it waits for may hang, such as
the other end of an `exec:` workspace.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from vfsd.cli.common import output
from vfsd.client.quick_call import ANSWER_S

if TYPE_CHECKING:
    from types import FrameType

    from vfsd.client.connection import ControlClient
    from vfsd.client.quick_call import BegunCall
    from vfsd.client.requests import RemoteCall, Requests
    from vfsd.machine.runtime import WorkspaceRecord
    from vfsd.operations.declaration import Operation
    from vfsd.wire.messages import CancelState

T = TypeVar("T")
INTERRUPTED: Final = 130  # the exit status that a shell reports for SIGINT: 128 + 2
_STOP_S: Final = 7.0  # how long a call may take to stop, after ANSWER_S
STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AFTER_SIGNAL: Final = 128  # the exit status that a shell reports for signal N is 128 + N
# The exit statuses of env(1), nohup(1) and timeout(1), for a command that another one runs.
TIMED_OUT: Final = 124
FAILED: Final = 125
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
WORDS: Final = "vfsd.words"  # the key of the whole command line in a context's `meta`
EVERYTHING: Final = "vfsd.everything"  # the key that has a command's help show all options and examples


@dataclass(slots=True)
class App:
    """One run of the command line: which workspace, and whether the answer is JSON."""

    workspace: str | None = None
    json: bool = False
    interrupted: str = "interrupted"  # the message when Ctrl-C ends the command
    signalled: Signalled | None = None  # the last call that changes something, and the signal that arrived meanwhile
    done: str | None = None  # what the command has changed, for an error after it
    begun: BegunCall | None = None  # the call that the fast path has sent
    paths: Sequence[str] = ()  # the arguments that are paths in a workspace; absolute ones select it, too
    _record: WorkspaceRecord | None = None
    _is_only: bool = False  # nothing selects it: it is the only one running
    _is_noted: bool = False

    def record(self, *, reads: bool = False) -> WorkspaceRecord:
        """Return the workspace that -w, $VFSD_WORKSPACE, the current directory or one of `paths` selects.

        A command that only reads also takes the only one running, and a line on standard error says which that is.
        """
        found = self.candidate(reads=reads)
        if self._is_only and not self._is_noted:
            self._is_noted = True
            place = output.show_path(found.mountpoint)
            output.note(f"using {found.name} ({place}), the only workspace running; -w NAME or -w PATH picks one")
        return found

    def candidate(self, *, reads: bool = True) -> WorkspaceRecord:
        """As `record`, but nothing is printed: `call` decides whether the command only reads."""
        # Here and below, start-up: `vfsd --help` needs neither msgspec nor a socket.
        from vfsd.client.arguments import running_workspace  # noqa: PLC0415

        if self._record is None or (self._is_only and not reads):
            on_only = self._take_only if reads else None
            self._record = running_workspace(self.workspace, paths=self.paths, on_only=on_only)
        return self._record

    def _take_only(self, _record: WorkspaceRecord) -> None:
        self._is_only = True

    def choose(self, argument: str | None) -> None:
        """Act on the workspace that the argument WORKSPACE names, if any.  UsageError if -w names another one."""
        if argument is not None and self.workspace not in {None, argument}:
            raise click.UsageError(f"-w names {self.workspace}, and the argument {argument}: give one of them")
        self.workspace = argument or self.workspace

    def chosen(self, argument: str | None, *, every: bool) -> list[WorkspaceRecord]:
        """Return the workspace that the argument WORKSPACE or an option selects; with `every` (--all), all of them."""
        from vfsd.machine.runtime import read_records  # noqa: PLC0415

        if every and (argument or self.workspace):
            raise click.UsageError("give --all or a workspace, not both")
        self.choose(argument)
        return read_records() if every else [self.record()]

    def act_on_each(
        self,
        records: Sequence[WorkspaceRecord],
        act: Callable[[WorkspaceRecord], T],
        say: Callable[[WorkspaceRecord, T], None],
        *,
        every: bool,
        done: str,
    ) -> None:
        """Call `act` with each workspace, and print the answers with `say`, or as the list `done` of one JSON document.

        With `every`, a workspace for which it fails is reported, and the command goes on and ends with status 1.
        """
        from msgspec import to_builtins  # noqa: PLC0415

        from vfsd.wire.messages import wire_path  # noqa: PLC0415

        entries: list[dict[str, Any]] = []
        failed: OSError | None = None
        for record in records:
            place = {"name": record.name, "mountpoint": wire_path(os.fsencode(record.mountpoint))}
            try:
                answer = act(record)
            except OSError as error:
                if not every:
                    raise
                failed = failed or error
                text = describe(error)
                output.report(text if text.startswith(f"{record.name} ") else f"{record.name}: {text}")
                entries.append({**place, "error": error_record(error)})
                continue
            entries.append({**place, **to_builtins(answer)})
            number = len([entry for entry in entries if "error" not in entry])
            self.done = output.counted(number, "workspace was", "workspaces were") + f" {done}"
            if not self.json:
                with self.writing():
                    say(record, answer)
        if self.json:
            with self.writing():
                output.print_json({done: entries, **({"error": error_record(failed)} if failed else {})})
        if failed:
            click.get_current_context().exit(1)

    @property
    def requests(self) -> Requests:
        """The requests for that workspace.  Their paths are relative to the current directory."""
        from vfsd.client.arguments import current_directory  # noqa: PLC0415
        from vfsd.client.requests import Requests  # noqa: PLC0415

        return Requests(self.candidate().mountpoint, current_directory())

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
        from vfsd.operations.catalogue import OPERATIONS  # noqa: PLC0415

        if self.signalled is not None and self.signalled.number is not None:
            # A command that makes several calls makes no further one after Ctrl-C.
            raise Interrupted(completed(self.signalled), self.signalled.number, errno.EINTR)
        record = record or self.record(reads=_only_reads(request))
        record.check_alive()
        begun, self.begun = self.begun, None
        operation = OPERATIONS[request.method]
        try:
            with (
                ControlClient(record.socket, timeout_s=operation.answered_within_s, begun=begun) as client,
                interruptible(client, operation) as self.signalled,
                output.progress(label) as on_progress,
            ):
                answer = client.call(
                    request.method, request.params, on_progress=on_progress, on_output=on_output or request.on_output
                )
        except TimeoutError:
            advice = f"`kill -USR1 {record.pid}` has it write to its log where it waits"
            what = f"the daemon of {record.name} (pid {record.pid}) is stopped or hangs: {advice}"
            raise TimeoutError(errno.ETIMEDOUT, what) from None
        except FileNotFoundError as error:
            # Start-up: an error has time.
            from vfsd.cli.common.values import with_similar_snapshots  # noqa: PLC0415
            from vfsd.operations.snapshots import FromOther  # noqa: PLC0415

            if isinstance(getattr(request.params, "source", None), FromOther):
                raise  # this daemon cannot list the snapshots of another workspace
            raise with_similar_snapshots(record, error) from None
        if not getattr(request.params, "dry_run", False) and getattr(answer, "applied", True):
            self.done = operation.done
        return answer

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """If the block cannot write to standard output, add to the error what the command has done nevertheless."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self.done:
                raise
            raise OSError(error.errno, f"{error.strerror}, but {self.done}") from error

    def emit(self, answer: Any, show: Callable[[Any], None]) -> None:
        """Print `answer` as one JSON document, or with `show`, for people."""
        with self.writing():
            if self.json:
                output.print_json(answer)
            else:
                show(answer)


def _only_reads(request: RemoteCall[Any]) -> bool:
    """Return whether the request changes nothing in the workspace."""
    from vfsd.operations.catalogue import OPERATIONS  # noqa: PLC0415 as above

    params = request.params
    if request.method == "policy":
        return not (params.protect or params.hide)
    return OPERATIONS[request.method].reads or getattr(params, "dry_run", False)


# -- signals during a call --------------------------------------------------------------------------
class Interrupted(KeyboardInterrupt):
    """A signal ended a call; `str()` is the outcome.  `errno` is ECANCELED if the call was stopped."""

    def __init__(self, message: str, number: int, errno: int) -> None:
        super().__init__(message)
        self.number = number
        self.errno = errno


@dataclass(slots=True)
class Signalled:
    """A running call, and the signal that arrived meanwhile."""

    operation: Operation
    number: int | None = None
    is_completed: bool = False
    is_slow: bool = False  # ANSWER_S have passed since the signal


def completed(signalled: Signalled) -> str:
    """Describe a call that was completed despite a signal."""
    return f"it was too late to stop: {signalled.operation.done}"


@contextmanager
def interruptible(client: ControlClient, operation: Operation) -> Iterator[Signalled]:
    """Handle signals as the module describes while the block calls `operation`.  Raises Interrupted.

    If the daemon does not answer the request to stop within some seconds, the command ends.
    """
    signalled = Signalled(operation)
    if threading.current_thread() is not threading.main_thread():
        yield signalled
        return
    is_stoppable = operation.stopped and not operation.runs_command
    with waking(client), _handling(client, signalled) if is_stoppable else nullcontext():
        try:
            yield signalled
            signalled.is_completed = signalled.number is not None
        except OSError as error:
            if signalled.number is None or error.errno != errno.ECANCELED:
                raise
            raise Interrupted(f"stopped: {operation.stopped}", signalled.number, errno.ECANCELED) from None


@contextmanager
def handlers(wanted: Mapping[signal.Signals, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    """Install signal handlers in the block.  Main thread.

    A signal that is ignored stays ignored: nohup(1) and shells, for background commands, ask for that.
    """
    before = {number: signal.getsignal(number) for number in wanted}
    try:
        for number, handle in wanted.items():
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def wakeup_socket() -> Iterator[socket.socket]:
    """Yield a socket from which the number of each signal can be read, as a byte.  Main thread."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(before)


@contextmanager
def raising() -> Iterator[None]:
    """Raise Interrupted if SIGTERM or SIGHUP arrives in the block, between two calls, as for Ctrl-C.  Main thread."""

    def handle(number: int, _frame: FrameType | None) -> None:
        raise Interrupted("interrupted", number, errno.EINTR)

    with handlers(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), handle)):
        yield


@contextmanager
def waking(client: ControlClient) -> Iterator[None]:
    """Have `client` stop waiting when a signal arrives, at whatever moment.  Main thread."""
    with wakeup_socket() as wakeup:
        client.wakeup = wakeup
        try:
            yield
        finally:
            client.wakeup = None


@contextmanager
def _handling(client: ControlClient, signalled: Signalled) -> Iterator[None]:
    operation = signalled.operation

    def handle(number: int, _frame: Any) -> None:
        if number == signal.SIGALRM:
            state = client.cancel_state
            if state is None or (state == "stopping" and signalled.is_slow):  # something hangs
                raise Interrupted(operation.left(state), signalled.number or signal.SIGINT, errno.EINTR)
            if state == "stopping":
                signalled.is_slow = True
                output.note(f"waiting for the daemon to stop {operation.noun}; press Ctrl-C again to leave at once")
                signal.setitimer(signal.ITIMER_REAL, _STOP_S)
            return
        first = signalled.number is None
        signalled.number = number
        if not first:
            raise Interrupted(operation.left(client.cancel_state), number, errno.EINTR)
        client.cancel()
        signal.setitimer(signal.ITIMER_REAL, ANSWER_S)

    def report(state: CancelState) -> None:
        if state == "finishing":
            begun = f"{operation.noun} has begun and will be completed"
            output.note(f"{begun}; press Ctrl-C again to let it complete in the background")

    client.on_cancel_state = report
    with handlers(dict.fromkeys((*STOPPING, signal.SIGALRM), handle)):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


# -- options --------------------------------------------------------------------------------------
def _complete_workspace(ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
    from vfsd.cli.common.values import complete_workspace  # noqa: PLC0415 start-up: only a shell's <Tab> needs it

    return complete_workspace(ctx, param, incomplete)


def shared_options() -> list[click.Option]:
    """Return -w and --json, which every group and command takes."""
    return [
        click.Option(
            ["-w", "--workspace"],
            metavar="NAME|PATH",
            help="The workspace: its name, or a path in it.",
            shell_complete=_complete_workspace,
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."),
    ]


def _take_shared_options(ctx: click.Context) -> App:
    app = ctx.ensure_object(App)
    app.workspace = ctx.params.pop("workspace", None) or app.workspace
    app.json = ctx.params.pop("as_json") or app.json
    return app


class _WithExamples(click.Command):
    """A command that takes -w and --json, and whose help ends with `examples`.

    If the command acts on no running workspace, its help leaves -w out.  Examples below an empty line are shown with
    all options only (EVERYTHING).
    """

    def __init__(self, *args: Any, examples: str = "", acts_on_workspace: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        selector, as_json = shared_options()
        selector.hidden = not acts_on_workspace
        self.params += [selector, as_json]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            first, _, others = self.examples.strip().partition("\n\n")
            with formatter.section("Examples"):
                for line in [*first.splitlines(), *(others.splitlines() if EVERYTHING in ctx.meta else ())]:
                    formatter.write(" " * formatter.current_indent + line.strip() + "\n")


class Command(_WithExamples):
    """The class of all commands.

    An empty string as an argument or as the value of an option is refused, except as a `--tag`.
    """

    def __init__(self, *args: Any, interrupted: str = "interrupted", **kwargs: Any) -> None:
        """`interrupted` is the message when Ctrl-C ends the command: it says what became of the work."""
        super().__init__(*args, **kwargs)
        self.interrupted = interrupted

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # the parser does not set it if an option lacks its value
            raise
        if not ctx.resilient_parsing:
            self._refuse_empty(ctx)
        return rest

    def _refuse_empty(self, ctx: click.Context) -> None:
        """Raise UsageError for an argument or option that is an empty string.

        An empty string is usually an unset shell variable, and its meaning would be dangerous: as a PATH the whole
        workspace, as a WORKSPACE the one that contains the current directory.
        """
        for param in self.params:
            value = ctx.params.get(param.name or "")
            empty = value == "" or (isinstance(value, tuple) and "" in value)
            if empty and param.name != "tag" and param.type is not click.UNPROCESSED:
                hint = param.get_error_hint(ctx).replace("'", "")
                raise click.UsageError(f"{hint} is an empty string", ctx)

    def invoke(self, ctx: click.Context) -> Any:
        app = _take_shared_options(ctx)
        app.interrupted = self.interrupted
        try:
            return super().invoke(ctx)
        finally:
            signalled = app.signalled
            if signalled is not None and signalled.is_completed and not isinstance(sys.exception(), Interrupted):
                # The call was completed despite the signal, and its answer has been printed.
                output.note(completed(signalled))
                ctx.exit(AFTER_SIGNAL + (signalled.number or 0))


# -- errors ---------------------------------------------------------------------------------------
def guarded(ctx: click.Context, run: Callable[[], T]) -> T:
    """Return the result of `run`.  A failure or wrong usage ends the process with one line and status 1 or 2.

    Any other exception is a bug, which `main` reports.
    """
    try:
        return run()
    except Interrupted as end:
        _report(ctx, OSError(end.errno, str(end)))
        ctx.exit(AFTER_SIGNAL + end.number)
    except KeyboardInterrupt:
        _report(ctx, OSError(errno.EINTR, ctx.ensure_object(App).interrupted))
        ctx.exit(INTERRUPTED)
    except BrokenPipeError:
        # Nothing reads the output any more: click ends the process quietly.  (The client raises other errors for its
        # socket.)
        raise
    except (OSError, NotImplementedError, UnicodeEncodeError) as error:
        _report(ctx, error)
        for note in getattr(error, "__notes__", ()):  # the end of the log, if a daemon failed to start unexpectedly
            output.note(note)
        ctx.exit(1)
    except click.ClickException as error:
        end_with_usage(error, as_json=ctx.ensure_object(App).json or asks_for_json(ctx.meta.get(WORDS, ())))


def end_with_usage(error: click.ClickException, *, as_json: bool) -> NoReturn:
    """End the process as click does, but with one line and, with --json, a document."""
    if isinstance(error, NO_ARGUMENTS):
        raise error  # `vfsd` alone, which prints the help
    message = printable(error.format_message().rstrip(".").replace("\n\t", " "))  # click lists choices in lines
    line = message
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "vfsd"
        line += f"{'' if message.endswith('?') else '.'} See `{path} --help`"
    report(line, {"message": message, "errno": None, "path": None}, as_json=as_json)
    raise click.exceptions.Exit(error.exit_code)


# Newer versions of click raise this; the oldest supported version prints the help and exits.
NO_ARGUMENTS: Final[tuple[type[Exception], ...]] = tuple(
    getattr(click.exceptions, name) for name in ("NoArgsIsHelpError",) if hasattr(click.exceptions, name)
)


def _report(ctx: click.Context, error: Exception) -> None:
    report(describe(error), error_record(error), as_json=ctx.ensure_object(App).json)


def report(line: str, record: dict[str, Any], *, as_json: bool) -> None:
    """Report an error: one line and, with `as_json`, a document with `record`."""
    output.report(line)
    if as_json:
        with contextlib.suppress(OSError):  # standard output may be the stream that failed; the line has been written
            output.print_json({"error": record})


def asks_for_json(words: Iterable[str]) -> bool:
    """Return whether the command line has --json, even if a wrong option before it prevented parsing."""
    return "--json" in itertools.takewhile(lambda word: word != "--", words)


def did_you_mean(word: str, possible: Iterable[str]) -> str:
    """Return a clause that names the entries of `possible` spelled like `word`, or an empty string."""
    import difflib  # noqa: PLC0415 start-up: an error has time

    close = difflib.get_close_matches(word, list(possible), n=3)
    return f"; did you mean {' or '.join(output.show_path(name) for name in close)}?" if close else ""


# Words that new users try as commands.
_ELSEWHERE: Final = {
    "undo": "vfsd restore --undo",
    "redo": "vfsd restore --redo",
    **{name: f"vfsd fs {name}" for name in ("read", "write", "edit", "glob", "grep", "stat")},
}


class SuggestingGroup(click.Group):
    """A group that suggests similar names for a command that does not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click suggests only commands that are imported already: none, because they are imported lazily.
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            if ctx.parent is None and name in _ELSEWHERE:
                raise click.UsageError(f"no such command: {name!r}; it is `{_ELSEWHERE[name]}`", ctx)
            raise click.UsageError(f"no such command: {name!r}{did_you_mean(name, self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)


class Group(_WithExamples, SuggestingGroup):
    """The class of groups of commands below `vfsd`."""

    def invoke(self, ctx: click.Context) -> Any:
        _take_shared_options(ctx)
        return super().invoke(ctx)


def error_record(error: Exception) -> dict[str, Any]:
    """Return the JSON form of an error: its message, the name of its errno, its path, and its `facts`."""
    name = errno.errorcode.get(getattr(error, "errno", None) or 0)
    facts = getattr(error, "facts", {})
    return {"message": describe(error), "errno": name, "path": _path(error), **facts}


def describe(error: Exception) -> str:
    """Describe an error in one printable line, without Python's "[Errno 2]"."""
    return printable(_description(error))


def _description(error: Exception) -> str:
    from vfsd.client.connection import ControlError  # noqa: PLC0415 start-up: an error has time

    if isinstance(error, UnicodeEncodeError):  # an argument other than a path, for the daemon
        return f"not UTF-8: {error.object!r}"
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_nowhere():
        return "the current directory was removed: change to another one, or give absolute paths"
    # The daemon's message is complete, and contains the path as a wire path.
    if isinstance(error, ControlError) or not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    from protocol.errors import shortened  # noqa: PLC0415 this module also reports that `protocol` is a foreign package

    path = _path(error)
    return f"{error.strerror}: {shortened(path)}" if path else error.strerror


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _path(error: Exception) -> str | None:
    """Return the path that an error is about, in a printable form."""
    name = getattr(error, "filename", None)
    if name is None:
        return None
    text = os.fsdecode(name) if isinstance(name, (bytes, os.PathLike)) else str(name)
    return printable(text)


def printable(text: str) -> str:
    """Replace bytes that are not UTF-8 by `\\xNN`, because JSON and many terminals cannot represent them."""
    return _SURROGATE.sub(lambda match: f"\\x{match[1] or f'{ord(match[0]) - 0xDC00:x}'}", text)


# PEP 383: os.fsdecode maps each byte that is not UTF-8 to one of these surrogates; repr() escapes them.
_SURROGATE: Final = re.compile(r"(?<!\\)\\udc([89a-f][0-9a-f])|[\udc80-\udcff]")
