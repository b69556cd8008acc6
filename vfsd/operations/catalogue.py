"""All operations, by the names of their methods."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Final

from vfsd.operations import forks, fs, snapshots, workspace
from vfsd.operations.declaration import Operation

_MODULES: Final = (workspace, snapshots, forks, fs)
OPERATIONS: Final[Mapping[str, Operation]] = {
    each.name: each for each in chain.from_iterable(module.OPERATIONS for module in _MODULES)
}
