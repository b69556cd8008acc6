"""`vfsd mount`, `list` and `status`."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
from click.shell_completion import CompletionItem
from msgspec import structs

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command
from vfsd.cli.common.values import BACKEND, CACHE_SIZE, NAME, SIZE, Seconds
from vfsd.client import launch
from vfsd.client.arguments import mount_options
from vfsd.machine.runtime import is_own_place
from vfsd.wire.messages import wire_path
from vfsd.wire.option_rules import SCOPES, OptionError
from vfsd.wire.options import (
    CACHES,
    DEFAULTS,
    ENGINES,
    FSYNCS,
    SNAPSHOT_DIRS,
    TRANSPORTS,
    WAKEUPS,
    MountOptions,
    Ready,
    is_engine,
    known_engines,
)


class _MountOption(click.Option):
    """An option whose help names the backends that accept it, from the table that the check uses."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        scope = SCOPES.get(self.name or "")
        if record is None or scope is None:
            return record
        return record[0], f"{record[1]}  [{scope.places.format_map(_flags(ctx.command))}]"


class _EngineName(click.Choice[str]):
    """The name of a built-in engine, or of one that an installed package adds."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not is_engine(value):
            self.fail(f"{value!r} is not one of {', '.join(map(repr, known_engines()))}.", param, ctx)
        return value


def _flags(command: click.Command) -> dict[str, str]:
    """Map the parameters of a mount to the names of their options."""
    return {param.name: param.opts[-1] for param in command.params if param.name}


# Of each option, by its flat name.
_HELP: Final = {
    "name": "The workspace's name; by default made from the mountpoint.",
    "engine": "The FUSE implementation.",
    "archive": (
        "Start with the content of this archive; or with a snapshot that `vfsd push` stored in s3://BUCKET/PREFIX,"
        " gs://, az:// or file:///DIR, whose content is fetched when it is read (the same as --backend"
        " overlay:URL#NAME).  Without #NAME it is the newest snapshot."
    ),
    "max_bytes": "Limit the size of all files together, such as 512M or 2GiB.  Writes beyond it fail with ENOSPC.",
    "max_memory": (
        "Limit the memory of content, metadata and snapshots together.  The oldest automatic snapshots are dropped to"
        " make room.  It is also the default of --max-bytes.  [default: half of the machine's memory, or of the"
        " cgroup's limit]"
    ),
    "max_inodes": "Limit the number of files, directories and other inodes.",
    "persist": (
        "Keep a journal on disk: the next mount with this name continues with content, snapshots and undo history,"
        " after an unmount and after a crash.  `vfsd persisted` lists and drops journals."
    ),
    "journal_dir": (
        "Keep the journal in this directory, which nothing else uses.  [default: ~/.local/state/vfsd/journals/NAME]"
    ),
    "fsync": "When the journal is synced without fsync(2): after every change, every second, or when the kernel does.",
    "keeper": (
        "With --persist, or for a host directory, a container or a command: leave a dead mount if the daemon dies.  By"
        " default a keeper starts another one; programs in the workspace wait meanwhile, and continue with their open"
        " files and locks."
    ),
    "read_only": "Refuse all changes, including restore and import.",
    "allow_other": "Let other users of this machine use the mount (needs user_allow_other in /etc/fuse.conf).",
    "cache_timeout_s": (
        "Show changes that other programs make to the files, without the mount, after at most SECONDS; 1 by default."
    ),
    "xattrs": "Mount without extended attributes and ACLs; creating a file is then a little faster.",
    "wakeups": (
        "Keep idle CPUs awake during bursts of requests, which makes them faster in many virtual machines.  auto: only"
        " in virtual machines where measurements show a gain."
    ),
    "cache": (
        "writethrough: a write that has returned is in the workspace.  writeback: the kernel collects writes and sends"
        " them later, which is faster for databases and other small writes."
    ),
    "snapshot_directory": (
        "Show the snapshots, read-only, as .snapshots/NAME at the root of the mount.  hidden: listings leave it out;"
        " visible: they show it; off: there is none."
    ),
    "store": (
        "Keep snapshots in this directory, which must be outside of host:DIR.  [default: $VFSD_STORE_DIR,"
        " ~/.local/state/vfsd/store]"
    ),
    "store_options": (
        "An option of the object store: endpoint, region, path_style, allow_http, ...; may be repeated.  Credentials"
        " come from the environment."
    ),
    "cache_bytes": (
        "Keep what was fetched in ~/.cache/vfsd/blobs, which all of your workspaces share, up to this size; 0: no"
        " cache.  [default: 10GiB]"
    ),
    "prefetch": "Fetch the whole snapshot into the cache in the background; `vfsd status` shows the progress.",
    "remote_timeout_s": (
        "How long the mount, and later a read, waits for the network before it fails, a read with EIO; 30 by default. "
        " A later read tries again."
    ),
    "include": "Show only files of overlay:DIR that match (.gitignore's syntax); may be repeated.",
    "exclude": "Hide files of overlay:DIR that match; may be repeated.",
    "protect": "Let no program change files that match (.gitignore's syntax), root included; may be repeated.",
    "hide": (
        "Hide files that match from every program, root included, and refuse to make any; may be repeated.  --exclude"
        " of an overlay hides them, too."
    ),
    "exec_on_host": "Let `vfsd exec` and `vfsd fs exec` run commands on this host, in the mount, with your rights.",
    "sandbox": (
        "Run commands in a container of that image, which sees the workspace at /workspace and nothing else of this"
        " machine.  It is removed with the workspace."
    ),
    "snapshot_each": "Take a snapshot after each command of `vfsd exec`: exec-1, exec-2, ...",
    "pids_limit": "Limit the processes and threads in a container that vfsd creates; 2048 by default.",
    "memory_bytes": "Limit the memory of a container that vfsd creates.",
    "podman_url": (
        "The Podman service: unix:///PATH, ssh://[USER@]HOST/PATH or tcp://HOST:PORT; by default $CONTAINER_HOST, or a"
        " socket of this machine."
    ),
    "workdir": "The directory in the container, or at the other end of exec:COMMAND; /workspace by default.",
    "transport": (
        "How to access the container's files: rootfs (through /proc, on this machine, as root) or agent (a helper that"
        " runs in the container, anywhere)."
    ),
    "network": "The network of a container that vfsd creates, as for podman run; none by default.",
    "fork_server": (
        "Start the daemon as a new process.  By default a server that stays in the background forks it, which is"
        " faster."
    ),
    "foreground": "Run the daemon in the foreground, and log to standard error.",
    "audit_file": (
        "Keep the log of all changes in this file, one JSON object per line.  Without it `vfsd log` shows the newest"
        " changes, which the daemon keeps in memory."
    ),
    "audit": "Do not log which process changes what.",
    "log_level": "How much the daemon writes to its log.",
    "log_format": "The format of the log; journal is for systemd.",
}
_FLAGS: Final = {
    "archive": "--from",
    "cache_timeout_s": "--cache-timeout",
    "snapshot_directory": "--snapshot-dir",
    "store_options": "--store-option",
    "remote_timeout_s": "--remote-timeout",
    "exec_on_host": "--on-host",
    "memory_bytes": "--memory",
    "audit_file": "--audit",
}
# The type and the metavar, if the default does not tell.
_TYPES: Final[dict[str, tuple[Any, str | None]]] = {
    "name": (NAME, None),
    "engine": (_EngineName(ENGINES), None),
    "archive": (click.Path(dir_okay=False), "ARCHIVE.zip|URL#NAME"),
    **dict.fromkeys(("max_bytes", "max_memory", "memory_bytes"), (SIZE, "SIZE")),
    "cache_bytes": (CACHE_SIZE, "SIZE"),
    **dict.fromkeys(("max_inodes", "pids_limit"), (click.IntRange(min=1), "N")),
    **dict.fromkeys(("journal_dir", "store"), (click.Path(), "DIRECTORY")),
    "fsync": (click.Choice(FSYNCS), None),
    "cache_timeout_s": (Seconds(min=0), "SECONDS"),
    "remote_timeout_s": (Seconds(min=0, min_open=True), "SECONDS"),
    "wakeups": (click.Choice(WAKEUPS), None),
    "cache": (click.Choice(CACHES), None),
    "snapshot_directory": (click.Choice(SNAPSHOT_DIRS), None),
    "store_options": (None, "KEY=VALUE"),
    **dict.fromkeys(("include", "exclude", "protect", "hide"), (None, "PATTERN")),
    "sandbox": (None, "image:REF"),
    "podman_url": (None, "URL"),
    "workdir": (None, "DIR"),
    "transport": (click.Choice(TRANSPORTS), None),
    "network": (None, "NETWORK"),
    "audit_file": (click.Path(dir_okay=False), "FILE.jsonl"),
    "log_level": (click.Choice(["debug", "info", "warning", "error"]), None),
    "log_format": (click.Choice(["text", "json", "journal"]), None),
}


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to the command.  `vfsd.wire.options` has their defaults, from which the kind of each follows."""
    defaults: dict[str, Any] = {"name": None, **DEFAULTS, "fork_server": True, "foreground": False}
    for name, text in reversed(_HELP.items()):
        default = defaults[name]
        flag = _FLAGS.get(name) or f"--{'no-' if default is True else ''}{name.replace('_', '-')}"
        given, metavar = _TYPES.get(name, (None, None))
        kind: dict[str, Any] = {"type": given, "metavar": metavar}
        if isinstance(default, bool):
            kind = {"flag_value": False, "default": True} if default else {"is_flag": True}
        elif default == ():
            kind |= {"multiple": True}
        elif default is not None:
            kind |= {"default": default, "show_default": isinstance(given, click.Choice)}
        command = click.option(flag, name, cls=_MountOption, help=text, **kind)(command)
    return command


@click.command(
    "mount",
    cls=Command,
    acts_on_workspace=False,
    examples="""
    mkdir ~/work && vfsd mount ~/work
    vfsd mount ~/work --name demo --max-bytes 2GiB
    vfsd mount ~/work --from backup.zip --read-only
    vfsd mount ~/work --name demo --persist
    vfsd mount ~/work --backend host:~/project --cache-timeout 5
    vfsd mount ~/work --backend overlay:~/project --exclude .env
    vfsd mount ~/work --backend overlay:~/project --protect .git/hooks/ --hide .env
    vfsd mount ~/work --backend overlay:~/release.zip
    vfsd mount ~/work --backend overlay:snapshot:before@~/project
    vfsd mount ~/work --from s3://bucket/team/job-7#turn-3
    vfsd mount ~/work --sandbox image:docker.io/library/python:3.12 --snapshot-each
    vfsd mount ~/work --backend container:web --workdir /srv/app
    vfsd mount ~/work --backend image:docker.io/library/python:3.12
    vfsd mount ~/work --backend exec:'ssh build python3' --workdir /srv/app
    """,
)
@click.argument(
    "mountpoint",
    # Not click.Path, which calls stat(2): at a restart by systemd the mount exists, and no daemon answers yet.
    type=click.STRING,
    shell_complete=lambda *_: [CompletionItem("", type="dir")],
)
@click.option(
    "--backend",
    type=BACKEND,
    default="memory",
    show_default=True,
    cls=_MountOption,
    metavar="BACKEND",
    help="Where the content is: memory, host:DIR, overlay:DIR, overlay:FILE.zip, overlay:snapshot:NAME[@DIR] (a"
    " snapshot on disk), container:NAME (a running Podman container), image:REF (a new container of that image, removed"
    " by the unmount), or exec:'COMMAND' (a directory where COMMAND starts a Python, such as 'ssh HOST python3').",
)
@_options
@click.pass_obj
def mount_command(app: App, /, mountpoint: str, foreground: bool, fork_server: bool, **settings: Any) -> None:
    """Make a directory a workspace.

    MOUNTPOINT is an empty directory that you own.  The command returns when the mount answers; a daemon serves it in
    the background until `vfsd unmount`.  The unmount discards the content of a memory workspace, unless it was
    exported or the workspace has a journal (--persist).

    Brackets at the end of a description have the default, and the backends or options that the option needs.
    """
    if app.workspace is not None:
        raise click.UsageError("-w selects a running workspace; use --name to name a new one")
    if not mountpoint:
        raise click.UsageError("MOUNTPOINT is an empty string")
    options = _checked(mountpoint, settings)
    if foreground:
        from vfsd.daemon.main import foreground as run_in_foreground  # noqa: PLC0415 (start-up: pulls in the daemon)

        try:
            run_in_foreground(options, ready=lambda ready: _emit_ready(app, ready))
        except ValueError as error:  # found by the backend; a background daemon reports it as EINVAL, too
            raise OSError(errno.EINVAL, str(error)) from error
    else:
        with _naming_the_store(options):
            if is_own_place(options.workspace.mountpoint):  # of a workspace of `vfsd run` that is continued
                os.makedirs(options.workspace.mountpoint, mode=0o700, exist_ok=True)
            ready = launch.launch(options, fork_server=fork_server)
        try:
            _emit_ready(app, ready)
        except OSError as error:  # from standard output
            place = output.show_path(wire_path(os.fsencode(ready.mountpoint)))
            end = f"but workspace {ready.name} is mounted at {place}; `vfsd unmount {ready.name}` unmounts it"
            raise OSError(error.errno, f"{error.strerror}, {end}") from error


@contextlib.contextmanager
def _naming_the_store(options: MountOptions) -> Iterator[None]:
    """Say which object store the block waits for, if it takes long."""
    remote = options.workspace.backend.remote
    if remote is None:
        yield
        return
    what = f"waiting for {remote[0]}; --remote-timeout ends that after {options.remote.remote_timeout_s:g} s"
    saying = threading.Timer(output.silence_s(), output.note, [what])
    saying.start()
    try:
        yield
    finally:
        saying.cancel()


def _checked(mountpoint: str, settings: dict[str, Any]) -> MountOptions:
    """Check the options of the mount.  Errors use the names of the command line."""
    try:
        return mount_options(mountpoint, **settings)
    except OptionError as error:
        raise click.UsageError(error.message(_flags(mount_command))) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _emit_ready(app: App, ready: Ready) -> None:
    place, socket = (wire_path(os.fsencode(path)) for path in (ready.mountpoint, ready.socket))
    app.emit(
        structs.replace(ready, mountpoint=place, socket=socket),
        lambda _: output.say(f"workspace {ready.name} is mounted at {output.show_path(place)} ({ready.engine} engine)"),
    )
    if ready.recovered and not app.json:
        output.note(ready.recovered)
    for warning in ready.warnings if not app.json else ():
        output.note(warning)
