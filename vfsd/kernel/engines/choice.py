"""The registry of engines, and the choice of the engine that serves a mount.

A package adds an engine with an entry point in the group `vfsd.engines`:

    [project.entry-points."vfsd.engines"]
    toy = "my_package:ToyEngine"

Then `vfsd mount DIR --engine toy` calls `ToyEngine(volume, settings, impersonator)`, an `EngineFactory`.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Final

from vfsd.machine.interpreter import install_command
from vfsd.machine.logs import log_failure
from vfsd.wire.options import ENGINES_GROUP, known_engines, load_entry_point

if TYPE_CHECKING:
    from protocol.volume import Volume
    from vfsd.kernel.engines.base import Engine, EngineFactory, EngineSettings, Impersonator, ResumedMount
    from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine

_logger = logging.getLogger(__name__)

# Errors that mean that the native engine cannot work with this kernel or this kind of mount.  The other errors of
# mounting, such as EPERM, would fail with pyfuse3 too.
_UNSUPPORTED: Final = frozenset({errno.EPROTONOSUPPORT, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPROTO, errno.ETIMEDOUT})


def mount_engine(choice: str, volume: Volume, settings: EngineSettings, impersonator: Impersonator | None) -> Engine:
    """Mount `volume` and return the engine that will serve it.  OSError if the mount cannot be made.

    `choice` is the name of an engine, or "auto": native, and pyfuse3 if this kernel does not support native; the
    engine's `fallback_reason` and the log say why.  Only then pyfuse3, an extra, has to be installed.
    EINVAL if there is no engine of that name, EOPNOTSUPP if it cannot be imported.
    """
    from vfsd.kernel.engines.native import NativeEngine  # noqa: PLC0415 (an attached directory needs no engine)

    reason = None
    if choice == "auto":
        native = NativeEngine(volume, settings, impersonator)
        try:
            native.mount()
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            if settings.write_back:  # pyfuse3 does not offer it here
                raise
            log_failure(_logger, "native engine", error, level=logging.WARNING)
            reason = f"not native: {error.strerror or error}"
        else:
            return native
    engine: Engine
    if choice in {"auto", "pyfuse3"}:
        engine = _import_pyfuse3(reason)(volume, settings, impersonator, fallback_reason=reason)
    else:
        factory = NativeEngine if choice == "native" else _load_factory(choice)
        engine = factory(volume, settings, impersonator)
    engine.mount()
    return engine


def resume_engine(
    volume: Volume, settings: EngineSettings, impersonator: Impersonator | None, mount: ResumedMount
) -> Engine:
    """Return the engine that continues to serve `mount`.  See `ResumableEngine.resume`."""
    from vfsd.kernel.engines.native import NativeEngine  # noqa: PLC0415 (as above)

    engine = NativeEngine(volume, settings, impersonator)
    engine.resume(mount)
    return engine


def _import_pyfuse3(reason: str | None) -> type[Pyfuse3Engine]:
    """Import the pyfuse3 engine.  OSError (EOPNOTSUPP) if pyfuse3 or libfuse is missing or broken.

    `reason` is why the native engine does not serve, None if pyfuse3 was requested.
    """
    try:
        # Start-up: libfuse is loaded only if this engine is needed.
        from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine  # noqa: PLC0415
    except ImportError as error:
        install = install_command("pyfuse3")
        text = (
            f"the pyfuse3 engine cannot be loaded ({error}): install it ({install}; `vfsd doctor` names what it needs)"
        )
        raise OSError(errno.EOPNOTSUPP, f"{text}; {reason or 'or use --engine native'}") from None
    return Pyfuse3Engine


def _load_factory(name: str) -> EngineFactory:
    factory: EngineFactory | None = load_entry_point(ENGINES_GROUP, name)
    if factory is None:
        raise OSError(errno.EINVAL, f"there is no engine {name!r}: use one of {', '.join(known_engines())}")
    return factory
