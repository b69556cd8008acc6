"""The imports of a daemon, in two parts: what the mount needs before it answers, and the rest.

A daemon that is started directly imports the first part as it starts.  It imports the rest in a thread after it has
reported that the mount answers (`import_rest`), and so does its keeper, for the daemons that it starts later.  A
process that forks daemons imports both parts once (`preload`, `import_rest`), so that the daemons share the modules'
memory.

Nothing of vfsd is imported later than that, except for sandboxes: `pip install --upgrade` replaces the files under a
running daemon, and modules of two versions do not fit together.

Threading: while `import_rest` runs, no other thread imports these modules; two threads that import one package from
different ends can deadlock.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterable
from typing import Final

import msgspec

from vfsd.daemon.backends import registry
from vfsd.machine.logs import log_failure
from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)

# The order is that of use: a snapshot or a diff is usually the first call.
_REST: Final = (
    "vfsd.daemon.control.handlers.workspace",
    "vfsd.daemon.backends.persistence",
    "vfsd.daemon.snapshots.volume",
    "vfsd.daemon.policy.service",
    "vfsd.daemon.upgrading.giving",
    "protocol.merge.three_way",
    "encodings.ascii",
    "protocol.archive",
    "protocol.store",
    "protocol.store.object_store.upkeep",
    "protocol.store.object_store.transfer",
    "protocol.execution.host",
    "protocol.execution.runner",
)

_OF_JOURNALS: Final = (
    "protocol.backends.memory.journaling.handover",
    "protocol.backends.memory.journaling.changes",
    "protocol.backends.memory.journaling.recorder",
    "protocol.backends.memory.journaling.replay",
)
_OF_DIRECTORIES: Final = (
    "protocol.backends.host.known_inodes",
    "protocol.backends.host.repeated_requests",
    "vfsd.daemon.forks.stored",
    "vfsd.daemon.snapshots.stored",
)
_OF_CONTAINERS: Final = (
    *_OF_DIRECTORIES,
    "protocol.backends.container.exec.runner",
    "protocol.backends.container.snapshot_files",
)
_OF_KIND: Final = {
    "memory": _OF_JOURNALS,
    "overlay": (
        *_OF_JOURNALS,
        "protocol.backends.overlay.journaling.recorder",
        "protocol.backends.overlay.journaling.replay",
        "protocol.backends.overlay.known_inodes",
        "protocol.archive.mounted",
        "vfsd.daemon.backends.lower_remote",
        "vfsd.machine.whole_machine",
    ),
    "host": _OF_DIRECTORIES,
    "container": _OF_CONTAINERS,
    "image": _OF_CONTAINERS,
    "exec": _OF_DIRECTORIES,
}


def preload(backends: Iterable[str] = ("memory",), engines: Iterable[str] = ("native",)) -> None:
    """Import what a daemon with one of these kinds of backends and engines needs before its mount answers.

    A kind that cannot be imported is logged: a daemon that uses it reports the error.
    """
    _import("vfsd.daemon.daemon")
    for kind in backends:
        for module in registry.modules_of(kind):
            _import(module)
    for engine in engines:
        _import(f"vfsd.kernel.engines.{engine}")
    _import("vfsd.daemon.snapshots.volume")


def import_rest(kind: str = "memory") -> None:
    """Import what a daemon with a backend of `kind` needs later: for calls on the control socket, to continue a mount.

    A module that cannot be imported is logged: the calls that need it fail with the same error.
    """
    for module in (*_REST, *_OF_KIND.get(kind, ())):
        _import(module)
    registry.read_sources(kind)


def build_decoders() -> None:
    """Have msgspec derive what it needs to decode messages, for a process that forks daemons.

    Otherwise each daemon does that with the first message of a kind: 3 ms of CPU for the options of its mount.
    """
    # Start-up: daemons that are started directly do not need it.
    from vfsd.operations.catalogue import OPERATIONS  # noqa: PLC0415

    for kind in (MountOptions, *(operation.params for operation in OPERATIONS.values())):
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.json.decode(b"0", type=kind)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (a broken package may raise anything)
        log_failure(_logger, f"importing {module}", error, level=logging.WARNING)
