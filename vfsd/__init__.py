"""vfsd: mount a volume as a workspace, and drive it from Python.  `vfsd.Workspace` is the API."""

from __future__ import annotations

import importlib

# Not from `typing`, whose import takes 10 ms, in which nothing can catch the Ctrl-C of someone who runs `vfsd`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from vfsd.client.async_workspace import AsyncWorkspace as AsyncWorkspace
    from vfsd.client.log import LoggedChange as LoggedChange
    from vfsd.client.log import LoggedProcess as LoggedProcess
    from vfsd.client.log import Missed as Missed
    from vfsd.client.results import Applied as Applied
    from vfsd.client.results import Change as Change
    from vfsd.client.results import Conflict as Conflict
    from vfsd.client.results import Conflicts as Conflicts
    from vfsd.client.results import Counts as Counts
    from vfsd.client.results import Diff as Diff
    from vfsd.client.results import Exported as Exported
    from vfsd.client.results import Imported as Imported
    from vfsd.client.results import Merged as Merged
    from vfsd.client.results import Patch as Patch
    from vfsd.client.results import Policy as Policy
    from vfsd.client.results import Repository as Repository
    from vfsd.client.results import Restored as Restored
    from vfsd.client.results import Reverted as Reverted
    from vfsd.client.results import Snapshot as Snapshot
    from vfsd.client.results import Status as Status
    from vfsd.client.results import Unmounted as Unmounted
    from vfsd.client.results import Upgraded as Upgraded
    from vfsd.client.workspace import Workspace as Workspace

__version__: Final = "0.1.0"

# Imported on first use, because the command line starts with `import vfsd`.
_MODULES: Final = {
    "vfsd.client.results": (
        "Applied",
        "Change",
        "Conflict",
        "Conflicts",
        "Counts",
        "Diff",
        "Exported",
        "Imported",
        "Merged",
        "Patch",
        "Policy",
        "Repository",
        "Restored",
        "Reverted",
        "Snapshot",
        "Status",
        "Unmounted",
        "Upgraded",
    ),
    "vfsd.client.log": ("LoggedChange", "LoggedProcess", "Missed"),
    "vfsd.client.async_workspace": ("AsyncWorkspace",),
    "vfsd.client.workspace": ("Workspace",),
}
_EXPORTS: Final = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604 (the keys are strings)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    except ImportError as error:
        from vfsd.machine.interpreter import foreign_protocol  # noqa: PLC0415 start-up: an error has time

        reason = foreign_protocol() if (error.name or "").partition(".")[0] == "protocol" else None
        if reason is None:
            raise
        raise ImportError(": ".join(reason)) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
