"""The names of engines: the built-in ones, and those that installed packages add.

Packages add an engine with an entry point in the group `vfsd.engines`; `vfsd.kernel.engines.choice` loads and calls it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ENGINES", "ENTRY_POINT_GROUP", "is_engine", "known_engines"]

ENTRY_POINT_GROUP: Final = "vfsd.engines"
ENGINES: Final = ("auto", "native", "pyfuse3")


def is_engine(name: str) -> bool:
    """Whether an engine has this name.  Searches the installed packages only for a name that is not built in."""
    return name in ENGINES or name in known_engines()


def known_engines() -> list[str]:
    """Return the names of all engines, those of installed packages included."""
    from importlib import metadata  # noqa: PLC0415 (start-up: its import takes 40 ms)

    return [*ENGINES, *sorted(metadata.entry_points(group=ENTRY_POINT_GROUP).names - set(ENGINES))]
