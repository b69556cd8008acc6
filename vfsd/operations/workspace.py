"""The operations on a workspace as a whole: status, journal, policy and log, forks, upgrades, and its end."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from protocol.types import ChangeCounts
from vfsd.operations.declaration import CacheChoice, Empty, Operation, Params


class StatusResult(msgspec.Struct, frozen=True):
    """Result of `status`.

    A field is None if the backend does not have the value, or would have to walk its tree for it.

    `max_bytes` bounds `used_bytes`: content in whole pages without holes, and metadata beyond 4 MiB.  `max_memory`
    bounds the sum of `live_bytes` (files, names, attributes), `snapshot_bytes` (content that only snapshots refer to)
    and `overhead_bytes` (reserved for removals, restores and imports, or cached from below an overlay).
    """

    name: str
    mountpoint: str
    backend: str
    engine: str
    pid: int
    version: str
    started_at: str
    read_only: bool
    files: int | None
    directories: int | None
    size_bytes: int | None
    used_bytes: int | None
    max_bytes: int | None
    max_inodes: int | None
    snapshots: int | None
    requests: int  # answered by the engine since it started
    live_bytes: int | None = None
    snapshot_bytes: int | None = None
    overhead_bytes: int | None = None
    max_memory: int | None = None
    pruned: int | None = None  # automatic snapshots that were dropped to free memory
    changed_below: int | None = None  # files of overlay:DIR that other programs changed after the overlay read them
    source: str | None = None  # of an overlay over a snapshot in an object store: the URL, with the snapshot's name
    fetched_bytes: int | None = None  # received from there since the start of the process that fetches
    prefetch: str | None = None  # the state of --prefetch
    fetch_failure: str | None = None  # while it is not None, reads of what is not in the cache fail
    cache_failure: str | None = None  # while it is not None, what is read is fetched again each time
    inode_failure: str | None = None  # of an overlay over any stored snapshot: where it lost inode numbers, and why
    cache: CacheChoice = "writethrough"
    forked_from: str | None = None  # the name of the workspace that this one is a fork of
    base: str | None = None  # of a fork: the snapshot that both workspaces have
    frozen: bool = False  # an overlay over a snapshot of its directory: changes in the directory are not shown
    shared_memory: int | None = None  # in bytes, of a fork or its source: pages that several processes have
    private_memory: int | None = None  # the others
    started_by: str | None = None  # "the fork server", or "a new interpreter" and why, ...
    keeper: str | None = None  # the process that restarts the daemon if it dies, or why there is none
    engine_reason: str | None = None  # why the engine is not the preferred one
    wakeups: str | None = None  # what the engine does about slow wake-ups of idle CPUs
    journal: str | None = None  # with --persist: the directory of the journal
    fsync: str | None = None  # when it is synced: "always", "everysec" or "no"
    journal_bytes: int | None = None  # its size on disk
    journal_unsynced_bytes: int | None = None  # at the end of the journal, not known to be on disk
    journal_failure: str | None = None  # why it does not keep the content any more
    journal_uncompacted: str | None = None  # why it was not compacted, although it is large
    journals_bytes: int | None = None  # on disk, of the journals of all workspaces of this user
    store_bytes: int | None = None  # on disk, of the default store of snapshots
    interrupted: str | None = None  # an interrupted restore or apply, and how to finish or undo it
    commands: str | None = None  # where `vfsd exec` runs commands, such as "on this host"; None: it cannot
    container: str | None = None  # its state in Podman: "running", "paused", "exited with status 137", ...
    transport: Literal["rootfs", "agent"] | None = None  # of a container or exec:COMMAND
    connected: bool | None = None  # of these; while False, every request fails with EIO
    remote: str | None = None  # exec:COMMAND only: "connected", or why not


class UnmountParams(Params):
    """Parameters of `unmount`.

    A busy mount is the error EBUSY, which names the processes that use it; `lazy` detaches it at once instead.
    Unsaved changes are the error ENOTEMPTY unless `discard` is set, or `token` comes from an `unsaved` result and
    nothing has changed since.  A journal saves them; but with `drop_journal` it does not count, and the unmount removes
    it.
    """

    lazy: bool = False
    discard: bool = False
    token: str | None = None
    drop_journal: bool = False


class UnmountResult(msgspec.Struct):
    """Result of `unmount`."""

    mountpoint: str
    lazy: bool
    holders: list[str]  # processes that still use the mount: "pid 12 (bash)", ...
    snapshots: int = 0  # the number of user snapshots that were lost with the daemon's memory
    changed_late: bool = False  # a change between the check for unsaved changes and the unmount was lost
    journal: str | None = None  # the directory of the journal that keeps content, snapshots and undo history
    left: str | None = None  # a sentence on what was to be removed and is still there, such as a container


class CompactResult(msgspec.Struct):
    """Result of `compact`: the size of the journal on disk, in bytes, before and after."""

    before_bytes: int
    after_bytes: int


class UpgradeParams(msgspec.Struct):
    """The Python interpreter of the version to upgrade to, and the directories beside its own to import from.

    `instead_of`: the process id of the daemon to replace; 0: of the one that gets the call.
    """

    executable: str
    import_paths: list[str] = []
    instead_of: int = 0


class UpgradeResult(msgspec.Struct, frozen=True):
    """Result of `upgrade`: the versions, the new daemon's process id, and how long requests waited.

    `meanwhile`: another call had replaced the daemon of `UpgradeParams.instead_of` before, so this one did nothing.
    `old_died`: the old daemon died when the new one had everything; nobody knows how long requests waited.
    """

    name: str
    from_version: str
    to_version: str
    pid: int
    pause_ms: float
    meanwhile: bool = False
    old_died: bool = False


class PolicyParams(Params):
    """Parameters of `policy`: patterns to add, in gitignore's syntax, written as paths are.  A policy only grows."""

    protect: list[str] = []
    hide: list[str] = []


class PolicyResult(msgspec.Struct):
    """Result of `policy`: the patterns that hold now, in their order, written as paths are.

    `open_files`: protected files that programs have open for writing since before they were protected.  Their writes
    fail, and pages that they change through a mapping are dropped within about a second.
    """

    protect: list[str]
    hide: list[str]
    open_files: list[str] = []


class UnsavedResult(msgspec.Struct):
    """Result of `unsaved`: the state that an unmount would lose because it is only in the daemon's memory.

    `unsaved`: whether the live state changed since the mount, the last complete export or the last complete apply.
    False if it is empty and there is no user snapshot.  For a memory workspace, `files` and `size_bytes` describe the
    whole live state.  For an overlay, `changes` counts the changes that were not applied; `truncated` means that there
    are at least so many.

    For image:REF, whose container ends with it: `changes` counts the differences from the snapshot `since`, which
    differs least, or `problem` says why they are not known.  Without both there is no snapshot.
    """

    unsaved: bool
    token: str  # identifies this state for `unmount`
    files: int | None = None
    size_bytes: int | None = None
    changes: ChangeCounts | None = None
    truncated: bool = False
    snapshots: int = 0  # the number of user snapshots
    saved_at: str | None = None
    since: str | None = None
    problem: str | None = None


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


_UPGRADE: Final = ("the upgrade", "the old daemon serves on", "the new daemon serves")
_UNMOUNT: Final = ("the unmount", "the workspace is still mounted", "the workspace was unmounted")
OPERATIONS: Final = (
    Operation("ping", Empty, Empty, is_of_daemon=True),
    Operation("status", Empty, StatusResult, reads=True, is_of_daemon=True, answered_within_s=10.0),
    Operation("check", Empty, Empty, is_of_daemon=True),  # runs the volume's check_invariants
    Operation("unsaved", Empty, UnsavedResult),
    Operation("compact", Empty, CompactResult),
    Operation("upgrade", UpgradeParams, UpgradeResult, *_UPGRADE, waits=True),
    Operation("policy", PolicyParams, PolicyResult),
    Operation("unmount", UnmountParams, UnmountResult, *_UNMOUNT),
    Operation("log", LogParams, LogResult, reads=True),
    Operation("watch", WatchParams, Empty, reads=True, is_followed=True),
    Operation("label", LabelParams, Empty),
)
