"""`vfsd exec`: run a command in a workspace, with live output, input, a terminal, signals and its exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, describe, error_record, report
from vfsd.cli.common.values import SIZE, Seconds, environment, is_text
from vfsd.client.arguments import current_directory, wire_paths
from vfsd.client.executor import caller_environment
from vfsd.operations.exec import ExecEnded, ExecParams
from vfsd.wire.messages import wire_path

# The exit statuses of env(1), nohup(1) and timeout(1).
_TIMED_OUT: Final = 124
_FAILED: Final = 125
_NOT_EXECUTABLE: Final = 126
_NOT_FOUND: Final = 127
_COLLECTED_BYTES: Final = 256 * 1024  # of each stream, in a JSON document; the default of `vfsd fs exec`


@click.command(
    "exec",
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    examples="""
    vfsd exec -- make test                       # its output, its exit status
    vfsd exec -it -- bash                        # a shell
    vfsd exec -i -- python3 - < check.py         # -i: pass standard input on
    vfsd exec --cwd src --env CI=1 --timeout 600 -- npm test
    """,
)
@click.argument("argv", metavar="[--] COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input to the command.")
@click.option("-t", "--tty", is_flag=True, help="Provide a terminal, for shells, editors and progress bars.")
@click.option(
    "--cwd",
    metavar="PATH",
    default=".",
    help="Run it in this directory; by default the current one, if in the workspace.",
)
@click.option(
    "-e",
    "--env",
    "env",
    multiple=True,
    metavar="NAME[=VALUE]",
    callback=environment(inherit=True),
    help="Set a variable; without a value, pass yours.",
)
@click.option("-u", "--user", metavar="USER[:GROUP]", help="Run it as this user of the container.")
@click.option("--timeout", type=Seconds(min=0, min_open=True), metavar="SECONDS", help="Kill it after that time.")
@click.option("--output-limit", type=SIZE, metavar="SIZE", help="Discard the output of each stream beyond SIZE.")
@click.pass_obj
def exec_command(
    app: App,
    /,
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    cwd: str,
    env: dict[str, str],
    user: str | None,
    timeout: float | None,
    output_limit: int | None,
) -> None:
    """Run a command in the workspace.

    In a container workspace (container:NAME, image:REF) the command runs in that container; in a workspace mounted with
    --sandbox image:REF, in the sandbox; in one mounted with --on-host, on this host, with the rights of the user who
    mounted it.  In all of them it sees the workspace's live files.

    The command does not run in a shell unless you name one: vfsd exec -- sh -c 'make && ./run'.

    Ctrl-C, SIGTERM and similar signals go to the command.  When it ends, or `vfsd exec` is killed, all processes that
    it started are killed.

    The exit status is the command's own, 128 + N if signal N killed it, 124 if it timed out, 125 if vfsd failed, 126 if
    the command cannot be executed, and 127 if it was not found.

    With --json the document contains the first 256 KiB, or --output-limit, of each stream.
    """
    if app.json and tty:
        raise click.UsageError("--json prints the output when the command has ended: it excludes -t")
    # Start-up: `vfsd exec --help` needs no terminal.
    from vfsd.cli.common.attached import run_attached, run_collected  # noqa: PLC0415

    try:
        record = app.record()
        record.check_alive()
        params = ExecParams(
            argv=[wire_path(os.fsencode(word)) for word in argv],
            cwd="".join(wire_paths([cwd], record.mountpoint, current_directory())),
            env=({"TERM": term} if tty and (term := os.environ.get("TERM")) and is_text(term) else {}) | env,
            environment=caller_environment(),
            user=user,
            input=interactive,
            timeout_s=timeout,
            output_limit_bytes=_COLLECTED_BYTES if app.json and output_limit is None else output_limit,
        )
        if app.json:
            ended, collected = run_collected(record.socket, params)
            app.done = "the command has run"
            with app.writing():
                output.print_json(_document(ended, collected))
            raise SystemExit(_status(ended))
        ended = run_attached(record.socket, params, terminal=tty)
    except BrokenPipeError:
        # Nothing reads the output any more, and the command was killed: the status that a shell reports for SIGPIPE.
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        report(describe(error), error_record(error), as_json=app.json)
        raise SystemExit(_status_of_failure(error, argv[0])) from None
    _say(ended, timeout)
    raise SystemExit(_status(ended))


def _status_of_failure(error: OSError, program: str) -> int:
    if error.filename == program and isinstance(error, FileNotFoundError):
        return _NOT_FOUND
    if error.filename == program and isinstance(error, PermissionError):
        return _NOT_EXECUTABLE
    return _FAILED


def _status(ended: ExecEnded) -> int:
    if ended.timed_out:
        return _TIMED_OUT
    return ended.exit_status if ended.exit_status >= 0 else 128 - ended.exit_status


def _document(ended: ExecEnded, collected: Mapping[str, bytes]) -> dict[str, Any]:
    streams = {name: output.text_or_base64(data, truncated=ended.truncated) for name, data in collected.items()}
    return {
        "exit_status": ended.exit_status,
        **streams,
        "timed_out": ended.timed_out,
        "truncated": ended.truncated,
        "snapshot": ended.snapshot,
        "snapshot_error": ended.snapshot_error,
    }


def _say(ended: ExecEnded, timeout_s: Any) -> None:
    if ended.timed_out:
        output.note(f"the command was killed after {timeout_s:g} s (--timeout)")
    if ended.truncated:
        output.note("the output exceeded --output-limit; the rest was discarded")
    if ended.snapshot_error is not None:
        output.note(f"the command ran, but the snapshot after it failed: {ended.snapshot_error}")
    # Only on a terminal: a program that reads standard error expects only the command's output.
    if ended.snapshot is not None and sys.stderr.isatty():
        output.note(f"snapshot {ended.snapshot}")
