"""Compiled modules: extensions that mypyc makes of the modules that most requests run through (`make compiled`).

`scripts/compile.py` puts the extensions into this folder, with a record of the sources that they were made of.  An
import of one of these modules loads its extension if all recorded sources are unchanged.  Otherwise every module is
imported from its source, as without extensions: an extension reads the fields of another one's objects directly, so
they are used together or not at all.  With VFSD_COMPILED=0 in the environment the sources are used.

The sources stay ordinary Python.  They follow these rules, because mypyc compiles some constructs differently:

- mypyc accesses a value of type `dict` as a plain dict, without the methods that a subclass overrides, and
  `dict(mapping)` copies any mapping in that way.  So a dict that an overlay replaces by a subclass has the type
  `MutableMapping`, and is copied with `{**mapping}`.
- A class that an interpreted one derives from is `mypyc_attr(allow_interpreted_subclasses=True)`, and so are its bases.
  Compiled classes derive from one class each: with two, methods of the second one would run with the wrong table.
- Calls between compiled classes do not look the method up, so a test replaces a method by a subclass.
- A generator expression is computed as a list, at once.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import source_hash, spec_from_file_location
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(*_flags: str, **_attributes: bool) -> Callable[[type], type]:
        """Tell mypyc how to compile a class; does nothing at run time."""
        return lambda compiled: compiled


FOLDER: Final = os.path.dirname(os.path.abspath(__file__))
ROOT: Final = os.path.dirname(os.path.dirname(FOLDER))
# Extensions are for one version of Python, and so is their record.
RECORD: Final = os.path.join(FOLDER, f"{sys.implementation.cache_tag}.json")
_OFF: Final = "VFSD_COMPILED"


def extension_path(name: str) -> str:
    """Return the path of the extension of module `name`, in the tree that mypyc expects."""
    return os.path.join(FOLDER, *name.split(".")) + EXTENSION_SUFFIXES[0]


def recorded(paths: Sequence[str]) -> dict[str, str]:
    """Return a hash of each source, by its path below the folder of both packages.  OSError."""
    hashes = {}
    for path in paths:
        with open(os.path.join(ROOT, path), "rb") as file:
            hashes[path] = source_hash(file.read()).hex()
    return hashes


class CompiledModules:
    """Finds the extensions of `modules`, which were made of `sources` (`recorded`), for imports."""

    def __init__(self, modules: Sequence[str], sources: dict[str, str]) -> None:
        self._modules = frozenset(modules)
        self._sources = sources
        self._checked: tuple[bool, str] | None = None

    def find_spec(self, name: str, _path: object = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the extension of module `name`, None for another one: see `importlib.abc.MetaPathFinder`."""
        if name not in self._modules or not self.check()[0]:
            return None
        path = extension_path(name)
        return spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))

    def sources(self) -> list[str]:
        """Return the paths of the sources that must not change while the extensions are used."""
        return [os.path.join(ROOT, path) for path in self._sources] if self.check()[0] else []

    def check(self) -> tuple[bool, str]:
        """Return whether the extensions are used, and why not.  Decided once, at the first import."""
        if self._checked is None:
            self._checked = self._check()
        return self._checked

    def _check(self) -> tuple[bool, str]:
        if os.environ.get(_OFF) == "0":
            return False, f"{_OFF}=0"
        if early := self._modules & sys.modules.keys():
            return False, f"{min(early)} was imported before `protocol`"
        for path, expected in self._sources.items():
            try:
                found = recorded([path])[path]
            except OSError:
                found = ""
            if found != expected:
                return False, f"{path} has changed since `make compiled`"
        return True, ""


def _load() -> CompiledModules | None:
    if not os.path.exists(RECORD):
        return None
    import json  # noqa: PLC0415 start-up: most installations have no record

    with open(RECORD, "rb") as file:
        record = json.load(file)
    return CompiledModules(record["modules"], record["sources"])


_found: Final = _load()
if _found is not None:
    sys.meta_path.insert(0, _found)


def sources() -> list[str]:
    """Return the sources of the extensions that this process uses."""
    return [] if _found is None else _found.sources()


def build() -> tuple[str, str]:
    """Return "compiled" or "interpreted", and why extensions that exist are not used."""
    used, reason = (False, "") if _found is None else _found.check()
    return "compiled" if used else "interpreted", reason
