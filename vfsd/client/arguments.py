"""A caller's arguments: the options of a new mount, a running workspace, and paths in it.

A path of the caller becomes a path relative to the workspace's root.  Paths are bytes and the conversion is lexical, so
names that are not UTF-8 and files that do not exist work as well.  The file system is consulted only for a path outside
of the mountpoint, which may lead into it through a symlink, or be in another mount of the workspace.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypedDict, Unpack

from msgspec.structs import replace

from protocol.backends.container.podman.address import parse_address
from protocol.errors import check_type
from vfsd.machine.mountinfo import find_mount, mount_at, resolve
from vfsd.machine.runtime import WorkspaceNotFoundError, WorkspaceRecord, find_workspace, read_records, unique_name
from vfsd.operations.declaration import CacheChoice
from vfsd.wire.messages import wire_path
from vfsd.wire.option_rules import OptionError, check_options, parse_sandbox
from vfsd.wire.options import (
    MEMORY,
    NO_ENGINE,
    BackendSpec,
    FsyncChoice,
    LogFormatChoice,
    LogLevelChoice,
    MountOptions,
    SnapshotDirChoice,
    TransportChoice,
    WakeupsChoice,
    declared_options,
    is_url,
    parse_backend,
)

FilePath: TypeAlias = str | os.PathLike[str]
UserPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def _host_directory(directory: str, mountpoint: str) -> str:
    """Return `directory` as an absolute path.

    OSError if it is not a directory.  ValueError if `mountpoint` is inside it or contains it.
    """
    path = os.path.abspath(directory)
    if not os.path.isdir(path):
        code = errno.ENOTDIR if os.path.lexists(path) else errno.ENOENT
        raise OSError(code, "there is no such directory to serve" if code == errno.ENOENT else "not a directory", path)
    _check_apart(path, mountpoint)
    return path


def _check_apart(path: str, mountpoint: str) -> None:
    # At a restart by systemd the mount may exist, and no daemon answers yet: `resolve` asks none.
    real, real_mountpoint = os.path.realpath(path), resolve(mountpoint)
    if real == real_mountpoint:
        raise ValueError(f"{path} cannot be served at itself: mount it at another directory")
    common = os.path.commonpath((real, real_mountpoint))
    if common == real:
        raise ValueError(f"the mountpoint {mountpoint} is inside {path}, which it would show")
    if common == real_mountpoint:
        raise ValueError(f"{path} is inside the mountpoint {mountpoint}, which would hide it")


def _archive_below(file: str, mountpoint: str) -> str:
    """Return the ZIP file as an absolute path.

    OSError if it is not a regular file; ValueError if `mountpoint` would hide it.
    """
    path = os.path.abspath(file)
    if not os.path.isfile(path):
        if os.path.lexists(path):
            raise OSError(errno.EINVAL, "not a regular file, so not an archive", path)
        raise FileNotFoundError(errno.ENOENT, "there is no such archive to serve", path)
    _check_apart(path, mountpoint)
    return path


def _absolute_backend(spec: BackendSpec, mountpoint: str) -> BackendSpec:
    """Make the paths of a backend absolute, and check them.  OSError, ValueError."""
    if spec.snapshot is not None:
        name, directory = spec.snapshot
        return spec.with_snapshot(
            name, os.path.abspath(directory) if directory and "://" not in directory else directory
        )
    if spec.lower_layer == "archive":
        return replace(spec, argument=_archive_below(spec.argument, mountpoint))
    if spec.lower_layer == "directory" and not os.path.abspath(spec.argument).strip("/"):
        return replace(spec, argument="/")  # `/` is shown without the mounts in it
    return replace(spec, argument=_host_directory(spec.argument, mountpoint)) if spec.is_path else spec


def _with_url(backend: str, given: dict[str, Any]) -> str:
    """Return the backend, which is an overlay if the option `archive` is the URL of a snapshot.  OptionError."""
    source = given.get("archive")
    if source is None or not is_url(os.fspath(source)):
        return backend
    if backend != str(MEMORY):
        raise OptionError("{archive} URL#NAME makes a workspace over that snapshot, so {backend} is not needed")
    del given["archive"]
    return f"overlay:{os.fspath(source)}"


def _check_outside(name: str, path: str | None, mountpoint: str, spec: BackendSpec) -> None:
    """Raise OptionError if `path`, the value of the option `name`, is where the workspace would hide or show it."""
    places = {"mountpoint": mountpoint}
    if spec.kind == "host" or (spec.lower_layer == "directory" and spec.argument != "/"):
        places["directory that the workspace shows"] = spec.argument
    for place, directory in places.items():
        real = resolve(directory)
        if path is not None and os.path.commonpath((real, os.path.realpath(path))) == real:
            raise OptionError(f"{{{name}}} is inside the {place}: {{path}}", path=path)


def _check_places(given: Mapping[str, Any], mountpoint: str, spec: BackendSpec) -> None:
    """Raise OptionError for a store, journal or audit file at an impossible place, and for a frozen root directory."""
    if given.get("frozen") and spec.argument == "/":
        raise OptionError("{frozen} is for a directory, not for the whole machine")
    store = given.get("store")
    if store is not None and os.path.exists(store) and not os.path.isdir(store):
        raise OptionError("{store} is not a directory: {path}", path=store)
    for name in ("journal_dir", "audit_file"):
        _check_outside(name, given.get(name), mountpoint, spec)


def _check_patterns(name: str, patterns: tuple[str, ...]) -> None:
    """Raise OptionError for a pattern of the option `name` that is invalid."""
    if patterns:
        from protocol.adapters.git_patterns import PathFilter  # noqa: PLC0415 start-up: few mounts have patterns

        try:
            PathFilter(patterns)
        except ValueError as error:
            raise OptionError(f"{{{name}}}: {{error}}", error=error) from None


class MountArguments(TypedDict, total=False):
    """The optional arguments of `mount_options`, as `vfsd.wire.options` declares them."""

    name: str | None
    read_only: bool
    store: FilePath | None
    keeper: bool
    archive: FilePath | None
    include: Sequence[str]
    exclude: Sequence[str]
    frozen: bool
    max_bytes: int | None
    max_inodes: int | None
    max_memory: int | None
    persist: bool
    journal_dir: FilePath | None
    fsync: FsyncChoice
    engine: str
    allow_other: bool
    cache_timeout_s: float | None
    xattrs: bool
    wakeups: WakeupsChoice
    cache: CacheChoice
    snapshot_directory: SnapshotDirChoice
    store_options: Sequence[str]
    cache_bytes: int
    remote_timeout_s: float
    prefetch: bool
    protect: Sequence[str]
    hide: Sequence[str]
    exec_on_host: bool
    sandbox: str | None
    snapshot_each: bool
    podman_url: str | None
    workdir: str | None
    transport: TransportChoice
    network: str | None
    pids_limit: int | None
    memory_bytes: int | None
    audit_file: FilePath | None
    audit: bool
    log_level: LogLevelChoice
    log_format: LogFormatChoice


def mount_options(mountpoint: FilePath, backend: str = "memory", **arguments: Unpack[MountArguments]) -> MountOptions:
    """Return the options of a mount at `mountpoint`.  The default `name` is made from the mountpoint's last component.

    ValueError for an invalid value (OptionError for that of an option), TypeError for an unknown argument or a value of
    a wrong type, OSError for a backend's directory that does not exist.
    """
    given: dict[str, Any] = dict(arguments)
    check_type(backend, str, 'a backend is a str, such as "overlay:DIR"', "an object with files is `filesystem=OBJECT`")
    spec = parse_backend(_with_url(backend, given))
    if not os.fspath(mountpoint):
        raise ValueError("the mountpoint is an empty string")  # `abspath` would make it the current directory
    path = os.path.abspath(mountpoint)
    spec = _absolute_backend(spec, path)
    if given.get("name") is None:
        given["name"] = unique_name(path)
    for name, (_, option) in declared_options().items():
        value = given.get(name)
        if option.kind in {"file", "directory"} and value is not None:
            if not os.fspath(value):
                raise OptionError(f"{{{name}}} is an empty string")
            given[name] = os.path.abspath(value)
        if isinstance(option.default, tuple) and value is not None:
            if isinstance(value, str):  # a sequence of str as well
                raise TypeError(f"{name} must be a list of str, not str")
            given[name] = tuple(value)
        if option.kind == "patterns":
            _check_patterns(name, given.get(name, ()))
    _check_places(given, path, spec)
    if given.get("sandbox") is not None:
        check_type(given["sandbox"], str, 'a sandbox is a str, such as "image:REF"')
        given["sandbox"] = parse_sandbox(given["sandbox"])
    options = MountOptions.of(mountpoint=path, backend=spec, **given)
    check_options(options)
    if options.container.podman_url is not None:
        try:
            parse_address(options.container.podman_url)
        except ValueError as error:
            raise OptionError("{podman_url}: {error}", error=error) from None
    return options


def attach_options(directory: FilePath, *, name: str | None = None, store: FilePath | None = None) -> MountOptions:
    """Return the options of a workspace without a mount: `directory` itself.  The default `name` is made from it.

    ValueError for an invalid name or store, OSError for a directory that does not exist.
    """
    for given, what in ((directory, "the directory"), (store, "the store")):
        if given is not None and not os.fspath(given):
            raise ValueError(f"{what} is an empty string")
    path = resolve(os.fspath(directory))  # the same workspace by every name of the directory
    if not os.path.isdir(path):
        code = errno.ENOTDIR if os.path.lexists(path) else errno.ENOENT
        raise OSError(code, "there is no such directory to attach" if code == errno.ENOENT else "not a directory", path)
    spec = BackendSpec("host", path)
    place = None if store is None else os.path.abspath(store)
    _check_places({"store": place}, path, spec)
    options = MountOptions.of(path, name or unique_name(path), backend=spec, store=place)
    check_options(options)
    return replace(options, kernel=replace(options.kernel, engine=NO_ENGINE))


@contextlib.contextmanager
def fork_target(path: FilePath, name: str | None) -> Iterator[tuple[str, str]]:
    """Yield the name and the mountpoint of a fork: `name` or one made from the path, and `path`, absolute.

    Makes the directory if it does not exist, and removes it again if the block raises.  ValueError for an invalid name.
    """
    if not os.fspath(path):
        raise ValueError("the mountpoint is an empty string")
    mountpoint = os.path.abspath(path)
    options = MountOptions.of(mountpoint, name or unique_name(mountpoint))
    check_options(options)
    is_new = False
    with contextlib.suppress(FileExistsError):
        os.mkdir(mountpoint)
        is_new = True
    try:
        yield options.workspace.name, mountpoint
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(mountpoint)
        raise


def running_workspace(
    selector: str | None = None,
    *,
    paths: Iterable[str] = (),
    on_only: Callable[[WorkspaceRecord], object] | None = None,
) -> WorkspaceRecord:
    """Return the running workspace that `selector` names, or that contains the path `selector`.

    None selects $VFSD_WORKSPACE, else the workspace that contains the current directory; `find_workspace` describes
    `paths` and `on_only`.  FileNotFoundError if there is none; its message lists the running workspaces.
    """
    try:
        return find_workspace(selector, os.fsdecode(current_directory()), paths=paths, on_only=on_only)
    except WorkspaceNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from None


# -- paths -----------------------------------------------------------------------------------------

_DELETED: Final = b" (deleted)"  # the suffix in proc_pid_cwd(5) if the directory was removed


def current_directory() -> bytes:
    """Return the current directory, even if it was removed (by a restore, for example); b"/" if it is unknown."""
    try:
        return os.getcwdb()
    except FileNotFoundError:
        pass
    try:
        return os.readlink(b"/proc/self/cwd").removesuffix(_DELETED)
    except OSError:
        return b"/"


def workspace_path(path: UserPath, mountpoint: str, cwd: bytes | None = None) -> bytes:
    """Return `path` relative to the root of the workspace at `mountpoint`; b"" is the root.

    An absolute path must be under the mountpoint, or under the directory of an overlay, whose paths are also those of
    the overlay.  A relative path is relative to `cwd` if that is inside the mount, else to the root.  Another mount of
    the workspace, such as the one that `vfsd run` makes, counts as well.
    ValueError if the path leads out of the workspace.
    """
    raw = os.fsencode(path)
    root = os.path.normpath(os.fsencode(mountpoint))
    if os.path.isabs(raw):
        inside = _below(os.path.normpath(raw), root)
        if inside is None:
            inside = _below(_resolved(raw), _resolved(root))
        if inside is None:
            inside = _below_other_mount(raw, root)
        if inside is None:
            inside = _below_lower(raw, root)
    else:
        start = root
        if cwd is not None and _below(cwd, root) is not None:
            start = cwd
        elif cwd is not None:
            start = os.path.join(root, _below_other_mount(cwd, root) or b"")
        inside = _below(os.path.normpath(os.path.join(start, raw)), root)
    if inside is None:
        raise ValueError(f"{os.fsdecode(raw)!r} is not in the workspace at {mountpoint}")
    return inside


def _below_lower(path: bytes, root: bytes) -> bytes | None:
    """Return the absolute `path` relative to the directory of the overlay at `root`; None if it is not below that."""
    for record in read_records():
        if os.fsencode(record.mountpoint) == root and record.backend.startswith("overlay:/"):
            return _below(_resolved(path), _resolved(os.fsencode(record.backend.removeprefix("overlay:"))))
    return None


def wire_paths(paths: Iterable[UserPath], mountpoint: str, cwd: bytes | None = None) -> list[str]:
    """Convert `paths` to wire paths.  The result is empty, for the whole workspace, if one of them is its root.

    OSError (EINVAL) for a path outside the workspace, and for an empty path: it is usually an unset variable, and must
    not mean the whole workspace.
    """
    paths = list(paths)
    if any(not os.fspath(path) for path in paths):
        raise OSError(errno.EINVAL, "a path is an empty string; give no path for the whole workspace")
    try:
        found = [workspace_path(path, mountpoint, cwd) for path in paths]
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from None
    return [] if b"" in found else [wire_path(path) for path in found]


def _below(path: bytes, root: bytes) -> bytes | None:
    """Return `path` (normalized, absolute) relative to `root`, or None if it is not under it."""
    if path == root:
        return b""
    prefix = root.rstrip(b"/") + b"/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def _below_other_mount(path: bytes, root: bytes) -> bytes | None:
    """Return the absolute `path` relative to another mount of the workspace at `root`, or None if it is in none."""
    try:
        mount, own = find_mount(os.fsdecode(path)), mount_at(os.fsdecode(root))
        if mount is None or own is None or not mount.is_vfsd or (mount.device, mount.root) != (own.device, own.root):
            return None
        return _below(os.path.normpath(_resolved(path)), os.fsencode(mount.mountpoint))
    except OSError:  # a cycle of symlinks
        return None


def _resolved(path: bytes) -> bytes:
    """Resolve the symlinks in `path` up to the first FUSE mount; the rest is kept as written."""
    return os.fsencode(resolve(os.fsdecode(path)))
