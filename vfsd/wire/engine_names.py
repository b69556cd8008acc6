"""The names of engines: the built-in ones, and those that installed packages add.

Packages add an engine with an entry point in the group `vfsd.engines`; `vfsd.kernel.engines.choice` loads and calls it.
"""

from __future__ import annotations

from typing import Final

from vfsd.wire.entry_points import ENGINES_GROUP, entry_point_names

__all__ = ["ENGINES", "is_engine", "known_engines"]

ENGINES: Final = ("auto", "native", "pyfuse3")


def is_engine(name: str) -> bool:
    """Whether an engine has this name.  Searches the installed packages only for a name that is not built in."""
    return name in ENGINES or name in known_engines()


def known_engines() -> list[str]:
    """Return the names of all engines, those of installed packages included."""
    return [*ENGINES, *sorted(entry_point_names(ENGINES_GROUP) - set(ENGINES))]
