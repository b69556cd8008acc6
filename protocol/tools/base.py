"""Tool: a function for a model, with a name, a description, and typed parameters and results; and its context.

`SHELL` and `PYTHON` are the tools that run commands.

Events are the changes that tools make, passed to subscribers.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from protocol.errors import os_error
from protocol.execution.executor import DEFAULT_OUTPUT_BYTES, DEFAULT_TIMEOUT_S, ExecResult, Executor
from protocol.filesystem import Filesystem
from protocol.paths import normalise
from protocol.search.walk import CancelCheck, never_cancelled
from protocol.tool_messages import Params, Result
from protocol.tree import Tree

P = TypeVar("P", bound=Params)
R = TypeVar("R")  # a `Result`, or a dataclass of `protocol.types`


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The files and services that tools work on.

    `publish` is called with each change that was made.  `executor` runs commands, if the backend can.  `tree` opens the
    present state as an immutable tree, which is faster to search; without it the filesystem is walked.  `keep_going` is
    called often during a search; an exception from it ends the search.
    """

    filesystem: Filesystem
    publish: Subscriber = lambda _event: None
    executor: Executor | None = None
    tree: Callable[[], AbstractContextManager[Tree]] | None = None
    keep_going: CancelCheck = never_cancelled

    def published(self, event: FileEvent) -> None:
        """Publish `event`."""
        deliver(event, self.publish)


@dataclass(frozen=True, slots=True)
class Tool(Generic[P, R]):
    """One tool; `tools.TOOLS` has all of them.

    A call that fails raises OSError (the subclass for its errno) or ValueError, with a message that a model can act on.
    """

    name: str
    description: str
    params: type[P]
    result: type[R]
    run: Callable[[P, ToolContext], R]
    rendering: Callable[[R], str]
    executes: bool = False  # needs an executor

    def json_schema(self) -> dict[str, Any]:
        """The JSON schema of the parameters (an object), as model APIs take it."""
        return json_schema(self.params)

    def parse(self, arguments: Mapping[str, Any] | str | bytes) -> P:
        """Parse a model's arguments: a mapping, or JSON text.  ValueError says what is wrong."""
        return parsed(msgspec.json.decode(arguments) if isinstance(arguments, str | bytes) else arguments, self.params)

    def call(self, arguments: Mapping[str, Any] | str | bytes, context: ToolContext) -> R:
        """Parse `arguments` and run the tool."""
        return self.run(self.parse(arguments), context)

    def render(self, result: R) -> str:
        """Render the result as text for a model."""
        return printable(self.rendering(result))


def parsed(arguments: object, params: type[P]) -> P:
    """Return a model's arguments as an object of the class `params`.  ValueError says what is wrong."""
    if isinstance(arguments, Mapping):
        known = [field.encode_name for field in msgspec.structs.fields(params)]
        unknown = [name for name in arguments if name not in known]
        if unknown:
            names = ", ".join(known) or "none"
            raise msgspec.ValidationError(f"unknown argument {unknown[0]!r}: the arguments are {names}")
    return msgspec.convert(arguments, type=params)


def json_schema(params: type[Params]) -> dict[str, Any]:
    """Return the JSON schema of a class of parameters (an object), as model APIs take it."""
    _, components = msgspec.json.schema_components([params], ref_template="#/$defs/{name}")
    schema: dict[str, Any] = components.pop(params.__name__)
    schema.pop("description", None)  # the class's docstring, which repeats the tool's description
    return {**schema, "$defs": components} if components else schema


def printable(text: str) -> str:
    """Replace each byte of a name that is not UTF-8 by \\xNN, so that the text can be encoded."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# bash where available, because models write bash
# -- commands --------------------------------------------------------------------------------------
_SHELL: Final = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; fi; exec sh -c "$1"'


class _RunParams(Params, frozen=True):
    cwd: Annotated[str, Meta(description="Where to run it, relative to the root of the workspace.")] = "."
    timeout_s: Annotated[float, Meta(gt=0, le=3_600, description="Seconds after which it is killed.")] = (
        DEFAULT_TIMEOUT_S
    )


class ShellParams(_RunParams, frozen=True, kw_only=True):
    command: Annotated[str, Meta(min_length=1, description="A command line for bash, or sh where there is no bash.")]


class PythonParams(_RunParams, frozen=True, kw_only=True):
    code: Annotated[str, Meta(min_length=1, description="A Python program; what it prints is the answer.")]


class CommandResult(Result, frozen=True):
    """Bytes that are not UTF-8 are replaced.  `exit_status` is negative for a command killed by a signal."""

    exit_status: int
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False


def command_of(params: ShellParams | PythonParams) -> tuple[list[str], bytes]:
    """Return the command that a tool runs, and its standard input."""
    if isinstance(params, ShellParams):
        return ["sh", "-c", _SHELL, "sh", params.command], b""
    # on standard input, because an argument has at most 128 KiB (MAX_ARG_STRLEN, linux/binfmts.h)
    return ["python3", "-"], params.code.encode()


def command_result(done: ExecResult) -> CommandResult:
    """Return a tool's result for a command that has ended."""
    return CommandResult(
        exit_status=done.exit_status,
        stdout=done.stdout.decode("utf-8", "replace"),
        stderr=done.stderr.decode("utf-8", "replace"),
        timed_out=done.timed_out,
        truncated=done.truncated,
    )


def _run(params: ShellParams | PythonParams, context: ToolContext) -> CommandResult:
    if context.executor is None:
        raise os_error(errno.EOPNOTSUPP, "this workspace cannot run commands")
    argv, stdin = command_of(params)
    done = context.executor.run(
        argv,
        cwd=normalise(params.cwd),
        timeout_s=params.timeout_s,
        output_limit_bytes=DEFAULT_OUTPUT_BYTES,
        stdin=stdin,
    )
    return command_result(done)


def _render(result: CommandResult) -> str:
    parts = [result.stdout.rstrip("\n")] if result.stdout else []
    if result.stderr:
        parts.append("standard error:\n" + result.stderr.rstrip("\n"))
    if result.truncated:
        parts.append("(there was more output; it was cut off)")
    if result.timed_out:
        parts.append("(it timed out and was killed)")
    elif result.exit_status:
        parts.append(f"(exit status {result.exit_status})")
    return "\n".join(parts) or "(no output)"


SHELL: Final = Tool(
    name="shell",
    description=(
        "Run a shell command in the workspace and give its output and exit status. What it leaves running in the "
        "background is killed when it ends."
    ),
    params=ShellParams,
    result=CommandResult,
    run=_run,
    rendering=_render,
    executes=True,
)

PYTHON: Final = Tool(
    name="python",
    description="Run a Python program in the workspace and give its output and exit status.",
    params=PythonParams,
    result=CommandResult,
    run=_run,
    rendering=_render,
    executes=True,
)


_logger = logging.getLogger(__name__)


# -- events ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FileWritten:
    """A file was created, overwritten or appended to."""

    path: str
    bytes_written: int


@dataclass(frozen=True, slots=True)
class FileEdited:
    """Text in a file was replaced in `replacements` places; the file now has `bytes_written` bytes."""

    path: str
    replacements: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class FileDeleted:
    """A file or directory was deleted with everything below it: `entries` in total."""

    path: str
    entries: int


@dataclass(frozen=True, slots=True)
class DirectoryCreated:
    """A directory was created for a file that was written in it."""

    path: str


FileEvent: TypeAlias = FileWritten | FileEdited | FileDeleted | DirectoryCreated
Subscriber: TypeAlias = Callable[[FileEvent], object]


def deliver(event: FileEvent, subscriber: Subscriber) -> None:
    """Call `subscriber`.  Its error is only logged, because the change is already made."""
    try:
        subscriber(event)
    except Exception:
        _logger.exception("a subscriber failed on %s", event)


class EventHook:
    """Calls its subscribers with each event, in order.

    Hooks can be chained, because a hook is itself a subscriber.  An exception of a subscriber is logged and affects
    neither the other subscribers nor the tool.
    """

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Add `subscriber`; calling the returned function removes it."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def __call__(self, event: FileEvent) -> None:
        for subscriber in tuple(self._subscribers):
            deliver(event, subscriber)
