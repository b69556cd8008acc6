"""Errors of methods whose files are in a container that does not run."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Mapping
from typing import Any, Final

from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.mounted_volume import MountedVolume

# What the mount answers while no container is connected, and the root directory that could not be examined.
_LOST: Final = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN})


def with_advice(handlers: Mapping[str, Handler], mounted: MountedVolume) -> Mapping[str, Handler]:
    """Make `handlers` report a container that is not connected, and what to do, instead of the mount's bare errors."""
    if mounted.container is None:
        return handlers
    return {name: _advising(handler, mounted) for name, handler in handlers.items()}


def _advising(handler: Handler, mounted: MountedVolume) -> Handler:
    @functools.wraps(handler)
    async def answer(params: Any, call: CallContext) -> Any:
        try:
            return await handler(params, call)
        except OSError as error:
            container = mounted.container
            if container is None or container.is_connected or not _is_of_mount(error, mounted.mountpoint):
                raise
            raise OSError(errno.EIO, await container.advice()) from error

    return answer


def _is_of_mount(error: OSError, mountpoint: str) -> bool:
    """Whether the kernel or the volume raised `error`: an error with a text of its own says more than the advice."""
    if error.errno is None or error.strerror not in (None, os.strerror(error.errno)):
        return False
    # os.path.isdir(mountpoint) is False on EIO, which is reported as ENOENT or ENOTDIR.
    return error.errno in _LOST or error.filename == mountpoint
