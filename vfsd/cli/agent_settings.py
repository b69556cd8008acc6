"""The settings files of agents: add vfsd's hooks, find them, and take them out.

For most agents this is JSON, for some with comments.  Only the text of our hooks is inserted or removed: everything
else in the file stays as it is.  Our hooks are found by the path of their program, so hooks of another installation of
vfsd are replaced.  For OpenCode the settings are a plugin, a file of our own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from protocol.linux.regular_file import open_regular
from vfsd.machine.agent_points import AGENTS

_FILE_BYTES_MAX: Final = 16 << 20
_OURS: Final = re.compile(r"/vfsd/cli/(?:agent_hook|claude_hook|claude_worktree)\.py(?=['\"\s]|$)")
_INDENT: Final = re.compile(r"^\{\s*\n([ \t]+)\"")
_decode: Final = json.JSONDecoder().raw_decode
_SPACE: Final = re.compile(r"\s*")
_COMMENT: Final = re.compile(r"""("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/""", re.DOTALL)
_PLUGIN_START: Final = "// The hooks of vfsd: `vfsd hooks remove opencode` removes this file.\n"
_PLUGIN: Final = (
    _PLUGIN_START
    + """import { spawn } from "node:child_process"

const COMMAND = %s

export const Vfsd = async ({ client, directory }) => {
  const prompts = new Map() // session -> the id of its prompt
  const open = new Map() // session -> its call that has not ended

  // Run the hook; wait for it for a second, and never fail.
  const run = (event, members) =>
    new Promise((resolve) => {
      setTimeout(resolve, 1000).unref()
      const hook = spawn(COMMAND[0], COMMAND.slice(1), { stdio: ["pipe", "ignore", "pipe"] })
      hook.on("error", resolve)
      hook.on("close", resolve)
      hook.stdin.on("error", () => {})
      hook.stderr.on("data", (data) => {
        const body = { service: "vfsd", level: "warn", message: String(data).trim() }
        Promise.resolve(client.app.log({ body })).catch(() => {})
      })
      const common = { hook_event_name: event, cwd: directory, messageID: prompts.get(members.sessionID) }
      hook.stdin.end(JSON.stringify({ ...common, ...members }))
    }).catch(() => {})

  // Keep the state after a call that failed, or in a version that never calls tool.execute.after, before the next step.
  const end = async (session) => {
    const call = open.get(session)
    open.delete(session)
    if (call) await run("tool.execute.after", call)
  }

  return {
    "chat.message": async ({ sessionID }, { message, parts }) => {
      await end(sessionID)
      prompts.set(sessionID, message.id)
      await run("chat.message", { sessionID, prompt: parts.map((part) => part.text ?? "").join(" ") })
    },
    "tool.execute.before": async (input, { args }) => {
      await end(input.sessionID)
      open.set(input.sessionID, { ...input, args })
      await run("tool.execute.before", { ...input, args })
    },
    "tool.execute.after": async (input) => {
      if (open.get(input.sessionID)?.callID === input.callID) open.delete(input.sessionID)
      await run("tool.execute.after", input)
    },
    event: async ({ event }) => {
      if (event.type !== "session.idle") return
      await end(event.properties.sessionID)
      await run("session.idle", { sessionID: event.properties.sessionID })
    },
  }
}
"""
)


_Path: TypeAlias = tuple[str | int, ...]  # of a value in JSON


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A settings file: the agent, the path without symlinks, and the text; None if there is no file."""

    agent: str
    path: str
    text: str | None


def project_path(agent: str, directory: str) -> str:
    """Return the file with the agent's settings for the project in `directory`."""
    return os.path.join(directory, AGENTS[agent]["project_file"])


def user_path(agent: str) -> str:
    """Return the file with the user's settings for all projects."""
    variable, directory, file = AGENTS[agent]["user_file"]
    return os.path.join(os.path.abspath(os.environ.get(variable) or os.path.expanduser(directory)), file)


def hook_commands(agent: str) -> dict[str, str]:
    """Return for each event of the agent the shell command of its hook.

    The command for a snapshot never fails: a failed hook would be reported to the agent.
    """
    copy_for_agent, keep = shlex.join(_command("claude_worktree.py")), shlex.join(_command("agent_hook.py", agent))
    return {
        event: copy_for_agent if kind == "copy" else f"{keep} || true"
        for event, kind in AGENTS[agent]["events"].items()
    }


def _command(program: str, *words: str) -> list[str]:
    directory = os.path.dirname(os.path.abspath(__file__))
    return [os.path.abspath(sys.executable), "-I", "-S", os.path.join(directory, program), *words]


def is_plugin(agent: str) -> bool:
    """Return whether the agent's settings are a file of our own."""
    return AGENTS[agent]["project_file"].endswith(".js")


# -- the hooks ------------------------------------------------------------------------------------
def with_hooks(agent: str, text: str | None) -> str:
    """Return the text of the settings with the agent's hooks; hooks of ours that are there are replaced."""
    if is_plugin(agent):
        return _PLUGIN % json.dumps(_command("agent_hook.py", agent))
    commands = hook_commands(agent)
    text = text if text and text.strip() else "{}\n"
    if sorted(installed(agent, text)) == sorted(commands.items()):
        return text
    text = without_hooks(agent, text) or "{}\n"
    for event, kind in AGENTS[agent]["events"].items():
        entry: dict[str, Any] = {"matcher": "*"} if kind in ("call", "tool") else {}
        entry["hooks"] = [{"type": "command", "command": commands[event], "timeout": AGENTS[agent]["timeout"]}]
        hooks = content_of(agent, text).get("hooks")
        if hooks is None:
            text = _inserted(agent, text, (), "hooks", {event: [entry]})
        elif event not in hooks:
            text = _inserted(agent, text, ("hooks",), event, [entry])
        else:
            text = _inserted(agent, text, ("hooks", event), None, entry)
    return text


def without_hooks(agent: str, text: str | None) -> str | None:
    """Return the text without our hooks, and without the lists and objects that are empty then."""
    if is_plugin(agent):
        return None
    while text is not None and (found := list(_ours(content_of(agent, text)))):
        text = _removed(agent, text, found[-1][0])
    return text


def installed(agent: str, text: str | None) -> list[tuple[str, str]]:
    """List our hooks: event and command."""
    if is_plugin(agent):
        return [] if text is None else list(hook_commands(agent).items())
    return [(str(path[1]), command) for path, command in _ours(content_of(agent, text))]


def is_off(agent: str, text: str | None) -> bool:
    """Return whether a setting turns all hooks off."""
    path, value = AGENTS[agent]["off"]
    found: Any = {} if is_plugin(agent) else content_of(agent, text)
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return bool(path) and found is value


def _ours(content: Mapping[str, Any]) -> Iterator[tuple[_Path, str]]:
    """Iterate over our hooks: path and command."""
    for event, groups in content.get("hooks", {}).items():
        for number, group in enumerate(groups):
            for at, hook in enumerate(group["hooks"]):
                command = hook.get("command") if isinstance(hook, dict) else None
                if isinstance(command, str) and _OURS.search(command):
                    yield ("hooks", event, number, "hooks", at), command


# -- the text -------------------------------------------------------------------------------------
class _Child(NamedTuple):
    """A member of an object or an item of an array: where its text begins, its value begins, and both end."""

    name: str | int
    start: int
    value: int
    end: int


def _plain(agent: str, text: str) -> str:
    """Return the text with a space for each character of a comment."""
    if not AGENTS[agent]["has_comments"]:
        return text
    return _COMMENT.sub(lambda found: found[1] or " " * len(found[0]), text)


def _skip(plain: str, at: int) -> int:
    found = _SPACE.match(plain, at)
    assert found is not None
    return found.end()


def _children(plain: str, start: int) -> tuple[list[_Child], int]:
    """Return the children of the object or array that begins at `start`, and where its closing bracket is."""
    found: list[_Child] = []
    at = _skip(plain, start + 1)
    while plain[at] not in "]}":
        name, value = len(found), at
        if plain[start] == "{":
            name, end = _decode(plain, at)
            value = _skip(plain, _skip(plain, end) + 1)
        found.append(_Child(name, at, value, _decode(plain, value)[1]))
        at = _skip(plain, found[-1].end)
        at = _skip(plain, at + 1) if plain[at] == "," else at
    return found, at


def _container(plain: str, path: _Path) -> int:
    start = _skip(plain, 0)
    for name in path:
        start = next(child.value for child in _children(plain, start)[0] if child.name == name)
    return start


def _inserted(agent: str, text: str, path: _Path, name: str | None, value: Any) -> str:
    """Return `text` with a value at the end of the object or array at `path`, in the file's indentation."""
    found = _INDENT.match(text)
    indent = found[1] if found else "  "
    lines = ["", *json.dumps(value, indent=indent, ensure_ascii=False).split("\n")]
    lines[1] = lines[1] if name is None else f"{json.dumps(name)}: {lines[1]}"
    item = f"\n{indent * (len(path) + 1)}".join(lines)
    plain = _plain(agent, text)
    start = _container(plain, path)
    children, close = _children(plain, start)
    end = children[-1].end if children else start + 1
    at = plain.find("\n", end, close)  # after a comment in this line
    comma = "," if children else ""
    if at < 0:
        return f"{text[:end]}{comma}{item}\n{indent * len(path)}{text[end:].lstrip(' ')}"
    return f"{text[:end]}{comma}{text[end:at]}{item}{text[at:]}"


def _removed(agent: str, text: str, path: _Path) -> str:
    """Return `text` without the value at `path`, and without what is empty then; comments stay."""
    plain = _plain(agent, text)
    start = _container(plain, path[:-1])
    children, close = _children(plain, start)
    number = next(number for number, child in enumerate(children) if child.name == path[-1])
    child = children[number]
    above = path[:3] if len(path) > 3 else path[:-1]  # a group, its list, the list's object
    if len(children) == 1 and above:
        begin = _container(plain, above)
        end = _decode(plain, begin)[1]
        if text[begin:end] == plain[begin:end]:
            return _removed(agent, text, above)
    if number + 1 < len(children):
        after = plain.index(",", child.end) + 1
        return text[: child.start] + text[after:].lstrip()
    before = children[number - 1].end if number else start + 1
    gap = text[before : child.start]
    if number:
        comma = plain.index(",", before) - before
        gap = gap[:comma] + gap[comma + 1 :]
    rest = text[child.end : close]
    gap = gap.rstrip() + ("\n" if gap.strip() and rest.lstrip(" \t\r")[:1] != "\n" else "")  # after a comment
    return text[:before] + gap + (rest if number or gap or rest.strip() else "") + text[close:]


# -- the file -------------------------------------------------------------------------------------
def load(agent: str, path: str) -> SettingsFile:
    """Read a settings file, which may not exist.  OSError; EINVAL for a file that is not settings."""
    real = os.path.realpath(path)
    try:
        descriptor = open_regular(real)
    except FileNotFoundError:
        return SettingsFile(agent, real, None)
    with open(descriptor, "rb") as file:
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"larger than {_FILE_BYTES_MAX >> 20} MiB; nothing was changed", path)
    try:
        text = data.decode()
        if not is_plugin(agent):
            json.dumps(content_of(agent, text), ensure_ascii=False, allow_nan=False).encode()  # as `--json` prints it
        elif not text.startswith(_PLUGIN_START):
            raise ValueError("vfsd did not write this file: rename it")  # noqa: TRY301 one message for all reasons
    except (ValueError, RecursionError) as error:
        is_odd = isinstance(error, UnicodeError | RecursionError)
        reason = "it is not JSON that could be written back" if is_odd else error
        raise OSError(errno.EINVAL, f"cannot read the settings: {reason}; nothing was changed", path) from None
    return SettingsFile(agent, real, text)


def content_of(agent: str, text: str | None) -> dict[str, Any]:
    """Return the settings in `text`.  ValueError unless they have the shape that the agents document."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("an object has a name twice")
        return dict(pairs)

    def constant(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    plain = _plain(agent, text or "")
    content = json.loads(plain, object_pairs_hook=members, parse_constant=constant) if plain.strip() else {}
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 a file's content
    hooks = content.get("hooks", {})
    if not isinstance(hooks, dict):
        raise ValueError('"hooks" is not an object')  # noqa: TRY004
    for event, groups in hooks.items():
        if not isinstance(groups, list) or not all(
            isinstance(group, dict) and isinstance(group.get("hooks"), list) for group in groups
        ):
            raise ValueError(f'"hooks.{event}" is not a list of objects with a list "hooks"')
    return content


def save(settings: SettingsFile, text: str | None) -> None:
    """Replace the file in one step, with its mode and owner; None removes it.

    EAGAIN if it changed since it was read; OSError.
    """
    if text is None:
        _check_unchanged(settings)
        os.unlink(settings.path)
        return
    os.makedirs(os.path.dirname(settings.path), exist_ok=True)
    temporary = f"{settings.path}.{os.getpid():x}-{time.monotonic_ns():x}.new"
    try:
        _write_like(settings.path, temporary, text.encode())
        _check_unchanged(settings)
        os.rename(temporary, settings.path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # of a write, such as ENOSPC
            raise OSError(error.errno, f"{error.strerror}; nothing was changed", settings.path) from None
        raise


def _write_like(path: str, temporary: str, data: bytes) -> None:
    """Write the new file `temporary`, with the mode and the owner of `path` if that exists."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as file:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(path)
            if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):  # as any editor that replaces the file
                    os.fchown(descriptor, found.st_uid, found.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _check_unchanged(settings: SettingsFile) -> None:
    if load(settings.agent, settings.path).text != settings.text:
        raise OSError(errno.EAGAIN, "another program changed the file; nothing was changed, try again", settings.path)
