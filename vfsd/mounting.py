"""What a caller asks for, checked: the options of a mount to be made, or a workspace that runs."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack

from protocol.backends.container.address import parse_address
from vfsd.options import ENGINES, NAME_PATTERN, TRANSPORTS, EngineChoice, MountOptions, TransportChoice
from vfsd.runtime import WorkspaceNotFoundError, WorkspaceRecord, find_workspace, unique_name
from vfsd.userpaths import current_directory

__all__ = ["FilePath", "MountArguments", "check_backend", "mount_options", "running_workspace"]

FilePath: TypeAlias = str | os.PathLike[str]

# The grammar's backends but memory, and what each is of.
_ARGUMENTS: Final = {
    "host": "a directory",
    "overlay": "a directory",
    "container": "a container's name",
    "image": "an image's name",
}
_OF_DIRECTORIES: Final = frozenset({"host", "overlay"})
_IN_MEMORY: Final = frozenset({"memory", "overlay"})
_IN_CONTAINERS: Final = frozenset({"container", "image"})


def check_backend(backend: str) -> None:
    """ValueError for what is no backend."""
    kind, _, argument = backend.partition(":")
    if backend == "memory":
        return
    if kind not in _ARGUMENTS:
        raise ValueError(f"{backend!r} is not one of memory, host:DIR, overlay:DIR, container:NAME, image:REF")
    if not argument:
        raise ValueError(f"{backend!r} lacks {_ARGUMENTS[kind]} after the colon")


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


def _check_host_options(what: str, options: MountOptions) -> None:
    if options.archive is not None:
        raise ValueError(f"{what} has its own content: it takes no archive to begin with")
    for name in ("max_bytes", "max_inodes"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name} is the memory backend's: {what} has what its file system has")


def _check_container_options(options: MountOptions, kind: str) -> None:
    if options.podman_url is not None:
        parse_address(options.podman_url)
    if options.transport not in TRANSPORTS:
        raise ValueError(f"not a transport: {options.transport!r} (one of {', '.join(TRANSPORTS)})")
    if kind not in _IN_CONTAINERS:
        names = ["workdir"] if options.sandbox else ["podman_url", "workdir", "network"]
        given = [name for name in names if getattr(options, name) is not None]
        if given or options.transport != "auto":
            raise ValueError(f"{(given or ['transport'])[0]} goes with container:NAME or image:REF")
        return
    if options.sandbox is not None:
        raise ValueError(f"the commands of a {kind} workspace run in its container: it takes no sandbox")
    workdir = options.workdir
    if workdir is not None and (not workdir.startswith("/") or ".." in workdir.split("/")):
        raise ValueError(f"workdir must be an absolute path in the container, without '..': {workdir!r}")
    if options.network is not None and kind == "container":
        raise ValueError("network is for a container that vfsd makes (image:REF); this one has its own")


def _check_sandbox_options(options: MountOptions, kind: str) -> None:
    sandbox = options.sandbox
    if sandbox is not None and (not sandbox.startswith("image:") or sandbox == "image:"):
        raise ValueError(f"not a sandbox: {sandbox!r}; it is written image:REF")
    if sandbox is not None and options.exec_on_host:
        raise ValueError("commands run in a sandbox or on this host, not in both")
    for name in ("pids_limit", "memory_bytes"):
        if getattr(options, name) is not None and sandbox is None and kind != "image":
            raise ValueError(f"{name} is for a container that vfsd makes: it goes with a sandbox, or with image:REF")


def _check_cache_timeout(options: MountOptions, kind: str) -> None:
    timeout_s = options.cache_timeout_s
    if timeout_s is None:
        return
    if kind not in {"host", *_IN_CONTAINERS}:
        raise ValueError(f"nobody but vfsd changes a {kind} workspace: there is no cache_timeout_s to set")
    if not 0 <= timeout_s < math.inf:
        raise ValueError(f"cache_timeout_s is a number of seconds, not {timeout_s}")


class MountArguments(TypedDict, total=False):
    """What `mount_options` takes beside mountpoint and backend.  `MountOptions` says what each means without it."""

    name: str | None
    engine: EngineChoice
    archive: FilePath | None
    max_bytes: int | None
    max_inodes: int | None
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

    ValueError for a value that makes no sense, TypeError for an argument that there is not.
    """
    check_backend(backend)
    if not os.fspath(mountpoint):
        raise ValueError("the mountpoint is an empty string")  # not where the caller stands
    place = os.path.abspath(mountpoint)
    kind, _, argument = backend.partition(":")
    if kind in _OF_DIRECTORIES:
        backend = f"{kind}:{_host_directory(argument, place)}"
    given: dict[str, Any] = dict(arguments)
    if given.get("name") is None:
        given["name"] = unique_name(place)
    for name in ("archive", "store"):
        if given.get(name) is not None:
            if not os.fspath(given[name]):
                raise ValueError(f"{name} is an empty string")
            given[name] = os.path.abspath(given[name])
    for name in ("include", "exclude"):
        given[name] = tuple(given.get(name, ()))
    options = MountOptions(mountpoint=place, backend=backend, **given)
    _check(options, kind)
    return options


def _check(options: MountOptions, kind: str) -> None:
    """ValueError for what makes no sense, by itself or with the others."""
    if NAME_PATTERN.fullmatch(options.name) is None:
        raise ValueError(f"not a workspace name: {options.name!r} (letters, digits, '.', '_', '-', at most 64)")
    if options.engine not in ENGINES:
        raise ValueError(f"not an engine: {options.engine!r} (one of {', '.join(ENGINES)})")
    for name in ("max_bytes", "max_inodes", "pids_limit", "memory_bytes"):
        limit = getattr(options, name)
        if limit is not None and limit <= 0:
            raise ValueError(f"{name} must be positive, not {limit}")
    if kind not in _IN_MEMORY:
        _check_host_options("a host directory" if kind == "host" else "a container", options)
    elif options.store is not None:
        raise ValueError(f"the snapshots of a workspace of the {kind} backend are in memory: it takes no store")
    _check_sandbox_options(options, kind)
    _check_container_options(options, kind)
    if (options.include or options.exclude) and kind != "overlay":
        raise ValueError("only an overlay hides what is below it: include and exclude go with overlay:DIR")
    _check_cache_timeout(options, kind)


def running_workspace(selector: str | None = None) -> WorkspaceRecord:
    """The workspace that `selector` (a name, or a path in it) means.

    None picks $VFSD_WORKSPACE, else the one that the current directory is in, else the only one running.
    FileNotFoundError, whose text says what there is, where none is meant.
    """
    try:
        return find_workspace(selector, os.fsdecode(current_directory()))
    except WorkspaceNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from None
