"""The method `compact`: replace the journal by an image of the present state."""

from __future__ import annotations

import errno

from vfsd.daemon.compaction import Compaction
from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.forks.forks import Forks
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.wire.messages import CompactResult, Empty


def compact_method(mounted: MountedVolume, forks: Forks) -> Handler:
    """Return the handler.  It fails with EOPNOTSUPP for a workspace without a journal."""

    async def compact(_params: Empty, _call: CallContext) -> CompactResult:
        compaction = Compaction.of(mounted, forks)
        if compaction is None:
            raise OSError(errno.EOPNOTSUPP, "this workspace has no journal: mount it with --persist to keep one")
        return CompactResult(*await compaction.compact())

    return compact
