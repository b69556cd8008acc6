"""Permission, set-id, xattr and time policy that the engines share.

When to leave permissions unchecked: a mount with `default_permissions` costs requests, because every change in a
directory makes the kernel drop the directory's attributes, and it asks for mode and owner before the next change there
(fuse_permission, fs/fuse/dir.c).  Without `allow_other` the kernel admits only processes whose uids and gids all equal
the mount owner's (fuse_allow_current_process).  If that owner is root, nothing needs checking: root may do everything
except execute a file without execute bits, and the kernel checks that itself.

Set-id bits: the kernel negotiates that the file system clears S_ISUID and S_ISGID when an unprivileged process changes
content.  A request carries no capabilities, so uid 0 stands for CAP_FSETID.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from protocol.volume import AttributeChanges, Attributes
from vfsd.kernel.engines.base import EngineSettings

PERMISSIONS: Final = 0o7777
ACL_ACCESS: Final = b"system.posix_acl_access"
_SET_ID: Final = stat.S_ISUID | stat.S_ISGID
_EXECUTABLE: Final = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID (linux/capability.h): root's powers over files.
_CAPABILITIES: Final = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4
_ALL_IDS: Final = ["0", "0", str(2**32 - 1)]


def needs_checks(settings: EngineSettings) -> bool:
    """Whether the kernel must check permissions in a mount that this process makes with `settings`."""
    return settings.allow_other or os.geteuid() != 0 or not is_omnipotent()


def is_omnipotent(proc: Path = Path("/proc/self")) -> bool:
    """Whether root, the user of this process, has root's capabilities and runs in no user namespace.

    The same is assumed of the mount's clients: a client that dropped capabilities can still ask the daemon itself for
    everything.
    """
    try:
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        mapped = (proc / "uid_map").read_text().split()
        return int(fields["CapEff"], 16) & _CAPABILITIES == _CAPABILITIES and mapped == _ALL_IDS
    except (OSError, KeyError, ValueError):
        return False  # /proc is missing, or incomplete


def is_executable(mode: int) -> bool:
    """Whether root may execute an inode of this mode, or search it."""
    return stat.S_ISDIR(mode) or bool(mode & _EXECUTABLE)


def may_keep_set_id(uid: int) -> bool:
    """Whether set-id bits stay when user `uid` changes content."""
    return uid == 0


def has_set_id(mode: int) -> bool:
    """Whether `mode` has a set-id bit that a change of content may have to clear."""
    return bool(mode & _SET_ID)


def clear_set_id(found: Attributes) -> AttributeChanges:
    """Return the change that clears the set-id bits of `found` after its content was changed; ctime stays."""
    return AttributeChanges(kill_privileges=True, ctime_ns=found.ctime_ns)


def clear_sgid(found: Attributes) -> AttributeChanges | None:
    """Return the change that clears S_ISGID after an access ACL was set; None if the bit is not set."""
    if not found.mode & stat.S_ISGID:
        return None
    return AttributeChanges(mode=stat.S_IMODE(found.mode) & ~stat.S_ISGID)


def visible_xattrs(names: Sequence[bytes], uid: int) -> Sequence[bytes]:
    """Return the names that listxattr(2) shows to user `uid`: names in "trusted." only to root.

    Source: simple_xattr_list, fs/xattr.c.
    """
    return names if uid == 0 else [name for name in names if not name.startswith(b"trusted.")]
