"""`vfsd mcp`."""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Any

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command, describe
from vfsd.cli.common.interrupts import AFTER_SIGNAL
from vfsd.machine.interpreter import missing_package


@click.command(
    "mcp",
    cls=Command,
    examples="""
    claude mcp add vfsd -- vfsd mcp -w work         # Claude Code starts the server itself
    vfsd mcp -w work                                # what other clients start (docs/mcp.md has their JSON)
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

    The server offers the tools ls, read_file, write_file, edit_file, glob, grep and rm, snapshot, snapshots, restore
    and diff, and shell and python if the workspace can run commands (`vfsd exec --help`).  The files of the workspace
    are resources.

    Clients start `vfsd mcp` and talk to it on standard input and output; logs go to standard error.  It ends when its
    client closes standard input.  With --http it serves several clients until Ctrl-C.

    Calls fail, with the reason, while the workspace does not run, and work again after it was mounted again.

    It needs a package: pip install 'vfsd[mcp]'.
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
        app.emit(shown, _show)
        sys.stdout.flush()
        return anyio.run(http.serve_http, server, sock, address, token)


def _show(shown: dict[str, str]) -> None:
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
