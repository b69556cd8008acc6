"""What every command shares: -w and --json, how its errors end, and its way to a workspace's daemon."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from vfsd.cli import output

if TYPE_CHECKING:
    import msgspec

    from vfsd.runtime import WorkspaceRecord

__all__ = [
    "INTERRUPTED",
    "App",
    "Command",
    "check_alive",
    "describe",
    "error_record",
    "guarded",
    "json_option",
    "workspace_option",
]

T = TypeVar("T")
INTERRUPTED: Final = 130  # what a shell says of a command that SIGINT ended: 128 + 2


@dataclass(slots=True)
class App:
    """One run of the command line: which workspace, and whether the answer is JSON."""

    workspace: str | None = None
    json: bool = False

    def record(self) -> WorkspaceRecord:
        """The workspace that -w, $VFSD_WORKSPACE or the current directory picks, or the only one."""
        # Here and below: start-up; `vfsd --help` needs neither msgspec nor a socket.
        from vfsd.mounting import running_workspace  # noqa: PLC0415

        return running_workspace(self.workspace)

    def call(
        self,
        record: WorkspaceRecord,
        method: str,
        params: msgspec.Struct | None = None,
        *,
        label: str | None = None,
        on_output: Callable[[bytes], object] | None = None,
    ) -> Any:
        """The daemon's answer; with `label`, a progress bar while it works."""
        from vfsd.control.client import ControlClient  # noqa: PLC0415

        check_alive(record)
        with ControlClient(record.socket) as client:
            if label is None:
                return client.call(method, params, on_output=on_output)
            with output.progress(label) as on_progress:
                return client.call(method, params, on_progress=on_progress, on_output=on_output)

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
    from vfsd.cli.names import complete_workspace  # noqa: PLC0415 start-up: only a shell's <Tab> needs it

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
    """A command that takes -w and --json, and whose `examples` end its help."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.params += [workspace_option(), json_option()]

    def invoke(self, ctx: click.Context) -> Any:
        app = ctx.ensure_object(App)
        app.workspace = ctx.params.pop("workspace") or app.workspace
        app.json = ctx.params.pop("as_json") or app.json
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.strip().splitlines():
                    formatter.write(" " * formatter.current_indent + line.strip() + "\n")


# -- errors ---------------------------------------------------------------------------------------
def guarded(ctx: click.Context, run: Callable[[], T]) -> T:
    """What `run` returns.  An error that is the user's to know ends the run: one line, status 1, no traceback."""
    try:
        return run()
    except KeyboardInterrupt:
        ctx.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output is gone: click leaves quietly.  (The client makes other errors of its socket's.)
        raise
    except (OSError, NotImplementedError) as error:
        _fail(ctx, error)


def _fail(ctx: click.Context, error: Exception) -> NoReturn:
    if ctx.ensure_object(App).json:
        output.print_json({"error": error_record(error)})
    output.report(describe(error))
    for note in getattr(error, "__notes__", ()):  # of a start that failed unexpectedly: the end of its log
        output.note(note)
    ctx.exit(1)


def error_record(error: Exception) -> dict[str, str | None]:
    """An error as --json has it; `errno` is the errno's name."""
    name = errno.errorcode.get(getattr(error, "errno", None) or 0)
    return {"message": describe(error), "errno": name, "path": _path(error)}


def describe(error: Exception) -> str:
    """An error in one line, without Python's "[Errno 2]"."""
    from vfsd.control.client import ControlError  # noqa: PLC0415 start-up: an error has time

    # The daemon's text is whole, with the path as it stands on the wire.
    if isinstance(error, ControlError) or not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    path = _path(error)
    return f"{error.strerror}: {path}" if path else error.strerror


def _path(error: Exception) -> str | None:
    """The path an error is about, printable."""
    name = getattr(error, "filename", None)
    if name is None:
        return None
    text = os.fsdecode(name) if isinstance(name, (bytes, os.PathLike)) else str(name)
    return _SURROGATE.sub(lambda match: f"\\x{ord(match[0]) - 0xDC00:02x}", text)


# PEP 383: a byte that is no UTF-8, as os.fsdecode smuggles it into a str.
_SURROGATE: Final = re.compile("[\udc80-\udcff]")
