"""Value behaves like a frozen, slotted dataclass."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import msgspec
import pytest

from protocol.values import Value

if TYPE_CHECKING:
    from fractions import Fraction  # not imported: the fields of a class are known without their types


class Point(Value):
    x: int
    y: int = 0
    names: tuple[str, ...] = ()
    notes: dict[str, int] = msgspec.field(default_factory=dict)
    share: Fraction | None = None

    @property
    def total(self) -> int:
        return self.x + self.y


class NoDefault(Value):
    x: int


def test_it_takes_positions_keywords_and_defaults() -> None:
    assert Point(1) == Point(x=1, y=0, names=(), notes={}, share=None)
    assert Point(1, 2).total == 3
    with pytest.raises(TypeError):
        Point()  # type: ignore[call-arg]


def test_equality_and_hash_are_by_value_and_class() -> None:
    assert NoDefault(1) == NoDefault(1)
    assert hash(NoDefault(1)) == hash(NoDefault(1))
    assert NoDefault(1) != NoDefault(2)
    assert NoDefault(1) != Point(1)


def test_it_is_immutable_and_has_slots() -> None:
    point = Point(1)
    with pytest.raises(AttributeError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        point.z = 2  # type: ignore[attr-defined]


def test_it_can_be_copied_pickled_and_changed_in_a_copy() -> None:
    point = Point(1, 2, ("a",), {"b": 3})
    assert copy.copy(point) == copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == point
    assert msgspec.structs.replace(point, y=5) == Point(1, 5, ("a",), {"b": 3})
    assert msgspec.structs.asdict(Point(1)) == {"x": 1, "y": 0, "names": (), "notes": {}, "share": None}
