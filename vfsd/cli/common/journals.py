"""The stored snapshots that the journals of this user need (`vfsd mount --persist --backend overlay:snapshot:NAME`)."""

from __future__ import annotations

import contextlib

from protocol.journal.directory import read_identity
from vfsd.machine.directories import journal_directory, journal_names


def bases_of_journals() -> dict[str, str]:
    """Return a reason to keep a snapshot, by its fingerprint: no journal that is over it could be mounted without it.

    Journals that --journal-dir put elsewhere are not found.  Nothing can be read from one whose header is damaged.
    """
    found: dict[str, str] = {}
    for name in journal_names():
        with contextlib.suppress(OSError):
            identity = read_identity(journal_directory(name))
            if (below := identity.get("below")) is not None:
                found[str(below)] = f"below the journal {name}"
    return found
