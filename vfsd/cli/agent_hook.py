"""The hook of an agent that keeps a state of the workspace: `python -I -S .../agent_hook.py AGENT`.

The agent runs it before and after each tool call, at each prompt and at the end of a turn, with a JSON object on
standard input (`agent_points.AGENTS`).  Before a call the hook gives the agent the call as its label in the workspace's
log; otherwise it takes an automatic snapshot of the workspace that the agent works in.  It does nothing if there is
none.  `vfsd rewind` goes back to these snapshots.

It must not disturb the agent: it writes nothing to standard output; it waits for the daemon for a limited time; and its
status is 0 or 1, never 2, which would block the agent.  Start-up: it runs before and after every tool call, so it
imports the standard library and few small modules.
"""

from __future__ import annotations

import sys

try:
    import contextlib
    import errno
    import json
    import os

    # At the end: modules of the standard library come first.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from vfsd.client.quick_call import ask, run_for_agent
    from vfsd.machine import selection
    from vfsd.machine.agent_points import (
        AGENTS,
        identified,
        kind_of,
        label_of,
        note_session,
        point_of,
        snapshot_name,
        text_of,
    )
except KeyboardInterrupt:
    sys.exit(130)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Final

TIMEOUT_S: Final = 20.0  # a snapshot of a large host directory takes seconds; the agent waits for one only
_INPUT_BYTES_MAX: Final = 256 << 20
_PIECE_BYTES: Final = 1 << 20
_SHELLS: Final = (b"sh", b"bash", b"dash", b"zsh")
_PROJECT_VARIABLE: Final = "CLAUDE_PROJECT_DIR"  # of Claude Code and Gemini CLI


def main() -> None:
    """Run the hook."""
    try:
        process = _process()
        agent, event = _or_exit(_input)
        sys.exit(run_for_agent(lambda: _or_exit(lambda: handle(agent, event, os.environ, process))))
    except KeyboardInterrupt:
        sys.exit(130)


def _or_exit(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        sys.stderr.write(f"vfsd: no snapshot was taken: {what or type(error).__name__}\n")
        sys.exit(1)


def _input() -> tuple[str, dict[str, Any]]:
    if sys.argv[-1] not in AGENTS:
        raise ValueError("the hook's command names no agent that vfsd knows; `vfsd hooks install` replaces it")
    return sys.argv[-1], read_event(0)


def read_event(descriptor: int) -> dict[str, Any]:
    """Read the hook's input to its end.  ValueError if it is not a JSON object, or too large."""
    pieces = []
    size = 0
    while piece := os.read(descriptor, _PIECE_BYTES):
        size += len(piece)
        if size <= _INPUT_BYTES_MAX:
            pieces.append(piece)
    if size > _INPUT_BYTES_MAX:
        raise ValueError(f"the hook's input has more than {_INPUT_BYTES_MAX >> 20} MiB")
    try:
        event = json.loads(b"".join(pieces).decode("utf-8", "replace"))
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ValueError("the hook's input is not a JSON object")  # noqa: TRY004 input, not a call
    return event


def handle(agent: str, event: dict[str, Any], environ: Mapping[str, str], process: int) -> None:
    """Keep the state that `event` describes, if the agent, whose process is `process`, works in a workspace.  OSError.

    Before a tool call, give the process its label in the workspace's log instead, and remove it at the end of a turn.
    What the agent starts inherits the label.
    """
    kind = kind_of(agent, event)
    record = _named_workspace(event, environ) if kind else None
    if record is None:
        return
    with contextlib.suppress(OSError):  # then the call has no id
        event = identified(agent, event, process, selection.socket_dir())
    point = point_of(agent, event)
    if point is not None:
        _keep(record, {"name": snapshot_name(point), "tag": point.tag(), "automatic": True})
    if kind in ("call", "stop"):
        label = label_of(agent, event) if kind == "call" else None
        with contextlib.suppress(OSError, IndexError):  # no reason to disturb the agent
            note_session(process, text_of(event, AGENTS[agent]["members"][0]), selection.socket_dir())
        with contextlib.suppress(OSError):  # the workspace keeps no log
            ask(record.socket, "label", {"label": label, "pid": process}, TIMEOUT_S)


def _keep(record: selection.QuickRecord, params: dict[str, Any]) -> None:
    try:
        ask(record.socket, "snapshot", params, TIMEOUT_S)
    except FileExistsError:  # an id that the agent gave twice
        ask(record.socket, "snapshot", {**params, "name": None}, TIMEOUT_S)
    except (ConnectionError, FileNotFoundError, TimeoutError):
        reason = "does not answer" if record.alive else "is dead"
        raise OSError(errno.ECONNREFUSED, f"the daemon of {record.name} {reason}") from None


def _process() -> int:
    """The process id of the agent, which runs a hook itself or through a shell."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat", "rb") as file:
            name, _, rest = file.read().partition(b"(")[2].rpartition(b") ")
        return int(rest.split()[1]) if name in _SHELLS else parent
    except (OSError, ValueError, IndexError):
        return parent


def _named_workspace(event: Mapping[str, Any], environ: Mapping[str, str]) -> selection.QuickRecord | None:
    """As `workspace_of`.  OSError if $VFSD_WORKSPACE names no workspace: the user expects states to be kept."""
    record = workspace_of(event, environ)
    name = environ.get(selection.WORKSPACE_VARIABLE)
    if record is None and name:
        advice = "`vfsd list` lists the running ones"
        raise FileNotFoundError(
            errno.ENOENT, f"${selection.WORKSPACE_VARIABLE} is {name!r}, which names no workspace: {advice}"
        )
    return record


def workspace_of(event: Mapping[str, Any], environ: Mapping[str, str]) -> selection.QuickRecord | None:
    """Return the workspace that the agent works in; None if it works in none.

    This is the one with its current directory if vfsd chose that place, for a sub-agent; else the one of
    $VFSD_WORKSPACE; else the one with its current directory, or with its project's.
    """
    records = []
    try:
        paths = selection.record_paths()
    except FileNotFoundError:
        return None
    for path in paths:
        try:
            records.append(selection.read_record(path))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the file of a daemon that just ended, or a record that only the full command can read
    cwd = text_of(event, "cwd") or environ.get("PWD", "/")
    is_own_place = os.path.join(cwd, "").startswith(os.path.join(selection.socket_dir(), selection.PLACES, ""))
    if environ.get(selection.WORKSPACE_VARIABLE) and not is_own_place:
        return selection.selected(None, cwd, records, environ)
    for directory in (cwd, environ.get(_PROJECT_VARIABLE, "")):
        if os.path.isabs(directory):
            record = selection.containing(directory, records)
            if record is not None:
                return record
    return None


if __name__ == "__main__":
    main()
