"""The runtime directory: the control socket and the record of each workspace, and how to find a workspace.

Nothing here waits for a mount, so `vfsd list` does not hang on a mount whose daemon does not answer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

import msgspec

from protocol.errors import NotMountedError
from protocol.linux.regular_file import read_regular, write_atomically
from vfsd.machine.directories import journal_backend, journal_directory, mount_command
from vfsd.machine.mountinfo import Mount, find_mount, unmounting_command, vfsd_mounts
from vfsd.machine.selection import (
    PLACES,
    RECORD_SUFFIX,
    RUNTIME_VARIABLE,
    WORKSPACE_VARIABLE,
    check_owner,
    containing,
    in_tmp,
    is_path_selector,
    is_serving,
    process_start_ticks,
    runtime_dir,
    selected,
    socket_dir,
)
from vfsd.operations.forks import Ancestor
from vfsd.wire.messages import from_wire_path, wire_path
from vfsd.wire.options import NAME_PATTERN, BackendSpec

__all__ = ["RUNTIME_VARIABLE", "WORKSPACE_VARIABLE", "process_start_ticks", "runtime_dir", "socket_dir"]

_RECORD_MAX_BYTES: Final = 256 * 1024  # three paths of PATH_MAX with every byte escaped
_NAME_LENGTH: Final = 64  # of NAME_PATTERN
_RESTART_TIMEOUT_S: Final = 10.0  # a workspace of 100,000 files takes 2 s
_RESTART_POLL_S: Final = 0.02

_logger = logging.getLogger(__name__)


# -- the directory ------------------------------------------------------------------------------------
def ensure_socket_dir() -> str:
    """Create `socket_dir()` with mode 0700, and return it.

    PermissionError if it belongs to another user or is a symlink: everybody can write to /tmp, and another user who
    created the directory first would control the sockets.
    """
    base, path = runtime_dir(), socket_dir()
    if base == in_tmp():
        _ensure_private(base)
    else:
        os.makedirs(base, mode=0o700, exist_ok=True)
    _ensure_private(path)
    return path


def _ensure_private(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    check_owner(path)
    if stat.S_IMODE(os.lstat(path).st_mode) & 0o077:
        os.chmod(path, 0o700)


def socket_path(name: str) -> str:
    """Return the path of the control socket of workspace `name`.  ValueError for an invalid name."""
    return os.path.join(socket_dir(), _checked(name) + ".sock")


def record_path(name: str) -> str:
    """Return the path of the record of workspace `name`.  ValueError for an invalid name."""
    return os.path.join(socket_dir(), _checked(name) + RECORD_SUFFIX)


def _checked(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"not a workspace name: {name!r} (letters, digits, '.', '_', '-'; at most {_NAME_LENGTH})")
    return name


# -- records ------------------------------------------------------------------------------------------
class WorkspaceRecord(msgspec.Struct, frozen=True):
    """The file by which other processes find a running daemon.

    Paths are absolute, decoded with `os.fsdecode`; the file contains them as wire paths.  `started_at` is ISO 8601 in
    UTC.
    """

    name: str
    mountpoint: str
    pid: int
    # Field 22 of /proc/<pid>/stat.  A pid is reused, but not together with its start time.
    pid_start_ticks: int
    backend: str
    started_at: str
    version: str
    socket: str
    forked_from: str | None = None  # the name of the workspace that this one is a fork of
    journal: str | None = None  # the directory of its journal
    instance: str = ""  # of the daemon: see `vfsd.daemon.merging.lineage`
    ancestors: tuple[Ancestor, ...] = ()
    # The process that restarts the daemon if it dies, and when that process was started.
    keeper: int | None = None
    keeper_start_ticks: int = 0
    store_options: tuple[str, ...] = ()  # of the object store below it
    replaces: int = 0  # the process that handed the workspace over to this daemon in an upgrade, and its version
    upgraded_from: str = ""
    failure: str | None = None  # why the daemon, which died, was not restarted: a clause
    lost_keeper: tuple[str, str] | None = None  # why the keeper could not restart the daemon any more, and what to do

    @property
    def alive(self) -> bool:
        """Whether the daemon is running."""
        return is_serving(self.pid, self.pid_start_ticks, self.socket)

    @property
    def is_attached(self) -> bool:
        """Whether the workspace is the directory itself, without a mount; none is mounted over what it serves."""
        return self.backend == f"host:{self.mountpoint}"

    @property
    def is_kept(self) -> bool:
        """Whether a keeper is running, which restarts the daemon if it dies."""
        return self.keeper is not None and process_start_ticks(self.keeper) == self.keeper_start_ticks

    @property
    def state(self) -> Literal["alive", "dead"]:
        return "alive" if self.alive else "dead"

    @property
    def content_after_crash(self) -> str:
        """A clause that states where the content is after the daemon died."""
        if self.journal is not None:
            return f"its content is in the journal {self.journal}: `{self.continuing(self.journal)}` continues it"
        backend = BackendSpec.split(self.backend)
        if backend.kind == "exec":
            return f"its content is at the other end of `{backend.argument}`"
        if backend.kind in {"host", "container"}:
            return f"its content is in {'the container ' if backend.kind == 'container' else ''}{backend.argument}"
        if backend.kind == "image":
            return "its content is in its container, where the same `vfsd mount` continues"
        return "its content is lost"

    def continuing(self, journal: str) -> str:
        """The command that continues the workspace from the journal in this directory."""
        return mount_command(
            self.name, journal, mountpoint=self.mountpoint, backend=self.backend, store_options=self.store_options
        )

    def check_alive(self) -> None:
        """Raise ConnectionRefusedError, with advice, if the daemon is dead."""
        if not self.alive:
            advice = f"`vfsd unmount {self.name}` removes the mount, `vfsd mount` at the same path replaces it"
            if self.is_attached:
                advice = f"`vfsd attach {shlex.quote(self.mountpoint)}` attaches it again, with its snapshots"
            what = f"the daemon of {self.name} is dead" + (f" ({self.failure})" if self.failure else "")
            if self.is_kept:
                who = f"its keeper (process {self.keeper}) is starting another one"
                advice = "repeat the command, or end the keeper first"
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"{what}, and {who}: {advice}")
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{what}, and {self.content_after_crash}; {advice}")


_PATH_FIELDS: Final = ("mountpoint", "backend", "socket", "journal")


def write_record(record: WorkspaceRecord) -> None:
    """Write the record atomically: readers see the old one or the new one."""
    paths = {field: getattr(record, field) for field in _PATH_FIELDS}
    as_wire = {field: wire_path(os.fsencode(path)) for field, path in paths.items() if path is not None}
    data = msgspec.json.encode(msgspec.structs.replace(record, **as_wire))
    write_atomically(record_path(record.name), data + b"\n", durable=False)


def note_failure(name: str, reason: str) -> None:
    """Note in the record of a workspace whose daemon died why it was not restarted.  OSError."""
    record = read_record(name)
    if record is not None and not record.alive:
        write_record(msgspec.structs.replace(record, failure=reason))


def remove_record(record: WorkspaceRecord) -> None:
    """Remove the record, unless another daemon has replaced it with its own."""
    path = record_path(record.name)
    found = _read(path)
    if found is not None and (found.pid, found.pid_start_ticks) == (record.pid, record.pid_start_ticks):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def read_records() -> list[WorkspaceRecord]:
    """Read all records, including those of dead daemons, sorted by name.  Logs and omits unreadable ones.

    PermissionError if another user created our directory in /tmp: its sockets are that user's too.
    """
    directory = socket_dir()
    try:
        if runtime_dir() == in_tmp():
            check_owner(in_tmp())
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    paths = [os.path.join(directory, name) for name in names if name.endswith(RECORD_SUFFIX) and name[0] != "."]
    return [record for path in paths if (record := _read(path)) is not None]


def family(name: str, forked_from: str | None, records: Iterable[WorkspaceRecord]) -> list[str]:
    """Return the running workspaces of `records` that may have a state in common with the workspace `name`.

    These are its forks, its source, and the forks of that.
    """
    own = {name, forked_from} - {None}
    others = [record for record in records if record.alive and record.name != name]
    return [record.name for record in others if record.name in own or record.forked_from in own]


def read_record(name: str) -> WorkspaceRecord | None:
    """Read the record of workspace `name`; None if there is none.  Logs an unreadable one.  ValueError for an invalid
    name."""
    return _read(record_path(name))


def check_instance(socket: str, instance: str) -> None:
    """Raise NotMountedError if the control socket is of another workspace than `instance` by now; "" is any."""
    if instance and instance_at(socket) not in ("", instance):
        raise NotMountedError(socket, "unmounted meanwhile, and another workspace has its name now")


def instance_at(socket: str) -> str:
    """The identity of the workspace whose control socket has the path `socket`; "" if its record cannot be read.

    It stays the same in an upgrade and a restart by a keeper, and if the next mount continues a journal or a directory.
    """
    record = _read(socket.removesuffix(".sock") + RECORD_SUFFIX)
    return "" if record is None else record.instance


def _read(path: str) -> WorkspaceRecord | None:
    try:
        record = msgspec.json.decode(read_regular(path, _RECORD_MAX_BYTES), type=WorkspaceRecord)
        _checked(record.name)
        as_wire = {field: getattr(record, field) for field in _PATH_FIELDS}
        paths = {field: os.fsdecode(from_wire_path(path)) for field, path in as_wire.items() if path is not None}
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, ValueError) as error:
        _logger.warning("cannot read the workspace record %s: %s", path, error)
        return None
    return msgspec.structs.replace(record, **paths)


# -- finding a workspace ------------------------------------------------------------------------------
class WorkspaceNotFoundError(LookupError):
    """No workspace matches, or more than one; the message lists the workspaces and says what to type."""


def find_workspace(
    selector: str | None,
    cwd: str,
    *,
    environ: Mapping[str, str] = os.environ,
    paths: Iterable[str] = (),
    on_only: Callable[[WorkspaceRecord], object] | None = None,
) -> WorkspaceRecord:
    """Find the workspace that `selector` means: its name, or a path of its mountpoint or below.

    Without a selector: $VFSD_WORKSPACE, else the workspace that contains `cwd` (absolute), else the one that contains
    one of the absolute `paths`.  A caller that only reads passes `on_only`: then the only running workspace is found if
    there is no other way, and `on_only` is called with it.  Finds dead workspaces by name or path, so that the caller
    can report that the daemon died.  WorkspaceNotFoundError if there is none.
    """
    records = read_records()
    found = selected(selector, cwd, records, environ)
    if found is None and not (selector or environ.get(WORKSPACE_VARIABLE)):
        found = next(filter(None, (containing(path, records) for path in paths if os.path.isabs(path))), None)
    if found is not None:
        return _restarted(found)
    if selector:
        raise _not_found(selector, cwd, records, "")
    if environ.get(WORKSPACE_VARIABLE):
        raise _not_found(environ[WORKSPACE_VARIABLE], cwd, records, f" (from ${WORKSPACE_VARIABLE})")
    running = [record for record in records if record.alive]
    if len(running) == 1 and on_only is not None:
        on_only(running[0])
        return running[0]
    if running:
        where = "the current directory is in no workspace"
        advice = f"pick one with -w NAME, -w PATH or ${WORKSPACE_VARIABLE}"
        raise WorkspaceNotFoundError(f"{where}: {advice}; {_describe_all(records)}")
    raise WorkspaceNotFoundError(_describe_all(records))


def is_restarted(socket: str) -> bool:
    """Wait until the daemon at the path `socket`, which died, has a replacement.  False if no keeper starts one."""
    record = read_record(os.path.basename(socket).removesuffix(".sock"))
    return record is not None and record.is_kept and _restarted(record).alive


def _restarted(record: WorkspaceRecord) -> WorkspaceRecord:
    """Wait until a daemon that died has a replacement, if its keeper starts one; return the newest record."""
    deadline = time.monotonic() + _RESTART_TIMEOUT_S
    while not record.alive and record.is_kept and time.monotonic() < deadline:
        time.sleep(_RESTART_POLL_S)
        record = read_record(record.name) or record
    return record


def _not_found(selector: str, cwd: str, records: list[WorkspaceRecord], origin: str) -> WorkspaceNotFoundError:
    is_path = is_path_selector(selector)
    if (lost := _lost_mount(selector, os.path.join(cwd, selector) if is_path else None)) is not None:
        return WorkspaceNotFoundError(f"{lost.describe()} at {lost.mountpoint} has {no_socket(lost)}")
    reason = "in no workspace" if is_path else f"not the name of a workspace (write a path as ./{selector})"
    if not is_path and NAME_PATTERN.fullmatch(selector) and os.path.isdir(journal_directory(selector)):
        directory = journal_directory(selector)
        backend = journal_backend(directory) or "BACKEND"
        mount = mount_command(selector, directory, mountpoint="DIRECTORY", backend=backend)
        kept = f"its journal is kept: `{mount}` continues it, `vfsd persisted drop {selector}` removes it"
        return WorkspaceNotFoundError(f"{selector}{origin} is not running; {kept}")
    import difflib  # noqa: PLC0415 (start-up: only errors need it)

    similar = difflib.get_close_matches(selector, [record.name for record in records])
    hint = f"did you mean {' or '.join(similar)}? " if similar else ""
    return WorkspaceNotFoundError(f"{selector!r}{origin} is {reason}; {hint}{_describe_all(records)}")


def _lost_mount(name: str, path: str | None) -> Mount | None:
    """Return the vfsd mount of that name, or that contains `path`.  No record of the runtime directory names it."""
    if path is None:
        return next((mount for mount in vfsd_mounts() if mount.workspace == name), None)
    try:
        mount = find_mount(path)
    except OSError:  # a cycle of symlinks
        return None
    return mount if mount is not None and mount.is_vfsd else None


def no_socket(mount: Mount) -> str:
    """Describe a mount without a record: "no control socket in ...", and what to do."""
    unmount = f"unmount it, without a check for unsaved changes, with `{unmounting_command(mount.mountpoint)}`"
    return f"no control socket in {socket_dir()}: set ${RUNTIME_VARIABLE} as it was set for the mount, or {unmount}"


def _describe_all(records: list[WorkspaceRecord]) -> str:
    running = [record for record in records if record.alive]
    if running:
        return f"running: {_listed(running)}"
    dead = [record for record in records if not record.alive]
    text = "no workspace is running, start one with: vfsd mount MOUNTPOINT"
    return f"{text} (dead: {_listed(dead)})" if dead else text


def _listed(records: Iterable[WorkspaceRecord]) -> str:
    return ", ".join(f"{record.name} ({record.mountpoint})" for record in records)


# -- names --------------------------------------------------------------------------------------------
def unique_name(base: str, is_taken: Callable[[str], bool] = lambda _: False) -> str:
    """Derive a workspace name from the last component of the mountpoint `base`, with a number if the name is taken.

    `is_taken` says so of further names.  The name of a dead workspace is taken too, except for a new workspace at the
    same mountpoint, which replaces it.
    """
    base = os.path.normpath(base)
    fitting = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(base))
    name = fitting.lstrip("._-")[:_NAME_LENGTH] or "workspace"
    number, candidate = 1, name
    while is_taken(candidate) or (
        (record := read_record(candidate)) is not None and (record.alive or record.mountpoint != base)
    ):
        number += 1
        candidate = f"{name[: _NAME_LENGTH - len(str(number)) - 1]}-{number}"
    return candidate


# -- mountpoints that vfsd makes itself, in the runtime directory, and removes after the unmount -------
def make_place(base: str, outside: str) -> str:
    """Make an empty directory for a mount, and return its path.

    Its last component is a name that neither a workspace nor a journal has.

    `base` is the beginning of the name.  `outside` is a directory that the mount will show, so the mountpoint must not
    be in it: OSError (EINVAL).  The root directory is shown without the mounts in it.
    """
    parent = os.path.join(ensure_socket_dir(), PLACES)
    real = os.path.realpath(parent)
    if outside != "/" and os.path.commonpath((real, os.path.realpath(outside))) == os.path.realpath(outside):
        reason = "it contains vfsd's runtime directory: set $VFSD_RUNTIME_DIR to a directory outside of it"
        raise OSError(errno.EINVAL, reason, outside)
    os.makedirs(parent, mode=0o700, exist_ok=True)

    def is_taken(name: str) -> bool:  # also by an earlier run whose journal was kept
        return os.path.lexists(journal_directory(name)) or os.path.lexists(os.path.join(parent, name))

    while True:
        path = os.path.join(parent, unique_name(f"/{base}", is_taken))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            return path


def is_own_place(path: str) -> bool:
    """Return whether vfsd made the mountpoint `path`."""
    directory = socket_dir()
    return os.path.dirname(path) in {os.path.join(each, PLACES) for each in (directory, os.path.realpath(directory))}


def remove_place(path: str) -> None:
    """Remove the mountpoint `path` if vfsd made it and nothing is mounted there or in it."""
    if is_own_place(path):
        with contextlib.suppress(OSError):
            os.rmdir(path)
