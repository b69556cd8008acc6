"""`vfsd web`."""

from __future__ import annotations

import logging
import sys
import webbrowser

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.interrupts import AFTER_SIGNAL
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
    states side by side.  It takes and drops snapshots, restores after a dry run, forks and merges.  FILEs are ZIP
    archives that `vfsd export` wrote; they are shown without a mount.

    The server listens at 127.0.0.1 only.  The URL has a token that only you know: it gives its holder the rights of
    these commands.  Ctrl-C ends the server; the workspaces keep running.

    It needs packages: pip install 'vfsd[web]'.
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
        app.emit(shown, _show)
        sys.stdout.flush()
        if opens:
            # Other users can read the browser's command line, so it has a ticket, which is used up at once.
            webbrowser.open(f"{address}?ticket={credentials.new_ticket()}{first}")
        number = server.serve_until_signal(application(sources, credentials, sock.getsockname()[1]), sock)
    click.get_current_context().exit(AFTER_SIGNAL + number)


def _show(shown: dict[str, str]) -> None:
    output.say(shown["url"])
    output.note("open this URL in a browser of this machine; Ctrl-C ends the server")
