"""What a caller asks for, checked: the options of a mount to be made, or a workspace that runs."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from typing import Final, Literal

from protocol.backends.container.address import parse_address
from vfsd.options import ENGINES, NAME_PATTERN, TRANSPORTS, EngineChoice, MountOptions, TransportChoice
from vfsd.runtime import WorkspaceNotFoundError, WorkspaceRecord, find_workspace, unique_name
from vfsd.userpaths import current_directory

__all__ = ["check_backend", "mount_options", "running_workspace"]

# The grammar's backends but memory, and what each is of.
_ARGUMENTS: Final = {
    "host": "a directory",
    "overlay": "a directory",
    "container": "a container's name",
    "image": "an image's name",
}
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


def _check_host_options(what: str, archive: object, **limits: int | None) -> None:
    if archive is not None:
        raise ValueError(f"{what} has its own content: it takes no archive to begin with")
    for name, limit in limits.items():
        if limit is not None:
            raise ValueError(f"{name} is the memory backend's: {what} has what its file system has")


def _check_container_options(
    kind: str, sandbox: str | None, podman_url: str | None, workdir: str | None, transport: str, network: str | None
) -> None:
    if podman_url is not None:
        parse_address(podman_url)
    if kind not in _IN_CONTAINERS:
        given = {"workdir": workdir} if sandbox else {"podman_url": podman_url, "workdir": workdir, "network": network}
        names = [name for name, value in given.items() if value is not None]
        if names or transport != "auto":
            raise ValueError(f"{(names or ['transport'])[0]} goes with container:NAME or image:REF")
        return
    if sandbox is not None:
        raise ValueError(f"the commands of a {kind} workspace run in its container: it takes no sandbox")
    if workdir is not None and (not workdir.startswith("/") or ".." in workdir.split("/")):
        raise ValueError(f"workdir must be an absolute path in the container, without '..': {workdir!r}")
    if transport not in TRANSPORTS:
        raise ValueError(f"not a transport: {transport!r} (one of {', '.join(TRANSPORTS)})")
    if network is not None and kind == "container":
        raise ValueError("network is for a container that vfsd makes (image:REF); this one has its own")


def _check_sandbox_options(kind: str, sandbox: str | None, *, exec_on_host: bool, **limits: int | None) -> None:
    if sandbox is not None and (not sandbox.startswith("image:") or sandbox == "image:"):
        raise ValueError(f"not a sandbox: {sandbox!r}; it is written image:REF")
    if sandbox is not None and exec_on_host:
        raise ValueError("commands run in a sandbox or on this host, not in both")
    for name, limit in limits.items():
        if limit is not None and sandbox is None and kind != "image":
            raise ValueError(f"{name} is for a container that vfsd makes: it goes with a sandbox, or with image:REF")
        if limit is not None and limit <= 0:
            raise ValueError(f"{name} must be positive, not {limit}")


def _check_cache_timeout(kind: str, cache_timeout_s: float) -> None:
    if kind not in {"host", *_IN_CONTAINERS}:
        raise ValueError(f"nobody but vfsd changes a {kind} workspace: there is no cache_timeout_s to set")
    if not 0 <= cache_timeout_s < math.inf:
        raise ValueError(f"cache_timeout_s is a number of seconds, not {cache_timeout_s}")


def _check_store(store: str | os.PathLike[str], kind: str) -> None:
    if kind in _IN_MEMORY:
        raise ValueError(f"the snapshots of a workspace of the {kind} backend are in memory: it takes no store")
    if not os.fspath(store):
        raise ValueError("the store's directory is an empty string")


def mount_options(
    mountpoint: str | os.PathLike[str],
    backend: str = "memory",
    *,
    name: str | None = None,
    engine: EngineChoice = "auto",
    archive: str | os.PathLike[str] | None = None,
    max_bytes: int | None = None,
    max_inodes: int | None = None,
    read_only: bool = False,
    allow_other: bool = False,
    cache_timeout_s: float | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    exec_on_host: bool = False,
    store: str | os.PathLike[str] | None = None,
    sandbox: str | None = None,
    snapshot_each: bool = False,
    podman_url: str | None = None,
    workdir: str | None = None,
    transport: TransportChoice = "auto",
    network: str | None = None,
    pids_limit: int | None = None,
    memory_bytes: int | None = None,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    log_format: Literal["text", "json", "journal"] = "text",
) -> MountOptions:
    """The options of a mount at `mountpoint`; without a `name`, one made from its last part.

    ValueError for a value that makes no sense.
    """
    check_backend(backend)
    if name is not None and NAME_PATTERN.fullmatch(name) is None:
        raise ValueError(f"not a workspace name: {name!r} (letters, digits, '.', '_', '-', at most 64)")
    if engine not in ENGINES:
        raise ValueError(f"not an engine: {engine!r} (one of {', '.join(ENGINES)})")
    for what, limit in (("max_bytes", max_bytes), ("max_inodes", max_inodes)):
        if limit is not None and limit <= 0:
            raise ValueError(f"{what} must be positive, not {limit}")
    if not os.fspath(mountpoint):
        raise ValueError("the mountpoint is an empty string")  # not where the caller stands
    place = os.path.abspath(mountpoint)
    kind, _, argument = backend.partition(":")
    if kind == "host":
        _check_host_options("a host directory", archive, max_bytes=max_bytes, max_inodes=max_inodes)
        backend = f"host:{_host_directory(argument, place)}"
    elif kind == "overlay":
        backend = f"overlay:{_host_directory(argument, place)}"
    elif kind in _IN_CONTAINERS:
        _check_host_options("a container", archive, max_bytes=max_bytes, max_inodes=max_inodes)
    _check_sandbox_options(kind, sandbox, exec_on_host=exec_on_host, pids_limit=pids_limit, memory_bytes=memory_bytes)
    _check_container_options(kind, sandbox, podman_url, workdir, transport, network)
    if store is not None:
        _check_store(store, kind)
    if (include or exclude) and kind != "overlay":
        raise ValueError("only an overlay hides what is below it: include and exclude go with overlay:DIR")
    if cache_timeout_s is not None:
        _check_cache_timeout(kind, cache_timeout_s)
    return MountOptions(
        mountpoint=place,
        name=name or unique_name(place),
        backend=backend,
        engine=engine,
        archive=None if archive is None else os.path.abspath(archive),
        max_bytes=max_bytes,
        max_inodes=max_inodes,
        read_only=read_only,
        allow_other=allow_other,
        cache_timeout_s=cache_timeout_s,
        include=tuple(include),
        exclude=tuple(exclude),
        exec_on_host=exec_on_host,
        store=None if store is None else os.path.abspath(store),
        sandbox=sandbox,
        snapshot_each=snapshot_each,
        podman_url=podman_url,
        workdir=workdir,
        transport=transport,
        network=network,
        pids_limit=pids_limit,
        memory_bytes=memory_bytes,
        log_level=log_level,
        log_format=log_format,
    )


def running_workspace(selector: str | None = None) -> WorkspaceRecord:
    """The workspace that `selector` (a name, or a path in it) means.

    None picks $VFSD_WORKSPACE, else the one that the current directory is in, else the only one running.
    FileNotFoundError, whose text says what there is, where none is meant.
    """
    try:
        return find_workspace(selector, os.fsdecode(current_directory()))
    except WorkspaceNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from None
