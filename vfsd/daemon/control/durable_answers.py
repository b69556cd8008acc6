"""Answers of the control socket that wait until what they say is on disk: `--fsync always`.

Threading: the serving loop, which serves other requests while an answer waits.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from protocol.volume_durability import journaled
from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.mounted_volume import MountedVolume


def synced(handler: Handler, mounted: MountedVolume) -> Handler:
    """Have `handler` return when everything that was recorded until then is on disk."""

    @functools.wraps(handler)
    async def answer(params: Any, call: CallContext) -> Any:
        result = await handler(params, call)
        journal = journaled(mounted.volume)  # an unmount, and an upgrade, have ended it
        wait = None if journal is None else journal.unsynced(of_request=False)
        if wait is not None:
            try:
                await wait()
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise OSError(error.errno, f"it was done, but the journal could not be synced ({reason})") from error
        return result

    return answer
