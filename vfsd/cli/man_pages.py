"""Man pages, generated from the commands: `python -m vfsd.cli.man_pages DIRECTORY`.

One page for `vfsd` and one for each command and subcommand, such as vfsd-fs-read.1.  They say what `--help` says.
Source of the format: man-pages(7) for the sections, groff_man(7) for the macros.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from typing import Final

import click

from vfsd import __version__
from vfsd.cli.common.app import EVERYTHING
from vfsd.cli.main import cli

_ESCAPES: Final = str.maketrans({"\\": "\\e", "-": "\\-", "'": "\\(aq", "^": "\\(ha", "~": "\\(ti"})
_LITERAL: Final = re.compile(r"`([^`]+)`")
_ENVIRONMENT: Final = """
.SH ENVIRONMENT
.TP
.B VFSD_WORKSPACE
The workspace of commands without
.BR \\-w .
.TP
.B VFSD_RUNTIME_DIR
The directory of control sockets, records and logs.  Default:
.BR $XDG_RUNTIME_DIR ,
else
.I /run
for root, else
.IR /tmp/vfsd\\-UID .
.TP
.B VFSD_STORE_DIR
The directory of the snapshots that are kept on disk.
.TP
.BR VFSD_PAGER ", " PAGER
The pager of long output on a terminal; empty or
.B cat
for none.
.TP
.B NO_COLOR
If it is set, output on a terminal has no colours.
"""


def pages() -> dict[str, str]:
    """Return the pages: the file's name to its text."""
    return {f"{'-'.join(words)}.1": _page(words, command) for words, command in _commands(("vfsd",), cli)}


def _commands(words: tuple[str, ...], command: click.Command) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    for name, each in _subcommands(command):
        yield from _commands((*words, name), each)


def _subcommands(command: click.Command) -> list[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        return []
    context = click.Context(command, info_name=command.name)
    found = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
    return [(name, each) for name, each in found if each is not None and not each.hidden]


def _page(words: tuple[str, ...], command: click.Command) -> str:
    context = click.Context(command, info_name=" ".join(words), **cli.context_settings)
    context.meta[EVERYTHING] = True
    name = "-".join(words)
    about, _, rest = inspect.cleandoc(command.help or "").partition("\n")
    pieces = command.collect_usage_pieces(context)
    lines = [
        f'.TH "{_text(name.upper())}" 1 "" "vfsd {__version__}" "vfsd"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(about.rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(' '.join(words))}",
        _text(" ".join(pieces)),
    ]
    if rest.strip():
        lines += [".SH DESCRIPTION", *_paragraphs(rest)]
    subcommands = _subcommands(command)
    if subcommands:
        lines += [".SH COMMANDS"]
        for each, subcommand in subcommands:
            lines += [".TP", f".BR {_text(f'{name}-{each}')} (1)", _text(subcommand.get_short_help_str(limit=200))]
    lines += [".SH OPTIONS"]
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None and isinstance(param, click.Option):
            lines += [".TP", f".B {_text(record[0])}", *_inline(record[1])]
    examples = getattr(command, "examples", "").replace("\n\n", "\n")
    examples = examples or (command.epilog or "" if command is cli else "")
    if examples:
        lines += [".SH EXAMPLES", *_epilog(examples)]
    if command is cli:
        lines += [_ENVIRONMENT.strip()]
    if len(words) > 1:
        lines += [".SH SEE ALSO", f".BR {_text('-'.join(words[:-1]))} (1)"]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield ".PP"
        if paragraph.startswith("\b"):  # click's mark: the lines stay as they are
            yield from (".nf", *map(_text, paragraph.splitlines()[1:]), ".fi")
        else:
            yield from _inline(" ".join(paragraph.split()))


def _epilog(text: str) -> Iterator[str]:
    """The examples, which stay as they are, and paragraphs."""
    blocks = re.split(r"\n\s*\n", text.replace("\b\nExamples:\n", "").strip())
    yield from (".nf", *(_text(line.strip()) for line in blocks[0].splitlines()), ".fi")
    for block in blocks[1:]:
        yield ".PP"
        yield from _inline(" ".join(block.split()))


def _inline(text: str) -> Iterator[str]:
    """Text with `literals` in bold."""
    yield _LITERAL.sub(lambda found: f"\\fB{found[1]}\\fR", _text(text))


def _text(text: str) -> str:
    """Escape what groff would interpret."""
    escaped = text.translate(_ESCAPES)
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


def main(directory: str) -> None:
    """Write the pages to `directory`, and remove those of commands that do not exist any more."""
    os.makedirs(directory, exist_ok=True)
    made = pages()
    for name in os.listdir(directory):
        if re.fullmatch(r"vfsd[a-z-]*\.1", name) and name not in made:
            os.unlink(os.path.join(directory, name))
    for name, text in made.items():
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m vfsd.cli.man_pages DIRECTORY")
    main(sys.argv[1])
