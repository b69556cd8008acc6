"""The options of a mount, backend strings, and the start-up handshake.

The options are in groups by the part of vfsd that uses them.  `MountOptions.of` sorts the flat names of the Python
API's arguments into the groups, so a name occurs in one group only.  The command line has other names for some of them,
such as --on-host for `exec_on_host`: see docs/backends.md.
Paths are absolute, sizes are in bytes, and None means no limit unless stated.

Packages add a kind of backend or an engine with an entry point; `vfsd.daemon.backends` loads and calls a backend.  The
installed packages are searched only for a name that is not built in, because the search takes about 40 ms.

The handshake is a JSON document in a pipe in each direction: the options that a daemon receives, and its report that it
is ready or failed.  Encoded with the standard library instead of msgspec, because paths are decoded with `os.fsdecode`
and only `json` keeps the lone surrogates that represent bytes that are not UTF-8.
"""

from __future__ import annotations

import errno as errno_numbers
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import structs

from protocol.errors import errno_of
from protocol.values import Value
from vfsd.operations.declaration import CacheChoice
from vfsd.operations.forks import Ancestor, MergedState

# -- engines and backends that installed packages add ----------------------------------------------
BACKENDS_GROUP: Final = "vfsd.backends"
ENGINES_GROUP: Final = "vfsd.engines"
ENGINES: Final = ("auto", "native", "pyfuse3")  # the built-in ones


NO_ENGINE: Final = "none"  # of an attached directory, a workspace without a mount; not to be chosen for a mount


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
        return structs.replace(self, argument=f"{_SNAPSHOT}{name}@{directory}" if directory else f"{_SNAPSHOT}{name}")

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
SnapshotDirChoice = Literal["hidden", "visible", "off"]
WakeupsChoice = Literal["auto", "on", "off"]
FsyncChoice = Literal["always", "everysec", "no"]
LogLevelChoice = Literal["debug", "info", "warning", "error"]
LogFormatChoice = Literal["text", "json", "journal"]
# A name is a file name of the socket and a systemd instance name, so it contains no character to quote in either.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LEAST_MEMORY_BYTES: Final = 4 << 20  # the minimum of max_memory; a smaller workspace could store hardly anything
T = TypeVar("T")


class Scope(Value):
    """Where an option applies: to one of the `backends`, or together with one of the other `options`.

    `why` is the reason that it does not apply elsewhere.  Every option applies to a backend that is not built in; the
    backend's opener refuses those that it does not support.
    """

    backends: tuple[str, ...]
    why: str
    options: tuple[str, ...] = ()

    def allows(self, values: Mapping[str, Any]) -> bool:
        kind = values["backend"].kind
        if _LAYERS.get(values["backend"].lower_layer) in self.backends:
            return True
        return kind in self.backends or kind not in BACKENDS or any(is_given(values, name) for name in self.options)

    @property
    def places(self) -> str:
        """The backends and options joined by "or", with options as placeholders."""
        names = [BACKENDS.get(kind, kind) for kind in self.backends] + [f"{{{name}}}" for name in self.options]
        return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


_OVER_SNAPSHOT: Final = "overlay:snapshot:NAME"  # this kind of overlay only
_OVER_URL: Final = "overlay:URL#NAME"
_OVER_DIRECTORY: Final = "overlay:DIR of a directory"
_LAYERS: Final[Mapping[str | None, str]] = {
    "directory": _OVER_DIRECTORY,
    "snapshot": _OVER_SNAPSHOT,
    "remote": _OVER_URL,
}
_IN_MEMORY: Final = ("memory", "overlay")
_ON_DISK: Final = ("host", "container", "image", "exec")
_LIMITS: Final = Scope(_IN_MEMORY, "the other backends have the limits of their file system")
_FILTER: Final = Scope(("overlay",), "only an overlay filters the directory below it")
_REMOTE: Final = Scope((_OVER_URL,), "nothing else reads from an object store while it is mounted")
_JOURNAL: Final = Scope((), "without it there is no journal", ("persist",))
_NEW_CONTAINER: Final = Scope(("image",), "it is for a container that vfsd creates", ("sandbox",))


class Option(Value):
    """The declaration of an option, beside its name and type: the factory of its default.

    `text` describes it for `vfsd mount --help`.  `kind` is what a number of bytes ("size"), a path or a list of
    patterns has in common with others.  `flag` and `metavar` are its name and its value's on the command line; empty
    for those that follow from name and type.  `value` describes the value in Python for docs/backends.md; empty if
    the type does.  A number is at least `least`, or with `zero` also 0.
    """

    default: Any
    text: str
    kind: Literal["", "size", "directory", "file", "patterns"]
    flag: str
    metavar: str
    value: str
    scope: Scope | None
    least: int
    zero: bool

    def __call__(self) -> Any:
        return self.default

    def flag_of(self, name: str) -> str:
        """Return the option's name on the command line."""
        return self.flag or f"--{'no-' if self.default is True else ''}{name.replace('_', '-')}"


def option(
    default: T,
    text: str,
    kind: Literal["", "size", "directory", "file", "patterns"] = "",
    *,
    flag: str = "",
    metavar: str = "",
    value: str = "",
    scope: Scope | None = None,
    least: int = 1,
    zero: bool = False,
) -> T:
    """Declare the field of a struct to be an option, as `Option` describes."""
    factory: Callable[[], T] = Option(default, text, kind, flag, metavar, value, scope, least, zero)
    return msgspec.field(default_factory=factory)


class WorkspaceOptions(Value):
    """The options that identify a workspace."""

    mountpoint: str
    name: str = option("", "The workspace's name; by default made from the mountpoint.")
    backend: BackendSpec = option(
        MEMORY,
        "Where the content is: memory, host:DIR, overlay:DIR, overlay:FILE.zip, overlay:snapshot:NAME[@DIR] (a snapshot"
        " on disk), container:NAME (a running Podman container), image:REF (a new container of that image, removed by"
        " the unmount), or exec:'COMMAND' (a directory where COMMAND starts a Python, such as 'ssh HOST python3').",
        metavar="BACKEND",
    )
    read_only: bool = option(False, "Refuse all changes, including restore and import.")
    store: str | None = option(
        None,
        "Keep snapshots in this directory, which must be outside of host:DIR.  [default: $VFSD_STORE_DIR,"
        " ~/.local/state/vfsd/store]",
        "directory",
        scope=Scope((*_ON_DISK, _OVER_SNAPSHOT), "the other backends keep snapshots in memory"),
    )
    keeper: bool = option(
        True,
        "With --persist, or for a host directory, a container or a command: leave a dead mount if the daemon dies.  By"
        " default a keeper starts another one; programs in the workspace wait meanwhile, and continue with their open"
        " files and locks.",
        scope=Scope(_ON_DISK, "without a journal nothing brings the content back", ("persist",)),
    )


class ContentOptions(Value):
    """The initial content, and what an overlay shows of the directory below it."""

    archive: str | None = option(
        None,
        "Start with the content of this archive; or with a snapshot that `vfsd push` stored in s3://BUCKET/PREFIX,"
        " gs://, az:// or file:///DIR, whose content is fetched when it is read (the same as --backend"
        " overlay:URL#NAME).  Without #NAME it is the newest snapshot.",
        "file",
        flag="--from",
        metavar="ARCHIVE.zip|URL#NAME",
        value="path of a ZIP file, or the URL of a snapshot in an object store",
        scope=Scope(_IN_MEMORY, "the other backends have content of their own"),
    )
    include: tuple[str, ...] = option(
        (),
        "Show only files of overlay:DIR that match (.gitignore's syntax); may be repeated.",
        "patterns",
        scope=_FILTER,
    )
    exclude: tuple[str, ...] = option(
        (), "Hide files of overlay:DIR that match; may be repeated.", "patterns", scope=_FILTER
    )
    frozen: bool = option(
        False,
        "Show overlay:DIR as it is now, whatever changes in DIR later: the mount takes a snapshot of DIR, and `vfsd"
        " apply` merges the changes of the workspace with those that were made in DIR meanwhile.",
        scope=Scope((_OVER_DIRECTORY,), "nothing else changes below an overlay"),
    )


class LimitOptions(Value):
    """Limits of a volume in memory."""

    max_bytes: int | None = option(
        None,
        "Limit the size of all files together, such as 512M or 2GiB.  Writes beyond it fail with ENOSPC.",
        "size",
        scope=_LIMITS,
    )
    max_inodes: int | None = option(
        None, "Limit the number of files, directories and other inodes.", metavar="N", scope=_LIMITS
    )
    max_memory: int | None = option(
        None,
        "Limit the memory of content, metadata and snapshots together.  The oldest automatic snapshots are dropped to"
        " make room.  It is also the default of --max-bytes.  [default: half of the machine's memory, or of the"
        " cgroup's limit]",
        "size",
        scope=_LIMITS,
        least=LEAST_MEMORY_BYTES,
    )


class JournalOptions(Value):
    """Whether a workspace in memory keeps a journal on disk, from which it continues after an unmount or a crash."""

    persist: bool = option(
        False,
        "Keep a journal on disk: the next mount with this name continues with content, snapshots and undo history,"
        " after an unmount and after a crash.  `vfsd persisted` lists and drops journals.",
        scope=Scope(_IN_MEMORY, "the other backends store their content"),
    )
    journal_dir: str | None = option(
        None,
        "Keep the journal in this directory, which nothing else uses.  [default: ~/.local/state/vfsd/journals/NAME]",
        "directory",
        scope=_JOURNAL,
    )
    fsync: FsyncChoice = option(
        "everysec",
        "When the journal is synced without fsync(2): after every change, every second, or when the kernel does.",
        scope=_JOURNAL,
    )


class KernelOptions(Value):
    """How the engine mounts the volume."""

    engine: str = option(
        "auto",
        "The FUSE implementation.",
        value='"auto", "native", "pyfuse3", or the name of an installed engine',
    )
    allow_other: bool = option(
        False, "Let other users of this machine use the mount (needs user_allow_other in /etc/fuse.conf)."
    )
    # None: the backend's default.
    cache_timeout_s: float | None = option(
        None,
        "Show changes that other programs make to the files, without the mount, after at most SECONDS; 1 by default.",
        flag="--cache-timeout",
        zero=True,
        scope=Scope(_ON_DISK, "only vfsd changes what is in memory, so it is cached without a time limit"),
    )
    xattrs: bool = option(True, "Mount without extended attributes and ACLs; creating a file is then a little faster.")
    wakeups: WakeupsChoice = option(
        "auto",
        "Keep idle CPUs awake during bursts of requests, which makes them faster in many virtual machines.  auto: only"
        " in virtual machines where measurements show a gain.",
    )
    cache: CacheChoice = option(
        "writethrough",
        "writethrough: a write that has returned is in the workspace.  writeback: the kernel collects writes and sends"
        " them later, which is faster for databases and other small writes.",
        scope=Scope(_IN_MEMORY, "other programs see the files of the other backends, so a write there must not wait"),
    )
    snapshot_directory: SnapshotDirChoice = option(
        "hidden",
        "Show the snapshots, read-only, as .snapshots/NAME at the root of the mount.  hidden: listings leave it out;"
        " visible: they show it; off: there is none.",
        flag="--snapshot-dir",
    )


class RemoteOptions(Value):
    """How a snapshot in an object store is read."""

    store_options: tuple[str, ...] = option(
        (),
        "An option of the object store: endpoint, region, path_style, allow_http, ...; may be repeated.  Credentials"
        " come from the environment.",
        flag="--store-option",
        metavar="KEY=VALUE",
        scope=_REMOTE,
    )
    cache_bytes: int = option(
        10 << 30,
        "Keep what was fetched in ~/.cache/vfsd/blobs, which all of your workspaces share, up to this size; 0: no"
        " cache.  [default: 10GiB]",
        "size",
        value="int; 0: no cache",
        scope=_REMOTE,
        least=16 << 20,
        zero=True,
    )
    remote_timeout_s: float = option(
        30.0,
        "How long the mount, and later a read, waits for the network before it fails, a read with EIO; 30 by default. "
        " A later read tries again.",
        flag="--remote-timeout",
        scope=_REMOTE,
    )
    prefetch: bool = option(
        False,
        "Fetch the whole snapshot into the cache in the background; `vfsd status` shows the progress.",
        scope=_REMOTE,
    )


class PolicyOptions(Value):
    """What no program may change, and what none may see."""

    protect: tuple[str, ...] = option(
        (),
        "Let no program change files that match (.gitignore's syntax), root included; may be repeated.",
        "patterns",
    )
    hide: tuple[str, ...] = option(
        (),
        "Hide files that match from every program, root included, and refuse to make any; may be repeated.  --exclude"
        " of an overlay hides them, too.",
        "patterns",
    )


class CommandOptions(Value):
    """Where `vfsd exec` runs commands."""

    exec_on_host: bool = option(
        False,
        "Let `vfsd exec` and `vfsd fs exec` run commands on this host, in the mount, with your rights.",
        flag="--on-host",
    )
    sandbox: BackendSpec | None = option(  # of the kind "image"
        None,
        "Run commands in a container of that image, which sees the workspace at /workspace and nothing else of this"
        " machine.  It is removed with the workspace.",
        metavar="image:REF",
        value='"image:REF"',
        scope=Scope(
            ("memory", "overlay", "host", "exec"), "the commands of a workspace in a container run in that container"
        ),
    )
    snapshot_each: bool = option(
        False,
        "Take a snapshot after each command of `vfsd exec`: exec-1, exec-2, ...",
        scope=Scope(
            ("container", "image"),
            "without one of them no command runs in the workspace",
            ("sandbox", "exec_on_host"),
        ),
    )


class ContainerOptions(Value):
    """How to reach the container of a backend or of a sandbox, and the limits of one that vfsd creates."""

    podman_url: str | None = option(
        None,
        "The Podman service: unix:///PATH, ssh://[USER@]HOST/PATH or tcp://HOST:PORT; by default $CONTAINER_HOST, or a"
        " socket of this machine.",
        metavar="URL",
        scope=Scope(("container", "image"), "nothing else uses Podman", ("sandbox",)),
    )
    workdir: str | None = option(
        None,
        "The directory in the container, or at the other end of exec:COMMAND; /workspace by default.",
        metavar="DIR",
        value="str, absolute path",
        scope=Scope(("container", "image", "exec"), "it is a directory in a container, or where a command leads"),
    )
    transport: TransportChoice = option(
        "auto",
        "How to access the container's files: rootfs (through /proc, on this machine, as root) or agent (a helper that"
        " runs in the container, anywhere).",
        scope=Scope(("container", "image"), "it is the way to the files of a container"),
    )
    network: str | None = option(
        None,
        "The network of a container that vfsd creates, as for podman run; none by default.",
        metavar="NETWORK",
        scope=_NEW_CONTAINER,
    )
    pids_limit: int | None = option(
        None,
        "Limit the processes and threads in a container that vfsd creates; 2048 by default.",
        metavar="N",
        scope=_NEW_CONTAINER,
    )
    memory_bytes: int | None = option(
        None, "Limit the memory of a container that vfsd creates.", "size", flag="--memory", scope=_NEW_CONTAINER
    )


class AuditOptions(Value):
    """Whether the daemon logs who changes what."""

    audit_file: str | None = option(
        None,
        "Keep the log of all changes in this file, one JSON object per line.  Without it `vfsd log` shows the newest"
        " changes, which the daemon keeps in memory.",
        "file",
        flag="--audit",
        metavar="FILE.jsonl",
    )
    audit: bool = option(True, "Do not log which process changes what.")


class LogOptions(Value):
    """The daemon's log."""

    log_level: LogLevelChoice = option("info", "How much the daemon writes to its log.")
    log_format: LogFormatChoice = option("text", "The format of the log; journal is for systemd.")


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
    content: ContentOptions = msgspec.field(default_factory=ContentOptions)
    limits: LimitOptions = msgspec.field(default_factory=LimitOptions)
    journal: JournalOptions = msgspec.field(default_factory=JournalOptions)
    kernel: KernelOptions = msgspec.field(default_factory=KernelOptions)
    remote: RemoteOptions = msgspec.field(default_factory=RemoteOptions)
    policy: PolicyOptions = msgspec.field(default_factory=PolicyOptions)
    commands: CommandOptions = msgspec.field(default_factory=CommandOptions)
    container: ContainerOptions = msgspec.field(default_factory=ContainerOptions)
    audit: AuditOptions = msgspec.field(default_factory=AuditOptions)
    log: LogOptions = msgspec.field(default_factory=LogOptions)
    origin: StoredOrigin | None = None
    below: Below | None = None
    anchor: int | None = None
    is_continued: bool = False

    @property
    def is_attached(self) -> bool:
        """Whether the workspace is the directory itself, without a mount."""
        return self.kernel.engine == NO_ENGINE

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
    similar = f"; did you mean {' or '.join(close)}?" if close else ": docs/backends.md lists them"
    return TypeError(f"there is no mount option {name}{similar}")


# Name of the group -> its type.
_GROUPS: Final[Mapping[str, type[Value]]] = {
    "workspace": WorkspaceOptions,
    "content": ContentOptions,
    "limits": LimitOptions,
    "journal": JournalOptions,
    "kernel": KernelOptions,
    "remote": RemoteOptions,
    "policy": PolicyOptions,
    "commands": CommandOptions,
    "container": ContainerOptions,
    "audit": AuditOptions,
    "log": LogOptions,
}


@functools.cache
def declared_options() -> Mapping[str, tuple[Any, Option]]:
    """Return the type and the declaration of each option, by its flat name."""
    fields = chain.from_iterable(map(structs.fields, _GROUPS.values()))
    return {each.name: (each.type, each.default_factory) for each in fields if isinstance(each.default_factory, Option)}


def is_given(values: Mapping[str, Any], name: str) -> bool:
    """Whether the option has a value other than its default."""
    return bool(values[name] != declared_options()[name][1].default)


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

    @property
    def is_attached(self) -> bool:
        """Whether the workspace is the directory itself, without a mount."""
        return self.engine == NO_ENGINE


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
