"""Inotify events for the changes of a restore or an import.

FUSE's invalidations raise no inotify events.  So a worker thread repeats the changes as ordinary system calls on the
mount.  The volume has changed already and must not change again, so an `Impersonator` answers that thread's requests:

- A name that was removed: LOOKUP returns a ghost, an inode that exists nowhere, and UNLINK or RMDIR succeeds.  The old
  inode would not do: rmdir(2) marks the kernel's in-memory inode as dead for good (S_DEAD), and a later restore may
  bring the old inode back.
- A name that was added: LOOKUP returns ENOENT, and MKNOD, MKDIR or SYMLINK returns the inode that exists.
- An inode that was changed in place: utimensat(2) of only the modification time raises IN_MODIFY, of both times
  IN_ATTRIB.  SETATTR returns the current attributes.
- A file that lost its last name (an orphan): LOOKUP of a random name in the root returns the orphan, and the next one
  ENOENT, on which the kernel drops the name.  As the orphan has no links, a watch on it ends with IN_DELETE_SELF.

No other process sees a false answer: answers to the thread have no cache time, so the kernel asks again before it shows
them to another process, and then gets the real state.  In the other direction, entries that other processes have cached
could hide a name from the thread.  Hence: a LOOKUP for an exclusive create always reaches the daemon; an UNLINK without
a preceding ghost returns ESTALE, on which the kernel looks the name up again; and a cached absence is ended by an
exclusive mknod(2) of the name, which fails with EEXIST (fs/namei.c, fuse_dentry_revalidate in fs/fuse/dir.c).

`replay` runs the thread, `calls` makes its system calls, `answers` answers their requests.  docs/inotify.md
describes which events a watcher gets, and which are impossible.
"""

from vfsd.kernel.inotify.refresh import FileState
from vfsd.kernel.inotify.replay import Replay

__all__ = ["FileState", "Replay"]
