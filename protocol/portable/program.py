"""The program in vfsd-fs.pyz: the commands of `vfsd fs --root DIR`, with the same envelope.

Standard output gets `{"ok": true, "data": ...}` with exit status 0, or `{"ok": false, "error": "..."}` with 1, or 2 for
wrong usage.  The hidden command `call` serves `protocol.portable.remote`: it reads one request from standard input.

It runs on Python 3.8 with the standard library only, on the modules of `protocol` with which vfsd does the same.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from protocol.portable import file_commands
from protocol.portable.answers import UsageError, described, fail, print_answer
from protocol.portable.place import Place
from protocol.portable.remote_calls import answer_call
from protocol.portable.run_command import run_command

_OUTPUT_MOST_BYTES = 16 << 20
_SUFFIXES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(words: Sequence[str]) -> int:
    """Run one command line; return the exit status."""
    if list(words[:1]) == ["call"]:
        return answer_call()
    try:
        settings = vars(_parser().parse_args(list(words)))
        run = settings.pop("run", None)
        if run is None:
            return fail("a command is missing; --help lists them", 2)
        print_answer({"ok": True, "data": run(Place(settings.pop("root"), settings.pop("escaped")), **settings)})
    except UsageError as error:
        return fail(str(error), 2)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:
        return 1
    except (OSError, ValueError) as error:
        return fail(described(error), 1)
    return 0


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty string")
    return text


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, above 0 and at most 86400")
    return value


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})\s*([kmg]?)(?:i?b)?", text.lower(), re.ASCII)
    if found is None or int(found[1]) * _SUFFIXES[found[2]] > _OUTPUT_MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of at most 16MiB")
    return int(found[1]) * _SUFFIXES[found[2]]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _parser() -> _Parser:
    about = "Read, write, search and run below a directory; answers are JSON, as those of `vfsd fs`."
    parser = _Parser(prog="vfsd-fs", description=about)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for each in (parser, shared := _Parser(add_help=False)):
        default = "." if each is parser else argparse.SUPPRESS
        each.add_argument("--root", metavar="DIR", type=_not_empty, default=default, help="the directory; default: .")
        escaped = False if each is parser else argparse.SUPPRESS
        how = "read paths in the form in which `escaped` ones are printed"
        each.add_argument("--escaped", action="store_true", default=escaped, help=how)

    def command(name: str, run: Callable[..., Any], about: str, path: str | None = None) -> _Parser:
        made = commands.add_parser(name, help=about, description=about, parents=[shared], allow_abbrev=False)
        made.set_defaults(run=run)
        if path is not None:
            required: dict[str, Any] = {} if path == "" else {"nargs": "?", "default": path}
            made.add_argument("path", metavar="PATH", type=_not_empty, **required)
        return made

    def limit(made: _Parser, default: int) -> None:
        made.add_argument("--limit", metavar="N", type=_count(1), default=default, help=f"at most N; {default}")

    def everything(made: _Parser) -> None:
        how = "also hidden directories, node_modules, __pycache__, vendor and binary files"
        made.add_argument("--all", dest="everything", action="store_true", help=how)

    limit(command("ls", file_commands.list_directory, "list a directory", "."), 10_000)
    command("stat", file_commands.stat_path, "describe a path", "")
    made = command("read", file_commands.read_file, "read a file", "")
    made.add_argument("--offset", metavar="N", type=_count(0), default=0, help="skip N lines (or bytes)")
    made.add_argument("--limit", metavar="N", type=_count(1), help="at most N lines (or bytes); 2,000 lines")
    made.add_argument("--bytes", dest="as_bytes", action="store_true", help="count bytes, and print base64")
    made = command("glob", file_commands.find_files, "find files by name")
    made.add_argument("pattern", metavar="PATTERN", type=_not_empty)
    made.add_argument("path", metavar="PATH", type=_not_empty, nargs="?", default=".")
    limit(made, 100)
    everything(made)
    made = command(
        "grep", file_commands.find_lines, "find lines by a regular expression of Python, without look-around"
    )
    made.add_argument("pattern", metavar="PATTERN", type=_not_empty)
    made.add_argument("path", metavar="PATH", type=_not_empty, nargs="?", default=".")
    made.add_argument("--glob", metavar="PATTERN", type=_not_empty, help="only files whose path matches")
    made.add_argument("-i", "--ignore-case", action="store_true")
    limit(made, 200)
    everything(made)
    made = command("write", file_commands.write_file, "write standard input to a file", "")
    made.add_argument("--mode", choices=["create", "overwrite", "append"], default="overwrite")
    made.add_argument("--no-parents", action="store_true", help="do not create missing directories")
    command(
        "edit", file_commands.edit_text, 'replace text: {"old_text", "new_text", "replace_all"} on standard input', ""
    )
    made = command("rm", file_commands.remove, "delete a file, a symlink or a directory", "")
    made.add_argument("-r", "--recursive", action="store_true", help="with its content")
    made = command("exec", run_command, "run a command; -c LINE runs a line of the shell")
    _add_exec_options(made)
    return parser


def _add_exec_options(made: _Parser) -> None:
    made.add_argument("--cwd", metavar="PATH", type=_not_empty, default=".")
    made.add_argument("--env", metavar="NAME=VALUE", type=_variable, action="append", default=[])
    made.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=120.0, help="kill it after that time; 120")
    made.add_argument("--output-limit", metavar="SIZE", type=_size, default=256 << 10, help="of each stream; 256KiB")
    made.add_argument("--stdin", action="store_true", help="pass standard input to it, up to 512 KiB")
    made.add_argument("-c", dest="line", metavar="LINE", type=_not_empty, help="run a line of /bin/sh")
    made.add_argument("argv", metavar="COMMAND", nargs=argparse.REMAINDER)
