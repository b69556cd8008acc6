"""The whole machine as the lower layer of an overlay: which file systems it has, and what is left out of it.

`overlay:/` shows the root file system and the other local file systems (`MachineParts.overlaid`).  In `vfsd run
--system` the rest is mounted over it, as `MachineParts.steps` say: `protocol.linux.private_mount` executes them.

No function here sends a request to a mount: one of them is the overlay's own.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from protocol.store.format.layout import default_directory
from vfsd.machine.directories import cache_directory, journals_directory
from vfsd.machine.mountinfo import Mount, is_at_or_below, mounts
from vfsd.machine.selection import PLACES, socket_dir

# Local file systems: their files are in the overlay.
_LOCAL: Final = re.compile(
    "bcachefs|btrfs|ecryptfs|exfat|ext[234]|f2fs|jfs|nilfs2|ntfs3|overlay|ramfs|tmpfs|ubifs|vfat|xfs|zfs"
)
_SHARED: Final = ("/dev", "/run", "/sys", "/tmp")  # noqa: S108 (a mountpoint)
_OWN_PROC: Final = "/proc"
# Left out of the overlay, because programs of the machine change them all the time.  `~` is each home directory.
LEFT_OUT: Final = (
    "/var/log",
    "~/.mozilla",
    "~/.config/google-chrome",
    "~/.config/chromium",
    "~/.config/BraveSoftware",
    "~/.config/microsoft-edge",
    "~/.cache/mozilla",
    "~/.cache/google-chrome",
    "~/.cache/chromium",
)


class MachineParts(NamedTuple):
    """Absolute paths without symlinks.

    `overlaid` are the mountpoints of local file systems other than the root, `read_only` those of all others, `shared`
    the directories that stay the machine's, `left_out` those with `LEFT_OUT`, `own` those with vfsd's own files.
    """

    overlaid: tuple[str, ...]
    read_only: tuple[str, ...]
    shared: tuple[str, ...]
    left_out: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def closed(self) -> list[str]:
        """The directories that the overlay shows as empty ones."""
        return [_OWN_PROC, *self.shared, *self.read_only, *self.left_out, *self.own]

    def steps(self, mountpoint: str, *, private_tmp: bool) -> list[tuple[str, str]]:
        """Return what to mount in the machine of a run, in order: the kind of the mount, and its path.

        `mountpoint` is that of the overlay, in vfsd's runtime directory, through which commands reach their workspace.
        """
        tmp, runtime = _SHARED[-1], os.path.realpath(socket_dir())
        shared = [path for path in self.shared if not (private_tmp and path == tmp)]
        is_root = os.geteuid() == 0
        # chmod -R and rm -r must not reach the machine's devices and kernel settings.
        kinds = {"/dev": "fixed", "/sys": "read-only"} if is_root else {}
        return [
            *(("read-only", path) for path in sorted(self.read_only)),
            *((kinds.get(path, "shared"), path) for path in shared),
            *(("changes", path) for path in self.left_out),
            *(("empty", path) for path in self.own if path != runtime),
            *([("tmp", tmp)] if private_tmp else []),
            *([("shared", runtime)] if not is_at_or_below(runtime, *shared) else []),
            ("empty", os.path.join(runtime, PLACES)),  # other runs
            ("workspace", os.path.realpath(mountpoint)),
            ("proc", _OWN_PROC),
        ]


def machine_parts(mountpoint: str) -> MachineParts:
    """Look at this machine's mounts; `mountpoint` is that of the overlay."""
    shared = [path for path in _SHARED if os.path.isdir(path) and not os.path.islink(path)]
    special = [_OWN_PROC, *shared]
    runtime = os.path.realpath(socket_dir())
    own = [runtime, *map(os.path.realpath, _own_directories())]
    overlaid: list[str] = []
    read_only: list[str] = []
    for mount in _visible(mounts()):
        path = mount.mountpoint
        above = max((top for top in ["/", *overlaid, *read_only] if is_at_or_below(path, top)), key=len)
        if path in ("/", mountpoint) or above in read_only or is_at_or_below(path, *special, *own):
            continue
        (overlaid if _LOCAL.fullmatch(mount.filesystem) else read_only).append(path)
    covered = [*special, *read_only]
    return MachineParts(
        overlaid=tuple(overlaid),
        read_only=tuple(read_only),
        shared=tuple(shared),
        left_out=tuple(path for path in _left_out() if not is_at_or_below(path, *covered)),
        own=tuple(dict.fromkeys(path for path in own if path == runtime or not is_at_or_below(path, *covered))),
    )


def _visible(found: Sequence[Mount]) -> list[Mount]:
    """Return the mounts that no later one covers, outer ones first."""
    seen: dict[str, Mount] = {}
    for mount in found:
        for path in [path for path in seen if is_at_or_below(path, mount.mountpoint)]:
            del seen[path]
        seen[mount.mountpoint] = mount
    return [seen[path] for path in sorted(seen)]


def _left_out() -> Iterator[str]:
    homes = [os.path.expanduser("~"), *(glob.glob("/home/*") if os.geteuid() == 0 else [])]
    for pattern in LEFT_OUT:
        for path in dict.fromkeys(pattern.replace("~", home) for home in homes):
            if os.path.isdir(path) and not os.path.islink(path):
                yield os.path.realpath(path)


def _own_directories() -> Iterator[str]:
    """List vfsd's directories that exist: journals, snapshots and what was fetched."""
    for path in (os.path.dirname(journals_directory()), default_directory(), cache_directory()):
        if os.path.isdir(path):
            yield path
