"""The options of a mount, in groups by the part of vfsd that uses them.

`MountOptions.of` sorts the flat names of the Python API's arguments into the groups, so a name occurs in one group
only.  The command line has other names for some of them, such as --on-host for `exec_on_host`: see docs/mount.md.
Paths are absolute, sizes are in bytes, and None means no limit unless stated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final, Literal

import msgspec

from protocol.values import Value
from vfsd.operations.merge import AncestorRecord, MergedRecord
from vfsd.wire.backend_spec import MEMORY, BackendSpec

TransportChoice = Literal["auto", "rootfs", "agent"]
TRANSPORTS: Final = ("auto", "rootfs", "agent")
SnapshotDirChoice = Literal["hidden", "visible", "off"]
SNAPSHOT_DIRS: Final = ("hidden", "visible", "off")
WakeupsChoice = Literal["auto", "on", "off"]
WAKEUPS: Final = ("auto", "on", "off")
CacheChoice = Literal["writethrough", "writeback"]
CACHES: Final = ("writethrough", "writeback")
FsyncChoice = Literal["always", "everysec", "no"]
FSYNCS: Final = ("always", "everysec", "no")
# A name is a file name of the socket and a systemd instance name, so it contains no character to quote in either.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class WorkspaceOptions(Value):
    """What identifies a workspace.

    `store`: the directory of snapshots that are not in memory; None for the user's.  `keeper`: whether a process
    restarts the daemon if it dies, where the state can be rebuilt (with a journal, or in a host directory).
    """

    mountpoint: str
    name: str
    backend: BackendSpec = MEMORY
    read_only: bool = False
    store: str | None = None
    keeper: bool = True


class KernelOptions(Value):
    """How the engine mounts the volume.

    `cache_timeout_s`: how long the kernel may use cached attributes of content that other programs change too; None
    for the backend's default.  Without `xattrs` the mount has neither extended attributes nor ACLs, and the kernel
    sends no requests for them.  `wakeups`: whether idle CPUs are kept awake during bursts of requests.
    sends no requests for them.  `cache`: whether write(2) returns when the data is in the volume ("writethrough") or
    when it is in the kernel's page cache ("writeback").  `snapshot_directory`: whether the
    root has `.snapshots`, and whether listings show it.
    """

    engine: str = "auto"  # or the name of an engine: see `vfsd.wire.entry_points`
    allow_other: bool = False
    cache_timeout_s: float | None = None
    xattrs: bool = True
    wakeups: WakeupsChoice = "auto"
    cache: CacheChoice = "writethrough"
    snapshot_directory: SnapshotDirChoice = "hidden"


class LimitOptions(Value):
    """Limits of a volume in memory.

    `max_memory` bounds content, metadata and snapshots together; None for half of the memory that the daemon may use.
    """

    max_bytes: int | None = None
    max_memory: int | None = None
    max_inodes: int | None = None


class ContentOptions(Value):
    """The initial content: an `archive` to read (--from), and gitignore patterns for what an overlay shows."""

    archive: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class RemoteOptions(Value):
    """How a snapshot in an object store is read.

    `store_options`: options of the store, as KEY=VALUE.  `cache_bytes`: the bound of the cache on disk, which all
    workspaces of the user share; 0: no cache.  `remote_timeout_s`: how long a read waits for the network.  `prefetch`:
    fetch everything in the background.
    """

    store_options: tuple[str, ...] = ()
    cache_bytes: int = 10 << 30
    remote_timeout_s: float = 30.0
    prefetch: bool = False


class JournalOptions(Value):
    """Whether a workspace in memory keeps a journal on disk, from which it continues after an unmount or a crash.

    `journal_dir`: None for the user's directory of journals.  `fsync`: when records reach the disk.
    """

    persist: bool = False
    journal_dir: str | None = None
    fsync: FsyncChoice = "everysec"


class CommandOptions(Value):
    """Where `vfsd exec` runs commands: on this host as the daemon's user, or in a new container of `sandbox`."""

    exec_on_host: bool = False
    sandbox: BackendSpec | None = None  # of the kind "image"
    snapshot_each: bool = False  # take a snapshot after each command


class ContainerOptions(Value):
    """How to reach the container of a backend or of a sandbox, and the limits of one that vfsd creates.

    `workdir` also applies to the backend "exec".
    """

    podman_url: str | None = None  # None: $CONTAINER_HOST, else the user's own service
    workdir: str | None = None  # None: /workspace
    transport: TransportChoice = "auto"
    network: str | None = None  # None: no network
    pids_limit: int | None = None  # processes and threads; None: 2048
    memory_bytes: int | None = None


class LogOptions(Value):
    """The daemon's log: "text" for people, "json" for one object per line, "journal" with sd-daemon's priorities."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json", "journal"] = "text"


class AuditOptions(Value):
    """Whether the daemon logs who changes what, and the absolute path of a file that keeps all of the log."""

    audit: bool = True
    audit_file: str | None = None


class PolicyOptions(Value):
    """Patterns in gitignore's syntax of what no program may change (`protect`), and of what none may see (`hide`)."""

    protect: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()


class StoredOrigin(Value):
    """What a fork over a stored snapshot comes from; set by the daemon that makes the fork.

    `source`: the source, and the snapshot, which is below the fork.  `workspace`: the key of the source in the store.
    `merged`: what was merged into that state.
    """

    source: AncestorRecord
    workspace: str
    merged: tuple[MergedRecord, ...] = ()


class Below(Value):
    """What another daemon, which hands its workspace over, has of the layer below it.

    `fingerprint`: what identifies the layer, or the directory.  `reopening`: see
    `protocol.backends.overlay.lower.Lower`.
    """

    fingerprint: str
    reopening: bytes = b""


class MountOptions(Value):
    """All options of one mount.

    Four are no options: `origin`, which only a fork has; `below`, in an upgrade; `anchor`, the
    `vfsd.daemon.backends.base.Backend.anchor` of the daemon before this one; and `is_continued`, whether there was one.
    """

    workspace: WorkspaceOptions
    kernel: KernelOptions = msgspec.field(default_factory=KernelOptions)
    limits: LimitOptions = msgspec.field(default_factory=LimitOptions)
    content: ContentOptions = msgspec.field(default_factory=ContentOptions)
    remote: RemoteOptions = msgspec.field(default_factory=RemoteOptions)
    journal: JournalOptions = msgspec.field(default_factory=JournalOptions)
    commands: CommandOptions = msgspec.field(default_factory=CommandOptions)
    container: ContainerOptions = msgspec.field(default_factory=ContainerOptions)
    log: LogOptions = msgspec.field(default_factory=LogOptions)
    audit: AuditOptions = msgspec.field(default_factory=AuditOptions)
    policy: PolicyOptions = msgspec.field(default_factory=PolicyOptions)
    origin: StoredOrigin | None = None
    below: Below | None = None
    anchor: int | None = None
    is_continued: bool = False

    @classmethod
    def of(cls, mountpoint: str, name: str, **values: Any) -> MountOptions:
        """Sort flat options into their groups.  TypeError for an unknown name."""
        values |= {"mountpoint": mountpoint, "name": name}
        groups: dict[str, Any] = {}
        for group, group_type in _GROUPS.items():
            names = [each for each in group_type.__struct_fields__ if each in values]
            groups[group] = group_type(**{name: values.pop(name) for name in names})
        if values:
            raise _unknown_option(next(iter(values)))
        return cls(**groups)

    def values(self) -> dict[str, Any]:
        """Return all options under their flat names."""
        return {
            each: getattr(getattr(self, group), each)
            for group, group_type in _GROUPS.items()
            for each in group_type.__struct_fields__
        }


def _unknown_option(name: str) -> TypeError:
    """TypeError that suggests option names which are spelled like `name`, or contain it or its last word."""
    import difflib  # noqa: PLC0415 start-up: an error has time

    known = [each for group_type in _GROUPS.values() for each in group_type.__struct_fields__]
    last_word = name.rpartition("_")[2]
    close = [each for each in known if name in each or last_word == each.rpartition("_")[2]]
    close = close or difflib.get_close_matches(name, known, n=3)
    similar = f"; did you mean {' or '.join(close)}?" if close else ": docs/mount.md lists them"
    return TypeError(f"there is no mount option {name}{similar}")


# Name of the group -> its type.
_GROUPS: Final[Mapping[str, type[Value]]] = {
    "workspace": WorkspaceOptions,
    "kernel": KernelOptions,
    "limits": LimitOptions,
    "content": ContentOptions,
    "remote": RemoteOptions,
    "journal": JournalOptions,
    "commands": CommandOptions,
    "container": ContainerOptions,
    "log": LogOptions,
    "audit": AuditOptions,
    "policy": PolicyOptions,
}


def _defaults(group_type: type[Value]) -> Iterator[tuple[str, Any]]:
    defaults = group_type.__struct_defaults__  # those of the last fields
    return zip(group_type.__struct_fields__[-len(defaults) :], defaults, strict=True)


# The default of every option that has one, by its flat name.
DEFAULTS: Final = dict(chain.from_iterable(map(_defaults, _GROUPS.values())))
