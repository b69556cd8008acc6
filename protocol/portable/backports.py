"""Names of newer versions of Python, under which modules of `protocol` run on Python 3.8 in vfsd-fs.pyz.

`protocol.portable.package` rewrites their imports of `typing`, `dataclasses`, `datetime`, `itertools`, `msgspec` and
`protocol.values` to imports of this module.
"""
# mypy: ignore-errors

import dataclasses
import functools
import inspect
from dataclasses import Field, field, replace
from datetime import datetime, timedelta, timezone
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Container,
    Final,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    cast,
    get_args,
    runtime_checkable,
)

UTC = getattr(timezone, "utc")  # noqa: B009 (datetime.UTC is Python 3.11's)
# Used in annotations only, which are not evaluated.
Self = TypeAlias = Any

if not hasattr(functools, "cache"):
    functools.cache = functools.lru_cache(maxsize=None)

_OPTIONS = frozenset(inspect.signature(dataclasses.dataclass).parameters)


def dataclass(cls=None, **options):
    """`dataclasses.dataclass` without the options that this Python does not have, such as `slots`."""
    known = {name: value for name, value in options.items() if name in _OPTIONS}
    return dataclasses.dataclass(cls, **known)


class Value:
    """`protocol.values.Value` without msgspec: an immutable value, `class Point(Value)` with annotated fields."""

    def __init_subclass__(cls, **_options):
        dataclasses.dataclass(frozen=True)(cls)


def pairwise(values):
    """`itertools.pairwise` of a sequence."""
    return zip(values, values[1:])
