"""`vfsd web` and `vfsd mcp`: servers for a browser and for agents."""

from __future__ import annotations

import errno
import logging
import os
import sys
import webbrowser
from typing import Any

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import AFTER_SIGNAL, App, Command, describe
from vfsd.machine.interpreter import missing_package


@click.command(
    "web",
    cls=Command,
    examples="""
    vfsd web                               # prints the URL; Ctrl-C ends the server
    vfsd web --open -w work                # opens the page of the workspace "work"
    vfsd web --port 8765
    vfsd web backup.zip                    # also shows an archive
    vfsd web dumps/SESSION.jsonl           # the archive next to a session dump: SESSION.fs.zip
    """,
)
@click.argument("files", metavar="[FILE.zip]...", nargs=-1, type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Listen at this port; by default any free one.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.pass_obj
def web_command(app: App, files: tuple[str, ...], port: int, opens: bool) -> None:
    """Show the workspaces in a browser: timeline, files, differences, restore.

    The page shows all workspaces of this user: the snapshots with what each changed, the files of every state, two
    states side by side, conflicts between forks.  It takes and drops snapshots, forks, and after a dry run restores,
    reverts and merges.  FILEs are ZIP archives that `vfsd export` wrote; they are shown without a mount.

    The server listens at 127.0.0.1 only.  The URL has a token that only you know: it gives its holder the rights of
    these commands.  Ctrl-C ends the server; the workspaces keep running.

    It needs the extra `web`: without its packages the command prints what installs them.
    """
    try:
        # Optional packages, and start-up: `vfsd web --help` needs none of these.
        from vfsd.web import server  # noqa: PLC0415
        from vfsd.web.access import Credentials  # noqa: PLC0415
        from vfsd.web.server import application  # noqa: PLC0415
        from vfsd.web.sources import Sources  # noqa: PLC0415
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("vfsd", "protocol"):
            raise
        raise missing_package("`vfsd web`", error, "web") from None
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="vfsd web: %(levelname)s: %(message)s")
    credentials = Credentials()
    source = app.record().name if app.workspace is not None else None
    with Sources(files) as sources, server.listening(port) as sock:
        source = source or (sources.archives[0].key if sources.archives else None)
        first = f"&source={source}" if source else ""
        address = "http://{}:{}/".format(*sock.getsockname())
        shown = {"url": f"{address}?token={credentials.token}{first}"}
        app.emit(shown, _show_page)
        sys.stdout.flush()
        if opens:
            # Other users can read the browser's command line, so it has a ticket, which is used up at once.
            webbrowser.open(f"{address}?ticket={credentials.new_ticket()}{first}")
        number = server.serve_until_signal(application(sources, credentials, sock.getsockname()[1]), sock)
    click.get_current_context().exit(AFTER_SIGNAL + number)


def _show_page(shown: dict[str, str]) -> None:
    output.say(shown["url"])
    output.note("open this URL in a browser of this machine; Ctrl-C ends the server")


@click.command(
    "mcp",
    cls=Command,
    examples="""
    claude mcp add vfsd -- vfsd mcp -w work         # Claude Code starts the server itself
    vfsd mcp -w work                                # what other clients start (docs/agents.md has their JSON)
    vfsd mcp -w work --http 0                       # prints the URL and the token
    vfsd mcp -w work --http 8765 --token-file ~/.vfsd-token
    """,
)
@click.option(
    "--http",
    "address",
    metavar="[HOST:]PORT",
    help="Serve streamable HTTP at this loopback address instead; 0 is any free port.",
)
@click.option(
    "--token-file",
    type=click.Path(),
    metavar="FILE",
    help="Clients of --http need the token in FILE, which only you may read. Without it a new token is printed.",
)
@click.pass_obj
def mcp_command(app: App, address: str | None, token_file: str | None) -> None:
    """Serve a running workspace to agents, as an MCP server.

    The server offers the tools ls, read_file, write_file, edit_file, glob, grep and rm, snapshot, snapshots, restore,
    revert, diff and log, and shell and python if the workspace can run commands (`vfsd exec --help`).  The files of the
    workspace are resources.

    Clients start `vfsd mcp` and talk to it on standard input and output; logs go to standard error.  It ends when its
    client closes standard input.  With --http it serves several clients until Ctrl-C.

    Calls fail, with the reason, while the workspace does not run, and work again after it was mounted again.

    It needs the extra `mcp`: without its package the command prints what installs it.
    """
    if address is None and token_file is not None:
        raise click.UsageError("--token-file needs --http")
    if address is None and app.json:
        raise click.UsageError("--json needs --http, because standard output carries the protocol")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="vfsd mcp: %(levelname)s: %(message)s")
    logging.captureWarnings(True)
    number = _serve_stdio(app) if address is None else _serve_http(app, address, token_file)
    if number is not None:
        click.get_current_context().exit(AFTER_SIGNAL + number)


def _serve_stdio(app: App) -> int | None:
    try:
        from vfsd.integrations.mcp.server import make_server, serve_stdio  # noqa: PLC0415 an optional package
    except ImportError as error:
        raise _missing(error) from None
    import anyio  # noqa: PLC0415 start-up: `vfsd mcp --help` needs no event loop

    session = _session(app)
    if os.isatty(0):
        output.note("waiting for a client of MCP on standard input; Ctrl-D ends it, `vfsd mcp --help` shows its use")
    try:
        return anyio.run(serve_stdio, make_server(session))
    except ValueError as error:
        raise OSError(errno.EMSGSIZE, str(error)) from None


def _serve_http(app: App, text: str, token_file: str | None) -> int | None:
    # Start-up: `vfsd mcp --help` needs neither.
    from vfsd.integrations.mcp.access import new_token, parse_address, read_token  # noqa: PLC0415

    try:
        address = parse_address(text)
        token = new_token() if token_file is None else read_token(token_file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        from vfsd.integrations.mcp import http  # noqa: PLC0415 an optional package
        from vfsd.integrations.mcp.server import make_server  # noqa: PLC0415 likewise
    except ImportError as error:
        raise _missing(error) from None
    import anyio  # noqa: PLC0415 start-up: `vfsd mcp --help` needs no event loop

    server = make_server(_session(app))
    sock, address = http.listen(address)
    with sock:
        shown = {"url": address.url, **({} if token_file is not None else {"token": token})}
        app.emit(shown, _show_address)
        sys.stdout.flush()
        return anyio.run(http.serve_http, server, sock, address, token)


def _show_address(shown: dict[str, str]) -> None:
    output.say(f"listening at {shown['url']}")
    if "token" in shown:
        output.say(f"token: {shown['token']}")


def _session(app: App) -> Any:
    """Return the session; a note says why, if there is no workspace yet."""
    # Start-up: `vfsd mcp --help` does not need it.
    from vfsd.integrations.mcp.session import Session, restore_runtime_variable  # noqa: PLC0415

    restore_runtime_variable()
    try:
        app.record().check_alive()
    except OSError as error:
        output.note(f"{describe(error)}; calls fail until the workspace runs")
    return Session(app.workspace)


def _missing(error: ImportError) -> Exception:
    if (error.name or "").partition(".")[0] in ("vfsd", "protocol"):
        return error
    return missing_package("`vfsd mcp`", error, "mcp")
