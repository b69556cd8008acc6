"""The hook of Claude Code that gives a sub-agent its own copy: `python -I -S .../claude_worktree.py`.

Claude Code runs it for WorktreeCreate and WorktreeRemove instead of git (https://code.claude.com/docs/en/hooks).  In a
workspace the copy is a fork of it, whose changes `vfsd merge` takes over.  Where the workspace cannot be forked, the
copy is an overlay of it, whose changes are in memory until `vfsd apply`.  Elsewhere the hook makes what Claude Code
makes without it, a worktree of git.

On WorktreeCreate it prints the path of the copy and nothing else.  A failure is one line on standard error and status
1, with which Claude Code refuses the sub-agent.  WorktreeRemove never loses changes: a fork that has changed stays, and
so do an overlay with changes that were not applied and a worktree of git with changes that were not committed.
"""

from __future__ import annotations

import sys

try:
    import errno
    import os
    import re
    import subprocess

    # At the end: modules of the standard library come first.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from vfsd.cli.agent_hook import read_event, workspace_of
    from vfsd.machine.agent_points import text_of
except KeyboardInterrupt:
    sys.exit(130)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

_OTHERS: Final = re.compile(r"[^A-Za-z0-9._-]+")
_NAME_LENGTH_MAX: Final = 40
_GIT_DIRECTORY: Final = ".claude/worktrees"


def main() -> None:
    """Run the hook."""
    try:
        event = read_event(0)
        name = text_of(event, "hook_event_name")
        if name == "WorktreeCreate":
            sys.stdout.buffer.write(os.fsencode(create(event, os.environ)) + b"\n")
            sys.stdout.flush()
        elif name == "WorktreeRemove":
            remove(text_of(event, "worktree_path"))
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError, LookupError, RecursionError, subprocess.SubprocessError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        sys.stderr.write(f"vfsd: {' '.join((what or type(error).__name__).split())}\n")
        sys.exit(1)


def _add_installed_packages() -> None:
    import site  # noqa: PLC0415 start-up: only a mount needs other packages

    site.main()


# -- create -----------------------------------------------------------------------------------------
def create(event: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Make a copy for a sub-agent, and return its path.  OSError, ValueError."""
    name = _OTHERS.sub("-", text_of(event, "name")).strip("-.")[:_NAME_LENGTH_MAX] or "agent"
    directory = text_of(event, "cwd") or os.getcwd()
    record = workspace_of(event, environ)
    if record is None:
        return _create_with_git(directory, name)
    # In `vfsd run` the workspace is mounted over the current directory, and only there for this process.
    source = record.mountpoint if os.path.isdir(record.mountpoint) else directory
    return _mount_copy(record.name, source, f"{record.name[: _NAME_LENGTH_MAX // 2]}-{name}")


def _mount_copy(workspace: str, source: str, name: str) -> str:
    _add_installed_packages()
    from vfsd.client import launch  # noqa: PLC0415 after the packages are there
    from vfsd.client.arguments import mount_options  # noqa: PLC0415
    from vfsd.machine.runtime import make_place, remove_place  # noqa: PLC0415

    place = make_place(name, source)
    try:
        if not (_sees_mounts_of(workspace) and _fork(workspace, place)):
            launch.launch(mount_options(place, f"overlay:{source}", name=os.path.basename(place)))
    except BaseException:
        remove_place(place)
        raise
    return place


def _sees_mounts_of(workspace: str) -> bool:
    """Return whether what the daemon of `workspace` mounts is visible here: it mounts the forks."""
    from vfsd.machine.runtime import read_record  # noqa: PLC0415 after the packages are there

    record = read_record(workspace)
    try:
        return record is not None and os.readlink(f"/proc/{record.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return False


def _fork(workspace: str, place: str) -> bool:
    """Fork the workspace to `place`.  Return False if it cannot be forked, or there is no memory for a fork."""
    from vfsd.client.workspace import Workspace  # noqa: PLC0415 after the packages are there

    try:
        Workspace.attach(workspace).fork(place, name=os.path.basename(place))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOMEM):
            return False
        raise
    return True


def _create_with_git(directory: str, name: str) -> str:
    try:
        root = _git(directory, "rev-parse", "--show-toplevel")
    except (OSError, subprocess.SubprocessError):
        reason = "neither a workspace nor a git repository: there is nothing to make a copy of for a sub-agent"
        raise OSError(f"{directory} is {reason}") from None
    place = os.path.join(root, _GIT_DIRECTORY, name)
    branch = f"worktree-{name}"
    if _git(root, "branch", "--list", branch):  # of an earlier sub-agent: its commits may be nowhere else
        _git(root, "worktree", "add", place, branch)
    else:
        _git(root, "worktree", "add", "-b", branch, place, "HEAD")
    return place


def _git(directory: str, *words: str) -> str:
    done = subprocess.run(["git", "-C", directory, *words], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(f"git {words[0]} failed: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout.removesuffix(b"\n"))


# -- remove -----------------------------------------------------------------------------------------
def remove(path: str) -> None:
    """Remove the copy at `path`, unless it has changes that are nowhere else.  OSError, ValueError."""
    if not os.path.isabs(path):
        raise ValueError(f"not a path of a copy: {path!r}")
    if f"/{_GIT_DIRECTORY}/" in path and os.path.exists(os.path.join(path, ".git")):
        root = path.rpartition(f"/{_GIT_DIRECTORY}/")[0]
        _git(root, "worktree", "remove", path)
        return
    _add_installed_packages()
    from vfsd.machine.runtime import is_own_place, read_records  # noqa: PLC0415 after the packages are there

    record = next((each for each in read_records() if each.mountpoint == path and is_own_place(path)), None)
    if record is None:
        raise ValueError(f"{path} is no copy that vfsd made for a sub-agent")
    vfsd = [sys.executable, "-P", "-m", "vfsd.cli.main", "unmount", record.name]
    done = subprocess.run(vfsd, capture_output=True, check=False, stdin=subprocess.DEVNULL, cwd="/", env=_environment())
    if done.returncode:
        raise OSError(os.fsdecode(done.stderr).strip().removeprefix("vfsd: error: "))


def _environment() -> dict[str, str]:
    from vfsd.machine.daemon_start import daemon_environment  # noqa: PLC0415 after the packages are there

    return daemon_environment()


if __name__ == "__main__":
    main()
