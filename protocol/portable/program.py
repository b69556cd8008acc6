"""The program in vfsd-fs.pyz: the commands of `vfsd fs --root DIR`, with the same envelope.

Standard output gets `{"ok": true, "data": ...}` with exit status 0, or `{"ok": false, "error": "..."}` with 1, or 2 for
wrong usage.  The hidden command `call` serves `protocol.portable.remote`: it reads one request from standard input,
and reads and writes files.

It runs on Python 3.8 with the standard library only, on the modules of `protocol` with which vfsd does the same.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from protocol.adapters.host_files import HostFiles
from protocol.adapters.plain_filesystem import PlainPathFilesystem
from protocol.paths import CallLimitError
from protocol.portable import file_commands
from protocol.portable.file_commands import MOST_OUTPUT_BYTES, Place, UsageError, answered, run_command

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

    def run() -> Any:
        settings = vars(_parser().parse_args(list(words)))
        command = settings.pop("run", None)
        if command is None:
            raise UsageError("a command is missing; --help lists them")
        return command(Place(settings.pop("root"), settings.pop("escaped")), **settings)

    return answered(run)


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
    if found is None or int(found[1]) * _SUFFIXES[found[2]] > MOST_OUTPUT_BYTES:
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
    made = command("exec", _run_line, "run a command; -c LINE runs a line of the shell")
    _add_exec_options(made)
    return parser


def _add_exec_options(made: _Parser) -> None:
    made.add_argument("--cwd", metavar="PATH", type=_not_empty, default=".")
    made.add_argument("--env", metavar="NAME=VALUE", type=_variable, action="append", default=[])
    made.add_argument(
        "--timeout",
        dest="timeout_s",
        metavar="SECONDS",
        type=_seconds,
        default=120.0,
        help="kill it after that time; 120",
    )
    made.add_argument(
        "--output-limit",
        dest="output_limit_bytes",
        metavar="SIZE",
        type=_size,
        default=256 << 10,
        help="of each stream; 256KiB",
    )
    made.add_argument(
        "--stdin", dest="with_stdin", action="store_true", help="pass standard input to it, up to 512 KiB"
    )
    made.add_argument("-c", dest="line", metavar="LINE", type=_not_empty, help="run a line of /bin/sh")
    made.add_argument("argv", metavar="COMMAND", nargs=argparse.REMAINDER)


def _run_line(place: Place, argv: list[str], line: str | None, **settings: Any) -> Any:
    if argv[:1] == ["--"]:
        del argv[0]
    if line is not None:
        argv = ["/bin/sh", "-c", line, "sh", *argv]
    if not argv:
        raise UsageError("exec: give a COMMAND, or -c LINE")
    return run_command(place, argv, **settings)


def answer_call() -> int:
    """Answer one request: {"root", "read_only", "method", "arguments"}; the bytes in it are base64."""
    try:
        request = json.loads(sys.stdin.buffer.read())
        answer: Any = {"data": _called(**request)}
    except (OSError, ValueError) as error:
        answer = {"error": _error_record(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _error_record(error: Exception) -> dict[str, Any]:
    if isinstance(error, OSError):
        name = os.fsdecode(error.filename) if error.filename is not None else None
        kind = type(error).__name__
        return {"kind": kind, "errno": error.errno, "message": error.strerror or str(error), "path": name}
    return {"kind": "CallLimitError" if isinstance(error, CallLimitError) else "ValueError", "message": str(error)}


def _called(root: str, read_only: bool, method: str, arguments: dict[str, Any]) -> Any:
    files = PlainPathFilesystem(HostFiles(root, read_only=read_only))
    if method == "hello":
        return [files.root, files.read_only]
    if method == "upload":
        with open(_uploaded(arguments["name"]), "ab") as file:
            file.write(base64.b64decode(arguments["content"]))
        return None
    if method == "put":
        source = arguments.pop("name")
        with open(_uploaded(source), "rb") as file, files.open_write(**arguments) as writer:
            writer.write_all(iter(lambda: file.read(1 << 20), b""))
        os.unlink(_uploaded(source))
        return None
    if method == "replace_bytes":
        with open(_uploaded(arguments["name"]), "rb") as file:
            new = file.read()
        os.unlink(_uploaded(arguments["name"]))
        old = files.read_bytes(arguments["path"]).content
        same = hashlib.sha256(old).hexdigest() == arguments["digest"]
        return _plain(files.replace_bytes(arguments["path"], old, new)) if same else None
    if method == "drop":
        if os.path.exists(_uploaded(arguments["name"])):
            os.unlink(_uploaded(arguments["name"]))
        return None
    if method == "check_write":
        files.open_write(**arguments).discard()  # type: ignore[attr-defined]
        return None
    if method == "write_bytes":
        arguments["content"] = base64.b64decode(arguments["content"])
    return _plain(getattr(files, method)(**arguments))


def _uploaded(name: str) -> str:
    """The path of an upload, next to the program."""
    if not re.fullmatch(r"[0-9a-f]+", name, re.ASCII):
        raise ValueError(f"not an upload: {name!r}")
    return os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), name)


def _plain(value: Any) -> Any:
    """A result in JSON's types: values as objects, times as numbers of microseconds since 1970."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "timestamp"):
        return round(value.timestamp() * 1e6)
    # A `Value` is a struct of msgspec here, and a dataclass in the program.
    fields = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    return value if fields is None else {name: _plain(getattr(value, name)) for name in fields}
