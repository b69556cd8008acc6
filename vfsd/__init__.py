"""vfsd: makes a volume a mount, and drives it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vfsd.results import Applied as Applied
    from vfsd.results import Change as Change
    from vfsd.results import Counts as Counts
    from vfsd.results import Diff as Diff
    from vfsd.results import Exported as Exported
    from vfsd.results import Imported as Imported
    from vfsd.results import Patch as Patch
    from vfsd.results import Restored as Restored
    from vfsd.results import Snapshot as Snapshot
    from vfsd.results import Status as Status
    from vfsd.results import Unmounted as Unmounted
    from vfsd.workspace import AsyncWorkspace as AsyncWorkspace
    from vfsd.workspace import Workspace as Workspace

__version__: Final = "0.1.0"

# Imported when they are first used: `import vfsd`, which the command line begins with, costs nothing.
_EXPORTS: Final = {
    "AsyncWorkspace": "vfsd.workspace",
    "Workspace": "vfsd.workspace",
    "Applied": "vfsd.results",
    "Change": "vfsd.results",
    "Counts": "vfsd.results",
    "Diff": "vfsd.results",
    "Exported": "vfsd.results",
    "Imported": "vfsd.results",
    "Patch": "vfsd.results",
    "Restored": "vfsd.results",
    "Snapshot": "vfsd.results",
    "Status": "vfsd.results",
    "Unmounted": "vfsd.results",
}

__all__ = [
    "Applied",
    "AsyncWorkspace",
    "Change",
    "Counts",
    "Diff",
    "Exported",
    "Imported",
    "Patch",
    "Restored",
    "Snapshot",
    "Status",
    "Unmounted",
    "Workspace",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    except ImportError as error:
        from vfsd.foreign import foreign_protocol  # noqa: PLC0415 start-up: an error has time

        reason = foreign_protocol() if (error.name or "").partition(".")[0] == "protocol" else None
        if reason is None:
            raise
        raise ImportError(reason) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
