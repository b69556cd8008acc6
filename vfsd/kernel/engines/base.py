"""Engine: what serves a volume to the kernel.  The contract that `pyfuse3` and `native` both keep.

Threading: `mount`, `serve`, `stop`, `drained` and `unmount` run on the trio loop's thread.
`invalidate_inode` and `invalidate_entry` block until the kernel has done it, and the kernel may
wait for a request that the loop must answer first: call them from any other thread, never from the loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from protocol.volume import Volume

__all__ = ["Engine", "EngineSettings", "Impersonator"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How to mount.  `cache_timeout_s` is how long the kernel may keep names and attributes without asking.

    Without `xattrs` the mount has no extended attributes and no ACLs (EOPNOTSUPP), and the kernel asks for none: not
    for a file's capabilities before it is first written, nor for `ls -l` and `cp -a`.
    """

    mountpoint: str
    name: str  # the mount's source is "vfsd:<name>", its type "fuse.vfsd"
    read_only: bool = False
    allow_other: bool = False
    cache_timeout_s: float = math.inf
    xattrs: bool = True


class Impersonator(Protocol):
    """Answers the requests of one thread otherwise than the volume does (see `vfsd.kernel.inotify_replay`).

    A request whose pid (the kernel gives the thread's id) equals `thread_id` goes to `volume`; what that
    answers is not cached by the kernel.  `thread_id` is 0 while there is no such thread.
    Only lookup, getattr, setattr, mknod, mkdir, symlink, link, unlink, rmdir and rename are asked of it.
    """

    @property
    def thread_id(self) -> int: ...

    @property
    def volume(self) -> Volume: ...


class Engine(Protocol):
    """Serves one volume at one mount point."""

    @property
    def name(self) -> str:
        """ "pyfuse3" or "native"."""
        ...

    @property
    def fallback_reason(self) -> str | None:
        """Why this engine serves although another was to be preferred, or None."""
        ...

    @property
    def requests(self) -> int:
        """How many requests were answered so far."""
        ...

    def mount(self) -> None:
        """Make the mount.  The kernel's requests wait until `serve` runs.  OSError, with what libfuse said."""
        ...

    async def serve(self) -> None:
        """Answer requests until the file system is unmounted or `stop` is called.

        A failing request becomes an errno (unexpected: EIO, logged once with its traceback), never an exception.
        """
        ...

    def stop(self) -> None:
        """Make `serve` return soon."""
        ...

    def unmount(self) -> None:
        """Release the session, and unmount where that has not happened yet.  Idempotent."""
        ...

    async def drained(self) -> None:
        """Return when all requests that the kernel had handed out at the time of the call are answered.

        After syncfs(2) has started writing back the dirty pages of shared mappings, this is what makes
        sure that they are in the volume.
        """
        ...

    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        """Make the kernel forget the attributes of `inode`, and with `content` its pages."""
        ...

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Make the kernel forget what it knows of `name` in `parent`, presence or absence."""
        ...
