"""Claude Code's settings files: add vfsd's hooks, find them, and take them out.

Everything else in the file keeps its value and its order.  Our hooks are found by the path of their program, so hooks
of another installation of vfsd are replaced.
"""

from __future__ import annotations

import contextlib
import copy
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
from typing import Any, Final

PROJECT_FILE: Final = ".claude/settings.local.json"  # not settings.json, which is committed: the command has a path
USER_FILE: Final = "settings.json"
_CONFIG_VARIABLE: Final = "CLAUDE_CONFIG_DIR"
_FILE_BYTES_MAX: Final = 16 << 20
_TIMEOUT_S: Final = 60  # Claude Code ends a hook that runs longer; the hook itself waits for a shorter time
_ALL_TOOLS: Final = "*"
# Event -> the matcher of its hook; None: the event has none.
EVENTS: Final[Mapping[str, str | None]] = {
    "PreToolUse": _ALL_TOOLS,
    "PostToolUse": _ALL_TOOLS,
    "PostToolUseFailure": _ALL_TOOLS,
    "UserPromptSubmit": None,
    "Stop": None,
    "WorktreeCreate": None,
    "WorktreeRemove": None,
}
_OURS: Final = re.compile(r"/vfsd/cli/claude_(?:hook|worktree)\.py(?=['\"\s]|$)")
_INDENT: Final = re.compile(r"^\{\s*\n([ \t]+)\"")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A settings file: its path without symlinks, its content (an empty object if there is no file), and its text."""

    path: str
    content: dict[str, Any]
    text: str | None


def project_path(directory: str) -> str:
    """Return the file with the settings of the project in `directory` that only this user has."""
    return os.path.join(directory, PROJECT_FILE)


def user_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return the file with the user's settings for all projects."""
    directory = environ.get(_CONFIG_VARIABLE) or os.path.expanduser("~/.claude")
    return os.path.join(os.path.abspath(directory), USER_FILE)


def hook_commands() -> dict[str, str]:
    """Return for each of EVENTS the shell command of its hook.

    That of a snapshot never fails: a failed hook would be reported to the agent.
    """
    directory = os.path.dirname(os.path.abspath(__file__))
    start = [os.path.abspath(sys.executable), "-I", "-S"]
    keep = shlex.join([*start, os.path.join(directory, "claude_hook.py")]) + " || true"
    copy_for_agent = shlex.join([*start, os.path.join(directory, "claude_worktree.py")])
    return {event: copy_for_agent if event.startswith("Worktree") else keep for event in EVENTS}


# -- the content ----------------------------------------------------------------------------------
def with_hooks(content: Mapping[str, Any], commands: Mapping[str, str]) -> dict[str, Any]:
    """Return `content` with the hook `commands` for each of EVENTS; hooks of ours that are there are replaced."""
    if _commands_by_event(content) == {event: [command] for event, command in commands.items()}:
        return dict(content)
    changed = without_hooks(content)
    hooks = changed.setdefault("hooks", {})
    for event, matcher in EVENTS.items():
        entry: dict[str, Any] = {} if matcher is None else {"matcher": matcher}
        entry["hooks"] = [{"type": "command", "command": commands[event], "timeout": _TIMEOUT_S}]
        hooks.setdefault(event, []).append(entry)
    return changed


def without_hooks(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` without our hooks, and without the lists and objects that are empty then."""
    changed = copy.deepcopy(dict(content))
    hooks = changed.get("hooks", {})
    for event in list(hooks):
        groups = hooks[event]
        kept = []
        for group in groups:
            rest = [hook for hook in group["hooks"] if not _is_ours(hook)]
            if rest or not group["hooks"]:
                kept.append({**group, "hooks": rest})
        if kept or not groups:
            hooks[event] = kept
        else:
            del hooks[event]
    if not hooks and content.get("hooks"):
        del changed["hooks"]
    return changed


def installed_commands(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List our hooks: event and command."""
    return [(event, hook["command"]) for event, hook in _hooks(content) if _is_ours(hook)]


def _commands_by_event(content: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for event, command in installed_commands(content):
        found.setdefault(event, []).append(command)
    return found


def _hooks(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for event, groups in content.get("hooks", {}).items():
        for group in groups:
            for hook in group["hooks"]:
                yield event, hook


def _is_ours(hook: Any) -> bool:
    command = hook.get("command") if isinstance(hook, dict) else None
    return isinstance(command, str) and bool(_OURS.search(command))


def _check(content: Any) -> None:
    """Raise ValueError unless `content` has the shape that Claude Code documents."""
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


# -- the file -------------------------------------------------------------------------------------
def load(path: str) -> SettingsFile:
    """Read a settings file, which may not exist.  OSError; EINVAL for a file that is not settings."""
    real = os.path.realpath(path)
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return SettingsFile(real, {}, None)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file; nothing was changed", path)
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"larger than {_FILE_BYTES_MAX >> 20} MiB; nothing was changed", path)
    try:
        text = data.decode()
        content = _parse(text) if text.strip() else {}
        _check(content)
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()  # what `save` would write
    except (ValueError, RecursionError) as error:
        is_odd = isinstance(error, UnicodeError | RecursionError)
        reason = "it is not JSON that could be written back" if is_odd else error
        raise OSError(errno.EINVAL, f"cannot read the settings: {reason}; nothing was changed", path) from None
    return SettingsFile(real, content, text)


def _parse(text: str) -> Any:
    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("an object has a name twice")
        return dict(pairs)

    def constant(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, object_pairs_hook=members, parse_constant=constant)


def rendered(settings: SettingsFile, content: Mapping[str, Any]) -> str:
    """Return the text of `content` in the file's indentation."""
    found = _INDENT.match(settings.text or "")
    text = json.dumps(content, indent=found[1] if found else 2, ensure_ascii=False)
    has_no_newline = settings.text is not None and settings.text.strip() and not settings.text.endswith("\n")
    return text + ("" if has_no_newline else "\n")


def save(settings: SettingsFile, content: Mapping[str, Any]) -> None:
    """Replace the file in one step, with its mode and owner.  EAGAIN if it changed since it was read; OSError."""
    data = rendered(settings, content).encode()
    os.makedirs(os.path.dirname(settings.path), exist_ok=True)
    temporary = f"{settings.path}.{os.getpid():x}-{time.monotonic_ns():x}.new"
    try:
        _write_like(settings.path, temporary, data)
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
    if load(settings.path).text != settings.text:
        raise OSError(errno.EAGAIN, "another program changed the file; nothing was changed, try again", settings.path)
