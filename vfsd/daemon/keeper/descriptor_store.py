"""systemd as the keeper of a mount: it holds the descriptors in its file descriptor store, and restarts the daemon.

A unit with FileDescriptorStoreMax= holds what its main process sends it with FDSTORE=1 (sd_notify(3)), and passes it to
the next start (sd_listen_fds(3)).  A daemon stores at least four descriptors, with the names "vfsd-ROLE.TOKEN":

    device     /dev/fuse, of the mount
    memory     the memory that a keeper and its daemon share (`kept`)
    log        what the kernel knows of the volume (`SharedLog`)
    saved      `_Saved`
    anchor     `Backend.anchor`, if there is one
    held       any number of other descriptors, which need only stay open (`Backend.held`)

Invariants:

1. A mount is continued only with the options that it was made with: others may serve another state.
2. A start continues one mount, or none.  It closes what it does not continue, and has systemd close it, too, so no
   program waits for a mount that nobody serves.
3. A daemon that continues a mount changes nothing in the store, so that systemd passes the same to the next one.

systemd closes the descriptor of a mount that was unmounted, and everything when the unit is stopped or fails for good.

Threading: before the serving loop runs, except for `hold` and `drop`, which do not block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import threading
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from protocol.linux.shared_log import SharedLog
from vfsd.daemon.keeper import keeping
from vfsd.daemon.keeper.kept import (
    DAEMON,
    DEATHS,
    DEATHS_MAX,
    RESTARTS,
    Kept,
    Resumed,
    deaths_in_a_row,
    shared_memory,
)
from vfsd.daemon.sd_notify import Notifier, passed_descriptors
from vfsd.machine import mounts
from vfsd.wire.options import LogOptions, encode_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)
FORMAT: Final = 1  # of the four descriptors; a mount with another one is not continued
ROLES: Final = ("memory", "log", "saved", "device")  # in this order: a group with a device is complete
_ANCHOR: Final = "anchor"
_HELD: Final = "held"
_PREFIX: Final = "vfsd-"
_STORE_SIZE: Final = "FDSTORE"  # set by systemd 254 and newer, if the unit has FileDescriptorStoreMax=
_SAVED_MAX_BYTES: Final = 1 << 20


class _Saved(msgspec.Struct, frozen=True):
    """What a mount was made with.  `negotiated`: as `ResumableEngine.resumable` returned it."""

    format: int
    mountpoint: str
    options: str
    negotiated: str


class _UnusableError(Exception):
    """A stored mount cannot be continued: why, as a clause."""


class DescriptorStore:
    """systemd's store as the holder of a mount.  Implements `vfsd.daemon.keeper.kept.Holder`.

    `predecessor`: the process that systemd considers the main one of the unit until it ends; messages of others do not
    count.  None: this process.
    """

    is_manager: Final = True

    def __init__(
        self, notifier: Notifier, options: MountOptions, token: str, fds: dict[str, int], predecessor: int | None = None
    ) -> None:
        self.pid = os.getppid()
        self._notifier = notifier
        self._options = options
        self._token = token
        self._fds = fds
        self._is_known = False
        self._predecessor = None if predecessor is None else os.pidfd_open(predecessor)
        self._is_over = False

    @property
    def names(self) -> dict[str, str]:
        """The name of each descriptor, by its role."""
        return {role: self._name(role) for role in ROLES}

    def _name(self, role: str) -> str:
        return f"{_PREFIX}{role}.{self._token}"

    def hold(self, saved: bytes, device: int, anchor: int | None, others: Sequence[int]) -> str | None:
        fds = {**self._fds, "saved": _saved(self._options, saved), "device": os.dup(device)}
        held = [(_HELD, os.dup(each)) for each in others]
        if anchor is not None:
            held.append((_ANCHOR, _readable(anchor)))
        if self._predecessor is None:
            return self._store(fds, held)
        threading.Thread(target=self._store_later, args=(self._predecessor, fds, held), daemon=True).start()
        return None

    def _store_later(self, predecessor: int, fds: dict[str, int], held: list[tuple[str, int]]) -> None:
        poll = select.poll()
        poll.register(predecessor, select.POLLIN)
        poll.poll()
        os.close(predecessor)
        if not self._is_over:
            self._store(fds, held)

    def _store(self, fds: dict[str, int], held: list[tuple[str, int]]) -> str | None:
        is_sent = all(self._notifier.store(self._name(role), each) for role, each in held)
        is_sent = is_sent and all(self._notifier.store(name, fds[role]) for role, name in self.names.items())
        for each in (fds["saved"], fds["device"], *(each for _, each in held)):
            os.close(each)
        if is_sent:
            return None
        self.drop()
        return "systemd did not take the descriptor of the mount: see the log"

    def drop(self) -> None:
        if not self._is_over:
            self._is_over = True
            for role in (*ROLES, _ANCHOR, _HELD):
                self._notifier.remove(self._name(role))

    def known(self) -> None:
        """Note that systemd has passed what is stored."""
        self._is_known = True

    def restarter(self) -> str | None:
        size = os.environ.get(_STORE_SIZE, "")
        if self._is_known or (size.isdecimal() and int(size) >= len(ROLES)):
            return "systemd"
        return "systemd, if its unit has Restart= and FileDescriptorStoreMax="


def _readable(anchor: int) -> int:
    """Return a descriptor of the same that can be polled, as systemd does: a directory with O_PATH cannot (EBADF)."""
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=anchor)
    except (PermissionError, NotADirectoryError):
        return os.dup(anchor)


def _identity(options: MountOptions) -> str:
    """What has to be the same in the daemon that continues the mount."""
    return encode_options(replace(options, log=LogOptions())).decode()


def _saved(options: MountOptions, negotiated: bytes) -> int:
    """Return a descriptor of a file in memory with `_Saved`."""
    saved = _Saved(FORMAT, options.workspace.mountpoint, _identity(options), negotiated.decode())
    descriptor = os.memfd_create("vfsd-saved", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(saved))
    return descriptor


# -- the start of a daemon ---------------------------------------------------------------------------
def kept_by_systemd(options: MountOptions) -> Kept | None:
    """Return what this daemon, which systemd started, has of systemd as its keeper; None if it is to have none.

    Takes over the mount of a daemon that died, if systemd passes one that can be continued.
    """
    notifier = Notifier.from_environment()
    groups = _groups(passed_descriptors())
    is_wanted = notifier.address is not None and keeping.is_wanted(options)
    kept: Kept | None = None
    for token, fds in groups.items():
        reason = "this start does not ask for a keeper"
        if is_wanted and kept is None:
            try:
                kept = _continued(options, notifier, token, fds)
            except _UnusableError as error:
                reason = str(error)
            else:
                continue
        _drop(options, notifier, token, fds, reason)
    if kept is None and is_wanted:
        return new_kept(options)
    return kept


def new_kept(options: MountOptions, predecessor: int | None = None) -> Kept | None:
    """Return what a daemon that makes or takes over a mount has of systemd; None if it is to have no keeper.

    `predecessor`: the daemon that this one replaces in an upgrade.
    """
    notifier = Notifier.from_environment()
    if notifier.address is None or not keeping.is_wanted(options):
        return None
    memory_fd, memory = shared_memory()
    log = SharedLog.create()
    fds = {"memory": memory_fd, "log": log.descriptor}
    holder = DescriptorStore(notifier, options, secrets.token_hex(8), fds, predecessor)
    return Kept(holder, memory, memory_fd, log, None)


def _groups(passed: list[tuple[str, int]]) -> dict[str, dict[str, int]]:
    """Return the descriptors that are of this module, by token and role."""
    groups: dict[str, dict[str, int]] = {}
    for name, descriptor in passed:
        role, _, token = name.removeprefix(_PREFIX).partition(".")
        if not name.startswith(_PREFIX):
            continue
        if role in (*ROLES, _ANCHOR):
            groups.setdefault(token, {})[role] = descriptor
        elif role == _HELD:
            os.close(descriptor)  # systemd still has it
    return groups


def _continued(options: MountOptions, notifier: Notifier, token: str, fds: dict[str, int]) -> Kept:
    """Continue a mount of a daemon that died.  _UnusableError if that is impossible."""
    if not fds.keys() >= set(ROLES):
        raise _UnusableError("systemd holds only a part of it")
    try:
        saved = msgspec.json.decode(os.pread(fds["saved"], _SAVED_MAX_BYTES, 0), type=_Saved)
    except msgspec.DecodeError as error:
        raise _UnusableError("another version of vfsd made it") from error
    if saved.format != FORMAT:
        raise _UnusableError("another version of vfsd made it")
    if saved.options != _identity(options):
        raise _UnusableError("the options of the unit have changed")
    device = fds["device"]
    poll = select.poll()
    poll.register(device, 0)
    if poll.poll(0):  # POLLERR: fuse_dev_poll, fs/fuse/dev.c
        raise _UnusableError("it was unmounted")
    _, memory = shared_memory(fds["memory"])
    deaths = memory[DEATHS] = deaths_in_a_row(memory, memory[DEATHS])
    if deaths >= DEATHS_MAX:
        raise _UnusableError(f"its daemon died {deaths} times in a row without answering a request")
    memory[RESTARTS] += 1
    _logger.error("the daemon before died: this one continues its mount", extra={"operation": "keep"})
    keeping.release_stuck(memory[DAEMON], device, fds["memory"])
    holder = DescriptorStore(notifier, options, token, fds)
    holder.known()
    os.close(fds["saved"])
    log = SharedLog(fds["log"])
    resumed = Resumed(device, saved.negotiated.encode(), memory[RESTARTS], fds.get(_ANCHOR))
    return Kept(holder, memory, fds["memory"], log, resumed, _noted_signals())


def _noted_signals() -> Callable[[], int | None]:
    """Note signals to end until the daemon handles them: programs wait for this mount, so it must be unmounted."""
    noted: list[int] = []
    for number in keeping.TO_END:
        signal.signal(number, lambda number, _frame: noted.append(number))
    return lambda: noted[-1] if noted else None


def _drop(options: MountOptions, notifier: Notifier, token: str, fds: dict[str, int], reason: str) -> None:
    """Give up a stored mount, so that its programs get ENOTCONN."""
    _logger.warning("the mount of the daemon before is not continued: %s", reason, extra={"operation": "keep"})
    mountpoint = None
    if "saved" in fds:
        with contextlib.suppress(msgspec.DecodeError):
            mountpoint = msgspec.json.decode(os.pread(fds["saved"], _SAVED_MAX_BYTES, 0), type=_Saved).mountpoint
    DescriptorStore(notifier, options, token, {}).drop()
    for descriptor in fds.values():
        os.close(descriptor)
    notifier.wait_processed()
    if mountpoint is not None and mountpoint != options.workspace.mountpoint:
        with contextlib.suppress(OSError):  # at its own mountpoint the start clears it
            mounts.clear_dead_mount(mountpoint)
