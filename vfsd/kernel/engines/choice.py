"""Which engine serves a mount: the one asked for, or for "auto" the native one, where the kernel serves it."""

from __future__ import annotations

import errno
import logging
import shlex
import sys
from typing import TYPE_CHECKING, Final

from vfsd.kernel.engines.native import NativeEngine
from vfsd.machine.logs import log_failure

if TYPE_CHECKING:
    from protocol.volume import Volume
    from vfsd.kernel.engines.base import Engine, EngineSettings, Impersonator
    from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine
    from vfsd.wire.options import EngineChoice

__all__ = ["mount_engine"]

_logger = logging.getLogger(__name__)

# What says that this kernel, or this way of mounting, is nothing for the native engine; not that mounting
# there fails, which it would with the other engine too.
_UNSERVED: Final = frozenset({errno.EPROTONOSUPPORT, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPROTO, errno.ETIMEDOUT})


def mount_engine(
    choice: EngineChoice, volume: Volume, settings: EngineSettings, impersonator: Impersonator | None
) -> Engine:
    """Make the mount and return the engine that is to serve it.  OSError where it cannot be made.

    "auto" falls back to pyfuse3 where the native engine is not served; the engine says why, and the log.  pyfuse3 need
    not be installed until then.
    """
    reason = None
    if choice != "pyfuse3":
        engine = NativeEngine(volume, settings, impersonator)
        try:
            engine.mount()
        except OSError as error:
            if choice == "native" or error.errno not in _UNSERVED:
                raise
            log_failure(_logger, "native engine", error, level=logging.WARNING)
            reason = f"not native: {error.strerror or error}"
        else:
            return engine
    fallback = _pyfuse3_engine(reason)(volume, settings, impersonator, fallback_reason=reason)
    fallback.mount()
    return fallback


def _pyfuse3_engine(reason: str | None) -> type[Pyfuse3Engine]:
    """The engine's class.  OSError (EOPNOTSUPP) where pyfuse3 or libfuse is missing or broken.

    `reason` is why the native engine does not serve, None where nobody asked it.
    """
    try:
        # Start-up: only who needs it loads libfuse.
        from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine  # noqa: PLC0415
    except ImportError as error:
        install = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall pyfuse3"
        text = (
            f"the pyfuse3 engine cannot be loaded ({error}): install it ({install}; `vfsd doctor` names what it needs)"
        )
        raise OSError(errno.EOPNOTSUPP, f"{text}; {reason or 'or use --engine native'}") from None
    return Pyfuse3Engine
