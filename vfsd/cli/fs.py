"""`vfsd fs`: the agent's tools on a workspace, for programs that call them; every answer is one JSON envelope.

`{"ok": true, "data": ...}` on standard output and exit status 0; `{"ok": false, "error": "..."}` and 1, or 2 for
a usage error.  Nothing else is printed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

import click
import msgspec

from protocol.tool_messages import Edit
from vfsd.cli.common import output
from vfsd.cli.common.app import INTERRUPTED, NO_ARGUMENTS, App, Command, Group, describe
from vfsd.cli.common.output import base64_text, text_or_base64
from vfsd.cli.common.values import SIZE, Seconds, environment
from vfsd.client.paths import current_directory, workspace_path
from vfsd.client.requests import RemoteCall
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.wire import fs_messages as fs
from vfsd.wire.messages import from_wire_path, wire_path

__all__ = ["fs_command"]

# What a request can carry (1 MiB) as base64, with room for the path; more goes by a file.
_INLINE_BYTES: Final = 512 * 1024
# One byte over what a write may have (protocol.paths.CallLimits): enough for the daemon to refuse it.
_INPUT_BYTES: Final = (32 << 20) + 1
_CHUNK_BYTES: Final = 64 * 1024

T = TypeVar("T")


# -- the envelope -----------------------------------------------------------------------------------
class _EnvelopeGroup(Group):
    """A group whose answers, errors and usage errors are printed as envelopes."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            _refuse_usage(error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            output.print_json({"ok": True, "data": super().invoke(ctx)})
        except click.UsageError as error:
            _refuse_usage(error)
        except KeyboardInterrupt:
            _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            raise  # whoever read our output is gone
        except (OSError, ValueError, NotImplementedError) as error:
            _fail(describe(error), 1)


def _refuse_usage(error: click.UsageError) -> NoReturn:
    if isinstance(error, NO_ARGUMENTS):  # `vfsd fs` alone
        raise error
    _fail(error.format_message(), 2)


def _fail(message: str, status: int) -> NoReturn:
    # An argument that is no UTF-8 holds surrogates, which JSON cannot.
    readable = message.encode("utf-8", "backslashreplace").decode()
    output.print_json({"ok": False, "error": readable})
    raise click.exceptions.Exit(status)


# -- the workspace ----------------------------------------------------------------------------------
class _Workspace:
    """The workspace that is meant, and how paths are written for it.

    What is printed can be given back: relative to the current directory where that is in the mount, else to
    the root.
    """

    def __init__(self, app: App, *, escaped: bool = False) -> None:
        self._app = app
        self._escaped = escaped
        self._record: WorkspaceRecord = app.record()
        self._cwd = current_directory()
        self._base = b"/" + workspace_path(b".", self._record.mountpoint, self._cwd)

    def wire(self, path: str) -> str:
        """A path that was typed, for the daemon."""
        raw = from_wire_path(path) if self._escaped else os.fsencode(path)
        return wire_path(workspace_path(raw, self._record.mountpoint, self._cwd))

    def shown(self, wire: str) -> dict[str, Any]:
        """A path from the daemon; `escaped` where it is no UTF-8, and so written as on the wire."""
        path = os.path.relpath(b"/" + from_wire_path(wire), self._base)
        try:
            return {"path": path.decode()}
        except UnicodeDecodeError:
            return {"path": wire_path(path), "escaped": True}

    def with_path(self, answer: Any) -> dict[str, Any]:
        """An answer about one path."""
        values = msgspec.to_builtins(answer)
        return {**self.shown(values.pop("path")), **values}

    def call(self, method: str, params: msgspec.Struct, on_output: Callable[[bytes], object] | None = None) -> Any:
        return self._app.call(RemoteCall(method, params, on_output=on_output))

    @contextmanager
    def readable_by_daemon(self) -> Iterator[Any]:
        """An empty file of the host that the daemon's user can read too, gone at the end."""
        with tempfile.NamedTemporaryFile(prefix="vfsd-fs-") as file:
            owner = os.stat(self._record.socket).st_uid
            if os.geteuid() == 0 and owner:
                os.fchown(file.fileno(), owner, -1)
            yield file


def _path_options(function: Callable[..., Any]) -> Callable[..., Any]:
    option = click.option(
        "--escaped",
        is_flag=True,
        help="Paths are given as the ones marked `escaped` are printed: \\xNN for a byte, \\\\ for a backslash.",
    )
    return option(function)


_EXAMPLES: Final = """
vfsd fs ls src
vfsd fs read src/main.py --offset 100 --limit 50
printf 'hello\\n' | vfsd fs write notes/hello.txt --mode create
echo '{"old_text": "hello", "new_text": "bye"}' | vfsd fs edit notes/hello.txt
vfsd fs grep 'def \\w+' src --glob '*.py'
vfsd fs glob 'src/**/*.py'
vfsd fs rm -r notes
vfsd fs exec -- make test              # where commands can run: `vfsd exec --help`
"""


@click.group("fs", cls=_EnvelopeGroup, examples=_EXAMPLES)
def fs_command() -> None:
    """Read, write, search and run, as an agent does; answers are JSON.

    Each prints {"ok": true, "data": ...} and exits 0, or {"ok": false, "error": "..."} and exits 1 (2 when it was
    used wrongly).  What is written here is seen through the mount when the command returns, and the other way
    round.

    PATHs are relative to the current directory when that is in the workspace, else to the workspace's root; or
    absolute.  Those that are printed are written the same way; one that is no UTF-8 is printed with
    \\xNN for each such byte and marked "escaped": true.
    """


# -- reading ----------------------------------------------------------------------------------------
@fs_command.command("ls", cls=Command)
@click.argument("path", default=".")
@click.option("--limit", type=click.IntRange(min=1), default=fs.DEFAULT_ENTRIES, show_default=True, metavar="N")
@_path_options
@click.pass_obj
def ls_command(app: App, path: str, limit: int, escaped: bool) -> dict[str, Any]:
    """List a directory: paths, types, sizes, modes and times."""
    workspace = _Workspace(app, escaped=escaped)
    answer = workspace.call("fs.ls", fs.FsLsParams(path=workspace.wire(path), limit=limit))
    entries = [workspace.with_path(entry) for entry in answer.entries]
    return {**workspace.shown(answer.path), "entries": entries, "truncated": answer.truncated}


@fs_command.command("stat", cls=Command)
@click.argument("path")
@_path_options
@click.pass_obj
def stat_command(app: App, path: str, escaped: bool) -> dict[str, Any]:
    """Show what there is at a path."""
    workspace = _Workspace(app, escaped=escaped)
    return workspace.with_path(workspace.call("fs.stat", fs.FsStatParams(path=workspace.wire(path))))


@fs_command.command("read", cls=Command)
@click.argument("path")
@click.option("--offset", type=click.IntRange(min=0), default=0, metavar="N", help="Lines (or bytes) to skip.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Lines (or bytes) at most; 2,000 lines.")
@click.option("--bytes", "as_bytes", is_flag=True, help="Count bytes, and give them as base64.")
@_path_options
@click.pass_obj
def read_command(app: App, path: str, offset: int, limit: int | None, as_bytes: bool, escaped: bool) -> dict[str, Any]:
    """Read a file.

    The content of a text file is given as it is.  That of any other is "base64:..." and all of it; with --bytes
    a part.  `truncated` says that there is more after it.
    """
    workspace = _Workspace(app, escaped=escaped)
    pieces: list[bytes] = []
    params = fs.FsReadParams(path=workspace.wire(path), offset=offset, limit=limit, as_bytes=as_bytes)
    page = workspace.call("fs.read", params, pieces.append)
    content = b"".join(pieces)
    is_text = page.unit == "lines"
    return {
        **workspace.shown(page.path),
        "content": content.decode() if is_text else base64_text(content),
        "encoding": "utf-8" if is_text else "base64",
        "offset": page.offset,
        "limit": page.limit,
        "total_lines" if is_text else "size_bytes": page.total,
        "truncated": page.truncated,
    }


# -- searching --------------------------------------------------------------------------------------
_all_option = click.option(
    "--all", "everything", is_flag=True, help="Hidden directories, node_modules, __pycache__, vendor, binary files too."
)


@fs_command.command("glob", cls=Command)
@click.argument("pattern")
@click.argument("path", default=".")
@click.option("--limit", type=click.IntRange(min=1), default=fs.DEFAULT_PATHS, show_default=True, metavar="N")
@_all_option
@_path_options
@click.pass_obj
def glob_command(app: App, pattern: str, path: str, limit: int, everything: bool, escaped: bool) -> dict[str, Any]:
    """Find files by name.

    *.py matches names at any depth below PATH, src/*.py in src only, src/**/*.py below it, {a,b} either.
    """
    workspace = _Workspace(app, escaped=escaped)
    params = fs.FsGlobParams(pattern=pattern, path=workspace.wire(path), limit=limit, everything=everything)
    answer = workspace.call("fs.glob", params)
    return {"files": [workspace.shown(found) for found in answer.paths], "truncated": answer.truncated}


@fs_command.command("grep", cls=Command)
@click.argument("pattern")
@click.argument("path", default=".")
@click.option("--glob", metavar="PATTERN", help="Only files whose path matches, as in `vfsd fs glob`.")
@click.option("-i", "--ignore-case", is_flag=True)
@click.option("--limit", type=click.IntRange(min=1), default=fs.DEFAULT_MATCHES, show_default=True, metavar="N")
@_all_option
@_path_options
@click.pass_obj
def grep_command(
    app: App,
    pattern: str,
    path: str,
    glob: str | None,
    ignore_case: bool,
    limit: int,
    everything: bool,
    escaped: bool,
) -> dict[str, Any]:
    """Find lines by a regular expression, in the files below PATH or in that file.

    Gives the first match of each line.  Look-around and back-references are not supported, so that no expression
    takes long.  "unreadable" names files and directories that could not be read, and so may hold more.
    """
    workspace = _Workspace(app, escaped=escaped)
    params = fs.FsGrepParams(
        pattern=pattern,
        path=workspace.wire(path),
        glob=glob,
        limit=limit,
        ignore_case=ignore_case,
        everything=everything,
    )
    answer = workspace.call("fs.grep", params)
    return {
        "matches": [workspace.with_path(match) for match in answer.matches],
        "truncated": answer.truncated,
        "unreadable": [workspace.with_path(each) for each in answer.unreadable],
        "unreadable_count": answer.unreadable_count,
    }


# -- changing ---------------------------------------------------------------------------------------
@fs_command.command("write", cls=Command)
@click.argument("path")
@click.option(
    "--mode",
    type=click.Choice(["create", "overwrite", "append"]),
    default="overwrite",
    show_default=True,
    help="create refuses a file that is there.",
)
@click.option("--no-parents", is_flag=True, help="Do not make directories that are missing.")
@_path_options
@click.pass_obj
def write_command(app: App, path: str, mode: Any, no_parents: bool, escaped: bool) -> dict[str, Any]:
    """Write standard input to a file.

    Overwriting is atomic, and keeps the file's permissions.
    """
    workspace = _Workspace(app, escaped=escaped)
    params = fs.FsWriteParams(path=workspace.wire(path), mode=mode, create_parents=not no_parents)
    content = sys.stdin.buffer.read(_INLINE_BYTES + 1)
    if len(content) <= _INLINE_BYTES:
        params.content = content
        return workspace.with_path(workspace.call("fs.write", params))
    with workspace.readable_by_daemon() as file:
        file.write(content)
        while file.tell() < _INPUT_BYTES and (piece := sys.stdin.buffer.read(_CHUNK_BYTES)):
            file.write(piece)
        file.flush()
        params.source = wire_path(os.fsencode(os.path.abspath(file.name)))
        return workspace.with_path(workspace.call("fs.write", params))


@fs_command.command("edit", cls=Command)
@click.argument("path")
@_path_options
@click.pass_obj
def edit_command(app: App, path: str, escaped: bool) -> dict[str, Any]:
    """Replace text in a file.

    Standard input is {"old_text": "...", "new_text": "..."}, and "replace_all": true to replace every occurrence;
    without it old_text must be found exactly once.
    """
    workspace = _Workspace(app, escaped=escaped)
    try:
        edit = msgspec.json.decode(sys.stdin.buffer.read(), type=Edit)
    except msgspec.DecodeError as error:
        raise ValueError(f"standard input is not an edit: {error}") from None
    params = fs.EditFileParams(path=workspace.wire(path), **msgspec.structs.asdict(edit))
    return workspace.with_path(workspace.call("fs.edit", params))


@fs_command.command("rm", cls=Command)
@click.argument("path")
@click.option("-r", "--recursive", is_flag=True, help="A directory with all that is in it.")
@_path_options
@click.pass_obj
def rm_command(app: App, path: str, recursive: bool, escaped: bool) -> dict[str, Any]:
    """Delete a file, a symlink or a directory; gives the count of entries deleted."""
    workspace = _Workspace(app, escaped=escaped)
    params = fs.RmParams(path=workspace.wire(path), recursive=recursive)
    return workspace.with_path(workspace.call("fs.rm", params))


# -- commands ---------------------------------------------------------------------------------------
@fs_command.command(
    "exec", cls=Command, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False}
)
@click.argument("argv", metavar="COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--cwd", default=".", metavar="PATH", help="Where to run it.")
@click.option(
    "--env", "env", multiple=True, metavar="NAME=VALUE", callback=environment(inherit=False), help="Set a variable."
)
@click.option("--timeout", type=Seconds(min=0, min_open=True), default=120.0, show_default=True, metavar="SECONDS")
@click.option("--output-limit", type=SIZE, default="256KiB", show_default=True, metavar="SIZE", help="Of each stream.")
@click.option("--stdin", "with_stdin", is_flag=True, help="Give it standard input, up to 512 KiB; else it has none.")
@_path_options
@click.pass_obj
def exec_command(
    app: App,
    argv: tuple[str, ...],
    cwd: str,
    env: dict[str, str],
    timeout: float,
    output_limit: int,
    with_stdin: bool,
    escaped: bool,
) -> dict[str, Any]:
    """Run a command in the workspace, without a shell.

    Gives its exit status (negative for what a signal killed), standard output and standard error.  A command that
    fails is not an error of `vfsd fs exec`.  It is killed when its time is over or when this command ends, with
    all that it started.

    It runs where `vfsd exec` runs commands: in the container of a container workspace, in the sandbox of one
    mounted with --sandbox, on this host for one mounted with --on-host.
    """
    workspace = _Workspace(app, escaped=escaped)
    stdin = sys.stdin.buffer.read(_INLINE_BYTES + 1) if with_stdin else b""
    if len(stdin) > _INLINE_BYTES:
        raise ValueError(f"standard input is longer than {_INLINE_BYTES} bytes")
    done = workspace.call(
        "fs.exec",
        fs.FsExecParams(
            argv=[wire_path(os.fsencode(word)) for word in argv],
            cwd=workspace.wire(cwd),
            env=env,
            timeout_s=timeout,
            output_limit_bytes=output_limit,
            stdin=stdin,
        ),
    )
    return {
        "exit_status": done.exit_status,
        "stdout": text_or_base64(done.stdout, truncated=done.truncated),
        "stderr": text_or_base64(done.stderr, truncated=done.truncated),
        "timed_out": done.timed_out,
        "truncated": done.truncated,
        "snapshot": done.snapshot,
    }
