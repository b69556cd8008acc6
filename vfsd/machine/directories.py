"""The user's directories: journals and the cache, what they take on disk, and the commands for a journal."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from typing import Final, NamedTuple

_FOR_ROOT: Final = "/var/lib/vfsd/journals"


def journals_directory() -> str:
    """$XDG_STATE_HOME/vfsd/journals, else /var/lib/vfsd/journals for root, else ~/.local/state/vfsd/journals."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    if not os.path.isabs(state):
        if os.geteuid() == 0:
            return _FOR_ROOT
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "vfsd", "journals")


def journal_directory(name: str) -> str:
    """Return the directory of the journal of workspace `name`, unless it was mounted with another one."""
    return os.path.join(journals_directory(), name)


def disk_bytes(directory: str) -> int:
    """Return the disk space of the files below `directory`, in bytes; 0 for what cannot be read."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


class DiskUse(NamedTuple):
    """The space that this user's workspaces take on disk, in bytes."""

    journals_bytes: int
    store_bytes: int


def disk_use() -> DiskUse:
    """Return what the journals and the default store of snapshots take.  Any thread."""
    from protocol.store.format.layout import default_directory  # noqa: PLC0415 start-up: few callers need it

    return DiskUse(disk_bytes(journals_directory()), disk_bytes(default_directory()))


def mount_command(
    name: str, directory: str, *, mountpoint: str, backend: str, store_options: Sequence[str] = ()
) -> str:
    """Return the command that continues the journal of workspace `name` in `directory`.

    `store_options` are those of --store-option.  A workspace that was mounted with more options, such as --exclude,
    needs these as well.
    """
    words = ["vfsd", "mount", mountpoint, "--persist", "--name", name]
    if directory != journal_directory(name):
        words += ["--journal-dir", directory]
    if backend != "memory":
        words += ["--backend", backend]
    words += [word for option in store_options for word in ("--store-option", option)]
    return shlex.join(words)


def drop_command(name: str, directory: str) -> str:
    """Return the command that removes the journal of workspace `name` in `directory`."""
    elsewhere = directory != journal_directory(name)
    return f"vfsd persisted drop {f'--journal-dir {shlex.quote(directory)}' if elsewhere else name}"


def journal_names() -> list[str]:
    """Return the names of the directories in `journals_directory`."""
    try:
        return sorted(os.listdir(journals_directory()))
    except FileNotFoundError:
        return []


def bases_of_journals() -> dict[str, str]:
    """Return, by fingerprint, why to keep each snapshot that a journal is over.

    Without the snapshot, the journal cannot be mounted.  Journals that --journal-dir put elsewhere are not found, and
    neither are journals whose header is damaged.
    """
    # Start-up: few callers need it.
    from protocol.journal.directory import read_identity  # noqa: PLC0415

    found: dict[str, str] = {}
    for name in journal_names():
        with contextlib.suppress(OSError):
            identity = read_identity(journal_directory(name))
            if (below := identity.get("below")) is not None:
                found[str(below)] = f"below the journal {name}"
    return found


def journal_backend(directory: str) -> str | None:
    """Return the backend of the workspace of a journal, escaped as a wire path; None if it cannot be read.

    The argument is known for overlays only, and other workspaces in memory have none.
    """
    # Start-up: few callers need it.
    from protocol.journal.directory import read_identity  # noqa: PLC0415
    from vfsd.wire.messages import wire_path  # noqa: PLC0415

    try:
        identity = read_identity(directory)
    except OSError:
        return None
    argument = str(identity.get("argument", ""))
    if not identity.get("escaped"):
        argument = wire_path(os.fsencode(argument))
    return f"{identity.get('backend')}:{argument}" if argument else str(identity.get("backend"))


def is_frozen(directory: str) -> bool:
    """Return whether the journal is of a frozen overlay: over a snapshot of a directory."""
    # Start-up, as above.
    from protocol.journal.directory import read_identity  # noqa: PLC0415
    from protocol.store.trees import root_of  # noqa: PLC0415
    from vfsd.wire.options import BackendSpec  # noqa: PLC0415

    try:
        below = str(read_identity(directory).get("below"))
    except OSError:
        return False
    is_over_directory = BackendSpec.split(journal_backend(directory) or "").lower_layer == "directory"
    return is_over_directory and root_of(below) is not None


def unused_journal(name: str) -> str | None:
    """Return a sentence about a journal of this name, which this mount does not continue; None if there is none."""
    if not os.path.isdir(journal_directory(name)):
        return None
    return (
        f"{name} has a journal of an earlier workspace, which this one does not use: to continue the earlier one,"
        " unmount, and mount with --persist"
    )


def cache_directory() -> str:
    """$XDG_CACHE_HOME/vfsd, else ~/.cache/vfsd."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG base directory specification: a relative path is ignored
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "vfsd")
