"""Value: the base of the immutable types that are imported with every daemon and client.

`@dataclass(frozen=True, slots=True)` compiles source code for each class, which takes 0.5 to 1 ms of each start.  A
`msgspec.Struct` takes 0.02 ms and behaves alike: positional and keyword arguments, equality and hash by value, slots,
AttributeError on assignment.  `dataclasses.fields`, `replace` and `asdict` work with it.

A default that is a mutable object needs `msgspec.field(default_factory=...)`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, dataclass_transform

import msgspec

if TYPE_CHECKING:
    from dataclasses import Field
    from typing import ClassVar

__all__ = ["Value"]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True):
    """An immutable value: `class Point(Value)` with annotated fields."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class _DataclassAttribute:
    """An attribute by which `dataclasses` and `pprint` know a dataclass, computed when it is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type[Value]) -> Any:
        return getattr(_dataclass_of(owner), self._name)


@functools.cache  # milliseconds, and `dataclasses.replace` asks each time
def _dataclass_of(owner: type[Value]) -> type:
    import dataclasses  # noqa: PLC0415 (start-up: few programs ask for it)

    names, defaults = owner.__struct_fields__, owner.__struct_defaults__
    with_default = dict(zip(reversed(names), reversed(defaults), strict=False))
    fields: list[tuple[str, Any, Any]] = []
    for name in names:
        default = with_default.get(name, msgspec.NODEFAULT)
        if default is msgspec.NODEFAULT:
            fields.append((name, Any, dataclasses.field()))
        elif isinstance(default, _FACTORY):
            fields.append((name, Any, dataclasses.field(default_factory=default.factory)))
        else:
            fields.append((name, Any, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(owner.__name__, fields)


class _Probe(msgspec.Struct):
    value: dict[str, int] = msgspec.field(default_factory=dict)


_FACTORY: Final[Any] = type(_Probe.__struct_defaults__[0])  # msgspec does not export the type of a default factory
for _name in ("__dataclass_fields__", "__dataclass_params__"):
    setattr(Value, _name, _DataclassAttribute(_name))
