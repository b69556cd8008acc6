"""Select a workspace: the runtime directory, and which record a name, a path or the current directory means.

`QuickRecord` reads the records that `vfsd.machine.runtime` defines, with few imports.  It refuses a record that needs
decoding: one of a path with a backslash or a control character.

Start-up: the fast path of the command line and the hooks of agents import this module, so it imports little.
"""

from __future__ import annotations

import errno
import os
import stat

# Not from `typing`, whose import takes several milliseconds.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from typing import Any, Final, Protocol, TypeVar

    class Record(Protocol):
        """The fields of a workspace's record that the selection reads."""

        @property
        def name(self) -> str: ...
        @property
        def mountpoint(self) -> str: ...
        @property
        def alive(self) -> bool: ...

    R = TypeVar("R", bound=Record)

RUNTIME_VARIABLE: Final = "VFSD_RUNTIME_DIR"
WORKSPACE_VARIABLE: Final = "VFSD_WORKSPACE"
RECORD_SUFFIX: Final = ".json"
PLACES: Final = "places"  # the directory, next to the records, of mountpoints that vfsd makes itself
_NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_RECORD_MAX_BYTES: Final = 64 * 1024
_SYMLINKS_MAX: Final = 40  # MAXSYMLINKS in linux/namei.h


def runtime_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Return $VFSD_RUNTIME_DIR, else $XDG_RUNTIME_DIR, else /run for root, else /tmp/vfsd-<uid>; may not exist."""
    for variable in (RUNTIME_VARIABLE, "XDG_RUNTIME_DIR"):
        # The XDG base directory specification requires that relative paths are ignored.
        if os.path.isabs(environ.get(variable, "")):
            return environ[variable]
    return "/run" if os.geteuid() == 0 else in_tmp()


def in_tmp() -> str:
    """Return the runtime directory of a user without another one."""
    return f"/tmp/vfsd-{os.geteuid()}"  # noqa: S108 (nothing in it is used before check_owner)


def socket_dir() -> str:
    """Return the directory of sockets and records, which may not exist."""
    return os.path.join(runtime_dir(), "vfsd")


def check_owner(path: str) -> None:
    """Raise PermissionError unless `path` is a directory of this user."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} is not a directory: remove it, or set ${RUNTIME_VARIABLE} to another directory")
    if found.st_uid != os.geteuid():
        owner = f"{path} belongs to uid {found.st_uid}, not to uid {os.geteuid()}"
        raise PermissionError(f"{owner}: set ${RUNTIME_VARIABLE} to another directory")


def process_start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks after boot; None if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # proc(5): "pid (comm) state ...", and comm may contain spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_serving(pid: int, start_ticks: int, socket_path: str) -> bool:
    """Return whether the daemon `pid`, which listens at `socket_path`, is running."""
    if process_start_ticks(pid) == start_ticks:
        return True
    if not in_system_run():  # where the processes of the machine are not seen
        return False
    import socket  # noqa: PLC0415 start-up: as above

    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(socket_path)
        except OSError:
            return False
    return True


def in_system_run() -> bool:
    """Return whether the root directory of this process is a workspace, as in `vfsd run --system`."""
    with open("/proc/self/mountinfo", "rb") as file:
        roots = [line for line in file if line.split(b" ", 5)[4] == b"/"]
    return bool(roots) and b" - fuse.vfsd " in roots[-1]


def selected(selector: str | None, cwd: str, records: Sequence[R], environ: Mapping[str, str]) -> R | None:
    """Return the record that `selector` means, else $VFSD_WORKSPACE, else `cwd`; None if no record matches."""
    selector = selector or environ.get(WORKSPACE_VARIABLE)
    if selector:
        return _named(selector, cwd, records)
    return containing(cwd, records)


def is_path_selector(selector: str) -> bool:
    """Return whether `selector` can only be a path."""
    return "/" in selector or selector in (".", "..")


def _named(selector: str, cwd: str, records: Sequence[R]) -> R | None:
    for record in records:
        if record.name == selector:
            return record
    found = containing(os.path.join(cwd, selector), records)
    # Inside a workspace every word is also a relative path in it: a mistyped name must not select that workspace.
    return found if is_path_selector(selector) or found is not containing(cwd, records) else None


def containing(path: str, records: Sequence[R]) -> R | None:
    """Return the record of the innermost mount that contains `path`; a living workspace before a dead one."""
    # Innermost: a mount inside of another one is reached through the outer one, whose mountpoint comes first.
    by_path: dict[str, R] = {}
    for record in records:
        if record.mountpoint not in by_path or record.alive:
            by_path[record.mountpoint] = record
    try:
        reached = follow_symlinks(path, by_path)
    except OSError:  # a cycle of symlinks, outside of every mount
        return None
    while reached not in by_path:
        if reached == "/":
            return None
        reached = os.path.dirname(reached)
    return by_path[reached]


def follow_symlinks(path: str, stop_at: Container[str]) -> str:
    """Resolve the symlinks of the absolute `path` up to the first component that is in `stop_at`.

    Normalizes the rest without looking it up.  OSError (ELOOP) for a cycle of symlinks.
    """
    pending = _components(path)
    current = "/"
    links = 0
    while pending:
        name = pending.pop()
        if name == "..":
            current = os.path.dirname(current)
            continue
        current = os.path.join(current, name)
        if current in stop_at:
            return os.path.normpath(os.path.join(current, *reversed(pending)))
        try:
            target = os.readlink(current)
        except OSError:
            continue  # not a symlink, or it does not exist, which the caller finds out itself
        links += 1
        if links > _SYMLINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        current = "/" if os.path.isabs(target) else os.path.dirname(current)
        pending.extend(_components(target))
    return current


def _components(path: str) -> list[str]:
    """Split `path` into its names, last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


# -- records --------------------------------------------------------------------------------------
class QuickRecord:
    """The fields of a record that a command needs.  ValueError, KeyError, TypeError for an unusual record."""

    def __init__(self, members: dict[str, Any]) -> None:
        self.name: str = members["name"]
        self.mountpoint: str = members["mountpoint"]
        self.socket: str = members["socket"]
        self.version: str = members["version"]
        self._pid: int = members["pid"]
        self._start_ticks: int = members["pid_start_ticks"]
        if not (_NAME_CHARACTERS.issuperset(self.name) and isinstance(members["backend"], str)):
            raise ValueError("unusual record")
        for path in (self.mountpoint, self.socket):
            if "\\" in path or not path.isprintable():
                raise ValueError("unusual record")

    @property
    def alive(self) -> bool:
        return is_serving(self._pid, self._start_ticks, self.socket)


def record_paths() -> list[str]:
    """List the paths of all records, sorted.

    OSError if there is no runtime directory, or if it belongs to another user.
    """
    if runtime_dir() == in_tmp():
        check_owner(in_tmp())
    directory = socket_dir()
    names = sorted(os.listdir(directory))
    return [os.path.join(directory, name) for name in names if name.endswith(RECORD_SUFFIX) and name[0] != "."]


def read_record(path: str) -> QuickRecord:
    """Read one record.  OSError, or an error of `QuickRecord`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        data = os.read(descriptor, _RECORD_MAX_BYTES)
    finally:
        os.close(descriptor)
    import json  # noqa: PLC0415 start-up: other users of this module do not need it

    return QuickRecord(json.loads(data))
