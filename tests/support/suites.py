"""Which tests `make test` runs, and which run in `make test-all` only.

A test is *extended* if it is marked so, or if it repeats another one on an implementation that the short suite covers
elsewhere: `EXTENDED_PARAMETERS` names these parameters by module.  A test marked `short` runs in both, whatever its
module is marked.

    short   what `make test` runs
    rest    the extended tests: what `.ci/run` runs after the short suite
    all     both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, Final, Protocol

import pytest

__all__ = ["EXTENDED_PARAMETERS", "SUITES", "is_extended", "one_of", "with_extended"]

SUITES: Final = ("short", "rest", "all")

_OTHER_PLACES: Final = frozenset(
    {"native-overlay", "native-writeback", "native-archive", "native-snapshot", "pyfuse3-overlay", "pyfuse3-host"}
)
_PYFUSE3: Final = frozenset({"pyfuse3", "pyfuse3-memory", "memory-pyfuse3"})
# The first pattern that fits a module holds.
EXTENDED_PARAMETERS: Final[Sequence[tuple[str, frozenset[str]]]] = (
    # The POSIX contract: on tmpfs, on memory with both engines, on a host directory.
    ("tests/mount/test_semantics_*", _OTHER_PLACES | {"pyfuse3"}),
    # A filesystem's contract, once for each class that implements it.
    ("tests/contract/test_filesystems.py", frozenset({"plain-volume", "host-volume"})),
    ("tests/mount/test_workspace_filesystem.py", frozenset({"host", "overlay", "trio"})),
    ("tests/mount/test_engines.py", frozenset()),
    ("tests/mount/*", _OTHER_PLACES | _PYFUSE3),
    ("tests/container/*", _PYFUSE3 | {"podman exec", "ssh"}),
    ("tests/differential/*", _PYFUSE3 | _OTHER_PLACES),
)


class _Marked(Protocol):
    def get_closest_marker(self, name: str) -> object | None: ...


def is_extended(item: _Marked, module: str, parameters: Mapping[str, object]) -> bool:
    """Whether a test runs in `make test-all` only; `module` is its path below the repository."""
    if item.get_closest_marker("short"):
        return False
    if item.get_closest_marker("extended"):
        return True
    values = {value for value in parameters.values() if isinstance(value, str)}
    for pattern, extended in EXTENDED_PARAMETERS:
        if fnmatch(module, pattern):
            return not extended.isdisjoint(values)
    return False


def with_extended(values: Sequence[Any], short: int) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: the first `short` ones for both suites, the others extended."""
    return [*values[:short], *(pytest.param(value, marks=pytest.mark.extended) for value in values[short:])]


def one_of(values: Sequence[Any], ids: Sequence[str] | None = None) -> Any:
    """A fixture that is each of `values` in turn."""

    @pytest.fixture(params=values, ids=ids)
    def value(request: pytest.FixtureRequest) -> Any:
        return request.param

    return value
