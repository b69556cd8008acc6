"""The tools that run commands, if the backend can: shell and python."""

from __future__ import annotations

import errno
from typing import Annotated, Final

from msgspec import Meta

from protocol.errors import os_error
from protocol.execution.executor import DEFAULT_OUTPUT_BYTES, DEFAULT_TIMEOUT_S, ExecResult
from protocol.paths import normalise
from protocol.tool_messages import Params, Result
from protocol.tools.base import Tool, ToolContext

__all__ = ["PYTHON", "SHELL", "CommandResult", "PythonParams", "ShellParams", "command_of", "command_result"]

# bash where available, because models write bash
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
