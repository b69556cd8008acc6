"""The options of a mount, backend strings, and the start-up handshake.

The options are in groups by the part of vfsd that uses them.  `MountOptions.of` sorts the flat names of the Python
API's arguments into the groups, so a name occurs in one group only.  The command line has other names for some of them,
such as --on-host for `exec_on_host`: see docs/mount.md.
Paths are absolute, sizes are in bytes, and None means no limit unless stated.

Packages add a kind of backend or an engine with an entry point; `vfsd.daemon.backends` loads and calls a backend.  The
installed packages are searched only for a name that is not built in, because the search takes about 40 ms.

The handshake is a JSON document in a pipe in each direction: the options that a daemon receives, and its report that it
is ready or failed.  Encoded with the standard library instead of msgspec, because paths are decoded with `os.fsdecode`
and only `json` keeps the lone surrogates that represent bytes that are not UTF-8.
"""

from __future__ import annotations

import errno as errno_numbers
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from protocol.errors import errno_of
from protocol.values import Value
from vfsd.operations.declaration import CacheChoice
from vfsd.operations.forks import Ancestor, MergedState

# -- engines and backends that installed packages add ----------------------------------------------
BACKENDS_GROUP: Final = "vfsd.backends"
ENGINES_GROUP: Final = "vfsd.engines"
ENGINES: Final = ("auto", "native", "pyfuse3")  # the built-in ones


def entry_point_names(group: str) -> set[str]:
    """Return the names that installed packages add to `group`."""
    from importlib import metadata  # noqa: PLC0415 (start-up: see above)

    return metadata.entry_points(group=group).names


def is_engine(name: str) -> bool:
    """Whether an engine has this name."""
    return name in ENGINES or name in known_engines()


def known_engines() -> list[str]:
    """Return the names of all engines, those of installed packages included."""
    return [*ENGINES, *sorted(entry_point_names(ENGINES_GROUP) - set(ENGINES))]


def load_entry_point(group: str, name: str) -> Any:
    """Import the object that the entry point `name` of `group` refers to; None if there is no such entry point.

    OSError (EOPNOTSUPP) if it cannot be imported.
    """
    from importlib import metadata  # noqa: PLC0415 (start-up: see above)

    for entry_point in metadata.entry_points(group=group, name=name):
        try:
            return entry_point.load()
        except (ImportError, AttributeError) as error:
            kind = "engine" if group == ENGINES_GROUP else "backend"
            reason = f"the {kind} {name!r} ({entry_point.value}) cannot be imported: {error}"
            raise OSError(errno_numbers.EOPNOTSUPP, reason) from error
    return None


# -- backend strings, such as "memory" or "host:/srv/project" --------------------------------------
# The built-in kinds, and how a user writes each of them.
BACKENDS: Final = {
    "memory": "memory",
    "overlay": "overlay:DIR",
    "host": "host:DIR",
    "container": "container:NAME",
    "image": "image:REF",
    "exec": "exec:COMMAND",
}
_ARGUMENTS: Final = {
    "overlay": "a directory, FILE.zip, snapshot:NAME or URL#NAME",
    "host": "a directory",
    "container": "a container's name",
    "image": "an image's name",
    "exec": "a command that starts a Python",
}
_SNAPSHOT: Final = "snapshot:"  # a directory of such a name is written "./snapshot:..."
_URLS: Final = ("s3://", "gs://", "az://", "file://")  # as above


class BackendSpec(Value):
    """A parsed backend string: `kind`, and the text after the colon.  `str()` gives the string again."""

    kind: str
    argument: str = ""

    @classmethod
    def split(cls, text: str) -> BackendSpec:
        """Split `text` at the first colon without checking it: for records, and for keys of workspaces in a store."""
        kind, _, argument = text.partition(":")
        return cls(kind, argument)

    @property
    def is_path(self) -> bool:
        """Whether `argument` is a path on this host."""
        return self.kind == "host" or self.lower_layer in {"archive", "directory"}

    @property
    def snapshot(self) -> tuple[str, str] | None:
        """The name and the directory ("" if there is none) in "overlay:snapshot:NAME@DIRECTORY"; else None.

        The last "@" before the first slash separates them, because a name may contain "@" and a path may, too.
        """
        if self.kind != "overlay" or not self.argument.startswith(_SNAPSHOT):
            return None
        text = self.argument.removeprefix(_SNAPSHOT)
        first, slash, rest = text.partition("/")
        name, _, directory = first.rpartition("@")
        return (name, directory + slash + rest) if name else (text, "")

    @property
    def remote(self) -> tuple[str, str] | None:
        """The URL and the name ("" if there is none) in "overlay:s3://BUCKET/PREFIX#NAME"; else None."""
        if self.kind != "overlay" or not self.argument.startswith(_URLS):
            return None
        url, _, name = self.argument.partition("#")
        scheme, _, place = url.partition("://")
        return f"{scheme}://{place.rstrip('/')}", name

    def with_snapshot(self, name: str, directory: str) -> BackendSpec:
        """Return this backend over a stored snapshot: the inverse of `snapshot`."""
        return replace(self, argument=f"{_SNAPSHOT}{name}@{directory}" if directory else f"{_SNAPSHOT}{name}")

    @property
    def lower_layer(self) -> Literal["directory", "archive", "snapshot", "remote"] | None:
        """The layer below an overlay; None for other backends.  A directory may have a name that ends in ".zip"."""
        if self.kind != "overlay":
            return None
        if self.snapshot is not None:
            return "snapshot"
        if self.remote is not None:
            return "remote"
        is_archive = self.argument.lower().endswith(".zip") and not os.path.isdir(self.argument)
        return "archive" if is_archive else "directory"

    @property
    def form(self) -> str:
        """How a user writes a backend of this kind: "host:DIR"."""
        return BACKENDS.get(self.kind, f"{self.kind}:ARG")

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind


MEMORY: Final = BackendSpec("memory")


def is_url(text: str) -> bool:
    """Return whether `text` names an object store, and not a path."""
    return text.startswith(_URLS)


def known_backends() -> list[str]:
    """Return how a user writes each kind of backend, those of installed packages included."""
    added = entry_point_names(BACKENDS_GROUP) - BACKENDS.keys()
    return [*BACKENDS.values(), *(f"{name}:ARG" for name in sorted(added))]


def parse_backend(text: str) -> BackendSpec:
    """Parse a backend string.  ValueError for an unknown kind, and where the kind's argument is missing or malformed.

    Installed packages are searched only for a kind that is not built in.  Their backends check their arguments
    themselves.
    """
    spec = BackendSpec.split(text)
    if spec.kind in _ARGUMENTS:
        if not spec.argument:
            raise ValueError(f"{text!r} lacks {_ARGUMENTS[spec.kind]} after the colon")
        if spec.snapshot is not None and not spec.snapshot[0]:
            raise ValueError(f"{text!r} lacks the snapshot's name: write overlay:snapshot:NAME[@DIRECTORY]")
        if spec.remote is not None and not spec.remote[0].partition("://")[2]:
            raise ValueError(f"{text!r} lacks the store's place: write overlay:s3://BUCKET/PREFIX#NAME")
        if spec.remote is not None and "@" in spec.remote[0].partition("://")[2].partition("/")[0]:
            # A URL is shown and recorded.
            raise ValueError("a store's URL cannot have a user or password: credentials come from the environment")
        if spec.kind == "exec":
            # Start-up: only this kind needs the parser of command lines.
            from protocol.backends.remote.command import RemoteCommand  # noqa: PLC0415

            RemoteCommand(spec.argument)
    elif text != "memory" and (spec.kind in BACKENDS or spec.kind not in entry_point_names(BACKENDS_GROUP)):
        raise ValueError(f"{text!r} is not one of {', '.join(known_backends())}")
    return spec


# -- options ---------------------------------------------------------------------------------------
TransportChoice = Literal["auto", "rootfs", "agent"]
TRANSPORTS: Final = ("auto", "rootfs", "agent")
SnapshotDirChoice = Literal["hidden", "visible", "off"]
SNAPSHOT_DIRS: Final = ("hidden", "visible", "off")
WakeupsChoice = Literal["auto", "on", "off"]
WAKEUPS: Final = ("auto", "on", "off")
CACHES: Final = ("writethrough", "writeback")
FsyncChoice = Literal["always", "everysec", "no"]
FSYNCS: Final = ("always", "everysec", "no")
# A name is a file name of the socket and a systemd instance name, so it contains no character to quote in either.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class WorkspaceOptions(Value):
    """The options that identify a workspace.

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
    `cache`: whether write(2) returns when the data is in the volume ("writethrough") or when it is in the kernel's page
    cache ("writeback").  `snapshot_directory`: whether the root has `.snapshots`, and whether listings show it.
    """

    engine: str = "auto"  # or the name of an engine: see `vfsd.wire.options`
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
    """The origin of a fork over a stored snapshot; set by the daemon that makes the fork.

    `source`: the source, and the snapshot, which is below the fork.  `workspace`: the key of the source in the store.
    `merged`: what was merged into that state.
    """

    source: Ancestor
    workspace: str
    merged: tuple[MergedState, ...] = ()


class Below(Value):
    """The lower layer of a workspace, from the daemon that hands the workspace over.

    `fingerprint`: what identifies the layer, or the directory.  `reopening`: see
    `protocol.backends.overlay.lower.Lower`.
    """

    fingerprint: str
    reopening: bytes = b""


class MountOptions(Value):
    """All options of one mount.

    Four are no options: `origin`, which only a fork has; `below`, in an upgrade; `anchor`, that of
    `vfsd.daemon.backends.registry.Backend` in the daemon before this one; and `is_continued`, whether there was one.
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


# -- the handshake: the options that a daemon receives, and its report ------------------------------
class Ready(msgspec.Struct, frozen=True):
    """The mount answers.

    `recovered`: a sentence about a dead workspace that this one replaced, if any.  `warnings`: options that have no
    effect, and why.
    """

    name: str
    mountpoint: str
    socket: str
    pid: int
    engine: str
    recovered: str | None = None
    warnings: tuple[str, ...] = ()


class Failed(Value):
    """The start failed.  `message` is one line; `errno` is EIO for an exception without an errno."""

    message: str
    errno: int
    path: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Describe `error` for the process that started the daemon."""
        if isinstance(error, ValueError):
            return cls(_line(str(error)), errno_numbers.EINVAL)
        code = errno_of(error)
        path = getattr(error, "filename", None)
        if code is None:  # includes OSError("text")
            reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            return cls(_line(reason), errno_numbers.EIO)
        reason = getattr(error, "strerror", None) or str(error) or os.strerror(code)
        return cls(_line(reason), code, os.fsdecode(path) if isinstance(path, str | bytes) else None)

    def error(self) -> OSError:
        """Return the failure as an OSError, of the subclass for its errno."""
        return OSError(self.errno, self.message, self.path) if self.path else OSError(self.errno, self.message)


def _line(text: str) -> str:
    return " ".join(text.split())


def encode_options(options: MountOptions) -> bytes:
    """Encode the options of a mount for the daemon."""
    return json.dumps(msgspec.to_builtins(options)).encode()


def decode_options(data: bytes) -> MountOptions:
    """Decode the result of `encode_options`.  ValueError for anything else."""
    return msgspec.convert(json.loads(data), MountOptions)


def encode_report(report: Ready | Failed) -> bytes:
    """Encode a report as one line."""
    kind = "ready" if isinstance(report, Ready) else "failed"
    return json.dumps({kind: msgspec.to_builtins(report)}).encode() + b"\n"


def decode_report(line: bytes) -> Ready | Failed:
    """Decode the result of `encode_report`.  ValueError for anything else."""
    content = json.loads(line)
    if "ready" in content:
        return msgspec.convert(content["ready"], Ready)
    return msgspec.convert(content["failed"], Failed)
