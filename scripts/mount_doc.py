#!/usr/bin/env python3
"""Write the tables of docs/backends.md from the options' declarations; with --check, exit with 1 if they differ."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from vfsd.wire.option_rules import kind_words
from vfsd.wire.options import declared_options

DOCUMENT = Path(__file__).parents[1] / "docs" / "backends.md"


def tables() -> list[str]:
    """Return the table of what goes together, and that of the arguments of `Workspace.mount`."""
    options = declared_options()
    flags = {name: option.flag_of(name) for name, (_, option) in options.items()}
    scopes = ["| option | goes with | why |", "| --- | --- | --- |"]
    arguments = ["| argument | option | value |", "| --- | --- | --- |"]
    for name, (kind, option) in options.items():
        if option.scope is not None:
            scopes.append(f"| `{flags[name]}` | {option.scope.places.format_map(flags)} | {option.scope.why} |")
        if name != "backend":
            negated = "; False is the option" if option.default is True else ""
            arguments.append(f"| `{name}` | `{flags[name]}` | {kind_words(kind, option)}{negated} |")
    return ["\n".join(rows) + "\n" for rows in (scopes, arguments)]


def main() -> None:
    """Update the document, or check it."""
    text = wanted = DOCUMENT.read_text()
    for table in tables():
        head = re.escape(table.partition("\n")[0])
        wanted = re.sub(rf"^{head}\n(\|.*\n)*", lambda _, table=table: table, wanted, flags=re.MULTILINE)  # type: ignore[misc]
    if "--check" in sys.argv:
        sys.exit(
            0 if text == wanted else "docs/backends.md is not what vfsd/wire/options.py says: run scripts/mount_doc.py"
        )
    DOCUMENT.write_text(wanted)


if __name__ == "__main__":
    main()
