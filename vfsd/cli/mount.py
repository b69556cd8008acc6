"""`vfsd mount` and `vfsd attach`."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem
from msgspec import structs

from vfsd.cli.common import output
from vfsd.cli.common.app import EVERYTHING, App, Command
from vfsd.cli.common.values import BACKEND, CACHE_SIZE, NAME, SIZE, Seconds
from vfsd.client import launch
from vfsd.client.arguments import attach_options, mount_options
from vfsd.machine.runtime import is_own_place
from vfsd.wire.messages import wire_path
from vfsd.wire.option_rules import OptionError
from vfsd.wire.options import ENGINES, MountOptions, Option, Ready, declared_options, is_engine, known_engines

# The options that `--help` shows.
_FREQUENT: Final = frozenset(
    ("name", "backend", "archive", "read_only", "exclude", "max_memory", "persist", "protect", "hide", "sandbox")
)


class _MountOption(click.Option):
    """An option whose help names the backends that accept it, as its declaration does."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        if self.name not in _FREQUENT and EVERYTHING not in ctx.meta:
            return None
        record = super().get_help_record(ctx)
        declared = declared_options().get(str(self.name))
        scope = declared[1].scope if declared else None
        if record is None or scope is None:
            return record
        return record[0], f"{record[1]}  [{scope.places.format_map(_flags(ctx.command))}]"


class _EngineName(click.Choice[str]):
    """The name of a built-in engine, or of one that an installed package adds."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not is_engine(value):
            self.fail(f"{value!r} is not one of {', '.join(map(repr, known_engines()))}.", param, ctx)
        return value


def _show_everything(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[EVERYTHING] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _flags(command: click.Command) -> dict[str, str]:
    """Map the parameters of a mount to the names of their options."""
    return {param.name: param.opts[-1] for param in command.params if param.name}


def _parameter(name: str, kind: Any, option: Option) -> dict[str, Any]:
    """Return what click has to know of an option, from its declaration."""
    default, metavar = option.default, option.metavar or None
    if isinstance(default, bool):
        return {"flag_value": False, "default": True} if default else {"is_flag": True}
    if isinstance(default, tuple):
        return {"multiple": True, "metavar": metavar or "PATTERN"}
    given = {"default": None if default == "" else default, "metavar": metavar}
    if name in _TYPES or get_origin(kind) is Literal:
        choice = _TYPES.get(name) or click.Choice(get_args(kind))
        return given | {"type": choice, "default": str(default) or None, "show_default": default != ""}
    if option.kind == "size":
        return given | {"type": CACHE_SIZE if option.zero else SIZE, "metavar": "SIZE"}
    if option.kind in {"file", "directory"}:
        return given | {"type": click.Path(dir_okay=option.kind == "directory"), "metavar": metavar or "DIRECTORY"}
    if int in get_args(kind):
        return given | {"type": click.IntRange(min=option.least)}
    if name.endswith("_s"):
        return given | {"type": Seconds(min=0, min_open=not option.zero), "metavar": "SECONDS"}
    return given


# Options whose values are checked by other things than their type.
_TYPES: Final[Mapping[str, Any]] = {"name": NAME, "backend": BACKEND, "engine": _EngineName(ENGINES)}


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the declared options to the command."""
    for name, (kind, option) in reversed([*declared_options().items()]):
        parameter = _parameter(name, kind, option)
        command = click.option(option.flag_of(name), name, cls=_MountOption, help=option.text, **parameter)(command)
    return command


@click.command(
    "mount",
    cls=Command,
    acts_on_workspace=False,
    examples="""
    mkdir ~/work && vfsd mount ~/work
    vfsd mount ~/work --name demo --max-memory 2GiB
    vfsd mount ~/work --from backup.zip --read-only
    vfsd mount ~/work --name demo --persist
    vfsd mount ~/work --backend overlay:~/project --protect .git/hooks/ --hide .env

    vfsd mount ~/work --backend host:~/project --cache-timeout 5
    vfsd mount ~/work --backend overlay:~/project --exclude .env
    vfsd mount ~/work --backend overlay:~/project --frozen
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
@_options
@click.option(
    "--no-fork-server",
    "fork_server",
    cls=_MountOption,
    flag_value=False,
    default=True,
    help="Start the daemon as a new process.  By default a server that stays in the background forks it, which is"
    " faster.",
)
@click.option(
    "--foreground",
    is_flag=True,
    cls=_MountOption,
    help="Run the daemon in the foreground, and log to standard error.",
)
@click.option(
    "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_show_everything, help="Show all options."
)
@click.pass_obj
def mount_command(app: App, /, mountpoint: str, foreground: bool, fork_server: bool, **settings: Any) -> None:
    """Make a directory a workspace.

    MOUNTPOINT is an empty directory that you own.  The command returns when the mount answers; a daemon serves it in
    the background until `vfsd unmount`.  The unmount discards the content of a memory workspace, unless it was
    exported or the workspace has a journal (--persist).

    A description ends with the default, and with the backends or options that the option needs, in brackets.
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
        with naming_what_is_read(options):
            if is_own_place(options.workspace.mountpoint):  # of a workspace of `vfsd run` that is continued
                os.makedirs(options.workspace.mountpoint, mode=0o700, exist_ok=True)
            ready = launch.launch(options, fork_server=fork_server)
        try:
            _emit_ready(app, ready)
        except OSError as error:  # from standard output
            place = output.show_path(wire_path(os.fsencode(ready.mountpoint)))
            end = f"but workspace {ready.name} is mounted at {place}; `vfsd unmount {ready.name}` unmounts it"
            raise OSError(error.errno, f"{error.strerror}, {end}") from error


@click.command(
    "attach",
    cls=Command,
    acts_on_workspace=False,
    examples="""
    vfsd attach .                          # then: vfsd snapshot, diff, restore, hooks install claude
    vfsd attach ~/project --name demo --json
    vfsd attach ~/project --store /var/lib/snapshots
    vfsd unmount demo                      # leaves the directory as it is
    """,
)
@click.argument("directory", type=click.STRING, shell_complete=lambda *_: [CompletionItem("", type="dir")])
@click.option("--name", type=NAME, help="The workspace's name; by default made from the directory.")
@click.option(
    "--store",
    type=click.Path(),
    metavar="DIRECTORY",
    help="Keep snapshots in this directory, which must be outside of DIRECTORY.  [default: $VFSD_STORE_DIR,"
    " ~/.local/state/vfsd/store]",
)
@click.pass_obj
def attach_command(app: App, directory: str, name: str | None, store: str | None) -> None:
    """Make a directory a workspace without a mount, where FUSE is missing.

    The workspace is the directory itself, so nothing is isolated: programs change its files directly. Snapshots are
    kept in the store on disk, and belong to the directory: the next attach finds them. `vfsd snapshot`, `diff`,
    `restore`, `export`, `push`, `rewind`, hooks, `vfsd mcp` and `vfsd web` work as for host:DIR. A policy, the log of
    changes, `vfsd exec` and `vfsd upgrade` need a mount, and say so.

    `vfsd unmount` detaches the directory, and leaves it as it is.
    """
    if app.workspace is not None:
        raise click.UsageError("-w selects a running workspace; use --name to name a new one")
    try:
        options = attach_options(directory, name=name, store=store)
    except OptionError as error:
        raise click.UsageError(error.message({"store": "--store", "name": "--name"})) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _emit_ready(app, launch.launch(options, fork_server=False))


@contextlib.contextmanager
def naming_what_is_read(options: MountOptions) -> Iterator[None]:
    """Say which object store or directory the block reads, if it takes long."""
    backend = options.workspace.backend
    if backend.remote is not None:
        limit = f"--remote-timeout ends that after {options.remote.remote_timeout_s:g} s"
        what = f"waiting for {backend.remote[0]}; {limit}"
    elif options.content.frozen:
        what = f"taking a snapshot of {output.show_path(wire_path(os.fsencode(backend.argument)))}; Ctrl-C ends that"
    else:
        yield
        return
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
    is_at, how = ("attached to", "") if ready.is_attached else ("mounted at", f" ({ready.engine} engine)")
    app.emit(
        structs.replace(ready, mountpoint=place, socket=socket),
        lambda _: output.say(f"workspace {ready.name} is {is_at} {output.show_path(place)}{how}"),
    )
    if ready.recovered and not app.json:
        output.note(ready.recovered)
    for warning in ready.warnings if not app.json else ():
        output.note(warning)
