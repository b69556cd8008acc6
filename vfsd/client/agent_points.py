"""The states that an agent's hooks keep: how the tag of such a snapshot is spelled and parsed.

    claude:tool session=0f3a... prompt=77c1... id=toolu_01...: Bash: npm test
    claude:prompt session=0f3a... prompt=77c1...: add a test for the parser

Start-up: a hook imports this module, so it imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

AGENT: Final = "claude"
KINDS: Final = ("prompt", "tool", "stop")
_ID_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_ID_LENGTH_MAX: Final = 100
_TEXT_CHARACTERS: Final = 120  # with the ids at most 900 bytes: a tag has at most 1024


class AgentPoint:
    """A moment in an agent's session.

    `kind`: "prompt" (when the user's prompt was submitted), "tool" (after a call of a tool) or "stop" (the agent ended
    its turn).  `session`, `prompt` and `tool_use_id` are the agent's own ids; an empty string if it gave none, or one
    that is no id.  `text`: the prompt, or the tool and its main argument, in one line.
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
