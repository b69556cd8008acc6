"""The journals of this user's workspaces: where they are."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

_FOR_ROOT: Final = "/var/lib/vfsd/journals"


def journals_directory(environ: Mapping[str, str] = os.environ) -> str:
    """$XDG_STATE_HOME/vfsd/journals, else /var/lib/vfsd/journals for root, else ~/.local/state/vfsd/journals."""
    state = environ.get("XDG_STATE_HOME", "")
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    if not os.path.isabs(state):
        if os.geteuid() == 0:
            return _FOR_ROOT
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "vfsd", "journals")


def journal_directory(name: str) -> str:
    """Return the directory of the journal of workspace `name`, unless it was mounted with another one."""
    return os.path.join(journals_directory(), name)


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


def unused_journal(name: str) -> str | None:
    """Return a sentence about a journal of this name, which this mount does not continue; None if there is none."""
    if not os.path.isdir(journal_directory(name)):
        return None
    return (
        f"{name} has a journal of an earlier workspace, which this one does not use: to continue the earlier one,"
        " unmount, and mount with --persist"
    )
