"""Recovery of an `apply` into a directory that was killed."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from protocol.backends.overlay.intent_log import recover
from vfsd.daemon.backends.shared import directory_of
from vfsd.machine.logs import log_failure

if TYPE_CHECKING:
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)


def recover_apply(options: MountOptions) -> str | None:
    """Finish or undo a killed `apply` into the backend's directory; return a sentence about it, if there was one.

    A daemon that takes over from another one leaves that to the user, because the other one may go on.
    """
    if options.below is not None:
        return None
    directory = options.workspace.backend.argument
    try:
        found = recover(directory_of(options))
    except OSError as error:
        # EBUSY: that apply is still running.  No other failure here prevents the mount.
        if error.errno == errno.EBUSY:
            return None
        log_failure(_logger, "finishing an interrupted apply", error, path=directory, level=logging.WARNING)
        return f"{directory}: an interrupted apply could not be finished: {error.filename or ''}: {error.strerror}"
    if found is None:
        return None
    _logger.warning("%s", found, extra={"path": directory, "workspace": options.workspace.name})
    return f"{directory}: {found}"
