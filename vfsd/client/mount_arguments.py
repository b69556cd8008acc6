"""Check a caller's arguments: build the options of a new mount, or find a running workspace."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

from protocol.backends.container.podman.address import parse_address
from vfsd.client.paths import current_directory
from vfsd.client.requests import FilePath
from vfsd.machine.runtime import WorkspaceNotFoundError, WorkspaceRecord, find_workspace, unique_name
from vfsd.wire.backend_spec import parse_backend
from vfsd.wire.option_rules import OptionError, check_options, parse_sandbox
from vfsd.wire.options import MountOptions, TransportChoice

__all__ = ["MountArguments", "mount_options", "running_workspace"]


def _host_directory(directory: str, mountpoint: str) -> str:
    """`directory`, absolute.  OSError where it is none, ValueError where a mount at `mountpoint` would show itself."""
    place = os.path.abspath(directory)
    if not os.path.isdir(place):
        code = errno.ENOTDIR if os.path.lexists(place) else errno.ENOENT
        raise OSError(code, "there is no such directory to serve" if code == errno.ENOENT else "not a directory", place)
    real, real_mountpoint = os.path.realpath(place), os.path.realpath(mountpoint)
    if real == real_mountpoint:
        raise ValueError(f"{place} cannot be served at itself: mount it at another directory")
    for inner, outer, what in (
        (real_mountpoint, real, f"the mountpoint {mountpoint} is inside {place}, which it would show"),
        (real, real_mountpoint, f"{place} is inside the mountpoint {mountpoint}, which would hide it"),
    ):
        if os.path.commonpath((inner, outer)) == outer:
            raise ValueError(what)
    return place


class MountArguments(TypedDict, total=False):
    """What `mount_options` takes beside mountpoint and backend.  `MountOptions` says what each means without it."""

    name: str | None
    engine: str
    archive: FilePath | None
    max_bytes: int | None
    max_inodes: int | None
    max_memory: int | None
    read_only: bool
    allow_other: bool
    cache_timeout_s: float | None
    xattrs: bool
    include: Sequence[str]
    exclude: Sequence[str]
    exec_on_host: bool
    store: FilePath | None
    sandbox: str | None
    snapshot_each: bool
    podman_url: str | None
    workdir: str | None
    transport: TransportChoice
    network: str | None
    pids_limit: int | None
    memory_bytes: int | None
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["text", "json", "journal"]


def mount_options(mountpoint: FilePath, backend: str = "memory", **arguments: Unpack[MountArguments]) -> MountOptions:
    """The options of a mount at `mountpoint`; without a `name`, one made from its last part.

    ValueError for a value that makes no sense (OptionError, where it is an option's), TypeError for an argument that
    there is not, OSError for a directory that cannot be served.
    """
    spec = parse_backend(backend)
    if not os.fspath(mountpoint):
        raise ValueError("the mountpoint is an empty string")  # not where the caller stands
    place = os.path.abspath(mountpoint)
    if spec.is_directory:
        spec = replace(spec, argument=_host_directory(spec.argument, place))
    given: dict[str, Any] = dict(arguments)
    if given.get("name") is None:
        given["name"] = unique_name(place)
    for name in ("archive", "store"):
        if given.get(name) is not None:
            if not os.fspath(given[name]):
                raise OptionError(f"{{{name}}} is an empty string")
            given[name] = os.path.abspath(given[name])
    for name in ("include", "exclude"):
        given[name] = tuple(given.get(name, ()))
    if given.get("sandbox") is not None:
        given["sandbox"] = parse_sandbox(given["sandbox"])
    options = MountOptions.of(mountpoint=place, backend=spec, **given)
    check_options(options)
    if options.container.podman_url is not None:
        try:
            parse_address(options.container.podman_url)
        except ValueError as error:
            raise OptionError("{podman_url}: {error}", error=error) from None
    return options


def running_workspace(selector: str | None = None) -> WorkspaceRecord:
    """The workspace that `selector` (a name, or a path in it) means.

    None picks $VFSD_WORKSPACE, else the one that the current directory is in, else the only one running.
    FileNotFoundError, whose text says what there is, where none is meant.
    """
    try:
        return find_workspace(selector, os.fsdecode(current_directory()))
    except WorkspaceNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from None
