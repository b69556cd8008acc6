"""The messages of the control socket for the audit log."""

from __future__ import annotations

from typing import Final

import msgspec

from vfsd.operations.declaration import Empty, Operation, Params


class ProcessRecord(msgspec.Struct, omit_defaults=True):
    """A process.  `command` has the words of its command line as wire paths; [] if it could not be read.

    `truncated`: the command line is longer than 1,024 bytes, and the rest is missing.
    """

    pid: int
    name: str
    command: list[str] = []
    truncated: bool = False
    uid: int | None = None


class LogEntry(msgspec.Struct, omit_defaults=True):
    """One change, or consecutive writes to one file by one process.

    `number` counts the changes in the order in which they were made.  `change`: create, mknod, mkdir, symlink, link,
    tmpfile, unlink, rmdir, rename, exchange, write, truncate, allocate, chmod, chown, utime, setxattr or removexattr
    for a change through the mount; else the method of the control socket that made it, such as restore.  A change that
    the policy refused is "denied": `attempt` names it as above, or is "open" for writing.

    `path`: None if the file has no name any more, or if there is more than one: `paths` lists up to 100, and `count`
    counts all.  `links`: how many names the file has; `path` is one of them.  `pid` is 0 for pages that the kernel
    writes back, and for a process that the daemon cannot see.
    """

    number: int
    time: str
    change: str
    path: str | None
    pid: int
    until: str | None = None  # the time of the last of several writes
    to: str | None = None  # the new name of a rename
    of: str | None = None  # the other name of a link
    links: int = 1
    inode: int | None = None  # of a file without a name
    bytes: int | None = None  # written, by `writes` requests
    writes: int | None = None
    attempt: str | None = None
    paths: list[str] = []
    count: int = 1
    process: ProcessRecord | None = None  # None for pid 0
    thread: int | None = None  # the thread's id, if it is not the process's first thread
    ancestors: list[ProcessRecord] = []  # the nearest first
    container: str | None = None  # the first 12 digits of the container's id
    label: str | None = None  # the tool call, or the command of `vfsd exec`


class Overflow(msgspec.Struct):
    """In place of entries that the reader of `watch` was too slow for: how many are missing here."""

    missing: int


class MissingLine(msgspec.Struct):
    """A line of the file of --audit: before it, `missing` entries could not be written, because of `reason`."""

    missing: int
    reason: str


class LogParams(Params):
    """Parameters of `log`: the entries that the log holds, the oldest first.

    `paths`: only changes of these paths and below them.  `since`: the name of a snapshot; or else `since_ns`, in
    nanoseconds since 1970.  `by`: the id of a process, or a program's name; children count.
    """

    paths: list[str] = []
    since: str | None = None
    since_ns: int | None = None
    by: str | None = None


class LogResult(msgspec.Struct):
    """Result of `log`.  Before it, "output" has the entries: one LogEntry per line of JSON.

    `dropped` entries are older than the log reaches back, and `since` is the time from which it is complete.
    `begins_late`: that is later than the time that the client asked for.  `logged`: how many entries the log has, also
    those that the client did not ask for.
    """

    entries: int
    dropped: int
    since: str
    file_missing: int = 0  # entries that --audit FILE lacks, because writing failed
    file_problem: str | None = None  # why, while it fails
    begins_late: bool = False
    logged: int = 0


def nameless(attempt: str | None) -> str:
    """Return what to print in place of the path of an entry without one; `attempt` is that of the entry."""
    return "(a file without a name)" if attempt is None else "(several paths, or hidden ones)"


class WatchParams(LogParams):
    """Parameters of `watch`: send each change from now on, or with `since` or `since_ns` from then on.

    Sends "output" with one LogEntry or Overflow per line of JSON until the call is cancelled.  Writes are sent when no
    further write has followed for a second or two.  An empty line says that the watch has begun.
    """


class LabelParams(Params):
    """Parameters of `label`: give process `pid` (None: the caller) a label that what it starts inherits.

    None removes the label; processes that have inherited it keep it.
    """

    label: str | None
    pid: int | None = None


OPERATIONS: Final = (
    Operation("log", LogParams, LogResult, reads=True),
    Operation("watch", WatchParams, Empty, reads=True, is_followed=True),
    Operation("label", LabelParams, Empty),
)
