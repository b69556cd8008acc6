"""--include and --exclude: patterns in gitignore's syntax."""

from __future__ import annotations

import click

include_option = click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Only files that match (.gitignore's syntax); may be repeated.",
)
exclude_option = click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave out paths that match, and what is below them; may be repeated.",
)
