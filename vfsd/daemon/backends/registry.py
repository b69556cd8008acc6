"""The registry of backends: maps the kind in a backend string to the function that opens the volume.

A package adds a kind with an entry point in the group `vfsd.backends`:

    [project.entry-points."vfsd.backends"]
    toy = "my_package:open_toy"

Then `vfsd mount DIR --backend toy:ARGUMENT` calls `open_toy(options, progress)`, a `BackendOpener`.
"""

from __future__ import annotations

import contextlib
import errno
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from protocol.tree import ByteProgress, no_progress
from vfsd.wire.options import BACKENDS_GROUP, known_backends, load_entry_point

if TYPE_CHECKING:
    from vfsd.daemon.backends.base import Backend, BackendOpener
    from vfsd.wire.options import MountOptions

# Module and function of each built-in kind.  Start-up: a daemon imports only the backend that it serves.
_BUILT_IN: Final = {
    "memory": ("vfsd.daemon.backends.memory", "open_memory"),
    "overlay": ("vfsd.daemon.backends.overlay", "open_overlay"),
    "host": ("vfsd.daemon.backends.host", "open_host"),
    "container": ("vfsd.daemon.backends.container", "open_container"),
    "image": ("vfsd.daemon.backends.container", "open_container"),
    "exec": ("vfsd.daemon.backends.exec", "open_exec"),
}


# What an opener imports only when it is called, because it takes long.
_DEFERRED: Final = dict.fromkeys(("container", "image"), "protocol.backends.container.workspace")


def import_backend(kind: str) -> None:
    """Import what opening a backend of `kind` imports, so that processes that are forked later have it already.

    A package that is missing is reported when the backend is opened.
    """
    with contextlib.suppress(ImportError):
        load_opener(kind)
        if kind in _DEFERRED:
            import_module(_DEFERRED[kind])


def read_sources(kind: str) -> None:
    """Read the programs that a backend of `kind` starts at the other end, which have to fit this process's modules."""
    if kind in {"container", "image", "exec"}:
        from protocol.backends.container.agent import helper_transport  # noqa: PLC0415 (start-up)

        helper_transport.read_sources()


def open_backend(options: MountOptions, progress: ByteProgress = no_progress) -> Backend:
    """Open the backend that `options` name.  OSError, ValueError, ArchiveError.  Runs in a worker thread.

    OSError with EOPNOTSUPP if the kind is unknown, or the package that provides it cannot be imported.
    """
    kind = options.workspace.backend.kind
    opener = load_opener(kind)
    if opener is None:
        reason = f"there is no backend {kind!r}: use one of {', '.join(known_backends())}"
        raise OSError(errno.EOPNOTSUPP, reason)
    return opener(options, progress)


def load_opener(kind: str) -> BackendOpener | None:
    """Import the function that opens backends of `kind`; None if the kind is unknown.

    OSError (EOPNOTSUPP) if the package that provides it cannot be imported.
    """
    opener: Any
    if kind in _BUILT_IN:
        module, function = _BUILT_IN[kind]
        opener = getattr(import_module(module), function)
    else:
        opener = load_entry_point(BACKENDS_GROUP, kind)
    return opener  # type: ignore[no-any-return]
