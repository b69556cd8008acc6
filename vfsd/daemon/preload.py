"""The imports of a daemon, in two parts: what the mount needs before it answers, and the rest.

A daemon that is started directly imports the first part as it starts.  It imports the rest in a thread after it has
reported that the mount answers (`import_rest`).  A process that forks daemons imports both parts once (`preload`,
`import_rest`), so that the daemons share the modules' memory.

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

from vfsd.machine.logs import log_failure
from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)

# The order is that of use: a snapshot or a diff is usually the first call.
_REST: Final = (
    "vfsd.daemon.control.method_groups",
    "protocol.archive",
    "protocol.store",
    "protocol.execution.host",
    "protocol.execution.runner",
)


def preload(backends: Iterable[str] = ("memory",), engines: Iterable[str] = ("native",)) -> None:
    """Import what a daemon with one of these kinds of backends and engines needs before its mount answers.

    A kind that cannot be imported is logged: a daemon that uses it reports the error.
    """
    _import("vfsd.daemon.daemon")
    for kind in backends:
        _import(f"vfsd.daemon.backends.{'container' if kind == 'image' else kind}")
    for engine in engines:
        _import(f"vfsd.kernel.engines.{engine}")
    _import("vfsd.daemon.snapshots.volume")


def import_rest() -> None:
    """Import what only calls on the control socket need.

    A module that cannot be imported is logged: the calls that need it fail with the same error.
    """
    for module in _REST:
        _import(module)


def build_decoders() -> None:
    """Have msgspec derive what it needs to decode messages, for a process that forks daemons.

    Otherwise each daemon does that with the first message of a kind: 3 ms of CPU for the options of its mount.
    """
    from vfsd.wire.messages import METHODS  # noqa: PLC0415 (start-up: daemons that are started directly do not need it)

    for kind in (MountOptions, *(params for params, _ in METHODS.values())):
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.json.decode(b"0", type=kind)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (a broken package may raise anything)
        log_failure(_logger, f"importing {module}", error, level=logging.WARNING)
