"""Engines and backends that installed packages add with entry points, and the names of all engines.

The installed packages are searched only for a name that is not built in, because the search takes about 40 ms.
"""

from __future__ import annotations

import errno
from typing import Any, Final

BACKENDS_GROUP: Final = "vfsd.backends"
ENGINES_GROUP: Final = "vfsd.engines"
ENGINES: Final = ("auto", "native", "pyfuse3")  # the built-in ones


def entry_point_names(group: str) -> set[str]:
    """Return the names that installed packages add to `group`."""
    from importlib import metadata  # noqa: PLC0415 (start-up: see above)

    return metadata.entry_points(group=group).names


def is_engine(name: str) -> bool:
    """Whether an engine has this name."""
    return name in ENGINES or name in known_engines()


def known_engines() -> list[str]:
    """Return the names of all engines, those of installed packages included."""
    return [*ENGINES, *sorted(entry_point_names(ENGINES_GROUP) - set(ENGINES))]


def load_entry_point(group: str, name: str) -> Any:
    """Import the object that the entry point `name` of `group` refers to; None if there is no such entry point.

    OSError (EOPNOTSUPP) if it cannot be imported.
    """
    from importlib import metadata  # noqa: PLC0415 (start-up: see above)

    for entry_point in metadata.entry_points(group=group, name=name):
        try:
            return entry_point.load()
        except (ImportError, AttributeError) as error:
            kind = "engine" if group == ENGINES_GROUP else "backend"
            reason = f"the {kind} {name!r} ({entry_point.value}) cannot be imported: {error}"
            raise OSError(errno.EOPNOTSUPP, reason) from error
    return None
