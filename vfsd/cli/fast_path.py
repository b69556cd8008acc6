"""The entry point of the `vfsd` script: answers frequent commands without importing click, msgspec or rich.

Only plain forms of `snapshot`, `status`, `restore` and `diff` in a pipe are answered here, if they succeed soon.  Any
other command line goes to `vfsd.cli.main`.  If the request was already sent, `main` continues that call, so that
errors, remarks, signals and long calls are handled in one place, and nothing runs twice.
"""

from __future__ import annotations

import sys

try:
    import json
    import os
    import signal

    from vfsd import __version__
    from vfsd.client.quick_call import BegunCall, begin
    from vfsd.machine import selection
    from vfsd.machine import text as wording
except KeyboardInterrupt:
    sys.exit(130)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

_COMPLETION_VARIABLE: Final = "_VFSD_COMPLETE"
_VALUES: Final = {"-w": "workspace", "--workspace": "workspace", "--tag": "tag"}
_FLAGS: Final = {"--json", "--undo", "--redo"}
_OPTIONS: Final = {"snapshot": {"tag"}, "status": set[str](), "restore": {"--undo", "--redo"}, "diff": set[str]()}
_ARGUMENTS_MAX: Final = {"snapshot": 1, "status": 1, "restore": 1, "diff": 2}
_COMMON: Final = {"workspace", "--json"}


class _UnusualError(Exception):
    """This module does not answer the command line; nothing was sent."""


class _Fields:
    """A JSON object whose members are attributes."""

    def __init__(self, members: dict[str, Any]) -> None:
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)  # an answer of another version


def main(prepare: Callable[[], object] | None = None) -> None:
    """The entry point of the `vfsd` script.  `prepare` runs before the full command is imported."""
    call = None
    try:
        call = _begun(sys.argv[1:])
        if call is not None and (text := answer(call, sys.argv[1:])) is not None and _write(text):
            call.close()
            # The answer is printed. While Python finalizes itself, Ctrl-C would kill the process.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return
    except KeyboardInterrupt:
        sys.exit(130)
    if prepare is not None:
        prepare()
    from vfsd.cli.main import main as full  # noqa: PLC0415 start-up: the purpose of this module

    try:
        full(call)
    finally:
        if call is not None:
            call.release_signals()


def _begun(words: list[str]) -> BegunCall | None:
    try:
        if _COMPLETION_VARIABLE in os.environ or not _is_plain_output():
            return None
        return begin_command(words)
    except (_UnusualError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_plain_output() -> bool:
    for descriptor in (0, 1, 2):
        os.fstat(descriptor)
    return not (os.isatty(1) or os.isatty(2)) and getattr(sys.stdout, "encoding", "") == "utf-8"


def _write(text: str) -> bool:
    """Write to standard output.  If that fails, return False: the full command repeats the write and reports why."""
    data = text.encode()
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return False
    return True


# -- the request ----------------------------------------------------------------------------------
def parse(words: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """Return the command, its arguments and its options.  _UnusualError for all but plain forms."""
    if not words or words[0] not in _OPTIONS or not all(word and word.isprintable() for word in words):
        raise _UnusualError
    command = words[0]
    arguments: list[str] = []
    options: dict[str, str] = {}
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            arguments.append(word)
            continue
        name = _VALUES.get(word, word)
        value = next(rest, "-") if word in _VALUES else word
        if name in options or name not in _COMMON | _OPTIONS[command]:
            raise _UnusualError
        if word not in _FLAGS and value.startswith("-"):
            raise _UnusualError
        options[name] = value
    if len(arguments) > _ARGUMENTS_MAX[command]:
        raise _UnusualError
    return command, arguments, options


def request_of(command: str, arguments: list[str], options: dict[str, str]) -> dict[str, Any]:
    """Return the parameters that the full command sends."""
    name = arguments[0] if arguments else None
    if command == "status":
        return {}
    if command == "snapshot":
        return {key: value for key, value in (("name", name), ("tag", options.get("tag"))) if value is not None}
    if command == "diff":
        if "--json" in options or any(".." in word for word in arguments):
            raise _UnusualError
        return {**dict(zip(("a", "b"), arguments, strict=False)), "stream": True}
    sources = [{"type": option[2:]} for option in ("--undo", "--redo") if option in options]
    sources += [{"type": "snapshot", "name": word} for word in arguments]
    if len(sources) != 1 or (name is not None and ("/" in name or name.endswith(".zip"))):
        raise _UnusualError
    return {"source": sources[0]}


def begin_command(words: list[str]) -> BegunCall | None:
    """Send the request of a command line; None if nothing was sent.  _UnusualError for all but plain forms."""
    command, arguments, options = parse(words)
    params = request_of(command, arguments, options)
    selector = options.get("workspace")
    if command == "status" and arguments:
        selector = arguments[0]
    records = [selection.read_record(path) for path in selection.record_paths()]
    record = selection.selected(selector, os.getcwd(), records, os.environ)
    if record is None or record.version != __version__ or not record.alive:
        raise _UnusualError
    return begin(record.socket, command, params)


# -- the answer -----------------------------------------------------------------------------------
def answer(call: BegunCall, words: list[str]) -> str | None:
    """Return what the command prints; None if the full command has to continue the call."""
    result = call.receive()
    if result is None:
        return None
    command, _, options = parse(words)
    try:
        if "--json" in options:
            return result.decode() + "\n" if _has_no_remarks(json.loads(result), is_json=True) else None
        rows = _rows(call, command, options, json.loads(result))
        # The full command escapes control characters and removes colours.
        if rows is None or not all(cell.isprintable() for row in rows for cell in row):
            return None
        return "".join("\t".join(row) + "\n" for row in rows)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _has_no_remarks(members: dict[str, Any], *, is_json: bool) -> bool:
    """Return whether the full command prints nothing on standard error, and exits with status 0."""
    in_text = ("expired", "unreadable", "unstable")
    return not members.get("problems") and (is_json or not any(members.get(name) for name in in_text))


def _rows(call: BegunCall, command: str, options: dict[str, str], members: dict[str, Any]) -> list[list[str]] | None:
    """Return the cells of each line; None if the full command has to print the answer."""
    if not _has_no_remarks(members, is_json=False):
        return None
    if command == "diff":
        streamed = call.output()
        changes = [] if streamed is None else [json.loads(line) for line in streamed.split(b"\n")[:-1]]
        has_links = any("linked_to" in change or "unlinked_from" in change for change in changes)
        return None if streamed is None or has_links else [[_change(change)] for change in changes]
    if command == "status":
        status: Any = _Fields(members)
        return [[heading, "-" if cell is None else str(cell)] for heading, _, cell in wording.status_rows(status)]
    if command == "snapshot":
        return [[members["name"]]]
    return [[line] for line in _restored(members, options)]


def _change(change: dict[str, Any]) -> str:
    return wording.change_line(change["change"], wording.with_slash(change["path"], change["type"]))


def _restored(members: dict[str, Any], options: dict[str, str]) -> list[str]:
    counts: Any = _Fields(members["counts"])
    if members["step"] is not None:
        verb = "undid" if "--undo" in options else "redid"
        step: Any = _Fields({**members, "counts": counts})
        return wording.step_lines(verb, members["step"], step)
    if members["safety_snapshot"] is None:
        return [wording.nothing_to_restore(members["source"])]
    return wording.outcome_lines(
        f"restored {members['source']}", counts, members["safety_snapshot"], members.get("older", 0)
    )


if __name__ == "__main__":
    main()
