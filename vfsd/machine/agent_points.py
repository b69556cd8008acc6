"""The states that an agent's hooks keep: from the input of a hook to the tag of a snapshot, and back.

    claude:tool session=0f3a... prompt=77c1... id=toolu_01...: Bash: npm test
    claude:prompt session=0f3a... prompt=77c1...: add a test for the parser

The log of a workspace has a label like this one for each change that a call made: "claude toolu_01...: Bash: npm test".

A hook also notes which process is the agent of which session, in the directory `agents` next to the sockets, so that
`vfsd rewind` in a command of the agent knows the session that asks.

Start-up: a hook imports this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

AGENT: Final = "claude"
_AGENTS: Final = "agents"
KINDS: Final = ("prompt", "tool", "stop")
_KIND_OF_EVENT: Final = {
    "PostToolUse": "tool",
    "PostToolUseFailure": "tool",
    "UserPromptSubmit": "prompt",
    "Stop": "stop",
}
# The argument that says best what a tool call did; the first that it has.
_MAIN_ARGUMENTS: Final = ("command", "file_path", "notebook_path", "path", "pattern", "url", "query", "description")
_ID_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_ID_LENGTH_MAX: Final = 100
_TEXT_CHARACTERS: Final = 120  # with the ids at most 900 bytes: a tag has at most 1024


class AgentPoint:
    """A moment in an agent's session.

    `kind`: "prompt" (when the user's prompt was submitted), "tool" (after a tool call) or "stop" (the agent ended
    its turn).  `session`, `prompt` and `tool_use_id` are the agent's own ids; an empty string if it gave none, or one
    with characters that no id has.  `text`: the prompt, or the tool and its main argument, in one line.
    """

    __slots__ = ("kind", "prompt", "session", "text", "tool_use_id")

    def __init__(self, kind: str, session: str = "", prompt: str = "", tool_use_id: str = "", text: str = "") -> None:
        self.kind = kind
        self.session = _id(session)
        self.prompt = _id(prompt)
        self.tool_use_id = _id(tool_use_id)
        self.text = _line(text)

    def tag(self) -> str:
        """Return the tag of a snapshot of this moment."""
        ids = (("session", self.session), ("prompt", self.prompt), ("id", self.tool_use_id))
        words = [f"{AGENT}:{self.kind}", *(f"{name}={value}" for name, value in ids if value)]
        return " ".join(words) + ": " + self.text


def _id(value: object) -> str:
    if isinstance(value, str) and 0 < len(value) <= _ID_LENGTH_MAX and _ID_CHARACTERS.issuperset(value):
        return value
    return ""


def _line(text: object) -> str:
    """Return the beginning of `text` as one line that JSON can carry and a terminal can show."""
    start = str(text)[: 4 * _TEXT_CHARACTERS].encode("utf-8", "replace").decode()
    line = " ".join("".join(each if each.isprintable() else " " for each in start).split())
    return line if len(line) <= _TEXT_CHARACTERS else line[: _TEXT_CHARACTERS - 1] + "…"


def parse_tag(tag: str | None) -> AgentPoint | None:
    """Return the point that a snapshot's tag describes; None for any other tag."""
    head, colon, text = (tag or "").partition(": ")
    first, *words = head.split(" ")
    agent, _, kind = first.partition(":")
    ids = {name: value for name, _, value in (word.partition("=") for word in words)}
    if not colon or agent != AGENT or kind not in KINDS or not ids.keys() <= {"session", "prompt", "id"}:
        return None
    return AgentPoint(kind, ids.get("session", ""), ids.get("prompt", ""), ids.get("id", ""), text)


def snapshot_name(point: AgentPoint) -> str | None:
    """Return the name for a snapshot of `point`: its tool_use_id; None if the daemon has to choose the name."""
    name = point.tool_use_id
    return name if name[:1].isalnum() and not name.lower().endswith(".zip") and "_" in name else None


# -- the session of a process ---------------------------------------------------------------------
def note_session(agent: int, session: str, directory: str) -> None:
    """Note that process `agent` works in `session`; drop the notes of processes that have ended.  OSError."""
    place = os.path.join(directory, _AGENTS)
    os.makedirs(place, mode=0o700, exist_ok=True)
    for name in os.listdir(place):
        if not os.path.exists(f"/proc/{name}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(place, name))
    new = os.path.join(place, f"{os.getpid()}")
    with open(new, "w", encoding="utf-8") as file:
        file.write(f"{_stat(agent)[19]} {_id(session)}")
    os.rename(new, os.path.join(place, str(agent)))


def session_above(process: int, directory: str) -> str:
    """Return the session of the nearest agent among `process` and the processes above it; "" if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            fields = _stat(process)
            with (
                contextlib.suppress(FileNotFoundError),
                open(os.path.join(directory, _AGENTS, str(process)), encoding="utf-8") as file,
            ):
                start_ticks, _, session = file.read().partition(" ")
                if start_ticks == fields[19]:
                    return session
            process = int(fields[1])
    return ""


def _stat(process: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the third on: the parent is 1, the start time 19."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


# -- the input of a hook --------------------------------------------------------------------------
def point_of(event: Mapping[str, Any]) -> AgentPoint | None:
    """Return the moment that a hook's input describes; None for an event that keeps no state."""
    kind = _KIND_OF_EVENT.get(text_of(event, "hook_event_name"))
    if kind is None:
        return None
    text = text_of(event, "prompt") if kind == "prompt" else ""
    if kind == "tool":
        arguments = event.get("tool_input")
        found = [text_of(arguments, name) for name in _MAIN_ARGUMENTS] if isinstance(arguments, dict) else []
        text = ": ".join([text_of(event, "tool_name"), *filter(None, found)][:2])
    ids = (text_of(event, "session_id"), text_of(event, "prompt_id"), text_of(event, "tool_use_id"))
    return AgentPoint(kind, *(ids if kind == "tool" else (*ids[:2], "")), text)


def label_of(event: Mapping[str, Any]) -> str | None:
    """Return the label of the tool call that is about to run; None for another event."""
    if text_of(event, "hook_event_name") != "PreToolUse":
        return None
    point = point_of({**event, "hook_event_name": "PostToolUse"})
    return None if point is None else " ".join(filter(None, (AGENT, point.tool_use_id))) + ": " + point.text


def call_of_label(label: str | None) -> str:
    """Return the id of the tool call that a label of `label_of` names; "" for any other label."""
    agent, _, name = (label or "").partition(": ")[0].partition(" ")
    return _id(name) if agent == AGENT else ""


def text_of(members: Mapping[str, Any], name: str) -> str:
    """Return the member `name` if it is text, else an empty string."""
    value = members.get(name)
    return value if isinstance(value, str) else ""
