"""`vfsd doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.machine.doctor import Finding, examine

_COLOURS: Final = {"ok": "green", "missing": "red", "optional": "yellow"}


@click.command(
    "doctor",
    cls=Command,
    acts_on_workspace=False,
    examples="""
    vfsd doctor
    vfsd doctor --deep                     # also mount, answer one request, and unmount
    vfsd doctor --json
    """,
)
@click.option("--deep", is_flag=True, help="Also make a mount in a temporary directory, and use it.")
@click.pass_obj
def doctor_command(app: App, deep: bool) -> None:
    """Check what this machine needs to mount workspaces.

    Each line starts with "ok", "missing" (and says what to do) or "optional" (vfsd works without it).
    The exit status is 1 if something is missing.
    """
    findings = examine(deep=deep)
    missing = any(_verdict(finding) == "missing" for finding in findings)
    app.emit({"ok": not missing, "findings": findings}, lambda _: _show(findings))
    if missing:
        output.report("this machine lacks something that vfsd needs; see above")
        click.get_current_context().exit(1)


def _verdict(finding: Finding) -> str:
    if finding.ok:
        return "ok"
    return "optional" if finding.optional else "missing"


def _show(findings: Sequence[Finding]) -> None:
    """Print findings: on a terminal with the advice below; in a pipe as tab-separated verdict, topic, text, advice."""
    for finding in findings:
        verdict = _verdict(finding)
        if not output.on_terminal():
            output.say("\t".join((verdict, finding.topic, *map(output.show_path, (finding.what, finding.advice)))))
            continue
        coloured = click.style(verdict.ljust(len("optional")), fg=_COLOURS[verdict])
        output.say(f"{coloured}  {finding.topic}: {output.show_path(finding.what)}")
        if finding.advice:
            output.say(f"{'':10}{click.style('→', dim=True)} {output.show_path(finding.advice)}")
