"""`vfsd hooks`."""

from __future__ import annotations

import os
import shlex
import sys

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command


@click.command(
    "hooks",
    cls=Command,
    acts_on_workspace=False,
    examples="""
    vfsd hooks                             # copy the line into the agent's settings
    """,
)
@click.pass_obj
def hooks_command(app: App) -> None:
    """Print the command with which an agent's hooks take snapshots.

    The command starts faster than `vfsd snapshot` and takes the same options.  It acts on $VFSD_WORKSPACE, else on the
    workspace that the current directory is in, else on the only one running.  Its exit status is 0, or 1 with one line
    on standard error; it is never 2, which hook runners treat as an error that blocks the agent.
    """
    client = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook_client.py")
    command = shlex.join([sys.executable, "-I", "-S", client, "snapshot"])
    app.emit({"snapshot": command}, lambda answer: output.say(answer["snapshot"]))
