"""`vfsd fs`: an agent's file tools, for programs.  Every answer is one JSON envelope.

Success prints `{"ok": true, "data": ...}` with exit status 0; failure prints `{"ok": false, "error": "..."}` with 1, or
2 for a usage error.  Nothing else is printed, unless standard output cannot be written: then standard error has the
error.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

import click
import msgspec

from protocol.tool_messages import DEFAULT_MATCHES, DEFAULT_PATHS
from vfsd.cli.common import output
from vfsd.cli.common.app import INTERRUPTED, NO_ARGUMENTS, App, Command, Group, describe, printable
from vfsd.cli.common.output import base64_text, text_or_base64
from vfsd.cli.common.values import SIZE, Seconds, complete_path, complete_snapshot, environment
from vfsd.client.arguments import current_directory, workspace_path
from vfsd.client.executor import INLINE_BYTES, caller_environment, current_umask, readable_by_daemon
from vfsd.client.requests import RemoteCall
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.operations.catalogue import OPERATIONS
from vfsd.operations.fs import DEFAULT_ENTRIES
from vfsd.wire.messages import from_wire_path, wire_path

# One byte more than a write may have (protocol.paths.CallLimits), so that the daemon refuses it.
_INPUT_BYTES: Final = (32 << 20) + 1
_CHUNK_BYTES: Final = 64 * 1024


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
            data = super().invoke(ctx)
            with ctx.ensure_object(App).writing():
                output.print_json({"ok": True, "data": data})
        except click.UsageError as error:
            _refuse_usage(error)
        except KeyboardInterrupt:
            _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            raise  # nothing reads the output any more
        except (OSError, ValueError, NotImplementedError) as error:
            _fail(describe(error), 1)


def _refuse_usage(error: click.UsageError) -> NoReturn:
    if isinstance(error, NO_ARGUMENTS):  # `vfsd fs` alone
        raise error
    _fail(error.format_message(), 2)


def _fail(message: str, status: int) -> NoReturn:
    readable = printable(message)
    try:
        output.print_json({"ok": False, "error": readable})
    except BrokenPipeError:
        raise
    except OSError:  # standard output may be the stream that failed
        output.report(readable)
    raise click.exceptions.Exit(status)


# -- the workspace ----------------------------------------------------------------------------------
class _Workspace:
    """The selected workspace, and the conversion of its paths.

    Printed paths can be given back: they are relative to the current directory if that is inside, else to the root.
    """

    def __init__(self, app: App, *, escaped: bool) -> None:
        self._app = app
        self._escaped = escaped
        self._record: WorkspaceRecord = app.candidate()
        self._mountpoint = self._record.mountpoint
        self._cwd = current_directory()
        self._base = b"/" + workspace_path(b".", self._mountpoint, self._cwd)

    def wire(self, path: str) -> str:
        """Convert a path argument to a wire path."""
        raw = from_wire_path(path) if self._escaped else os.fsencode(path)
        return wire_path(workspace_path(raw, self._mountpoint, self._cwd))

    def shown(self, wire: str) -> dict[str, Any]:
        """Convert a wire path for printing.  A path that is not UTF-8 stays a wire path, marked `escaped`."""
        path = os.path.relpath(b"/" + from_wire_path(wire), self._base)
        try:
            return {"path": path.decode()}
        except UnicodeDecodeError:
            return {"path": wire_path(path), "escaped": True}

    def with_path(self, answer: Any) -> dict[str, Any]:
        """Convert an answer about one path."""
        values = msgspec.to_builtins(answer)
        return {**self.shown(values.pop("path")), **values}

    def call(self, method: str, *, on_output: Callable[[bytes], object] | None = None, **settings: Any) -> Any:
        """Call `method` with `settings` as its parameters; `path` and `cwd` are path arguments."""
        for name in {"path", "cwd"} & settings.keys():
            settings[name] = self.wire(settings[name])
        return self._app.call(RemoteCall(method, OPERATIONS[method].params(**settings), on_output=on_output))

    @property
    def socket(self) -> str:
        """The socket of the daemon."""
        return self._record.socket


def _root_option() -> click.Option:
    how = "Work on this directory of this host, without a workspace."
    return click.Option(["--root"], type=click.Path(), metavar="DIR", help=how)


class _Tool(Command):
    """A command whose function takes the workspace and the command's parameters, and returns the answer's `data`.

    With --root it is the function of vfsd-fs.pyz.
    """

    def __init__(self, *args: Any, callback: Callable[..., dict[str, Any]], **kwargs: Any) -> None:
        def run(*, escaped: bool, root: str | None, **settings: Any) -> dict[str, Any]:
            context = click.get_current_context()
            app = context.ensure_object(App)
            group = context.parent
            root = root or (group.params.get("root") if group is not None else None)
            if root == "":
                raise click.UsageError("--root is an empty string", context)
            if root is not None and (app.workspace is not None or settings.get("snapshot") is not None):
                option = "-w" if app.workspace is not None else "--at"
                raise click.UsageError(f"--root is for a directory without a workspace, and excludes {option}", context)
            if root is not None:
                # Start-up: it imports the tools and the search engine, which otherwise only the daemon needs.
                from protocol.portable.file_commands import COMMANDS, Place  # noqa: PLC0415

                settings.pop("snapshot", None)
                data: dict[str, Any] = COMMANDS[str(self.name)](Place(root, escaped), **settings)
                return data
            app.paths = tuple(filter(None, (settings.get("path"),)))
            return callback(_Workspace(app, escaped=escaped), **settings)

        super().__init__(*args, callback=run, **kwargs)
        how = "Read paths in the form in which `escaped` ones are printed: \\xNN for a byte, \\\\ for a backslash."
        self.params[-2:-2] = [click.Option(["--escaped"], is_flag=True, help=how), _root_option()]  # before -w


_EXAMPLES: Final = """
vfsd fs ls src
vfsd fs read src/main.py --offset 100 --limit 50
printf 'hello\\n' | vfsd fs write notes/hello.txt --mode create
echo '{"old_text": "hello", "new_text": "bye"}' | vfsd fs edit notes/hello.txt
vfsd fs grep 'def \\w+' src --glob '*.py'
vfsd fs glob 'src/**/*.py'
vfsd fs read --at before src/main.py   # as it was in a snapshot
vfsd fs rm -r notes
vfsd fs exec -- make test              # where commands can run: `vfsd exec --help`
vfsd fs --root . grep TODO             # a plain directory, without a workspace
vfsd fs --write-pyz vfsd-fs.pyz        # for a container: python3 vfsd-fs.pyz --root /srv ls
"""


def _write_program(context: click.Context, _param: click.Parameter, file: str | None) -> None:
    """Write vfsd-fs.pyz, print the envelope, and end the process."""
    if file is None or context.resilient_parsing:
        return
    # Start-up: most commands do not need it.
    from protocol.portable.package import write_program  # noqa: PLC0415

    try:
        size_bytes = write_program(file)
    except OSError as error:
        _fail(describe(error), 1)
    output.print_json({"ok": True, "data": {"path": printable(file), "size_bytes": size_bytes}})
    raise click.exceptions.Exit(0)


@click.group("fs", cls=_EnvelopeGroup, examples=_EXAMPLES)
@click.option(
    "--write-pyz",
    metavar="FILE",
    type=click.Path(),
    is_eager=True,
    expose_value=False,
    callback=_write_program,
    help="Write these commands as one file that any Python 3.8 or later runs, for machines without vfsd.",
)
def fs_command(root: str | None) -> None:
    """Read, write, search and run, as an agent does; answers are JSON.

    Each command prints {"ok": true, "data": ...} and exits with 0, or {"ok": false, "error": "..."} and exits with 1 (2
    for wrong usage).  What it writes is visible in the mount when it returns, and the reverse.

    PATHs are relative to the current directory if that is in the workspace, else to the workspace's root; or
    absolute.  Printed paths have the same form.  A path that is not UTF-8 is printed with \\xNN for each such byte
    and marked "escaped": true.

    With --root DIR the commands work on that directory of this host instead, and no workspace has to run: PATHs are
    relative to the current directory if that is in DIR, else to DIR.  No PATH leads out of DIR, even through a symlink,
    but a command that `exec` runs has all rights of this user.  The file that --write-pyz writes has the same commands:
    `python3 vfsd-fs.pyz --root DIR ls`.
    """


fs_command.command_class = _Tool
fs_command.params.insert(-2, _root_option())


_limit_option = functools.partial(
    click.option, "--limit", type=click.IntRange(min=1), show_default=True, metavar="N", help="Print at most N."
)


_at_option = click.option(
    "--at",
    "snapshot",
    metavar="SNAPSHOT",
    shell_complete=complete_snapshot,
    help="Read this snapshot instead of the present state.",
)


# -- reading ----------------------------------------------------------------------------------------
@fs_command.command("ls")
@click.argument("path", default=".", shell_complete=complete_path)
@_limit_option(default=DEFAULT_ENTRIES)
@_at_option
def ls_command(workspace: _Workspace, /, **settings: Any) -> dict[str, Any]:
    """List a directory: paths, types, sizes, modes and times."""
    answer = workspace.call("fs.ls", **settings)
    entries = [workspace.with_path(entry) for entry in answer.entries]
    return {**workspace.shown(answer.path), "entries": entries, "truncated": answer.truncated}


@fs_command.command("stat")
@click.argument("path", shell_complete=complete_path)
@_at_option
def stat_command(workspace: _Workspace, /, **settings: Any) -> dict[str, Any]:
    """Show the type, size, mode and time of a path."""
    return workspace.with_path(workspace.call("fs.stat", **settings))


@fs_command.command("read")
@click.argument("path", shell_complete=complete_path)
@click.option("--offset", type=click.IntRange(min=0), default=0, metavar="N", help="Skip N lines (or bytes).")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Read at most N lines (or bytes); 2,000 lines.")
@click.option("--bytes", "as_bytes", is_flag=True, help="Count bytes instead of lines, and print them as base64.")
@_at_option
def read_command(workspace: _Workspace, /, **settings: Any) -> dict[str, Any]:
    """Read a file.

    The content of a text file is printed as text.  Any other content is printed whole as "base64:..."; with --bytes, a
    part of it.  `truncated` says that the file continues.
    """
    pieces: list[bytes] = []
    page = workspace.call("fs.read", on_output=pieces.append, **settings)
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
    "--all",
    "everything",
    is_flag=True,
    help="Include hidden directories, node_modules, __pycache__, vendor and binary files.",
)


@fs_command.command("glob")
@click.argument("pattern")
@click.argument("path", default=".", shell_complete=complete_path)
@_limit_option(default=DEFAULT_PATHS)
@_all_option
@_at_option
def glob_command(workspace: _Workspace, /, **settings: Any) -> dict[str, Any]:
    """Find files by name.

    *.py matches names at any depth below PATH, src/*.py in src only, src/**/*.py below it, {a,b} either.  "unreadable"
    names directories that could not be listed and so may contain more files.
    """
    answer = workspace.call("fs.glob", **settings)
    return {
        "files": [workspace.shown(found) for found in answer.paths],
        "truncated": answer.truncated,
        "unreadable": [workspace.with_path(each) for each in answer.unreadable],
        "unreadable_count": answer.unreadable_count,
    }


@fs_command.command("grep")
@click.argument("pattern")
@click.argument("path", default=".", shell_complete=complete_path)
@click.option("--glob", metavar="PATTERN", help="Search only files whose path matches, as in `vfsd fs glob`.")
@click.option("-i", "--ignore-case", is_flag=True)
@_limit_option(default=DEFAULT_MATCHES)
@_all_option
@_at_option
def grep_command(workspace: _Workspace, /, **settings: Any) -> dict[str, Any]:
    """Find lines by a regular expression, in a file or in the files below a directory.

    Prints the first match of each line.  Look-around and back-references are not supported, so every expression runs
    in linear time.  "unreadable" names files and directories that could not be read and so may contain more matches.
    """
    answer = workspace.call("fs.grep", **settings)
    return {
        "matches": [workspace.with_path(match) for match in answer.matches],
        "truncated": answer.truncated,
        "unreadable": [workspace.with_path(each) for each in answer.unreadable],
        "unreadable_count": answer.unreadable_count,
    }


# -- changing ---------------------------------------------------------------------------------------
@fs_command.command("write")
@click.argument("path", shell_complete=complete_path)
@click.option(
    "--mode",
    type=click.Choice(["create", "overwrite", "append"]),
    default="overwrite",
    show_default=True,
    help="create fails if the file exists.",
)
@click.option("--no-parents", is_flag=True, help="Do not create missing directories.")
def write_command(workspace: _Workspace, /, no_parents: bool, **settings: Any) -> dict[str, Any]:
    """Write standard input to a file.

    Overwriting is atomic, and keeps the file's permissions.  A new file gets those that your umask allows.
    """
    settings["create_parents"] = not no_parents
    settings["umask"] = current_umask()
    content = sys.stdin.buffer.read(INLINE_BYTES + 1)
    if len(content) <= INLINE_BYTES:
        return workspace.with_path(workspace.call("fs.write", content=content, **settings))
    with readable_by_daemon(workspace.socket) as file:
        file.write(content)
        while file.tell() < _INPUT_BYTES and (piece := sys.stdin.buffer.read(_CHUNK_BYTES)):
            file.write(piece)
        file.flush()
        source = wire_path(os.fsencode(os.path.abspath(file.name)))
        return workspace.with_path(workspace.call("fs.write", source=source, **settings))


@fs_command.command("edit")
@click.argument("path", shell_complete=complete_path)
def edit_command(workspace: _Workspace, /, path: str) -> dict[str, Any]:
    """Replace text in a file.

    Standard input is {"old_text": "...", "new_text": "..."}.  Add "replace_all": true to replace every occurrence;
    without it old_text must occur exactly once.
    """
    from protocol.tools.edits import parsed_edit  # noqa: PLC0415 start-up: of this command only

    return workspace.with_path(workspace.call("fs.edit", path=path, **parsed_edit(sys.stdin.buffer.read())))


@fs_command.command("rm")
@click.argument("path", shell_complete=complete_path)
@click.option("-r", "--recursive", is_flag=True, help="Delete a directory with its content.")
def rm_command(workspace: _Workspace, /, **settings: Any) -> dict[str, Any]:
    """Delete a file, a symlink or a directory, and print the number of deleted entries."""
    try:
        return workspace.with_path(workspace.call("fs.rm", **settings))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        hint = "`-r` deletes it with its content"
        if settings["recursive"]:
            hint = "it has content that the policy hides, or that a program adds (`vfsd policy` shows the policy)"
        raise OSError(errno.ENOTEMPTY, f"{describe(error)}; {hint}") from None


# -- commands ---------------------------------------------------------------------------------------
@fs_command.command("exec", context_settings={"allow_interspersed_args": False})
@click.argument("argv", metavar="COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--cwd", default=".", metavar="PATH", help="Run it in this directory.")
@click.option(
    "--env", "env", multiple=True, metavar="NAME=VALUE", callback=environment(inherit=False), help="Set a variable."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0, min_open=True, max=86_400),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Kill it after that time.",
)
@click.option(
    "--output-limit",
    "output_limit_bytes",
    type=SIZE,
    default="256KiB",
    show_default=True,
    metavar="SIZE",
    help="Keep at most SIZE of each stream.",
)
@click.option("--stdin", "with_stdin", is_flag=True, help="Pass standard input to it, up to 512 KiB.")
def exec_command(workspace: _Workspace, /, argv: tuple[str, ...], with_stdin: bool, **settings: Any) -> dict[str, Any]:
    """Run a command in the workspace, without a shell.

    Prints its exit status (negative if a signal killed it), standard output and standard error.  A command that fails
    is not an error of `vfsd fs exec`.  When it times out, or when `vfsd fs exec` ends, it is killed with all processes
    that it started.

    It runs where `vfsd exec` runs commands: in the container of a container workspace, in the sandbox of a workspace
    mounted with --sandbox, on this host for one mounted with --on-host and with --root.
    """
    stdin = sys.stdin.buffer.read(INLINE_BYTES + 1) if with_stdin else b""
    if len(stdin) > INLINE_BYTES:
        raise ValueError(f"standard input is longer than {INLINE_BYTES} bytes")
    words = [wire_path(os.fsencode(word)) for word in argv]
    done = workspace.call("fs.exec", argv=words, stdin=stdin, environment=caller_environment(), **settings)
    streams = {name: text_or_base64(getattr(done, name), truncated=done.truncated) for name in ("stdout", "stderr")}
    fields = {name: value for name, value in msgspec.structs.asdict(done).items() if value is not msgspec.UNSET}
    return {**fields, **streams}
