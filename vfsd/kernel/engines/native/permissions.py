"""Who may enter a mount, and so whether the kernel has to check permissions in it (`default_permissions`).

Checking costs a request: whatever changes a directory makes the kernel forget all attributes of it, so that before the
next change there it asks for mode and owner (fuse_permission, fs/fuse/dir.c).  Without `allow_other` the kernel lets
in only processes of which every uid and gid is the mount's owner's (fuse_allow_current_process).  Where that is root
there is nothing to check: root may do everything but execute what nobody may, and that the kernel checks all the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from vfsd.kernel.engines.base import EngineSettings

__all__ = ["is_omnipotent", "needs_checks"]

# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID (linux/capability.h): what makes root root to a file system.
_CAPABILITIES: Final = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4
_ALL_IDS: Final = ["0", "0", str(2**32 - 1)]


def needs_checks(settings: EngineSettings) -> bool:
    """Whether the kernel must check permissions in a mount that this process makes with `settings`."""
    return settings.allow_other or os.geteuid() != 0 or not is_omnipotent()


def is_omnipotent(proc: Path = Path("/proc/self")) -> bool:
    """Whether root, as which this process runs, is what root means: with its capabilities, and in no user namespace.

    Its clients are of its kind; one that gave capabilities up can still ask the daemon itself for everything.
    """
    try:
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        mapped = (proc / "uid_map").read_text().split()
        return int(fields["CapEff"], 16) & _CAPABILITIES == _CAPABILITIES and mapped == _ALL_IDS
    except (OSError, KeyError, ValueError):
        return False  # no /proc that says so
