"""Detect that the installation changed after its modules were imported."""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Final

_PACKAGES: Final = ("protocol", "vfsd")


class LoadedFiles:
    """The files of the loaded modules, the interpreter and the directories of installed packages.

    `started_ns`: when the imports began.  A file that is as new may have changed after it was read.
    """

    def __init__(self, started_ns: int) -> None:
        self._stats = {path: _stat(path) for path in _paths()}
        self._are_older = all(stat is not None and stat[0] < started_ns for stat in self._stats.values())

    def changed(self) -> bool:
        """Whether a file changed, or may have changed, since it was imported."""
        return not self._are_older or any(_stat(path) != stat for path, stat in self._stats.items())


def _paths() -> set[str]:
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES]
    files = {path for module in modules if (path := getattr(module, "__file__", None))}
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return files | {path for path in installed if os.path.isdir(path)} | {os.path.realpath(sys.executable)}


def _stat(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
