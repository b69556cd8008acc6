"""The agents that vfsd has hooks for, and the states that these hooks keep.

`AGENTS` says where each agent has its settings, and which names its hooks give to events and to the members of their
input.  A state is the snapshot of a moment (`AgentPoint`), which its tag describes:

    claude:tool session=0f3a... prompt=77c1... id=toolu_01...: Bash: npm test
    codex:prompt session=0f3a... prompt=77c1...: add a test for the parser

The log of a workspace has a label like this one for each change that a call made: "claude toolu_01...: Bash: npm test".

A hook also notes which process is the agent of which session, in the directory `agents` next to the sockets, so that
`vfsd rewind` in a command of the agent knows the session that asks.  If an agent gives its calls no ids, the hook
before a call writes an id there, for the hook after the call.

Start-up: a hook imports this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import os
from binascii import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final, TypedDict

    class Agent(TypedDict):
        """An agent with hooks.  A hook prints nothing: agents add its output to the conversation, or expect JSON."""

        title: str
        project_file: str  # its settings in the project's directory
        user_file: tuple[str, str, str]  # a variable, the directory if that is not set, the user's settings below it
        # The events with a hook -> "call" (before a tool call), "copy" (a copy for a sub-agent), or one of KINDS.
        events: Mapping[str, str]
        # How the input names session, prompt, tool call, tool, and the tool's arguments; "": it has no such member.
        members: tuple[str, str, str, str, str]
        timeout: int  # after which the agent ends a hook, in its own unit: a minute; a hook ends much earlier
        off: tuple[str, object]  # the setting that turns all hooks off, and its value then
        has_comments: bool  # in its settings
        advice: str  # for the user, after an installation


AGENTS: Final[Mapping[str, Agent]] = {
    "claude": {  # https://code.claude.com/docs/en/hooks
        "title": "Claude Code",
        "project_file": ".claude/settings.local.json",  # not settings.json, which is committed: the command has a path
        "user_file": ("CLAUDE_CONFIG_DIR", "~/.claude", "settings.json"),
        "events": {
            "PreToolUse": "call",
            "PostToolUse": "tool",
            "PostToolUseFailure": "tool",
            "UserPromptSubmit": "prompt",
            "Stop": "stop",
            "WorktreeCreate": "copy",
            "WorktreeRemove": "copy",
        },
        "members": ("session_id", "prompt_id", "tool_use_id", "tool_name", "tool_input"),
        "timeout": 60,
        "off": ("disableAllHooks", True),
        "has_comments": False,
        "advice": "",
    },
    "codex": {  # https://developers.openai.com/codex/hooks
        "title": "Codex",
        "project_file": ".codex/hooks.json",
        "user_file": ("CODEX_HOME", "~/.codex", "hooks.json"),
        "events": {"PreToolUse": "call", "PostToolUse": "tool", "UserPromptSubmit": "prompt", "Stop": "stop"},
        "members": ("session_id", "turn_id", "tool_use_id", "tool_name", "tool_input"),
        "timeout": 60,
        "off": ("", None),
        "has_comments": False,
        "advice": "Codex runs hooks only after you trusted them: the next `codex` in a terminal asks; until then"
        " `codex exec` needs --dangerously-bypass-hook-trust",
    },
    "gemini": {  # https://geminicli.com/docs/hooks/reference
        "title": "Gemini CLI",
        "project_file": ".gemini/settings.json",
        "user_file": ("GEMINI_CLI_HOME", "~", ".gemini/settings.json"),
        "events": {"BeforeTool": "call", "AfterTool": "tool", "BeforeAgent": "prompt", "AfterAgent": "stop"},
        "members": ("session_id", "", "tool_use_id", "tool_name", "tool_input"),  # `identified` adds tool_use_id
        "timeout": 60_000,
        "off": ("hooksConfig.enabled", False),
        "has_comments": True,
        "advice": "Gemini CLI runs the hooks of a project in folders that you trust: it asks when it starts there",
    },
    "opencode": {  # https://opencode.ai/docs/plugins; the input is what vfsd's plugin makes of it
        "title": "OpenCode",
        "project_file": ".opencode/plugins/vfsd.js",
        "user_file": ("XDG_CONFIG_HOME", "~/.config", "opencode/plugins/vfsd.js"),
        "events": {
            "tool.execute.before": "call",
            "tool.execute.after": "tool",
            "chat.message": "prompt",
            "session.idle": "stop",
        },
        "members": ("sessionID", "messageID", "callID", "tool", "args"),
        "timeout": 0,
        "off": ("", None),
        "has_comments": False,
        "advice": "",
    },
}
_NOTES: Final = "agents"
KINDS: Final = ("prompt", "tool", "stop")
# The argument that says best what a tool call did; the first that it has.
_MAIN_ARGUMENTS: Final = (
    *("command", "file_path", "filePath", "notebook_path", "path", "pattern", "url", "query", "description"),
)
_ID_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_ID_LENGTH_MAX: Final = 100
_TEXT_CHARACTERS: Final = 120  # with the ids at most 900 bytes: a tag has at most 1024


class AgentPoint:
    """A moment in an agent's session.

    `agent`: one of AGENTS.  `kind`: "prompt" (when the user's prompt was submitted), "tool" (after a tool call) or
    "stop" (the agent ended its turn).  `session`, `prompt` and `tool_use_id` are the agent's own ids; an empty string
    if it gave none, or one with characters that no id has.  `text`: the prompt, or the tool and its main argument, in
    one line.
    """

    __slots__ = ("agent", "kind", "prompt", "session", "text", "tool_use_id")

    def __init__(
        self, agent: str, kind: str, session: str = "", prompt: str = "", tool_use_id: str = "", text: str = ""
    ) -> None:
        self.agent = agent
        self.kind = kind
        self.session = _id(session)
        self.prompt = _id(prompt)
        self.tool_use_id = _id(tool_use_id)
        self.text = _line(text)

    def tag(self) -> str:
        """Return the tag of a snapshot of this moment."""
        ids = (("session", self.session), ("prompt", self.prompt), ("id", self.tool_use_id))
        words = [f"{self.agent}:{self.kind}", *(f"{name}={value}" for name, value in ids if value)]
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
    if not colon or agent not in AGENTS or kind not in KINDS or not ids.keys() <= {"session", "prompt", "id"}:
        return None
    return AgentPoint(agent, kind, ids.get("session", ""), ids.get("prompt", ""), ids.get("id", ""), text)


def snapshot_name(point: AgentPoint) -> str | None:
    """Return the name for a snapshot of `point`: its tool_use_id; None if the daemon has to choose the name."""
    name = point.tool_use_id
    return name if name[:1].isalnum() and not name.lower().endswith(".zip") and "_" in name else None


# -- the session of a process ---------------------------------------------------------------------
def note_session(agent: int, session: str, directory: str) -> None:
    """Note that process `agent` works in `session`; drop the notes of processes that have ended.  OSError."""
    place = os.path.join(directory, _NOTES)
    os.makedirs(place, mode=0o700, exist_ok=True)
    for name in os.listdir(place):
        if not os.path.exists(f"/proc/{name.partition('.')[0]}"):
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
                open(os.path.join(directory, _NOTES, str(process)), encoding="utf-8") as file,
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
def kind_of(agent: str, event: Mapping[str, Any]) -> str:
    """Return what a hook's input is about: "call", "copy" or one of KINDS; "" for an event without a hook."""
    return AGENTS[agent]["events"].get(text_of(event, "hook_event_name"), "")


def point_of(agent: str, event: Mapping[str, Any]) -> AgentPoint | None:
    """Return the moment that a hook's input describes; None for an event that keeps no state."""
    kind = kind_of(agent, event)
    return _point(agent, kind, event) if kind in KINDS else None


def _point(agent: str, kind: str, event: Mapping[str, Any]) -> AgentPoint:
    session, prompt, call, tool, arguments_name = AGENTS[agent]["members"]
    text = text_of(event, "prompt") if kind == "prompt" else ""
    if kind == "tool":
        arguments = event.get(arguments_name)
        found = [text_of(arguments, name) for name in _MAIN_ARGUMENTS] if isinstance(arguments, dict) else []
        text = ": ".join([text_of(event, tool), *filter(None, found)][:2])
    ids = (text_of(event, session), text_of(event, prompt), text_of(event, call) if kind == "tool" else "")
    return AgentPoint(agent, kind, *ids, text)


def label_of(agent: str, event: Mapping[str, Any]) -> str:
    """Return the label of the tool call that is about to run."""
    point = _point(agent, "tool", event)
    return " ".join(filter(None, (agent, point.tool_use_id))) + ": " + point.text


def call_of_label(label: str | None) -> str:
    """Return the id of the tool call that a label of `label_of` names; "" for any other label."""
    agent, _, name = (label or "").partition(": ")[0].partition(" ")
    return _id(name) if agent in AGENTS else ""


def identified(agent: str, event: dict[str, Any], process: int, directory: str) -> dict[str, Any]:
    """Return `event` with an id for its tool call, if the agent gave none.  OSError.

    The id is made of the call's input and its start time.  A note has that time; the hook after the call removes the
    note.
    """
    kind = kind_of(agent, event)
    session, _, call, tool, arguments = AGENTS[agent]["members"]
    if kind not in ("call", "tool") or event.get(call):
        return event
    said = crc32(repr([event.get(name) for name in (session, tool, arguments)]).encode("utf-8", "replace"))
    note = os.path.join(directory, _NOTES, f"{process}.{said:x}")
    if kind == "call":
        os.makedirs(os.path.dirname(note), mode=0o700, exist_ok=True)
        with open(note, "wb"):
            pass
    began_ns = os.stat(note).st_mtime_ns
    if kind == "tool":
        os.unlink(note)
    return {**event, call: f"call_{crc32(str(began_ns).encode(), said):08x}"}


def text_of(members: Mapping[str, Any], name: str) -> str:
    """Return the member `name` if it is text, else an empty string."""
    value = members.get(name)
    return value if isinstance(value, str) else ""
